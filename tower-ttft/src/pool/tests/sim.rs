//! Simulated engines behind a real pool, in explicit time: first come, first served prefill, an LRU cache of blocks, KV
//! events after a lag, reports when asked. None of its numbers is known to the pool.

use super::super::*;
use crate::{
    chain::{ATOM_TOKENS, Chain, ChainKind},
    events::{BlockRemoved, BlockStored, EventBatch, GroupKind, KvEvent, Medium},
    load::LoadReport,
    observe::{End, Observer, Usage},
    policy::Routing,
    prompt::Source,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    time::Duration,
};

pub(super) const MODEL: &str = "m";

/// How an engine behaves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speed {
    /// Seconds per computed token.
    pub(super) token: f64,
    /// Seconds per prompt byte, before anything else.
    pub(super) byte: f64,
    /// Seconds for anything.
    pub(super) base: f64,
    /// Standard deviation of the log of the prefill's noise.
    pub(super) noise: f64,
}

pub(super) const GPU: Speed = Speed {
    token: 4e-4,
    byte: 1e-7,
    base: 0.02,
    noise: 0.1,
};

pub(super) struct Engine {
    pub(super) endpoint: Endpoint,
    pub(super) speed: Speed,
    pub(super) block: u32,
    /// Keys, and when each was last used.
    cache: HashMap<u64, u64>,
    uses: u64,
    blocks: usize,
    events: bool,
    seq: u64,
    free_at: Instant,
    /// Answers every request with a failure after so many seconds.
    pub(super) fails: Option<f64>,
    /// Reports `cached_tokens`.
    pub(super) tells: bool,
    pub(super) served: u32,
}

/// A request on its way.
pub(super) struct Request {
    pub(super) engine: usize,
    pub(super) sent: Instant,
    pub(super) ttft: Option<f64>,
    pub(super) tokens: u32,
    pub(super) cached: u32,
    pub(super) guessed: u32,
    pub(super) ended: Option<End>,
    ticket: Option<Ticket>,
    output: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    FirstToken(usize),
    End(usize, bool),
    Events(usize, usize),
}

pub(super) struct World {
    pub(super) pool: Pool,
    pub(super) engines: Vec<Engine>,
    pub(super) requests: Vec<Request>,
    pub(super) now: Instant,
    pub(super) rng: StdRng,
    /// Seconds until events arrive.
    pub(super) lag: f64,
    /// Seconds that each generated token takes.
    pub(super) decode: f64,
    due: BinaryHeap<Reverse<(Instant, u64, What)>>,
    batches: Vec<Option<EventBatch>>,
    order: u64,
    keys: KeySpace,
}

pub(super) fn params(routing: Routing) -> PoolParams {
    PoolParams {
        model: MODEL.into(),
        keys: KeySpace::new(1),
        policy: PolicySpec {
            routing,
            ..Default::default()
        },
        seed: 1,
        index_bytes: 64 << 20,
    }
}

/// So many tokens that begin no other text.
pub(super) fn text(which: u32, tokens: u32) -> Vec<u32> {
    (0..tokens)
        .map(|t| which.wrapping_mul(1_000_003).wrapping_add(t % 1000))
        .collect()
}

pub(super) fn prompt(tokens: &[u32]) -> Prompt {
    let ks = KeySpace::new(1);
    let root = ks.root(ChainKind::Tokens, MODEL, None, None);
    Prompt {
        chain: ks.tokens(root, tokens),
        tokens: tokens.len() as u32,
        ids: None,
        bytes: tokens.len() as u32 * 4,
        whole_text: false,
        source: Source::Ids,
    }
}

pub(super) fn request(tokens: &[u32]) -> PickRequest {
    PickRequest {
        prompt: prompt(tokens),
        stream: true,
        max_tokens: Some(16),
        request_id: None,
    }
}

pub(super) fn dispatch(pool: &Pool, tokens: &[u32], now: Instant) -> Ticket {
    match pool.pick(&request(tokens), &Excluded::default(), now) {
        Pick::Dispatch(ticket) => ticket,
        other => panic!("no endpoint: {other:?}"),
    }
}

// === impl World ===

impl World {
    pub(super) fn new(routing: Routing) -> Self {
        Self {
            pool: Pool::new(params(routing)),
            engines: Vec::new(),
            requests: Vec::new(),
            now: Instant::now(),
            rng: StdRng::seed_from_u64(5),
            lag: 0.02,
            decode: 0.02,
            due: BinaryHeap::new(),
            batches: Vec::new(),
            order: 0,
            keys: KeySpace::new(1),
        }
    }

    /// Adds an engine with room for so many blocks and makes it ready.
    pub(super) fn add(&mut self, speed: Speed, block: u32, blocks: usize, events: bool) -> usize {
        let n = self.engines.len();
        let endpoint = self.pool.insert(
            EndpointId::new(format!("10.0.0.{n}:8000")),
            EndpointInfo {
                gpu: None,
                block_size: Some(block),
                blocks: Some(blocks as u64),
                max_seqs: None,
                events,
            },
        );
        endpoint.set_events_live(events);
        endpoint.set_ready(true);
        self.engines.push(Engine {
            endpoint,
            speed,
            block,
            cache: HashMap::new(),
            uses: 0,
            blocks,
            events,
            seq: 0,
            free_at: self.now,
            fails: None,
            tells: true,
            served: 0,
        });
        n
    }

    pub(super) fn with(routing: Routing, engines: usize, events: bool) -> Self {
        let mut w = Self::new(routing);
        for _ in 0..engines {
            w.add(GPU, 16, 20_000, events);
        }
        w.report();
        w
    }

    /// Every engine reports its load.
    pub(super) fn report(&mut self) {
        for n in 0..self.engines.len() {
            let (mut running, mut waiting) = (0, 0);
            for r in self
                .requests
                .iter()
                .filter(|r| r.engine == n && r.ended.is_none())
            {
                match r.ttft {
                    Some(_) => running += 1,
                    None => waiting += 1,
                }
            }
            self.engines[n].endpoint.report(LoadReport {
                at: self.now,
                running,
                waiting,
                kv_usage: 0.0,
                prefilled_tokens: None,
                prefill_seconds: None,
                preemptions: 0,
            });
        }
    }

    /// Sends a request now; gives its number.
    pub(super) fn submit(&mut self, tokens: &[u32], output: u32) -> usize {
        let mut ticket = dispatch(&self.pool, tokens, self.now);
        let engine = self
            .engines
            .iter()
            .position(|e| e.endpoint.id() == ticket.endpoint().id())
            .expect("an engine");
        ticket.sent(self.now);
        let (number, now) = (self.requests.len(), self.now);
        let root = self.keys.root(ChainKind::Tokens, MODEL, None, None);
        let chain = self.keys.tokens(root, tokens);
        let noise = {
            let normal = (0..12)
                .map(|_| self.rng.random_range(0.0..1.0))
                .sum::<f64>()
                - 6.0;
            (self.engines[engine].speed.noise * normal).exp()
        };
        let e = &mut self.engines[engine];
        e.served += 1;
        let guessed = ticket.decision().chosen().map_or(0, |c| c.cached);
        let mut cached = 0;
        if let Some(after) = e.fails {
            self.push(
                now + Duration::from_secs_f64(after),
                What::End(number, false),
            );
        } else {
            let arrive = now
                + Duration::from_secs_f64(e.speed.base + e.speed.byte * tokens.len() as f64 * 4.0);
            let start = arrive.max(e.free_at);
            cached = e.held(&chain, tokens.len() as u32);
            let took = f64::from(tokens.len() as u32 - cached) * e.speed.token * noise;
            let done = start + Duration::from_secs_f64(took);
            e.free_at = done;
            let batch = e.store(&chain, tokens, output);
            self.push(done, What::FirstToken(number));
            let end = done + Duration::from_secs_f64(self.decode * f64::from(output));
            self.push(end, What::End(number, true));
            if let Some(batch) = batch {
                self.batches.push(Some(batch));
                let at = done + Duration::from_secs_f64(self.lag);
                self.push(at, What::Events(engine, self.batches.len() - 1));
            }
        }
        self.requests.push(Request {
            engine,
            sent: now,
            ttft: None,
            tokens: tokens.len() as u32,
            cached,
            guessed,
            ended: None,
            ticket: Some(ticket),
            output,
        });
        number
    }

    /// Lets time pass.
    pub(super) fn run(&mut self, seconds: f64) {
        let until = self.now + Duration::from_secs_f64(seconds);
        while let Some(Reverse((at, _, _))) = self.due.peek()
            && *at <= until
        {
            let Some(Reverse((at, _, what))) = self.due.pop() else {
                break;
            };
            self.now = at;
            self.happen(what);
        }
        self.now = until;
    }

    /// Until nothing is left to happen.
    pub(super) fn finish(&mut self) {
        while let Some(Reverse((at, _, what))) = self.due.pop() {
            self.now = self.now.max(at);
            self.happen(what);
        }
    }

    fn happen(&mut self, what: What) {
        match what {
            What::FirstToken(n) => {
                let r = &mut self.requests[n];
                r.ttft = Some(self.now.saturating_duration_since(r.sent).as_secs_f64());
                if let Some(t) = &mut r.ticket {
                    t.first_byte(self.now);
                    t.first_token(self.now);
                }
            }
            What::End(n, well) => {
                let r = &mut self.requests[n];
                let end = if well { End::Complete } else { End::Broken };
                if let Some(mut t) = r.ticket.take() {
                    if well {
                        t.usage(Usage {
                            prompt_tokens: r.tokens,
                            completion_tokens: r.output,
                            cached_tokens: self.engines[r.engine].tells.then_some(r.cached),
                        });
                    }
                    t.end(self.now, end);
                    r.ended = Some(end);
                }
            }
            What::Events(engine, batch) => {
                if let Some(batch) = self.batches[batch].take() {
                    self.engines[engine].endpoint.apply(&batch);
                }
            }
        }
    }

    fn push(&mut self, at: Instant, what: What) {
        self.order += 1;
        self.due.push(Reverse((at, self.order, what)));
    }

    /// Requests from number `from` on, per engine.
    pub(super) fn shares(&self, from: usize) -> Vec<u32> {
        let mut shares = vec![0; self.engines.len()];
        for r in &self.requests[from..] {
            shares[r.engine] += 1;
        }
        shares
    }

    pub(super) fn spread(&self, from: usize) -> u32 {
        let shares = self.shares(from);
        shares.iter().max().unwrap_or(&0) - shares.iter().min().unwrap_or(&0)
    }

    /// A quantile of TTFT from request number `from` on, seconds.
    pub(super) fn ttft(&self, from: usize, q: f64) -> f64 {
        let mut all: Vec<f64> = self.requests[from..]
            .iter()
            .filter_map(|r| r.ttft)
            .collect();
        all.sort_by(f64::total_cmp);
        all[((all.len() - 1) as f64 * q) as usize]
    }

    pub(super) fn hit_share(&self, from: usize) -> f64 {
        let (mut cached, mut tokens) = (0u64, 0u64);
        for r in &self.requests[from..] {
            cached += u64::from(r.cached);
            tokens += u64::from(r.tokens);
        }
        cached as f64 / tokens as f64
    }

    /// Nothing is in flight by anyone's count.
    pub(super) fn idle(&self) {
        for e in &self.engines {
            let s = e.endpoint.status(self.now);
            assert_eq!((s.booked, s.running), (0, 0), "{}", s.endpoint);
            let m = &e.endpoint.member.metrics;
            assert_eq!((m.booked.get(), m.running.get()), (0, 0));
        }
    }

    /// The engine's cache is emptied; whether it says so.
    pub(super) fn reset(&mut self, engine: usize, says: bool) {
        let e = &mut self.engines[engine];
        e.cache.clear();
        if says {
            let batch = EventBatch {
                seq: e.seq,
                ts: 0.0,
                rank: None,
                events: vec![KvEvent::Cleared],
            };
            e.seq += 1;
            e.endpoint.apply(&batch);
        }
    }
}

// === impl Engine ===

impl Engine {
    fn keys<'a>(&self, chain: &'a Chain) -> impl DoubleEndedIterator<Item = u64> + 'a {
        let per = self.block as usize / ATOM_TOKENS;
        let n = chain.keys().len() / per;
        (0..n).map(move |j| chain.keys()[(j + 1) * per - 1])
    }

    /// Leading tokens that a prompt would find, as vLLM counts them.
    pub(super) fn held(&self, chain: &Chain, tokens: u32) -> u32 {
        let held = self
            .keys(chain)
            .take_while(|k| self.cache.contains_key(k))
            .count() as u32;
        (held * self.block).min((tokens - 1) / self.block * self.block)
    }

    /// Computes and keeps a prompt; what changed, if events are on.
    fn store(&mut self, chain: &Chain, tokens: &[u32], output: u32) -> Option<EventBatch> {
        let keys: Vec<u64> = self.keys(chain).collect();
        let first_new = keys
            .iter()
            .take_while(|k| self.cache.contains_key(k))
            .count();
        // A block that is not full, and what is generated, take space and are found by no one.
        let rest = tokens.len() as u32 + output - keys.len() as u32 * self.block;
        for _ in 0..rest.div_ceil(self.block) {
            self.uses += 1;
            self.cache.insert(self.uses, self.uses);
        }
        for key in keys.iter().rev() {
            self.uses += 1;
            self.cache.insert(*key, self.uses);
        }
        let over = self.cache.len().saturating_sub(self.blocks - 1);
        let mut oldest: Vec<(u64, u64)> = Vec::new();
        if over > 0 {
            oldest = self.cache.iter().map(|(k, used)| (*used, *k)).collect();
            oldest.sort_unstable();
            oldest.truncate(over);
        }
        for (_, key) in &oldest {
            self.cache.remove(key);
        }
        let mut events: Vec<KvEvent> = oldest
            .iter()
            .filter(|(used, k)| used != k && !keys[first_new..].contains(k))
            .map(|(_, k)| k)
            .map(|k| {
                KvEvent::Removed(BlockRemoved {
                    hashes: vec![*k],
                    medium: Medium::Gpu,
                    group: 0,
                })
            })
            .collect();
        if first_new < keys.len() {
            let (from, to) = (
                first_new * self.block as usize,
                keys.len() * self.block as usize,
            );
            events.push(KvEvent::Stored(BlockStored {
                hashes: keys[first_new..].to_vec(),
                parent: first_new.checked_sub(1).map(|p| keys[p]),
                tokens: tokens[from..to].to_vec(),
                block_size: self.block,
                lora_name: None,
                extra_keys: Vec::new(),
                medium: Medium::Gpu,
                group: 0,
                kind: GroupKind::Full,
            }));
        }
        if !self.events || events.is_empty() {
            return None;
        }
        let batch = EventBatch {
            seq: self.seq,
            ts: 0.0,
            rank: None,
            events,
        };
        self.seq += 1;
        Some(batch)
    }
}
