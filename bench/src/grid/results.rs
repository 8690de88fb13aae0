//! What runs gave, and the figures that are made of it.

use super::RESAMPLES;
use crate::{
    Error, crew,
    load::{Pattern, Workload},
    report::{Report, Row},
    stats::{self, Interval, Trial, bootstrap, quantile_of},
    world::{Arm, Causes, Run},
};
use rand::{SeedableRng, rngs::StdRng};
use std::collections::BTreeMap;

/// A workload under a pattern of arrivals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cell {
    pub(super) workload: Workload,
    pub(super) pattern: Pattern,
}

/// Seconds per step of the share of hits over time.
pub(super) const STEP: f64 = 15.0;

/// What is kept of a run.
#[derive(Clone, Debug)]
pub(super) struct Summary {
    pub(super) trial: Trial,
    /// Cached and all prompt tokens.
    pub(super) hits: (u64, u64),
    pub(super) causes: Causes,
    /// Of complete requests: seconds in all, and between tokens.
    pub(super) e2e: Vec<f64>,
    pub(super) itl: Vec<f64>,
    /// Cached and all prompt tokens of the requests sent in each step of time, over the whole run.
    pub(super) over_time: Vec<(u64, u64)>,
}

/// All runs by cell and arm, in the order of trials.
#[derive(Debug)]
pub(super) struct Results {
    pub(super) trials: usize,
    all: BTreeMap<(String, Arm), Vec<Summary>>,
}

/// The figures of one cell and arm.
#[derive(Clone, Debug)]
pub(super) struct Figure {
    pub(super) requests: usize,
    pub(super) hit_share: f64,
    pub(super) mean: f64,
    pub(super) median: Interval,
    pub(super) p95: Interval,
    /// Medians, this arm's over the Service's.
    pub(super) ratio: Interval,
    pub(super) p95_ratio: Interval,
    pub(super) attainment: Interval,
    pub(super) goodput: Interval,
    /// Goodput over the exact arm's and the bound's.
    pub(super) of_exact: Interval,
    pub(super) of_bound: Interval,
    pub(super) e2e: f64,
    pub(super) itl: f64,
}

/// All figures.
#[derive(Debug)]
pub(super) struct Figures {
    by_cell: BTreeMap<(String, Arm), Figure>,
    /// The best goodput of an arm over the best of the Service, per workload.
    peaks: BTreeMap<(&'static str, Arm), Interval>,
    cells: Vec<Cell>,
}

// === impl Cell ===

impl Cell {
    pub(super) fn name(&self) -> String {
        match self.pattern {
            Pattern::Open { rate, gaps } => {
                format!("{} {} {rate}/s", self.workload.name(), gaps.name())
            }
            Pattern::Closed { streams } => format!("{} C={streams}", self.workload.name()),
        }
    }

    pub(super) fn closed(workload: Workload, streams: u32) -> Self {
        Self {
            workload,
            pattern: Pattern::Closed { streams },
        }
    }
}

// === impl Summary ===

impl Summary {
    pub(super) fn of(run: &Run, workload: Workload) -> Self {
        let steps = (run.windows.end() / STEP).ceil() as usize;
        let mut over_time = vec![(0, 0); steps];
        for r in &run.records {
            let step = over_time.get_mut((r.at / STEP) as usize);
            if let (Some(step), Some(cached)) = (step, r.cached) {
                step.0 += u64::from(cached);
                step.1 += u64::from(r.tokens);
            }
        }
        let whole = run.measured().filter_map(|r| Some((r, r.ttft?, r.end?)));
        let between = f64::from(workload.output() - 1);
        Self {
            trial: run.trial(),
            hits: run.hits(),
            causes: run.causes(),
            e2e: whole.clone().map(|(r, _, end)| end - r.at).collect(),
            itl: whole
                .map(|(r, ttft, end)| (end - r.at - ttft) / between)
                .collect(),
            over_time,
        }
    }
}

// === impl Results ===

impl Results {
    pub(super) fn new(trials: usize) -> Self {
        Self {
            trials,
            all: BTreeMap::new(),
        }
    }

    pub(super) fn add(&mut self, cell: Cell, arm: Arm, summary: Summary) {
        self.all
            .entry((cell.name(), arm))
            .or_default()
            .push(summary);
    }

    pub(super) fn of(&self, cell: &Cell, arm: Arm) -> &[Summary] {
        self.all.get(&(cell.name(), arm)).map_or(&[], Vec::as_slice)
    }

    pub(super) fn trials_of(&self, cell: &Cell, arm: Arm) -> Vec<Trial> {
        self.of(cell, arm).iter().map(|s| s.trial.clone()).collect()
    }

    /// Makes the figures, on so many threads.
    pub(super) fn figures(&self, cells: &[Cell], threads: usize) -> Result<Figures, Error> {
        let mut jobs = Vec::new();
        for cell in cells {
            for arm in Arm::ALL {
                jobs.push((*cell, arm));
            }
        }
        let made = crew::all(&jobs, threads, |(cell, arm)| self.figure(cell, *arm))?;
        let names = jobs.iter().map(|(cell, arm)| (cell.name(), *arm));
        let by_cell = names.zip(made).collect();

        let mut jobs = Vec::new();
        for workload in [Workload::Shared, Workload::Multiturn] {
            for arm in Arm::ALL {
                jobs.push((workload, arm));
            }
        }
        let made = crew::all(&jobs, threads, |(w, arm)| self.peak(cells, *w, *arm))?;
        let names = jobs.iter().map(|(w, arm)| (w.name(), *arm));
        Ok(Figures {
            by_cell,
            peaks: names.zip(made).collect(),
            cells: cells.to_vec(),
        })
    }

    fn figure(&self, cell: &Cell, arm: Arm) -> Figure {
        let own = self.trials_of(cell, arm);
        let service = self.trials_of(cell, Arm::Service);
        let slo = cell.workload.slo();
        let pooled = stats::pooled(&own);
        let summaries = self.of(cell, arm);
        let (hit, tokens) = summaries
            .iter()
            .fold((0, 0), |(c, n), s| (c + s.hits.0, n + s.hits.1));
        let median_of = |of: fn(&Summary) -> &Vec<f64>| {
            let mut all: Vec<f64> = summaries.iter().flat_map(|s| of(s).clone()).collect();
            quantile_of(&mut all, 0.5)
        };
        let single = |f: &dyn Fn(&mut Vec<f64>, f64) -> f64| {
            let mut values = Vec::new();
            bootstrap(own.len(), RESAMPLES, &mut rng(), |draw, rng| {
                draw.pool(&own, rng, &mut values);
                f(&mut values, draw.seconds(&own))
            })
        };
        let over = |other: &[Trial], f: &dyn Fn(&mut Vec<f64>, f64) -> f64| {
            let (mut a, mut b) = (Vec::new(), Vec::new());
            bootstrap(own.len(), RESAMPLES, &mut rng(), |draw, rng| {
                draw.pool(&own, rng, &mut a);
                draw.pool(other, rng, &mut b);
                f(&mut a, draw.seconds(&own)) / f(&mut b, draw.seconds(other))
            })
        };
        let goodput = |v: &mut Vec<f64>, s: f64| stats::goodput(v, slo, s);
        Figure {
            requests: pooled.len(),
            hit_share: hit as f64 / tokens as f64,
            mean: stats::mean(&pooled),
            median: single(&|v, _| quantile_of(v, 0.5)),
            p95: single(&|v, _| quantile_of(v, 0.95)),
            ratio: over(&service, &|v, _| quantile_of(v, 0.5)),
            p95_ratio: over(&service, &|v, _| quantile_of(v, 0.95)),
            attainment: single(&|v, _| stats::attainment(v, slo)),
            goodput: single(&goodput),
            of_exact: over(&self.trials_of(cell, Arm::Exact), &goodput),
            of_bound: over(&self.trials_of(cell, Arm::Bound), &goodput),
            e2e: median_of(|s| &s.e2e),
            itl: median_of(|s| &s.itl),
        }
    }

    fn peak(&self, cells: &[Cell], workload: Workload, arm: Arm) -> Interval {
        let closed =
            |c: &&Cell| c.workload == workload && matches!(c.pattern, Pattern::Closed { .. });
        let trials = |arm| -> Vec<Vec<Trial>> {
            let cells = cells.iter().filter(closed);
            cells.map(|c| self.trials_of(c, arm)).collect()
        };
        let (own, service) = (trials(arm), trials(Arm::Service));
        let slo = workload.slo();
        let mut values = Vec::new();
        bootstrap(self.trials, RESAMPLES, &mut rng(), |draw, rng| {
            let mut best = |cells: &[Vec<Trial>]| {
                let goodputs = cells.iter().map(|trials| {
                    draw.pool(trials, rng, &mut values);
                    stats::goodput(&values, slo, draw.seconds(trials))
                });
                goodputs.fold(0.0, f64::max)
            };
            best(&own) / best(&service)
        })
    }
}

/// The same draws for every figure.
fn rng() -> StdRng {
    StdRng::seed_from_u64(20_261_201)
}

// === impl Figures ===

impl Figures {
    pub(super) fn of(&self, cell: &Cell, arm: Arm) -> Option<&Figure> {
        self.by_cell.get(&(cell.name(), arm))
    }

    pub(super) fn peak(&self, workload: Workload, arm: Arm) -> Option<Interval> {
        self.peaks.get(&(workload.name(), arm)).copied()
    }

    /// Everything, for scripts.
    pub(super) fn rows(&self, report: &mut Report) {
        for cell in &self.cells {
            for arm in Arm::ALL {
                let Some(f) = self.of(cell, arm) else {
                    continue;
                };
                let name = cell.name();
                let mut row = |metric: &str, unit: &str, value: Interval| {
                    report.rows.push(Row {
                        arm: arm.name().into(),
                        metric: format!("{name}: {metric}"),
                        unit: unit.into(),
                        value: value.value,
                        low: Some(value.low),
                        high: Some(value.high),
                    });
                };
                row("TTFT median", "s", f.median);
                row("TTFT p95", "s", f.p95);
                row("median over the Service's", "ratio", f.ratio);
                row("attainment", "share", f.attainment);
                row("goodput", "req/min", f.goodput);
                row("goodput over exact greedy's", "ratio", f.of_exact);
                row("goodput over the bound's", "ratio", f.of_bound);
                for (metric, unit, value) in [
                    ("TTFT mean", "s", f.mean),
                    ("hit share", "share", f.hit_share),
                    ("E2E median", "s", f.e2e),
                    ("ITL median", "ms", 1000.0 * f.itl),
                    ("requests", "n", f.requests as f64),
                ] {
                    let metric = format!("{name}: {metric}");
                    report
                        .rows
                        .push(Row::point(arm.name(), &metric, unit, value));
                }
            }
        }
        for ((workload, arm), peak) in &self.peaks {
            report.rows.push(Row {
                arm: arm.name().into(),
                metric: format!("{workload}: peak goodput over the Service's"),
                unit: "ratio".into(),
                value: peak.value,
                low: Some(peak.low),
                high: Some(peak.high),
            });
        }
    }
}
