//! What is counted of connections to engines.

use super::connect::ConnectError;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Counters of connections to engines.
#[derive(Clone, Debug, Default)]
pub struct ClientMetricFamilies {
    connects: Family<ConnectLabels, Counter>,
    pub(super) reused: Counter,
    pub(super) resent: Counter,
    pub(super) idle: Gauge,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConnectLabels {
    result: Connected,
}

/// What came of an attempt to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case")]
pub enum Connected {
    /// A connection.
    ok,
    /// Nobody listens there.
    refused,
    /// Nothing came back.
    timeout,
    /// Anything else: no route, no such name…
    error,
}

// === impl ClientMetricFamilies ===

impl ClientMetricFamilies {
    /// Makes the counters visible.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "forebay_engine_connects",
            "Connections to engines that were tried",
            self.connects.clone(),
        );
        registry.register(
            "forebay_engine_connections_reused",
            "Requests that went out on a connection that had carried others",
            self.reused.clone(),
        );
        registry.register(
            "forebay_engine_resends",
            "Requests that were sent again to the same engine because a reused connection was dead",
            self.resent.clone(),
        );
        registry.register(
            "forebay_engine_connections_idle",
            "Connections to engines that wait for a request",
            self.idle.clone(),
        );
    }

    /// Connections tried with this result.
    pub fn connects(&self, result: Connected) -> u64 {
        self.connects.get_or_create(&ConnectLabels { result }).get()
    }

    /// Requests that were sent again on a fresh connection.
    pub fn resent(&self) -> u64 {
        self.resent.get()
    }

    pub(super) fn connected<T>(&self, result: &Result<T, ConnectError>) {
        let result = match result {
            Ok(_) => Connected::ok,
            Err(ConnectError::Timeout(_)) => Connected::timeout,
            Err(ConnectError::Io(e)) if e.kind() == std::io::ErrorKind::ConnectionRefused => {
                Connected::refused
            }
            Err(_) => Connected::error,
        };
        self.connects.get_or_create(&ConnectLabels { result }).inc();
    }
}
