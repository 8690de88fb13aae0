//! Connections that wait for their next request.

use super::{ClientMetricFamilies, connect::Connection};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

/// How long a connection may take to show that it is ready again. Its last answer was read to the end, so this is the
/// time its task needs to be polled once.
const READY_WITHIN: Duration = Duration::from_millis(5);

/// Idle connections by address, the one used last first: the others may then age and go.
pub(super) struct Idle<B> {
    connections: Mutex<HashMap<Arc<str>, VecDeque<Waiting<B>>>>,
    timeout: Duration,
    max: usize,
    metrics: ClientMetricFamilies,
}

struct Waiting<B> {
    connection: Connection<B>,
    since: Instant,
}

// === impl Idle ===

impl<B: Send + 'static> Idle<B> {
    /// An empty pool and the task that closes what has waited for too long. The task ends with the pool.
    pub(super) fn spawn(timeout: Duration, max: usize, metrics: ClientMetricFamilies) -> Arc<Self> {
        let idle = Arc::new(Self {
            connections: Mutex::default(),
            timeout,
            max,
            metrics,
        });
        let weak = Arc::downgrade(&idle);
        let every = (timeout / 8).max(Duration::from_millis(10));
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let Some(idle) = weak.upgrade() else { return };
                idle.expire(Instant::now());
            }
        });
        idle
    }

    /// A live connection to this address.
    pub(super) async fn take(&self, address: &str) -> Option<Connection<B>>
    where
        B: http_body::Body + 'static,
    {
        // Bounded by what waits there now: each turn takes one out.
        while let Some(waiting) = self.pop(address) {
            let mut connection = waiting.connection;
            let age = Instant::now().saturating_duration_since(waiting.since);
            if age >= self.timeout || connection.sender.is_closed() {
                continue;
            }
            if connection.sender.is_ready() {
                return Some(connection);
            }
            let ready = tokio::time::timeout(READY_WITHIN, connection.sender.ready()).await;
            if matches!(ready, Ok(Ok(()))) {
                return Some(connection);
            }
        }
        None
    }

    /// Keeps a connection for the next request, unless enough wait already.
    pub(super) fn put(&self, address: &Arc<str>, connection: Connection<B>) {
        if connection.sender.is_closed() || self.max == 0 {
            return;
        }
        let mut connections = self.connections.lock();
        let waiting = connections.entry(address.clone()).or_default();
        if waiting.len() >= self.max {
            waiting.pop_front();
            self.metrics.idle.dec();
        }
        waiting.push_back(Waiting {
            connection,
            since: Instant::now(),
        });
        self.metrics.idle.inc();
    }

    fn pop(&self, address: &str) -> Option<Waiting<B>> {
        let mut connections = self.connections.lock();
        let waiting = connections.get_mut(address)?;
        let popped = waiting.pop_back();
        if waiting.is_empty() {
            connections.remove(address);
        }
        if popped.is_some() {
            self.metrics.idle.dec();
        }
        popped
    }

    /// Closes what has waited for too long or was closed by the engine, and forgets addresses without connections.
    fn expire(&self, now: Instant) {
        self.connections.lock().retain(|_, waiting| {
            let before = waiting.len();
            waiting.retain(|w| {
                now.saturating_duration_since(w.since) < self.timeout
                    && !w.connection.sender.is_closed()
            });
            self.metrics.idle.dec_by((before - waiting.len()) as i64);
            !waiting.is_empty()
        });
    }
}

impl<B> Drop for Idle<B> {
    fn drop(&mut self) {
        let left: usize = self.connections.get_mut().values().map(VecDeque::len).sum();
        self.metrics.idle.dec_by(left as i64);
    }
}
