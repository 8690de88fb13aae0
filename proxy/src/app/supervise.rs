//! One task per endpoint: it watches the engine and keeps it in the pool that it belongs to.

use super::directory::Directory;
use crate::config::EndpointConfig;
use std::{pin::pin, sync::Arc, time::Duration};
use tokio::{sync::watch, time};
use tower_ttft::{
    pool::Pool,
    vllm::{self, WatchParams},
};

/// Between two looks at what is still open at an endpoint that leaves.
const LOOK: Duration = Duration::from_millis(50);

/// What an endpoint's task is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Keep the engine in the pool of this model; without one, only find out what it is.
    Serve(Option<Arc<str>>),
    /// No more requests; what is open may go on for so long.
    Leave(Duration),
}

/// Watches an engine until it is told to leave.
pub(super) async fn supervise(
    directory: Arc<Directory>,
    config: EndpointConfig,
    seed: u64,
    mut orders: watch::Receiver<Order>,
) {
    loop {
        let order = orders.borrow_and_update().clone();
        let pool = match order {
            Order::Serve(Some(model)) => directory.pool(&model),
            Order::Serve(None) => None,
            Order::Leave(_) => return,
        };
        let pool = pool.unwrap_or_else(|| directory.staging().clone());
        let params = WatchParams {
            gpu: config.gpu.clone(),
            kv_events: config.kv_events.clone(),
            replay: config.replay.clone(),
            seed,
            ..WatchParams::new(config.address.clone())
        };
        let (engine, watching) = vllm::watch(params, pool.clone());
        directory.watched(&config.address, engine.clone());
        let mut watching = pin!(watching);
        tokio::select! {
            never = &mut watching => match never {},
            changed = orders.changed() => if changed.is_err() { return },
        }
        let order = orders.borrow().clone();
        if let Order::Leave(limit) = order {
            // Dropped, the watcher takes the endpoint out of the pool, which would end what is open. Until then it
            // watches: an engine that dies without a word would leave its streams hanging. There are never more of
            // these watchers than requests under way, nor any for longer than the limit.
            engine.retire();
            tokio::select! {
                never = &mut watching => match never {},
                () = finish(&pool, &config.address, limit) => return,
            }
        }
    }
}

/// Waits until nothing is open at an endpoint.
async fn finish(pool: &Pool, address: &str, limit: Duration) {
    let deadline = time::Instant::now() + limit;
    loop {
        let now = time::Instant::now();
        let mut open = 0;
        for endpoint in pool.endpoints() {
            if endpoint.id().address.as_str() == address {
                endpoint.set_ready(false);
                let status = endpoint.status(now);
                open += status.booked + status.running;
            }
        }
        if open == 0 {
            return;
        }
        if now >= deadline {
            tracing::warn!(
                endpoint = address,
                requests = open,
                "Ending what is still open at an endpoint that leaves"
            );
            return;
        }
        time::sleep(LOOK).await;
    }
}
