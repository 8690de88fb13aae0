use super::*;
use crate::{Error, observe::Usage};
use http::HeaderValue;
use http_body_util::BodyExt;
use parking_lot::Mutex;
use proptest::prelude::*;
use std::{collections::VecDeque, sync::Arc, task::Waker};

#[derive(Clone, Debug, PartialEq)]
enum Told {
    FirstByte,
    FirstToken,
    Usage(u32, u32, Option<u32>),
    End(End),
    Dropped,
}

#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<Told>>>);

struct Recorder(Notes);

/// Gives frames one by one; `exact` bodies say their length and when they are at their end.
struct Frames {
    frames: VecDeque<Result<Frame<Bytes>, Error>>,
    exact: bool,
}

// === impl Notes ===

impl Notes {
    fn told(&self) -> Vec<Told> {
        self.0.lock().clone()
    }

    fn note(&self, told: Told) {
        self.0.lock().push(told);
    }
}

// === impl Recorder ===

impl Observer for Recorder {
    fn first_byte(&mut self, _: Instant) {
        self.0.note(Told::FirstByte);
    }

    fn first_token(&mut self, _: Instant) {
        self.0.note(Told::FirstToken);
    }

    fn usage(&mut self, usage: Usage) {
        self.0.note(Told::Usage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
        ));
    }

    fn end(&mut self, _: Instant, end: End) {
        self.0.note(Told::End(end));
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.0.note(Told::Dropped);
    }
}

// === impl Frames ===

impl Body for Frames {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        Poll::Ready(self.frames.pop_front())
    }

    fn is_end_stream(&self) -> bool {
        self.exact && self.frames.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        if !self.exact {
            return SizeHint::default();
        }
        SizeHint::with_exact(
            self.frames
                .iter()
                .flatten()
                .filter_map(Frame::data_ref)
                .map(|d| d.len() as u64)
                .sum(),
        )
    }
}

fn split(bytes: &[u8], cuts: &[usize]) -> Vec<Bytes> {
    let mut cuts: Vec<usize> = cuts.iter().map(|c| c % (bytes.len() + 1)).collect();
    cuts.extend([0, bytes.len()]);
    cuts.sort_unstable();
    cuts.windows(2)
        .map(|pair| Bytes::copy_from_slice(&bytes[pair[0]..pair[1]]))
        .collect()
}

fn observed(
    api: Api,
    status: u16,
    content_type: &'static str,
    frames: Vec<Result<Frame<Bytes>, Error>>,
    exact: bool,
) -> (ObserveBody<Frames, Recorder>, Notes) {
    let notes = Notes::default();
    let headers =
        HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static(content_type))]);
    let frames = Frames {
        frames: frames.into(),
        exact,
    };
    let status = StatusCode::from_u16(status).expect("a status");
    let body = ObserveBody::new(frames, api, status, &headers, Recorder(notes.clone()));
    (body, notes)
}

const SSE: &str = "text/event-stream; charset=utf-8";

/// Reads all of an answer and checks that it arrives as it was.
fn told(
    api: Api,
    status: u16,
    content_type: &'static str,
    bytes: &[u8],
    cuts: &[usize],
    exact: bool,
) -> Vec<Told> {
    let parts = split(bytes, cuts);
    let frames = parts.iter().map(|p| Ok(Frame::data(p.clone()))).collect();
    let (mut body, notes) = observed(api, status, content_type, frames, exact);
    let mut cx = Context::from_waker(Waker::noop());
    let mut passed = Vec::new();
    while !body.is_end_stream() {
        assert_eq!(body.size_hint().exact().is_some(), exact);
        match Pin::new(&mut body).poll_frame(&mut cx) {
            Poll::Ready(Some(Ok(frame))) => passed.push(frame.into_data().expect("data")),
            Poll::Ready(None) => break,
            other => panic!("{other:?}"),
        }
    }
    // Frame by frame, not only byte by byte: nothing is held back.
    assert_eq!(passed, parts);
    let told = notes.told();
    assert_eq!(
        told.last(),
        Some(&Told::Dropped),
        "the observer goes at the end, not with the body"
    );
    told[..told.len() - 1].to_vec()
}

/// What vLLM 0.32 sends for a chat with `include_usage`, shortened.
const CHAT: &str = concat!(
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":" files \"usage\" \"error\":{}"},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"id":"c","choices":[{"index":0,"delta":{"content":"retch é"},"finish_reason":"length"}]}"#,
    "\n\n",
    r#"data: {"id":"c","choices":[],"usage":{"prompt_tokens":13,"total_tokens":16,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}"#,
    "\n\n",
    "data: [DONE]\n\n",
);

fn chat_told() -> Vec<Told> {
    vec![
        Told::FirstByte,
        Told::FirstToken,
        Told::Usage(13, 3, Some(8)),
        Told::End(End::Complete),
    ]
}

const RESPONSES: &str = concat!(
    "event: response.created\ndata: {\"response\":{\"usage\":null,\"error\":null},\"type\":\"response.created\"}\n\n",
    "event: response.output_text.delta\ndata: {\"delta\":\" f\",\"type\":\"response.output_text.delta\"}\n\n",
    "event: response.output_text.delta\ndata: {\"delta\":\"g\",\"type\":\"response.output_text.delta\"}\n\n",
    "event: response.completed\ndata: {\"response\":{\"status\":\"incomplete\",\"usage\":{\"input_tokens\":13,\"input_tokens_details\":{\"cached_tokens\":0},\"output_tokens\":3}},\"type\":\"response.completed\"}\n\n",
);

const MESSAGES: &str = concat!(
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":13,\"output_tokens\":0}}}\n\n",
    "event: content_block_start\ndata: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\",\"text\":\"\"},\"index\":0}\n\n",
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\" f\"},\"index\":0}\n\n",
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"max_tokens\"},\"usage\":{\"output_tokens\":3}}\n\n",
    "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
);

#[test]
fn streams_of_each_api() {
    assert_eq!(
        told(Api::Chat, 200, SSE, CHAT.as_bytes(), &[], false),
        chat_told()
    );
    assert_eq!(
        told(Api::Chat, 200, SSE, CHAT.as_bytes(), &[], true),
        chat_told()
    );
    assert_eq!(
        told(Api::Responses, 200, SSE, RESPONSES.as_bytes(), &[], false),
        [
            Told::FirstByte,
            Told::FirstToken,
            Told::Usage(13, 3, Some(0)),
            Told::End(End::Complete)
        ]
    );
    assert_eq!(
        told(Api::Messages, 200, SSE, MESSAGES.as_bytes(), &[], false),
        [
            Told::FirstByte,
            Told::Usage(13, 0, None),
            Told::FirstToken,
            Told::Usage(13, 3, None),
            Told::End(End::Complete)
        ]
    );
}

#[test]
fn every_single_cut() {
    for cut in 0..CHAT.len() {
        assert_eq!(
            told(Api::Chat, 200, SSE, CHAT.as_bytes(), &[cut], false),
            chat_told(),
            "{cut}"
        );
    }
}

#[test]
fn usage_counts_however_the_stream_ends() {
    let (events, _) = CHAT.split_once("data: [DONE]").expect("it is there");
    let (deltas, usage) = events
        .split_once("\n\ndata: {\"id\":\"c\",\"choices\":[],")
        .expect("it is there");
    let no_newline = events.trim_end().to_owned();
    let late = format!("{deltas}\n\ndata: [DONE]\n\ndata: {{\"choices\":[],{usage}");
    for (stream, end) in [
        (events.to_owned(), End::Broken),
        (format!("{no_newline}\n"), End::Broken),
        (no_newline, End::Broken),
        (late, End::Complete),
        (CHAT.trim_end().to_owned(), End::Complete),
    ] {
        let told = told(Api::Chat, 200, SSE, stream.as_bytes(), &[], false);
        assert_eq!(
            told,
            [
                Told::FirstByte,
                Told::FirstToken,
                Told::Usage(13, 3, Some(8)),
                Told::End(end)
            ],
            "{stream}"
        );
    }
}

/// As vLLM ends its streams when its engine core is killed: an error, `[DONE]` and a clean end.
#[test]
fn an_error_event_is_an_error_whatever_follows() {
    const ERROR: &str = "data: {\"error\": {\"message\": \"EngineCore encountered an issue.\", \"type\": \"InternalServerError\", \"param\": null, \"code\": 500}}\n\n";
    let (events, done) = CHAT.split_at(CHAT.len() - "data: [DONE]\n\n".len());
    let late = format!("{events}{ERROR}{done}");
    let told_late = told(Api::Chat, 200, SSE, late.as_bytes(), &[], false);
    assert_eq!(told_late.last(), Some(&Told::End(End::EngineError)));
    let first = format!("{ERROR}{done}");
    assert_eq!(
        told(Api::Chat, 200, SSE, first.as_bytes(), &[], false),
        [Told::FirstByte, Told::End(End::EngineError)]
    );
    let named = "event: error\ndata: {\"type\":\"error\",\"error\":{\"message\":\"m\"}}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    assert_eq!(
        told(Api::Messages, 200, SSE, named.as_bytes(), &[], false),
        [Told::FirstByte, Told::End(End::EngineError)]
    );
}

#[test]
fn an_empty_abort_is_no_answer() {
    let stream = "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n";
    assert_eq!(
        told(Api::Completions, 200, SSE, stream.as_bytes(), &[], false),
        [Told::FirstByte, Told::End(End::EngineError)]
    );
}

#[test]
fn a_stream_cut_short_is_broken() {
    for (api, stream) in [
        (Api::Chat, CHAT),
        (Api::Responses, RESPONSES),
        (Api::Messages, MESSAGES),
    ] {
        let (cut, _) = stream.trim_end().rsplit_once("\n\n").expect("events");
        let told = told(api, 200, SSE, cut.as_bytes(), &[], false);
        assert_eq!(told.last(), Some(&Told::End(End::Broken)), "{api:?}");
    }
}

#[test]
fn json_answers() {
    let json = "application/json";
    let answer = br#"{"id":"c","choices":[{"index":0,"message":{"content":"\"error\":{}"},"finish_reason":"stop"}],"usage":{"prompt_tokens":13,"total_tokens":14,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}},"error":null}"#;
    for cuts in [vec![], vec![7, 30, 100, 150, 200]] {
        assert_eq!(
            told(Api::Chat, 200, json, answer, &cuts, true),
            [
                Told::FirstByte,
                Told::Usage(13, 1, Some(0)),
                Told::End(End::Complete)
            ],
            "no first token: only streams tell when it came"
        );
    }
    let error = br#"{"error":{"message":"cannot schedule new futures after shutdown","code":500}}"#;
    for status in [200, 500] {
        assert_eq!(
            told(Api::Chat, status, json, error, &[], true),
            [Told::FirstByte, Told::End(End::EngineError)]
        );
    }
    assert_eq!(
        told(
            Api::Chat,
            404,
            json,
            br#"{"detail":"Not Found"}"#,
            &[],
            true
        ),
        [Told::FirstByte, Told::End(End::EngineError)]
    );
    assert_eq!(
        told(Api::Chat, 200, json, &answer[..100], &[], false),
        [Told::FirstByte, Told::End(End::Broken)]
    );
}

#[test]
fn other_answers() {
    assert_eq!(
        told(
            Api::Other,
            200,
            "text/plain",
            b"data: {\"error\":1}",
            &[3],
            false
        ),
        [Told::FirstByte, Told::End(End::Complete)]
    );
    assert_eq!(
        told(Api::Other, 200, "text/plain", b"", &[], false),
        [Told::End(End::Complete)]
    );
    // A stream whose protocol is not known may end as it likes.
    assert_eq!(
        told(Api::Other, 200, SSE, b"data: tick\n\n", &[], false),
        [Told::FirstByte, Told::End(End::Complete)]
    );
    let notes = Notes::default();
    let headers = HeaderMap::from_iter([
        (header::CONTENT_TYPE, HeaderValue::from_static(SSE)),
        (header::CONTENT_ENCODING, HeaderValue::from_static("gzip")),
    ]);
    let frames = Frames {
        frames: [Ok(Frame::data(Bytes::from_static(b"\x1f\x8b")))].into(),
        exact: true,
    };
    let mut body = ObserveBody::new(
        frames,
        Api::Chat,
        StatusCode::OK,
        &headers,
        Recorder(notes.clone()),
    );
    let polled = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(polled, Poll::Ready(Some(Ok(_)))));
    assert_eq!(
        notes.told(),
        [Told::FirstByte, Told::End(End::Complete), Told::Dropped]
    );
}

#[test]
fn a_body_that_breaks_is_broken() {
    let frames = |text: &str| {
        vec![
            Ok(Frame::data(Bytes::copy_from_slice(text.as_bytes()))),
            Err("reset".into()),
        ]
    };
    for (text, end) in [
        (CHAT, End::Broken),
        (&CHAT[..200], End::Broken),
        ("data: {\"error\":{\"code\":500}}", End::EngineError),
    ] {
        let (mut body, notes) = observed(Api::Chat, 200, SSE, frames(text), false);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(matches!(
            Pin::new(&mut body).poll_frame(&mut cx),
            Poll::Ready(Some(Ok(_)))
        ));
        assert!(matches!(
            Pin::new(&mut body).poll_frame(&mut cx),
            Poll::Ready(Some(Err(_)))
        ));
        let told = notes.told();
        assert_eq!(told[told.len() - 2..], [Told::End(end), Told::Dropped]);
    }
}

#[test]
fn leaving_before_the_end_tells_nothing_and_behind_it_everything() {
    let (deltas, _) = CHAT.split_once("data: [DONE]").expect("it is there");
    let error = format!("{deltas}data: {{\"error\":{{\"code\":500}}}}\n\n");
    for (stream, end) in [
        ("", None),
        (deltas, None),
        (CHAT, Some(End::Complete)),
        (&*error, Some(End::EngineError)),
    ] {
        let frame = Frame::data(Bytes::copy_from_slice(stream.as_bytes()));
        let (mut body, notes) = observed(Api::Chat, 200, SSE, vec![Ok(frame)], false);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(matches!(
            Pin::new(&mut body).poll_frame(&mut cx),
            Poll::Ready(Some(Ok(_)))
        ));
        assert!(!notes.told().contains(&Told::Dropped));
        drop(body);
        let mut told = notes.told();
        assert_eq!(told.pop(), Some(Told::Dropped));
        let ended = told.iter().find_map(|t| match t {
            Told::End(end) => Some(*end),
            _ => None,
        });
        assert_eq!(ended, end, "{stream}");
    }
}

#[test]
fn an_event_of_any_size_passes_in_bounded_memory() {
    let chunk = Bytes::from(vec![b'x'; 1 << 16]);
    let mut frames = vec![Ok(Frame::data(Bytes::from_static(
        b"event: response.completed\ndata: ",
    )))];
    frames.extend((0..64).map(|_| Ok(Frame::data(chunk.clone()))));
    let (mut body, notes) = observed(Api::Responses, 200, SSE, frames, false);
    let mut cx = Context::from_waker(Waker::noop());
    let mut bytes = 0;
    while let Poll::Ready(Some(Ok(frame))) = Pin::new(&mut body).poll_frame(&mut cx) {
        bytes += frame.data_ref().map_or(0, Bytes::len);
        if let Some(Watch {
            shape: Shape::Events(framer),
            ..
        }) = &body.watch
        {
            assert!(framer.held() <= MAX_EVENT);
        }
    }
    assert_eq!(bytes, 32 + (64 << 16));
    assert_eq!(
        notes.told(),
        [Told::FirstByte, Told::End(End::Complete), Told::Dropped]
    );
}

#[tokio::test]
async fn trailers_pass() {
    let trailers = HeaderMap::from_iter([(header::ETAG, HeaderValue::from_static("x"))]);
    let frames = vec![
        Ok(Frame::data(Bytes::from_static(CHAT.as_bytes()))),
        Ok(Frame::trailers(trailers.clone())),
    ];
    let (body, notes) = observed(Api::Chat, 200, SSE, frames, false);
    let collected = body.collect().await.expect("no error");
    assert_eq!(collected.trailers(), Some(&trailers));
    assert_eq!(collected.to_bytes(), CHAT.as_bytes());
    assert_eq!(notes.told()[..4], chat_told());
}

proptest! {
    #[test]
    fn splits_and_line_ends_never_matter(cuts in prop::collection::vec(any::<usize>(), 0..200), newline in prop::sample::select(&["\n", "\r\n", "\r"][..]), exact in any::<bool>()) {
        let stream = CHAT.replace('\n', newline);
        prop_assert_eq!(told(Api::Chat, 200, SSE, stream.as_bytes(), &cuts, exact), chat_told());
    }

    #[test]
    fn no_bytes_crash_it(bytes in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(&b"data: {}[]\":,\n\n\r usage error choices"[..])], 0..200), cuts in prop::collection::vec(any::<usize>(), 0..20), json in any::<bool>()) {
        let content_type = if json { "application/json" } else { SSE };
        let whole = told(Api::Chat, 200, content_type, &bytes, &[], false);
        prop_assert_eq!(told(Api::Chat, 200, content_type, &bytes, &cuts, false), whole);
    }
}
