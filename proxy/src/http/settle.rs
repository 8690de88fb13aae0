//! The end of a request: one line in the log and its counts, once its answer's body is done with, however that came.

use super::{
    Body,
    record::{Outcome, Record},
};
use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio::time::Instant;
use tower_ttft::{Error, peek::Api};

/// Counts requests.
#[derive(Clone, Debug)]
pub struct SettleMetricFamilies {
    requests: Family<RequestLabels, Counter>,
    active: Family<ApiLabels, Gauge>,
    first_token: Family<ModelLabels, Histogram>,
    duration: Family<ModelLabels, Histogram>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    api: ApiLabel,
    model: Arc<str>,
    /// 0 if the client left before there was one.
    status: u16,
    outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ApiLabels {
    api: ApiLabel,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    /// A pool's name; clients cannot make new ones.
    model: Arc<str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case")]
enum ApiLabel {
    chat,
    completions,
    responses,
    messages,
    embeddings,
    score,
    rerank,
    audio,
    other,
}

/// Settles a request when it is dropped.
#[derive(Debug)]
pub struct Settlement {
    record: Record,
    metrics: SettleMetricFamilies,
    active: Gauge,
    status: Option<StatusCode>,
    /// The body came to its end.
    ended: bool,
}

/// A body that settles its request when it is done with.
struct Settled {
    inner: Body,
    settlement: Settlement,
}

// === impl Settlement ===

impl Settlement {
    /// A request begins. If nothing else comes of it, its client has left.
    pub fn begin(record: Record, metrics: &SettleMetricFamilies) -> Self {
        let api = record.note(|n| n.api).into();
        let active = metrics.active.get_or_create(&ApiLabels { api }).clone();
        active.inc();
        Self {
            record,
            metrics: metrics.clone(),
            active,
            status: None,
            ended: false,
        }
    }

    /// Its answer goes out; the rest is up to the body.
    pub fn answered(mut self, response: Response<Body>) -> Response<Body> {
        self.status = Some(response.status());
        response.map(|inner| {
            if inner.is_end_stream() {
                self.ended = true;
                drop(self);
                return inner;
            }
            Settled {
                inner,
                settlement: self,
            }
            .boxed_unsync()
        })
    }

    fn outcome(&self, noted: Option<Outcome>) -> Outcome {
        let Some(status) = self.status else {
            return Outcome::cancelled;
        };
        match noted {
            // An error of the engine's is a refusal if its status blames the client.
            None | Some(Outcome::engine_error) if status.is_client_error() => Outcome::refused,
            Some(outcome) => outcome,
            None if !self.ended => Outcome::cancelled,
            None if status.is_server_error() => Outcome::engine_error,
            None => Outcome::complete,
        }
    }
}

impl Drop for Settlement {
    fn drop(&mut self) {
        self.active.dec();
        let notes = self.record.note(|notes| notes.clone());
        let outcome = self.outcome(notes.outcome);
        let took = Instant::now().saturating_duration_since(notes.started);
        let model = notes.model.clone().unwrap_or_else(|| "".into());
        let status = self.status.map_or(0, |s| s.as_u16());
        let metrics = &self.metrics;
        metrics
            .requests
            .get_or_create(&RequestLabels {
                api: notes.api.into(),
                model: model.clone(),
                status,
                outcome,
            })
            .inc();
        let labels = ModelLabels { model };
        // What was given up says how long a client waits, not how long an engine takes.
        if outcome == Outcome::complete {
            metrics
                .duration
                .get_or_create(&labels)
                .observe(took.as_secs_f64());
        }
        if let Some(ttft) = notes.first_token {
            metrics
                .first_token
                .get_or_create(&labels)
                .observe(ttft.as_secs_f64());
        }
        // Once for each request, and only with the last word of an answer that came whole: a stream may correct its
        // counts.
        if let (Outcome::complete, Some(usage), Some(lesson)) =
            (outcome, notes.usage, &notes.lesson)
        {
            lesson.learn(usage);
        }
        let usage = notes.usage.unwrap_or_default();
        tracing::info!(
            target: "forebay::access",
            id = %notes.id,
            api = ?notes.api,
            model = %labels.model,
            endpoint = notes.endpoint.as_ref().map(tracing::field::display),
            status,
            outcome = ?outcome,
            retries = notes.retries,
            prompt_tokens = notes.usage.map(|_| usage.prompt_tokens),
            completion_tokens = notes.usage.map(|_| usage.completion_tokens),
            cached_tokens = usage.cached_tokens,
            ttft_ms = notes.first_token.map(|t| t.as_secs_f64() * 1e3),
            took_ms = took.as_secs_f64() * 1e3,
            "request"
        );
    }
}

// === impl Settled ===

impl http_body::Body for Settled {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        let frame = ready!(Pin::new(&mut this.inner).poll_frame(cx));
        match &frame {
            Some(Err(_)) => {
                this.settlement.record.outcome(Outcome::broken);
            }
            // A body of known length is not polled again behind its last frame.
            Some(Ok(_)) => this.settlement.ended |= this.inner.is_end_stream(),
            None => this.settlement.ended = true,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

// === impl ApiLabel ===

impl From<Api> for ApiLabel {
    fn from(api: Api) -> Self {
        match api {
            Api::Chat => Self::chat,
            Api::Completions => Self::completions,
            Api::Responses => Self::responses,
            Api::Messages => Self::messages,
            Api::Embeddings => Self::embeddings,
            Api::Score => Self::score,
            Api::Rerank => Self::rerank,
            Api::Audio => Self::audio,
            Api::Other => Self::other,
        }
    }
}

// === impl SettleMetricFamilies ===

impl Default for SettleMetricFamilies {
    fn default() -> Self {
        // From a warm cache on an idle engine to the longest prefill that anyone waits for, seconds.
        let seconds: fn() -> Histogram = || {
            Histogram::new([
                0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0,
            ])
        };
        Self {
            requests: Family::default(),
            active: Family::default(),
            first_token: Family::new_with_constructor(seconds),
            duration: Family::new_with_constructor(seconds),
        }
    }
}

impl SettleMetricFamilies {
    /// Makes the counters visible.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "forebay_requests",
            "Requests that ended, by how",
            self.requests.clone(),
        );
        registry.register(
            "forebay_requests_active",
            "Requests that came in and have not ended",
            self.active.clone(),
        );
        registry.register(
            "forebay_request_first_token_seconds",
            "From a request's arrival to the first token of its stream",
            self.first_token.clone(),
        );
        registry.register(
            "forebay_request_duration_seconds",
            "From a request's arrival to the end of its whole answer",
            self.duration.clone(),
        );
    }

    /// Requests of this API that are under way.
    pub fn active(&self, api: Api) -> i64 {
        let labels = ApiLabels { api: api.into() };
        self.active.get_or_create(&labels).get()
    }

    /// Requests that ended like this.
    pub fn requests(&self, api: Api, model: &str, status: u16, outcome: Outcome) -> u64 {
        self.requests
            .get_or_create(&RequestLabels {
                api: api.into(),
                model: model.into(),
                status,
                outcome,
            })
            .get()
    }
}
