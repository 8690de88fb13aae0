//! The listener that clients reach: HTTP/1 and HTTP/2 with prior knowledge on one port.
//!
//! - Open connections and open requests are bounded, from the limit of open files unless the configuration says. Past
//!   the bound a client gets `503` with `Retry-After`, not a hang; far past it, a closed connection.
//! - A client that closes its sending side is gone: its request is dropped, which closes the engine's connection.
//! - Stopping goes through the phases of [`drain`].

pub mod drain;

mod admit;
mod detect;
mod files;
mod metrics;

pub use self::{
    files::OpenFiles,
    metrics::{Accepted, ServerMetrics},
};

use self::{
    admit::Admit,
    detect::Protocol,
    drain::{Draining, Phase},
};
use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::graceful::{GracefulConnection, GracefulShutdown, Watcher},
};
use socket2::{SockRef, TcpKeepalive};
use std::{convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time,
};

/// Connections that are told `503` at the same time; more are closed.
const SHEDDING: usize = 64;

/// How long a connection that is told `503` may take for it.
const SHED_TIME: Duration = Duration::from_secs(2);

/// How long to wait when the kernel gives no connection (out of files or memory), before asking again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Bytes that a client may send of one HTTP/2 stream before we have read them: one round trip of 100 ms at 80 Mbit/s.
const STREAM_WINDOW: u32 = 1 << 20;

/// The same for a whole HTTP/2 connection.
const CONNECTION_WINDOW: u32 = 8 << 20;

/// Requests at once on one HTTP/2 connection.
const MAX_STREAMS: u32 = 1024;

/// How often a silent HTTP/2 peer is asked whether it is there, and how long it may take to say so. Prefills are
/// silent for minutes; middleboxes forget connections sooner.
const PING: Duration = Duration::from_secs(20);

/// A silent TCP peer is probed after this, for the same reason.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

/// Parameters of a [`Server`].
#[derive(Clone, Debug)]
pub struct ServerParams {
    /// Connections at once.
    pub max_connections: usize,
    /// Requests at once.
    pub max_requests: usize,
    /// From the connection, or the last answer's end, to the end of a request's head.
    pub header_timeout: Duration,
    /// The largest head of a request, bytes.
    pub header_bytes: u32,
    /// How long open requests may go on once draining has begun.
    pub drain: Duration,
}

/// Serves clients.
pub struct Server {
    params: ServerParams,
    metrics: ServerMetrics,
    draining: Draining,
    connections: Arc<Semaphore>,
    requests: Arc<Semaphore>,
    shedding: Arc<Semaphore>,
}

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Connections that were ended with requests open on them.
    pub cut: usize,
}

// === impl Server ===

impl Server {
    /// A server that stops as `draining` says.
    pub fn new(params: ServerParams, metrics: ServerMetrics, draining: Draining) -> Self {
        let permits = |n: usize| Arc::new(Semaphore::new(n.min(Semaphore::MAX_PERMITS)));
        Self {
            connections: permits(params.max_connections),
            requests: permits(params.max_requests),
            shedding: permits(SHEDDING),
            params,
            metrics,
            draining,
        }
    }

    /// Serves until the process has drained.
    pub async fn serve<S, B>(self, listener: TcpListener, service: S) -> Drained
    where
        S: tower_service::Service<Request<Incoming>, Response = Response<B>, Error = Infallible>
            + Clone
            + Send
            + 'static,
        S::Future: Send,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<tower_ttft::Error>,
    {
        let server = Arc::new(self);
        let graceful = GracefulShutdown::new();
        let mut tasks = JoinSet::new();
        let mut draining = server.draining.clone();
        loop {
            tokio::select! {
                biased;
                () = draining.reached(Phase::Draining) => break,
                Some(_) = tasks.join_next() => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => {
                        server.clone().accept(stream, peer, service.clone(), &graceful, &mut tasks);
                    }
                    Err(error) => {
                        server.metrics.accepted(Accepted::failed);
                        if !is_of_the_connection(&error) {
                            tracing::warn!(%error, "Cannot accept connections");
                            time::sleep(ACCEPT_PAUSE).await;
                        }
                    }
                }
            }
        }
        // From here on the kernel refuses new connections.
        drop(listener);
        let open = server.metrics.open_requests();
        tracing::info!(requests = open, limit = ?server.params.drain, "Draining");
        tokio::select! {
            () = async {
                graceful.shutdown().await;
                while tasks.join_next().await.is_some() {}
            } => return Drained { cut: 0 },
            () = time::sleep(server.params.drain) => {}
            () = draining.reached(Phase::Now) => {}
        }
        // The join set is still whole: it was only borrowed by the branch that lost.
        let cut = tasks.len();
        tracing::warn!(connections = cut, "Ending connections that are still open");
        tasks.shutdown().await;
        Drained { cut }
    }

    fn accept<S, B>(
        self: Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        service: S,
        graceful: &GracefulShutdown,
        tasks: &mut JoinSet<()>,
    ) where
        S: tower_service::Service<Request<Incoming>, Response = Response<B>, Error = Infallible>
            + Clone
            + Send
            + 'static,
        S::Future: Send,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<tower_ttft::Error>,
    {
        tune(&stream);
        let watcher = graceful.watcher();
        let Ok(permit) = self.connections.clone().try_acquire_owned() else {
            let Ok(permit) = self.shedding.clone().try_acquire_owned() else {
                self.metrics.accepted(Accepted::dropped);
                return;
            };
            self.metrics.accepted(Accepted::shed);
            tasks.spawn(async move {
                let shed = hyper::service::service_fn(|_: Request<Incoming>| async {
                    Ok::<_, Infallible>(admit::overloaded::<B>(
                        "too many connections are open",
                        true,
                    ))
                });
                // Whether the client reads its refusal is its own affair.
                let _ =
                    time::timeout(SHED_TIME, self.connection(stream, shed, watcher, |_| {})).await;
                drop(permit);
            });
            return;
        };
        let held = self.metrics.hold_connection();
        let service = Admit::new(
            service,
            self.requests.clone(),
            self.draining.clone(),
            self.metrics.clone(),
        );
        tasks.spawn(async move {
            let count = |result| self.metrics.accepted(result);
            if let Err(error) = self.connection(stream, service, watcher, count).await {
                // Clients that leave in the middle are daily business.
                tracing::debug!(%peer, error, "Connection ended");
            }
            drop((permit, held));
        });
    }

    async fn connection<S, B>(
        &self,
        stream: TcpStream,
        service: S,
        watcher: Watcher,
        count: impl Fn(Accepted),
    ) -> Result<(), tower_ttft::Error>
    where
        S: hyper::service::Service<Request<Incoming>, Response = Response<B>, Error = Infallible>
            + Send
            + 'static,
        S::Future: Send + 'static,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<tower_ttft::Error>,
    {
        let mut draining = self.draining.clone();
        let protocol = tokio::select! {
            protocol = detect::detect(&stream, self.params.header_timeout) => protocol,
            // Nothing was asked yet, so nothing is owed.
            () = draining.reached(Phase::Draining) => Protocol::Closed,
        };
        let io = TokioIo::new(stream);
        match protocol {
            Protocol::Closed => count(Accepted::closed),
            Protocol::Silent => count(Accepted::silent),
            Protocol::Http1 => {
                count(Accepted::http1);
                let conn = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(self.params.header_timeout)
                    .max_header_size(self.params.header_bytes as usize)
                    // A client that half-closes is gone: waiting for its answer would burn a GPU for nobody.
                    .half_close(false)
                    .serve_connection(io, service);
                run(watcher, conn).await?;
            }
            Protocol::Http2 => {
                count(Accepted::http2);
                let conn = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .initial_stream_window_size(STREAM_WINDOW)
                    .initial_connection_window_size(CONNECTION_WINDOW)
                    .max_concurrent_streams(MAX_STREAMS)
                    .max_header_list_size(self.params.header_bytes)
                    .keep_alive_interval(PING)
                    .keep_alive_timeout(PING)
                    .serve_connection(io, service);
                run(watcher, conn).await?;
            }
        }
        Ok(())
    }
}

async fn run<C>(watcher: Watcher, conn: C) -> Result<(), tower_ttft::Error>
where
    C: GracefulConnection,
    C::Error: Into<tower_ttft::Error>,
{
    watcher.watch(conn).await.map_err(Into::into)
}

/// Binds a listener.
///
/// # Errors
/// If the address cannot be bound; the error names it.
pub async fn bind(what: &str, addr: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(addr).await.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("cannot listen on {addr} ({what}): {error}"),
        )
    })
}

/// Tokens are small packets that must not wait for each other, and dead peers must be noticed.
fn tune(stream: &TcpStream) {
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new()
        .with_time(TCP_KEEPALIVE)
        .with_interval(TCP_KEEPALIVE);
    for result in [
        stream.set_nodelay(true),
        socket.set_tcp_keepalive(&keepalive),
    ] {
        if let Err(error) = result {
            // The peer is gone already, most likely: its connection will say so.
            tracing::debug!(%error, "Cannot tune a connection");
        }
    }
}

/// Errors of `accept` that concern the connection that was to be accepted, not the listener.
fn is_of_the_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}

#[cfg(test)]
mod tests;
