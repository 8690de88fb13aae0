//! The waiting room of a pool.
/// Why a request may not wait, or not longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// Too many requests or bytes wait already.
    #[error("the queue is full: no endpoint is ready")]
    Full,
    /// The no-endpoint wait is over.
    #[error("no endpoint became ready in time")]
    Deadline,
}
