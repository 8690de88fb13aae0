//! Our token ids against those of vLLM's own front end, for the same requests.
//!
//! Needs two things that the integration suite provides, and says so when they are missing:
//! `FOREBAY_TOKENIZERS`, a directory with tokenizer directories in it (their names tell the model type: `qwen…`,
//! `llama…`, `deepseek…`), and `FOREBAY_ORACLE_PYTHON`, a Python with vLLM in it. `FOREBAY_ORACLE_CASES` sets how many
//! requests are compared for each tokenizer (default 150). `FOREBAY_TEMPLATES` may name a directory with more templates
//! (`*.jinja`) than the ones here.
#![cfg(feature = "tokenizer")]

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};
use tower_ttft::{
    peek::{Api, InferenceRequest, read},
    prompt::{ChatTemplate, LocalModel, LocalParams, LocalTokenizer, Reason},
};

const SCRIPT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../integration/oracles/transformers_ids.py"
);

/// A request as the peek layer would pass it on.
fn request(api: Api, body: &Value) -> InferenceRequest {
    read(
        api,
        &http::HeaderMap::new(),
        bytes::Bytes::from(body.to_string()),
    )
}

fn name(api: Api) -> &'static str {
    match api {
        Api::Completions => "completions",
        Api::Responses => "responses",
        Api::Messages => "messages",
        _ => "chat",
    }
}

struct Corpus(StdRng);

impl Corpus {
    fn text(&mut self) -> String {
        const PIECES: [&str; 40] = [
            "Hello",
            " world",
            "\n",
            "\n\n",
            "  ",
            "\t",
            " the quick brown fox",
            "1234567",
            " 3.14",
            "你好，世界",
            "привет",
            "שלום עולם",
            "🙂👩‍👩‍👧",
            "e\u{301}",
            "\u{1e9b}\u{323}",
            "\u{a0}",
            "\u{200b}",
            "ﬁ",
            "Å",
            "\u{2028}",
            "<|im_end|>",
            "<|im_start|>",
            "<|eot_id|>",
            "<｜User｜>",
            "<｜end▁of▁sentence｜>",
            "<think>",
            "</think>",
            "<tool_call>",
            "fn main() {\n    let x = 1;\n}\n",
            "it's we'LL",
            "'''",
            "\"quoted\" \\back",
            "{{ x }}",
            "{% if %}",
            "<s>",
            "\r\n",
            "\u{1c}",
            "\u{338}",
            "https://example.com/?q=a&b=c#d",
            "ThisIsCamelCase_and_snake",
        ];
        let n = self.0.random_range(0..8);
        (0..n)
            .map(|_| *PIECES.choose(&mut self.0).unwrap())
            .collect()
    }

    fn nonempty(&mut self) -> String {
        format!("{}x{}", self.text(), self.text())
    }

    fn value(&mut self, depth: u32) -> Value {
        match self.0.random_range(0..if depth == 0 { 6 } else { 8 }) {
            0 => Value::Null,
            1 => Value::from(self.0.random_bool(0.5)),
            2 => Value::from(self.0.random_range(-1_000_000i64..1_000_000)),
            3 => Value::from(self.0.random_range(-1e3..1e3)),
            4 => json!([1.0, 1e16, 1e-7, 0.1, 123456789012345678u64])
                .as_array()
                .unwrap()
                .choose(&mut self.0)
                .unwrap()
                .clone(),
            5 => Value::from(self.text()),
            6 => (0..self.0.random_range(0..3))
                .map(|_| self.value(depth - 1))
                .collect(),
            _ => self.object(depth - 1),
        }
    }

    fn object(&mut self, depth: u32) -> Value {
        let n = self.0.random_range(0..4);
        let pairs = (0..n).map(|i| {
            let key = ["zeta", "alpha", "mid dle", "items", "é", "type"]
                .choose(&mut self.0)
                .unwrap();
            (format!("{key}{i}"), self.value(depth))
        });
        Value::Object(pairs.collect::<Vec<_>>().into_iter().collect())
    }

    fn tools(&mut self) -> Value {
        (0..self.0.random_range(1..4))
            .map(|i| {
                let mut f = json!({"name": format!("tool_{i}"), "parameters": {"type": "object", "properties": self.object(2)}});
                if self.0.random_bool(0.5) {
                    f["description"] = Value::from(self.text());
                }
                if self.0.random_bool(0.3) {
                    f["strict"] = Value::from(true);
                }
                if self.0.random_bool(0.3) {
                    f["unknown"] = Value::from(1);
                }
                if self.0.random_bool(0.5) { json!({"function": f, "type": "function"}) } else { json!({"type": "function", "function": f}) }
            })
            .collect()
    }

    fn content(&mut self) -> Value {
        match self.0.random_range(0..6) {
            0 => (0..self.0.random_range(0..4))
                .map(|_| match self.0.random_range(0..4) {
                    0 => json!({"type": "text", "text": self.text(), "cache_control": {"type": "ephemeral"}}),
                    1 => json!({"text": self.text(), "type": "text"}),
                    2 => json!({"type": "text", "text": ""}),
                    _ => json!({"type": "text", "text": self.nonempty()}),
                })
                .collect(),
            _ => Value::from(self.text()),
        }
    }

    fn arguments(&mut self) -> String {
        match self.0.random_range(0..8) {
            0 => String::new(),
            1 => "not json".into(),
            2 => "[1, 2]".into(),
            3 => r#"{"n":1.0,"e":1E16,"big":123456789012345678901234567890,"dup":1,"dup":2, "neg":-0.0}"#.into(),
            _ => self.object(2).to_string(),
        }
    }

    fn turns(&mut self) -> Vec<Value> {
        let mut out = Vec::new();
        match self.0.random_range(0..5) {
            0 | 1 => out.push(json!({"role": "system", "content": self.content()})),
            2 => out.push(json!({"role": "developer", "content": self.content()})),
            _ => {}
        }
        for turn in 0..self.0.random_range(1..5) {
            out.push(json!({"role": "user", "content": self.content(), "name": "bob"}));
            if self.0.random_bool(0.2) {
                out.last_mut().unwrap()["unknown"] = Value::from(1);
            }
            if turn > 0 && self.0.random_bool(0.4) {
                let mut m = json!({"role": "assistant", "content": self.content()});
                if self.0.random_bool(0.3) {
                    m["content"] = Value::Null;
                }
                if self.0.random_bool(0.4) {
                    let key = if self.0.random_bool(0.5) {
                        "reasoning"
                    } else {
                        "reasoning_content"
                    };
                    m[key] = Value::from(self.text());
                }
                let calls = self.0.random_range(0..3);
                if calls > 0 {
                    m["tool_calls"] = (0..calls)
                        .map(|i| json!({"type": "function", "id": format!("c{i}"), "index": i, "function": {"name": "f", "arguments": self.arguments()}}))
                        .collect();
                    out.push(m);
                    for i in 0..calls {
                        out.push(json!({"role": "tool", "tool_call_id": format!("c{i}"), "content": self.content()}));
                    }
                } else {
                    out.push(m);
                }
            } else {
                out.push(json!({"role": "assistant", "content": self.text()}));
            }
        }
        if self.0.random_bool(0.8) {
            out.push(json!({"role": "user", "content": self.content()}));
        }
        if self.0.random_bool(0.1) {
            out.push(json!({"role": "system", "content": self.text()}));
        }
        out
    }

    fn chat(&mut self) -> Value {
        let mut body = json!({"messages": self.turns()});
        if self.0.random_bool(0.4) {
            body["tools"] = self.tools();
            if self.0.random_bool(0.2) {
                body["tool_choice"] = Value::from("none");
            }
        }
        match self.0.random_range(0..12) {
            0 => body["add_generation_prompt"] = Value::from(false),
            1 => {
                body["add_generation_prompt"] = Value::from(false);
                body["continue_final_message"] = Value::from(true);
            }
            2 => body["chat_template_kwargs"] = json!({"enable_thinking": false}),
            3 => {
                body["reasoning_effort"] =
                    Value::from(*["none", "low", "high"].choose(&mut self.0).unwrap())
            }
            4 => body["add_special_tokens"] = Value::from(true),
            5 => body["documents"] = json!([{"title": "t", "text": self.text()}]),
            6 => body["response_format"] = json!({"type": "json_object"}),
            _ => {}
        }
        body
    }

    fn completions(&mut self) -> Value {
        match self.0.random_range(0..4) {
            0 => json!({"prompt": [self.nonempty(), self.nonempty()]}),
            1 => json!({"prompt": self.nonempty(), "add_special_tokens": false}),
            _ => json!({"prompt": self.nonempty()}),
        }
    }

    fn responses(&mut self) -> Value {
        let mut body = match self.0.random_range(0..3) {
            0 => json!({"input": self.nonempty()}),
            _ => json!({"input": [
                {"role": "user", "content": self.text()},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": self.text()}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": self.text()}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": self.object(2).to_string()},
                {"type": "function_call_output", "call_id": "c", "output": self.text()},
                {"role": "user", "content": [{"type": "input_text", "text": self.nonempty()}]}]}),
        };
        if self.0.random_bool(0.5) {
            body["instructions"] = Value::from(self.text());
        }
        if self.0.random_bool(0.4) {
            body["tools"] = json!([{"type": "function", "name": "f", "parameters": self.object(2), "strict": true}]);
        }
        if self.0.random_bool(0.2) {
            body["reasoning"] = json!({"effort": "low"});
        }
        body
    }

    fn messages(&mut self) -> Value {
        let mut body = json!({"model": "m", "max_tokens": 10, "messages": [
            {"role": "user", "content": self.nonempty()},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": self.text(), "signature": "s"}, {"type": "text", "text": self.text()},
                {"type": "tool_use", "id": "t", "name": "f", "input": self.object(2)}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": self.text()}]},
                {"type": "text", "text": self.nonempty()}]}]});
        if self.0.random_bool(0.5) {
            body["system"] = json!([{"type": "text", "text": self.text()}, {"type": "text", "text": self.text()}]);
        }
        if self.0.random_bool(0.5) {
            body["tools"] = json!([{"name": "f", "description": self.text(), "input_schema": {"properties": self.object(2)}}]);
        }
        if self.0.random_bool(0.3) {
            body["messages"]
                .as_array_mut()
                .unwrap()
                .push(json!({"role": "system", "content": self.text()}));
            body["messages"]
                .as_array_mut()
                .unwrap()
                .push(json!({"role": "user", "content": self.nonempty()}));
        }
        if self.0.random_bool(0.2) {
            body["thinking"] = json!({"type": "disabled"});
        }
        body
    }

    fn cases(&mut self, n: usize) -> Vec<(Api, Value)> {
        let mut cases: Vec<_> = (0..n)
            .map(|i| match i % 10 {
                0 | 1 => (Api::Completions, self.completions()),
                2 => (Api::Responses, self.responses()),
                3 => (Api::Messages, self.messages()),
                _ => (Api::Chat, self.chat()),
            })
            .collect();
        let long: String = (0..9_000).map(|i| format!("word{i} ")).collect();
        cases.push((
            Api::Chat,
            json!({"messages": [{"role": "user", "content": long}]}),
        ));
        cases
    }
}

/// Ids by the local tokenizer, one list per prompt.
fn ours(local: &LocalTokenizer, req: &InferenceRequest) -> Result<Vec<Vec<u32>>, Reason> {
    local
        .render(req)?
        .texts
        .iter()
        .map(|t| local.tokenize(t))
        .collect()
}

fn theirs(python: &str, dir: &Path, cases: &[(Api, Value)]) -> Vec<Value> {
    let mut child = Command::new(python)
        .arg(SCRIPT)
        .arg(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("FOREBAY_ORACLE_PYTHON can be run");
    let mut stdin = child.stdin.take().unwrap();
    let lines: Vec<String> = cases
        .iter()
        .map(|(api, body)| json!({"api": name(*api), "body": body}).to_string())
        .collect();
    let writer = std::thread::spawn(move || {
        for line in lines {
            writeln!(stdin, "{line}").unwrap();
        }
    });
    let answers: Vec<Value> = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
        .collect();
    writer.join().unwrap();
    assert!(child.wait().unwrap().success(), "the oracle failed");
    answers
}

/// How ours compare with theirs.
#[derive(Default)]
struct Tally {
    equal: usize,
    different: usize,
    refused: usize,
}

fn compare(local: &LocalTokenizer, cases: &[(Api, Value)], answers: &[Value]) -> Tally {
    assert_eq!(answers.len(), cases.len());
    let mut tally = Tally::default();
    for ((api, body), answer) in cases.iter().zip(answers) {
        let req = request(*api, body);
        let Some(want) = answer.get("ids") else {
            tally.refused += 1;
            continue;
        };
        let want: Vec<Vec<u32>> = serde_json::from_value(want.clone()).unwrap();
        if ours(local, &req) == Ok(want) {
            tally.equal += 1;
            continue;
        }
        tally.different += 1;
        if tally.different <= 3 {
            let texts = local.render(&req).map(|r| {
                r.texts
                    .into_iter()
                    .map(|t| t.text)
                    .collect::<Vec<_>>()
                    .concat()
            });
            let theirs: String = answer["text"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect();
            match texts {
                Ok(texts) => {
                    let at = texts
                        .chars()
                        .zip(theirs.chars())
                        .take_while(|(a, b)| a == b)
                        .count();
                    let near = |s: &str| {
                        s.chars()
                            .skip(at.saturating_sub(60))
                            .take(120)
                            .collect::<String>()
                    };
                    eprintln!(
                        "{} at {at}: {body}\n  ours {:?}\n  vLLM {:?}",
                        name(*api),
                        near(&texts),
                        near(&theirs)
                    );
                }
                Err(reason) => eprintln!("{}: {body}\n  ours {reason:?}", name(*api)),
            }
        }
    }
    tally
}

/// What the tests need; none, loudly, if it is not there.
fn oracle() -> Option<(PathBuf, String)> {
    let found = std::env::var("FOREBAY_TOKENIZERS")
        .ok()
        .zip(std::env::var("FOREBAY_ORACLE_PYTHON").ok());
    if found.is_none() {
        eprintln!(
            "SKIPPED 1 test: set FOREBAY_TOKENIZERS and FOREBAY_ORACLE_PYTHON to compare with vLLM's front end"
        );
    }
    found.map(|(tokenizers, python)| (tokenizers.into(), python))
}

fn directories(tokenizers: &Path) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(tokenizers)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.join("tokenizer.json").exists())
        .collect();
    dirs.sort();
    assert!(!dirs.is_empty(), "no tokenizer in {}", tokenizers.display());
    dirs
}

#[test]
fn ids_are_vllms() {
    let Some((tokenizers, python)) = oracle() else {
        return;
    };
    let n = std::env::var("FOREBAY_ORACLE_CASES").map_or(150, |n| n.parse().unwrap());
    let mut failed = 0;
    for dir in directories(&tokenizers) {
        let local = LocalTokenizer::load(&dir, LocalParams::new(7)).unwrap();
        let cases = Corpus(StdRng::seed_from_u64(1)).cases(n);
        let t = compare(&local, &cases, &theirs(&python, &dir, &cases));
        eprintln!(
            "{}: {} equal, {} different, {} that vLLM refuses",
            dir.display(),
            t.equal,
            t.different,
            t.refused
        );
        assert!(t.equal > n / 2, "too few requests that vLLM takes");
        failed += t.different;
    }
    assert_eq!(failed, 0);
}

/// Templates that use most of what templates use, with a small tokenizer.
#[test]
fn templates_render_as_in_vllm() {
    let Some((_, python)) = oracle() else { return };
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut sources = vec![data.join("templates")];
    sources.extend(std::env::var_os("FOREBAY_TEMPLATES").map(PathBuf::from));
    let mut templates: Vec<PathBuf> = sources
        .iter()
        .flat_map(|dir| std::fs::read_dir(dir).unwrap())
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "jinja"))
        .collect();
    templates.sort();
    let n = 60;
    let mut all = Vec::new();
    for (i, path) in templates.iter().enumerate() {
        let source = std::fs::read_to_string(path).unwrap();
        let mut corpus = Corpus(StdRng::seed_from_u64(i as u64));
        all.extend((0..n).map(|_| {
            let mut body = corpus.chat();
            body["chat_template"] = Value::from(source.as_str());
            (Api::Chat, body)
        }));
    }
    let answers = theirs(&python, &data.join("tiny"), &all);
    let mut failed = 0;
    for (i, path) in templates.iter().enumerate() {
        let mut params = LocalParams::new(7);
        params.chat_template = Some(ChatTemplate::Source(std::fs::read_to_string(path).unwrap()));
        let local = LocalTokenizer::load(&data.join("tiny"), params).unwrap();
        let cases: Vec<_> = all[i * n..(i + 1) * n]
            .iter()
            .map(|(api, body)| {
                let mut body = body.clone();
                body.as_object_mut().unwrap().remove("chat_template");
                (*api, body)
            })
            .collect();
        let t = compare(&local, &cases, &answers[i * n..(i + 1) * n]);
        eprintln!(
            "{}: {} equal, {} different, {} that vLLM refuses",
            path.display(),
            t.equal,
            t.different,
            t.refused
        );
        failed += t.different;
    }
    assert_eq!(failed, 0);
}

/// Segments and their cache give what the tokenizer gives for the whole text.
#[test]
fn segments_are_exact_with_real_tokenizers() {
    let Ok(tokenizers) = std::env::var("FOREBAY_TOKENIZERS") else {
        eprintln!("SKIPPED 1 test: set FOREBAY_TOKENIZERS to check segments with real tokenizers");
        return;
    };
    for dir in directories(Path::new(&tokenizers)) {
        let local = LocalTokenizer::load(&dir, LocalParams::new(7)).unwrap();
        let mut corpus = Corpus(StdRng::seed_from_u64(2));
        for _ in 0..1_000 {
            let text: String = (0..5).map(|_| corpus.text()).collect();
            for special in [false, true] {
                let t = tower_ttft::prompt::Text::new(text.clone(), special);
                assert_eq!(
                    local.tokenize(&t),
                    local.encode_whole(&text, special),
                    "{text:?}"
                );
            }
        }
    }
}
