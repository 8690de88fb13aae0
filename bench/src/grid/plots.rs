//! The plots of the grid.

use super::{
    STREAMS,
    results::{Cell, Figures, Results, STEP},
};
use crate::{
    Error,
    load::{Pattern, Workload},
    plot::{Line, Plot},
    stats,
    world::Arm,
};
use std::path::Path;

pub(super) fn write(
    results: &Results,
    figures: &Figures,
    cells: &[Cell],
    out: &Path,
) -> Result<(), Error> {
    for cell in cells {
        let file = |kind: &str| {
            let name = cell.name().replace(['/', '=', ' '], "-");
            out.join(format!("{kind}-{name}.svg"))
        };
        let series = |arm: Arm| {
            let all = stats::pooled(&results.trials_of(cell, arm));
            (arm.name().to_owned(), all)
        };
        let plot = Plot::distribution(
            &format!("Time to first token, {}", cell.name()),
            Arm::ALL.into_iter().map(series).collect(),
        );
        std::fs::write(file("ttft"), plot.svg())?;
        if matches!(cell.pattern, Pattern::Closed { streams: 16 | 32 }) {
            let plot = hits(results, cell);
            std::fs::write(file("hits"), plot.svg())?;
        }
    }
    for workload in [Workload::Shared, Workload::Multiturn] {
        let plot = goodput(figures, workload);
        let name = format!("goodput-{}.svg", workload.name());
        std::fs::write(out.join(name), plot.svg())?;
    }
    Ok(())
}

fn goodput(figures: &Figures, workload: Workload) -> Plot {
    let line = |arm: Arm| Line {
        name: arm.name().into(),
        points: STREAMS
            .iter()
            .filter_map(|c| {
                let f = figures.of(&Cell::closed(workload, *c), arm)?;
                Some((f64::from(*c), f.goodput.value))
            })
            .collect(),
        steps: false,
    };
    Plot {
        title: format!("Goodput within {} s, {}", workload.slo(), workload.name()),
        x: "streams".into(),
        y: "requests per minute".into(),
        log_x: false,
        y_max: None,
        lines: Arm::ALL.into_iter().map(line).collect(),
    }
}

fn hits(results: &Results, cell: &Cell) -> Plot {
    let line = |arm: Arm| {
        let mut sum: Vec<(u64, u64)> = Vec::new();
        for s in results.of(cell, arm) {
            sum.resize(s.over_time.len(), (0, 0));
            for (sum, step) in sum.iter_mut().zip(&s.over_time) {
                sum.0 += step.0;
                sum.1 += step.1;
            }
        }
        let point = |(i, (cached, tokens)): (usize, &(u64, u64))| {
            ((i as f64 + 0.5) * STEP, *cached as f64 / *tokens as f64)
        };
        Line {
            name: arm.name().into(),
            points: sum.iter().enumerate().map(point).collect(),
            steps: false,
        }
    };
    Plot {
        title: format!("Share of prompt tokens from the cache, {}", cell.name()),
        x: "seconds from the start, by when requests were sent".into(),
        y: "share".into(),
        log_x: false,
        y_max: Some(1.0),
        lines: Arm::ALL.into_iter().map(line).collect(),
    }
}
