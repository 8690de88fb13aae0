//! The whole path in one process, over real sockets.

use super::engine::{FakeEngine, within};
use arc_swap::ArcSwap;
use bytes::Bytes;
use forebay_proxy::http::{
    HttpMetricFamilies, Limits, Local, ModelPool, ModelPoolParams, Models, PathPolicy, ServedName,
    Stack, StackParams, client::Tcp,
};
use futures::future::BoxFuture;
use http::Response;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use std::{sync::Arc, time::Duration};
use tokio::net::TcpListener;
use tower_ttft::{
    chain::{Chain, ChainKind, KeySpace},
    endpoint::EndpointId,
    peek::{Api, InferenceRequest},
    policy::{PolicySpec, Routing},
    pool::{Endpoint, EndpointInfo, Pool, PoolParams},
    prompt::{Encode, Prompt, Reason, Source},
};

/// A gateway; it stops when this is dropped.
pub struct Gateway {
    pub address: String,
    pub stack: Stack,
    pub metrics: HttpMetricFamilies,
    pub pools: Vec<Arc<ModelPool>>,
    task: tokio::task::JoinHandle<()>,
}

/// How a gateway is set up.
pub struct Setup {
    /// Models: names, and the addresses of their engines.
    pub models: Vec<(Vec<ServedName>, Vec<String>)>,
    pub policy: PathPolicy,
    pub limits: Limits,
    pub no_endpoint_wait: Duration,
    pub max_queued: usize,
    pub routing: Routing,
    pub encoder: Arc<dyn Encode>,
}

/// Prompts of unknown tokens.
struct NoTokens;

struct NothingLocal;

// === impl Setup ===

impl Setup {
    /// The model `tiny` on these engines.
    pub fn tiny(engines: &[&FakeEngine]) -> Self {
        Self::addresses(engines.iter().map(|e| e.address.clone()).collect())
    }

    /// The model `tiny` at these addresses.
    pub fn addresses(addresses: Vec<String>) -> Self {
        Self {
            models: vec![(vec![ServedName::own("tiny")], addresses)],
            policy: PathPolicy::default(),
            limits: Limits::default(),
            no_endpoint_wait: Duration::from_millis(200),
            max_queued: 100,
            // Takes turns, so that tests know who is asked.
            routing: Routing::LeastLoad,
            encoder: Arc::new(NoTokens),
        }
    }

    pub fn policy(mut self, change: impl FnOnce(&mut PathPolicy)) -> Self {
        change(&mut self.policy);
        self
    }

    pub async fn start(self) -> Gateway {
        let mut pools = Vec::new();
        let mut entries = Vec::new();
        for (names, addresses) in self.models {
            let name = names[0].name.clone();
            let pool = Pool::new(PoolParams {
                model: name.clone(),
                keys: KeySpace::new(1),
                policy: PolicySpec {
                    routing: self.routing,
                    no_endpoint_wait: self.no_endpoint_wait,
                    max_queued: self.max_queued,
                    ..PolicySpec::default()
                },
                seed: 1,
                index_bytes: 1 << 20,
            });
            for address in addresses {
                add(&pool, &address);
            }
            let pool = Arc::new(ModelPool::new(ModelPoolParams {
                name,
                pool,
                encoder: self.encoder.clone(),
                policy: self.policy.clone(),
            }));
            pools.push(pool.clone());
            entries.push((pool, names));
        }
        let models = Models::new(entries).expect("names differ");
        let metrics = HttpMetricFamilies::default();
        let stack = Stack::build(StackParams {
            models: Arc::new(ArcSwap::from_pointee(models)),
            local: Arc::new(NothingLocal),
            limits: self.limits,
            retries: Default::default(),
            connect: Arc::new(Tcp),
            seed: 1,
            metrics: metrics.clone(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address").to_string();
        let task = tokio::spawn({
            let stack = stack.clone();
            async move {
                let mut connections = tokio::task::JoinSet::new();
                while let Ok((io, _)) = listener.accept().await {
                    io.set_nodelay(true).expect("a TCP socket");
                    let service = TowerToHyperService::new(stack.clone());
                    connections.spawn(async move {
                        let _ = auto::Builder::new(TokioExecutor::new())
                            .serve_connection(TokioIo::new(io), service)
                            .await;
                    });
                }
            }
        });
        Gateway {
            address,
            stack,
            metrics,
            pools,
            task,
        }
    }
}

/// Adds a ready endpoint.
pub fn add(pool: &Pool, address: &str) -> Endpoint {
    let endpoint = pool.insert(EndpointId::new(address), EndpointInfo::default());
    endpoint.set_ready(true);
    endpoint
}

// === impl Gateway ===

impl Gateway {
    /// The endpoints of the first model.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        self.pools[0].pool().endpoints()
    }

    /// Waits until nothing is left of any request.
    pub async fn idle(&self) {
        within(Duration::from_millis(250), "all gauges are back", || {
            let apis = [
                Api::Chat,
                Api::Completions,
                Api::Responses,
                Api::Messages,
                Api::Other,
            ];
            apis.iter().all(|api| self.metrics.settle.active(*api) == 0)
                && self.stack.budget().free() == self.stack.budget().total()
                && self.pools.iter().all(|pool| {
                    pool.pool().queue().is_empty()
                        && pool.pool().endpoints().iter().all(|e| {
                            let status = e.status(tokio::time::Instant::now());
                            status.booked == 0 && status.running == 0
                        })
                })
        })
        .await;
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.task.abort();
    }
}

// === impl NoTokens ===

impl Encode for NoTokens {
    fn encode<'a>(&'a self, req: &'a InferenceRequest) -> BoxFuture<'a, Prompt> {
        let prompt = Prompt {
            chain: Chain::empty(ChainKind::Bytes),
            tokens: req.body.len() as u32 / 4,
            ids: None,
            bytes: req.body.len() as u32,
            whole_text: false,
            source: Source::Approximate(Reason::NoTokenizer),
        };
        Box::pin(async move { prompt })
    }
}

// === impl NothingLocal ===

impl Local for NothingLocal {
    fn answer(&self, _: &http::request::Parts) -> Option<Response<Bytes>> {
        None
    }
}
