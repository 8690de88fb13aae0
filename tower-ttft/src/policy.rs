//! How a pool chooses.
use std::time::Duration;

/// The kinds of routing.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize,
)]
pub enum Routing {
    /// Predicted TTFT plus λ × own prefill time.
    #[default]
    PricedTtft,
    /// Predicted TTFT.
    Ttft,
    /// Uncached tokens × batch size.
    LMetric,
    /// Two random endpoints and the longest holders, by predicted TTFT.
    P2c,
    /// Fewest requests in flight.
    LeastLoad,
    /// Uniformly at random.
    Random,
}

/// What a pool's owner decides.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicySpec {
    /// The kind of routing.
    pub routing: Routing,
    /// The price of GPU time: seconds of delay that a second of prefill is worth.
    pub lambda: f64,
    /// How long a request may wait while no endpoint is ready.
    pub no_endpoint_wait: Duration,
}

impl Default for PolicySpec {
    fn default() -> Self {
        Self {
            routing: Routing::PricedTtft,
            lambda: 1.0,
            no_endpoint_wait: Duration::from_secs(30),
        }
    }
}
