//! The load of the published run: its three workloads, its arrivals, its windows and its client.
//!
//! A [`Script`] says what is sent and when, given when answers end. It knows nothing of engines or routing, so every arm gets
//! the same requests: one seed fixes prompts, their order and arrival times.

mod arrivals;
mod script;
mod text;

pub use self::{
    arrivals::{Arrivals, Gaps},
    script::{Script, Sent},
    text::{Chat, Text},
};

/// What prompts are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Workload {
    /// 16,256 tokens that begin no other prompt.
    Control,
    /// One of 24 prefixes of 16,000 tokens, then 256 of its own.
    Shared,
    /// Conversations of eight turns: 8,000 tokens, then 400 more each time after 200 that were generated.
    Multiturn,
}

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// So many a second, whatever becomes of them.
    Open {
        /// Requests per second.
        rate: f64,
        /// How gaps are drawn.
        gaps: Gaps,
    },
    /// So many at once: each is followed by the next as soon as it ends.
    Closed {
        /// Requests at once.
        streams: u32,
    },
}

/// The phases of one run, seconds. Only requests that start in the middle one are measured; those that are open at the end
/// are cancelled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Windows {
    /// Before it.
    pub warmup: f64,
    /// The window.
    pub measure: f64,
    /// After it.
    pub cooldown: f64,
}

// === impl Workload ===

impl Workload {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Control, Self::Shared, Self::Multiturn];

    /// For tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Shared => "shared",
            Self::Multiturn => "multiturn",
        }
    }

    /// The TTFT that counts as good, seconds. The published run has none for control; there it is the shared one's.
    pub fn slo(self) -> f64 {
        match self {
            Self::Control | Self::Shared => 8.0,
            Self::Multiturn => 4.0,
        }
    }

    /// Tokens of an answer.
    pub fn output(self) -> u32 {
        match self {
            Self::Control | Self::Shared => 256,
            Self::Multiturn => 200,
        }
    }

    /// The rate at which the published latencies are met best, requests per second. True Poisson arrivals need about
    /// twice the rate of bursts for the same tails.
    pub fn rate(self, gaps: Gaps) -> f64 {
        match (self, gaps) {
            (Self::Control, Gaps::Tens) => 0.10,
            (Self::Shared, Gaps::Tens) => 0.12,
            (Self::Multiturn, Gaps::Tens) => 0.15,
            (Self::Control, Gaps::Poisson) => 0.20,
            (Self::Shared, Gaps::Poisson) => 0.24,
            (Self::Multiturn, Gaps::Poisson) => 0.45,
        }
    }
}

// === impl Windows ===

impl Windows {
    /// Of a latency run.
    pub const LATENCY: Self = Self {
        warmup: 60.0,
        measure: 240.0,
        cooldown: 45.0,
    };

    /// Of a capacity run.
    pub const CAPACITY: Self = Self {
        warmup: 60.0,
        measure: 180.0,
        cooldown: 60.0,
    };

    /// Whether what starts then is measured.
    pub fn measures(&self, at: f64) -> bool {
        (self.warmup..self.warmup + self.measure).contains(&at)
    }

    /// When the run ends.
    pub fn end(&self) -> f64 {
        self.warmup + self.measure + self.cooldown
    }
}
