use super::*;
use crate::peek::testing::Scripted;
use http::{HeaderValue, Method, Response, header};
use http_body_util::BodyExt;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use tokio::time::{self, Instant};
use tower::{ServiceExt, service_fn};

const SECOND: Duration = Duration::from_secs(1);

fn params() -> PeekParams {
    PeekParams {
        peek_cap: 200_000,
        hard_cap: 1_000_000,
        budget: Budget::new(300_000),
        budget_wait: 2 * SECOND,
        upload_idle: 30 * SECOND,
    }
}

fn post(path: &str, body: Scripted) -> Request<Scripted> {
    Request::builder()
        .method(Method::POST)
        .uri(path)
        .body(body)
        .expect("a request")
}

fn sized(body: &[u8]) -> Scripted {
    let mut script = Scripted::new(body.chunks(10_000).map(Bytes::copy_from_slice));
    script.say_length(body.len() as u64);
    script
}

async fn peeked(
    params: &PeekParams,
    req: Request<Scripted>,
) -> Result<(InferenceRequest, ReplayBody<Scripted>), PeekError> {
    let req = params.peek(req).await?;
    let (head, body) = req.into_parts();
    let info = head.extensions.get::<InferenceRequest>();
    Ok((info.expect("always there").clone(), body))
}

fn chat(content: usize) -> Vec<u8> {
    format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"{}"}}],"stream":true}}"#,
        "x".repeat(content)
    )
    .into_bytes()
}

#[tokio::test(start_paused = true)]
async fn whole_bodies_are_read_and_paid_for() {
    let params = params();
    let body = chat(50_000);
    let unsized_body = || Scripted::new(body.chunks(7).map(Bytes::copy_from_slice));
    for script in [sized(&body), unsized_body()] {
        let (info, replay) = peeked(&params, post("/v1/chat/completions", script))
            .await
            .expect("nothing is wrong");
        assert_eq!((info.api, info.read), (Api::Chat, BodyRead::Parsed));
        assert_eq!(info.model.as_deref(), Some("m"));
        assert!(info.stream);
        assert_eq!(&info.body[..], &body[..]);
        assert_eq!(params.budget.free(), 300_000 - body.len());
        assert_eq!(replay.size_hint().exact(), Some(body.len() as u64));
        let clone = replay.try_clone().expect("whole");
        assert_eq!(clone.collect().await.expect("no error").to_bytes(), body);
        drop(replay);
        assert_eq!(
            params.budget.free(),
            300_000 - body.len(),
            "the extension holds it"
        );
        drop(info);
        assert_eq!(params.budget.free(), 300_000);
    }
}

#[tokio::test(start_paused = true)]
async fn bodies_without_anything_to_read() {
    let params = params();
    let get = Request::builder()
        .uri("/v1/models")
        .body(Scripted::new([]))
        .expect("a request");
    let (info, replay) = peeked(&params, get).await.expect("nothing is wrong");
    assert_eq!(info.read, BodyRead::Empty);
    assert!(replay.is_end_stream() && replay.is_replayable());
    // A body that turns out to be empty only at its end.
    let script = Scripted::new([Bytes::new()]);
    let (info, _) = peeked(&params, post("/v1/completions", script))
        .await
        .expect("nothing is wrong");
    assert_eq!(info.read, BodyRead::Empty);
    for garbage in [&b"[]"[..], b"{", b"\x1f\x8b", b"{\"a\":\"\xff\"}"] {
        let (info, replay) = peeked(&params, post("/v1/completions", sized(garbage)))
            .await
            .expect("nothing is wrong");
        assert_eq!(info.read, BodyRead::Unreadable);
        assert_eq!(info.fields.len(), 0);
        assert_eq!(replay.bytes().map(|b| &b[..]), Some(garbage));
    }
}

#[tokio::test(start_paused = true)]
async fn encoded_bodies_pass_unread() {
    let params = params();
    for (coding, read) in [
        ("gzip", BodyRead::Encoded),
        ("identity", BodyRead::Parsed),
        ("Identity", BodyRead::Parsed),
        ("identity, br", BodyRead::Encoded),
    ] {
        let mut req = post("/v1/chat/completions", sized(&chat(10)));
        req.headers_mut()
            .insert(header::CONTENT_ENCODING, HeaderValue::from_static(coding));
        let (info, replay) = peeked(&params, req).await.expect("nothing is wrong");
        assert_eq!(info.read, read, "{coding}");
        let passed = replay.collect().await.expect("no error").to_bytes();
        assert_eq!(passed, chat(10));
    }
}

#[tokio::test(start_paused = true)]
async fn caps() {
    let params = params();
    let body = chat(250_000);
    let unsized_body = Scripted::new(body.chunks(9_999).map(Bytes::copy_from_slice));
    for script in [sized(&body), unsized_body] {
        let (info, replay) = peeked(&params, post("/v1/chat/completions", script))
            .await
            .expect("streamed on");
        assert_eq!(info.read, BodyRead::TooLarge);
        assert!(info.body.is_empty() && !replay.is_replayable());
        assert_eq!(replay.collect().await.expect("no error").to_bytes(), body);
    }
    assert_eq!(params.budget.free(), 300_000);
    let mut script = Scripted::new([]);
    script.say_length(1_000_001);
    script.stall();
    let error = peeked(&params, post("/v1/chat/completions", script))
        .await
        .expect_err("refused by its length, before anything is read");
    assert!(matches!(error, PeekError::TooLarge { cap: 1_000_000 }));
    assert!(error.to_string().contains("1000000"));
}

#[tokio::test(start_paused = true)]
async fn exactly_the_cap_is_not_over_it() {
    let mut params = params();
    let body = chat(1000);
    params.peek_cap = body.len();
    let unsized_body = || Scripted::new(body.chunks(100).map(Bytes::copy_from_slice));
    for script in [sized(&body), unsized_body()] {
        let (info, _) = peeked(&params, post("/v1/chat/completions", script))
            .await
            .expect("nothing is wrong");
        assert_eq!(info.read, BodyRead::Parsed);
    }
    params.peek_cap -= 1;
    for script in [sized(&body), unsized_body()] {
        let (info, _) = peeked(&params, post("/v1/chat/completions", script))
            .await
            .expect("nothing is wrong");
        assert_eq!(info.read, BodyRead::TooLarge);
    }
}

#[tokio::test(start_paused = true)]
async fn without_memory_reading_waits_two_seconds_and_then_streams() {
    let params = params();
    let held = params.budget.try_share(300_000).expect("all of it");
    let body = chat(50_000);
    let unsized_body = Scripted::new(body.chunks(9_999).map(Bytes::copy_from_slice));
    for script in [sized(&body), unsized_body] {
        let start = Instant::now();
        let (info, replay) = peeked(&params, post("/v1/chat/completions", script))
            .await
            .expect("streamed on");
        assert_eq!(Instant::now() - start, 2 * SECOND);
        assert_eq!(info.read, BodyRead::NoBudget);
        assert!(!replay.is_replayable());
        assert_eq!(replay.collect().await.expect("no error").to_bytes(), body);
    }
    let waiting = tokio::spawn({
        let params = params.clone();
        async move { peeked(&params, post("/v1/chat/completions", sized(&chat(50_000)))).await }
    });
    time::sleep(SECOND).await;
    drop(held);
    let (info, _) = waiting.await.expect("no panic").expect("nothing is wrong");
    assert_eq!(info.read, BodyRead::Parsed, "memory came back in time");
}

#[tokio::test(start_paused = true)]
async fn all_waits_of_a_body_together_are_bounded() {
    let params = params();
    let mut held = params.budget.try_share(300_000).expect("all of it");
    // Memory comes back drop by drop, each time within the two seconds.
    let dripping = tokio::spawn(async move {
        for _ in 0..10 {
            time::sleep(Duration::from_millis(1500)).await;
            held.shrink_to(held.bytes() - 30_000);
        }
    });
    let body = chat(100_000);
    let start = Instant::now();
    let script = Scripted::new(body.chunks(9_999).map(Bytes::copy_from_slice));
    let (info, replay) = peeked(&params, post("/v1/chat/completions", script))
        .await
        .expect("streamed on");
    assert_eq!(info.read, BodyRead::NoBudget);
    assert_eq!(Instant::now() - start, 2 * SECOND);
    assert_eq!(replay.collect().await.expect("no error").to_bytes(), body);
    dripping.abort();
}

#[tokio::test(start_paused = true)]
async fn memory_that_runs_out_within_a_body() {
    let mut params = params();
    params.budget = Budget::new(40_000);
    let body = chat(50_000);
    let script = Scripted::new(body.chunks(9_999).map(Bytes::copy_from_slice));
    let (info, replay) = peeked(&params, post("/v1/chat/completions", script))
        .await
        .expect("streamed on");
    assert_eq!(info.read, BodyRead::NoBudget);
    assert!(params.budget.free() < 40_000, "what was read is still held");
    assert_eq!(replay.collect().await.expect("no error").to_bytes(), body);
    assert_eq!(params.budget.free(), 40_000);
}

#[tokio::test(start_paused = true)]
async fn slow_is_fine_and_stalled_is_not() {
    let params = params();
    let body = chat(100);
    let mut script = Scripted::new([]);
    for part in body.chunks(20) {
        script.pause(29 * SECOND);
        script.push(Bytes::copy_from_slice(part));
    }
    let mut stalled = Scripted::new([Bytes::copy_from_slice(&body[..20])]);
    stalled.stall();
    stalled.say_length(body.len() as u64);
    let (info, _) = peeked(&params, post("/v1/chat/completions", script))
        .await
        .expect("29 s are fine, each time");
    assert_eq!(info.read, BodyRead::Parsed);
    drop(info);
    let start = Instant::now();
    let error = peeked(&params, post("/v1/chat/completions", stalled))
        .await
        .expect_err("it stalls");
    assert!(matches!(error, PeekError::Stalled { idle } if idle == 30 * SECOND));
    assert_eq!(Instant::now() - start, 30 * SECOND);
    assert_eq!(params.budget.free(), 300_000);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_goes_away_gives_its_memory_back() {
    let params = params();
    let mut script = Scripted::new([Bytes::from_static(b"{\"model\":")]);
    script.fail_at(1);
    let error = peeked(&params, post("/v1/chat/completions", script))
        .await
        .expect_err("broken off");
    assert!(matches!(error, PeekError::Body(_)));
    // Also one that goes away without a word: its request is dropped.
    let mut script = Scripted::new([]);
    script.say_length(100_000);
    script.stall();
    let reading = tokio::spawn({
        let params = params.clone();
        async move {
            peeked(&params, post("/v1/chat/completions", script))
                .await
                .is_ok()
        }
    });
    time::sleep(SECOND).await;
    assert_eq!(params.budget.free(), 200_000);
    reading.abort();
    assert!(reading.await.is_err_and(|e| e.is_cancelled()));
    assert_eq!(params.budget.free(), 300_000);
}

fn form(file: usize) -> Vec<u8> {
    let mut form = b"--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--B\r\nContent-Disposition: form-data; name=\"stream\"\r\n\r\nTrue\r\n--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n".to_vec();
    form.extend((0..file).map(|i| (i * 7) as u8));
    form.extend(b"\r\n--B--\r\n");
    form
}

#[tokio::test(start_paused = true)]
async fn forms() {
    let params = params();
    for (file, read) in [(1000, BodyRead::Parsed), (400_000, BodyRead::TooLarge)] {
        let body = form(file);
        let one_frame = {
            let mut script = Scripted::new([Bytes::from(body.clone())]);
            script.say_length(body.len() as u64);
            script
        };
        let unsized_body = Scripted::new(body.chunks(9_999).map(Bytes::copy_from_slice));
        for script in [sized(&body), one_frame, unsized_body] {
            let mut req = post("/v1/audio/transcriptions", script);
            req.headers_mut().insert(
                header::CONTENT_TYPE,
                HeaderValue::from_static("multipart/form-data; boundary=B"),
            );
            let (info, replay) = peeked(&params, req).await.expect("nothing is wrong");
            assert_eq!((info.api, info.read), (Api::Audio, read));
            assert_eq!(info.model.as_deref(), Some("whisper"), "{file}");
            assert!(info.stream);
            assert_eq!(replay.collect().await.expect("no error").to_bytes(), body);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn trailers_pass() {
    let trailers = HeaderMap::from_iter([(header::ETAG, HeaderValue::from_static("x"))]);
    let mut script = sized(&chat(10));
    script.push_trailers(trailers.clone());
    let (info, replay) = peeked(&params(), post("/v1/chat/completions", script))
        .await
        .expect("nothing is wrong");
    assert_eq!(info.read, BodyRead::Parsed);
    for body in [replay.try_clone().expect("whole"), replay] {
        let collected = body.collect().await.expect("no error");
        assert_eq!(collected.trailers(), Some(&trailers));
        assert_eq!(collected.to_bytes(), chat(10));
    }
}

#[tokio::test(start_paused = true)]
async fn the_inner_service_is_asked_only_when_the_body_is_in() {
    let asked = Arc::new(AtomicUsize::new(0));
    let inner = service_fn({
        let asked = asked.clone();
        move |req: Request<ReplayBody<Scripted>>| {
            asked.fetch_add(1, Ordering::Relaxed);
            async move {
                let model = req
                    .extensions()
                    .get::<InferenceRequest>()
                    .and_then(|info| info.model.clone());
                let body = req.into_body().collect().await?.to_bytes();
                Ok::<_, Error>(Response::new((model, body)))
            }
        }
    });
    let service = PeekLayer::new(params()).layer(inner);
    let body = chat(10);
    let mut script = Scripted::new([Bytes::copy_from_slice(&body[..5])]);
    script.pause(10 * SECOND);
    script.push(Bytes::copy_from_slice(&body[5..]));
    let mut call = pin!(service.oneshot(post("/v1/chat/completions", script)));
    assert!(time::timeout(9 * SECOND, call.as_mut()).await.is_err());
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    let (model, passed) = call.await.expect("an answer").into_body();
    assert_eq!(model.as_deref(), Some("m"));
    assert_eq!(passed, body);
    assert_eq!(asked.load(Ordering::Relaxed), 1);
}
