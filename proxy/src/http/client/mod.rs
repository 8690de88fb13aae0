//! HTTP/1.1 to engines.
//!
//! Each connection carries one request at a time and belongs to the request that uses it: dropping the response future
//! or the response body before its end closes the socket at once, whatever stage the request is at, because that is how
//! an engine learns that nobody waits for the answer any more. A connection whose answer was read to its end goes back
//! to a small pool, for less time than engines keep it (uvicorn closes after 5 s).
//!
//! A pooled connection may still be closed by the engine just as it is used again. If it dies before any byte of an
//! answer, the request is sent once more on a fresh connection to the same engine; that is neither a retry nor a failure
//! of the engine.

mod body;
mod connect;
mod metrics;
mod pool;

pub use self::{
    body::{BodyError, EngineBody},
    connect::{BoxIo, Connect, ConnectError, Io, Tcp},
    metrics::{ClientMetricFamilies, Connected},
};

use self::{
    connect::{Connection, connect},
    pool::Idle,
};
use super::headers;
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderValue, Request, Response, Uri, Version, uri::PathAndQuery};
use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower_ttft::{Error, balance::NewService, endpoint::EndpointId, pool::Endpoint};

/// A request body that may be sent a second time.
pub trait Resend: Sized {
    /// The same body from its start, or none if it cannot be sent again.
    fn resend(&self) -> Option<Self>;
}

/// How long a request may take to reach its engine and to be answered. An extension of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// To establish a connection.
    pub connect: Duration,
    /// From sending the request to the head of its answer.
    pub head: Duration,
}

/// When the request went out. An extension of the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentAt(pub Instant);

/// Parameters of a [`Client`].
#[derive(Clone, Debug)]
pub struct ClientParams {
    /// How long a connection may be idle before it is closed. Less than the engines' own.
    pub idle_timeout: Duration,
    /// Idle connections that are kept per address.
    pub max_idle: usize,
    /// How connections are made.
    pub connect: Arc<dyn Connect>,
    /// Where to count.
    pub metrics: ClientMetricFamilies,
}

/// Connections to engines. Cheap to clone; all clones share them.
pub struct Client<B> {
    inner: Arc<Inner<B>>,
}

struct Inner<B> {
    idle: Arc<Idle<B>>,
    connect: Arc<dyn Connect>,
    metrics: ClientMetricFamilies,
}

/// Sends requests to one endpoint.
pub struct EndpointClient<B> {
    client: Client<B>,
    target: Option<Target>,
    address: Arc<str>,
}

#[derive(Clone)]
struct Target {
    host: HeaderValue,
    rank: Option<u32>,
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The endpoint's address cannot be a `Host`.
    #[error("the address {0:?} is not host:port")]
    Address(Arc<str>),
    /// No connection.
    #[error("connect: {0}")]
    Connect(#[from] ConnectError),
    /// The connection broke before the head of an answer.
    #[error("no answer: {0}")]
    Send(#[source] hyper::Error),
    /// Nothing came in time.
    #[error("no answer within {0:?}")]
    HeadTimeout(Duration),
}

// === impl Resend ===

impl<B> Resend for tower_ttft::peek::ReplayBody<B> {
    fn resend(&self) -> Option<Self> {
        self.try_clone()
    }
}

// === impl Timeouts ===

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            head: Duration::from_secs(600),
        }
    }
}

// === impl ClientParams ===

impl Default for ClientParams {
    fn default() -> Self {
        Self {
            idle_timeout: Duration::from_secs(4),
            max_idle: 128,
            connect: Arc::new(Tcp),
            metrics: ClientMetricFamilies::default(),
        }
    }
}

// === impl Client ===

impl<B> Clone for Client<B> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
        }
    }
}

impl<B> Client<B>
where
    B: http_body::Body<Data = Bytes> + Resend + Send + Unpin + 'static,
    B::Error: Into<Error>,
{
    /// A client without connections. Must be called in a Tokio runtime: idle connections are closed by a task that ends
    /// with the client.
    pub fn new(params: ClientParams) -> Self {
        Self {
            inner: Arc::new(Inner {
                idle: Idle::spawn(params.idle_timeout, params.max_idle, params.metrics.clone()),
                connect: params.connect,
                metrics: params.metrics,
            }),
        }
    }

    /// The client of one endpoint.
    pub fn endpoint(&self, id: &EndpointId) -> EndpointClient<B> {
        let address: Arc<str> = id.address.as_str().into();
        EndpointClient {
            client: self.clone(),
            target: HeaderValue::from_str(&address).ok().map(|host| Target {
                host,
                rank: id.rank,
            }),
            address,
        }
    }

    async fn send(
        self,
        address: Arc<str>,
        target: Target,
        request: Request<B>,
    ) -> Result<Response<EngineBody<B>>, ClientError> {
        let (mut parts, body) = request.into_parts();
        let timeouts = parts
            .extensions
            .get::<Timeouts>()
            .copied()
            .unwrap_or_default();
        headers::to_engine(&mut parts.headers, target.host, target.rank);
        // What the layers above know of the request is not kept alive by a connection.
        parts.extensions = http::Extensions::new();
        parts.version = Version::HTTP_11;
        parts.uri = origin_form(&parts.uri);
        let sent = SentAt(Instant::now());
        let answer = self.send_within(&address, timeouts.connect, parts, body);
        let mut response = match tokio::time::timeout(timeouts.head, answer).await {
            Ok(response) => response?,
            Err(_) => return Err(ClientError::HeadTimeout(timeouts.head)),
        };
        let bodiless = response.status() == http::StatusCode::NOT_MODIFIED
            || http_body::Body::is_end_stream(response.body());
        headers::to_client(response.headers_mut(), bodiless);
        *response.version_mut() = Version::HTTP_11;
        response.extensions_mut().insert(sent);
        Ok(response)
    }

    async fn send_within(
        &self,
        address: &Arc<str>,
        timeout: Duration,
        parts: http::request::Parts,
        body: B,
    ) -> Result<Response<EngineBody<B>>, ClientError> {
        let metrics = &self.inner.metrics;
        let mut request = Request::from_parts(parts, body);
        if let Some(connection) = self.inner.idle.take(address).await {
            metrics.reused.inc();
            let again = request.body().resend().map(|body| {
                let mut again = Request::new(body);
                *again.method_mut() = request.method().clone();
                *again.uri_mut() = request.uri().clone();
                *again.headers_mut() = request.headers().clone();
                again
            });
            match self.send_on(address, connection, request).await {
                Ok(response) => return Ok(response),
                Err(failed) => match failed.unsent.or(again) {
                    Some(again) if failed.untouched => {
                        tracing::debug!(%address, error = %failed.error, "A reused connection was dead");
                        metrics.resent.inc();
                        request = again;
                    }
                    _ => return Err(ClientError::Send(failed.error)),
                },
            }
        }
        let connection = connect(&*self.inner.connect, address, timeout).await;
        metrics.connected(&connection);
        self.send_on(address, connection?, request)
            .await
            .map_err(|failed| ClientError::Send(failed.error))
    }

    async fn send_on(
        &self,
        address: &Arc<str>,
        mut connection: Connection<B>,
        request: Request<B>,
    ) -> Result<Response<EngineBody<B>>, Failed<B>> {
        let before = connection.bytes_read();
        match connection.sender.try_send_request(request).await {
            Ok(response) => Ok(response.map(|incoming| {
                EngineBody::new(
                    incoming,
                    address.clone(),
                    connection,
                    Arc::downgrade(&self.inner.idle),
                )
            })),
            Err(mut failed) => Err(Failed {
                unsent: failed.take_message(),
                untouched: connection.bytes_read() == before,
                error: failed.into_error(),
            }),
        }
    }
}

/// A request that a connection did not answer.
struct Failed<B> {
    /// The request itself if no byte of it went out.
    unsent: Option<Request<B>>,
    /// Not one byte came back.
    untouched: bool,
    error: hyper::Error,
}

impl<B> NewService<Endpoint> for Client<B>
where
    B: http_body::Body<Data = Bytes> + Resend + Send + Unpin + 'static,
    B::Error: Into<Error>,
{
    type Service = EndpointClient<B>;

    fn new_service(&self, endpoint: Endpoint) -> Self::Service {
        self.endpoint(endpoint.id())
    }
}

// === impl EndpointClient ===

impl<B> Clone for EndpointClient<B> {
    fn clone(&self) -> Self {
        Self {
            client: self.client.clone(),
            target: self.target.clone(),
            address: self.address.clone(),
        }
    }
}

impl<B> tower_service::Service<Request<B>> for EndpointClient<B>
where
    B: http_body::Body<Data = Bytes> + Resend + Send + Unpin + 'static,
    B::Error: Into<Error>,
{
    type Response = Response<EngineBody<B>>;
    type Error = Error;
    type Future = BoxFuture<'static, Result<Self::Response, Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let client = self.client.clone();
        let address = self.address.clone();
        let Some(target) = self.target.clone() else {
            return Box::pin(async move { Err(ClientError::Address(address).into()) });
        };
        Box::pin(async move { Ok(client.send(address, target, request).await?) })
    }
}

/// Engines are asked in origin form, whatever form the client used.
fn origin_form(uri: &Uri) -> Uri {
    uri.path_and_query()
        .cloned()
        .unwrap_or_else(|| PathAndQuery::from_static("/"))
        .into()
}
