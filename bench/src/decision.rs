//! `decision`: from a body's bytes to a booked endpoint, one thread, over eight endpoints with live KV events.
//!
//! Three kinds of a 64 KB chat: the same again, the next turn of a conversation (two messages more, about 6.4 KB), and
//! text that was never seen. Each stage is timed apart: peek (JSON), encode (template, tokens, prefix keys) and pick
//! (index, prediction, booking).

use crate::{
    Error,
    report::{Report, Row, quantile},
};
use bytes::Bytes;
use futures::FutureExt;
use http::HeaderMap;
use std::{path::PathBuf, sync::Arc};
use tokio::time::Instant;
use tower_ttft::{
    chain::KeySpace,
    endpoint::EndpointId,
    events::{BlockStored, EventBatch, GroupKind, KvEvent, Medium},
    load::LoadReport,
    observe::{End, Observer},
    peek::{self, Api},
    policy::PolicySpec,
    pool::{EndpointInfo, Excluded, Pick, PickRequest, Pool, PoolParams},
    prompt::{Encode, Encoder, EncoderParams, LocalParams, LocalTokenizer, Source},
};

const ENDPOINTS: usize = 8;
const BLOCK: usize = 16;
const CHAT_BYTES: usize = 64 << 10;
const MESSAGES: usize = 20;
/// Real prose and code: the sources of this very program.
const CORPUS: [&str; 4] = [
    include_str!("decision.rs"),
    include_str!("report.rs"),
    include_str!("overhead/peers.rs"),
    include_str!("main.rs"),
];

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Fewer rounds.
    pub quick: bool,
    /// A tokenizer directory in Hugging Face layout.
    pub tokenizer: PathBuf,
}

/// Writes chats; the same seed writes the same text.
struct Writer {
    lines: Vec<&'static str>,
    state: u64,
}

/// Microseconds per stage.
#[derive(Default)]
struct Stages {
    peek: Vec<f64>,
    encode: Vec<f64>,
    pick: Vec<f64>,
    all: Vec<f64>,
}

/// What decides.
struct Bench {
    encoder: Encoder,
    pool: Pool,
    stored: u64,
    seq: u64,
}

/// Runs the benchmark.
pub fn run(options: &Options, report: &mut Report) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    let _entered = runtime.enter();
    let mut bench = Bench::new(options)?;
    let rounds = if options.quick { 200 } else { 2_000 };
    let mut writer = Writer::new(1);

    // Words, tables and branch predictors settle before anything is counted.
    for _ in 0..20 {
        let chat = writer.chat(MESSAGES, CHAT_BYTES);
        bench.decide(&body(&chat), &mut Stages::default())?;
    }

    let mut again = Stages::default();
    let chat = writer.chat(MESSAGES, CHAT_BYTES);
    let same = body(&chat);
    bench.decide(&same, &mut Stages::default())?;
    for _ in 0..rounds {
        bench.decide(&same, &mut again)?;
    }

    let mut next_turn = Stages::default();
    for _ in 0..rounds / 2 {
        let mut chat = writer.chat(MESSAGES - 2, CHAT_BYTES * 9 / 10);
        bench.decide(&body(&chat), &mut Stages::default())?;
        chat.extend(writer.chat(2, CHAT_BYTES / 10));
        bench.decide(&body(&chat), &mut next_turn)?;
    }

    let mut cold = Stages::default();
    for _ in 0..rounds / 2 {
        let chat = writer.chat(MESSAGES, CHAT_BYTES);
        bench.decide(&body(&chat), &mut cold)?;
    }

    report.note(format!(
        "{} KB bodies, {ENDPOINTS} endpoints, blocks of {BLOCK}; spreads are p10 to p90",
        same.len() >> 10
    ));
    for (arm, stages) in [
        ("same again", again),
        ("next turn", next_turn),
        ("never seen", cold),
    ] {
        stages.rows(arm, report);
    }
    // The budgets of the request path on one core of a small server; a loaded box may miss them.
    let all = |arm: &str| {
        report
            .rows
            .iter()
            .find(|r| r.arm == arm && r.metric == "all")
            .map_or(f64::NAN, |r| r.value)
    };
    let (warm, cold) = (all("next turn"), all("never seen"));
    report.at_most("next turn, median us", warm, 500.0);
    report.at_most("never seen, median us", cold, 2_000.0);
    Ok(())
}

// === impl Bench ===

impl Bench {
    fn new(options: &Options) -> Result<Self, Error> {
        let keys = KeySpace::new(7);
        let local = LocalTokenizer::load(&options.tokenizer, LocalParams::new(7))?;
        let encoder = Encoder::new(EncoderParams {
            local: Some(Arc::new(local)),
            ..EncoderParams::new("tiny", keys)
        });
        let pool = Pool::new(PoolParams {
            model: "tiny".into(),
            keys,
            policy: PolicySpec::default(),
            seed: 7,
            index_bytes: 1 << 30,
        });
        for i in 0..ENDPOINTS {
            let endpoint = pool.insert(
                EndpointId::new(format!("10.0.0.{i}:8000")),
                EndpointInfo {
                    block_size: Some(BLOCK as u32),
                    blocks: Some(1 << 20),
                    events: true,
                    ..EndpointInfo::default()
                },
            );
            endpoint.set_events_live(true);
            endpoint.set_ready(true);
        }
        Ok(Self {
            encoder,
            pool,
            stored: 0,
            seq: 0,
        })
    }

    /// One decision, timed; then, untimed, the engine's side of it: blocks are announced and the answer ends.
    fn decide(&mut self, body: &Bytes, stages: &mut Stages) -> Result<(), Error> {
        let headers = HeaderMap::new();
        let now = Instant::now();
        for endpoint in self.pool.endpoints() {
            endpoint.report(LoadReport {
                at: now,
                ..idle(now)
            });
        }

        let t0 = Instant::now();
        let request = peek::read(Api::Chat, &headers, body.clone());
        let t1 = Instant::now();
        let prompt = self
            .encoder
            .encode(&request)
            .now_or_never()
            .ok_or("the prompt left the thread")?;
        let t2 = Instant::now();
        if prompt.source != Source::Local {
            return Err(format!("the prompt came from {:?}", prompt.source).into());
        }
        let pick = PickRequest {
            prompt,
            stream: true,
            max_tokens: Some(16),
            request_id: None,
        };
        let picked = self.pool.pick(&pick, &Excluded::default(), t2);
        let t3 = Instant::now();
        let us =
            |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e6;
        stages.peek.push(us(t0, t1));
        stages.encode.push(us(t1, t2));
        stages.pick.push(us(t2, t3));
        stages.all.push(us(t0, t3));

        let Pick::Dispatch(mut ticket) = picked else {
            return Err("no endpoint was picked".into());
        };
        let ids = pick.prompt.ids.clone().ok_or("no ids")?;
        ticket.sent(t3);
        ticket.first_byte(t3);
        ticket.first_token(t3);
        let whole = ids.len() / BLOCK * BLOCK;
        let hashes = (0..whole / BLOCK)
            .map(|i| pick.prompt.chain.keys()[i])
            .collect();
        self.seq += 1;
        self.stored += (whole / BLOCK) as u64;
        ticket.endpoint().apply(&EventBatch {
            seq: self.seq,
            ts: 0.0,
            rank: None,
            events: vec![KvEvent::Stored(BlockStored {
                hashes,
                parent: None,
                tokens: ids[..whole].to_vec(),
                block_size: BLOCK as u32,
                lora_name: None,
                extra_keys: Vec::new(),
                medium: Medium::Gpu,
                group: 0,
                kind: GroupKind::Full,
            })],
        });
        ticket.end(Instant::now(), End::Complete);
        Ok(())
    }
}

fn idle(at: Instant) -> LoadReport {
    LoadReport {
        at,
        running: 0,
        waiting: 0,
        kv_usage: 0.0,
        prefilled_tokens: None,
        prefill_seconds: None,
        preemptions: 0,
    }
}

// === impl Stages ===

impl Stages {
    fn rows(mut self, arm: &str, report: &mut Report) {
        for (metric, samples) in [
            ("peek", &mut self.peek),
            ("encode", &mut self.encode),
            ("pick", &mut self.pick),
            ("all", &mut self.all),
        ] {
            report.rows.push(Row::spread(arm, metric, "us", samples));
        }
        // `spread` sorted them.
        let p99 = quantile(&self.all, 0.99);
        report.rows.push(Row::point(arm, "all, p99", "us", p99));
    }
}

// === impl Writer ===

impl Writer {
    fn new(seed: u64) -> Self {
        Self {
            lines: CORPUS.iter().flat_map(|text| text.lines()).collect(),
            state: seed,
        }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Messages of lines in random order, each of which ends in a number of its own: no text comes twice.
    fn chat(&mut self, messages: usize, bytes: usize) -> Vec<(&'static str, String)> {
        (0..messages)
            .map(|i| {
                let mut text = String::new();
                while text.len() < bytes / messages {
                    let r = self.next();
                    let line = self.lines[(r % self.lines.len() as u64) as usize];
                    text.push_str(line);
                    text.push_str(&format!(" {}\n", r >> 48));
                }
                (if i % 2 == 0 { "user" } else { "assistant" }, text)
            })
            .collect()
    }
}

fn body(chat: &[(&'static str, String)]) -> Bytes {
    let messages: Vec<_> = chat
        .iter()
        .map(|(role, content)| serde_json::json!({"role": role, "content": content}))
        .collect();
    Bytes::from(serde_json::json!({"model": "tiny", "messages": messages, "stream": true, "max_tokens": 16}).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chats_have_their_size_and_never_repeat() {
        let mut writer = Writer::new(3);
        let (a, b) = (writer.chat(20, 64 << 10), writer.chat(20, 64 << 10));
        let len = |c: &[(&str, String)]| c.iter().map(|m| m.1.len()).sum::<usize>();
        assert!((60 << 10..80 << 10).contains(&len(&a)), "{}", len(&a));
        assert!(a.iter().zip(&b).all(|(x, y)| x.1 != y.1));
        assert_eq!(Writer::new(3).chat(20, 64 << 10), a);
    }
}
