use super::Request;
use crate::{load::Windows, stats::Trial};

/// What became of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// When it was sent, seconds.
    pub at: f64,
    /// Its conversation, or its number.
    pub number: u64,
    /// Its turn there.
    pub turn: u32,
    /// Where it went.
    pub pod: usize,
    /// Prompt tokens.
    pub tokens: u32,
    /// Seconds to its first token, if that came.
    pub ttft: Option<f64>,
    /// When it was complete.
    pub end: Option<f64>,
    /// Prompt tokens that came from the cache, once it is complete.
    pub cached: Option<u32>,
    /// Prompt tokens that had been computed anywhere at any time before, in whole blocks.
    pub known: u32,
    /// Prompt tokens that the pod with the most of them held when it was sent.
    pub best: u32,
    /// Prompt tokens that the chosen pod held then.
    pub held: u32,
    /// Requests there that waited for their first token then.
    pub ahead: u32,
    /// What the router said of it, where it says anything.
    pub probe: Option<Probe>,
}

/// A prediction and the truth.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Probe {
    /// Cached tokens that were expected.
    pub cached: u32,
    /// Seconds to the first token that were predicted.
    pub predicted: f64,
    /// The error that the predictor reports of itself for it, as |log|.
    pub error: f64,
    /// Predicted and true TTFT of each candidate; truth by forked simulation, if asked for.
    pub candidates: Vec<(f64, f64)>,
    /// Which of them was chosen.
    pub chosen: usize,
}

/// A whole run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Its phases.
    pub windows: Windows,
    /// All requests in the order of sending.
    pub records: Vec<Record>,
    /// How the router's predictions went by its own account.
    pub accuracy: Vec<tower_ttft::predict::RegimeError>,
}

/// Why prompt tokens were computed instead of found, in tokens of all measured requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Causes {
    /// Of all prompts.
    pub tokens: u64,
    /// Nobody had computed them before.
    pub cold: u64,
    /// Computed before, and held by nobody any more.
    pub evicted: u64,
    /// Held, but by another pod than the chosen one.
    pub elsewhere: u64,
    /// Held by the chosen pod when it was chosen, and gone when the request was admitted.
    pub lost: u64,
    /// Found although the pod did not hold them yet when it was chosen: they were being computed.
    pub joined: u64,
}

// === impl Record ===

impl Record {
    /// A request that was sent just now.
    pub fn sent(at: f64, request: &Request) -> Self {
        Self {
            at,
            number: request.sent.chat.number,
            turn: request.sent.chat.turn,
            pod: 0,
            tokens: request.tokens(),
            ttft: None,
            end: None,
            cached: None,
            known: 0,
            best: 0,
            held: 0,
            ahead: 0,
            probe: None,
        }
    }

    /// TTFT as the statistics take it: what was not complete counts as never.
    pub fn counted(&self) -> f64 {
        match (self.ttft, self.end) {
            (Some(ttft), Some(_)) => ttft,
            _ => f64::INFINITY,
        }
    }
}

// === impl Run ===

impl Run {
    /// Those that count.
    pub fn measured(&self) -> impl Iterator<Item = &Record> + Clone + '_ {
        self.records.iter().filter(|r| self.windows.measures(r.at))
    }

    /// What the statistics take.
    pub fn trial(&self) -> Trial {
        Trial {
            ttft: self.measured().map(Record::counted).collect(),
            window: self.windows.measure,
        }
    }

    /// Cached and all prompt tokens of the measured requests that completed.
    pub fn hits(&self) -> (u64, u64) {
        self.measured()
            .filter_map(|r| Some((r.cached?, r.tokens)))
            .fold((0, 0), |(c, n), (cached, tokens)| {
                (c + u64::from(cached), n + u64::from(tokens))
            })
    }

    /// Why tokens were computed.
    pub fn causes(&self) -> Causes {
        let mut sum = Causes::default();
        for r in self.measured() {
            let Some(cached) = r.cached else { continue };
            let found = |n: u32| u64::from(n);
            sum.tokens += found(r.tokens);
            sum.cold += found(r.tokens.saturating_sub(r.known.max(cached)));
            sum.evicted += found(r.known.saturating_sub(r.best.max(cached)));
            sum.elsewhere += found(r.best.saturating_sub(r.held.max(cached)));
            sum.lost += found(r.held.saturating_sub(cached));
            sum.joined += found(cached.saturating_sub(r.held));
        }
        sum
    }
}

impl std::ops::AddAssign for Causes {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.cold += other.cold;
        self.evicted += other.evicted;
        self.elsewhere += other.elsewhere;
        self.lost += other.lost;
        self.joined += other.joined;
    }
}
