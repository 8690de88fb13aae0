//! What engines count teaches how long prompts are that nobody here can tokenize.

use crate::support::{
    self, DONE, FakeEngine, Http, Setup, Step, chat_event, chunk, end, sse_head, usage_event,
};
use http::HeaderMap;
use std::sync::Arc;
use tower_ttft::{
    chain::KeySpace,
    peek::{Api, read},
    prompt::{Encode, Encoder, EncoderParams, Source},
};

/// Bytes of text in the chats below.
const TEXT: usize = 6_000;

/// What their engine counts: fewer bytes per token than anyone would guess beforehand, as in Chinese.
const COUNTED: u32 = 4_000;

fn chat(content: &str, more: &str) -> String {
    format!(
        r#"{{"model":"tiny","stream":true,"messages":[{{"role":"user","content":{content}}}]{more}}}"#
    )
}

/// Sends this chat so often, each answered whole; what is thought of the plain chat's length afterwards.
async fn guess_after(answers: usize, body: &str) -> u32 {
    let engine = FakeEngine::start(|_| -> Vec<Step> {
        vec![
            sse_head(),
            chunk(chat_event("a")),
            chunk(usage_event(COUNTED, 1, 0)),
            chunk(DONE),
            end(),
        ]
    })
    .await;
    let encoder = Encoder::new(EncoderParams::new("tiny", KeySpace::new(1)));
    let mut setup = Setup::tiny(&[&engine]);
    setup.encoder = Arc::new(encoder.clone());
    let gateway = setup.start().await;
    for _ in 0..answers {
        let answer = support::post(Http::One, &gateway.address, "/v1/chat/completions", body).await;
        assert!(answer.clean, "{}", answer.text());
    }
    gateway.idle().await;
    let plain = read(Api::Chat, &HeaderMap::new(), plain().into());
    let prompt = encoder.encode(&plain).await;
    assert!(matches!(prompt.source, Source::Approximate(_)));
    prompt.tokens
}

fn plain() -> String {
    chat(&format!("\"{}\"", "x".repeat(TEXT)), "")
}

#[tokio::test]
async fn guesses_approach_what_engines_count() {
    let before = guess_after(0, &plain()).await;
    let after = guess_after(60, &plain()).await;
    // Four bytes per token, as long as nobody said anything else.
    assert!((1_500..1_520).contains(&before), "{before}");
    assert!(after.abs_diff(COUNTED) < COUNTED / 10, "{after}");
}

/// Counts of prompts that are more, or less, than the text that was sent.
#[tokio::test]
async fn other_counts_teach_nothing() {
    let before = guess_after(0, &plain()).await;
    let text = "x".repeat(TEXT);
    let image = format!(
        r#"[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,AAAA"}}}},{{"type":"text","text":"{text}"}}]"#
    );
    for body in [
        chat(&image, ""),
        chat(&format!("\"{text}\""), r#","truncate_prompt_tokens":9"#),
        chat("\"short\"", ""),
    ] {
        assert_eq!(guess_after(5, &body).await, before, "{:.80}", body);
    }
}
