use super::*;
use std::time::Duration;

fn events(api: Api) -> (Events, Record) {
    let record = Record::new("r".into(), api);
    (Events::new(api, record.clone()), record)
}

fn out(events: &mut Events) -> String {
    let mut bytes = Vec::new();
    while let Some(part) = events.pop() {
        bytes.extend_from_slice(&part);
    }
    String::from_utf8(bytes).expect("text")
}

fn push(events: &mut Events, text: &str) -> Read {
    events.push(Bytes::copy_from_slice(text.as_bytes()))
}

const ROLE: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
const TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\n\n";

#[test]
fn only_whole_events_go_out() {
    let (mut events, _) = events(Api::Chat);
    assert_eq!(push(&mut events, &TOKEN[..10]), Read::Nothing);
    assert_eq!(out(&mut events), "");
    assert_eq!(events.held(), 10);
    let read = push(&mut events, &format!("{}{}", &TOKEN[10..], &TOKEN[..5]));
    assert_eq!(read, Read::Events(EventKind::Token));
    assert_eq!(out(&mut events), TOKEN);
    assert_eq!(events.held(), 5);
    events.finish();
    assert_eq!(out(&mut events), TOKEN[..5]);
}

#[test]
fn comments_are_no_events() {
    let (mut events, _) = events(Api::Chat);
    assert_eq!(push(&mut events, ": hello\n\n"), Read::Nothing);
    assert_eq!(out(&mut events), ": hello\n\n");
    assert_eq!(events.count(), 0);
}

#[test]
fn nothing_goes_out_behind_an_error() {
    let error = "data: {\"error\":{\"message\":\"m\"}}\n\n";
    for split in 0..=error.len() {
        let (mut events, _) = events(Api::Chat);
        push(&mut events, TOKEN);
        let mut read = push(&mut events, &error[..split]);
        if split < error.len() {
            assert!(!matches!(read, Read::Error(_)), "{split}");
            read = push(&mut events, &format!("{}data: [DONE]\n\n", &error[split..]));
        }
        assert!(matches!(read, Read::Error(EventKind::Error(_))), "{split}");
        assert_eq!(out(&mut events), format!("{TOKEN}{error}"), "{split}");
    }
}

/// J4: the first token is the first content, not the first event.
#[tokio::test(start_paused = true)]
async fn first_tokens() {
    let reasoning = "data: {\"choices\":[{\"delta\":{\"reasoning\":\"hm\"}}]}\n\n";
    let tool = "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"name\":\"f\"}}]}}]}\n\n";
    for token in [TOKEN, reasoning, tool] {
        let (mut events, record) = events(Api::Chat);
        tokio::time::advance(Duration::from_millis(100)).await;
        push(&mut events, ROLE);
        assert_eq!(record.note(|n| n.first_token), None);
        tokio::time::advance(Duration::from_millis(2900)).await;
        push(&mut events, token);
        tokio::time::advance(Duration::from_secs(1)).await;
        push(&mut events, token);
        assert_eq!(record.note(|n| n.first_token), Some(Duration::from_secs(3)));
    }
}

/// A7: usage counts wherever it stands.
#[test]
fn usage() {
    let usage = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":13,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":8}}}";
    for stream in [
        format!("{TOKEN}{usage}\n\ndata: [DONE]\n\n"),
        format!("{TOKEN}{usage}\n"),
        format!("{TOKEN}{usage}"),
        format!("{TOKEN}data: [DONE]\n\n{usage}\n\n"),
    ] {
        let (mut events, record) = events(Api::Chat);
        push(&mut events, &stream);
        events.finish();
        assert_eq!(out(&mut events), stream);
        let usage = record.note(|n| n.usage).expect("usage");
        assert_eq!(
            (
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens
            ),
            (13, 2, Some(8))
        );
    }
}

#[test]
fn responses_are_named() {
    let (mut events, _) = events(Api::Responses);
    push(
        &mut events,
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_1\"}}\n\n",
    );
    push(
        &mut events,
        "event: response.in_progress\ndata: {\"type\":\"response.in_progress\",\"response\":{\"id\":\"resp_2\"}}\n\n",
    );
    assert_eq!(events.response(), Some("resp_1"));
    assert_eq!(events.count(), 2);
}

/// A8: what is held of an endless event is bounded.
#[test]
fn endless_events_are_not_held() {
    let (mut events, _) = events(Api::Chat);
    let piece = Bytes::from(vec![b'x'; 10_000]);
    let mut passed = 0;
    for _ in 0..1000 {
        events.push(piece.clone());
        while let Some(part) = events.pop() {
            passed += part.len();
        }
        assert!(events.held() <= MAX_EVENT);
    }
    assert!(events.is_broken_up());
    assert!(passed + MAX_EVENT >= 10_000_000);
    push(&mut events, "\n\n");
    assert!(!events.is_broken_up());
}

#[test]
fn boundaries() {
    for (bytes, len) in [
        ("a\n\nb\n\n", 3),
        ("a\r\n\r\nb", 5),
        ("a\r\rb", 3),
        ("a\n\r\nb", 4),
        ("a\r\n\nb", 4),
        ("a\nb\n\nc", 5),
        ("a\nb", 3),
        ("a\n", 2),
        ("", 0),
    ] {
        assert_eq!(event(bytes.as_bytes()), len, "{bytes:?}");
    }
}
