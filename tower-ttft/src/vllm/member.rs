//! The pool, as far as a watcher needs it.

use super::subscribe::Sink;
use crate::{
    endpoint::EndpointId,
    events::EventBatch,
    load::LoadReport,
    pool::{Endpoint, EndpointInfo, Pool},
};

/// Where engines join.
pub(crate) trait Registry: Clone + Send + Sync + 'static {
    type Member: Member;
    /// Adds an endpoint, updates it, or replaces it by another incarnation.
    fn insert(&self, id: EndpointId, info: EndpointInfo) -> Self::Member;
    /// Takes an endpoint out.
    fn remove(&self, id: &EndpointId);
}

/// An endpoint that has joined.
pub(crate) trait Member: Sink + Clone {
    fn set_ready(&self, ready: bool);
    fn cut(&self);
    fn set_info(&self, info: EndpointInfo);
    fn report(&self, report: LoadReport);
}

// === impl Pool ===

impl Registry for Pool {
    type Member = Endpoint;

    fn insert(&self, id: EndpointId, info: EndpointInfo) -> Endpoint {
        Pool::insert(self, id, info)
    }

    fn remove(&self, id: &EndpointId) {
        Pool::remove(self, id);
    }
}

// === impl Endpoint ===

impl Sink for Endpoint {
    fn apply(&self, batch: &EventBatch) {
        Endpoint::apply(self, batch);
    }

    fn clear(&self) {
        Endpoint::clear(self);
    }

    fn set_events_live(&self, live: bool) {
        Endpoint::set_events_live(self, live);
    }
}

impl Member for Endpoint {
    fn set_ready(&self, ready: bool) {
        Endpoint::set_ready(self, ready);
    }

    fn cut(&self) {
        Endpoint::cut(self);
    }

    fn set_info(&self, info: EndpointInfo) {
        Endpoint::set_info(self, info);
    }

    fn report(&self, report: LoadReport) {
        Endpoint::report(self, report);
    }
}
