//! The waiting room of a pool.
//!
//! For now requests wait only while no endpoint is ready: in the order in which they came, bounded in number and bytes,
//! each until its deadline. A place is given back when it is dropped.

use crate::{policy::PolicySpec, pool::PoolMetrics};
use parking_lot::Mutex;
use std::{collections::VecDeque, sync::Arc};
use tokio::{sync::Notify, time::Instant};

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

/// What may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueParams {
    /// Requests.
    pub max_requests: usize,
    /// Bytes of their bodies.
    pub max_bytes: usize,
}

/// Requests that wait for an endpoint. Clones are the same queue.
#[derive(Clone, Debug)]
pub struct Queue {
    inner: Arc<Inner>,
}

/// A request's place in the queue.
#[derive(Debug)]
pub struct Place {
    inner: Arc<Inner>,
    waiter: Arc<Waiter>,
    bytes: usize,
    since: Instant,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    metrics: PoolMetrics,
}

#[derive(Debug)]
struct State {
    params: QueueParams,
    waiters: VecDeque<Arc<Waiter>>,
    bytes: usize,
}

/// Someone who waits to be first.
#[derive(Debug, Default)]
struct Waiter {
    first: Notify,
}

// === impl QueueParams ===

impl QueueParams {
    /// As a policy says.
    pub fn of(policy: &PolicySpec) -> Self {
        Self {
            max_requests: policy.max_queued,
            max_bytes: policy.max_queued_bytes,
        }
    }
}

// === impl Queue ===

impl Queue {
    pub(crate) fn new(params: QueueParams, metrics: PoolMetrics) -> Self {
        Self {
            inner: Arc::new(Inner {
                state: Mutex::new(State {
                    params,
                    waiters: VecDeque::new(),
                    bytes: 0,
                }),
                metrics,
            }),
        }
    }

    /// Takes a place at the end.
    pub fn enter(&self, bytes: usize, now: Instant) -> Result<Place, QueueError> {
        let inner = &self.inner;
        let mut state = inner.state.lock();
        let fits = state.waiters.len() < state.params.max_requests
            && state
                .bytes
                .checked_add(bytes)
                .is_some_and(|sum| sum <= state.params.max_bytes);
        if !fits {
            inner.metrics.dropped(QueueError::Full);
            return Err(QueueError::Full);
        }
        let waiter = Arc::new(Waiter::default());
        state.waiters.push_back(waiter.clone());
        state.bytes += bytes;
        inner.metrics.length(state.waiters.len(), state.bytes);
        Ok(Place {
            inner: inner.clone(),
            waiter,
            bytes,
            since: now,
        })
    }

    /// Requests that wait now: the demand that more endpoints would meet.
    pub fn len(&self) -> usize {
        self.inner.state.lock().waiters.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that wait now.
    pub fn bytes(&self) -> usize {
        self.inner.state.lock().bytes
    }

    pub(crate) fn set_params(&self, params: QueueParams) {
        self.inner.state.lock().params = params;
    }

    pub(crate) fn dropped(&self, why: QueueError) {
        self.inner.metrics.dropped(why);
    }
}

// === impl Place ===

impl Place {
    /// Resolves when nobody is before this place.
    pub async fn first(&self) {
        loop {
            let notified = self.waiter.first.notified();
            let is_first = {
                let state = self.inner.state.lock();
                state
                    .waiters
                    .front()
                    .is_some_and(|w| Arc::ptr_eq(w, &self.waiter))
            };
            if is_first {
                return;
            }
            notified.await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let waited = Instant::now().saturating_duration_since(self.since);
        let inner = &self.inner;
        let mut state = inner.state.lock();
        state.waiters.retain(|w| !Arc::ptr_eq(w, &self.waiter));
        state.bytes = state.bytes.saturating_sub(self.bytes);
        if let Some(first) = state.waiters.front() {
            // Kept until it is looked at, so it cannot be missed.
            first.first.notify_one();
        }
        inner.metrics.length(state.waiters.len(), state.bytes);
        inner.metrics.waited(waited);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::PoolMetricFamilies;
    use futures::FutureExt;
    use std::time::Duration;

    fn queue(max_requests: usize, max_bytes: usize) -> Queue {
        Queue::new(
            QueueParams {
                max_requests,
                max_bytes,
            },
            PoolMetricFamilies::default().of(&"m".into()),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn is_bounded_in_number_and_bytes() {
        let now = Instant::now();
        let q = queue(2, 100);
        let a = q.enter(60, now).expect("a place");
        assert_eq!(q.enter(41, now).err(), Some(QueueError::Full));
        let b = q.enter(40, now).expect("a place");
        assert_eq!(q.enter(0, now).err(), Some(QueueError::Full));
        assert_eq!((q.len(), q.bytes()), (2, 100));
        drop(a);
        assert_eq!((q.len(), q.bytes()), (1, 40));
        assert!(q.enter(60, now).is_ok());
        drop(b);
        assert_eq!((q.len(), q.bytes()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn serves_in_order_and_skips_who_left() {
        let now = Instant::now();
        let q = queue(10, 100);
        let places: Vec<Place> = (0..4).filter_map(|_| q.enter(1, now).ok()).collect();
        let [a, b, c, d]: [Place; 4] = places.try_into().expect("four places");
        assert!(a.first().now_or_never().is_some());
        for later in [&b, &c, &d] {
            assert!(later.first().now_or_never().is_none());
        }
        let task = tokio::spawn(async move {
            c.first().await;
            c
        });
        tokio::time::sleep(Duration::from_millis(1)).await;
        drop(b);
        drop(a);
        let c = tokio::time::timeout(Duration::from_secs(1), task)
            .await
            .expect("c is woken")
            .expect("no panic");
        assert!(d.first().now_or_never().is_none());
        drop(c);
        assert!(d.first().now_or_never().is_some());
    }
}
