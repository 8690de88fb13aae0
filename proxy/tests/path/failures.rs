//! What clients see when engines fail, row by row.

use crate::support::*;
use forebay_proxy::http::{
    hold::Refusal,
    record::Outcome,
    retry::{Reason, WhyNot},
};
use std::time::Duration;
use tower_ttft::{peek::Api, policy::Routing};

const CHAT: &str = r#"{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
const CHAT_WHOLE: &str = r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}]}"#;

/// Two engines of which whoever is asked first does this, and the other one answers well.
async fn pair(bad: Vec<Step>) -> (FakeEngine, FakeEngine, Setup) {
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let script = |asked: std::sync::Arc<std::sync::atomic::AtomicUsize>, bad: Vec<Step>| {
        move |seen: &Seen| {
            if asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0 {
                return bad.clone();
            }
            let body = String::from_utf8_lossy(&seen.body);
            if body.contains("\"stream\":true") {
                chat_stream(&["good"])
            } else {
                json("200 OK", chat_json("good"))
            }
        }
    };
    let a = FakeEngine::start(script(asked.clone(), bad.clone())).await;
    let b = FakeEngine::start(script(asked, bad)).await;
    let setup = Setup::tiny(&[&a, &b]);
    (a, b, setup)
}

/// Every way to fail before the answer is committed costs the client nothing.
#[tokio::test]
async fn other_endpoints_make_good() {
    let aborted_whole = r#"{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"","finish_reason":"abort"}]}"#;
    let early_role = "data: {\"choices\":[{\"delta\":{\"role\":\"assi";
    let cases: Vec<(&str, Vec<Step>, Option<Refusal>, &str)> = vec![
        ("closed without a word", vec![Step::Fin], None, CHAT),
        ("reset without a word", vec![Step::Rst], None, CHAT),
        (
            "half a head",
            vec![Step::Write("HTTP/1.1 2".into()), Step::Fin],
            None,
            CHAT,
        ),
        (
            "no HTTP",
            vec![Step::Write("SSH-2.0\r\n\r\n".into()), Step::Fin],
            None,
            CHAT,
        ),
        (
            "a head and no more",
            vec![sse_head(), Step::Fin],
            None,
            CHAT,
        ),
        (
            "a head and a reset",
            vec![sse_head(), pause(20), Step::Rst],
            None,
            CHAT,
        ),
        (
            "half an event",
            vec![sse_head(), chunk(early_role), Step::Fin],
            None,
            CHAT,
        ),
        (
            "a whole answer that never comes",
            vec![head("200 OK", &["content-length: 20"]), Step::Fin],
            None,
            CHAT_WHOLE,
        ),
        (
            "draining",
            error("500 Internal Server Error", DRAINING),
            Some(Refusal::draining),
            CHAT,
        ),
        (
            "its core died",
            error("500 Internal Server Error", ENGINE_CORE),
            Some(Refusal::core_died),
            CHAT_WHOLE,
        ),
        (
            "its core died, as the first event",
            vec![
                sse_head(),
                chunk(error_event(ENGINE_CORE)),
                chunk(DONE),
                end(),
            ],
            Some(Refusal::core_died),
            CHAT,
        ),
        (
            "the same in one write and in pieces",
            vec![
                sse_head(),
                chunk(&error_event(ENGINE_CORE)[..40]),
                pause(10),
                chunk(&format!("{}{DONE}", error_event(ENGINE_CORE))[40..]),
                end(),
            ],
            Some(Refusal::core_died),
            CHAT,
        ),
        (
            "aborted before it began",
            vec![sse_head(), chunk(abort_event()), chunk(DONE), end()],
            Some(Refusal::aborted),
            CHAT,
        ),
        (
            "aborted before it began, whole",
            json("200 OK", aborted_whole),
            Some(Refusal::aborted),
            CHAT_WHOLE,
        ),
        (
            "full",
            error("503 Service Unavailable", BUSY),
            Some(Refusal::busy),
            CHAT,
        ),
    ];
    for (what, bad, refusal, body) in cases {
        for http in [Http::One, Http::Two] {
            let (a, b, setup) = pair(bad.clone()).await;
            let gateway = setup.start().await;
            let answer = post(http, &gateway.address, "/v1/chat/completions", body).await;
            assert_eq!(answer.status, 200, "{what}: {}", answer.text());
            assert!(answer.text().contains("good"), "{what}: {}", answer.text());
            assert!(answer.clean, "{what}");
            // Each was asked once, in the client's own bytes.
            for engine in [&a, &b] {
                let seen = engine.seen();
                assert_eq!(seen.len(), 1, "{what}");
                assert_eq!(seen[0].body, body.as_bytes(), "{what}");
            }
            let retry = &gateway.metrics.retry;
            match refusal {
                Some(refusal) => {
                    assert_eq!(gateway.metrics.hold.refusals(refusal), 1, "{what}");
                    assert_eq!(retry.retries(Reason::refused), 1, "{what}");
                }
                None => assert_eq!(retry.retries(Reason::broken), 1, "{what}"),
            }
            gateway.idle().await;
        }
    }
}

/// Nobody listens at one of two addresses.
#[tokio::test]
async fn refused_connections_cost_nothing() {
    let dead = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = dead.local_addr().unwrap().to_string();
    drop(dead);
    let engine = FakeEngine::start(|_| chat_stream(&["good"])).await;
    let gateway = Setup::addresses(vec![address, engine.address.clone()])
        .start()
        .await;
    for _ in 0..4 {
        let answer = post(Http::One, &gateway.address, "/v1/chat/completions", CHAT).await;
        assert!(answer.text().contains("good"));
    }
    assert_eq!(engine.seen().len(), 4);
    gateway.idle().await;
}

/// F3: a body without a length is sent again whole.
#[tokio::test]
async fn chunked_bodies_are_sent_again_whole() {
    let (a, b, setup) = pair(vec![Step::Fin]).await;
    let gateway = setup.start().await;
    let mut raw = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\ncontent-type: application/json\r\n\r\n".to_vec();
    for byte in CHAT.bytes() {
        raw.extend_from_slice(b"1;x=y\r\n");
        raw.push(byte);
        raw.extend_from_slice(b"\r\n");
    }
    raw.extend_from_slice(b"0\r\nx-trailer: 1\r\n\r\n");
    let mut client = RawClient::write(&gateway.address, &raw).await;
    client.read_until("good").await;
    for engine in [&a, &b] {
        assert_eq!(engine.seen()[0].body, CHAT.as_bytes());
    }
}

/// Failures everywhere: what the client is told in the end.
#[tokio::test]
async fn failures_everywhere() {
    let cases: Vec<(&str, Vec<Step>, u16, &str)> = vec![
        ("closed", vec![Step::Fin], 502, "endpoint_failed"),
        (
            "no event",
            vec![sse_head(), Step::Fin],
            502,
            "endpoint_failed",
        ),
        (
            "core died in the first event",
            vec![
                sse_head(),
                chunk(error_event(ENGINE_CORE)),
                chunk(DONE),
                end(),
            ],
            502,
            "endpoint_refused",
        ),
        (
            "aborted in the first event",
            vec![sse_head(), chunk(abort_event()), chunk(DONE), end()],
            502,
            "endpoint_refused",
        ),
    ];
    for (what, bad, status, code) in cases {
        let script = |bad: Vec<Step>| move |_: &Seen| bad.clone();
        let a = FakeEngine::start(script(bad.clone())).await;
        let b = FakeEngine::start(script(bad.clone())).await;
        let c = FakeEngine::start(script(bad)).await;
        let gateway = Setup::tiny(&[&a, &b, &c]).start().await;
        let answer = post(Http::One, &gateway.address, "/v1/chat/completions", CHAT).await;
        assert_eq!(answer.status, status, "{what}");
        assert_eq!(answer.headers["x-forebay-dropped-reason"], code, "{what}");
        assert_eq!(answer.json()["error"]["code"], code, "{what}");
        assert!(answer.headers.contains_key("x-request-id"), "{what}");
        // At most once again, and never where it failed.
        let asked: Vec<usize> = [&a, &b, &c].iter().map(|e| e.seen().len()).collect();
        assert_eq!(asked.iter().sum::<usize>(), 2, "{what}: {asked:?}");
        assert!(asked.iter().all(|n| *n <= 1), "{what}: {asked:?}");
        assert_eq!(gateway.metrics.retry.refused(WhyNot::attempts), 1, "{what}");
        gateway.idle().await;
    }
}

/// J2: when all engines say no, their own words reach the client.
#[tokio::test]
async fn the_last_engines_words_are_passed_on() {
    for (status, message, retry_after) in [
        ("503 Service Unavailable", BUSY, Some("1")),
        ("500 Internal Server Error", DRAINING, None),
        ("500 Internal Server Error", ENGINE_CORE, None),
    ] {
        let a = FakeEngine::start(move |_| error(status, message)).await;
        let b = FakeEngine::start(move |_| error(status, message)).await;
        for engines in [&[&a][..], &[&a, &b]] {
            let before = a.seen().len() + b.seen().len();
            let gateway = Setup::tiny(engines).start().await;
            let answer = post(Http::One, &gateway.address, "/v1/chat/completions", CHAT).await;
            assert_eq!(answer.status.as_str(), &status[..3]);
            assert_eq!(answer.json()["error"]["message"], message);
            // Never twice at one that failed.
            let asked = a.seen().len() + b.seen().len() - before;
            assert_eq!(asked, engines.len());
            assert_eq!(
                answer
                    .headers
                    .get("retry-after")
                    .map(|v| v.to_str().unwrap()),
                retry_after
            );
        }
    }
}

/// J2, F6: every other answer of an engine passes unchanged and is not tried again.
#[tokio::test]
async fn other_answers_pass_unchanged() {
    let long = "x".repeat(2000);
    for status in [
        "400 Bad Request",
        "404 Not Found",
        "422 Unprocessable Content",
        "429 Too Many Requests",
        "500 Internal Server Error",
        "503 Service Unavailable",
    ] {
        for body in [CHAT, CHAT_WHOLE] {
            let text = long.clone();
            let a = FakeEngine::start(move |_| error(status, &text)).await;
            let b = FakeEngine::start(|_| chat_stream(&["wrong"])).await;
            let gateway = Setup::tiny(&[&a]).start().await;
            add(gateway.pools[0].pool(), &b.address).set_ready(false);
            let answer = post(Http::One, &gateway.address, "/v1/chat/completions", body).await;
            assert_eq!(answer.status.as_str(), &status[..3]);
            assert_eq!(answer.json()["error"]["message"], long);
            assert!(!answer.headers.contains_key("x-forebay-dropped-reason"));
            assert_eq!(a.seen().len(), 1);
            gateway.idle().await;
        }
    }
}

/// F5: once a byte of the answer is out there is no second attempt, and no second text.
#[tokio::test]
async fn no_retry_behind_the_first_event() {
    for http in [Http::One, Http::Two] {
        let (a, b, setup) = pair(vec![
            sse_head(),
            chunk(chat_event("begun")),
            pause(20),
            Step::Rst,
        ])
        .await;
        let gateway = setup.start().await;
        let answer = post(http, &gateway.address, "/v1/chat/completions", CHAT).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.text().matches("begun").count(), 1);
        assert!(!answer.text().contains("good"));
        assert!(!answer.clean);
        assert_eq!(a.seen().len() + b.seen().len(), 1);
        gateway.idle().await;
    }
}

/// The retry budget holds when everything fails.
#[tokio::test]
async fn retries_are_bounded() {
    let a = FakeEngine::start(|_| error("503 Service Unavailable", BUSY)).await;
    let b = FakeEngine::start(|_| error("503 Service Unavailable", BUSY)).await;
    let gateway = Setup::tiny(&[&a, &b]).start().await;
    for _ in 0..60 {
        let answer = post(
            Http::One,
            &gateway.address,
            "/v1/chat/completions",
            CHAT_WHOLE,
        )
        .await;
        assert_eq!(answer.status, 503);
    }
    let retries = gateway.metrics.retry.retries(Reason::refused);
    // A floor of ten, a fifth of sixty, and what time gives.
    assert!((15..35).contains(&retries), "{retries}");
    assert!(gateway.metrics.retry.refused(WhyNot::budget) > 20);
}

/// No endpoint is ready: waits, then 503; if one comes meanwhile, it is used.
#[tokio::test]
async fn no_endpoint_ready() {
    let engine = FakeEngine::start(|_| chat_stream(&["late"])).await;
    let gateway = Setup::addresses(vec![]).start().await;
    let answer = post(Http::One, &gateway.address, "/v1/chat/completions", CHAT).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.headers["retry-after"], "5");
    assert_eq!(
        answer.headers["x-forebay-dropped-reason"],
        "no_endpoint_ready"
    );
    // J3: it says what is the matter.
    let message = answer.json()["error"]["message"].to_string();
    assert!(
        message.contains("`tiny` has 0 of 0 endpoints ready"),
        "{message}"
    );
    gateway.idle().await;

    let waiting = tokio::spawn({
        let address = gateway.address.clone();
        async move { post(Http::One, &address, "/v1/chat/completions", CHAT).await }
    });
    within(Duration::from_secs(1), "it waits", || {
        gateway.pools[0].pool().queue().len() == 1
    })
    .await;
    add(gateway.pools[0].pool(), &engine.address);
    let answer = waiting.await.unwrap();
    assert!(answer.text().contains("late"));
    gateway.idle().await;
}

#[tokio::test]
async fn a_full_queue() {
    let mut setup = Setup::addresses(vec![]);
    setup.max_queued = 0;
    let gateway = setup.start().await;
    let answer = post(Http::One, &gateway.address, "/v1/chat/completions", CHAT).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.headers["x-forebay-dropped-reason"], "queue_full");
    assert!(answer.headers.contains_key("retry-after"));
    gateway.idle().await;
}

/// F15, A15: each time-out says its name, and only silence runs into one.
#[tokio::test]
async fn timeouts() {
    let quick = |setup: Setup| {
        setup.policy(|p| {
            p.first_token_timeout = Duration::from_millis(150);
            p.idle_timeout = Duration::from_millis(150);
        })
    };
    // Before the head, and before the first event.
    for steps in [vec![Step::Hang], vec![sse_head(), Step::Hang]] {
        let engine = FakeEngine::start(move |_| steps.clone()).await;
        let other = FakeEngine::start(|_| chat_stream(&["wrong"])).await;
        let gateway = quick(Setup::tiny(&[&engine])).start().await;
        add(gateway.pools[0].pool(), &other.address).set_ready(false);
        let answer = post(Http::One, &gateway.address, "/v1/chat/completions", CHAT).await;
        assert_eq!(answer.status, 504);
        assert_eq!(answer.json()["error"]["code"], "first_token_timeout");
        engine.closed(0).await;
        assert_eq!(
            gateway
                .metrics
                .settle
                .requests(Api::Chat, "tiny", 504, Outcome::timeout),
            1
        );
        gateway.idle().await;
    }
    // Within the stream.
    let engine = FakeEngine::start(|_| vec![sse_head(), chunk(chat_event("a")), Step::Hang]).await;
    let gateway = quick(Setup::tiny(&[&engine])).start().await;
    let answer = post(Http::One, &gateway.address, "/v1/chat/completions", CHAT).await;
    assert_eq!(answer.status, 200);
    assert!(
        answer.text().contains("\"code\":\"idle_timeout\""),
        "{}",
        answer.text()
    );
    assert!(!answer.clean);
    engine.closed(0).await;
    gateway.idle().await;
    // A stream that is only slow, over more than any of the two.
    let engine = FakeEngine::start(|_| {
        let mut steps = vec![sse_head()];
        for _ in 0..8 {
            steps.push(pause(60));
            steps.push(chunk(chat_event("a")));
        }
        steps.extend([chunk(DONE), end()]);
        steps
    })
    .await;
    let gateway = quick(Setup::tiny(&[&engine])).start().await;
    let answer = post(Http::One, &gateway.address, "/v1/chat/completions", CHAT).await;
    assert!(answer.clean && answer.text().ends_with(DONE));
}

/// Cut endpoints: unanswered requests go elsewhere, open streams end with an error.
#[tokio::test]
async fn cut_endpoints() {
    for steps in [vec![Step::Hang], vec![sse_head(), Step::Hang]] {
        let (a, b, setup) = pair(steps).await;
        let gateway = setup.start().await;
        let waiting = tokio::spawn({
            let address = gateway.address.clone();
            async move { post(Http::One, &address, "/v1/chat/completions", CHAT).await }
        });
        within(Duration::from_secs(5), "one is asked", || {
            a.seen().len() + b.seen().len() == 1
        })
        .await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        let hanging = if a.seen().is_empty() { &b } else { &a };
        for endpoint in gateway.endpoints() {
            if endpoint.id().address.as_str() == hanging.address {
                endpoint.cut();
            }
        }
        let answer = waiting.await.unwrap();
        assert!(answer.text().contains("good"), "{}", answer.text());
        hanging.closed(0).await;
        gateway.idle().await;
    }
    let engine = FakeEngine::start(|_| vec![sse_head(), chunk(chat_event("a")), Step::Hang]).await;
    for http in [Http::One, Http::Two] {
        let gateway = Setup::tiny(&[&engine]).start().await;
        let before = engine.seen().len();
        let waiting = tokio::spawn({
            let address = gateway.address.clone();
            async move { post(http, &address, "/v1/chat/completions", CHAT).await }
        });
        engine.asked(before + 1).await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        gateway.endpoints()[0].cut();
        let answer = waiting.await.unwrap();
        assert!(
            answer.text().contains("endpoint_failed"),
            "{}",
            answer.text()
        );
        assert!(!answer.clean);
        gateway.idle().await;
    }
}

/// F4: a request's body is kept until its answer is committed, and no longer.
#[tokio::test]
async fn bodies_are_let_go_at_the_commitment() {
    let engine =
        FakeEngine::start(|_| vec![sse_head(), pause(100), chunk(chat_event("a")), Step::Hang])
            .await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    let budget = gateway.stack.budget().clone();
    let body = format!(
        r#"{{"model":"tiny","stream":true,"x":"{}"}}"#,
        "y".repeat(100_000)
    );
    let mut client = RawClient::post(&gateway.address, "/v1/chat/completions", &body).await;
    engine.asked(1).await;
    let held = budget.total() - budget.free();
    assert!((100_000..400_000).contains(&held), "{held}");
    client.read_until("\"a\"").await;
    within(Duration::from_millis(250), "the body is let go", || {
        budget.free() == budget.total()
    })
    .await;
    assert!(!engine.is_closed(0));
    client.leave();
    gateway.idle().await;
}

/// A full engine is given a rest, which is no failure.
#[tokio::test]
async fn full_engines_rest() {
    let busy = FakeEngine::start(|_| error("503 Service Unavailable", BUSY)).await;
    let good = FakeEngine::start(|_| json("200 OK", chat_json("good"))).await;
    let mut setup = Setup::tiny(&[&busy, &good]);
    setup.routing = Routing::PricedTtft;
    let gateway = setup.start().await;
    // Sent until the full one was asked; the other one is asked then and for a while.
    while busy.seen().is_empty() {
        let answer = post(
            Http::One,
            &gateway.address,
            "/v1/chat/completions",
            CHAT_WHOLE,
        )
        .await;
        assert_eq!(answer.status, 200);
        assert!(good.seen().len() < 20, "the full one is never asked");
    }
    let retried = gateway.pools[0].pool().decisions().last(1);
    let retried = serde_json::to_value(&retried).expect("a record");
    let candidates = retried[0]["decision"]["candidates"]
        .as_array()
        .expect("candidates");
    assert_eq!(candidates.len(), 1, "{candidates:?}");
    post(
        Http::One,
        &gateway.address,
        "/v1/chat/completions",
        CHAT_WHOLE,
    )
    .await;
    let next = serde_json::to_value(gateway.pools[0].pool().decisions().last(1)).expect("a record");
    let rested = next[0]["decision"]["candidates"]
        .as_array()
        .expect("candidates")
        .iter()
        .find(|c| c["endpoint"] == *busy.address)
        .expect("it is still a candidate");
    assert!(rested["ttft"].as_f64() > Some(0.5), "{rested}");
    for endpoint in gateway.endpoints() {
        assert!(!endpoint.status(tokio::time::Instant::now()).breaker_open);
    }
}
