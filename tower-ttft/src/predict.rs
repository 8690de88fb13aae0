//! Predicted time to first token.
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
