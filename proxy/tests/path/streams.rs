//! Streams: bytes, timing and ends.

use crate::support::*;
use bytes::Bytes;
use forebay_proxy::http::record::Outcome;
use http::Request;
use http_body_util::Full;
use std::time::Duration;
use tower_ttft::peek::Api;

const CHAT: &str = r#"{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;

async fn through(http: Http, path: &str, steps: Vec<Step>) -> (Answer, Gateway) {
    let engine = FakeEngine::start(move |_| steps.clone()).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    let answer = post(http, &gateway.address, path, CHAT).await;
    gateway.idle().await;
    (answer, gateway)
}

/// A4: one framing, whatever the engine's.
#[tokio::test]
async fn one_framing() {
    let body = chat_json("x");
    let length = format!("content-length: {}", body.len());
    let whole = Step::Write(Bytes::from(body.clone()));
    let cases: Vec<Vec<Step>> = vec![
        vec![
            head("200 OK", &["content-type: application/json", &length]),
            whole.clone(),
        ],
        vec![
            head(
                "200 OK",
                &[
                    "content-type: application/json",
                    "transfer-encoding: chunked",
                ],
            ),
            chunk(&body),
            end(),
        ],
        vec![
            head(
                "200 OK",
                &["content-type: application/json", "connection: close"],
            ),
            whole.clone(),
            Step::Fin,
        ],
        vec![
            Step::Write("HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n".into()),
            whole.clone(),
            Step::Fin,
        ],
    ];
    for (number, steps) in cases.into_iter().enumerate() {
        for http in [Http::One, Http::Two] {
            let (answer, _) = through(http, "/v1/chat/completions", steps.clone()).await;
            assert_eq!(answer.status, 200, "{number}");
            assert!(answer.clean, "{number}");
            assert_eq!(answer.text(), body, "{number}");
            if http == Http::One {
                let length = answer.headers.contains_key("content-length");
                let chunked = answer.headers.contains_key("transfer-encoding");
                assert!(length != chunked, "{number}: {:?}", answer.headers);
            }
        }
    }
    // A stream with a length is a stream all the same.
    let stream = format!("{}{DONE}", chat_event("x"));
    let steps = vec![
        head(
            "200 OK",
            &[
                "content-type: text/event-stream",
                &format!("content-length: {}", stream.len()),
            ],
        ),
        Step::Write(stream.clone().into()),
    ];
    let (answer, _) = through(Http::One, "/v1/chat/completions", steps).await;
    assert!(answer.clean);
    assert_eq!(answer.text(), stream);
    assert!(!answer.headers.contains_key("content-length"));
}

/// A6: any split of a stream's bytes gives the same stream and the same counts.
#[tokio::test]
async fn any_split() {
    let stream = [
        ": a comment\n\n".to_owned(),
        chat_event("Grüße 🦀"),
        chat_event("b").replace("\n\n", "\r\n\r\n"),
        "event: x\ndata: {\"choices\":\ndata: []}\n\n".to_owned(),
        usage_event(13, 2, 8),
        DONE.to_owned(),
    ]
    .concat();
    let mut splits: Vec<Vec<usize>> = vec![(1..stream.len()).collect()];
    // Reproducible cuts, three in each.
    let mut state = 88172645463325252_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize % stream.len()
    };
    for _ in 0..60 {
        let mut cuts = vec![next(), next(), next()];
        cuts.sort_unstable();
        splits.push(cuts);
    }
    let scripts: Vec<Vec<Step>> = splits
        .iter()
        .map(|cuts| {
            let mut steps = vec![sse_head()];
            let mut at = 0;
            for cut in cuts.iter().chain([&stream.len()]) {
                if *cut > at {
                    steps.push(chunk(&stream.as_bytes()[at..*cut]));
                    at = *cut;
                }
            }
            steps.push(end());
            steps
        })
        .collect();
    let count = scripts.len();
    let engine = FakeEngine::start(move |seen| scripts[seen.number].clone()).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    for _ in 0..count {
        let answer = post(Http::One, &gateway.address, "/v1/chat/completions", CHAT).await;
        assert_eq!(answer.text(), stream);
        assert!(answer.clean);
    }
    let complete = gateway
        .metrics
        .settle
        .requests(Api::Chat, "tiny", 200, Outcome::complete);
    assert_eq!(complete, count as u64);
    gateway.idle().await;
}

/// A7: a stream may end without a blank line or `[DONE]`.
#[tokio::test]
async fn unfinished_last_events_pass() {
    let usage = usage_event(13, 2, 8);
    for last in [
        usage.trim_end().to_owned(),
        format!("{}\n", usage.trim_end()),
        usage,
    ] {
        let stream = format!("{}{last}", chat_event("a"));
        let steps = vec![sse_head(), chunk(&stream), end()];
        let (answer, _) = through(Http::One, "/v1/chat/completions", steps).await;
        assert_eq!(answer.text(), stream);
        assert!(answer.clean);
    }
}

/// A8: a line without an end is passed on, not kept.
#[tokio::test]
async fn endless_lines_pass() {
    let piece = "x".repeat(64 * 1024);
    let mut steps = vec![sse_head(), chunk("data: ")];
    for _ in 0..64 {
        steps.push(chunk(&piece));
    }
    steps.push(Step::Fin);
    let (answer, _) = through(Http::One, "/v1/chat/completions", steps).await;
    assert_eq!(answer.status, 200);
    assert!(answer.body.len() >= 64 * piece.len());
    assert!(!answer.clean);
    // What we say stands on lines of its own.
    assert!(answer.text().contains("\n\ndata: {\"error\":"));
}

/// A9, A10: however a stream breaks off, the client sees that it did, in the words of its API, and no `[DONE]`.
#[tokio::test]
async fn broken_streams() {
    let endings: Vec<(&str, Vec<Step>)> = vec![
        ("FIN without a last chunk", vec![Step::Fin]),
        ("reset", vec![pause(20), Step::Rst]),
        (
            "a truncated chunk",
            vec![Step::Write("ffff\r\ndata: {\"half".into()), Step::Fin],
        ),
        ("no chunk", vec![Step::Write("zz\r\n".into()), Step::Fin]),
    ];
    let created = "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0,\"response\":{\"id\":\"resp_7\",\"object\":\"response\"}}\n\n";
    let apis = [
        (
            "/v1/chat/completions",
            chat_event("a"),
            "data: {\"error\":{\"message\"",
        ),
        (
            "/v1/completions",
            chat_event("a"),
            "data: {\"error\":{\"message\"",
        ),
        (
            "/v1/messages",
            "event: message_start\ndata: {\"type\":\"message_start\"}\n\n".to_owned(),
            "event: error\ndata: {\"type\":\"error\"",
        ),
        (
            "/v1/responses",
            created.to_owned(),
            "event: response.failed\ndata: {\"type\":\"response.failed\",\"sequence_number\":1,\"response\":{\"id\":\"resp_7\"",
        ),
    ];
    for (how, ending) in &endings {
        for (path, first, last) in &apis {
            for http in [Http::One, Http::Two] {
                let mut steps = vec![sse_head(), chunk(first)];
                steps.extend(ending.iter().cloned());
                let (answer, gateway) = through(http, path, steps).await;
                assert_eq!(answer.status, 200);
                assert!(!answer.clean, "{how} {path}: {}", answer.text());
                let rest = answer.text().strip_prefix(first.as_str());
                let rest = rest.unwrap_or_else(|| panic!("{how} {path}: {}", answer.text()));
                assert!(rest.starts_with(last), "{how} {path}: {rest}");
                assert!(rest.ends_with("\n\n") && !rest.contains("[DONE]"));
                let api = Api::from_path(path);
                let broken = gateway
                    .metrics
                    .settle
                    .requests(api, "tiny", 200, Outcome::broken);
                assert_eq!(broken, 1, "{how} {path}");
            }
        }
    }
}

/// vLLM's own error event is the last thing that a client sees: the `[DONE]` behind it is no success.
#[tokio::test]
async fn error_events_end_streams() {
    let event = error_event(ENGINE_CORE);
    let tails: Vec<Vec<Step>> = vec![
        vec![chunk(&event), chunk(DONE), end()],
        vec![chunk(format!("{event}{DONE}")), end()],
        vec![
            chunk(&event[..20]),
            pause(10),
            chunk(format!("{}{DONE}", &event[20..])),
            end(),
        ],
        vec![
            chunk(&event[..event.len() - 1]),
            pause(10),
            chunk(format!("\n{DONE}")),
            end(),
        ],
        vec![
            chunk(format!("{}{DONE}", event.replace('\n', "\r\n"))),
            end(),
        ],
    ];
    for (number, tail) in tails.into_iter().enumerate() {
        for http in [Http::One, Http::Two] {
            let mut steps = vec![sse_head(), chunk(chat_event("a"))];
            steps.extend(tail.iter().cloned());
            let (answer, gateway) = through(http, "/v1/chat/completions", steps).await;
            let text = answer.text().replace("\r\n", "\n");
            assert_eq!(text, format!("{}{event}", chat_event("a")), "{number}");
            assert!(!answer.clean, "{number}");
            let errors =
                gateway
                    .metrics
                    .settle
                    .requests(Api::Chat, "tiny", 200, Outcome::engine_error);
            assert_eq!(errors, 1, "{number}");
        }
    }
    // An error that is not on the list, as the first event: passed on, and not tried again.
    let other = error_event("something else");
    let steps = vec![sse_head(), chunk(&other), chunk(DONE), end()];
    let (answer, _) = through(Http::One, "/v1/chat/completions", steps).await;
    assert_eq!(answer.text(), other);
    assert!(!answer.clean);
}

/// The word "error" in an answer is no error.
#[tokio::test]
async fn talk_of_errors_is_none() {
    let texts = [
        "an \"error\": {}",
        "event: error",
        "data: {\"error\":1}",
        "[DONE]",
    ];
    let steps = chat_stream(&texts);
    let (answer, _) = through(Http::One, "/v1/chat/completions", steps).await;
    assert!(answer.clean);
    assert!(answer.text().ends_with(DONE));
}

/// A5, A13: each event is there at once, over both protocols.
#[tokio::test]
async fn events_do_not_wait() {
    for http in [Http::One, Http::Two] {
        let mut steps = vec![sse_head()];
        for _ in 0..10 {
            steps.push(chunk(chat_event("a")));
            steps.push(pause(50));
        }
        steps.extend([chunk(DONE), end()]);
        let (answer, _) = through(http, "/v1/chat/completions", steps).await;
        assert_eq!(answer.pieces.len(), 11);
        for pair in answer.pieces.windows(2) {
            let gap = pair[1].0 - pair[0].0;
            assert!(gap > Duration::from_millis(20), "{gap:?}");
            assert!(gap < Duration::from_millis(200), "{gap:?}");
        }
    }
}

/// A12: no encoding is asked for; an answer that is encoded all the same passes untouched.
#[tokio::test]
async fn encoded_answers_pass() {
    let engine = FakeEngine::start(|_| {
        vec![
            head(
                "200 OK",
                &[
                    "content-type: text/event-stream",
                    "content-encoding: gzip",
                    "transfer-encoding: chunked",
                ],
            ),
            chunk(b"\x1f\x8b\x08\n\n\x00"),
            pause(20),
            chunk(b"\x01\x02\n"),
            end(),
        ]
    })
    .await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    let request = Request::post("/v1/chat/completions")
        .header("accept-encoding", "gzip, br")
        .body(Full::new(Bytes::from_static(CHAT.as_bytes())))
        .unwrap();
    let answer = send(Http::One, &gateway.address, request).await;
    assert!(!engine.seen()[0].headers.contains_key("accept-encoding"));
    assert_eq!(answer.headers["content-encoding"], "gzip");
    assert_eq!(answer.body, b"\x1f\x8b\x08\n\n\x00\x01\x02\n");
    assert!(answer.clean);
}

/// A14: a silent stream is committed after a while and kept alive by comments, which end with the first event; what
/// goes wrong then is said in the stream.
#[tokio::test]
async fn silent_streams_are_committed() {
    let run = |http: Http, rest: Vec<Step>| async move {
        let mut steps = vec![sse_head(), pause(450)];
        steps.extend(rest);
        let engine = FakeEngine::start(move |_| steps.clone()).await;
        let gateway = Setup::tiny(&[&engine])
            .policy(|p| {
                p.head_after = Duration::from_millis(100);
                p.keep_alive = Duration::from_millis(100);
            })
            .start()
            .await;
        let answer = post(http, &gateway.address, "/v1/chat/completions", CHAT).await;
        assert_eq!(engine.seen().len(), 1);
        gateway.idle().await;
        answer
    };
    for http in [Http::One, Http::Two] {
        let answer = run(
            http,
            vec![chunk(chat_event("a")), pause(250), chunk(DONE), end()],
        )
        .await;
        assert_eq!(answer.status, 200);
        assert!(answer.clean);
        let first = answer.pieces[0].0;
        assert!(first - answer.head_at < Duration::from_millis(50));
        let text = answer.text();
        let comments = text.matches(": still waiting").count();
        assert!((3..=5).contains(&comments), "{comments}");
        assert!(
            text.ends_with(&format!("token\n\n{}{DONE}", chat_event("a"))),
            "{text}"
        );

        let answer = run(http, vec![Step::Fin]).await;
        assert!(
            answer.text().contains("endpoint_failed"),
            "{}",
            answer.text()
        );
        assert!(!answer.clean);

        let answer = run(http, vec![chunk(abort_event()), chunk(DONE), end()]).await;
        assert!(
            answer.text().contains("endpoint_refused"),
            "{}",
            answer.text()
        );
        assert!(!answer.text().contains("abort\"") && !answer.text().contains("[DONE]"));
        assert!(!answer.clean);

        let answer = run(
            http,
            vec![chunk(error_event(ENGINE_CORE)), chunk(DONE), end()],
        )
        .await;
        assert!(answer.text().ends_with(&error_event(ENGINE_CORE)));
        assert!(!answer.clean);
    }
}

/// A16: streams are passed on event by event, whatever was asked about usage.
#[tokio::test]
async fn usage_is_as_asked() {
    for options in [
        "",
        r#","stream_options":null"#,
        r#","stream_options":{"include_usage":false}"#,
        r#","stream_options":{"x":1}"#,
    ] {
        let stream = [chat_event("a"), DONE.to_owned()].concat();
        let sent = stream.clone();
        let engine = FakeEngine::start(move |_| vec![sse_head(), chunk(&sent), end()]).await;
        let gateway = Setup::tiny(&[&engine]).start().await;
        let body = format!(r#"{{"model":"tiny","stream":true{options}}}"#);
        let answer = post(
            Http::One,
            &gateway.address,
            "/v1/chat/completions",
            body.as_str(),
        )
        .await;
        assert_eq!(answer.text(), stream);
        assert_eq!(engine.seen()[0].body, body.as_bytes());
    }
}

/// A17: answers may be large.
#[tokio::test]
async fn large_answers() {
    let body = format!("{{\"data\":\"{}\"}}", "0123456789abcdef".repeat(512 * 1024));
    let sent = body.clone();
    let engine = FakeEngine::start(move |_| json("200 OK", &sent)).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    for http in [Http::One, Http::Two] {
        let answer = post(
            http,
            &gateway.address,
            "/v1/embeddings",
            r#"{"model":"tiny"}"#,
        )
        .await;
        assert!(answer.clean);
        assert!(answer.body == body.as_bytes());
    }
}

/// A11: an engine that closes idle connections after a while is asked at all distances around that.
#[tokio::test]
async fn keep_alive_races() {
    let engine = FakeEngine::start(|seen| {
        let mut steps = json("200 OK", chat_json("x"));
        // Closes its connections soon after each answer, sooner and sooner against the next request.
        steps.push(Step::Sleep(Duration::from_micros(
            200 + 50 * (seen.number as u64 % 40),
        )));
        steps.push(Step::Fin);
        steps
    })
    .await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    for _ in 0..200 {
        let answer = post(Http::One, &gateway.address, "/v1/chat/completions", CHAT).await;
        assert_eq!(answer.status, 200);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // None was seen twice.
    assert_eq!(engine.seen().len(), 200);
    gateway.idle().await;
}

/// Answers without a body.
#[tokio::test]
async fn no_body() {
    let engine = FakeEngine::start(|seen| match &*seen.method {
        "HEAD" => vec![head("200 OK", &["content-length: 17"])],
        _ => vec![head("204 No Content", &[])],
    })
    .await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    for http in [Http::One, Http::Two] {
        let request = Request::head("/health").body(Full::default()).unwrap();
        let answer = send(http, &gateway.address, request).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.headers["content-length"], "17");
        let answer = post(http, &gateway.address, "/v1/chat/completions", CHAT).await;
        assert_eq!(answer.status, 204);
    }
    gateway.idle().await;
}
