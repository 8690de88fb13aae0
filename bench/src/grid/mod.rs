//! `grid`: the published experiment in virtual time, with every way of routing.
//!
//! Per trial and arm: three workloads in an open loop (latency), with the published tool's bursts and with true Poisson
//! arrivals, and two in closed loops of 4 to 32 streams (capacity). All arms of a trial get the same prompts at the same times.

mod checks;
mod plots;
mod results;
mod tables;

use crate::{
    Error, crew,
    load::{Gaps, Pattern, Workload},
    report::Report,
    world::{Arm, World},
};
use forebay_sim::PodSpec;
use results::{Cell, Results, Summary};
use std::{path::PathBuf, sync::Arc};

/// Streams of the capacity runs.
pub const STREAMS: [u32; 5] = [4, 8, 16, 24, 32];

/// Resamples of each interval.
const RESAMPLES: usize = 2_000;

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Trials.
    pub seeds: usize,
    /// Fewer cells, and checks that hold for few trials.
    pub quick: bool,
    /// Where plots and tables go.
    pub out: Option<PathBuf>,
    /// Runs at once.
    pub threads: usize,
}

/// Runs the experiment.
pub fn run(options: &Options, report: &mut Report) -> Result<(), Error> {
    let spec = Arc::new(PodSpec::kind("l40s")?);
    let cells = cells(options.quick);
    let mut jobs = Vec::new();
    for trial in 0..options.seeds {
        for (c, cell) in cells.iter().enumerate() {
            for arm in Arm::ALL {
                jobs.push((*cell, arm, seed(trial, c)));
            }
        }
    }
    // The longest first, so that no thread is left alone at the end.
    let summaries = crew::all(&jobs, options.threads, |(cell, arm, seed)| {
        let run = World::published(&spec, cell.workload, cell.pattern, *arm, *seed).run()?;
        Ok(Summary::of(&run, cell.workload))
    })?;
    let summaries: Vec<Summary> = summaries.into_iter().collect::<Result<_, Error>>()?;
    let mut results = Results::new(options.seeds);
    for ((cell, arm, _), summary) in jobs.into_iter().zip(summaries) {
        results.add(cell, arm, summary);
    }
    let figures = results.figures(&cells, options.threads)?;
    report.note(format!(
        "{} trials; {} runs in virtual time; 3 simulated L40S of {} KV tokens in blocks of {}; ranges are 95 % intervals of a paired hierarchical bootstrap with {RESAMPLES} resamples",
        options.seeds,
        cells.len() * Arm::ALL.len() * options.seeds,
        spec.kv_tokens(),
        spec.block_size,
    ));
    report.note(
        "Ttft, LMetric and PricedTtft are the shipped choice (tower_ttft::pool::Pool::pick with its tickets, events after 20 ms, reports each second), asked directly; whole path: over HTTP in memory through the proxy's stack from peek to settle, with timers of 1 ms".into(),
    );
    report.note(
        "the published figures come from real pods; the simulated ones were fitted to some of them, so agreement is consistency and no confirmation".into(),
    );
    figures.rows(report);
    tables::latency(&figures, &cells, report);
    tables::capacity(&figures, &cells, report);
    tables::causes(&results, &cells, report);
    if options.quick {
        checks::quick(&figures, report);
    } else {
        checks::full(&figures, report);
    }
    if let Some(out) = &options.out {
        std::fs::create_dir_all(out)?;
        plots::write(&results, &figures, &cells, out)?;
        std::fs::write(out.join("grid.md"), report.markdown())?;
    }
    Ok(())
}

/// The cells of the experiment.
fn cells(quick: bool) -> Vec<Cell> {
    let mut cells = Vec::new();
    for workload in [Workload::Shared, Workload::Multiturn] {
        for streams in STREAMS.into_iter().rev() {
            let pattern = Pattern::Closed { streams };
            if !quick || streams == 16 || streams == 32 {
                cells.push(Cell { workload, pattern });
            }
        }
    }
    for gaps in Gaps::ALL {
        for workload in Workload::ALL {
            let rate = workload.rate(gaps);
            let pattern = Pattern::Open { rate, gaps };
            cells.push(Cell { workload, pattern });
        }
    }
    cells
}

/// One seed per trial and cell, the same for all arms.
fn seed(trial: usize, cell: usize) -> u64 {
    5_000 + 1_000 * trial as u64 + 17 * cell as u64
}
