//! Residency through a relay that drops, delays and truncates what the engines announce.

use super::{
    driver::{Driver, Score, Seen},
    residency::{Causes, prove},
};
use crate::{
    engine::{BLOCK, Engine, MODEL, Profile},
    gateway::{Gateway, GatewaySpec},
    http::Request,
    lab::Lab,
    suite::Test,
    tap::{Replay, Tap},
    test,
};
use anyhow::{Context, Result, ensure};
use rand::RngExt;
use serde_json::json;
use std::{sync::Arc, time::Duration};
use tokio::time::sleep;

const LONGEST: usize = 3_000;

/// How long the gateway may take to know again what an engine holds.
const HEAL_LIMIT: Duration = Duration::from_secs(10);

/// The tests.
pub fn tests() -> Vec<Test> {
    vec![
        test!("faults", dropped, "dropped_batches_are_replayed", [B], 400),
        test!(
            "faults",
            truncated,
            "truncated_batches_are_replayed",
            [B],
            400
        ),
        test!(
            "faults",
            delayed,
            "delayed_batches_are_bridged_or_proven_late",
            [B],
            400
        ),
        test!(
            "faults",
            refused,
            "a_refused_replay_never_overpromises",
            [B],
            400
        ),
        test!("faults", stalled, "a_stalled_replay_heals", [B], 400),
        test!(
            "faults",
            late,
            "a_stream_joined_late_is_caught_up",
            [B],
            400
        ),
        test!(
            "faults",
            restarted,
            "an_engine_restarted_behind_the_relay_starts_empty",
            [B],
            700
        ),
    ]
}

/// A gateway that hears both engines through relays.
struct Rig {
    lab: Arc<Lab>,
    pair: Arc<[Engine; 2]>,
    taps: [Tap; 2],
    gateway: Gateway,
    driver: Driver,
}

impl Rig {
    async fn new(lab: Arc<Lab>, salt: u64) -> Result<Self> {
        let pair = lab.pair(Profile::B).await?;
        let taps = [
            Tap::relay(&lab.paths, &pair[0]).await?,
            Tap::relay(&lab.paths, &pair[1]).await?,
        ];
        let gateway = Self::gateway(&lab, &pair, &taps).await?;
        let driver = Driver::new(lab.seed ^ salt, LONGEST);
        Ok(Self {
            lab,
            pair,
            taps,
            gateway,
            driver,
        })
    }

    async fn gateway(lab: &Lab, pair: &[Engine; 2], taps: &[Tap; 2]) -> Result<Gateway> {
        let spec = GatewaySpec::new(pair.iter())
            .through(0, &taps[0])
            .through(1, &taps[1]);
        Gateway::started(&lab.paths, &spec).await
    }

    async fn send(&mut self) -> Result<Seen> {
        sleep(Duration::from_millis(60)).await;
        let next = self.driver.request();
        self.driver.send(&self.gateway, next).await
    }

    async fn requests(&mut self, count: usize) -> Result<Vec<Seen>> {
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(self.send().await?);
        }
        Ok(all)
    }

    /// Requests that must be predicted exactly, or differ for a cause that the stream proves.
    async fn exact(&mut self, count: usize) -> Result<(Score, Causes)> {
        let (mut score, mut causes) = (Score::default(), Causes::default());
        for _ in 0..count {
            let seen = self.send().await?;
            score.add(&seen, BLOCK);
            if !seen.exact() {
                causes.add(self.prove(&seen).await?);
            }
        }
        causes.check(count)?;
        Ok((score, causes))
    }

    async fn prove(&self, seen: &Seen) -> Result<super::residency::Cause> {
        let at = self
            .pair
            .iter()
            .position(|e| e.authority() == seen.engine)
            .context("the request went elsewhere")?;
        self.taps[at].settle(Duration::from_millis(200)).await;
        prove(seen, &self.pair[at], &self.taps[at]).await
    }

    /// Lets batches pass again and waits until the gateway has applied everything that both engines have announced.
    async fn healed(&mut self) -> Result<()> {
        for (engine, tap) in self.pair.iter().zip(&self.taps) {
            tap.drop_next(0).await?;
            // Only a batch behind it shows that one is missing; this makes the engine publish one.
            let prompt: Vec<u32> = (0..2 * BLOCK)
                .map(|_| self.driver.rng().random_range(0..100_000))
                .collect();
            let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 1});
            let before = tap.record().all();
            Request::post(engine.authority(), "/v1/completions", &body)
                .json()
                .await?;
            tap.until("a batch", |r| r.all() > before).await?;
        }
        let wait = async {
            for (engine, tap) in self.pair.iter().zip(&self.taps) {
                let known = async || {
                    let endpoint = self.gateway.endpoint(engine.authority()).await?;
                    anyhow::Ok(endpoint["seq"].as_u64())
                };
                while tap.last_seq().is_some() && known().await? < tap.last_seq() {
                    sleep(Duration::from_millis(50)).await;
                }
            }
            anyhow::Ok(())
        };
        tokio::time::timeout(HEAL_LIMIT, wait)
            .await
            .context("the gateway does not catch up")?
    }
}

async fn dropped(lab: Arc<Lab>) -> Result<String> {
    let mut rig = Rig::new(lab, 11).await?;
    rig.requests(8).await?;
    let rounds = rig.lab.count(4, 16);
    let mut score = Score::default();
    for round in 0..rounds {
        for tap in &rig.taps {
            tap.drop_next(1 + round as u32 % 3).await?;
        }
        // The gap shows with the first batch behind it.
        rig.requests(6).await?;
        rig.healed().await?;
        let (s, _) = rig.exact(8).await?;
        score = add(score, s);
    }
    let dropped = fates(&rig, "drop");
    let asked = asked(&rig);
    ensure!(dropped >= rounds, "{dropped} batches were dropped");
    ensure!(asked >= rounds, "{asked} replays were asked for");
    rig.gateway.check().await?;
    Ok(format!(
        "{dropped} batches dropped, {asked} replays; after each: {score}"
    ))
}

async fn truncated(lab: Arc<Lab>) -> Result<String> {
    let mut rig = Rig::new(lab, 12).await?;
    rig.requests(8).await?;
    for tap in &rig.taps {
        tap.truncate_next(2).await?;
    }
    rig.requests(8).await?;
    rig.healed().await?;
    let (score, causes) = rig.exact(rig.lab.count(12, 60)).await?;
    let truncated = fates(&rig, "truncate");
    ensure!(truncated >= 2, "{truncated} batches were truncated");
    rig.gateway.check().await?;
    Ok(format!(
        "{truncated} batches truncated; then {score}; differences: {causes}"
    ))
}

async fn delayed(lab: Arc<Lab>) -> Result<String> {
    let mut rig = Rig::new(lab, 13).await?;
    for tap in &rig.taps {
        tap.delay(Duration::from_millis(400)).await?;
    }
    let (mut score, mut causes) = (Score::default(), Causes::default());
    for _ in 0..rig.lab.count(30, 120) {
        let seen = rig.send().await?;
        score.add(&seen, BLOCK);
        if !seen.exact() {
            causes.add(rig.prove(&seen).await?);
        }
    }
    for tap in &rig.taps {
        tap.delay(Duration::ZERO).await?;
    }
    sleep(Duration::from_millis(500)).await;
    rig.healed().await?;
    let (healed, _) = rig.exact(10).await?;
    rig.gateway.check().await?;
    Ok(format!(
        "400 ms late: {score}; differences: {causes}; on time again: {healed}"
    ))
}

async fn refused(lab: Arc<Lab>) -> Result<String> {
    let mut rig = Rig::new(lab, 14).await?;
    rig.requests(8).await?;
    for tap in &rig.taps {
        tap.answer_replay(Replay::Refuse).await?;
        tap.drop_next(1).await?;
    }
    rig.requests(6).await?;
    // Past its patience with the replay the gateway forgets what the engine holds.
    sleep(Duration::from_secs(5)).await;
    let mut under = 0;
    let count = rig.lab.count(20, 80);
    for _ in 0..count {
        let seen = rig.send().await?;
        if seen.predicted > seen.reported {
            let cause = rig.prove(&seen).await?;
            anyhow::bail!("promised too much ({cause:?}): {}", seen.decision.0);
        }
        under += usize::from(seen.predicted < seen.reported);
    }
    for tap in &rig.taps {
        tap.answer_replay(Replay::Pass).await?;
    }
    rig.gateway.check().await?;
    Ok(format!(
        "{count} requests after a replay that never came: none over-promised, {under} under-promised"
    ))
}

async fn stalled(lab: Arc<Lab>) -> Result<String> {
    let mut rig = Rig::new(lab, 15).await?;
    rig.requests(10).await?;
    for tap in &rig.taps {
        tap.drop_next(3).await?;
        tap.answer_replay(Replay::Stall(1)).await?;
    }
    rig.requests(8).await?;
    sleep(Duration::from_secs(1)).await;
    for tap in &rig.taps {
        tap.answer_replay(Replay::Pass).await?;
    }
    // The next gap is replayed in full.
    for tap in &rig.taps {
        tap.drop_next(1).await?;
    }
    rig.requests(8).await?;
    rig.healed().await?;
    for seen in rig.requests(rig.lab.count(12, 60)).await? {
        if seen.predicted > seen.reported {
            let cause = rig.prove(&seen).await?;
            anyhow::bail!("promised too much ({cause:?}): {}", seen.decision.0);
        }
    }
    rig.gateway.check().await?;
    Ok(format!("{} replays were asked for", asked(&rig)))
}

async fn late(lab: Arc<Lab>) -> Result<String> {
    let mut rig = Rig::new(lab, 16).await?;
    rig.requests(rig.lab.count(20, 60)).await?;
    // A new gateway knows nothing; the engines' replay has it all.
    rig.gateway = Rig::gateway(&rig.lab, &rig.pair, &rig.taps).await?;
    rig.healed().await?;
    let (score, causes) = rig.exact(rig.lab.count(20, 60)).await?;
    ensure!(score.cached > 0, "nothing was cached: {score}");
    rig.gateway.check().await?;
    Ok(format!("{score}; differences: {causes}"))
}

async fn restarted(lab: Arc<Lab>) -> Result<String> {
    let mut rig = Rig::new(lab, 17).await?;
    rig.requests(12).await?;
    rig.pair[0].restart().await?;
    rig.gateway.ready().await?;
    // The relay kept its socket: only the sequence tells.
    rig.healed().await?;
    let (score, causes) = rig.exact(rig.lab.count(20, 60)).await?;
    rig.gateway.check().await?;
    Ok(format!("{score}; differences: {causes}"))
}

fn fates(rig: &Rig, fate: &str) -> usize {
    rig.taps
        .iter()
        .map(|t| {
            t.with(|r| {
                r.batches
                    .iter()
                    .filter(|b| b.fate.as_deref() == Some(fate))
                    .count()
            })
        })
        .sum()
}

fn asked(rig: &Rig) -> usize {
    rig.taps.iter().map(|t| t.with(|r| r.asked.len())).sum()
}

fn add(a: Score, b: Score) -> Score {
    Score {
        all: a.all + b.all,
        exact: a.exact + b.exact,
        near: a.near + b.near,
        cached: a.cached + b.cached,
        prompt: a.prompt + b.prompt,
    }
}
