use super::*;
use futures::FutureExt;
use http_body_util::channel::{Channel, Sender};
use tower_service::Service;

type Sent = Sender<Bytes, Error>;

/// An answer whose body comes from the sender, as held by default timeouts.
fn held(
    status: StatusCode,
    content_type: &'static str,
) -> (
    Sent,
    BoxFuture<'static, Result<Response<HeldBody<Channel<Bytes, Error>>>, Error>>,
) {
    let (sender, body) = Channel::new(16);
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, content_type.parse().expect("a value"));
    response.extensions_mut().insert(SentAt(Instant::now()));
    response.extensions_mut().insert(EndpointId::new("e:1"));
    let mut answer = Some(response);
    let mut hold = Hold::new(
        tower::service_fn(move |_: Request<()>| {
            std::future::ready(Ok::<_, Error>(answer.take().expect("one request")))
        }),
        HoldMetricFamilies::default(),
    );
    let mut request = Request::new(());
    let read = InferenceRequest::unread(Api::Chat, tower_ttft::peek::BodyRead::Parsed);
    request.extensions_mut().insert(read);
    (sender, hold.call(request))
}

fn stream() -> (
    Sent,
    BoxFuture<'static, Result<Response<HeldBody<Channel<Bytes, Error>>>, Error>>,
) {
    held(StatusCode::OK, "text/event-stream; charset=utf-8")
}

async fn send(sender: &mut Sent, text: &str) {
    let bytes = Bytes::copy_from_slice(text.as_bytes());
    sender.send_data(bytes).await.expect("someone reads");
}

async fn frame(body: &mut HeldBody<Channel<Bytes, Error>>) -> Option<Result<String, Error>> {
    let frame = body.frame().await?;
    Some(frame.map(|frame| {
        let data = frame.into_data().expect("data");
        String::from_utf8(data.to_vec()).expect("text")
    }))
}

fn source(error: &Error) -> &HoldError {
    &error
        .downcast_ref::<Unanswered>()
        .expect("Unanswered")
        .source
}

const TOKEN: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n";

async fn after(start: Instant) -> u64 {
    Instant::now().saturating_duration_since(start).as_secs()
}

#[tokio::test(start_paused = true)]
async fn heads_wait_for_the_first_event() {
    let (mut sender, mut answer) = stream();
    assert!(answer.as_mut().now_or_never().is_none());
    send(&mut sender, &TOKEN[..20]).await;
    assert!(answer.as_mut().now_or_never().is_none());
    send(&mut sender, &TOKEN[20..]).await;
    let mut body = answer.await.expect("an answer").into_body();
    let mut text = String::new();
    while text.len() < TOKEN.len() {
        text += &frame(&mut body).await.expect("more").expect("data");
    }
    assert_eq!(text, TOKEN);
    drop(sender);
    assert!(frame(&mut body).await.is_none());
    assert!(body.is_end_stream());
}

/// `headAfter`: 30 s, then a comment at once and every 15 s, until the first event.
#[tokio::test(start_paused = true)]
async fn silent_streams_are_committed_with_comments() {
    let start = Instant::now();
    let (mut sender, answer) = stream();
    let mut body = answer.await.expect("an answer").into_body();
    assert_eq!(after(start).await, 30);
    for at in [30, 45, 60] {
        let comment = frame(&mut body).await.expect("more").expect("a comment");
        assert!(comment.starts_with(':') && comment.ends_with("\n\n"));
        assert_eq!(after(start).await, at);
    }
    send(&mut sender, TOKEN).await;
    assert_eq!(frame(&mut body).await.expect("more").expect("data"), TOKEN);
    // No more comments: the next thing is the idle time-out.
    let event = frame(&mut body).await.expect("more").expect("an event");
    assert!(event.contains("idle_timeout"), "{event}");
    assert_eq!(after(start).await, 180);
    frame(&mut body)
        .await
        .expect("an end")
        .expect_err("abnormal");
    assert!(frame(&mut body).await.is_none());
}

/// No first token within 600 s, on a committed stream.
#[tokio::test(start_paused = true)]
async fn first_token_timeout() {
    let start = Instant::now();
    let (sender, answer) = stream();
    let mut body = answer.await.expect("an answer").into_body();
    let event = loop {
        let text = frame(&mut body).await.expect("more").expect("data");
        if !text.starts_with(':') {
            break text;
        }
    };
    assert!(event.contains("first_token_timeout"), "{event}");
    assert_eq!(after(start).await, 600);
    frame(&mut body)
        .await
        .expect("an end")
        .expect_err("abnormal");
    drop(sender);
}

/// The same before a whole answer, which shows nothing before its end.
#[tokio::test(start_paused = true)]
async fn first_byte_timeout() {
    for status in [StatusCode::OK, StatusCode::INTERNAL_SERVER_ERROR] {
        let start = Instant::now();
        let (sender, answer) = held(status, "application/json");
        let error = answer.await.expect_err("nothing came");
        assert!(
            matches!(source(&error), HoldError::FirstToken(_)),
            "{error}"
        );
        assert_eq!(after(start).await, 600);
        drop(sender);
    }
}

/// A15: a stream of any length, each pause shorter than the time-out.
#[tokio::test(start_paused = true)]
async fn slow_is_not_unavailable() {
    let (mut sender, answer) = stream();
    let feed = tokio::spawn(async move {
        for _ in 0..30 {
            tokio::time::sleep(Duration::from_secs(100)).await;
            send(&mut sender, TOKEN).await;
        }
    });
    let mut body = answer.await.expect("an answer").into_body();
    let mut tokens = 0;
    while let Some(text) = frame(&mut body).await {
        tokens += usize::from(text.expect("no failure") == TOKEN);
    }
    assert_eq!(tokens, 30);
    feed.await.expect("no panic");
}

#[tokio::test(start_paused = true)]
async fn pauses_within_whole_answers() {
    let start = Instant::now();
    let (mut sender, answer) = held(StatusCode::OK, "application/json");
    send(&mut sender, "{\"half\":").await;
    let mut body = answer.await.expect("an answer").into_body();
    assert_eq!(
        frame(&mut body).await.expect("more").expect("data"),
        "{\"half\":"
    );
    frame(&mut body)
        .await
        .expect("an end")
        .expect_err("abnormal");
    assert_eq!(after(start).await, 120);
    assert!(frame(&mut body).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn failures_name_the_endpoint() {
    let (sender, answer) = stream();
    sender.abort("gone".into());
    let error = answer.await.expect_err("nothing came");
    let unanswered = error.downcast_ref::<Unanswered>().expect("Unanswered");
    assert_eq!(unanswered.endpoint, Some(EndpointId::new("e:1")));
    assert!(matches!(unanswered.source, HoldError::Broken(_)));
}

/// Refusals keep the engine's words, even those that come in pieces.
#[tokio::test(start_paused = true)]
async fn refusals_in_pieces() {
    let words =
        "{\"error\":{\"message\":\"cannot schedule new futures after shutdown\",\"code\":500}}";
    let (mut sender, answer) = held(StatusCode::INTERNAL_SERVER_ERROR, "application/json");
    for part in [&words[..10], &words[10..30], &words[30..]] {
        send(&mut sender, part).await;
    }
    drop(sender);
    let error = answer.await.expect_err("a refusal");
    let unanswered = error.downcast_ref::<Unanswered>().expect("Unanswered");
    assert!(matches!(
        unanswered.source,
        HoldError::Refused(Refusal::draining)
    ));
    let answer = unanswered.answer.as_ref().expect("words");
    assert_eq!(answer.status(), 500);
    assert_eq!(answer.body(), words);
}

/// The same words from an engine with another status, or in an answer of another kind, are none.
#[tokio::test(start_paused = true)]
async fn the_list_is_closed() {
    for (status, words) in [
        (
            StatusCode::BAD_REQUEST,
            "{\"error\":{\"message\":\"cannot schedule new futures\"}}",
        ),
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "{\"error\":{\"message\":\"EngineCore encountered an issue\"}}",
        ),
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            "{\"error\":{\"message\":\"currently busy\"}}",
        ),
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            "cannot schedule new futures",
        ),
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            "{\"detail\":\"cannot schedule new futures\"}",
        ),
        (
            StatusCode::OK,
            "{\"choices\":[{\"text\":\"x\",\"finish_reason\":\"abort\"}]}",
        ),
    ] {
        let (mut sender, answer) = held(status, "application/json");
        send(&mut sender, words).await;
        drop(sender);
        let response = answer.await.expect("passed on");
        assert_eq!(response.status(), status);
        let body = response.into_body().collect().await.expect("whole");
        assert_eq!(body.to_bytes(), words);
    }
}

/// An error answer of any size passes; not all of it is looked at.
#[tokio::test(start_paused = true)]
async fn large_error_answers_pass() {
    let (mut sender, answer) = held(StatusCode::INTERNAL_SERVER_ERROR, "application/json");
    let piece = "x".repeat(40_000);
    let feed = tokio::spawn(async move {
        for _ in 0..4 {
            send(&mut sender, &piece).await;
        }
    });
    let body = answer.await.expect("passed on").into_body();
    let all = body.collect().await.expect("whole").to_bytes();
    assert_eq!(all.len(), 160_000);
    feed.await.expect("no panic");
}
