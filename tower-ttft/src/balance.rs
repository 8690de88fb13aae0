//! The tower service over a pool.
use crate::pool::{Endpoint, Pool, Ticket};
/// Builds a service for a target, as Linkerd's trait of this name.
pub trait NewService<T> {
    /// What is built.
    type Service;
    /// Builds it.
    fn new_service(&self, target: T) -> Self::Service;
}
/// Sends each request to the endpoint that its pool picks. The request must carry [`crate::peek::InferenceRequest`] and
/// [`crate::prompt::Prompt`] extensions and may carry [`crate::pool::Excluded`]; the response carries an
/// `Arc<Decision>` and the chosen `EndpointId` as extensions; its body is an `ObserveBody` that holds the ticket.
/// Errors of the endpoint's service come back as [`EndpointError`], which names the endpoint.
#[derive(Clone)]
pub struct Balance<N> {
    pub(crate) _pool: Pool,
    pub(crate) _new: N,
}
/// A failure of one endpoint.
#[derive(Debug, thiserror::Error)]
#[error("endpoint {endpoint}: {source}")]
pub struct EndpointError {
    /// Which.
    pub endpoint: crate::endpoint::EndpointId,
    /// What failed.
    #[source]
    pub source: crate::Error,
}
#[allow(unused)]
fn _uses(_: Endpoint, _: Ticket) {}
