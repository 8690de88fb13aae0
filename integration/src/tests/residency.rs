//! What the gateway believes to be cached against what the engine reports, request by request; every difference must
//! have a cause that the engine's own event stream proves.

use super::driver::{Driver, Score, Seen};
use crate::{
    cache::Cache,
    engine::{BLOCK, Engine, MODEL, Profile},
    gateway::{Gateway, GatewaySpec},
    http::Request,
    lab::Lab,
    suite::Test,
    tap::{Announced, Batch, Tap},
    test,
};
use anyhow::{Result, bail, ensure};
use futures::future::try_join_all;
use rand::RngExt;
use serde_json::json;
use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};
use tokio::time::sleep;

/// Longest prompt, tokens: a few of them fill profile B's 1,024 blocks of 32.
const LONGEST: usize = 5_000;

/// Requests that are sent while an engine restarts.
const ALONE: usize = 15;

/// Causes of one kind may explain this share of the requests, all together twice as much.
const SHARE_PER_CAUSE: f64 = 0.005;

/// Why a prediction differed from what the engine reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// The cache was emptied, and the engine had not announced it yet.
    ClearNotAnnounced,
    /// An event that the engine had published was received only after the pick.
    ReceivedAfterPick,
    /// A batch that the test dropped.
    DroppedByTest,
    /// A block was evicted between pick and admission.
    EvictedBetween,
}

/// The tests.
pub fn tests() -> Vec<Test> {
    vec![
        test!(
            "vllm",
            recorder,
            "the_recorded_stream_explains_what_the_engine_reports",
            [B],
            300
        ),
        test!(
            "vllm",
            exact,
            "residency_is_exact_while_events_flow",
            [B],
            1500
        ),
        test!("vllm", concurrent, "residency_under_concurrency", [B], 600),
        test!(
            "vllm",
            guessed,
            "residency_is_guessed_without_events",
            [B],
            900
        ),
    ]
}

/// No gateway here: the yardstick itself is tested. The cache worked out from the recorded stream gives what the engine
/// reports, every time.
async fn recorder(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::B).await?;
    let engine = &pair[0];
    let tap = Tap::recorder(&lab.paths, engine).await?;
    let mut driver = Driver::new(lab.seed.wrapping_add(1), LONGEST);
    let count = lab.count(25, 150);
    let mut cached = 0;
    for i in 0..count {
        if i % 10 == 5 {
            engine.reset_prefix_cache().await?;
        }
        let next = driver.request();
        let seen = driver.send_to(engine, next).await?;
        tap.settle(Duration::from_millis(100)).await;
        let ids = seen.ids(engine).await?;
        let record = tap.record();
        ensure!(
            record.batches.iter().zip(0..).all(|(b, n)| b.seq == n),
            "the record has gaps"
        );
        let truth = at_admission(&record.batches, &seen, &ids).1;
        ensure!(
            truth == seen.reported && ids.len() == seen.prompt_tokens,
            "request {i}: the stream gives {truth} cached tokens of {}, the engine reports {} of {}",
            ids.len(),
            seen.reported,
            seen.prompt_tokens
        );
        cached += seen.reported;
    }
    ensure!(cached > 0, "nothing was ever cached");
    let batches = tap.with(|r| r.batches.len());
    Ok(format!(
        "{count} requests, {batches} batches, {cached} cached tokens"
    ))
}

/// How many batches had been published before a request was admitted, and the cached tokens that they leave it.
fn at_admission(batches: &[Batch], seen: &Seen, ids: &[u32]) -> (usize, usize) {
    let before = batches.partition_point(|b| b.ts < seen.sent);
    // A clear stands at the head of the batch of the step that follows it, before what this request stored itself.
    if cleared_at(batches, before) {
        return (before, 0);
    }
    (
        before,
        Cache::after(&batches[..before]).cached(ids, seen.salt()),
    )
}

fn cleared_at(batches: &[Batch], i: usize) -> bool {
    batches
        .get(i)
        .is_some_and(|b| matches!(b.events.first(), Some(Announced::Cleared { .. })))
}

async fn exact(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::B).await?;
    let taps = try_join_all(pair.iter().map(|e| Tap::recorder(&lab.paths, e))).await?;
    let gateway = Gateway::started(&lab.paths, &GatewaySpec::new(pair.iter())).await?;
    let mut driver = Driver::new(lab.seed, LONGEST);
    let count = lab.count(150, 500);
    let restarts = lab.count(1, 3);
    let (mut score, mut causes, mut resets) = (Score::default(), Causes::default(), 0);
    for i in 0..count {
        // Restarts are spread over the run. Some requests find only the other engine; then the empty one is back.
        let restart = |at: usize| (1..=restarts).any(|r| at == count * r / (restarts + 1));
        if restart(i) {
            pair[i % 2].respawn().await?;
        }
        if i >= ALONE && restart(i - ALONE) {
            pair[(i - ALONE) % 2].ready().await?;
            gateway.ready().await?;
        }
        if i % 24 == 12 {
            resets += 1;
            let engine = &pair[driver.rng().random_range(0..2)];
            // One of many is left for the gateway's own request to bring to light.
            reset(engine, resets % 8 != 3).await?;
        }
        // What an engine announces takes up to 40 ms to arrive; clients of one conversation think longer than that.
        sleep(Duration::from_millis(driver.rng().random_range(20..120))).await;
        let next = driver.request();
        let seen = driver.send(&gateway, next).await?;
        ensure!(
            seen.decision.rung() == "exact",
            "request {i} was decided on rung {}",
            seen.decision.rung()
        );
        score.add(&seen, BLOCK);
        if !seen.exact() {
            let at = pair.iter().position(|e| e.authority() == seen.engine);
            let Some(at) = at else {
                bail!("request {i} went to {}", seen.engine)
            };
            taps[at].settle(Duration::from_millis(200)).await;
            causes.add(prove(&seen, &pair[at], &taps[at]).await?);
        }
    }
    gateway.check().await?;
    causes.check(count)?;
    ensure!(
        score.exact >= count - allowed(count, 2.0 * SHARE_PER_CAUSE),
        "{score}; {causes}"
    );
    Ok(format!(
        "{score}; {restarts} restarts, {resets} resets; differences: {causes}"
    ))
}

/// Empties an engine's cache, if wanted with a request behind it from elsewhere, which makes the engine announce it.
pub async fn reset(engine: &Engine, announce: bool) -> Result<()> {
    if !engine.alive().await
        || Request::get(engine.authority(), "/version")
            .send()
            .await
            .is_err()
    {
        return Ok(()); // it is restarting: there is nothing to empty
    }
    engine.reset_prefix_cache().await?;
    if announce {
        let body = json!({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1});
        Request::post(engine.authority(), "/v1/completions", &body)
            .json()
            .await?;
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// Finds why a prediction differed, from the recorded stream alone: the cache as of the last batch that the decision
/// knew of must give the prediction, the cache at admission must give the report, and what lies between is the cause.
///
/// # Errors
/// When the record does not explain the difference.
pub async fn prove(seen: &Seen, engine: &Engine, tap: &Tap) -> Result<Cause> {
    let ids = seen.ids(engine).await?;
    let record = tap.record();
    let batches = &record.batches;
    let known = seen
        .seq
        .map_or(0, |seq| batches.partition_point(|b| b.seq <= seq));
    let (before, true_then) = at_admission(batches, seen, &ids);
    let clears = cleared_at(batches, before);
    let at = |batches: &[Batch]| Cache::after(batches).cached(&ids, seen.salt());
    let believed = at(&batches[..known]);
    let between = batches.get(known..before).unwrap_or_default();
    let story = format!(
        "predicted {} ({:?} announced), reported {}; the stream up to the known batch {:?} gives {believed}, up to admission (batch {:?}{}) {true_then}; {} tokens, decision {}",
        seen.predicted,
        seen.announced,
        seen.reported,
        seen.seq,
        before
            .checked_sub(1)
            .and_then(|i| batches.get(i))
            .map(|b| b.seq),
        if clears { ", then a clear" } else { "" },
        ids.len(),
        seen.decision.0,
    );
    ensure!(
        true_then == seen.reported,
        "the engine's stream does not explain its own report: {story}"
    );
    // What own dispatches add to what was announced is a guess; that it was right shows in the report alone.
    // The last token is always computed.
    let most = ids.len().saturating_sub(1) / BLOCK * BLOCK;
    let announced = seen.announced.map_or(seen.predicted, |a| a.min(most));
    if believed != announced {
        let kept: Vec<_> = batches[..known]
            .iter()
            .filter(|b| matches!(b.fate.as_deref(), None | Some("pass" | "delay")))
            .cloned()
            .collect();
        ensure!(
            kept.len() < known && at(&kept) == announced,
            "the gateway's index is wrong: {story}"
        );
        return Ok(Cause::DroppedByTest);
    }
    if clears
        || between.iter().any(|b| {
            b.events
                .iter()
                .any(|e| matches!(e, Announced::Cleared { .. }))
        })
    {
        return Ok(Cause::ClearNotAnnounced);
    }
    let late = |wanted: fn(&Announced) -> bool| between.iter().any(|b| b.events.iter().any(wanted));
    if seen.reported < seen.predicted && late(|e| matches!(e, Announced::Removed { .. })) {
        return Ok(Cause::EvictedBetween);
    }
    if late(|e| matches!(e, Announced::Stored { .. })) {
        return Ok(Cause::ReceivedAfterPick);
    }
    bail!("no cause found: {story}")
}

async fn concurrent(lab: Arc<Lab>) -> Result<String> {
    const CLIENTS: usize = 6;
    let pair = lab.pair(Profile::B).await?;
    let gateway = Gateway::started(&lab.paths, &GatewaySpec::new(pair.iter())).await?;
    let each = lab.count(10, 40);
    let clients = (0..CLIENTS).map(|client| {
        let gateway = &gateway;
        // Clients in pairs share a seed, and so their prompts.
        let mut driver = Driver::new(lab.seed ^ (1 + client as u64 / 2), LONGEST / 2);
        async move {
            let mut score = Score::default();
            for _ in 0..each {
                let next = driver.request();
                score.add(&driver.send(gateway, next).await?, BLOCK);
            }
            anyhow::Ok(score)
        }
    });
    let mut total = Score::default();
    for score in try_join_all(clients).await? {
        total.all += score.all;
        total.exact += score.exact;
        total.near += score.near;
        total.cached += score.cached;
        total.prompt += score.prompt;
    }
    gateway.check().await?;
    ensure!(total.all == CLIENTS * each, "{total}");
    Ok(format!("{CLIENTS} clients: {total} (reported, not judged)"))
}

async fn guessed(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::B).await?;
    let spec = GatewaySpec::new(pair.iter()).without_events();
    let gateway = Gateway::started(&lab.paths, &spec).await?;
    let mut driver = Driver::new(lab.seed.wrapping_add(2), LONGEST);
    let count = lab.count(80, 300);
    let mut score = Score::default();
    for i in 0..count {
        let next = driver.request();
        let seen = driver.send(&gateway, next).await?;
        ensure!(
            seen.decision.rung() == "guessed",
            "request {i} was decided on rung {}",
            seen.decision.rung()
        );
        score.add(&seen, BLOCK);
    }
    gateway.check().await?;
    ensure!(score.near_share() >= 0.9, "{score}");
    ensure!(score.cached > 0, "nothing was cached: {score}");
    Ok(format!("rung 2: {score}"))
}

/// How many requests of `count` a share allows: at least one, since a short run cannot show half a per cent.
fn allowed(count: usize, share: f64) -> usize {
    ((count as f64 * share) as usize).max(1)
}

/// Differences by cause.
#[derive(Debug, Default)]
pub struct Causes(BTreeMap<Cause, usize>);

impl Causes {
    /// Counts one more.
    pub fn add(&mut self, cause: Cause) {
        *self.0.entry(cause).or_default() += 1;
    }

    /// Whether each cause, and all together, stay within what they may explain of `count` requests.
    pub fn check(&self, count: usize) -> Result<()> {
        for (cause, n) in &self.0 {
            ensure!(
                *n <= allowed(count, SHARE_PER_CAUSE),
                "{cause:?} explains {n} of {count} requests: {self}"
            );
        }
        let all: usize = self.0.values().sum();
        ensure!(
            all <= allowed(count, 2.0 * SHARE_PER_CAUSE),
            "{all} of {count} requests differ: {self}"
        );
        Ok(())
    }
}

impl fmt::Display for Causes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        let all: Vec<_> = self.0.iter().map(|(c, n)| format!("{c:?} {n}")).collect();
        f.write_str(&all.join(", "))
    }
}
