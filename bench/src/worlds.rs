//! `worlds`: the same routing where things are otherwise: many proxies, late or missing knowledge, other traffic, other
//! hardware, scarce memory.
//!
//! Each world is run with least requests and with the shipped default, and where it says so beside a reference: the same world
//! without what makes it hard.

use crate::{
    Error, crew,
    load::{Gaps, Pattern, Windows, Workload},
    prediction::perturbed,
    report::{Report, Row},
    stats::{self, quantile_of},
    world::{Arm, Change, Run, Senses, World},
};
use forebay_sim::PodSpec;
use rand::{SeedableRng, rngs::StdRng};
use std::{collections::BTreeMap, fmt::Write, sync::Arc};

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Trials.
    pub seeds: usize,
    /// Only worlds whose name contains this.
    pub only: Option<String>,
    /// Runs at once.
    pub threads: usize,
}

/// A world, for any arm and seed.
struct Case {
    name: String,
    workload: Workload,
    arms: Vec<Arm>,
    make: Box<dyn Fn(Arm, u64) -> World + Sync>,
}

/// What came of one arm in one world.
#[derive(Clone, Debug, Default)]
struct Outcome {
    /// Seconds; what never came counts as the time that it was waited for.
    ttft: Vec<f64>,
    kept: usize,
    seconds: f64,
    hits: (u64, u64),
}

/// All outcomes, by world and arm.
struct Outcomes(BTreeMap<(String, Arm), Outcome>);

/// The kinds of pods.
struct Kinds {
    l40s: Arc<PodSpec>,
    a10: Arc<PodSpec>,
    h100: Arc<PodSpec>,
}

/// KV tokens of the published pods.
const PODS: usize = 8;

/// Runs the benchmark.
pub fn run(options: &Options, report: &mut Report) -> Result<(), Error> {
    let kinds = Kinds {
        l40s: Arc::new(PodSpec::kind("l40s")?),
        a10: Arc::new(PodSpec::kind("a10")?),
        h100: Arc::new(PodSpec::kind("h100")?),
    };
    let mut cases = cases(&kinds);
    if let Some(only) = &options.only {
        cases.retain(|c| c.name.contains(only.as_str()));
    }
    let mut jobs = Vec::new();
    for (c, case) in cases.iter().enumerate() {
        for arm in &case.arms {
            for trial in 0..options.seeds as u64 {
                jobs.push((c, *arm, 70_000 + 1_000 * trial));
            }
        }
    }
    let runs = crew::all(&jobs, options.threads, |(c, arm, seed)| {
        let case = cases.get(*c).ok_or("a job without a world")?;
        let run = (case.make)(*arm, *seed).run()?;
        Ok(Outcome::of(&run, case.workload.slo()))
    })?;
    let runs: Vec<Outcome> = runs.into_iter().collect::<Result<_, Error>>()?;
    let mut outcomes = Outcomes(BTreeMap::new());
    for ((c, arm, _), outcome) in jobs.iter().zip(runs) {
        if let Some(case) = cases.get(*c) {
            outcomes
                .0
                .entry((case.name.clone(), *arm))
                .or_default()
                .add(outcome);
        }
    }
    table(&cases, &outcomes, report);
    for case in &cases {
        floor(case, &outcomes, report);
    }
    goals(&outcomes, report);
    report.note(format!(
        "{} trials per world; shared within 8 s, multiturn within 4 s; reports each second and events after 20 ms unless said otherwise; the policy is PricedTtft with λ = 1 unless said otherwise",
        options.seeds
    ));
    report.note("in-flight work is not shared between proxies yet, so that row of the goals is not measured".into());
    Ok(())
}

fn cases(kinds: &Kinds) -> Vec<Case> {
    let mut cases = Vec::new();
    let both = [Workload::Shared, Workload::Multiturn];
    let usual = vec![Arm::LeastRequests, Arm::Priced];
    let closed = |streams| Pattern::Closed { streams };
    let spec = kinds.l40s.clone();

    // Memory.
    for thousands in [140u32, 176, 206, 300] {
        let blocks = (thousands * 1000).div_ceil(spec.block_size);
        let spec = Arc::new(PodSpec {
            kv_blocks: blocks,
            ..(*spec).clone()
        });
        for w in both {
            cases.push(Case {
                name: format!("KV {thousands}k, {} C=32", w.name()),
                workload: w,
                arms: vec![
                    Arm::LeastRequests,
                    Arm::Static,
                    Arm::Ttft,
                    Arm::LMetric,
                    Arm::Priced,
                    Arm::Exact,
                ],
                make: Box::new({
                    let spec = spec.clone();
                    move |arm, seed| World::published(&spec, w, closed(32), arm, seed)
                }),
            });
        }
    }
    // Small blocks, as models without recurrent state have them.
    let small = Arc::new(PodSpec {
        block_size: 16,
        kv_blocks: spec.kv_tokens() as u32 / 16,
        extra_blocks: 0,
        ..(*spec).clone()
    });
    for w in both {
        cases.push(Case {
            name: format!("blocks of 16, {} C=32", w.name()),
            workload: w,
            arms: usual.clone(),
            make: Box::new({
                let spec = small.clone();
                move |arm, seed| World::published(&spec, w, closed(32), arm, seed)
            }),
        });
    }
    // How old what is known is, and traffic that nobody tells of.
    for (every, delay, name) in [
        (0.05, 0.02, "fresh reports"),
        (1.0, 0.005, "1 s"),
        (15.0, 0.005, "15 s"),
    ] {
        for bypass in [0.0, 0.3] {
            for w in both {
                cases.push(Case {
                    name: format!("reports {name}, bypass {bypass}, {} C=16", w.name()),
                    workload: w,
                    arms: usual.clone(),
                    make: Box::new({
                        let spec = spec.clone();
                        move |arm, seed| World {
                            senses: Senses {
                                every,
                                delay,
                                ..Senses::default()
                            },
                            bypass,
                            ..World::published(&spec, w, closed(16), arm, seed)
                        }
                    }),
                });
            }
        }
    }
    // Many proxies over eight pods.
    for events in [true, false] {
        for every in [1.0, 15.0] {
            for proxies in [1usize, 4, 16] {
                for w in both {
                    if !events && every > 1.0 {
                        continue;
                    }
                    let kv = if events { "events" } else { "no events" };
                    cases.push(Case {
                        name: format!(
                            "8 pods, {proxies} proxies, {kv}, reports {every} s, {} C=64",
                            w.name()
                        ),
                        workload: w,
                        arms: usual.clone(),
                        make: Box::new({
                            let spec = spec.clone();
                            move |arm, seed| World {
                                pods: vec![spec.clone(); PODS],
                                proxies,
                                senses: Senses {
                                    events: events.then_some(0.02),
                                    every,
                                    ..Senses::default()
                                },
                                ..World::published(&spec, w, closed(64), arm, seed)
                            }
                        }),
                    });
                }
            }
        }
    }
    // Hardware.
    for w in [Workload::Control, Workload::Shared, Workload::Multiturn] {
        let pods = vec![
            kinds.a10.clone(),
            kinds.a10.clone(),
            kinds.l40s.clone(),
            kinds.l40s.clone(),
            kinds.h100.clone(),
        ];
        let rate = if w == Workload::Control { 0.6 } else { 1.2 };
        cases.push(Case {
            name: format!("2 A10, 2 L40S, 1 H100, {} {rate}/s", w.name()),
            workload: w,
            arms: vec![Arm::LeastRequests, Arm::Priced, Arm::Exact],
            make: Box::new({
                let spec = spec.clone();
                move |arm, seed| World {
                    pods: pods.clone(),
                    ..World::published(
                        &spec,
                        w,
                        Pattern::Open {
                            rate,
                            gaps: Gaps::Poisson,
                        },
                        arm,
                        seed,
                    )
                }
            }),
        });
        cases.push(Case {
            name: format!("constants x 0.7 to 1.4 and pauses, {} C=16", w.name()),
            workload: w,
            arms: vec![Arm::LeastRequests, Arm::Priced, Arm::Exact],
            make: Box::new({
                let spec = spec.clone();
                move |arm, seed| {
                    let mut rng = StdRng::seed_from_u64(seed);
                    World {
                        pods: (0..3).map(|_| perturbed(&spec, &mut rng)).collect(),
                        ..World::published(&spec, w, closed(16), arm, seed)
                    }
                }
            }),
        });
        cases.push(Case {
            name: format!("a pod at half speed from 120 s, {} C=16", w.name()),
            workload: w,
            arms: vec![Arm::LeastRequests, Arm::Priced, Arm::Exact],
            make: Box::new({
                let spec = spec.clone();
                let slow = Arc::new(spec.slowed(2.0));
                move |arm, seed| World {
                    changes: vec![(120.0, Change::Times(0, slow.clone()))],
                    ..World::published(&spec, w, closed(16), arm, seed)
                }
            }),
        });
        cases.push(Case {
            name: format!("a cold pod joins at 120 s, {} C=24", w.name()),
            workload: w,
            arms: vec![Arm::LeastRequests, Arm::Priced, Arm::Exact],
            make: Box::new({
                let spec = spec.clone();
                move |arm, seed| World {
                    changes: vec![(120.0, Change::Join(2))],
                    ..World::published(&spec, w, closed(24), arm, seed)
                }
            }),
        });
        for times in [0.5, 1.0, 2.0] {
            let rate = times * w.rate(Gaps::Poisson);
            cases.push(Case {
                name: format!("rate x {times}, {}", w.name()),
                workload: w,
                arms: usual.clone(),
                make: Box::new({
                    let spec = spec.clone();
                    move |arm, seed| World {
                        windows: Windows::LATENCY,
                        ..World::published(
                            &spec,
                            w,
                            Pattern::Open {
                                rate,
                                gaps: Gaps::Poisson,
                            },
                            arm,
                            seed,
                        )
                    }
                }),
            });
        }
    }
    for lambda in [0.0, 0.5, 1.0, 2.0, 4.0] {
        for w in both {
            cases.push(Case {
                name: format!("λ = {lambda}, {} C=32", w.name()),
                workload: w,
                arms: usual.clone(),
                make: Box::new({
                    let spec = spec.clone();
                    move |arm, seed| World {
                        lambda,
                        ..World::published(&spec, w, closed(32), arm, seed)
                    }
                }),
            });
        }
    }
    cases
}

fn table(cases: &[Case], outcomes: &Outcomes, report: &mut Report) {
    let mut t = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        t,
        "| world | arm | goodput, req/min | within SLO | hit share | mean, s | median, s | p99, s |"
    );
    let _ = writeln!(t, "|---|---|---|---|---|---|---|---|");
    for case in cases {
        for arm in &case.arms {
            let Some(o) = outcomes.of(&case.name, *arm) else {
                continue;
            };
            let q = |q| quantile_of(&mut o.ttft.clone(), q);
            let _ = writeln!(
                t,
                "| {} | {} | {:.1} | {:.0} % | {:.0} % | {:.2} | {:.2} | {:.1} |",
                case.name,
                arm.name(),
                o.goodput(),
                100.0 * o.attainment(),
                100.0 * o.hits.0 as f64 / o.hits.1 as f64,
                o.mean(),
                q(0.5),
                q(0.99),
            );
            for (metric, unit, value) in [
                ("goodput", "req/min", o.goodput()),
                ("attainment", "share", o.attainment()),
                ("TTFT mean", "s", o.mean()),
                ("TTFT p99", "s", q(0.99)),
            ] {
                let metric = format!("{}: {metric}", case.name);
                report
                    .rows
                    .push(Row::point(arm.name(), &metric, unit, value));
            }
        }
    }
    report.tables.push(t);
}

/// No world may fall below least requests. In closed loops fewer slow answers make more requests, so goodput decides; in open
/// loops the mean does.
fn floor(case: &Case, outcomes: &Outcomes, report: &mut Report) {
    let of = |arm| outcomes.of(&case.name, arm);
    let (Some(least), Some(own)) = (of(Arm::LeastRequests), of(Arm::Priced)) else {
        return;
    };
    let open = case.name.contains("/s") || case.name.contains("rate x");
    if open {
        let what = format!("{}: mean TTFT over least requests'", case.name);
        report.at_most(&what, own.mean() / least.mean(), 1.0);
    } else {
        let what = format!("{}: goodput over least requests'", case.name);
        report.at_least(&what, own.goodput() / least.goodput(), 1.0);
    }
}

/// What the worlds are to reach.
fn goals(outcomes: &Outcomes, report: &mut Report) {
    let goodput = |name: &str, arm| outcomes.of(name, arm).map(Outcome::goodput);
    let mean = |name: &str| outcomes.of(name, Arm::Priced).map(Outcome::mean);
    if let Some(g) = goodput("KV 140k, shared C=32", Arm::Priced) {
        report.at_least("KV 140k, shared C=32: goodput, req/min", g, 25.0);
    }
    for w in ["shared", "multiturn"] {
        let name = |reports: &str| format!("reports {reports}, bypass 0.3, {w} C=16");
        if let (Some(old), Some(fresh)) = (
            goodput(&name("15 s"), Arm::Priced),
            goodput(&name("fresh reports"), Arm::Priced),
        ) {
            let what =
                format!("reports 15 s old, 30 % bypass, {w}: goodput over that with fresh reports");
            report.at_least(&what, old / fresh, 0.9);
        }
        let name =
            |proxies, kv: &str| format!("8 pods, {proxies} proxies, {kv}, reports 1 s, {w} C=64");
        if let (Some(one), Some(many)) = (mean(&name(1, "events")), mean(&name(16, "events"))) {
            let what =
                format!("16 proxies, own tickets and 1 s reports, {w}: mean TTFT over one proxy's");
            report.at_most(&what, many / one, 1.3);
        }
        for proxies in [4, 16] {
            if let (Some(one), Some(many)) = (
                mean(&name(1, "no events")),
                mean(&name(proxies, "no events")),
            ) {
                let what = format!("{proxies} proxies, no events, {w}: mean TTFT over one proxy's");
                report.at_most(&what, many / one, 2.0);
            }
        }
    }
    for ((name, arm), own) in &outcomes.0 {
        if *arm == Arm::Priced
            && name.starts_with("2 A10")
            && let Some(exact) = outcomes.of(name, Arm::Exact)
        {
            let p99 = |o: &Outcome| quantile_of(&mut o.ttft.clone(), 0.99);
            let what = format!("{name}: p99 TTFT over exact greedy's");
            report.at_most(&what, p99(own) / p99(exact), 1.06);
        }
    }
}

// === impl Outcome ===

impl Outcome {
    fn of(run: &Run, slo: f64) -> Self {
        let end = run.windows.end();
        let waited = |r: &crate::world::Record| r.ttft.unwrap_or(end - r.at);
        Self {
            ttft: run.measured().map(waited).collect(),
            kept: run.measured().filter(|r| r.counted() <= slo).count(),
            seconds: run.windows.measure,
            hits: run.hits(),
        }
    }

    fn add(&mut self, other: Self) {
        self.ttft.extend(other.ttft);
        self.kept += other.kept;
        self.seconds += other.seconds;
        self.hits.0 += other.hits.0;
        self.hits.1 += other.hits.1;
    }

    fn goodput(&self) -> f64 {
        self.kept as f64 / self.seconds * 60.0
    }

    fn attainment(&self) -> f64 {
        self.kept as f64 / self.ttft.len() as f64
    }

    fn mean(&self) -> f64 {
        stats::mean(&self.ttft)
    }
}

// === impl Outcomes ===

impl Outcomes {
    fn of(&self, name: &str, arm: Arm) -> Option<&Outcome> {
        self.0.get(&(name.to_owned(), arm))
    }
}
