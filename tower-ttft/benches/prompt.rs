//! From a request to its chain: a 64 KiB chat of 20 messages whose text was never seen, the same chat with two more
//! messages, and the same again. Apart from each other: reading and rendering, and tokenizing.
//!
//! With `FOREBAY_TOKENIZERS` set, the tokenizer in its directory `qwen3` is used; else the small one of the tests, which
//! says nothing about real vocabularies.

use bytes::Bytes;
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use futures::executor::block_on;
use http::HeaderMap;
use rand::{SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::json;
use std::{hint::black_box, path::PathBuf, sync::Arc};
use tower_ttft::{
    chain::KeySpace,
    peek::{Api, InferenceRequest, read},
    prompt::{Encode, Encoder, EncoderParams, InPlace, LocalModel, LocalParams, LocalTokenizer},
};

/// Code and prose (comments) to draw lines from.
const SOURCES: [&str; 4] = [
    include_str!("../src/prompt/encoder.rs"),
    include_str!("../src/prompt/chat/parse.rs"),
    include_str!("../src/prompt/tokenizer/mod.rs"),
    include_str!("../src/chain.rs"),
];

/// Conversations of text that differs each time.
struct Talk {
    rng: StdRng,
    lines: Vec<&'static str>,
}

impl Talk {
    fn new() -> Self {
        Self {
            rng: StdRng::seed_from_u64(1),
            lines: SOURCES.iter().flat_map(|s| s.lines()).collect(),
        }
    }

    fn text(&mut self, bytes: usize) -> String {
        let mut out = String::new();
        while out.len() < bytes {
            out.push_str(self.lines.choose(&mut self.rng).unwrap_or(&""));
            out.push('\n');
        }
        out
    }

    fn messages(&mut self, n: usize) -> Vec<serde_json::Value> {
        (0..n)
            .map(|i| {
                let role = if i % 2 == 0 { "user" } else { "assistant" };
                json!({"role": role, "content": self.text(3_200)})
            })
            .collect()
    }
}

fn request(messages: &[serde_json::Value]) -> InferenceRequest {
    let body = json!({"model": "m", "messages": messages, "stream": true});
    read(Api::Chat, &HeaderMap::new(), Bytes::from(body.to_string()))
}

fn load() -> Arc<LocalTokenizer> {
    let dir = match std::env::var_os("FOREBAY_TOKENIZERS") {
        Some(dir) => PathBuf::from(dir).join("qwen3"),
        None => PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny")),
    };
    eprintln!("tokenizer: {}", dir.display());
    Arc::new(LocalTokenizer::load(&dir, LocalParams::new(7)).expect("a tokenizer"))
}

fn encoder(local: &Arc<LocalTokenizer>) -> Encoder {
    let mut params = EncoderParams::new("m", KeySpace::new(1));
    params.local = Some(local.clone());
    params.offload = Arc::new(InPlace);
    Encoder::new(params)
}

fn prompts(c: &mut Criterion) {
    let local = load();
    let encoder = encoder(&local);
    let mut talk = Talk::new();
    for _ in 0..200 {
        block_on(encoder.encode(&request(&talk.messages(20))));
    }

    let mut g = c.benchmark_group("chat-64k");
    g.bench_function("encode/cold", |b| {
        b.iter_batched(
            || request(&talk.messages(20)),
            |req| black_box(block_on(encoder.encode(&req))),
            BatchSize::SmallInput,
        );
    });
    g.bench_function("encode/two-more-messages", |b| {
        b.iter_batched(
            || {
                let mut messages = talk.messages(20);
                block_on(encoder.encode(&request(&messages)));
                messages.extend(talk.messages(2));
                request(&messages)
            },
            |req| black_box(block_on(encoder.encode(&req))),
            BatchSize::SmallInput,
        );
    });
    let same = request(&talk.messages(20));
    g.bench_function("encode/again", |b| {
        b.iter(|| black_box(block_on(encoder.encode(&same))));
    });
    g.bench_function("render", |b| b.iter(|| black_box(local.render(&same))));
    let text = |req: &InferenceRequest| local.render(req).expect("a chat").texts.swap_remove(0);
    let same = text(&same);
    g.bench_function("tokenize/again", |b| {
        b.iter(|| black_box(local.tokenize(&same)))
    });
    g.bench_function("tokenize/cold", |b| {
        b.iter_batched(
            || text(&request(&talk.messages(20))),
            |text| black_box(local.tokenize(&text)),
            BatchSize::SmallInput,
        );
    });
    g.finish();

    let mut g = c.benchmark_group("chat-1k");
    g.bench_function("encode/cold", |b| {
        b.iter_batched(
            || request(&[json!({"role": "user", "content": talk.text(1_000)})]),
            |req| black_box(block_on(encoder.encode(&req))),
            BatchSize::SmallInput,
        );
    });
    g.finish();
}

criterion_group!(benches, prompts);
criterion_main!(benches);
