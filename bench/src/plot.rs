//! Line plots as SVG files.

use std::fmt::Write;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 52.0;

/// Colours that can be told apart by most people (Okabe and Ito), then again with dashes.
const COLOURS: [&str; 8] = [
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#B59F00", "#0072B2", "#D55E00", "#CC79A7",
];

/// A plot of lines over common axes.
#[derive(Clone, Debug)]
pub struct Plot {
    /// What it shows.
    pub title: String,
    /// The name of the horizontal axis, with its unit.
    pub x: String,
    /// Of the vertical one.
    pub y: String,
    /// Whether the horizontal axis is logarithmic; values of 0 or less are then left out.
    pub log_x: bool,
    /// The top of the vertical axis, if not what the values ask for.
    pub y_max: Option<f64>,
    /// The lines.
    pub lines: Vec<Line>,
}

/// One line.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// Its points, from left to right; what is not finite is left out.
    pub points: Vec<(f64, f64)>,
    /// It goes level up to the next point, as a distribution does.
    pub steps: bool,
}

/// Where values are on the paper.
struct Scale {
    from: f64,
    to: f64,
    log: bool,
    /// On the paper.
    start: f64,
    end: f64,
}

// === impl Plot ===

impl Plot {
    /// A distribution function of each series, over a logarithmic axis of seconds.
    pub fn distribution(title: &str, series: Vec<(String, Vec<f64>)>) -> Self {
        let line = |(name, mut values): (String, Vec<f64>)| {
            values.sort_unstable_by(f64::total_cmp);
            let n = values.len().max(1) as f64;
            // Equal to the eye, and files stay small.
            let every = values.len().div_ceil(400).max(1);
            let mut points: Vec<(f64, f64)> = Vec::new();
            for (i, v) in values.iter().enumerate() {
                if i % every == 0 || i + 1 == values.len() {
                    points.push((*v, (i + 1) as f64 / n));
                }
            }
            Line {
                name,
                points,
                steps: true,
            }
        };
        Self {
            title: title.into(),
            x: "time to first token, s".into(),
            y: "share of requests".into(),
            log_x: true,
            y_max: Some(1.0),
            lines: series.into_iter().map(line).collect(),
        }
    }

    /// The document.
    pub fn svg(&self) -> String {
        let points = || {
            let all = self.lines.iter().flat_map(|l| l.points.iter());
            all.filter(|p| self.shows(p))
        };
        let span = |of: fn(&(f64, f64)) -> f64| {
            points()
                .map(of)
                .fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| {
                    (a.min(v), b.max(v))
                })
        };
        let (x0, x1) = span(|p| p.0);
        let (_, y1) = span(|p| p.1);
        let x = Scale::new(
            if self.log_x { x0 } else { x0.min(0.0) },
            x1,
            self.log_x,
            LEFT,
            WIDTH - RIGHT,
        );
        let top = self.y_max.unwrap_or(y1 * 1.05);
        let y = Scale::new(0.0, top, false, HEIGHT - BOTTOM, TOP);

        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut out, &x, &y);
        out
    }

    fn write(&self, out: &mut String, x: &Scale, y: &Scale) -> std::fmt::Result {
        writeln!(
            out,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">"#
        )?;
        writeln!(
            out,
            r##"<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>"##
        )?;
        text(out, LEFT, 22.0, "start", &self.title)?;
        let bottom = HEIGHT - BOTTOM;
        for t in x.ticks() {
            let at = x.at(t);
            writeln!(
                out,
                r##"<line x1="{at:.1}" y1="{TOP}" x2="{at:.1}" y2="{bottom}" stroke="#dddddd"/>"##
            )?;
            text(out, at, bottom + 18.0, "middle", &number(t))?;
        }
        for t in y.ticks() {
            let at = y.at(t);
            let right = WIDTH - RIGHT;
            writeln!(
                out,
                r##"<line x1="{LEFT}" y1="{at:.1}" x2="{right}" y2="{at:.1}" stroke="#dddddd"/>"##
            )?;
            text(out, LEFT - 6.0, at + 4.0, "end", &number(t))?;
        }
        text(
            out,
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 12.0,
            "middle",
            &self.x,
        )?;
        let middle = (TOP + bottom) / 2.0;
        writeln!(
            out,
            r#"<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{}</text>"#,
            escaped(&self.y)
        )?;
        for (i, line) in self.lines.iter().enumerate() {
            let colour = COLOURS.get(i % COLOURS.len()).copied().unwrap_or("#000000");
            let dash = if i < COLOURS.len() {
                ""
            } else {
                r#" stroke-dasharray="6 3""#
            };
            let mut path = String::new();
            let mut before: Option<f64> = None;
            for p in line.points.iter().filter(|p| self.shows(p)) {
                let (px, py) = (x.at(p.0), y.at(p.1));
                match before {
                    None if line.steps => write!(path, "M{px:.1} {bottom}V{py:.1}")?,
                    None => write!(path, "M{px:.1} {py:.1}")?,
                    Some(_) if line.steps => write!(path, "H{px:.1}V{py:.1}")?,
                    Some(_) => write!(path, "L{px:.1} {py:.1}")?,
                }
                before = Some(py);
            }
            writeln!(
                out,
                r#"<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>"#
            )?;
            let (lx, ly) = (WIDTH - RIGHT + 14.0, TOP + 8.0 + 18.0 * i as f64);
            let end = lx + 22.0;
            writeln!(
                out,
                r#"<line x1="{lx}" y1="{ly}" x2="{end}" y2="{ly}" stroke="{colour}" stroke-width="2"{dash}/>"#
            )?;
            text(out, end + 6.0, ly + 4.0, "start", &line.name)?;
        }
        writeln!(out, "</svg>")
    }

    fn shows(&self, (x, y): &(f64, f64)) -> bool {
        x.is_finite() && y.is_finite() && (!self.log_x || *x > 0.0)
    }
}

// === impl Scale ===

impl Scale {
    fn new(from: f64, to: f64, log: bool, start: f64, end: f64) -> Self {
        let (from, to) = match (from, to) {
            (a, b) if a.is_finite() && b.is_finite() && a < b => (a, b),
            // One value, or none: something to put it on.
            (a, _) if a.is_finite() && log => (a / 2.0, a * 2.0),
            (a, _) if a.is_finite() => (a, a + 1.0),
            _ if log => (0.1, 10.0),
            _ => (0.0, 1.0),
        };
        Self {
            from,
            to,
            log,
            start,
            end,
        }
    }

    fn at(&self, v: f64) -> f64 {
        let share = if self.log {
            (v / self.from).ln() / (self.to / self.from).ln()
        } else {
            (v - self.from) / (self.to - self.from)
        };
        self.start + share.clamp(0.0, 1.0) * (self.end - self.start)
    }

    /// Round numbers within the scale.
    fn ticks(&self) -> Vec<f64> {
        let mut ticks = Vec::new();
        if self.log {
            let (low, high) = (
                self.from.log10().floor() as i32,
                self.to.log10().ceil() as i32,
            );
            for power in low..=high {
                for digit in [1.0, 2.0, 5.0] {
                    ticks.push(digit * 10f64.powi(power));
                }
            }
        } else {
            let rough = (self.to - self.from) / 6.0;
            let power = 10f64.powf(rough.log10().floor());
            let step = [1.0, 2.0, 5.0, 10.0]
                .into_iter()
                .map(|d| d * power)
                .find(|s| *s >= rough)
                .unwrap_or(rough);
            let first = (self.from / step).ceil();
            ticks.extend((0..20).map(|i| (first + f64::from(i)) * step));
        }
        let slack = 1e-9 * self.to.abs();
        ticks.retain(|t| (self.from - slack..=self.to + slack).contains(t));
        ticks
    }
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, text: &str) -> std::fmt::Result {
    writeln!(
        out,
        r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{}</text>"#,
        escaped(text)
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

fn number(v: f64) -> String {
    let rounded = (v * 1e6).round() / 1e6;
    format!("{rounded}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_map_ends_to_ends_and_have_round_ticks() {
        let s = Scale::new(0.0, 97.0, false, 100.0, 500.0);
        assert_eq!((s.at(0.0), s.at(97.0), s.at(1e9)), (100.0, 500.0, 500.0));
        assert_eq!(s.ticks(), [0.0, 20.0, 40.0, 60.0, 80.0]);
        let s = Scale::new(0.3, 30.0, true, 0.0, 100.0);
        assert!((s.at(3.0) - 50.0).abs() < 1e-9);
        assert_eq!(s.ticks(), [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]);
    }

    #[test]
    fn a_distribution_ends_at_one_and_leaves_out_what_never_came() {
        let values = vec![2.0, 1.0, f64::INFINITY, 4.0];
        let plot = Plot::distribution("a < b & c", vec![("arm".into(), values)]);
        assert_eq!(plot.lines[0].points[0], (1.0, 0.25));
        assert_eq!(plot.lines[0].points[2], (4.0, 0.75));
        let svg = plot.svg();
        assert!(svg.contains("a &lt; b &amp; c"));
        assert!(!svg.contains("inf") && !svg.contains("NaN"));
        assert_eq!(svg.matches("<path").count(), 1);
    }

    #[test]
    fn nothing_to_plot_is_an_empty_plot() {
        let svg = Plot::distribution("none", vec![("arm".into(), Vec::new())]).svg();
        assert!(svg.contains("<path d=\"\"") && !svg.contains("NaN"));
    }
}
