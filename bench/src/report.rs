//! What a benchmark says: a table for people, JSON for scripts.
use serde::Serialize;
use std::{fmt, process::Command};

/// The outcome of one benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The benchmark's name.
    pub name: String,
    /// The commit that was measured, with `+` if the tree differs from it.
    pub commit: String,
    /// Where.
    pub machine: Machine,
    /// Versions of what was measured and what it was built with.
    pub versions: Vec<(String, String)>,
    /// The command line.
    pub command: String,
    /// Figures.
    pub rows: Vec<Row>,
    /// Goals, and whether they were met.
    pub checks: Vec<Check>,
    /// What a reader of the figures must know.
    pub notes: Vec<String>,
    /// Tables in Markdown, for people: where there are any, they are printed instead of the figures.
    #[serde(skip)]
    pub tables: Vec<String>,
}

/// The machine that a benchmark ran on.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// The processor's name.
    pub cpu: String,
    /// Cores.
    pub cores: usize,
    /// Load average of the last minute, before the run. Over the number of cores, times mean little.
    pub load: String,
}

/// One figure of one arm.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What was measured.
    pub arm: String,
    /// What of it.
    pub metric: String,
    /// In what.
    pub unit: String,
    /// The figure.
    pub value: f64,
    /// The tenth percentile of the samples, where there are samples.
    pub low: Option<f64>,
    /// The ninetieth.
    pub high: Option<f64>,
}

/// A goal.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Of what.
    pub what: String,
    /// For people.
    pub goal: String,
    /// The figure.
    pub measured: f64,
    /// Whether it is met.
    pub holds: bool,
}

// === impl Report ===

impl Report {
    /// An empty report on this machine.
    pub fn new(name: &str) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo");
        let cpu = cpuinfo
            .lines()
            .find_map(|l| l.strip_prefix("model name"))
            .map_or("unknown", |l| l.trim_start_matches([' ', '\t', ':']));
        let load = read("/proc/loadavg");
        let dirty = match said("git", &["status", "--porcelain", "-uno"]).as_str() {
            "" => "",
            _ => "+",
        };
        Self {
            name: name.into(),
            commit: said("git", &["rev-parse", "HEAD"]) + dirty,
            machine: Machine {
                cpu: cpu.into(),
                cores: std::thread::available_parallelism().map_or(1, usize::from),
                load: load.split(' ').next().unwrap_or_default().into(),
            },
            versions: vec![
                ("forebay".into(), env!("CARGO_PKG_VERSION").into()),
                ("rustc".into(), said("rustc", &["--version"])),
            ],
            command: std::env::args().collect::<Vec<_>>().join(" "),
            rows: Vec::new(),
            checks: Vec::new(),
            notes: Vec::new(),
            tables: Vec::new(),
        }
    }

    /// Says something beside the figures.
    pub fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Checks a figure against an upper bound.
    pub fn at_most(&mut self, what: &str, measured: f64, bound: f64) {
        self.checks.push(Check {
            what: what.into(),
            goal: format!("<= {bound}"),
            measured,
            holds: measured <= bound,
        });
    }

    /// Checks a figure against a lower bound.
    pub fn at_least(&mut self, what: &str, measured: f64, bound: f64) {
        self.checks.push(Check {
            what: what.into(),
            goal: format!(">= {}", figure(bound)),
            measured,
            holds: measured >= bound,
        });
    }

    /// All of it as a document.
    pub fn markdown(&self) -> String {
        let m = &self.machine;
        let mut out = format!(
            "# {}\n\nCommit {}, {} x {}, load {}: `{}`\n\n",
            self.name, self.commit, m.cores, m.cpu, m.load, self.command
        );
        for note in &self.notes {
            out += &format!("- {note}\n");
        }
        out.push('\n');
        for table in &self.tables {
            out += table;
            out.push('\n');
        }
        if !self.checks.is_empty() {
            out += "| check | goal | measured | holds |\n|---|---|---|---|\n";
        }
        for c in &self.checks {
            let holds = if c.holds { "yes" } else { "NO" };
            out += &format!(
                "| {} | {} | {} | {holds} |\n",
                c.what,
                c.goal,
                figure(c.measured)
            );
        }
        out
    }

    /// Whether all goals are met.
    pub fn holds(&self) -> bool {
        self.checks.iter().all(|c| c.holds)
    }
}

/// What a command prints, or "unknown".
fn said(program: &str, args: &[&str]) -> String {
    match Command::new(program).args(args).output() {
        Ok(o) if o.status.success() => String::from_utf8_lossy(&o.stdout).trim().to_owned(),
        _ => "unknown".into(),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = &self.machine;
        let commit = self.commit.get(..12).unwrap_or(&self.commit);
        writeln!(
            f,
            "{} at {commit} on {} x {}, load {}",
            self.name, m.cores, m.cpu, m.load
        )?;
        let width = |of: fn(&Row) -> &str| self.rows.iter().map(|r| of(r).len()).max().unwrap_or(0);
        let (arm, metric) = (width(|r| &r.arm), width(|r| &r.metric));
        for table in &self.tables {
            writeln!(f, "\n{}", table.trim_end())?;
        }
        let rows = if self.tables.is_empty() {
            &*self.rows
        } else {
            &[]
        };
        for r in rows {
            write!(
                f,
                "  {:arm$}  {:metric$}  {:>10} {}",
                r.arm,
                r.metric,
                figure(r.value),
                r.unit
            )?;
            if let (Some(low), Some(high)) = (r.low, r.high) {
                write!(f, "  ({} to {})", figure(low), figure(high))?;
            }
            writeln!(f)?;
        }
        for c in &self.checks {
            let verdict = if c.holds { "ok  " } else { "MISS" };
            writeln!(
                f,
                "  {verdict} {}: {} ({})",
                c.what,
                figure(c.measured),
                c.goal
            )?;
        }
        for note in &self.notes {
            writeln!(f, "  note: {note}")?;
        }
        Ok(())
    }
}

/// Three digits or so.
fn figure(v: f64) -> String {
    match v.abs() {
        a if a >= 1_000.0 => format!("{v:.0}"),
        a if a >= 100.0 => format!("{v:.1}"),
        a if a >= 2.0 || a == 0.0 => format!("{v:.2}"),
        _ => format!("{v:.3}"),
    }
}

// === impl Row ===

impl Row {
    /// A single figure.
    pub fn point(arm: &str, metric: &str, unit: &str, value: f64) -> Self {
        Self {
            arm: arm.into(),
            metric: metric.into(),
            unit: unit.into(),
            value,
            low: None,
            high: None,
        }
    }

    /// The median of samples, with their tenth and ninetieth percentiles. Sorts them.
    pub fn spread(arm: &str, metric: &str, unit: &str, samples: &mut [f64]) -> Self {
        samples.sort_by(f64::total_cmp);
        Self {
            low: Some(quantile(samples, 0.1)),
            high: Some(quantile(samples, 0.9)),
            ..Self::point(arm, metric, unit, quantile(samples, 0.5))
        }
    }
}

/// A quantile of sorted samples; not a number if there are none.
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    let last = sorted.len().saturating_sub(1) as f64;
    let at = (last * q.clamp(0.0, 1.0)).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_the_median_and_its_tails() {
        let mut samples: Vec<f64> = (0..=100).rev().map(f64::from).collect();
        let row = Row::spread("a", "m", "us", &mut samples);
        assert_eq!(
            (row.value, row.low, row.high),
            (50.0, Some(10.0), Some(90.0))
        );
        assert!(quantile(&[], 0.5).is_nan());
    }

    #[test]
    fn a_missed_goal_shows() {
        let mut report = Report::new("x");
        report.at_most("memory", 24.0, 25.0);
        assert!(report.holds());
        report.at_most("time", 2.0, 1.0);
        assert!(!report.holds());
        assert!(report.to_string().contains("MISS time"));
    }
}
