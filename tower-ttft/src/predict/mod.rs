//! Predicted time to first token.
//!
//! ```text
//! ttft = frontend·bytes + base + (ahead + shape(u, c))·c₀·gain·(1 + κ_d·running) + wait for a slot
//! shape(u, c) = u + κ·u·(c + u/2)            tokens: linear work plus attention over what lies before
//! ```
//!
//! The shape is physics and has no constant of any one machine: `c₀` is a neutral number of seconds per token. Four numbers
//! per endpoint are learned by a Kalman filter (see `filter`): its `gain` and κ, its `base` (half a step, network, fixed
//! costs) and its `frontend` rate (engines tokenize again: 0.01 to 2 µs a byte). Each answer moves each of them by as much
//! as it can have been at fault, and what no answer tells apart stays where the prior has it: a free regression has the
//! smaller error and the worse ranking, because routing starves it of data. `κ_d` is learned in common, and slowly.
//!
//! An endpoint that has no samples borrows: the gain from peers with the same GPU label, from the prefill time that the
//! engine itself reports, from the rest of the pool, in this order; the other numbers from the rest of the pool.
//!
//! The predictor says how wrong it has been, per regime, and whether to trust it. It has no clock and no randomness of
//! its own.

mod accuracy;
mod filter;
mod model;
#[cfg(test)]
mod tests;

pub use self::{
    accuracy::{Cached, Regime, RegimeError},
    model::{Inputs, Slot, TtftModel},
};
use std::time::Duration;

/// A prediction and what it is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prediction {
    /// Time to first token.
    pub ttft: Duration,
    /// What this request's own prefill costs.
    pub own: Duration,
    /// The parts of `ttft`, seconds.
    pub terms: Terms,
    /// The predictor's own relative error in this regime (median of |log(actual/predicted)|).
    pub error: f64,
    /// Whether the predictor trusts itself here.
    pub trusted: bool,
    /// Whether it rests on any answer at all, of this endpoint or of others.
    pub informed: bool,
    /// Half of the answers come by then, judged by how this regime's predictions went.
    pub p50: Duration,
    /// Nine of ten come by then.
    pub p90: Duration,
}

/// The parts of a predicted TTFT, seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Terms {
    /// The engine's frontend (its own tokenizing), from the prompt's bytes.
    pub frontend: f64,
    /// Half a step, network, fixed costs.
    pub base: f64,
    /// Prefill work ahead.
    pub backlog: f64,
    /// This request's own prefill.
    pub prefill: f64,
    /// Waiting for a KV or sequence slot.
    pub slot: f64,
    /// Factor from running decodes (1 is idle).
    pub slowdown: f64,
}

/// Seconds from a number that may be anything: never negative, never more than a day, a day if it is not a number.
fn seconds(s: f64) -> Duration {
    const DAY: f64 = 86_400.0;
    Duration::from_secs_f64(if s.is_nan() { DAY } else { s.clamp(0.0, DAY) })
}
