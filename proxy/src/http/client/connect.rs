//! Establishes connections and owns them: a connection that is dropped is closed.

use bytes::Bytes;
use futures::future::BoxFuture;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use std::{
    fmt, io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    task::AbortHandle,
};
use tower_ttft::Error;

/// Makes connections to engines.
pub trait Connect: fmt::Debug + Send + Sync + 'static {
    /// Connects to `host:port`. There is no time limit here.
    fn connect(&self, address: &str) -> BoxFuture<'static, io::Result<BoxIo>>;
}

/// Connects over TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp;

/// A connection of whatever kind.
pub type BoxIo = Box<dyn Io>;

/// What carries bytes both ways.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The system said so.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Nothing came back.
    #[error("no connection within {0:?}")]
    Timeout(Duration),
    /// HTTP could not begin.
    #[error("{0}")]
    Handshake(#[from] hyper::Error),
}

/// A connection to an engine. Dropping it closes the socket, whatever goes on there.
pub(super) struct Connection<B> {
    pub(super) sender: SendRequest<B>,
    read: Arc<AtomicU64>,
    driver: AbortHandle,
}

/// Counts what is read, so that it is known whether an answer had begun.
struct Counted {
    io: BoxIo,
    read: Arc<AtomicU64>,
}

/// Connects to `host:port`.
pub(super) async fn connect<B>(
    with: &dyn Connect,
    address: &str,
    timeout: Duration,
) -> Result<Connection<B>, ConnectError>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Error>,
{
    let io = match tokio::time::timeout(timeout, with.connect(address)).await {
        Ok(io) => io?,
        Err(_) => return Err(ConnectError::Timeout(timeout)),
    };
    let read = Arc::new(AtomicU64::new(0));
    let io = Counted {
        io,
        read: read.clone(),
    };
    let (sender, connection) = http1::handshake(TokioIo::new(io)).await?;
    let driver = tokio::spawn(async move {
        if let Err(error) = connection.await {
            // Whoever sent the request learns it from the sender or the body.
            tracing::debug!(%error, "Connection to an engine ended");
        }
    });
    Ok(Connection {
        sender,
        read,
        driver: driver.abort_handle(),
    })
}

// === impl Tcp ===

impl Connect for Tcp {
    fn connect(&self, address: &str) -> BoxFuture<'static, io::Result<BoxIo>> {
        let address = address.to_owned();
        Box::pin(async move {
            let io = TcpStream::connect(address).await?;
            // Tokens are small and each counts: none may wait for another's acknowledgement.
            io.set_nodelay(true)?;
            Ok(Box::new(io) as BoxIo)
        })
    }
}

// === impl Connection ===

impl<B> Connection<B> {
    /// Bytes that came from the engine so far.
    pub(super) fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Acquire)
    }
}

impl<B> Drop for Connection<B> {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

// === impl Counted ===

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.io).poll_read(cx, buf);
        let read = buf.filled().len().saturating_sub(before);
        self.read.fetch_add(read as u64, Ordering::Release);
        result
    }
}

impl AsyncWrite for Counted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
