//! Predicted against measured TTFT on two engines, of which one has half the CPU of the other.
//!
//! Each engine stands behind a gateway of its own, so that the same request can be given to both in the same state: what
//! each predicts is what one pool with both would predict. A case sets a state up on both engines in turn (prefix cached
//! whole, in part or not at all; idle, or with prompts ahead) and measures a streamed request's first token.

use super::driver::text;
use crate::{
    engine::{MODEL, Profile},
    gateway::{Gateway, GatewaySpec},
    http::Request,
    lab::{Lab, Tier},
    suite::Test,
    test,
    throttle::Throttle,
};
use anyhow::{Context, Result, bail, ensure};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use std::{fmt::Write, sync::Arc, time::Duration};
use tokio::time::sleep;

/// TTFTs closer than this are no pair: neither order is wrong.
const APART: f64 = 1.2;
/// Of the cases in which the engines are apart, the predicted winner wins this share.
const WINNERS: f64 = 0.95;
/// The fast tier has too few cases for the bars of each regime; it holds all regimes together to this one.
const FLOOR: f64 = 0.8;
/// Within a regime, this share of the pairs of requests are predicted in their order.
const ORDERED: f64 = 0.9;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    Hit,
    Partial,
    Miss,
}

/// One request at one engine.
#[derive(Clone, Copy, Debug)]
struct Sample {
    predicted: f64,
    actual: f64,
    /// What the predictor said of its own error: median of |log(actual / predicted)|.
    own_error: f64,
    /// What a predictor that only counts uncached tokens goes by.
    uncached: f64,
}

/// Pairs more than [`APART`] apart, and how many of them were predicted in their order.
#[derive(Clone, Copy, Debug, Default)]
struct Order {
    pairs: usize,
    right: usize,
    /// By uncached tokens alone.
    right_uncached: usize,
}

/// The tests.
pub fn tests() -> Vec<Test> {
    vec![test!(
        "vllm",
        prediction,
        "predicted_ttft_has_the_right_order",
        [A],
        2400
    )]
}

async fn prediction(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::A).await?;
    let throttles = [
        Throttle::new(pair[0].pid().await, 1.0)?,
        Throttle::new(pair[1].pid().await, 0.5)?,
    ];
    let gateways = [
        Gateway::started(&lab.paths, &GatewaySpec::new([&pair[0]])).await?,
        Gateway::started(&lab.paths, &GatewaySpec::new([&pair[1]])).await?,
    ];
    let mut rng = StdRng::seed_from_u64(lab.seed.wrapping_add(21));
    let mut case = 0u32;
    let cases = lab.count(8, 24);
    let regimes = [
        (Held::Hit, false),
        (Held::Partial, false),
        (Held::Miss, false),
        (Held::Hit, true),
        (Held::Partial, true),
        (Held::Miss, true),
    ];

    // A predictor that has seen nothing can promise nothing: a few of everything first.
    for round in 0..lab.count(4, 6) {
        for (held, queued) in regimes {
            case += 1;
            let plan = Plan::new(&mut rng, lab.seed, case, held, queued);
            for gateway in &gateways {
                plan.run(gateway, &format!("train-{round}-{case}")).await?;
            }
        }
    }

    let client_cpu = own_cpu();
    let gateway_cpu = gateways[0].cpu().await + gateways[1].cpu().await;
    let (mut winners, mut requests, mut table) = (Order::default(), 0usize, String::new());
    let (mut total, mut bad) = (Order::default(), Vec::new());
    for (held, queued) in regimes {
        let mut samples = Vec::new();
        for _ in 0..cases {
            case += 1;
            let plan = Plan::new(&mut rng, lab.seed, case, held, queued);
            // Which engine is first alternates, so that drift of the machine favours neither.
            let order = if case.is_multiple_of(2) {
                [0, 1]
            } else {
                [1, 0]
            };
            let mut both = [None; 2];
            for e in order {
                both[e] = Some(plan.run(&gateways[e], &format!("p{case}-{e}")).await?);
                requests += 1 + plan.ahead.len();
            }
            let [Some(a), Some(b)] = both else {
                bail!("both engines were measured")
            };
            winners.add(&a, &b);
            samples.extend([a, b]);
        }
        let mut order = Order::default();
        for (i, a) in samples.iter().enumerate() {
            for b in &samples[i + 1..] {
                order.add(a, b);
            }
        }
        let name = format!("{held:?} {}", if queued { "queued" } else { "idle" }).to_lowercase();
        let mut errors: Vec<f64> = samples
            .iter()
            .map(|s| (s.actual / s.predicted).ln().abs())
            .collect();
        let mut own: Vec<f64> = samples.iter().map(|s| s.own_error).collect();
        write!(
            table,
            "\n      {name:15} order {:3.0} % of {} pairs (uncached tokens alone: {:3.0} %); error median {:.0} %, p90 {:.0} % (it says of itself: median {:.0} %)",
            order.share() * 100.0,
            order.pairs,
            order.share_uncached() * 100.0,
            percent(quantile(&mut errors, 0.5)),
            percent(quantile(&mut errors, 0.9)),
            percent(quantile(&mut own, 0.5)),
        )?;
        if order.pairs >= 10 && order.share() < ORDERED {
            bad.push(format!("{name}: {:.0} %", order.share() * 100.0));
        }
        total.pairs += order.pairs;
        total.right += order.right;
        total.right_uncached += order.right_uncached;
    }
    let client_cpu = own_cpu().saturating_sub(client_cpu);
    let gateway_cpu =
        (gateways[0].cpu().await + gateways[1].cpu().await).saturating_sub(gateway_cpu);
    for gateway in &gateways {
        gateway.check().await?;
    }
    let per = |cpu: Duration| cpu.as_secs_f64() * 1e3 / requests.max(1) as f64;
    let summary = format!(
        "the predicted winner wins {:.0} % of {} cases; order right in {:.1} % of {} pairs, by uncached tokens alone {:.1} %; CPU per request: client {:.1} ms, gateway {:.1} ms; one CPU and half of one by {}{table}",
        winners.share() * 100.0,
        winners.pairs,
        total.share() * 100.0,
        total.pairs,
        total.share_uncached() * 100.0,
        per(client_cpu),
        per(gateway_cpu),
        throttles[1].how(),
    );
    drop(throttles);
    ensure!(
        winners.pairs >= cases,
        "hardly any case was apart: {summary}"
    );
    ensure!(
        total.right > total.right_uncached,
        "no better than counting tokens: {summary}"
    );
    ensure!(total.share() >= FLOOR, "{summary}");
    if lab.tier == Tier::Fast {
        return Ok(format!(
            "{summary}\n      not judged here but in the full tier: the predicted winner in {:.0} % of the cases, the order in {:.0} % of the pairs of each regime",
            WINNERS * 100.0,
            ORDERED * 100.0
        ));
    }
    ensure!(winners.share() >= WINNERS, "{summary}");
    ensure!(bad.is_empty(), "{}: {summary}", bad.join(", "));
    Ok(summary)
}

/// A state and a request.
struct Plan {
    /// Sent and answered before: what of it the probe shares is cached.
    before: Option<Value>,
    /// Sent just before the probe: they are ahead of it.
    ahead: Vec<Value>,
    probe: Value,
}

// === impl Plan ===

impl Plan {
    fn new(rng: &mut StdRng, seed: u64, case: u32, held: Held, queued: bool) -> Self {
        let unique = format!("case {seed} {case}");
        let words = rng.random_range(300..4_000);
        let whole = format!("{unique} {}", text(rng, words));
        let (before, probe) = match held {
            Held::Miss => (None, whole),
            Held::Hit => (Some(whole.clone()), format!("{whole} so")),
            Held::Partial => {
                let share = rng.random_range(0.3..0.7);
                let more = text(rng, (words as f64 * share) as usize + 100);
                (Some(whole.clone()), format!("{whole} {more}"))
            }
        };
        let ahead = match queued {
            false => 0,
            true => rng.random_range(1..=3),
        };
        let ahead = (0..ahead)
            .map(|i| {
                let words = rng.random_range(600..2_500);
                chat(&format!("{unique} ahead {i} {}", text(rng, words)))
            })
            .collect();
        Self {
            before: before.as_deref().map(chat),
            ahead,
            probe: chat(&probe),
        }
    }

    /// Brings the engine into the state and measures the probe.
    async fn run(&self, gateway: &Gateway, id: &str) -> Result<Sample> {
        if let Some(before) = &self.before {
            ttft(gateway.authority(), &format!("{id}-before"), before).await?;
        }
        // Events and the next scrape arrive.
        sleep(Duration::from_millis(150)).await;
        let mut ahead = Vec::new();
        for (i, body) in self.ahead.iter().enumerate() {
            let (authority, id, body) = (
                gateway.authority().to_owned(),
                format!("{id}-ahead{i}"),
                body.clone(),
            );
            ahead.push(tokio::spawn(
                async move { ttft(&authority, &id, &body).await },
            ));
            // In order: each is on its way before the next.
            sleep(Duration::from_millis(15)).await;
        }
        let actual = ttft(gateway.authority(), id, &self.probe).await?;
        for task in ahead {
            task.await??;
        }
        let decision = gateway.decision(id).await?;
        let chosen = decision.chosen()?;
        let predicted = chosen.ttft().context("a predicted TTFT")?;
        let tokens = decision.tokens().context("tokens")?;
        let cached = chosen.cached().context("cached")?;
        ensure!(predicted > Duration::ZERO, "request {id} has no prediction");
        Ok(Sample {
            predicted: predicted.as_secs_f64(),
            actual: actual.as_secs_f64(),
            own_error: chosen.0["error"]
                .as_f64()
                .context("the predictor's own error")?,
            uncached: tokens.saturating_sub(cached) as f64,
        })
    }
}

fn chat(text: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0, "stream": true})
}

/// Streams one chat to its end and returns the time to its first token with content.
pub(super) async fn ttft(authority: &str, id: &str, body: &Value) -> Result<Duration> {
    let mut open = Request::post(authority, "/v1/chat/completions", body)
        .header("x-request-id", id)
        .open()
        .await?;
    ensure!(open.status.is_success(), "request {id}: {}", open.status);
    let (mut first, mut last) = (None, None);
    while let Some(event) = open.event().await? {
        if event.data == "[DONE]" {
            return first
                .or(last)
                .with_context(|| format!("request {id} has no token"));
        }
        let value: Value = serde_json::from_str(&event.data)?;
        ensure!(value["error"].is_null(), "request {id}: {value}");
        let choice = &value["choices"][0];
        let token = choice["delta"]["content"]
            .as_str()
            .is_some_and(|c| !c.is_empty());
        if token {
            first.get_or_insert(event.after);
        } else if choice["finish_reason"].is_string() {
            // Two tokens that decode to nothing: the end is when they were there.
            last = Some(event.after);
        }
    }
    bail!("request {id} ended without [DONE]")
}

// === impl Order ===

impl Order {
    fn add(&mut self, a: &Sample, b: &Sample) {
        let (slow, fast) = if a.actual > b.actual { (a, b) } else { (b, a) };
        if slow.actual > fast.actual * APART {
            self.pairs += 1;
            self.right += usize::from(slow.predicted > fast.predicted);
            self.right_uncached += usize::from(slow.uncached > fast.uncached);
        }
    }

    fn share(&self) -> f64 {
        self.right as f64 / self.pairs.max(1) as f64
    }

    fn share_uncached(&self) -> f64 {
        self.right_uncached as f64 / self.pairs.max(1) as f64
    }
}

fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    values
        .get((last * q).round() as usize)
        .copied()
        .unwrap_or(f64::NAN)
}

/// A log error as per cent.
fn percent(log: f64) -> f64 {
    (log.exp() - 1.0) * 100.0
}

/// CPU time of this process's live threads.
fn own_cpu() -> Duration {
    let nanos: u64 = std::fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok())
        .filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok())
        .sum();
    Duration::from_nanos(nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(predicted: f64, actual: f64, uncached: f64) -> Sample {
        Sample {
            predicted,
            actual,
            own_error: 0.0,
            uncached,
        }
    }

    #[test]
    fn only_pairs_that_are_apart_count_and_ties_are_wrong() {
        let mut order = Order::default();
        order.add(&sample(1.0, 1.0, 5.0), &sample(9.0, 1.1, 5.0));
        assert_eq!(order.pairs, 0);
        order.add(&sample(1.0, 1.0, 5.0), &sample(2.0, 1.3, 5.0));
        order.add(&sample(3.0, 1.0, 5.0), &sample(2.0, 1.3, 9.0));
        assert_eq!((order.pairs, order.right, order.right_uncached), (2, 1, 1));
    }
}
