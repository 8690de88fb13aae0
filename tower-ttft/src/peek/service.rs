//! The layer.

use super::{
    body::{Guard, ReplayBody},
    budget::{Budget, Share},
    multipart,
    read::{is_encoded, read},
    request::{Api, BodyRead, InferenceRequest},
};
use crate::Error;
use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body::Body;
use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower_layer::Layer;
use tower_service::Service;

/// Of a form that is over the peek cap, this much is read: small fields come before the file.
const FORM_PREFIX: usize = 64 * 1024;

/// How much is asked of the budget at once, at least, for a body of unknown length.
const MIN_STEP: usize = 16 * 1024;

/// How bodies are read.
#[derive(Clone, Debug)]
pub struct PeekParams {
    /// A body of more bytes than this is streamed on unread.
    pub peek_cap: usize,
    /// A body of more bytes than this is refused with [`PeekError::TooLarge`].
    pub hard_cap: u64,
    /// The memory for the bodies of all requests.
    pub budget: Budget,
    /// How long reading stops when the budget is used up, before the body is streamed on unread.
    pub budget_wait: Duration,
    /// How long an upload may make no progress, before it is refused with [`PeekError::Stalled`].
    pub upload_idle: Duration,
}

/// Why a request cannot be passed on.
#[derive(Debug, thiserror::Error)]
pub enum PeekError {
    /// The body is over the hard cap (413).
    #[error("the request body is over the cap of {cap} bytes")]
    TooLarge {
        /// The cap in bytes.
        cap: u64,
    },
    /// The client stopped sending its body (408).
    #[error("the request body made no progress for {idle:?}")]
    Stalled {
        /// For how long it did.
        idle: Duration,
    },
    /// The client's connection broke within the body.
    #[error("the request body broke off: {0}")]
    Body(#[source] Error),
}

/// Makes [`Peek`]s.
#[derive(Clone, Debug)]
pub struct PeekLayer {
    params: PeekParams,
}

/// Reads each request's body and passes the request on with a [`ReplayBody`] and an [`InferenceRequest`] extension.
///
/// It is always ready; the inner service is waited for once the body is in, so that a slow upload holds no place in
/// what comes behind.
#[derive(Clone, Debug)]
pub struct Peek<S> {
    params: PeekParams,
    inner: S,
}

/// What became of reading a body.
enum Buffered {
    /// All of it is here.
    Whole(Bytes, Option<HeaderMap>),
    /// Only this much was read, and why.
    Partly(VecDeque<Bytes>, BodyRead),
}

// === impl PeekParams ===

impl Default for PeekParams {
    /// 16 MiB per body (prompts of 128k tokens are about 0.6 MB, five images 8 MB), 64 MiB hard, 256 MiB in all, 2 s for
    /// the budget, 30 s for the client.
    fn default() -> Self {
        Self {
            peek_cap: 16 << 20,
            hard_cap: 64 << 20,
            budget: Budget::new(256 << 20),
            budget_wait: Duration::from_secs(2),
            upload_idle: Duration::from_secs(30),
        }
    }
}

// === impl PeekLayer ===

impl PeekLayer {
    /// A layer that reads bodies by `params`.
    pub fn new(params: PeekParams) -> Self {
        Self { params }
    }
}

impl<S> Layer<S> for PeekLayer {
    type Service = Peek<S>;

    fn layer(&self, inner: S) -> Peek<S> {
        Peek {
            params: self.params.clone(),
            inner,
        }
    }
}

// === impl Peek ===

impl<S, B> Service<Request<B>> for Peek<S>
where
    S: Service<Request<ReplayBody<B>>> + Clone + Send + 'static,
    S::Error: Into<Error>,
    S::Future: Send,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Error>,
{
    type Response = S::Response;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<B>) -> Self::Future {
        let params = self.params.clone();
        let mut inner = self.inner.clone();
        Box::pin(async move {
            let req = params.peek(req).await?;
            poll_fn(|cx| inner.poll_ready(cx))
                .await
                .map_err(Into::into)?;
            inner.call(req).await.map_err(Into::into)
        })
    }
}

// === impl PeekParams ===

impl PeekParams {
    /// Reads the body of `req` as far as it may be read.
    pub async fn peek<B>(&self, req: Request<B>) -> Result<Request<ReplayBody<B>>, PeekError>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: Into<Error>,
    {
        let (mut head, mut rest) = req.into_parts();
        let api = Api::from_path(head.uri.path());
        let mut guard = Guard {
            left: self.hard_cap,
            cap: self.hard_cap,
            idle: self.upload_idle,
            sleep: None,
        };
        let (info, body) = match self.buffer(&mut rest, &head.headers, &mut guard).await? {
            Buffered::Whole(body, trailers) => (
                read(api, &head.headers, body.clone()),
                ReplayBody::whole(body, trailers),
            ),
            Buffered::Partly(ahead, why) => {
                let mut info = InferenceRequest::unread(api, why);
                if multipart::boundary(&head.headers).is_some() {
                    let prefix: Vec<u8> =
                        ahead.iter().flatten().copied().take(FORM_PREFIX).collect();
                    let form = read(api, &head.headers, prefix.into());
                    info.model = form.model;
                    info.stream = form.stream;
                    info.duplicates = form.duplicates;
                }
                (info, ReplayBody::streamed(ahead, rest, guard))
            }
        };
        head.extensions.insert(info);
        Ok(Request::from_parts(head, body))
    }

    async fn buffer<B>(
        &self,
        body: &mut B,
        headers: &HeaderMap,
        guard: &mut Guard,
    ) -> Result<Buffered, PeekError>
    where
        B: Body<Data = Bytes> + Unpin,
        B::Error: Into<Error>,
    {
        if body.is_end_stream() {
            return Ok(Buffered::Whole(Bytes::new(), None));
        }
        let size = body.size_hint();
        if size.lower() > self.hard_cap {
            return Err(PeekError::TooLarge { cap: self.hard_cap });
        }
        if is_encoded(headers) {
            return Ok(Buffered::Partly(VecDeque::new(), BodyRead::Encoded));
        }
        let mut cap = self.peek_cap;
        if size.lower() > self.peek_cap as u64 {
            if multipart::boundary(headers).is_none() {
                return Ok(Buffered::Partly(VecDeque::new(), BodyRead::TooLarge));
            }
            cap = cap.min(FORM_PREFIX);
        }
        // A body that says how long it is pays once; another one pays as it grows.
        let expected = match size.exact() {
            Some(exact) => usize::try_from(exact).unwrap_or(cap).min(cap),
            None => 0,
        };
        let mut share = Share::none();
        let mut wait = self.budget_wait;
        if expected > 0 {
            match self.budget.share(expected, wait).await {
                Some(paid) => share = paid,
                None => return Ok(Buffered::Partly(VecDeque::new(), BodyRead::NoBudget)),
            }
        }
        let mut buffer = Vec::with_capacity(expected);
        let partly = |buffer, share: Share, frame, why| {
            let ahead = VecDeque::from_iter([share.pay_for(buffer), frame]);
            Ok(Buffered::Partly(ahead, why))
        };
        while let Some(frame) = next_frame(body, guard).await? {
            let data = match frame.into_data() {
                Ok(data) => data,
                Err(frame) => {
                    // Nothing comes behind trailers.
                    return Ok(Buffered::Whole(
                        share.pay_for(buffer),
                        frame.into_trailers().ok(),
                    ));
                }
            };
            let len = buffer.len() + data.len();
            if len > cap {
                return partly(buffer, share, data, BodyRead::TooLarge);
            }
            if len > share.bytes() {
                let step = len.next_power_of_two().max(MIN_STEP).min(cap) - share.bytes();
                // All waits of a body together are bounded, not each.
                let asked = Instant::now();
                match self.budget.share(step, wait).await {
                    Some(more) => share.add(more),
                    None => return partly(buffer, share, data, BodyRead::NoBudget),
                }
                wait = wait.saturating_sub(Instant::now().saturating_duration_since(asked));
                buffer.reserve_exact(share.bytes() - buffer.len());
            }
            // Copied even where it is the only frame: a frame is a slice of the connection's read buffer and would keep
            // all of that, unaccounted, for as long as the request waits.
            buffer.extend_from_slice(&data);
        }
        Ok(Buffered::Whole(share.pay_for(buffer), None))
    }
}

async fn next_frame<B>(
    body: &mut B,
    guard: &mut Guard,
) -> Result<Option<http_body::Frame<Bytes>>, PeekError>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<Error>,
{
    let mut body = pin!(body);
    poll_fn(|cx| {
        let polled = body.as_mut().poll_frame(cx);
        guard.watch(polled, cx)
    })
    .await
    .transpose()
}

#[cfg(test)]
mod tests;
