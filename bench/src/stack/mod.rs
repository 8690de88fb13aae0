//! The whole shipped path in virtual time: a client's HTTP requests go through [`forebay_proxy::http::Stack`] (peek, tokenize,
//! balance, hold, retry, settle) to simulated pods, over connections in memory.
//!
//! Everything runs on one thread whose clock is paused: time passes only when nothing else can be done, so a run is as
//! reproducible as in [`crate::world`] and as long as it takes to compute. Timers have a resolution of 1 ms here.

mod client;
mod engine;
mod words;

pub use self::words::Words;

use self::engine::{Engines, InMemory};
use crate::{
    Error,
    load::Script,
    world::{PooledParams, Record, Request, Run, World, endpoint_id},
};
use arc_swap::ArcSwap;
use bytes::Bytes;
use forebay_proxy::http::{
    HttpMetricFamilies, Limits, Local, ModelPool, ModelPoolParams, Models, PathPolicy, ServedName,
    Stack, StackParams,
};
use futures::{StreamExt, stream::FuturesUnordered};
use http::Response;
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, sleep_until};
use tower_ttft::{
    chain::KeySpace,
    pool::{Pool, PoolParams},
    prompt::{Encoder, EncoderParams, InPlace},
};

/// The model's name.
pub(crate) const MODEL: &str = crate::world::MODEL;

/// Bytes of the prefix index: more than it needs.
const INDEX: usize = 256 << 20;

/// Nothing is answered by the gateway itself.
struct NothingLocal;

/// Lives through a world with one of the shipped policies.
pub fn run(world: &World) -> Result<Run, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()?;
    runtime.block_on(play(world))
}

async fn play(world: &World) -> Result<Run, Error> {
    let routing = world
        .arm
        .routing()
        .ok_or("only shipped policies have a stack")?;
    let start = Instant::now();
    let params = PooledParams::of(world, routing);
    let keys = KeySpace::new(params.seed);
    let pool = Pool::new(PoolParams {
        model: MODEL.into(),
        keys,
        policy: params.policy.clone(),
        seed: params.seed,
        index_bytes: INDEX,
    });
    let mut endpoints = Vec::new();
    for (i, (info, ready)) in params.pods.iter().enumerate() {
        let endpoint = pool.insert(endpoint_id(i), info.clone());
        endpoint.set_events_live(info.events);
        endpoint.set_ready(*ready);
        endpoints.push(endpoint);
    }
    let engines = Engines::start(world, endpoints, start);
    let encoder = Encoder::new(EncoderParams {
        local: Some(Arc::new(Words)),
        offload: Arc::new(InPlace),
        ..EncoderParams::new(MODEL, keys)
    });
    let pool = Arc::new(ModelPool::new(ModelPoolParams {
        name: MODEL.into(),
        pool: pool.clone(),
        encoder: Arc::new(encoder),
        policy: PathPolicy::default(),
    }));
    let models = Models::new(vec![(pool.clone(), vec![ServedName::own(MODEL)])])?;
    let stack = Stack::build(StackParams {
        models: Arc::new(ArcSwap::from_pointee(models)),
        local: Arc::new(NothingLocal),
        limits: Limits::default(),
        retries: Default::default(),
        connect: Arc::new(InMemory::new(engines.clone())),
        seed: world.seed,
        metrics: HttpMetricFamilies::default(),
    });

    let at = |now: Instant| now.saturating_duration_since(start).as_secs_f64();
    let end = start + Duration::from_secs_f64(world.windows.end());
    let mut script = Script::new(world.workload, world.pattern, world.windows, world.seed);
    let mut open = FuturesUnordered::new();
    let mut records: Vec<Record> = Vec::new();
    loop {
        let due = script.due().map(|at| moment(start, at));
        tokio::select! {
            biased;
            Some(ended) = open.next(), if !open.is_empty() => {
                let (id, answer): (u64, Result<client::Answer, Error>) = ended;
                let now = at(Instant::now());
                if let (Some(r), Ok(answer)) = (records.get_mut(id as usize), &answer) {
                    r.ttft = Some(answer.ttft);
                    r.end = Some(now);
                    r.cached = Some(answer.cached);
                }
                script.ended(id, now, answer.is_ok());
            }
            () = sleep_until(due.unwrap_or(end).min(end)) => {
                if Instant::now() >= end {
                    break;
                }
                while script.due().is_some_and(|due| due <= at(Instant::now())) {
                    let Some(sent) = script.send() else { break };
                    let (id, output) = (sent.id, sent.output);
                    let body = words::body(&sent.chat, output);
                    let request = Request::new(sent);
                    records.push(Record::sent(at(Instant::now()), &request));
                    engines.expect(id, request);
                    let stack = stack.clone();
                    open.push(async move { (id, client::ask(stack, id, body).await) });
                }
            }
        }
    }
    engines.fill(&mut records);
    Ok(Run {
        windows: world.windows,
        records,
        accuracy: pool.pool().accuracy(),
    })
}

/// A moment of a run, never earlier than its number says: who wakes then finds it past.
fn moment(start: Instant, at: f64) -> Instant {
    start + Duration::from_nanos((at * 1e9).ceil() as u64 + 1)
}

// === impl NothingLocal ===

impl Local for NothingLocal {
    fn answer(&self, _: &http::request::Parts) -> Option<Response<Bytes>> {
        None
    }
}

#[cfg(test)]
mod tests;
