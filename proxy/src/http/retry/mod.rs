//! Asks another endpoint when one failed before its answer was committed.
//!
//! Nothing of the failed answer has reached the client then, so the client sees one answer, whole. A request is tried
//! again without every endpoint that failed it, at most as often as the policy says, within a budget, and only if its
//! body is still here from its first byte. Once an answer is committed the body is let go.

mod budget;

pub use self::budget::{Budget, BudgetParams};

use super::{
    client::{ClientError, Resend},
    hold::{HoldError, Unanswered},
    models::PathPolicy,
    record::Record,
};
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::time::Instant;
use tower_ttft::{
    Error,
    balance::EndpointError,
    endpoint::EndpointId,
    pool::{Excluded, NoEndpoint},
};

/// Tries requests again. Requests carry `Arc<PathPolicy>` and [`Record`] extensions.
#[derive(Clone, Debug)]
pub struct Retry<S> {
    inner: S,
    budget: Arc<Budget>,
    metrics: RetryMetricFamilies,
}

/// No endpoint gave an answer.
#[derive(Debug, thiserror::Error)]
#[error("after {attempts} attempts: {source}")]
pub struct Failed {
    /// How many endpoints were asked.
    pub attempts: u32,
    /// What the last one did.
    #[source]
    pub source: Error,
    /// What the last engine itself had to say, if it said it.
    pub answer: Option<Response<Bytes>>,
}

/// Counts retries.
#[derive(Clone, Debug, Default)]
pub struct RetryMetricFamilies {
    retries: Family<ReasonLabels, Counter>,
    refused: Family<WhyNotLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: Reason,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WhyNotLabels {
    reason: WhyNot,
}

/// Why a request is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case")]
pub enum Reason {
    /// No connection.
    connect,
    /// The connection broke before an answer, or the endpoint was cut.
    broken,
    /// The engine said that it cannot.
    refused,
}

/// Why a request that failed is not tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case")]
pub enum WhyNot {
    /// It was tried often enough.
    attempts,
    /// Too many others were.
    budget,
    /// Its body is gone.
    body,
    /// It failed everywhere.
    endpoints,
}

/// A failure that another endpoint may make good.
struct Failure {
    endpoint: EndpointId,
    reason: Reason,
    answer: Option<Response<Bytes>>,
}

// === impl Retry ===

impl<S> Retry<S> {
    /// Tries requests again that `inner` fails.
    pub fn new(inner: S, budget: Arc<Budget>, metrics: RetryMetricFamilies) -> Self {
        Self {
            inner,
            budget,
            metrics,
        }
    }
}

impl<S, B, RB> tower_service::Service<Request<B>> for Retry<S>
where
    S: tower_service::Service<Request<B>, Response = Response<RB>, Error = Error>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: Resend + Send + 'static,
    RB: 'static,
{
    type Response = Response<RB>;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Self::Response, Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let this = self.clone();
        Box::pin(this.send(request))
    }
}

impl<S> Retry<S> {
    async fn send<B, RB>(mut self, mut request: Request<B>) -> Result<Response<RB>, Error>
    where
        S: tower_service::Service<Request<B>, Response = Response<RB>, Error = Error>,
        B: Resend,
    {
        self.budget.deposit(Instant::now());
        let policy: Arc<PathPolicy> = request.extensions().get().cloned().unwrap_or_default();
        let record = request.extensions().get::<Record>().cloned();
        let mut attempts = 0;
        let mut last: Option<(Error, Option<Response<Bytes>>)> = None;
        loop {
            let again = (attempts < policy.retries)
                .then(|| resend(&request))
                .flatten();
            let unreplayable = again.is_none() && attempts < policy.retries;
            poll_fn(|cx| self.inner.poll_ready(cx)).await?;
            let error = match self.inner.call(request).await {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            if matches!(error.downcast_ref(), Some(NoEndpoint::AllExcluded))
                && let Some((source, answer)) = last
            {
                self.metrics.not(WhyNot::endpoints);
                return Err(failed(attempts, source, answer));
            }
            attempts += 1;
            let (error, failure) = match Failure::of(error) {
                Ok(failure) => failure,
                // Nothing that another endpoint could do better.
                Err(error) => return Err(error),
            };
            tracing::info!(endpoint = %failure.endpoint, %error, "An endpoint failed a request");
            let why_not = if unreplayable {
                Some(WhyNot::body)
            } else if attempts > policy.retries {
                Some(WhyNot::attempts)
            } else if !self.budget.withdraw(Instant::now()) {
                Some(WhyNot::budget)
            } else {
                None
            };
            let (Some(next), None) = (again, why_not) else {
                self.metrics.not(why_not.unwrap_or(WhyNot::attempts));
                return Err(failed(attempts, error, failure.answer));
            };
            self.metrics.retried(failure.reason);
            if let Some(record) = &record {
                record.note(|n| n.retries += 1);
            }
            request = next;
            let mut excluded = request
                .extensions()
                .get::<Excluded>()
                .cloned()
                .unwrap_or_default();
            excluded.0.push(failure.endpoint);
            request.extensions_mut().insert(excluded);
            last = Some((error, failure.answer));
        }
    }
}

fn failed(attempts: u32, source: Error, answer: Option<Response<Bytes>>) -> Error {
    Failed {
        attempts,
        source,
        answer,
    }
    .into()
}

/// The same request again, if its body can be sent again.
fn resend<B: Resend>(request: &Request<B>) -> Option<Request<B>> {
    let mut again = Request::new(request.body().resend()?);
    *again.method_mut() = request.method().clone();
    *again.uri_mut() = request.uri().clone();
    *again.version_mut() = request.version();
    *again.headers_mut() = request.headers().clone();
    *again.extensions_mut() = request.extensions().clone();
    Some(again)
}

// === impl Failure ===

impl Failure {
    /// What an error says of its endpoint; the error itself if it says nothing that another endpoint could make good.
    fn of(mut error: Error) -> Result<(Error, Self), Error> {
        if let Some(unanswered) = error.downcast_mut::<Unanswered>() {
            let reason = match unanswered.source {
                HoldError::Refused(_) => Reason::refused,
                HoldError::Broken(_) => Reason::broken,
                // Slow is not unavailable: elsewhere all would begin anew.
                HoldError::FirstToken(_) | HoldError::Idle(_) => return Err(error),
            };
            let Some(endpoint) = unanswered.endpoint.clone() else {
                return Err(error);
            };
            let answer = unanswered.answer.take();
            let failure = Self {
                endpoint,
                reason,
                answer,
            };
            return Ok((error, failure));
        }
        let Some(at) = error.downcast_ref::<EndpointError>() else {
            return Err(error);
        };
        let reason = match at.source.downcast_ref::<ClientError>() {
            Some(ClientError::HeadTimeout(_)) => return Err(error),
            Some(ClientError::Connect(_) | ClientError::Address(_)) => Reason::connect,
            // The client's own body failed on its way.
            Some(ClientError::Send(e)) if e.is_user() => return Err(error),
            _ => Reason::broken,
        };
        let endpoint = at.endpoint.clone();
        Ok((
            error,
            Self {
                endpoint,
                reason,
                answer: None,
            },
        ))
    }
}

// === impl RetryMetricFamilies ===

impl RetryMetricFamilies {
    /// Makes the counters visible.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "forebay_retries",
            "Requests that were sent to another endpoint because one failed",
            self.retries.clone(),
        );
        registry.register(
            "forebay_retries_refused",
            "Requests that failed at an endpoint and were not sent to another",
            self.refused.clone(),
        );
    }

    /// Retries for this reason.
    pub fn retries(&self, reason: Reason) -> u64 {
        self.retries.get_or_create(&ReasonLabels { reason }).get()
    }

    /// Failures that were final for this reason.
    pub fn refused(&self, reason: WhyNot) -> u64 {
        self.refused.get_or_create(&WhyNotLabels { reason }).get()
    }

    fn retried(&self, reason: Reason) {
        self.retries.get_or_create(&ReasonLabels { reason }).inc();
    }

    fn not(&self, reason: WhyNot) {
        self.refused.get_or_create(&WhyNotLabels { reason }).inc();
    }
}
