//! The tower service over a pool.
//!
//! A request that finds an endpoint ready is sent at once. One that finds none waits in the pool's queue, in order, until
//! the set changes or its time is over; it has no endpoint until then. Dropping the call or the answer's body, at
//! whatever stage, releases all that it held at once.

use crate::{
    Error,
    endpoint::EndpointId,
    observe::ObserveBody,
    peek::{InferenceRequest, PeekError},
    pool::{Decision, Endpoint, Excluded, NoEndpoint, Pick, PickRequest, Pool, Ticket},
    prompt::Prompt,
    queue::QueueError,
};
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderName, Request, Response};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::time::Instant;
use tower_service::Service;

/// Where a request's id is found, if its layers set one.
static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Ids of more bytes than this are not kept.
const MAX_ID: usize = 128;

/// Builds a service for a target, as Linkerd's trait of this name.
pub trait NewService<T> {
    /// What is built.
    type Service;
    /// Builds it.
    fn new_service(&self, target: T) -> Self::Service;
}

/// Sends each request to the endpoint that its pool picks. The request must carry [`crate::peek::InferenceRequest`] and
/// [`crate::prompt::Prompt`] extensions and may carry [`crate::pool::Excluded`]; the response carries an
/// `Arc<Decision>`, the chosen `EndpointId` and its [`Endpoint`] as extensions; its body is an `ObserveBody` that holds
/// the ticket. Errors of the endpoint's service come back as [`EndpointError`], which names the endpoint; those of the
/// pool as [`NoEndpoint`] or [`QueueError`].
///
/// The endpoint's service is built for each request, so a `NewService` should share what is dear (connections) by address.
#[derive(Clone, Debug)]
pub struct Balance<N> {
    pool: Pool,
    new: N,
}

/// The body of an answer of [`Balance`].
pub type BalanceBody<B> = ObserveBody<CutBody<B>, Ticket>;

/// A failure of one endpoint.
#[derive(Debug, thiserror::Error)]
#[error("endpoint {endpoint}: {source}")]
pub struct EndpointError {
    /// Which.
    pub endpoint: EndpointId,
    /// What failed.
    #[source]
    pub source: Error,
}

/// The endpoint is gone: it was cut or removed while it had the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is gone: its process ended, or it left the pool")]
pub struct Cut;

/// The request lacks an extension that an earlier layer should have set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request carries no {0}; put its layer before the balancer")]
pub struct MissingExtension(&'static str);

pin_project! {
    /// Ends with an error as soon as the endpoint is cut: an engine that is gone may keep its connections open.
    pub struct CutBody<B> {
        #[pin]
        inner: B,
        cut: BoxFuture<'static, ()>,
        endpoint: EndpointId,
        done: bool,
    }
}

// === impl NewService ===

impl<T, S, F: Fn(T) -> S> NewService<T> for F {
    type Service = S;

    fn new_service(&self, target: T) -> S {
        self(target)
    }
}

// === impl Balance ===

impl<N> Balance<N> {
    /// Balances over a pool; `new` builds a service for each endpoint that is picked.
    pub fn new(pool: Pool, new: N) -> Self {
        Self { pool, new }
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl<N, S, B, RB> Service<Request<B>> for Balance<N>
where
    N: NewService<Endpoint, Service = S> + Clone + Send + 'static,
    S: Service<Request<B>, Response = Response<RB>> + Send + 'static,
    S::Error: Into<Error>,
    S::Future: Send + 'static,
    B: Send + 'static,
    RB: Body<Data = Bytes> + Send + 'static,
    RB::Error: Into<Error>,
{
    type Response = Response<BalanceBody<RB>>;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Self::Response, Error>>;

    /// Always ready: the queue's bounds are kept by `call`, which knows how large a request is.
    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<B>) -> Self::Future {
        let (pool, new) = (self.pool.clone(), self.new.clone());
        Box::pin(async move {
            let (pick, excluded, api, bytes) = read(&req)?;
            let ticket = place(&pool, &pick, &excluded, bytes).await?;
            let service = new.new_service(ticket.endpoint().clone());
            send(ticket, service, req, api).await
        })
    }
}

/// What the pool needs to know of a request.
fn read<B>(
    req: &Request<B>,
) -> Result<(PickRequest, Excluded, crate::peek::Api, usize), MissingExtension> {
    let ext = req.extensions();
    let inference = ext
        .get::<InferenceRequest>()
        .ok_or(MissingExtension("InferenceRequest"))?;
    let prompt = ext.get::<Prompt>().ok_or(MissingExtension("Prompt"))?;
    let request_id = req
        .headers()
        .get(&REQUEST_ID)
        .and_then(|v| v.to_str().ok())
        .filter(|id| id.len() <= MAX_ID)
        .map(Arc::from);
    let pick = PickRequest {
        prompt: prompt.clone(),
        stream: inference.stream,
        max_tokens: inference.max_tokens,
        request_id,
    };
    let excluded = ext.get::<Excluded>().cloned().unwrap_or_default();
    Ok((pick, excluded, inference.api, inference.body.len()))
}

/// An endpoint, at once or after a wait.
async fn place(
    pool: &Pool,
    req: &PickRequest,
    excluded: &Excluded,
    bytes: usize,
) -> Result<Ticket, Error> {
    let now = Instant::now();
    // Nobody overtakes who waits already.
    if pool.queue().is_empty() {
        match pool.pick(req, excluded, now) {
            Pick::Dispatch(ticket) => return Ok(ticket),
            Pick::None(why) => return Err(why.into()),
            Pick::Wait(_) => {}
        }
    }
    let place = pool.queue().enter(bytes, now)?;
    let deadline = now + pool.policy().no_endpoint_wait;
    let wait = async {
        place.first().await;
        // Subscribed before the pick, so that no change between the two is missed.
        let mut changed = pool.changed();
        loop {
            match pool.pick(req, excluded, Instant::now()) {
                Pick::Dispatch(ticket) => return Ok(ticket),
                Pick::None(why) => return Err(why),
                Pick::Wait(until) => {
                    let until = until.unwrap_or(deadline).min(deadline);
                    // An error says that the pool is gone, which `pool` keeps from happening.
                    let _ = tokio::time::timeout_at(until, changed.changed()).await;
                }
            }
        }
    };
    match tokio::time::timeout_at(deadline, wait).await {
        Ok(picked) => picked.map_err(|why: NoEndpoint| why.into()),
        Err(_) => {
            pool.queue().dropped(QueueError::Deadline);
            Err(QueueError::Deadline.into())
        }
    }
}

/// Sends a request where its ticket says.
async fn send<S, B, RB>(
    mut ticket: Ticket,
    mut service: S,
    req: Request<B>,
    api: crate::peek::Api,
) -> Result<Response<BalanceBody<RB>>, Error>
where
    S: Service<Request<B>, Response = Response<RB>>,
    S::Error: Into<Error>,
    RB: Body<Data = Bytes>,
{
    let endpoint = ticket.endpoint().id().clone();
    let cut = ticket.cut();
    let sent = async {
        std::future::poll_fn(|cx| service.poll_ready(cx))
            .await
            .map_err(Into::into)?;
        ticket.sent(Instant::now());
        service.call(req).await.map_err(Into::into)
    };
    let result: Result<Response<RB>, Error> = tokio::select! {
        biased;
        result = sent => result,
        () = cut => Err(Cut.into()),
    };
    match result {
        Ok(rsp) => Ok(answer(rsp, ticket, api)),
        Err(source) => {
            if !is_upload(&source) {
                ticket.fail(Instant::now());
            }
            Err(EndpointError { endpoint, source }.into())
        }
    }
}

/// Whether it was the client's own body that failed on its way: no failure of the endpoint, or one client could open
/// the breakers of all. The ticket then ends as if the client had left.
fn is_upload(error: &Error) -> bool {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(&**error);
    while let Some(error) = next {
        if error.is::<PeekError>() {
            return true;
        }
        next = error.source();
    }
    false
}

/// The answer, with what is known of it, its body watched.
fn answer<RB: Body<Data = Bytes>>(
    rsp: Response<RB>,
    mut ticket: Ticket,
    api: crate::peek::Api,
) -> Response<BalanceBody<RB>> {
    let (mut head, body) = rsp.into_parts();
    ticket.responded(head.status);
    let decision: Arc<Decision> = ticket.decision().clone();
    let endpoint = ticket.endpoint().clone();
    let body = CutBody {
        inner: body,
        cut: Box::pin(ticket.cut()),
        endpoint: endpoint.id().clone(),
        done: false,
    };
    let body = ObserveBody::new(body, api, head.status, &head.headers, ticket);
    head.extensions.insert(decision);
    head.extensions.insert(endpoint.id().clone());
    head.extensions.insert(endpoint);
    Response::from_parts(head, body)
}

// === impl CutBody ===

impl<B> Body for CutBody<B>
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
        let this = self.project();
        if *this.done {
            return Poll::Ready(None);
        }
        // What has arrived is passed on first.
        if let Poll::Ready(frame) = this.inner.poll_frame(cx) {
            return Poll::Ready(match frame {
                Some(Ok(frame)) => Some(Ok(frame)),
                Some(Err(e)) => {
                    *this.done = true;
                    Some(Err(EndpointError {
                        endpoint: this.endpoint.clone(),
                        source: e.into(),
                    }
                    .into()))
                }
                None => {
                    *this.done = true;
                    None
                }
            });
        }
        if this.cut.as_mut().poll(cx).is_ready() {
            *this.done = true;
            return Poll::Ready(Some(Err(EndpointError {
                endpoint: this.endpoint.clone(),
                source: Cut.into(),
            }
            .into())));
        }
        Poll::Pending
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl<B: fmt::Debug> fmt::Debug for CutBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CutBody")
            .field("endpoint", &self.endpoint)
            .field("done", &self.done)
            .finish()
    }
}

#[cfg(test)]
mod tests;
