//! What is said of requests: never what was asked or answered.

use crate::support::*;
use parking_lot::Mutex;
use std::{io, sync::Arc};
use tracing_subscriber::fmt::MakeWriter;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

const CANARY: &str = "canary-7f3a";

/// I7: a canary in every place of a request and of its answer, at the most talkative level of our own code.
#[tokio::test]
async fn prompts_are_not_logged() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(lines.clone())
        .with_ansi(false)
        .with_env_filter("off,forebay=trace,forebay_proxy=trace,tower_ttft=trace")
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);

    let canary_error = format!("{CANARY} is too long");
    let engine = FakeEngine::start(move |seen| match seen.number % 6 {
        0 => chat_stream(&[CANARY]),
        1 => json("200 OK", chat_json(CANARY)),
        2 => error("400 Bad Request", &canary_error),
        3 => error("500 Internal Server Error", &format!("{CANARY} {DRAINING}")),
        4 => vec![sse_head(), chunk(error_event(CANARY)), chunk(DONE), end()],
        _ => vec![
            sse_head(),
            chunk(chat_event(CANARY)),
            chunk(CANARY),
            Step::Rst,
        ],
    })
    .await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    let bodies = [
        format!(
            r#"{{"model":"tiny","stream":true,"messages":[{{"role":"user","content":"{CANARY}"}}]}}"#
        ),
        format!(r#"{{"model":"tiny","tools":[{{"{CANARY}":1}}],"cache_salt":"{CANARY}"}}"#),
        format!(r#"{{"model":"tiny",,"{CANARY}"#),
        CANARY.to_owned(),
    ];
    for turn in 0..24 {
        let body = bodies[turn % bodies.len()].as_str();
        post(Http::One, &gateway.address, "/v1/chat/completions", body).await;
    }
    gateway.idle().await;
    let text = String::from_utf8(lines.0.lock().clone()).expect("text");
    assert!(!text.contains(CANARY), "{text}");
    // One line for each request, with what operators look for.
    let access: Vec<&str> = text
        .lines()
        .filter(|l| l.contains("forebay::access"))
        .collect();
    assert_eq!(access.len(), 24);
    assert!(
        access[0].contains("model=tiny") && access[0].contains("status=200"),
        "{}",
        access[0]
    );
    assert!(access[0].contains("prompt_tokens=13"), "{}", access[0]);
    assert!(access[0].contains("ttft_ms="), "{}", access[0]);
    assert!(access[0].contains(&engine.address), "{}", access[0]);
}
