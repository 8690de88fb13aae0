//! Keeps an answer back until it is known to be one.
//!
//! vLLM says `200` before it has looked at a prompt, so a status alone commits to nothing. An answer is let go at its
//! first complete event (of at most 64 KiB), at the first data of a body that does not stream, or at its end. Until then
//! an answer on the list of [`Refusal`]s, a broken connection or a cut endpoint is an error that names the endpoint, and
//! the layer above may ask another. A stream that says nothing for long is let go all the same, with comments to keep it
//! alive; what goes wrong after that is said in the stream.
//!
//! A stream that dies after it was let go ends with an event that says so and then abnormally. vLLM itself ends such a
//! stream with an error event, `[DONE]` and a clean end; here the error event is the last thing a client sees.

mod events;
mod plain;
mod refusal;
mod stream;

pub use self::{
    plain::PlainBody,
    refusal::Refusal,
    stream::{Aborted, StreamBody},
};

use self::{
    events::Read,
    stream::{Step, Stream},
};
use super::{
    client::SentAt,
    models::PathPolicy,
    record::{Outcome, Record},
};
use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use memchr::memmem;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower_ttft::{
    Error,
    endpoint::EndpointId,
    observe::{EventKind, ObserveBody, classify_json},
    peek::{Api, InferenceRequest},
    pool::Endpoint,
};

/// Of an error answer this much is looked at.
const MAX_ERROR: usize = 64 * 1024;

/// Holds answers of `S` back. Requests carry `Arc<PathPolicy>` and [`Record`] extensions.
#[derive(Clone, Debug)]
pub struct Hold<S> {
    inner: S,
    metrics: HoldMetricFamilies,
}

/// The body of an answer that was let go.
#[derive(Debug)]
pub enum HeldBody<B> {
    /// Of a stream.
    Stream(StreamBody<B>),
    /// Of anything else.
    Plain(PlainBody<ObserveBody<B, Record>>),
}

/// An answer that is none, from an endpoint that should not be asked again.
#[derive(Debug, thiserror::Error)]
#[error("endpoint {endpoint:?}: {source}")]
pub struct Unanswered {
    /// Which.
    pub endpoint: Option<EndpointId>,
    /// Why.
    #[source]
    pub source: HoldError,
    /// The engine's own words, where they are a whole answer.
    pub answer: Option<Response<Bytes>>,
}

/// What went wrong with an answer.
#[derive(Debug, thiserror::Error)]
pub enum HoldError {
    /// The engine says that another one should be asked.
    #[error("{0}")]
    Refused(Refusal),
    /// The connection broke, or the endpoint was cut.
    #[error("the answer broke off: {0}")]
    Broken(#[source] Error),
    /// No first token in time.
    #[error("no first token within {0:?}")]
    FirstToken(Duration),
    /// The answer paused for too long.
    #[error("the answer paused for {0:?}")]
    Idle(Duration),
}

/// Counts what was held back.
#[derive(Clone, Debug, Default)]
pub struct HoldMetricFamilies {
    refusals: Family<RefusalLabels, Counter>,
    silent: Counter,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    reason: Refusal,
}

/// What hold needs of a request once the request is gone.
struct Held {
    api: Api,
    policy: Arc<PathPolicy>,
    record: Record,
    metrics: HoldMetricFamilies,
}

// === impl Hold ===

impl<S> Hold<S> {
    /// Holds answers of `inner` back.
    pub fn new(inner: S, metrics: HoldMetricFamilies) -> Self {
        Self { inner, metrics }
    }
}

impl<S, B, RB> tower_service::Service<Request<B>> for Hold<S>
where
    S: tower_service::Service<Request<B>, Response = Response<RB>, Error = Error>,
    S::Future: Send + 'static,
    RB: Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<Error> + Send,
{
    type Response = Response<HeldBody<RB>>;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Self::Response, Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let extensions = request.extensions();
        let api = extensions
            .get::<InferenceRequest>()
            .map_or(Api::Other, |r| r.api);
        let held = Held {
            api,
            policy: extensions.get().cloned().unwrap_or_default(),
            record: extensions
                .get()
                .cloned()
                .unwrap_or_else(|| Record::new("".into(), api)),
            metrics: self.metrics.clone(),
        };
        let answer = self.inner.call(request);
        Box::pin(async move { held.hold(answer.await?).await })
    }
}

// === impl Held ===

impl Held {
    async fn hold<B>(self, response: Response<B>) -> Result<Response<HeldBody<B>>, Error>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Error>,
    {
        let (parts, body) = response.into_parts();
        let endpoint = parts.extensions.get::<EndpointId>().cloned();
        let member = parts.extensions.get::<Endpoint>().cloned();
        let sent = parts
            .extensions
            .get::<SentAt>()
            .map_or_else(Instant::now, |sent| sent.0);
        self.record.note(|n| n.endpoint.clone_from(&endpoint));
        let held = if parts.status == StatusCode::OK && is_events(&parts.headers) {
            let stream = Stream::new(body, self.api, self.record.clone(), sent, &self.policy);
            self.stream(stream).await.map(HeldBody::Stream)
        } else {
            let body = ObserveBody::new(
                body,
                self.api,
                parts.status,
                &parts.headers,
                self.record.clone(),
            );
            let deadline = sent + self.policy.first_token_timeout;
            match tokio::time::timeout_at(deadline, self.plain(&parts, body)).await {
                Ok(held) => held.map(HeldBody::Plain),
                Err(_) => Err((HoldError::FirstToken(self.policy.first_token_timeout), None)),
            }
        };
        match held {
            Ok(body) => Ok(Response::from_parts(parts, body)),
            Err((source, answer)) => {
                if let HoldError::Refused(refusal) = source {
                    self.metrics.refused(refusal);
                    // A whole answer, for all that its ticket could see of it.
                    if answer.is_some()
                        && refusal == Refusal::aborted
                        && let Some(member) = member
                    {
                        member.fail(Instant::now());
                    }
                }
                Err(Unanswered {
                    endpoint,
                    source,
                    answer: answer.map(|body| Response::from_parts(parts, body)),
                }
                .into())
            }
        }
    }

    async fn stream<B>(
        &self,
        mut stream: Stream<B>,
    ) -> Result<StreamBody<B>, (HoldError, Option<Bytes>)>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Error>,
    {
        let head_after = tokio::time::sleep(self.policy.head_after);
        tokio::pin!(head_after);
        loop {
            let step = tokio::select! {
                biased;
                step = std::future::poll_fn(|cx| stream.poll_step(cx)) => step,
                () = &mut head_after => {
                    self.metrics.silent.inc();
                    return Ok(StreamBody::new(stream, true));
                }
            };
            match step {
                Step::Read(Read::Nothing) if !stream.is_full() => {}
                Step::Read(Read::Nothing) => return Ok(StreamBody::new(stream, false)),
                Step::Read(Read::Events(kind)) => {
                    return match Refusal::of_event(&kind) {
                        Some(refusal) => Err((HoldError::Refused(refusal), None)),
                        None => Ok(StreamBody::new(stream, false)),
                    };
                }
                Step::Read(Read::Error(kind)) => {
                    return match Refusal::of_event(&kind) {
                        Some(refusal) if stream.events().count() == 0 => {
                            Err((HoldError::Refused(refusal), None))
                        }
                        _ => Ok(StreamBody::failing(stream)),
                    };
                }
                Step::End => return Ok(StreamBody::new(stream, false)),
                Step::Failed(error) => return Err((error, None)),
            }
        }
    }

    /// Waits for the first data of an answer, or for all of it if it may be a refusal.
    async fn plain<B>(
        &self,
        parts: &http::response::Parts,
        body: ObserveBody<B, Record>,
    ) -> Result<PlainBody<ObserveBody<B, Record>>, (HoldError, Option<Bytes>)>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Error>,
    {
        let mut body = Box::pin(body);
        let broken = |error: B::Error| (HoldError::Broken(error.into()), None);
        let idle = self.policy.idle_timeout;
        let record = self.record.clone();
        if Refusal::is_possible(parts.status) && !is_encoded(&parts.headers) {
            let mut seen = BytesMut::new();
            while seen.len() < MAX_ERROR {
                match body.frame().await {
                    Some(Ok(frame)) => {
                        if let Ok(data) = frame.into_data() {
                            seen.extend_from_slice(&data);
                        }
                    }
                    Some(Err(error)) => return Err(broken(error)),
                    None => {
                        let seen = seen.freeze();
                        let kind = classify_json(&seen).kind;
                        if let Some(refusal) = Refusal::of_answer(parts.status, &kind) {
                            return Err((HoldError::Refused(refusal), Some(seen)));
                        }
                        return Ok(PlainBody::new(Some(Frame::data(seen)), None, record, idle));
                    }
                }
            }
            let first = Frame::data(seen.freeze());
            return Ok(PlainBody::new(Some(first), Some(body), record, idle));
        }
        if body.is_end_stream() {
            return Ok(PlainBody::new(None, None, record, idle));
        }
        let first = match body.frame().await {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Err(broken(error)),
            None => return Ok(PlainBody::new(None, None, record, idle)),
        };
        // A short answer is one frame.
        if let Some(data) = first.data_ref()
            && data.len() <= MAX_ERROR
            && body.is_end_stream()
            && memmem::find(data, b"\"abort\"").is_some()
            && classify_json(data).kind == EventKind::AbortEmpty
        {
            return Err((HoldError::Refused(Refusal::aborted), Some(data.clone())));
        }
        Ok(PlainBody::new(Some(first), Some(body), record, idle))
    }
}

fn is_encoded(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_ENCODING)
        .is_some_and(|v| v != "identity")
}

/// Whether a body is a stream of events that can be read.
fn is_events(headers: &HeaderMap) -> bool {
    let is = |value: &[u8]| {
        let kind = value.split(|b| *b == b';').next().unwrap_or_default();
        kind.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
    };
    !is_encoded(headers)
        && headers
            .get(header::CONTENT_TYPE)
            .is_some_and(|v| is(v.as_bytes()))
}

// === impl HoldError ===

impl HoldError {
    /// A word for machines.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Refused(_) => "endpoint_refused",
            Self::Broken(_) => "endpoint_failed",
            Self::FirstToken(_) => "first_token_timeout",
            Self::Idle(_) => "idle_timeout",
        }
    }

    /// What clients are told: nothing of an engine's own words or whereabouts.
    pub fn message(&self) -> String {
        match self {
            Self::Refused(refusal) => format!("{refusal}; send the request again"),
            Self::Broken(_) => {
                "the engine failed before its answer was complete; send the request again".into()
            }
            Self::FirstToken(timeout) => format!(
                "the engine gave no first token within {} s; the pool's firstTokenTimeout allows more",
                timeout.as_secs_f64()
            ),
            Self::Idle(timeout) => format!(
                "the engine's answer paused for more than {} s; the pool's idleTimeout allows more",
                timeout.as_secs_f64()
            ),
        }
    }

    /// How a request ends that ends like this.
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::Refused(_) | Self::Broken(_) => Outcome::failed,
            Self::FirstToken(_) | Self::Idle(_) => Outcome::timeout,
        }
    }
}

// === impl HeldBody ===

impl<B> Body for HeldBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Error>,
{
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self.get_mut() {
            Self::Stream(body) => Pin::new(body).poll_frame(cx),
            Self::Plain(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Stream(body) => body.is_end_stream(),
            Self::Plain(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Stream(body) => body.size_hint(),
            Self::Plain(body) => body.size_hint(),
        }
    }
}

// === impl HoldMetricFamilies ===

impl HoldMetricFamilies {
    /// Makes the counters visible.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "forebay_engine_refusals",
            "Answers by which engines said that another one should be asked",
            self.refusals.clone(),
        );
        registry.register(
            "forebay_silent_streams",
            "Streams that were committed without an event because their engine was silent for long",
            self.silent.clone(),
        );
    }

    fn refused(&self, reason: Refusal) {
        self.refusals.get_or_create(&RefusalLabels { reason }).inc();
    }

    /// Refusals for this reason.
    pub fn refusals(&self, reason: Refusal) -> u64 {
        self.refusals.get_or_create(&RefusalLabels { reason }).get()
    }
}

#[cfg(test)]
mod tests;
