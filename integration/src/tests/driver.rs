//! Random requests with shared prefixes through a gateway, and what was predicted and reported of each.

use crate::{
    engine::{Engine, MODEL},
    gateway::{Decision, Gateway},
    http::Request,
};
use anyhow::{Context, Result, ensure};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use std::{
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};

/// Token ids below this are plain text in Qwen3's vocabulary.
const PLAIN_TOKENS: u32 = 150_000;

/// Conversations that are remembered to go on with.
const REMEMBERED: usize = 12;

/// Makes requests: new prompts, the same again, longer ones behind the same prefix, chats that go on.
pub struct Driver {
    rng: StdRng,
    longest: usize,
    prompts: Vec<Vec<u32>>,
    chats: Vec<Vec<Value>>,
    serial: u64,
}

/// A request and how to go on after it.
pub struct Next {
    /// The path.
    pub path: &'static str,
    /// The body.
    pub body: Value,
    chat: Option<usize>,
}

/// A request that was answered.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The body.
    pub body: Value,
    /// When it was sent, seconds since the epoch.
    pub sent: f64,
    /// Where it went: `host:port`.
    pub engine: String,
    /// Cached tokens that were predicted there.
    pub predicted: usize,
    /// Cached tokens that the engine reported.
    pub reported: usize,
    /// How many of the predicted ones KV events had announced; none if that does not count here.
    pub announced: Option<usize>,
    /// Prompt tokens that the engine reported.
    pub prompt_tokens: usize,
    /// The last batch of that engine's events that the decision knew of.
    pub seq: Option<u64>,
    /// The whole record.
    pub decision: Decision,
}

/// How many predictions were right.
#[derive(Clone, Copy, Debug, Default)]
pub struct Score {
    /// All.
    pub all: usize,
    /// Exactly right.
    pub exact: usize,
    /// Right within one block.
    pub near: usize,
    /// Cached tokens reported.
    pub cached: usize,
    /// Prompt tokens.
    pub prompt: usize,
}

// === impl Driver ===

impl Driver {
    /// Requests whose prompts have up to about `longest` tokens.
    pub fn new(seed: u64, longest: usize) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            longest,
            prompts: Vec::new(),
            chats: Vec::new(),
            serial: 0,
        }
    }

    /// The generator, for the test's own choices.
    pub fn rng(&mut self) -> &mut StdRng {
        &mut self.rng
    }

    /// The next request.
    pub fn request(&mut self) -> Next {
        self.serial += 1;
        let max_tokens = self.rng.random_range(1..=8);
        match self.rng.random_range(0..100) {
            0..25 => self.chat(max_tokens),
            _ => {
                let prompt = self.prompt();
                let mut body = json!({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0});
                if self.rng.random_bool(0.08) {
                    let salt = self.rng.random_range(0..2);
                    body["cache_salt"] = json!(format!("salt {salt}"));
                }
                Next {
                    path: "/v1/completions",
                    body,
                    chat: None,
                }
            }
        }
    }

    /// Token ids: new ones, the same again, or a prefix of old ones and something new behind it.
    fn prompt(&mut self) -> Vec<u32> {
        let old = (!self.prompts.is_empty()).then(|| self.rng.random_range(0..self.prompts.len()));
        let mut prompt = match (old, self.rng.random_range(0..10)) {
            (Some(old), 0..2) => return self.prompts[old].clone(),
            (Some(old), 2..7) => {
                let keep = self.rng.random_range(1..=self.prompts[old].len());
                self.prompts[old][..keep].to_vec()
            }
            _ => Vec::new(),
        };
        let room = self.longest.saturating_sub(prompt.len()).max(2);
        let mut more = self.rng.random_range(1..room);
        if self.rng.random_bool(0.15) {
            // A whole number of blocks: the engine recomputes and announces the last one again.
            more += (32 - (prompt.len() + more) % 32) % 32;
        }
        let rng = &mut self.rng;
        prompt.extend((0..more).map(|_| rng.random_range(0..PLAIN_TOKENS)));
        remember(&mut self.rng, &mut self.prompts, prompt.clone());
        prompt
    }

    fn chat(&mut self, max_tokens: u32) -> Next {
        let old = (!self.chats.is_empty() && self.rng.random_bool(0.6))
            .then(|| self.rng.random_range(0..self.chats.len()));
        let words = self.rng.random_range(5..400);
        let text = text(&mut self.rng, words);
        let chat = match old {
            Some(old) => old,
            None => {
                let system = json!({"role": "system", "content": "You answer briefly and kindly, and say so when you do not know."});
                remember(&mut self.rng, &mut self.chats, vec![system])
            }
        };
        self.chats[chat].push(json!({"role": "user", "content": text}));
        Next {
            path: "/v1/chat/completions",
            body: json!({"model": MODEL, "messages": self.chats[chat], "max_tokens": max_tokens, "temperature": 0}),
            chat: Some(chat),
        }
    }

    /// Sends a request through the gateway, alone, and reads what was predicted and reported.
    pub async fn send(&mut self, gateway: &Gateway, next: Next) -> Result<Seen> {
        let id = format!("r{}-{:08x}", self.serial, self.rng.random::<u32>());
        let (seen, reply) = send(gateway, &id, next.path, next.body).await?;
        self.go_on(next.chat, &reply);
        Ok(seen)
    }

    /// Sends a request to an engine itself: nothing is predicted.
    pub async fn send_to(&mut self, engine: &Engine, next: Next) -> Result<Seen> {
        let sent = now();
        let reply = Request::post(engine.authority(), next.path, &next.body)
            .json()
            .await?;
        self.go_on(next.chat, &reply);
        let (prompt_tokens, reported) = usage(&reply)?;
        Ok(Seen {
            body: next.body,
            sent,
            engine: engine.authority().to_owned(),
            predicted: 0,
            announced: None,
            reported,
            prompt_tokens,
            seq: None,
            decision: Decision(Value::Null),
        })
    }

    /// Takes an answer into its conversation.
    fn go_on(&mut self, chat: Option<usize>, reply: &Value) {
        if let Some(chat) = chat {
            let answer = reply["choices"][0]["message"]["content"]
                .as_str()
                .unwrap_or("")
                .to_owned();
            self.chats[chat].push(json!({"role": "assistant", "content": answer}));
            let length: usize = self.chats[chat]
                .iter()
                .filter_map(|m| m["content"].as_str())
                .map(str::len)
                .sum();
            if length > self.longest * 3 {
                self.chats.swap_remove(chat);
            }
        }
    }
}

/// Sends one request through the gateway and reads the answer and what was predicted and reported.
pub async fn send(gateway: &Gateway, id: &str, path: &str, body: Value) -> Result<(Seen, Value)> {
    let sent = now();
    let answer = Request::post(gateway.authority(), path, &body)
        .header("x-request-id", id)
        .send()
        .await?;
    let reply = answer.json().with_context(|| format!("request {id}"))?;
    let id = answer
        .headers
        .get("x-request-id")
        .and_then(|v| v.to_str().ok())
        .context("the answer has no x-request-id")?;
    let decision = gateway.decision(id).await?;
    let chosen = decision.chosen()?;
    let (prompt_tokens, reported) = usage(&reply)?;
    let seen = Seen {
        body,
        sent,
        engine: chosen.authority().to_owned(),
        predicted: chosen.cached().context("cached")? as usize,
        announced: chosen.announced().map(|n| n as usize),
        reported,
        prompt_tokens,
        seq: chosen.seq(),
        decision: decision.clone(),
    };
    ensure!(
        decision.tokens() == Some(seen.prompt_tokens as u64),
        "request {id}: {:?} prompt tokens were counted, {} reported",
        decision.tokens(),
        seen.prompt_tokens
    );
    Ok((seen, reply))
}

/// Prompt tokens and cached ones of an answer.
fn usage(reply: &Value) -> Result<(usize, usize)> {
    let usage = &reply["usage"];
    let prompt = usage["prompt_tokens"].as_u64().context("prompt_tokens")?;
    // vLLM leaves the details out where nothing was cached.
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    Ok((prompt as usize, cached.as_u64().unwrap_or(0) as usize))
}

// === impl Seen ===

impl Seen {
    /// Whether the prediction was exactly right.
    pub fn exact(&self) -> bool {
        self.predicted == self.reported
    }

    /// The prompt's token ids as `engine` sees them.
    pub async fn ids(&self, engine: &Engine) -> Result<Vec<u32>> {
        match self.body.get("prompt") {
            Some(ids) => Ok(serde_json::from_value(ids.clone())?),
            None => {
                engine
                    .tokenize(&json!({"model": MODEL, "messages": self.body["messages"]}))
                    .await
            }
        }
    }

    /// Its `cache_salt`.
    pub fn salt(&self) -> Option<&str> {
        self.body["cache_salt"].as_str()
    }
}

// === impl Score ===

impl Score {
    /// Counts one more.
    pub fn add(&mut self, seen: &Seen, block: usize) {
        self.all += 1;
        self.exact += usize::from(seen.exact());
        self.near += usize::from(seen.predicted.abs_diff(seen.reported) <= block);
        self.cached += seen.reported;
        self.prompt += seen.prompt_tokens;
    }

    /// The share that was exactly right.
    pub fn exact_share(&self) -> f64 {
        self.exact as f64 / self.all.max(1) as f64
    }

    /// The share that was right within one block.
    pub fn near_share(&self) -> f64 {
        self.near as f64 / self.all.max(1) as f64
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} exact ({:.1} %), {:.1} % within a block, {:.0} % of {} prompt tokens were cached",
            self.exact,
            self.all,
            self.exact_share() * 100.0,
            self.near_share() * 100.0,
            self.cached as f64 / self.prompt.max(1) as f64 * 100.0,
            self.prompt
        )
    }
}

/// Seconds since the epoch.
pub fn now() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |d| d.as_secs_f64())
}

/// Plain words.
pub fn text(rng: &mut StdRng, words: usize) -> String {
    const WORDS: &[&str] = &[
        "river", "turbine", "gate", "of", "the", "under", "seven", "quick", "stone", "and", "then",
        "basin", "level", "rises", "12", "slowly", "water", "42", "when", "it", "rains", "more",
    ];
    let words: Vec<_> = (0..words)
        .map(|_| WORDS[rng.random_range(0..WORDS.len())])
        .collect();
    words.join(" ")
}

fn remember<T>(rng: &mut StdRng, all: &mut Vec<T>, one: T) -> usize {
    if all.len() < REMEMBERED {
        all.push(one);
        return all.len() - 1;
    }
    let at = rng.random_range(0..all.len());
    all[at] = one;
    at
}
