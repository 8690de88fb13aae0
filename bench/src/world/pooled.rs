//! The shipped choice: every proxy of a world is a [`Pool`], asked through [`Pool::pick`] and told through its tickets,
//! events and reports, as the proxy does it.

use super::{Fleet, Probe, Request, Router, World};
use forebay_sim::{KvChange, Load};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{collections::HashMap, time::Duration};
use tokio::time::Instant;
use tower_ttft::{
    chain::{ChainKind, KeySpace, Root},
    endpoint::EndpointId,
    events::{BlockRemoved, BlockStored, EventBatch, GroupKind, KvEvent, Medium},
    load::LoadReport,
    observe::{End, Observer, Usage},
    policy::{PolicySpec, Routing},
    pool::{Endpoint, EndpointInfo, Excluded, Pick, PickRequest, Pool, PoolParams, Ticket},
    predict::RegimeError,
    prompt::{Prompt, Source},
};

/// The model's name.
pub const MODEL: &str = "sim";

/// Bytes of the prefix index: more than it needs.
const INDEX: usize = 256 << 20;

/// What a [`Pooled`] is made of.
#[derive(Clone, Debug)]
pub struct PooledParams {
    /// The policy.
    pub policy: PolicySpec,
    /// How many proxies.
    pub proxies: usize,
    /// What each pod says of itself, and whether it is ready at the start.
    pub pods: Vec<(EndpointInfo, bool)>,
    /// The share of requests that no proxy sees.
    pub bypass: f64,
    /// Whether each decision is compared with the truth.
    pub probe: bool,
    /// A seed.
    pub seed: u64,
}

/// Routes through one or more pools.
pub struct Pooled {
    proxies: Vec<Proxy>,
    tickets: HashMap<u64, Ticket>,
    bypass: f64,
    probe: bool,
    rng: StdRng,
    start: Instant,
}

/// One proxy's knowledge.
struct Proxy {
    pool: Pool,
    endpoints: Vec<Endpoint>,
    seqs: Vec<u64>,
    keys: KeySpace,
    root: Root,
}

// === impl PooledParams ===

impl PooledParams {
    /// For a world.
    pub fn of(world: &World, routing: Routing) -> Self {
        let joins = super::fleet::Fleet::new(world);
        let joined: Vec<usize> = joins.joined().collect();
        Self {
            policy: PolicySpec {
                routing,
                lambda: world.lambda,
                ..PolicySpec::default()
            },
            proxies: world.proxies.max(1),
            pods: world
                .pods
                .iter()
                .enumerate()
                .map(|(i, spec)| {
                    let info = EndpointInfo {
                        gpu: None,
                        block_size: Some(spec.block_size),
                        blocks: Some(u64::from(spec.kv_blocks)),
                        max_seqs: None,
                        events: world.senses.events.is_some(),
                    };
                    (info, joined.contains(&i))
                })
                .collect(),
            bypass: world.bypass,
            probe: world.probe,
            seed: world.seed,
        }
    }
}

/// The name of a pod's endpoint.
pub fn endpoint_id(pod: usize) -> EndpointId {
    EndpointId::new(format!("10.0.0.{pod}:8000"))
}

/// What a pod reports, as the scraper would hand it on.
pub fn load_report(load: &Load, at: Instant) -> LoadReport {
    LoadReport {
        at,
        running: load.running,
        waiting: load.waiting,
        kv_usage: load.kv_usage,
        prefilled_tokens: Some(load.prefilled_tokens),
        prefill_seconds: Some(load.prefill_seconds),
        preemptions: load.preemptions,
    }
}

/// What a pod announced, as the subscriber would hand it on.
pub fn event_batch(batch: &[KvChange], seq: u64, at: f64) -> EventBatch {
    let events = batch.iter().map(|change| match change {
        KvChange::Stored(s) => KvEvent::Stored(BlockStored {
            hashes: s.hashes.clone(),
            parent: s.parent,
            tokens: s.tokens().to_vec(),
            block_size: s.block_size,
            lora_name: None,
            extra_keys: Vec::new(),
            medium: Medium::Gpu,
            group: 0,
            kind: GroupKind::Full,
        }),
        KvChange::Removed(hashes) => KvEvent::Removed(BlockRemoved {
            hashes: hashes.clone(),
            medium: Medium::Gpu,
            group: 0,
        }),
        KvChange::Cleared => KvEvent::Cleared,
    });
    EventBatch {
        seq,
        ts: at,
        rank: None,
        events: events.collect(),
    }
}

// === impl Pooled ===

impl Pooled {
    /// Pools that know nothing yet.
    pub fn new(params: &PooledParams) -> Self {
        let proxy = |i: usize| {
            // All proxies of an installation have the same keys.
            let keys = KeySpace::new(params.seed);
            let pool = Pool::new(PoolParams {
                model: MODEL.into(),
                keys,
                policy: params.policy.clone(),
                seed: params.seed.wrapping_add(i as u64),
                index_bytes: INDEX,
            });
            let endpoints = params.pods.iter().enumerate().map(|(pod, (info, ready))| {
                let endpoint = pool.insert(endpoint_id(pod), info.clone());
                endpoint.set_events_live(info.events);
                endpoint.set_ready(*ready);
                endpoint
            });
            Proxy {
                endpoints: endpoints.collect(),
                seqs: vec![0; params.pods.len()],
                root: keys.root(ChainKind::Tokens, MODEL, None, None),
                pool,
                keys,
            }
        };
        Self {
            proxies: (0..params.proxies).map(proxy).collect(),
            tickets: HashMap::new(),
            bypass: params.bypass,
            probe: params.probe,
            rng: StdRng::seed_from_u64(params.seed ^ 0x70_726f_7869_6573),
            start: Instant::now(),
        }
    }

    fn at(&self, now: f64) -> Instant {
        self.start + Duration::from_secs_f64(now)
    }
}

impl Router for Pooled {
    fn route(&mut self, now: f64, request: &Request, fleet: &Fleet) -> (usize, Option<Probe>) {
        let at = self.at(now);
        let joined: Vec<usize> = fleet.joined().collect();
        let any = |rng: &mut StdRng| {
            let nth = rng.random_range(0..joined.len().max(1));
            joined.get(nth).copied().unwrap_or(0)
        };
        if self.bypass > 0.0 && self.rng.random_bool(self.bypass) {
            return (any(&mut self.rng), None);
        }
        let which = match self.proxies.len() {
            0 | 1 => 0,
            n => self.rng.random_range(0..n),
        };
        let Some(proxy) = self.proxies.get(which) else {
            return (any(&mut self.rng), None);
        };
        let pick = PickRequest {
            prompt: Prompt {
                chain: proxy.keys.tokens(proxy.root, request.prompt.ids()),
                tokens: request.tokens(),
                ids: None,
                bytes: request.prompt.bytes(),
                whole_text: false,
                source: Source::Local,
            },
            stream: true,
            max_tokens: Some(u64::from(request.sent.output)),
            request_id: None,
        };
        let Pick::Dispatch(mut ticket) = proxy.pool.pick(&pick, &Excluded::default(), at) else {
            // There is always one ready; a world without endpoints would show in its results.
            return (any(&mut self.rng), None);
        };
        let chosen = ticket.endpoint().id();
        let place = proxy.endpoints.iter().position(|e| e.id() == chosen);
        let pod = place.unwrap_or(0);
        let probe = probe(&ticket, proxy, self.probe, |i| fleet.ttft(i, now, request));
        ticket.sent(at);
        self.tickets.insert(request.sent.id, ticket);
        (pod, Some(probe))
    }

    fn first_token(&mut self, now: f64, id: u64) {
        let at = self.at(now);
        if let Some(ticket) = self.tickets.get_mut(&id) {
            ticket.responded(http::StatusCode::OK);
            ticket.first_byte(at);
            ticket.first_token(at);
        }
    }

    fn done(&mut self, now: f64, request: &Request, cached: u32, output: u32) {
        let at = self.at(now);
        if let Some(mut ticket) = self.tickets.remove(&request.sent.id) {
            ticket.usage(Usage {
                prompt_tokens: request.tokens(),
                completion_tokens: output,
                cached_tokens: Some(cached),
            });
            ticket.end(at, End::Complete);
        }
    }

    fn failed(&mut self, now: f64, id: u64) {
        let at = self.at(now);
        if let Some(mut ticket) = self.tickets.remove(&id) {
            ticket.responded(http::StatusCode::BAD_REQUEST);
            ticket.end(at, End::Complete);
        }
    }

    fn heard(&mut self, now: f64, pod: usize, batch: &[KvChange]) {
        for proxy in &mut self.proxies {
            if let (Some(endpoint), Some(seq)) = (proxy.endpoints.get(pod), proxy.seqs.get_mut(pod))
            {
                endpoint.apply(&event_batch(batch, *seq, now));
                *seq += 1;
            }
        }
    }

    fn reported(&mut self, now: f64, proxy: usize, pod: usize, load: &Load) {
        let at = self.at(now);
        let endpoint = self.proxies.get(proxy).and_then(|p| p.endpoints.get(pod));
        if let Some(endpoint) = endpoint {
            endpoint.report(load_report(load, at));
        }
    }

    fn joined(&mut self, pod: usize) {
        for proxy in &self.proxies {
            if let Some(endpoint) = proxy.endpoints.get(pod) {
                endpoint.set_ready(true);
            }
        }
    }

    fn accuracy(&self) -> Vec<RegimeError> {
        self.proxies
            .first()
            .map_or_else(Vec::new, |p| p.pool.accuracy())
    }
}

/// What a decision says, beside the truth if that is asked for.
fn probe(ticket: &Ticket, proxy: &Proxy, truth: bool, ttft: impl Fn(usize) -> f64) -> Probe {
    let decision = ticket.decision();
    let mut candidates = Vec::new();
    if truth {
        for c in &decision.candidates {
            let pod = proxy.endpoints.iter().position(|e| *e.id() == c.endpoint);
            let real = pod.map_or(f64::INFINITY, &ttft);
            candidates.push((c.prediction.ttft.as_secs_f64(), real));
        }
    }
    let chosen = decision.chosen();
    Probe {
        cached: chosen.map_or(0, |c| c.cached),
        predicted: ticket.predicted().as_secs_f64(),
        error: chosen.map_or(0.0, |c| c.prediction.error),
        candidates,
        chosen: decision.chosen,
    }
}
