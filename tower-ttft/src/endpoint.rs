//! What an endpoint is called.

use std::{fmt, sync::Arc};

/// `host:port` of an engine. Connections and breakers go by it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(Arc<str>);

/// Which process lives at an address: a pod UID, a container id or `process_start_time_seconds`; empty while unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(Arc<str>);

/// One engine that takes requests. What was learned (index, load, gain) goes by it, so that nothing of a dead process
/// is believed of its successor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId {
    /// Where it listens.
    pub address: Address,
    /// Its data-parallel rank, if the engine has ranks.
    pub rank: Option<u32>,
    /// Which process lives there.
    pub incarnation: Incarnation,
}

// === impl Address ===

impl Address {
    /// An address from `host:port`.
    pub fn new(host_port: impl Into<Arc<str>>) -> Self {
        Self(host_port.into())
    }

    /// `host:port`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

// === impl Incarnation ===

impl Incarnation {
    /// An incarnation from whatever names the process.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }

    /// The name, empty while unknown.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

// === impl EndpointId ===

impl EndpointId {
    /// An endpoint without ranks whose process is not known yet.
    pub fn new(address: impl Into<Arc<str>>) -> Self {
        Self {
            address: Address::new(address),
            rank: None,
            incarnation: Incarnation::default(),
        }
    }

    /// The same endpoint as another process.
    pub fn with_incarnation(&self, incarnation: Incarnation) -> Self {
        Self {
            incarnation,
            ..self.clone()
        }
    }
}

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        match self.rank {
            Some(rank) => write!(f, "#{rank}"),
            None => Ok(()),
        }
    }
}
