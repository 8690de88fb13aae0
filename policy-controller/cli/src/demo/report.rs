//! What the demo found: one document, as JSON or as tables.

use super::{
    board::{Arm, Board},
    explain::{Explained, seconds},
    figures::{Figures, finite},
    play::Play,
};
use crate::term::{Line, Table, Tone, wrap};
use forebay_sim::load::Workload;
use serde::Serialize;
use std::collections::BTreeMap;

/// Everything.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    /// The version of this command.
    pub(super) version: &'static str,
    /// What was asked for.
    pub(super) seed: u64,
    /// Pod seconds in a second. All other times are pod seconds.
    pub(super) speed: u32,
    /// Seconds of load.
    pub(super) seconds: u32,
    /// The kind of pod.
    pub(super) pod: &'static str,
    /// The workloads in order.
    pub(super) workloads: Vec<Outcome>,
    /// One decision.
    pub(super) decision: Option<Explained>,
    /// Where the gateway serves, if it goes on.
    pub(super) serving: Option<Serving>,
}

/// What came of one workload.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Outcome {
    /// Its name.
    pub(super) workload: &'static str,
    /// Requests per second.
    pub(super) rate: f64,
    /// Seconds from the first to the last.
    pub(super) duration: f64,
    /// Of these, seconds in which what is sent is measured.
    pub(super) measured: f64,
    /// The TTFT that counts as good.
    pub(super) slo: f64,
    /// The gateway.
    pub(super) forebay: Figures,
    /// Random choice.
    pub(super) random: Figures,
    /// The gateway's figures over those of random choice.
    pub(super) ratio: Ratio,
    /// Decisions by how good their knowledge was.
    pub(super) rungs: BTreeMap<&'static str, usize>,
    /// Why requests failed, the first reason of each arm.
    pub(super) first_errors: BTreeMap<&'static str, String>,
}

/// One arm's figures over the other's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Ratio {
    #[serde(serialize_with = "finite")]
    pub(super) ttft_median: f64,
    #[serde(serialize_with = "finite")]
    pub(super) ttft_p95: f64,
    #[serde(serialize_with = "finite")]
    pub(super) ttft_mean: f64,
    #[serde(serialize_with = "finite")]
    pub(super) hit_share: f64,
    #[serde(serialize_with = "finite")]
    pub(super) goodput_per_minute: f64,
}

/// A gateway that serves.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Serving {
    /// What clients call their base URL.
    pub(super) base_url: String,
    /// The model's name.
    pub(super) model: &'static str,
    /// The gateway's admin pages.
    pub(super) admin: String,
}

// === impl Outcome ===

impl Outcome {
    /// Of a run.
    pub(super) fn of(play: &Play, board: &Board, rungs: BTreeMap<&'static str, usize>) -> Self {
        let slo = play.workload.slo();
        let figures = |arm| Figures::of(&board.samples(arm), play.windows, slo);
        let (forebay, random) = (figures(Arm::Forebay), figures(Arm::Service));
        let first_error = |arm: Arm| {
            let samples = board.samples(arm);
            let why = samples.into_iter().find_map(|s| s.failed)?;
            Some((arm.name(), why))
        };
        Self {
            workload: play.workload.name(),
            rate: play.rate(),
            duration: play.windows.end(),
            measured: play.windows.measure,
            slo,
            ratio: Ratio::of(&forebay, &random),
            forebay,
            random,
            rungs,
            first_errors: Arm::ALL.into_iter().filter_map(first_error).collect(),
        }
    }

    fn lines(&self, width: usize) -> Vec<Line> {
        let title = format!(
            "{}: {}, {} requests/s for {:.0} s; good: first token within {} s",
            self.workload,
            about(self.workload),
            self.rate,
            self.duration,
            self.slo
        );
        let mut lines: Vec<Line> = wrap(&title, width)
            .into_iter()
            .map(|l| Line::new(Tone::Strong, l))
            .collect();
        lines.extend(self.table().fitting(width).lines());
        let unanswered = self.forebay.unanswered + self.random.unanswered;
        if unanswered > 0 {
            let note = format!(
                "Without a first token when the run ended: forebay {}, random {}; they count as never answered.",
                self.forebay.unanswered, self.random.unanswered
            );
            lines.extend(wrap(&note, width).into_iter().map(Line::from));
        }
        for (arm, why) in &self.first_errors {
            let note = format!("The first error of {arm}: {why}");
            lines.extend(wrap(&note, width).into_iter().map(Line::from));
        }
        lines
    }

    fn table(&self) -> Table {
        let arm = |name: &str, f: &Figures| {
            [
                name.to_owned(),
                f.requests.to_string(),
                seconds(f.ttft_median),
                seconds(f.ttft_p95),
                seconds(f.ttft_mean),
                percent(f.hit_share),
                number(f.goodput_per_minute),
                f.errors.to_string(),
            ]
        };
        let r = &self.ratio;
        Table::new([
            "",
            "requests",
            "TTFT median",
            "p95",
            "mean",
            "hit share",
            "good/min",
            "errors",
        ])
        .row(arm(Arm::Forebay.name(), &self.forebay))
        .row(arm(Arm::Service.name(), &self.random))
        .row([
            "ratio".to_owned(),
            String::new(),
            number(r.ttft_median),
            number(r.ttft_p95),
            number(r.ttft_mean),
            number(r.hit_share),
            number(r.goodput_per_minute),
            String::new(),
        ])
    }
}

/// A workload in a few words.
pub(super) fn about(workload: &str) -> &'static str {
    match Workload::ALL.into_iter().find(|w| w.name() == workload) {
        Some(Workload::Shared) => "one of 24 prefixes of 16,000 tokens, then 256 of its own",
        Some(Workload::Multiturn) => "conversations of 8 turns, from 8,000 to 12,000 tokens",
        _ => "16,256 tokens of its own",
    }
}

// === impl Ratio ===

impl Ratio {
    fn of(ours: &Figures, theirs: &Figures) -> Self {
        // What never came has no ratio to what did.
        let ratio = |of: fn(&Figures) -> f64| match (of(ours), of(theirs)) {
            (a, b) if a.is_finite() && b.is_finite() => a / b,
            _ => f64::NAN,
        };
        Self {
            ttft_median: ratio(|f| f.ttft_median),
            ttft_p95: ratio(|f| f.ttft_p95),
            ttft_mean: ratio(|f| f.ttft_mean),
            hit_share: ratio(|f| f.hit_share),
            goodput_per_minute: ratio(|f| f.goodput_per_minute),
        }
    }
}

// === impl Report ===

impl Report {
    /// For people.
    pub(super) fn lines(&self, width: usize) -> Vec<Line> {
        let mut lines = Vec::new();
        for outcome in &self.workloads {
            lines.extend(outcome.lines(width));
            lines.push(Line::default());
        }
        if let Some(decision) = &self.decision {
            lines.extend(decision.lines(width));
            lines.push(Line::default());
        }
        if !self.workloads.is_empty() {
            let note = format!(
                "3 simulated {} pods behind forebay, 3 behind random choice, real sockets; seed {}. The pods work {} times faster \
                 than real ones and requests come as much faster; all times are scaled back, and with them what the gateway and \
                 this machine really take, so {} times that is in them.",
                self.pod.to_uppercase(),
                self.seed,
                self.speed,
                self.speed,
            );
            lines.extend(
                wrap(&note, width)
                    .into_iter()
                    .map(|l| Line::new(Tone::Faint, l)),
            );
        }
        if let Some(serving) = &self.serving {
            if !self.workloads.is_empty() {
                lines.push(Line::default());
            }
            lines.extend(serving.lines());
        }
        lines
    }
}

// === impl Serving ===

impl Serving {
    /// Lines that can be copied are not broken.
    fn lines(&self) -> Vec<Line> {
        let plain = |text: String| Line::new(Tone::Plain, text);
        vec![
            Line::new(Tone::Strong, format!("Serving {}", self.base_url)),
            plain(self.curl()),
            plain(format!("curl {}/decisions?n=1", self.admin)),
            Line::new(Tone::Faint, "until Ctrl-C"),
        ]
    }

    fn curl(&self) -> String {
        format!(
            r#"curl {}/chat/completions -H 'content-type: application/json' -d '{{"model":"{}","messages":[{{"role":"user","content":"Hello"}}]}}'"#,
            self.base_url, self.model
        )
    }
}

pub(super) fn percent(share: f64) -> String {
    if share.is_nan() {
        "-".to_owned()
    } else {
        format!("{:.0} %", 100.0 * share)
    }
}

fn number(x: f64) -> String {
    match x {
        x if !x.is_finite() => "-".to_owned(),
        x if x < 10.0 => format!("{x:.2}"),
        x => format!("{x:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(median: f64) -> Figures {
        Figures {
            requests: 67,
            ttft_median: median,
            ttft_p95: 6.93,
            ttft_mean: 1.5,
            hit_share: 0.814,
            goodput_per_minute: 14.1,
            attainment: 1.0,
            errors: 0,
            unanswered: 0,
        }
    }

    fn report() -> Report {
        let (forebay, random) = (figures(0.35), figures(f64::INFINITY));
        let outcome = Outcome {
            workload: "shared",
            rate: 0.24,
            duration: 405.0,
            measured: 281.7,
            slo: 8.0,
            forebay,
            random: Figures {
                unanswered: 3,
                ..random
            },
            ratio: Ratio::of(&forebay, &random),
            rungs: BTreeMap::from([("exact", 97)]),
            first_errors: BTreeMap::new(),
        };
        Report {
            version: "0",
            seed: 1,
            speed: 15,
            seconds: 54,
            pod: "l40s",
            workloads: vec![outcome],
            decision: None,
            serving: None,
        }
    }

    fn text(width: usize) -> Vec<String> {
        let lines = report().lines(width);
        lines.iter().map(|l| l.render(false)).collect()
    }

    #[test]
    fn lines_fit() {
        for width in [40, 60, 80, 120] {
            let lines = text(width);
            let long = lines.iter().find(|l| l.chars().count() > width);
            assert_eq!(long, None, "{width}");
        }
    }

    #[test]
    fn wide_and_narrow_say_the_same() {
        let wide = text(100).join("\n");
        assert!(
            wide.contains("forebay        67       0.35 s  6.93 s"),
            "{wide}"
        );
        let narrow = text(40).join("\n");
        assert!(narrow.contains("TTFT median   0.35 s   never"), "{narrow}");
        assert!(narrow.contains("forebay 0, random 3;"), "{narrow}");
    }

    #[test]
    fn what_is_not_finite_is_null_in_json() {
        let json = serde_json::to_value(report()).unwrap();
        let shared = &json["workloads"][0];
        assert_eq!(shared["forebay"]["ttftMedian"], 0.35);
        assert!(shared["random"]["ttftMedian"].is_null());
        assert!(shared["ratio"]["ttftMedian"].is_null());
        assert_eq!(shared["ratio"]["ttftP95"], 1.0);
        assert_eq!(shared["rungs"]["exact"], 97);
    }

    #[test]
    fn the_curl_line_is_a_json_body() {
        let serving = Serving {
            base_url: "http://127.0.0.1:9/v1".into(),
            model: "m",
            admin: "http://127.0.0.1:8".into(),
        };
        let curl = serving.curl();
        let body = curl.split('\'').nth(3).unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["model"], "m");
        assert!(curl.starts_with("curl http://127.0.0.1:9/v1/chat/completions "));
    }
}
