//! What must hold.

use super::{
    STREAMS,
    results::{Cell, Figure, Figures},
};
use crate::{
    load::{Gaps, Pattern, Workload},
    report::Report,
    stats::MET,
    world::Arm,
};

/// What is judged.
const OWN: Arm = Arm::PricedStack;

pub(super) fn full(figures: &Figures, report: &mut Report) {
    let closed = |w, c, arm| figures.of(&Cell::closed(w, c), arm);
    let goodput = |w, arm| closed(w, 32, arm).map_or(f64::NAN, |f| f.goodput.value);
    let kept = |w, c| closed(w, c, OWN).map_or(f64::NAN, |f| f.attainment.value);

    let shared = goodput(Workload::Shared, OWN);
    report.at_least("shared, goodput at C=32, req/min", shared, 90.0);
    let exact = goodput(Workload::Shared, Arm::Exact);
    report.at_least(
        "shared, goodput at C=32 over exact greedy's",
        shared / exact,
        1.0,
    );
    for c in STREAMS {
        let what = format!("shared, share within the SLO at C={c}");
        report.at_least(&what, kept(Workload::Shared, c), MET);
    }
    let multiturn = goodput(Workload::Multiturn, OWN);
    report.at_least("multiturn, goodput at C=32, req/min", multiturn, 105.0);
    for c in [16, 24, 32] {
        let what = format!("multiturn, share within the SLO at C={c}");
        report.at_least(&what, kept(Workload::Multiturn, c), 0.95);
    }
    for (workload, goal) in [(Workload::Shared, 5.7), (Workload::Multiturn, 3.7)] {
        let peak = figures.peak(workload, OWN).map_or(f64::NAN, |p| p.value);
        let what = format!("{}, peak goodput over the Service's", workload.name());
        report.at_least(&what, peak, goal);
    }
    for gaps in Gaps::ALL {
        latency(figures, gaps, report);
    }
}

fn latency(figures: &Figures, gaps: Gaps, report: &mut Report) {
    for (workload, published) in [(Workload::Shared, 0.95), (Workload::Multiturn, 0.65)] {
        let (Some(own), Some(bound)) = (
            open(figures, workload, gaps, OWN),
            open(figures, workload, gaps, Arm::Bound),
        ) else {
            continue;
        };
        let name = format!("{}, {} arrivals", workload.name(), gaps.name());
        // What perfect knowledge and memory cannot reach, nothing can.
        let goal = f64::min(published, 1.0 - bound.ratio.value);
        let what = format!("{name}: median TTFT below the Service's by");
        report.at_least(&what, 1.0 - own.ratio.value, goal);
        let what = format!("{name}: hit share of the possible");
        report.at_least(&what, own.hit_share / bound.hit_share, 0.98);
    }
    if let Some(own) = open(figures, Workload::Control, gaps, OWN) {
        let what = format!(
            "control, {} arrivals: median over the Service's, upper limit",
            gaps.name()
        );
        report.at_most(&what, own.ratio.high, 1.05);
    }
}

fn open(figures: &Figures, workload: Workload, gaps: Gaps, arm: Arm) -> Option<&Figure> {
    let rate = workload.rate(gaps);
    let pattern = Pattern::Open { rate, gaps };
    figures.of(&Cell { workload, pattern }, arm)
}

/// For a few trials: ratios within the run, with room for chance.
pub(super) fn quick(figures: &Figures, report: &mut Report) {
    for (workload, of_exact, of_least) in [
        (Workload::Shared, 0.9, 3.0),
        (Workload::Multiturn, 0.9, 1.3),
    ] {
        let Some(own) = figures.of(&Cell::closed(workload, 32), OWN) else {
            continue;
        };
        let least = figures.of(&Cell::closed(workload, 32), Arm::LeastRequests);
        let least = least.map_or(f64::NAN, |f| f.goodput.value);
        let name = workload.name();
        let what = format!("{name}, goodput at C=32 over exact greedy's");
        report.at_least(&what, own.of_exact.value, of_exact);
        let what = format!("{name}, goodput at C=32 over least requests'");
        report.at_least(&what, own.goodput.value / least, of_least);
    }
}
