//! The whole path, put together.

use super::{
    Body, Models, RequestBody,
    client::{Client, ClientMetricFamilies, ClientParams, Connect},
    hold::HoldMetricFamilies,
    request_id::RequestIds,
    retry::{Budget as RetryBudget, BudgetParams, RetryMetricFamilies},
    settle::SettleMetricFamilies,
};
use arc_swap::ArcSwap;
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use hyper::body::Incoming;
use prometheus_client::registry::Registry;
use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::time::Instant;
use tower_ttft::peek::{Budget, PeekParams};

/// Bounds on requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a body that are buffered and read; larger ones are streamed on unscored.
    pub peek_cap: usize,
    /// Bytes of a body that are accepted at all.
    pub hard_cap: u64,
    /// Bytes that bodies and tokens of all requests may hold together until their answers are committed.
    pub memory: usize,
}

/// Answers requests that never go to an engine, such as `GET /v1/models`. Asked before all else.
pub trait Local: Send + Sync + 'static {
    /// The answer, or none if this request is for someone else.
    fn answer(&self, request: &http::request::Parts) -> Option<Response<Bytes>>;
}

/// Parameters of a [`Stack`].
pub struct StackParams {
    /// The models, replaced as a whole when they change.
    pub models: Arc<ArcSwap<Models>>,
    /// What is answered here.
    pub local: Arc<dyn Local>,
    /// Bounds on requests.
    pub limits: Limits,
    /// Bounds on retries.
    pub retries: BudgetParams,
    /// How connections to engines are made.
    pub connect: Arc<dyn Connect>,
    /// A seed for request ids.
    pub seed: u64,
    /// Where to count.
    pub metrics: HttpMetricFamilies,
}

/// What is counted on the path, a family per stage.
#[derive(Clone, Debug, Default)]
pub struct HttpMetricFamilies {
    /// Connections to engines.
    pub client: ClientMetricFamilies,
    /// Answers that were held back.
    pub hold: HoldMetricFamilies,
    /// Retries.
    pub retry: RetryMetricFamilies,
    /// Requests.
    pub settle: SettleMetricFamilies,
}

/// The service of a listener. Cheap to clone; all clones share connections and bounds.
#[derive(Clone)]
pub struct Stack {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) models: Arc<ArcSwap<Models>>,
    pub(super) local: Arc<dyn Local>,
    pub(super) peek: PeekParams,
    pub(super) client: Client<RequestBody>,
    pub(super) retries: Arc<RetryBudget>,
    pub(super) ids: RequestIds,
    pub(super) metrics: HttpMetricFamilies,
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        let peek = PeekParams::default();
        Self {
            peek_cap: peek.peek_cap,
            hard_cap: peek.hard_cap,
            memory: peek.budget.total(),
        }
    }
}

// === impl HttpMetricFamilies ===

impl HttpMetricFamilies {
    /// Makes the counters visible.
    pub fn register(&self, registry: &mut Registry) {
        self.client.register(registry);
        self.hold.register(registry);
        self.retry.register(registry);
        self.settle.register(registry);
    }
}

// === impl Stack ===

impl Stack {
    /// Builds the path. Must be called in a Tokio runtime: see [`Client::new`].
    pub fn build(params: StackParams) -> Self {
        let client = Client::new(ClientParams {
            metrics: params.metrics.client.clone(),
            connect: params.connect,
            ..ClientParams::default()
        });
        Self {
            inner: Arc::new(Inner {
                models: params.models,
                local: params.local,
                peek: PeekParams {
                    peek_cap: params.limits.peek_cap,
                    hard_cap: params.limits.hard_cap,
                    budget: Budget::new(params.limits.memory),
                    ..PeekParams::default()
                },
                client,
                retries: Arc::new(RetryBudget::new(params.retries, Instant::now())),
                ids: RequestIds::new(params.seed),
                metrics: params.metrics,
            }),
        }
    }

    /// The memory budget of request bodies.
    pub fn budget(&self) -> &Budget {
        &self.inner.peek.budget
    }
}

impl tower_service::Service<Request<Incoming>> for Stack {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let inner = self.inner.clone();
        Box::pin(async move { Ok(inner.answer(request).await) })
    }
}
