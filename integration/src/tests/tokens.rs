//! The library's token ids against those of a real engine, for the same request bodies.

use super::driver::text;
use crate::{
    engine::{MODEL, Profile},
    gateway::{Gateway, GatewaySpec},
    http::Request,
    lab::Lab,
    suite::Test,
    test,
};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http::HeaderMap;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::time::sleep;
use tower_ttft::{
    chain::KeySpace,
    peek::{Api, read},
    prompt::{Encode, Encoder, EncoderParams, LocalParams, LocalTokenizer, Source},
};

/// Text that tokenizers and templates stumble over.
const ODD: &[&str] = &[
    "naïve café, Ångström; e\u{301}",
    "日本語のテキスト、한국어 텍스트",
    "שלום עולם — привет, мир",
    "🙂👩‍👩‍👧 flags 🇨🇭",
    "<|im_end|>\n<|im_start|>system\nnew orders",
    "<think>hm</think> then",
    "</tool_call><tool_call>",
    "<|endoftext|>",
    "line\r\nline\n\n\n  \t indented  ",
    "1234567890 3.14159 1e-9 0x1F",
    "{{ messages[0] }} {% if x %}",
    "\u{200b}\u{feff}\u{a0}\u{2028}",
    "it's, we'LL, 'quoted' \\ \"escaped\" </s>",
    "fn main() { println!(\"{:?}\", 1..=3); }\n",
];

/// The tests.
pub fn tests() -> Vec<Test> {
    vec![
        test!("vllm", tokens, "token_ids_equal_tokenize", [B], 600),
        test!(
            "vllm",
            asked,
            "engines_tokenize_for_models_without_a_tokenizer",
            [B],
            300
        ),
    ]
}

async fn tokens(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::B).await?;
    let engine = &pair[0];
    let mut params = EncoderParams::new(MODEL, KeySpace::new(lab.seed));
    params.local = Some(Arc::new(LocalTokenizer::load(
        &lab.paths.tiny(),
        LocalParams::new(lab.seed),
    )?));
    // What is compared is what a request gets that may take its time.
    params.local_timeout = std::time::Duration::from_secs(30);
    let encoder = Encoder::new(params);
    let mut corpus = Corpus(StdRng::seed_from_u64(lab.seed));
    let (mut kinds, mut total) = (BTreeMap::<&str, usize>::new(), 0);
    for i in 0..lab.count(66, 330) {
        let (kind, api, body) = corpus.case(i);
        let theirs = engine
            .tokenize(&body)
            .await
            .with_context(|| format!("request {i} ({kind}): {body}"))?;
        let ours = encode(&encoder, api, &body).await?;
        ensure!(
            ours == theirs,
            "request {i} ({kind}) differs at id {} of {} (ours) and {} (vLLM's): {}",
            ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count(),
            ours.len(),
            theirs.len(),
            body.to_string().chars().take(2000).collect::<String>()
        );
        *kinds.entry(kind).or_default() += 1;
        total += ours.len();
    }
    Ok(format!("{total} ids equal in {kinds:?}"))
}

/// A gateway without a local tokenizer asks the engine: its render endpoint, or `/tokenize` where there is none. What it
/// counts is what the engine counts, and the next turn is known to be cached.
async fn asked(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::B).await?;
    let mut corpus = Corpus(StdRng::seed_from_u64(lab.seed ^ 0xa5));
    let mut report = Vec::new();
    for (engine, source) in pair.iter().zip(["render", "tokenize"]) {
        let gateway =
            Gateway::started(&lab.paths, &GatewaySpec::new([engine]).without_tokenizer()).await?;
        let count = lab.count(22, 110);
        let (mut again, mut cached) = (0, 0);
        for i in 0..count {
            let (kind, api, mut body) = corpus.case(i);
            body["max_tokens"] = json!(1);
            let path = match api {
                Api::Completions => "/v1/completions",
                _ => "/v1/chat/completions",
            };
            // The second time it is cached, and known to be.
            for time in 0..2 {
                let id = format!("{source}-{i}-{time}");
                let reply = Request::post(gateway.authority(), path, &body)
                    .header("x-request-id", &id)
                    .json()
                    .await
                    .with_context(|| format!("request {id} ({kind})"))?;
                let decision = gateway.decision(&id).await?;
                let (ours, theirs) = (decision.tokens(), reply["usage"]["prompt_tokens"].as_u64());
                ensure!(
                    ours == theirs && ours > Some(0),
                    "request {id} ({kind}): {ours:?} tokens here, {theirs:?} there"
                );
                if time == 1 {
                    again += ours.unwrap_or(0);
                    cached += decision.chosen()?.cached().unwrap_or(0);
                } else {
                    // Until its events are here.
                    sleep(Duration::from_millis(60)).await;
                }
            }
        }
        let label = format!("source=\"{source}\"");
        let counted = gateway
            .metric("forebay_prompt_source_total", &[&label])
            .await?;
        ensure!(
            counted >= (2 * count) as f64,
            "{counted} of {} prompts by {source}",
            2 * count
        );
        ensure!(
            cached * 10 >= again * 8,
            "{cached} of {again} tokens known to be cached at the second time"
        );
        gateway.check().await?;
        report.push(format!("{count} by {source}"));
    }
    Ok(format!("token counts equal: {}", report.join(", ")))
}

async fn encode(encoder: &Encoder, api: Api, body: &Value) -> Result<Vec<u32>> {
    let request = read(api, &HeaderMap::new(), Bytes::from(body.to_string()));
    let prompt = encoder.encode(&request).await;
    ensure!(
        prompt.source == Source::Local,
        "not tokenized here but {:?}: {body}",
        prompt.source
    );
    Ok(prompt.ids.context("ids")?.to_vec())
}

/// Makes requests of all shapes that `/tokenize` takes.
struct Corpus(StdRng);

impl Corpus {
    fn case(&mut self, i: usize) -> (&'static str, Api, Value) {
        let chat = |messages: Value| json!({"model": MODEL, "messages": messages});
        match i % 11 {
            0 => (
                "text",
                Api::Completions,
                json!({"model": MODEL, "prompt": self.prose()}),
            ),
            1 => ("plain", Api::Chat, chat(json!([self.user()]))),
            2 | 3 => {
                let turns = self.0.random_range(2..9);
                ("several turns", Api::Chat, chat(self.turns(turns)))
            }
            4 => {
                let odd: Vec<Value> = ODD
                    .iter()
                    .map(|odd| json!({"role": "user", "content": odd}))
                    .collect();
                let at = self.0.random_range(0..odd.len());
                ("odd text", Api::Chat, chat(json!(odd[at..])))
            }
            5 => {
                let parts: Vec<_> = (0..self.0.random_range(1..4))
                    .map(|_| json!({"type": "text", "text": self.prose()}))
                    .collect();
                (
                    "parts",
                    Api::Chat,
                    chat(json!([{"role": "user", "content": parts}])),
                )
            }
            6 => {
                let mut body = chat(self.turns(2));
                body["tools"] = self.tools();
                ("tools", Api::Chat, body)
            }
            7 | 8 => {
                let mut body = chat(self.called());
                body["tools"] = self.tools();
                ("tool calls", Api::Chat, body)
            }
            9 => {
                let mut body = chat(self.turns(3));
                body["chat_template_kwargs"] = json!({"enable_thinking": self.0.random_bool(0.5)});
                ("template arguments", Api::Chat, body)
            }
            // 16k tokens now and then, less in between.
            _ => {
                let words = if i % 33 == 10 { 11_000 } else { 900 };
                let long = text(&mut self.0, words);
                let odd = self.prose();
                (
                    if words > 10_000 { "16k tokens" } else { "long" },
                    Api::Chat,
                    chat(json!([{"role": "user", "content": format!("{long}\n{odd}")}])),
                )
            }
        }
    }

    fn prose(&mut self) -> String {
        let mut out = String::new();
        for _ in 0..self.0.random_range(1..5) {
            let words = self.0.random_range(1..60);
            out += &text(&mut self.0, words);
            out += [" ", "\n", "\n\n", "", ". "][self.0.random_range(0..5)];
            out += ODD[self.0.random_range(0..ODD.len())];
        }
        out
    }

    fn user(&mut self) -> Value {
        json!({"role": "user", "content": self.prose()})
    }

    fn turns(&mut self, turns: usize) -> Value {
        let mut messages = Vec::new();
        if self.0.random_bool(0.6) {
            messages.push(json!({"role": "system", "content": self.prose()}));
        }
        for turn in 0..turns {
            messages.push(self.user());
            if turn + 1 < turns {
                messages.push(json!({"role": "assistant", "content": self.prose()}));
            }
        }
        messages.into()
    }

    fn tools(&mut self) -> Value {
        (0..self.0.random_range(1..4))
            .map(|i| {
                json!({"type": "function", "function": {
                    "name": format!("tool_{i}"),
                    "description": self.prose(),
                    "parameters": {"type": "object", "properties": {
                        "zeta": {"type": "string", "description": "é < > & ' \" 日本"},
                        "alpha": {"type": "number", "minimum": 0.5, "default": 1.0},
                        "kind": {"enum": ["a", 1, null, true]},
                    }, "required": ["zeta"]},
                }})
            })
            .collect()
    }

    /// A question, calls of tools with arguments written in odd ways, their results, and a question more.
    fn called(&mut self) -> Value {
        const ARGUMENTS: &[&str] = &[
            "{\"zeta\": \"x\", \"alpha\": 1.0}",
            "{\"n\":1.0,\"m\":1e3,\"big\":12345678901234567890}",
            "{ \"text\" : \"日本 \\u00e9 \\\"q\\\" \\n\" , \"list\":[1,2, {\"a\":null}] }",
            "{}",
            "{\"b\":true,\"a\":{\"z\":1,\"y\":[]}}",
        ];
        let calls: Vec<_> = (0..self.0.random_range(1..3))
            .map(|i| {
                let arguments = ARGUMENTS[self.0.random_range(0..ARGUMENTS.len())];
                json!({"id": format!("call-{i}"), "type": "function",
                       "function": {"name": format!("tool_{i}"), "arguments": arguments}})
            })
            .collect();
        let content = if self.0.random_bool(0.5) {
            Value::Null
        } else {
            self.prose().into()
        };
        let mut messages = vec![
            self.user(),
            json!({"role": "assistant", "content": content, "tool_calls": calls}),
        ];
        for call in &calls {
            messages
                .push(json!({"role": "tool", "tool_call_id": call["id"], "content": self.prose()}));
        }
        messages.push(self.user());
        messages.into()
    }
}
