//! `prediction`: what the shipped predictor says beside what comes, and how well it ranks.
//!
//! Each decision is compared with forked simulations of all its candidates: the truth of the choices that were not made. The
//! predictor learns from its own answers only; it knows nothing of the pods' constants.

use crate::{
    Error, crew,
    load::{Gaps, Pattern, Workload},
    report::{Report, Row},
    stats::quantile_of,
    world::{Arm, Probe, Record, World},
};
use forebay_sim::{Hiccups, PodSpec};
use rand::{SeedableRng, rngs::StdRng};
use std::{collections::BTreeMap, fmt::Write, sync::Arc};

/// Pairs of candidates whose true TTFTs are no further apart than this are equals.
const APART: f64 = 1.2;

/// Above so many uncached tokens a prediction is about prefill.
const LONG: u32 = 4_000;

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Trials.
    pub seeds: usize,
    /// Fewer worlds.
    pub quick: bool,
    /// Runs at once.
    pub threads: usize,
}

/// One prediction and what came.
#[derive(Clone, Debug)]
struct Sample {
    regime: String,
    /// Tokens that were computed.
    uncached: u32,
    predicted: f64,
    actual: f64,
    /// The error that the predictor reported of itself at that time, as |log|.
    reported: f64,
    /// Pairs that were far apart, and how many of them were in the right order.
    pairs: (u32, u32),
    /// The true TTFT of the candidate with the smallest prediction, of the one chosen, and of the best.
    truths: [f64; 3],
}

/// The sums over some samples.
struct Figures {
    n: usize,
    median: f64,
    p90: f64,
    log: f64,
    reported: f64,
    rank: f64,
    regret: f64,
    priced: f64,
}

/// Runs the benchmark.
pub fn run(options: &Options, report: &mut Report) -> Result<(), Error> {
    let plain = Arc::new(PodSpec::kind("l40s")?);
    let mut jobs = Vec::new();
    for seed in 0..options.seeds as u64 {
        for group in ["as they are", "perturbed"] {
            for (i, (workload, pattern)) in cells(options.quick).into_iter().enumerate() {
                let seed = 40_000 + 1_000 * seed + 17 * i as u64;
                let mut world = World::published(&plain, workload, pattern, Arm::Priced, seed);
                world.probe = true;
                if group == "perturbed" {
                    let mut rng = StdRng::seed_from_u64(seed);
                    world.pods = (0..3).map(|_| perturbed(&plain, &mut rng)).collect();
                }
                jobs.push((group, world));
            }
        }
    }
    let samples = crew::all(&jobs, options.threads, |(_, world)| {
        let run = world.run()?;
        Ok(run.measured().filter_map(Sample::of).collect())
    })?;
    let samples: Vec<Vec<Sample>> = samples.into_iter().collect::<Result<_, Error>>()?;
    for group in ["as they are", "perturbed"] {
        let of = jobs.iter().zip(&samples).filter(|((g, _), _)| *g == group);
        let all: Vec<&Sample> = of.flat_map(|(_, s)| s).collect();
        table(group, &all, report);
    }
    report.note(format!(
        "{} runs; policy PricedTtft asked directly; truth by forked simulation of every candidate; a pod is queued with 1 or 2 requests before their first token, saturated with more; errors are |predicted - measured| / measured; perturbed: each pod's constants times 0.7 to 1.4, and a pause of 0.25 s every 20 s",
        jobs.len()
    ));
    Ok(())
}

fn cells(quick: bool) -> Vec<(Workload, Pattern)> {
    let open = |w: Workload| {
        let gaps = Gaps::Poisson;
        (
            w,
            Pattern::Open {
                rate: w.rate(gaps),
                gaps,
            },
        )
    };
    let closed = |w, streams| (w, Pattern::Closed { streams });
    let mut cells = vec![
        open(Workload::Control),
        closed(Workload::Control, 8),
        closed(Workload::Shared, 16),
        closed(Workload::Multiturn, 16),
    ];
    if !quick {
        cells.extend([
            open(Workload::Shared),
            open(Workload::Multiturn),
            closed(Workload::Shared, 4),
            closed(Workload::Shared, 32),
            closed(Workload::Multiturn, 4),
            closed(Workload::Multiturn, 32),
        ]);
    }
    cells
}

/// A pod of the kind with other constants, and pauses.
pub(crate) fn perturbed(spec: &PodSpec, rng: &mut StdRng) -> Arc<PodSpec> {
    let mut spec = spec.perturbed(rng, 0.7..1.4);
    spec.hiccups = Some(Hiccups {
        rate: 0.05,
        seconds: 0.25,
    });
    Arc::new(spec)
}

fn table(group: &str, all: &[&Sample], report: &mut Report) {
    let mut regimes: BTreeMap<&str, Vec<&Sample>> = BTreeMap::new();
    for s in all {
        regimes.entry(&s.regime).or_default().push(s);
    }
    let long: Vec<&Sample> = all.iter().copied().filter(|s| s.uncached > LONG).collect();
    let mut t = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(t, "### Prediction, pods {group}\n");
    let _ = writeln!(
        t,
        "| regime | n | median error | p90 error | median abs(log) | reported of itself | rank, pairs > 20 % apart | regret of the smallest prediction | regret of the choice |"
    );
    let _ = writeln!(t, "|---|---|---|---|---|---|---|---|---|");
    let whole = [("all", all), ("above 4k uncached tokens", &long)];
    let parts = regimes.iter().map(|(name, s)| (*name, s.as_slice()));
    for (name, samples) in parts.chain(whole) {
        let f = Figures::of(samples);
        let _ = writeln!(
            t,
            "| {name} | {} | {:.1} % | {:.1} % | {:.3} | {:.3} | {:.1} % | {:.3} | {:.3} |",
            f.n,
            100.0 * f.median,
            100.0 * f.p90,
            f.log,
            f.reported,
            100.0 * f.rank,
            f.regret,
            f.priced,
        );
        for (metric, unit, value) in [
            ("median error", "share", f.median),
            ("p90 error", "share", f.p90),
            ("rank accuracy", "share", f.rank),
            ("regret of the smallest prediction", "ratio", f.regret),
            ("self-reported over measured", "ratio", f.reported / f.log),
        ] {
            let metric = format!("{name}: {metric}");
            report.rows.push(Row::point(group, &metric, unit, value));
        }
    }
    report.tables.push(t);
    let (f, long) = (Figures::of(all), Figures::of(&long));
    report.at_most(
        &format!("{group}: median error above 4k uncached tokens"),
        long.median,
        0.06,
    );
    report.at_least(&format!("{group}: rank accuracy"), f.rank, 0.96);
    report.at_most(&format!("{group}: regret"), f.regret, 1.03);
    let apart = f.reported / f.log;
    report.at_most(
        &format!("{group}: self-reported error, factor from the measured"),
        apart.max(1.0 / apart),
        1.5,
    );
}

// === impl Sample ===

impl Sample {
    fn of(record: &Record) -> Option<Self> {
        let (probe, actual, cached) = (record.probe.as_ref()?, record.ttft?, record.cached?);
        let (smallest, best) = extremes(probe)?;
        Some(Self {
            regime: regime(record, cached),
            uncached: record.tokens - cached,
            predicted: probe.predicted,
            actual,
            reported: probe.error,
            pairs: pairs(&probe.candidates),
            truths: [smallest, probe.candidates.get(probe.chosen)?.1, best],
        })
    }
}

/// By what was found in the cache, and by who was ahead.
fn regime(record: &Record, cached: u32) -> String {
    let share = f64::from(cached) / f64::from(record.tokens);
    let found = match share {
        s if s >= 0.75 => "hit",
        s if s < 0.1 => "miss",
        _ => "partial",
    };
    let load = match record.ahead {
        0 => "idle",
        1 | 2 => "queued",
        _ => "saturated",
    };
    format!("{found}, {load}")
}

/// The true TTFT of the candidate with the smallest prediction, and the smallest.
fn extremes(probe: &Probe) -> Option<(f64, f64)> {
    let c = &probe.candidates;
    let smallest = c.iter().min_by(|a, b| a.0.total_cmp(&b.0))?;
    let best = c.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
    Some((smallest.1, best.1))
}

/// Pairs that are far apart, and those of them that are in the right order.
fn pairs(candidates: &[(f64, f64)]) -> (u32, u32) {
    let (mut apart, mut right) = (0, 0);
    for (i, a) in candidates.iter().enumerate() {
        for b in candidates.iter().skip(i + 1) {
            let (low, high) = if a.1 <= b.1 { (a, b) } else { (b, a) };
            if high.1 > APART * low.1 {
                apart += 1;
                right += u32::from(low.0 < high.0);
            }
        }
    }
    (apart, right)
}

// === impl Figures ===

impl Figures {
    fn of(samples: &[&Sample]) -> Self {
        let sorted = |of: &dyn Fn(&Sample) -> f64, q| {
            quantile_of(&mut samples.iter().map(|s| of(s)).collect::<Vec<_>>(), q)
        };
        let error = |s: &Sample| (s.predicted - s.actual).abs() / s.actual;
        let sum = |of: &dyn Fn(&Sample) -> f64| samples.iter().map(|s| of(s)).sum::<f64>();
        let best = sum(&|s| s.truths[2]);
        Self {
            n: samples.len(),
            median: sorted(&error, 0.5),
            p90: sorted(&error, 0.9),
            log: sorted(&|s| (s.actual / s.predicted).ln().abs(), 0.5),
            reported: sorted(&|s| s.reported, 0.5),
            rank: sum(&|s| f64::from(s.pairs.1)) / sum(&|s| f64::from(s.pairs.0)),
            regret: sum(&|s| s.truths[0]) / best,
            priced: sum(&|s| s.truths[1]) / best,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pairs_that_are_far_apart_count() {
        // Truths 1, 1.1 and 2: the first two are equals, whatever is predicted.
        assert_eq!(pairs(&[(3.0, 1.0), (2.0, 1.1), (4.0, 2.0)]), (2, 2));
        assert_eq!(pairs(&[(3.0, 1.0), (5.0, 1.1), (4.0, 2.0)]), (2, 1));
    }

    #[test]
    fn regret_is_what_the_smallest_prediction_costs() {
        let probe = Probe {
            candidates: vec![(1.0, 3.0), (2.0, 2.0)],
            ..Probe::default()
        };
        assert_eq!(extremes(&probe), Some((3.0, 2.0)));
    }
}
