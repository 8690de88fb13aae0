//! Requests that are odd, and what becomes of their heads and bodies.

use crate::support::*;
use bytes::Bytes;
use forebay_proxy::http::{Limits, ServedName, retry::Reason};
use http::{Request, StatusCode};
use http_body_util::Full;
use std::time::Duration;

const CHAT_WHOLE: &str = r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}]}"#;

/// Models that nobody serves, and fields that come twice.
#[tokio::test]
async fn requests_that_name_no_pool() {
    let engine = FakeEngine::start(|_| json("200 OK", chat_json("x"))).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    let path = "/v1/chat/completions";
    let answer = post(Http::One, &gateway.address, path, r#"{"model":"nope"}"#).await;
    assert_eq!(answer.status, 404);
    let error = answer.json()["error"].clone();
    assert_eq!(error["code"], "model_not_found");
    assert_eq!(error["param"], "model");
    assert!(error["message"].to_string().contains("tiny"), "{error}");
    let answer = post(
        Http::One,
        &gateway.address,
        "/v1/messages",
        r#"{"model":"nope"}"#,
    )
    .await;
    assert_eq!(answer.json()["error"]["type"], "not_found_error");
    assert_eq!(answer.json()["type"], "error");

    for (field, body) in [
        ("model", r#"{"model":"tiny","model":"tiny"}"#),
        (
            "cache_salt",
            r#"{"model":"tiny","cache_salt":"a","cache_salt":"b"}"#,
        ),
        ("priority", r#"{"model":"tiny","priority":1,"priority":1}"#),
    ] {
        let answer = post(Http::One, &gateway.address, path, body).await;
        assert_eq!(answer.status, 400, "{field}");
        assert_eq!(answer.json()["error"]["param"], field);
    }
    assert_eq!(engine.seen().len(), 0);
    gateway.idle().await;
}

/// One model: whatever cannot be read is the engine's to judge.
#[tokio::test]
async fn odd_input_with_one_model() {
    let engine = FakeEngine::start(|_| json("200 OK", chat_json("x"))).await;
    let mut setup = Setup::tiny(&[&engine]);
    setup.limits = Limits {
        peek_cap: 1000,
        hard_cap: 4000,
        memory: 1 << 20,
    };
    let gateway = setup.start().await;
    let large = format!("{{\"model\":\"tiny\",\"x\":\"{}\"}}", "y".repeat(2000));
    for (number, body) in ["", "not JSON", "{}", r#"{"model":null}"#, "[1]", &large]
        .iter()
        .enumerate()
    {
        let answer = post(Http::One, &gateway.address, "/v1/chat/completions", *body).await;
        assert_eq!(answer.status, 200, "{body}");
        assert_eq!(engine.seen()[number].body, body.as_bytes());
    }
    let encoded = Request::post("/v1/chat/completions")
        .header("content-encoding", "gzip")
        .body(Full::new(Bytes::from_static(b"\x1f\x8bxx")))
        .unwrap();
    let answer = send(Http::One, &gateway.address, encoded).await;
    assert_eq!(answer.status, 200);
    let seen = engine.seen().pop().unwrap();
    assert_eq!(seen.body, b"\x1f\x8bxx");
    assert_eq!(seen.headers["content-encoding"], "gzip");

    let huge = "z".repeat(5000);
    let answer = post(Http::One, &gateway.address, "/v1/chat/completions", huge).await;
    assert_eq!(answer.status, 413);
    assert!(answer.text().contains("4000"), "{}", answer.text());
    gateway.idle().await;
}

/// Several models: what cannot be told apart is refused, with the reason.
#[tokio::test]
async fn odd_input_with_several_models() {
    let a = FakeEngine::start(|_| json("200 OK", chat_json("a"))).await;
    let b = FakeEngine::start(|_| json("200 OK", chat_json("b"))).await;
    let mut setup = Setup::tiny(&[&a]);
    setup.models.push((
        vec![ServedName::own("big"), ServedName::alias("large", "big")],
        vec![b.address.clone()],
    ));
    setup.limits = Limits {
        peek_cap: 1000,
        hard_cap: 4000,
        memory: 1 << 20,
    };
    let gateway = setup.start().await;
    let path = "/v1/chat/completions";
    let large = format!("{{\"model\":\"tiny\",\"x\":\"{}\"}}", "y".repeat(2000));
    for (body, status, code) in [
        ("{}", 400, "model_missing"),
        ("", 400, "model_missing"),
        ("not JSON", 400, "body_unreadable"),
        (&*large, 413, "body_too_large"),
    ] {
        let answer = post(Http::One, &gateway.address, path, body).await;
        assert_eq!(answer.status, status, "{body}");
        assert_eq!(answer.json()["error"]["code"], code, "{body}");
    }
    assert!(
        post(Http::One, &gateway.address, path, large)
            .await
            .text()
            .contains("1000")
    );

    // An alias is rewritten, every other byte stays.
    let body = r#"{ "x" : 1, "model":"large"  ,"y":"large"}"#;
    let answer = post(Http::One, &gateway.address, path, body).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        String::from_utf8_lossy(&b.seen()[0].body),
        r#"{ "x" : 1, "model":"big"  ,"y":"large"}"#
    );
    assert_eq!(a.seen().len(), 0);
    gateway.idle().await;
}

/// I11, I12: what is on no list reaches no engine.
#[tokio::test]
async fn unknown_paths_end_here() {
    let engine = FakeEngine::start(|_| json("200 OK", "{}")).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    for path in [
        "/sleep",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/server_info",
        "/invocations",
        "/v1//chat/completions",
        "/metrics",
    ] {
        let answer = post(Http::One, &gateway.address, path, "{}").await;
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(answer.json()["error"]["code"], "not_found");
    }
    let answer = get(Http::One, &gateway.address, "/v1/chat/completions").await;
    assert_eq!(answer.status, 405);
    assert_eq!(answer.headers["allow"], "POST, OPTIONS");
    assert_eq!(engine.seen().len(), 0);

    for path in ["/health", "/version?x=1"] {
        assert_eq!(get(Http::Two, &gateway.address, path).await.status, 200);
        assert_eq!(engine.seen().pop().unwrap().target, path);
    }
    let answer = post(
        Http::One,
        &gateway.address,
        "/tokenize",
        r#"{"prompt":"x"}"#,
    )
    .await;
    assert_eq!(answer.status, StatusCode::OK);
    gateway.endpoints()[0].set_ready(false);
    let answer = get(Http::One, &gateway.address, "/health").await;
    assert_eq!(answer.status, 503);
    gateway.idle().await;
}

/// Request ids: kept if sane, made if not, the same on both sides.
#[tokio::test]
async fn request_ids() {
    let engine = FakeEngine::start(|_| json("200 OK", chat_json("x"))).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    let with = |id: Option<&str>| {
        let mut request = Request::post("/v1/chat/completions");
        if let Some(id) = id {
            request = request.header("x-request-id", id);
        }
        request
            .body(Full::new(Bytes::from_static(CHAT_WHOLE.as_bytes())))
            .unwrap()
    };
    let answer = send(Http::One, &gateway.address, with(Some("mine-1"))).await;
    assert_eq!(answer.headers["x-request-id"], "mine-1");
    assert_eq!(engine.seen()[0].headers["x-request-id"], "mine-1");
    for id in [None, Some("no good")] {
        let answer = send(Http::One, &gateway.address, with(id)).await;
        let given = answer.headers["x-request-id"].to_str().unwrap();
        assert_eq!(given.len(), 32);
        assert_eq!(engine.seen().pop().unwrap().headers["x-request-id"], given);
    }
}

/// A body of unknown length that turns out to be over the hard cap: the client is told, and the engine that was being
/// sent it is not blamed.
#[tokio::test]
async fn uploads_that_fail_are_no_failures_of_the_engine() {
    let engine = FakeEngine::start(|_| json("200 OK", chat_json("x"))).await;
    let mut setup = Setup::tiny(&[&engine]);
    setup.limits = Limits {
        peek_cap: 1000,
        hard_cap: 4000,
        memory: 1 << 20,
    };
    let gateway = setup.start().await;
    for _ in 0..8 {
        let mut raw =
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"
                .to_vec();
        for _ in 0..10 {
            raw.extend_from_slice(b"1f4\r\n");
            raw.extend_from_slice(&[b'x'; 500]);
            raw.extend_from_slice(b"\r\n");
        }
        let mut client = RawClient::write(&gateway.address, &raw).await;
        let answer = client.read_until("\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    }
    let status = gateway.endpoints()[0].status(tokio::time::Instant::now());
    assert!(!status.breaker_open);
    let retry = &gateway.metrics.retry;
    assert_eq!(
        retry.retries(Reason::broken) + retry.retries(Reason::connect),
        0
    );
    let answer = post(
        Http::One,
        &gateway.address,
        "/v1/chat/completions",
        CHAT_WHOLE,
    )
    .await;
    assert_eq!(answer.status, 200);
    gateway.idle().await;
}

/// The endpoint is named if the policy asks for it.
#[tokio::test]
async fn endpoints_are_named_on_demand() {
    let engine = FakeEngine::start(|_| json("200 OK", chat_json("x"))).await;
    for wanted in [false, true] {
        let gateway = Setup::tiny(&[&engine])
            .policy(|p| p.endpoint_header = wanted)
            .start()
            .await;
        let answer = post(
            Http::One,
            &gateway.address,
            "/v1/chat/completions",
            CHAT_WHOLE,
        )
        .await;
        let named = answer
            .headers
            .get("x-forebay-endpoint")
            .map(|v| v.to_str().unwrap());
        assert_eq!(named, wanted.then_some(&*engine.address));
    }
}

/// I4, I5: whatever tricks a client plays with framing, an engine sees at most the one request that the gateway saw.
#[tokio::test]
async fn nothing_is_smuggled() {
    let engine = FakeEngine::start(|_| json("200 OK", chat_json("x"))).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    let inner = "0\r\n\r\nPOST /smuggled HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n";
    for fields in [
        "content-length: 5\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked\r\ncontent-length: 5",
        "transfer-encoding: chunked\r\ntransfer-encoding: identity",
        "transfer-encoding: identity, chunked",
        "transfer-encoding: chunked, identity",
        "transfer-encoding: chunked\t",
        "transfer-encoding: xchunked",
        "transfer-encoding : chunked",
        "content-length: 5\r\ncontent-length: 70",
        "content-length: 5, 5",
        "content-length: +5",
        "x: y\r\n transfer-encoding: chunked",
    ] {
        let raw =
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n{fields}\r\n\r\n{inner}");
        let client = RawClient::write(&gateway.address, raw.as_bytes()).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        client.leave();
    }
    gateway.idle().await;
    let seen = engine.seen();
    assert!(
        seen.iter().all(|s| s.target == "/v1/chat/completions"),
        "{seen:?}"
    );
    for seen in &seen {
        let text = String::from_utf8_lossy(&seen.body);
        assert!(!text.contains("smuggled"), "{text}");
    }
}
