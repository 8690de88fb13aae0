//! Watches one engine: whether it lives, who it is, how busy it is, what its cache holds.
//!
//! One task owns an engine. Every second it dials a connection of its own. A refused one is news at once; an accepted
//! one asks `/health` and `/metrics`, unless the last such question is still waiting for its answer: vLLM's server stalls
//! while it tokenizes, and a slow answer is no death. Whatever the answers lack or get wrong costs only what they would
//! have told: an engine without usable metrics still takes requests, and its status says what is missing.

use super::{
    discover::EventSource,
    http::{self, Answer, Ask, HttpError},
    member::{Member, Registry},
    scrape::Scrape,
    source::{Source, TcpAddress},
    status::{EngineState, EngineStatus},
};
use crate::{
    endpoint::{Address, EndpointId, Incarnation},
    pool::{EndpointInfo, Pool},
};
use about::{About, Sources};
use futures::{
    FutureExt,
    future::{BoxFuture, Either, pending, select_all},
};
use hyper::StatusCode;
use joined::{Events, Joined, Plan};
use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::time::{Instant, sleep_until};
use vitals::{Evidence, Verdict, Vitals};

mod about;
mod joined;
mod vitals;

/// Parameters of a watcher.
#[derive(Clone, Debug)]
pub struct WatchParams {
    /// `host:port` of the engine's HTTP server.
    pub address: Arc<str>,
    /// Its hardware label.
    pub gpu: Option<Arc<str>>,
    /// Where its KV events are.
    pub kv_events: Source,
    /// Where replays of them are.
    pub replay: Source,
    /// A seed for jitter.
    pub seed: u64,
    /// How often and how patiently to ask.
    pub times: WatchTimes,
}

/// How often and how patiently a watcher asks.
#[derive(Clone, Copy, Debug)]
pub struct WatchTimes {
    /// Between probes.
    pub interval: Duration,
    /// Between probes of an engine whose last one was refused, or whose event socket was just lost.
    pub suspicion: Duration,
    /// For a connection.
    pub dial: Duration,
    /// For each answer.
    pub answer: Duration,
    /// Between looks at models and event sources.
    pub discovery: Duration,
}

/// An engine that is being watched. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Engine {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    status: Mutex<EngineStatus>,
    scraped_at: Mutex<Option<Instant>>,
    events: Mutex<Vec<Events>>,
    /// No more requests for it, however well it is.
    retired: AtomicBool,
}

/// Watches one engine and keeps it in the pool, until the future is dropped; then the engine leaves the pool.
///
/// The future must be polled within a tokio runtime; it never ends by itself.
pub fn watch(
    params: WatchParams,
    pool: Pool,
) -> (Engine, impl Future<Output = Infallible> + Send + 'static) {
    watch_in(params, pool)
}

pub(crate) fn watch_in<R: Registry>(
    params: WatchParams,
    registry: R,
) -> (Engine, impl Future<Output = Infallible> + Send + 'static) {
    let shared = Arc::new(Shared::default());
    shared.status.lock().address = params.address.clone();
    let engine = Engine {
        shared: shared.clone(),
    };
    let watcher = Watcher {
        rng: StdRng::seed_from_u64(params.seed),
        params,
        registry,
        shared,
        joined: Vec::new(),
        vitals: Vitals::default(),
        state: EngineState::Starting,
        about: About::default(),
        process: None,
        deaths: 0,
        discovered: None,
        hurry_until: None,
    };
    (engine, watcher.run())
}

struct Watcher<R: Registry> {
    params: WatchParams,
    registry: R,
    shared: Arc<Shared>,
    rng: StdRng,
    joined: Vec<Joined<R>>,
    vitals: Vitals,
    state: EngineState,
    about: About,
    /// `process_start_time_seconds` of the process that is in the pool, once known.
    process: Option<String>,
    deaths: u64,
    /// When the engine last said what it serves.
    discovered: Option<Instant>,
    /// Until then probes follow each other quickly.
    hurry_until: Option<Instant>,
}

/// The answers of one connection.
struct Asked {
    discovery: bool,
    answers: Vec<Answer>,
    result: Result<(), HttpError>,
}

/// How long probes hurry after an event socket was lost.
const HURRY: Duration = Duration::from_secs(3);
/// Bytes of `/metrics` that are read at most.
const MAX_METRICS: usize = 4 << 20;
/// Bytes of other answers that are read at most.
const MAX_ANSWER: usize = 1 << 20;

// === impl WatchParams ===

impl WatchParams {
    /// A watcher of `host:port` that finds out the rest by itself.
    pub fn new(address: impl Into<Arc<str>>) -> Self {
        Self {
            address: address.into(),
            gpu: None,
            kv_events: Source::Auto,
            replay: Source::Auto,
            seed: 0,
            times: WatchTimes::default(),
        }
    }

    fn host(&self) -> &str {
        let host = self
            .address
            .rsplit_once(':')
            .map_or(&*self.address, |(host, _)| host);
        host.trim_start_matches('[').trim_end_matches(']')
    }
}

// === impl WatchTimes ===

impl Default for WatchTimes {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            suspicion: Duration::from_millis(200),
            dial: Duration::from_secs(1),
            answer: Duration::from_secs(5),
            discovery: Duration::from_secs(10),
        }
    }
}

// === impl Engine ===

impl Engine {
    /// From now on its watcher calls it not ready, and does nothing else differently: what is open there goes on, and is
    /// cut if the engine dies. What is ready already is for the caller to take back.
    pub fn retire(&self) {
        self.shared.retired.store(true, Ordering::Relaxed);
    }

    /// What is known of it now.
    pub fn status(&self, now: Instant) -> EngineStatus {
        let mut status = self.shared.status.lock().clone();
        let scraped_at = *self.shared.scraped_at.lock();
        status.scrape_age = scraped_at.map(|at| now.saturating_duration_since(at).as_secs_f64());
        status.events = self
            .shared
            .events
            .lock()
            .iter()
            .map(Events::status)
            .collect();
        for seen in status.events.iter().filter_map(|events| events.block_size) {
            if let Some(told) = status.block_size.filter(|told| *told != seen) {
                let condition =
                    format!("KV events have blocks of {seen} tokens, /metrics says {told}");
                status.conditions.push(condition);
            }
        }
        status
    }
}

// === impl Watcher ===

impl<R: Registry> Watcher<R> {
    async fn run(mut self) -> Infallible {
        let mut next = Instant::now();
        let mut asking: Option<BoxFuture<'static, Asked>> = None;
        loop {
            let lost = self.lost();
            let asked = match &mut asking {
                Some(asking) => Either::Left(asking),
                None => Either::Right(pending()),
            };
            let suspect = tokio::select! {
                biased;
                () = lost => {
                    self.hurry_until = Some(Instant::now() + HURRY);
                    true
                }
                asked = asked => {
                    asking = None;
                    let suspect = self.on_asked(asked);
                    if !suspect {
                        self.publish();
                        continue;
                    }
                    suspect
                }
                () = sleep_until(next) => {
                    let (suspect, stream) = self.probe().await;
                    if let (Some(stream), None) = (stream, &asking) {
                        asking = Some(self.ask(stream));
                    }
                    next = Instant::now() + self.pause();
                    suspect
                }
            };
            if suspect {
                next = next.min(Instant::now() + self.params.times.suspicion);
            }
            self.publish();
        }
    }

    /// Resolves when an event socket is lost.
    fn lost(&self) -> impl Future<Output = ()> + Send + use<R> {
        let all: Vec<_> = self
            .joined
            .iter()
            .filter_map(|joined| joined.events().following().cloned())
            .map(|shared| async move { shared.lost.notified().await }.boxed())
            .collect();
        match all.is_empty() {
            true => Either::Left(pending()),
            false => Either::Right(select_all(all).map(drop)),
        }
    }

    fn pause(&mut self) -> Duration {
        let now = Instant::now();
        let interval = match self.hurry_until {
            Some(until) if now < until => self.params.times.suspicion,
            _ => self.params.times.interval,
        };
        interval.mul_f64(0.9 + 0.2 * self.rng.random::<f64>())
    }

    /// Dials. True if that raised a suspicion.
    async fn probe(&mut self) -> (bool, Option<tokio::net::TcpStream>) {
        match http::dial(&self.params.address, self.params.times.dial).await {
            Ok(stream) => (self.observe(Evidence::Connected), Some(stream)),
            Err(HttpError::Refused) => (self.observe(Evidence::Refused), None),
            Err(HttpError::Reset) => (self.observe(Evidence::Reset), None),
            Err(_) => (self.observe(Evidence::Unreachable), None),
        }
    }

    /// Acts on evidence. True if it raised a suspicion that should be looked into at once.
    fn observe(&mut self, evidence: Evidence) -> bool {
        let events_down = self.joined.iter().any(Joined::events_down);
        match self.vitals.observe(evidence, events_down) {
            Verdict::Alive => false,
            Verdict::Suspect => !self.joined.is_empty() && self.state != EngineState::Down,
            Verdict::Gone => {
                self.die();
                false
            }
            Verdict::Unreachable => {
                if !self.joined.is_empty() && self.state != EngineState::Down {
                    self.set_state(EngineState::Unreachable);
                }
                false
            }
        }
    }

    fn die(&mut self) {
        if self.joined.is_empty() || self.state == EngineState::Down {
            return;
        }
        tracing::info!(engine = %self.params.address, "the engine is gone: its port refuses");
        self.set_state(EngineState::Down);
        for joined in &self.joined {
            joined.member().cut();
        }
        self.deaths += 1;
        self.discovered = None;
    }

    fn set_state(&mut self, state: EngineState) {
        if self.state != state {
            tracing::debug!(engine = %self.params.address, from = ?self.state, to = ?state, "engine");
        }
        self.state = state;
        let ready = state == EngineState::Ready && !self.shared.retired.load(Ordering::Relaxed);
        for joined in &self.joined {
            joined.member().set_ready(ready && !joined.is_asleep());
        }
    }

    /// What to ask on a new connection.
    fn ask(&mut self, stream: tokio::net::TcpStream) -> BoxFuture<'static, Asked> {
        let due = |at| Instant::now().saturating_duration_since(at) >= self.params.times.discovery;
        let discovery = self.joined.is_empty() || self.discovered.is_none_or(due);
        let get = |path, limit| Ask {
            path,
            body: None,
            limit,
        };
        let mut questions = vec![get("/health", MAX_ANSWER)];
        if discovery {
            questions.push(get("/version", MAX_ANSWER));
            questions.push(get("/v1/models", MAX_ANSWER));
            questions.push(get("/kv_event_sources", MAX_ANSWER));
        }
        // Last, because it is the one that goes wrong most often.
        questions.push(get("/metrics", MAX_METRICS));
        let address = self.params.address.clone();
        let each = self.params.times.answer;
        async move {
            let (answers, result) = http::ask(stream, &address, questions, each).await;
            Asked {
                discovery,
                answers,
                result,
            }
        }
        .boxed()
    }

    /// Takes answers in. True if they raised a suspicion.
    fn on_asked(&mut self, asked: Asked) -> bool {
        let Asked {
            discovery,
            answers,
            result,
        } = asked;
        let gone = result.as_ref().is_err_and(HttpError::is_gone);
        let mut answers = answers.into_iter();
        let Some(health) = answers.next() else {
            // Refused, reset, or slow. Only the first two mean anything.
            self.about.scrape_error = result.err().map(|error| error.to_string());
            return gone && self.observe(Evidence::Reset);
        };
        self.observe(Evidence::Answered);
        if health.status == StatusCode::SERVICE_UNAVAILABLE {
            self.set_state(EngineState::Unhealthy);
            return gone && self.observe(Evidence::Reset);
        }
        if discovery {
            self.discovered = Some(Instant::now());
            self.about
                .learn(answers.next(), answers.next(), answers.next());
        }
        if self.about.scraped(answers.next(), result.err()) {
            *self.shared.scraped_at.lock() = Some(Instant::now());
        }
        self.reconcile();
        self.set_state(match self.joined.iter().all(Joined::is_asleep) {
            true => EngineState::Asleep,
            false => EngineState::Ready,
        });
        gone && self.observe(Evidence::Reset)
    }

    /// Makes the pool agree with what is known: who the process is, which ranks it has, where their events are.
    fn reconcile(&mut self) {
        let started = self
            .about
            .scrape
            .as_ref()
            .and_then(|scrape| scrape.process_start.clone());
        let died = self.state == EngineState::Down;
        let another = match (&self.process, &started) {
            (Some(before), Some(now)) => before != now,
            // Nobody says who it is. A port that refused belongs to another process now.
            _ => died,
        };
        // Known late, it is still the same process.
        if another || self.process.is_none() {
            self.process = started;
        }
        let incarnation = match self.joined.first() {
            Some(joined) if !another => joined.id().incarnation.clone(),
            _ => Incarnation::new(match &self.process {
                Some(process) => process.clone(),
                None => format!("unnamed-{}", self.deaths),
            }),
        };
        let mut old = std::mem::take(&mut self.joined);
        for (rank, plan) in self.plans() {
            let id = EndpointId {
                address: Address::new(self.params.address.clone()),
                rank,
                incarnation: incarnation.clone(),
            };
            let seed = self.rng.random();
            let at = old.iter().position(|joined| joined.id().rank == rank);
            let mut joined = match at.map(|at| old.swap_remove(at)) {
                Some(joined) if *joined.id() == id => joined,
                before => {
                    let info = self.info(rank, &plan, None);
                    let new = Joined::new(self.registry.clone(), id, info, plan.clone(), seed);
                    if let Some(mut before) = before {
                        before.replaced();
                    }
                    new
                }
            };
            joined.set_info(self.info(rank, &plan, Some(&joined)));
            joined.follow(plan, seed);
            if let Some(scrape) = &self.about.scrape {
                joined.set_asleep(scrape.asleep(rank));
                joined.member().report(scrape.report(rank, Instant::now()));
            }
            self.joined.push(joined);
        }
    }

    /// The endpoints that the engine is, and where the events of each are.
    fn plans(&self) -> Vec<(Option<u32>, Plan)> {
        let announced = match &self.about.sources {
            Sources::Known(sources) => &sources[..],
            Sources::Unknown | Sources::Silent => &[],
        };
        let mut ranks: Vec<u32> = announced.iter().map(|source| source.rank).collect();
        if self.about.ranks.len() > ranks.len() {
            ranks.clone_from(&self.about.ranks);
        }
        let source = |rank: u32| announced.iter().find(|source| source.rank == rank);
        match &ranks[..] {
            [] => vec![(None, self.plan(0, None))],
            [one] => vec![(None, self.plan(0, source(*one)))],
            many => many
                .iter()
                .map(|rank| (Some(*rank), self.plan(*rank, source(*rank))))
                .collect(),
        }
    }

    fn plan(&self, rank: u32, announced: Option<&EventSource>) -> Plan {
        let live = match &self.params.kv_events {
            Source::None => return Plan::Without("switched off (kvEvents: none)".into()),
            Source::Tcp(address) => match address.of_rank(rank) {
                Some(address) => address,
                None => return Plan::Without(format!("no port for rank {rank}")),
            },
            Source::Auto => match (announced, &self.about.sources) {
                (Some(source), _) => source.live.clone(),
                (None, Sources::Known(_)) => {
                    return Plan::Without(
                        "the engine publishes none; start vLLM with --kv-events-config".into(),
                    );
                }
                (None, Sources::Silent) => {
                    return Plan::Without(
                        "the engine does not say where (vLLM does from 0.31 on); set kvEvents and replay".into(),
                    );
                }
                (None, Sources::Unknown) => {
                    return Plan::Without("the engine has not yet said where".into());
                }
            },
        };
        let replay = match &self.params.replay {
            Source::None => None,
            Source::Tcp(address) => address.of_rank(rank),
            Source::Auto => announced.and_then(|source| source.replay.clone()),
        };
        let at = |address: TcpAddress| address.at(self.params.host());
        Plan::Follow {
            live: at(live),
            replay: replay.map(at),
        }
    }

    fn info(&self, rank: Option<u32>, plan: &Plan, before: Option<&Joined<R>>) -> EndpointInfo {
        let cache = self
            .about
            .scrape
            .as_ref()
            .map(|scrape| scrape.cache(rank))
            .unwrap_or_default();
        let mut info = before
            .map(|joined| joined.info().clone())
            .unwrap_or_default();
        info.gpu = self.params.gpu.clone();
        info.block_size = cache.block_size.or(info.block_size);
        info.blocks = cache.blocks.or(info.blocks);
        info.events = matches!(plan, Plan::Follow { .. });
        info
    }

    fn publish(&self) {
        let mut conditions = self.about.problems.clone();
        if let Some(error) = &self.about.scrape_error {
            conditions.push(format!("load is not known: /metrics: {error}"));
        }
        *self.shared.events.lock() = self
            .joined
            .iter()
            .map(|joined| joined.events().clone())
            .collect();
        *self.shared.status.lock() = EngineStatus {
            address: self.params.address.clone(),
            state: self.state,
            conditions,
            version: self.about.version.clone(),
            incarnation: self.joined.first().map_or_else(
                || "".into(),
                |joined| joined.id().incarnation.as_str().into(),
            ),
            models: self.about.models.clone(),
            scrape_age: None,
            scrape_error: self.about.scrape_error.clone(),
            cuts: self.deaths,
            block_size: self
                .joined
                .first()
                .and_then(|joined| joined.info().block_size),
            prefix_cache: self.about.scrape.as_ref().and_then(Scrape::prefix_cache),
            events: Vec::new(),
        };
    }
}

#[cfg(test)]
mod tests;
