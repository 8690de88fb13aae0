//! One decision of the gateway, term by term. Times are pod seconds.

use super::{clock::Clock, figures::finite};
use crate::term::{Line, Table, Tone, wrap};
use serde::Serialize;
use tower_ttft::{
    observe::End,
    pool::{Candidate, DecisionRecord},
};

/// A second of prefill is worth so many of waiting: the default policy's λ.
const LAMBDA: f64 = 1.0;
/// Less than this is no difference that anyone would notice, seconds.
const SMALL: f64 = 0.05;

/// A decision, and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Explained {
    /// The request's id.
    pub(super) request: String,
    /// How good the knowledge was.
    pub(super) rung: &'static str,
    /// Prompt tokens.
    pub(super) tokens: u32,
    /// The pods that could have taken it.
    pub(super) candidates: Vec<Terms>,
    /// Index of the one that did.
    pub(super) chosen: usize,
    /// What its first token then took, as the gateway saw it.
    pub(super) ttft: f64,
    /// The same as the client saw it.
    pub(super) ttft_client: Option<f64>,
    /// Cached tokens, as the pod said.
    pub(super) cached: Option<u32>,
}

/// What was thought of a pod.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Terms {
    /// Its number, from 1.
    pub(super) pod: usize,
    /// Tokens of the prompt that it holds.
    pub(super) cached: u32,
    /// Reading the request.
    pub(super) frontend: f64,
    /// What any request costs.
    pub(super) base: f64,
    /// Work ahead.
    pub(super) backlog: f64,
    /// Computing the tokens that it does not hold.
    pub(super) prefill: f64,
    /// Waiting for memory.
    pub(super) slot: f64,
    /// The sum of these.
    pub(super) ttft: f64,
    /// What the GPU time is worth.
    pub(super) price: f64,
    /// What else the policy added or took away.
    #[serde(serialize_with = "finite")]
    pub(super) other: f64,
    /// The sum of the last three; the smallest wins.
    #[serde(serialize_with = "finite")]
    pub(super) score: f64,
}

/// How much a decision shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Shows {
    /// The holder was free.
    Affinity,
    /// The holder was passed over, because too much was ahead there.
    Passed,
    /// The holder was chosen although more was ahead there than elsewhere.
    Waits,
}

// === impl Explained ===

impl Explained {
    /// The decision that shows most, the latest among equals. `pod` tells pods' numbers by their addresses.
    pub(super) fn pick(
        records: &[DecisionRecord],
        clock: Clock,
        pod: impl Fn(&str) -> Option<usize>,
    ) -> Option<Self> {
        let all = records.iter().filter_map(|r| Self::of(r, clock, &pod));
        all.max_by_key(Self::shows).filter(|e| e.shows().is_some())
    }

    fn of(
        record: &DecisionRecord,
        clock: Clock,
        pod: impl Fn(&str) -> Option<usize>,
    ) -> Option<Self> {
        let (d, outcome) = (&record.decision, record.outcome?);
        let terms = |c: &Candidate| Some(Terms::of(c, clock, pod(c.endpoint.address.as_str())?));
        let candidates: Option<Vec<Terms>> = d.candidates.iter().map(terms).collect();
        let mut candidates = candidates.filter(|_| outcome.end == End::Complete)?;
        let winner = candidates.get(d.chosen)?.pod;
        candidates.sort_by_key(|c| c.pod);
        Some(Self {
            request: d.request_id.as_deref()?.to_owned(),
            rung: d.rung.name(),
            tokens: d.tokens,
            chosen: candidates.iter().position(|c| c.pod == winner)?,
            candidates,
            ttft: clock.scaled(outcome.ttft?),
            ttft_client: None,
            cached: outcome.cached_tokens,
        })
    }

    /// Nothing if there was nothing to tell pods apart by, or if the choice was not that of the smallest score.
    fn shows(&self) -> Option<Shows> {
        let won = self.candidates.get(self.chosen)?;
        let others = || self.candidates.iter().filter(|c| c.pod != won.pod);
        if others().any(|c| c.score < won.score || !c.score.is_finite()) {
            return None;
        }
        let holds = |c: &Terms, than: &Terms| c.cached > than.cached;
        if others().any(|c| holds(won, c) && c.backlog + SMALL < won.backlog) {
            Some(Shows::Waits)
        } else if others().any(|c| holds(c, won)) {
            Some(Shows::Passed)
        } else if others().any(|c| holds(won, c)) {
            Some(Shows::Affinity)
        } else {
            None
        }
    }

    /// The terms as a table and the reasons in words.
    pub(super) fn lines(&self, width: usize) -> Vec<Line> {
        let title = format!("Why request {} went where it went", self.request);
        let mut lines = vec![Line::new(Tone::Strong, title)];
        lines.extend(self.table().lines());
        let words = wrap(&self.words(), width);
        lines.extend(words.into_iter().map(Line::from));
        lines
    }

    fn table(&self) -> Table {
        let head = |i: usize, c: &Terms| {
            let mark = if i == self.chosen { ">" } else { "" };
            format!("{mark}pod {}", c.pod)
        };
        let heads = self.candidates.iter().enumerate();
        let mut table = Table::new(
            [String::new()]
                .into_iter()
                .chain(heads.map(|(i, c)| head(i, c))),
        );
        let mut row = |name: &str, cell: &dyn Fn(&Terms) -> String| {
            let cells = self.candidates.iter().map(cell);
            table = std::mem::replace(&mut table, Table::new([""]))
                .row([name.to_owned()].into_iter().chain(cells));
        };
        row("cached", &|c| c.cached.to_string());
        row("to compute", &|c| self.computes(c).to_string());
        row("frontend", &|c| seconds(c.frontend));
        row("+ base", &|c| seconds(c.base));
        row("+ backlog", &|c| seconds(c.backlog));
        row("+ prefill", &|c| seconds(c.prefill));
        if self.candidates.iter().any(|c| c.slot > 0.0) {
            row("+ memory", &|c| seconds(c.slot));
        }
        row("= TTFT", &|c| seconds(c.ttft));
        row("+ λ·prefill", &|c| seconds(c.price));
        if self.candidates.iter().any(|c| c.other.abs() > SMALL / 10.0) {
            row("+ other", &|c| seconds(c.other));
        }
        row("= score", &|c| seconds(c.score));
        table
    }

    fn computes(&self, c: &Terms) -> u32 {
        self.tokens.saturating_sub(c.cached)
    }

    fn words(&self) -> String {
        let Some(won) = self.candidates.get(self.chosen) else {
            return String::new();
        };
        let others = self.candidates.iter().filter(|c| c.pod != won.pod);
        let mut words = format!("Pod {} won: the smallest score.", won.pod);
        if let Some(next) = others.min_by(|a, b| a.score.total_cmp(&b.score)) {
            words += &format!(
                " It holds {} of the {} tokens and computes the rest in {}; pod {} holds {} and would take {}.",
                won.cached,
                self.tokens,
                seconds(won.prefill),
                next.pod,
                next.cached,
                seconds(next.prefill),
            );
            let ahead = won.backlog - next.backlog;
            if ahead.abs() > SMALL {
                // What speaks for the same pod as its cache, or for the other one.
                let for_it = ahead < 0.0;
                let holds_more = won.cached >= next.cached;
                let but = if for_it == holds_more { "And" } else { "But" };
                let more = if for_it { "less" } else { "more" };
                words += &format!(" {but} {} {more} is ahead there.", seconds(ahead.abs()));
            }
        }
        words += &format!(
            " Predicted: first token after {}; it came after {}",
            seconds(won.ttft),
            seconds(self.ttft)
        );
        if let Some(seen) = self.ttft_client {
            words += &format!(" ({} at the client)", seconds(seen));
        }
        if let Some(cached) = self.cached {
            words += &format!(", with {cached} tokens from the cache");
        }
        words + &format!(". Knowledge: {}.", self.rung)
    }
}

// === impl Terms ===

impl Terms {
    fn of(c: &Candidate, clock: Clock, pod: usize) -> Self {
        let p = &c.prediction;
        let ttft = clock.scaled(p.ttft.as_secs_f64());
        let price = LAMBDA * clock.scaled(p.own.as_secs_f64());
        let score = clock.scaled(c.score);
        Self {
            pod,
            cached: c.cached,
            frontend: clock.scaled(p.terms.frontend),
            base: clock.scaled(p.terms.base),
            backlog: clock.scaled(p.terms.backlog),
            prefill: clock.scaled(p.terms.prefill),
            slot: clock.scaled(p.terms.slot),
            ttft,
            price,
            other: score - ttft - price,
            score,
        }
    }
}

/// For tables: two decimals, three where that would be nothing.
pub(super) fn seconds(s: f64) -> String {
    match s {
        s if s.is_nan() => "-".to_owned(),
        s if s.is_infinite() => "never".to_owned(),
        s if s.abs() < 0.1 && s != 0.0 => format!("{s:.3} s"),
        s => format!("{s:.2} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(pod: usize, cached: u32, backlog: f64) -> Terms {
        let prefill = f64::from(16_267 - cached) * 0.0004;
        let ttft = 0.045 + 0.03 + backlog + prefill;
        Terms {
            pod,
            cached,
            frontend: 0.045,
            base: 0.03,
            backlog,
            prefill,
            slot: 0.0,
            ttft,
            price: prefill,
            other: 0.0,
            score: ttft + prefill,
        }
    }

    fn explained(candidates: Vec<Terms>, chosen: usize) -> Explained {
        Explained {
            request: "demo-shared-31".into(),
            rung: "exact",
            tokens: 16_267,
            candidates,
            chosen,
            ttft: 1.25,
            ttft_client: Some(1.3),
            cached: Some(15_680),
        }
    }

    fn waits() -> Explained {
        explained(
            vec![terms(1, 0, 0.0), terms(2, 15_680, 0.9), terms(3, 784, 7.0)],
            1,
        )
    }

    #[test]
    fn tells_what_decisions_show() {
        assert_eq!(waits().shows(), Some(Shows::Waits));
        let passed = explained(vec![terms(1, 0, 0.0), terms(2, 15_680, 14.0)], 0);
        assert_eq!(passed.shows(), Some(Shows::Passed));
        let free = explained(vec![terms(1, 0, 0.0), terms(2, 15_680, 0.0)], 1);
        assert_eq!(free.shows(), Some(Shows::Affinity));
        let nothing = explained(vec![terms(1, 0, 0.0), terms(2, 0, 1.0)], 0);
        assert_eq!(nothing.shows(), None);
        let not_smallest = explained(vec![terms(1, 0, 0.0), terms(2, 15_680, 0.0)], 0);
        assert_eq!(not_smallest.shows(), None);
        assert!(Shows::Waits > Shows::Passed && Shows::Passed > Shows::Affinity);
    }

    #[test]
    fn fits_forty_columns_and_adds_up() {
        let lines: Vec<String> = waits().lines(40).iter().map(|l| l.render(false)).collect();
        let table = &lines[1..];
        assert!(table.iter().all(|l| l.chars().count() <= 40), "{lines:#?}");
        let text = lines.join("\n");
        for says in [
            ">pod 2",
            "+ backlog     0.00 s   0.90 s   7.00 s",
            "= score",
            "Pod 2 won",
        ] {
            assert!(text.contains(says), "{says}: {text}");
        }
        assert!(
            !text.contains("+ memory") && !text.contains("+ other"),
            "{text}"
        );
    }

    #[test]
    fn words_say_what_speaks_for_and_against() {
        let words = waits().words();
        assert!(words.contains("But 0.90 s more is ahead there"), "{words}");
        assert!(
            words.contains("it came after 1.25 s (1.30 s at the client)"),
            "{words}"
        );
        let free = explained(vec![terms(1, 0, 2.0), terms(2, 15_680, 0.0)], 1).words();
        assert!(free.contains("And 2.00 s less is ahead there"), "{free}");
        let passed = explained(vec![terms(1, 0, 0.0), terms(2, 15_680, 14.0)], 0).words();
        assert!(
            passed.contains("But 14.00 s less is ahead there"),
            "{passed}"
        );
    }
}
