//! Work in flight at an endpoint.
use tokio::time::Instant;

/// What an engine reports of itself (vLLM: a scrape of `/metrics`).
#[derive(Clone, Debug, PartialEq)]
pub struct LoadReport {
    /// When the answer arrived.
    pub at: Instant,
    /// Requests in running batches.
    pub running: u32,
    /// Requests waiting for admission.
    pub waiting: u32,
    /// Share of KV blocks in use by live requests, 0 to 1.
    pub kv_usage: f64,
    /// Prompt tokens computed since the engine started, without cached ones (`prompt_tokens_by_source_total{source="local_compute"}`).
    pub prefilled_tokens: Option<u64>,
    /// Seconds spent in prefill by all requests since the engine started, and their number.
    pub prefill_seconds: Option<(f64, u64)>,
    /// Preemptions since the engine started.
    pub preemptions: u64,
}
