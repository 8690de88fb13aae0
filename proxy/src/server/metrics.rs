//! What is counted of the clients' side.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Counters and gauges of a server.
#[derive(Clone, Debug, Default)]
pub struct ServerMetrics {
    connections: Family<ConnectionLabels, Counter>,
    open: Gauge,
    inflight: Gauge,
    shed: Counter,
}

/// What became of a connection at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case")]
pub enum Accepted {
    /// Served as HTTP/1.
    http1,
    /// Served as HTTP/2 with prior knowledge.
    http2,
    /// The client closed it without a word.
    closed,
    /// The client said nothing, or too little, in time.
    silent,
    /// Over the limit of connections: answered 503.
    shed,
    /// Far over the limit: closed unanswered.
    dropped,
    /// The kernel would not give it to us.
    failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConnectionLabels {
    result: Accepted,
}

/// Counts one more for as long as it lives.
#[derive(Debug)]
pub(super) struct Held(Gauge);

// === impl ServerMetrics ===

impl ServerMetrics {
    /// Makes them visible.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "forebay_client_connections",
            "Connections from clients, by what became of them at their start",
            self.connections.clone(),
        );
        registry.register(
            "forebay_client_connections_open",
            "Connections from clients that are open",
            self.open.clone(),
        );
        registry.register(
            "forebay_requests_open",
            "Requests from their head to the end of their answer's body",
            self.inflight.clone(),
        );
        registry.register(
            "forebay_requests_shed",
            "Requests that were answered 503 because too many were open",
            self.shed.clone(),
        );
    }

    /// Requests that are open.
    pub fn open_requests(&self) -> i64 {
        self.inflight.get()
    }

    /// Connections that are open.
    pub fn open_connections(&self) -> i64 {
        self.open.get()
    }

    /// Connections with this result.
    pub fn connections(&self, result: Accepted) -> u64 {
        self.connections
            .get_or_create(&ConnectionLabels { result })
            .get()
    }

    pub(super) fn accepted(&self, result: Accepted) {
        self.connections
            .get_or_create(&ConnectionLabels { result })
            .inc();
    }

    pub(super) fn shed(&self) {
        self.shed.inc();
    }

    pub(super) fn hold_connection(&self) -> Held {
        Held::new(&self.open)
    }

    pub(super) fn hold_request(&self) -> Held {
        Held::new(&self.inflight)
    }
}

// === impl Held ===

impl Held {
    fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.dec();
    }
}
