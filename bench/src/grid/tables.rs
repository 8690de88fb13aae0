//! Tables for people, beside what was published.

use super::{
    STREAMS,
    results::{Cell, Figures, Results},
};
use crate::{
    load::{Gaps, Pattern, Workload},
    report::Report,
    stats::Interval,
    world::{Arm, Causes},
};
use std::fmt::Write;

/// Published latencies: Service and router, median and p95 TTFT, median E2E and ITL.
fn published(workload: Workload) -> [&'static str; 2] {
    match workload {
        Workload::Control => ["6.92 / 21.5", "6.83 / 12.3"],
        Workload::Shared => [
            "6.88 / 18.3, E2E 20.5, ITL 44",
            "0.31 / 9.2, E2E 11.3, ITL 42",
        ],
        Workload::Multiturn => [
            "1.70 / 12.8, E2E 13.4, ITL 47",
            "0.59 / 7.7, E2E 9.1, ITL 43",
        ],
    }
}

pub(super) fn latency(figures: &Figures, cells: &[Cell], report: &mut Report) {
    let mut t = String::new();
    for cell in cells {
        let Pattern::Open { gaps, .. } = cell.pattern else {
            continue;
        };
        let [service, router] = published(cell.workload);
        let kind = match gaps {
            Gaps::Tens => "runs of ten equal gaps",
            Gaps::Poisson => "true Poisson",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            t,
            "### Latency, {} ({kind})\n\nPublished median / p95: Service {service}; router {router}.\n",
            cell.name()
        );
        let _ = writeln!(
            t,
            "| arm | n | hit share | mean, s | median, s | p95, s | E2E, s | ITL, ms | median / Service | p95 / Service | within SLO |"
        );
        let _ = writeln!(t, "|---|---|---|---|---|---|---|---|---|---|---|");
        for arm in Arm::ALL {
            let Some(f) = figures.of(cell, arm) else {
                continue;
            };
            let _ = writeln!(
                t,
                "| {} | {} | {:.1} % | {} | {:.2} | {:.1} | {:.1} | {:.1} | {} | {} | {:.0} % |",
                arm.name(),
                f.requests,
                100.0 * f.hit_share,
                seconds(f.mean),
                f.median.value,
                f.p95.value,
                f.e2e,
                1000.0 * f.itl,
                range(f.ratio, 3),
                range(f.p95_ratio, 2),
                100.0 * f.attainment.value,
            );
        }
        t.push('\n');
    }
    report.tables.push(t);
}

pub(super) fn capacity(figures: &Figures, cells: &[Cell], report: &mut Report) {
    let mut t = String::new();
    for workload in [Workload::Shared, Workload::Multiturn] {
        let known = match workload {
            Workload::Shared => {
                "Service peak 14; router peak 103, SLO met at all; peak ratio 7.4; ratio 2.1 at 4, 7.5 at 24"
            }
            _ => {
                "Service peak 23.8; router peak 82.7, SLO met to 8, 87 % at 16, 89 % at 24; peak ratio 3.5; ratio 1.5 at 4, 6.4 at 24"
            }
        };
        let shown: Vec<Cell> = STREAMS
            .iter()
            .map(|c| Cell::closed(workload, *c))
            .filter(|c| cells.contains(c))
            .collect();
        let _ = writeln!(
            t,
            "### Capacity, {}: goodput in req/min (within {} s) [95 % interval], hit share\n\nPublished: {known}.\n",
            workload.name(),
            workload.slo()
        );
        let names: Vec<String> = shown
            .iter()
            .map(|c| match c.pattern {
                Pattern::Closed { streams } => format!("C={streams}"),
                Pattern::Open { .. } => String::new(),
            })
            .collect();
        let _ = writeln!(t, "| arm | {} | peak / Service |", names.join(" | "));
        let _ = writeln!(t, "|---|{}---|", "---|".repeat(shown.len()));
        for arm in Arm::ALL {
            let _ = write!(t, "| {} |", arm.name());
            for cell in &shown {
                let Some(f) = figures.of(cell, arm) else {
                    continue;
                };
                let g = f.goodput;
                let _ = write!(
                    t,
                    " {:.1} ({:.0} %) [{:.1}, {:.1}] {:.0} % |",
                    g.value,
                    100.0 * f.attainment.value,
                    g.low,
                    g.high,
                    100.0 * f.hit_share,
                );
            }
            let peak = figures.peak(workload, arm);
            let _ = writeln!(t, " {} |", peak.map_or(String::new(), |p| range(p, 2)));
        }
        t.push('\n');
    }
    report.tables.push(t);
}

/// Where tokens were computed though they had been before.
pub(super) fn causes(results: &Results, cells: &[Cell], report: &mut Report) {
    let mut t = String::new();
    let _ = writeln!(
        t,
        "### Prompt tokens that were computed, by cause, percent of all\n\ncold: never computed before; evicted: held by nobody any more; elsewhere: held by another pod; lost: evicted between choice and admission; joined: found although still being computed when chosen.\n"
    );
    let _ = writeln!(
        t,
        "| cell | arm | cold | evicted | elsewhere | lost | joined |"
    );
    let _ = writeln!(t, "|---|---|---|---|---|---|---|");
    for cell in cells {
        for arm in [
            Arm::LeastRequests,
            Arm::Static,
            Arm::Ttft,
            Arm::LMetric,
            Arm::Priced,
            Arm::Exact,
            Arm::Bound,
        ] {
            let mut sum = Causes::default();
            for s in results.of(cell, arm) {
                sum += s.causes;
            }
            let share = |n: u64| 100.0 * n as f64 / sum.tokens as f64;
            let _ = writeln!(
                t,
                "| {} | {} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} |",
                cell.name(),
                arm.name(),
                share(sum.cold),
                share(sum.evicted),
                share(sum.elsewhere),
                share(sum.lost),
                share(sum.joined),
            );
        }
    }
    report.tables.push(t);
}

fn range(i: Interval, digits: usize) -> String {
    format!(
        "{:.digits$} [{:.digits$}, {:.digits$}]",
        i.value, i.low, i.high
    )
}

fn seconds(s: f64) -> String {
    if s.is_finite() {
        format!("{s:.2}")
    } else {
        "never".into()
    }
}
