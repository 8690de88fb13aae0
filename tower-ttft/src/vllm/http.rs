//! One connection, a few small GETs: how an engine is asked about itself.

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{
    Request, StatusCode,
    client::conn::http1,
    header::{self, HeaderValue},
};
use hyper_util::rt::TokioIo;
use std::{io, pin::pin, time::Duration};
use tokio::{net::TcpStream, time::timeout};

/// An answer, whatever its status.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    /// Nobody listens: the process is gone.
    #[error("connection refused")]
    Refused,
    /// The connection broke before there was an answer.
    #[error("connection reset")]
    Reset,
    /// Not in time. It may be busy.
    #[error("no answer in time")]
    Timeout,
    /// More than anyone would send.
    #[error("a body of more than {0} bytes")]
    TooLarge(usize),
    /// Any other failure to reach it (no route, no such name).
    #[error("unreachable: {0}")]
    Unreachable(io::Error),
    /// It does not speak HTTP/1.1.
    #[error("{0}")]
    Protocol(hyper::Error),
}

/// A GET or a POST.
pub(crate) struct Ask {
    pub(crate) path: &'static str,
    pub(crate) body: Option<Bytes>,
    /// Bytes of body that are read at most.
    pub(crate) limit: usize,
}

/// Opens a connection.
pub(crate) async fn dial(address: &str, limit: Duration) -> Result<TcpStream, HttpError> {
    let stream = timeout(limit, TcpStream::connect(address))
        .await
        .map_err(|_| HttpError::Timeout)?
        .map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => HttpError::Refused,
            io::ErrorKind::ConnectionReset => HttpError::Reset,
            _ => HttpError::Unreachable(error),
        })?;
    stream.set_nodelay(true).map_err(|_| HttpError::Reset)?;
    Ok(stream)
}

/// Asks one thing after another on a connection, each within a time, and closes it.
///
/// Returns the answers up to the first failure.
pub(crate) async fn ask(
    stream: TcpStream,
    host: &str,
    asks: Vec<Ask>,
    each: Duration,
) -> (Vec<Answer>, Result<(), HttpError>) {
    let mut answers = Vec::with_capacity(asks.len());
    let io = TokioIo::new(stream);
    let (mut sender, connection) = match timeout(each, http1::handshake(io)).await {
        Ok(Ok(ready)) => ready,
        Ok(Err(error)) => return (answers, Err(error.into())),
        Err(_) => return (answers, Err(HttpError::Timeout)),
    };
    let result = {
        let work = async {
            for ask in asks {
                let answer = timeout(each, one(&mut sender, host, ask)).await;
                answers.push(answer.map_err(|_| HttpError::Timeout)??);
            }
            Ok(())
        };
        // The connection is driven here, not in a task of its own: dropping this future closes it.
        let (mut work, mut connection) = (pin!(work), pin!(connection));
        tokio::select! {
            biased;
            result = &mut work => result,
            ended = &mut connection => match timeout(each, &mut work).await {
                Ok(result) => result,
                Err(_) => Err(ended.err().map_or(HttpError::Reset, HttpError::from)),
            },
        }
    };
    (answers, result)
}

async fn one(
    sender: &mut http1::SendRequest<Full<Bytes>>,
    host: &str,
    ask: Ask,
) -> Result<Answer, HttpError> {
    sender.ready().await?;
    let request = match ask.body {
        None => Request::get(ask.path).body(Full::default()),
        Some(body) => Request::post(ask.path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body)),
    };
    let mut request =
        request.map_err(|_| HttpError::Unreachable(io::Error::other("no such path")))?;
    let host = HeaderValue::from_str(host)
        .map_err(|_| HttpError::Unreachable(io::Error::other("no such host")))?;
    request.headers_mut().insert(header::HOST, host);
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ask.limit)
        .collect()
        .await;
    match body {
        Ok(body) => Ok(Answer {
            status,
            body: body.to_bytes(),
        }),
        Err(error) if error.is::<LengthLimitError>() => Err(HttpError::TooLarge(ask.limit)),
        Err(error) => Err(match error.downcast::<hyper::Error>() {
            Ok(error) => (*error).into(),
            Err(_) => HttpError::Reset,
        }),
    }
}

// === impl HttpError ===

impl HttpError {
    /// Whether it says that no process is there.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, Self::Refused | Self::Reset)
    }
}

impl From<hyper::Error> for HttpError {
    fn from(error: hyper::Error) -> Self {
        let io = std::error::Error::source(&error).and_then(|e| e.downcast_ref::<io::Error>());
        match io.map(io::Error::kind) {
            Some(
                io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::UnexpectedEof,
            ) => Self::Reset,
            _ if error.is_incomplete_message() || error.is_canceled() || error.is_closed() => {
                Self::Reset
            }
            _ => Self::Protocol(error),
        }
    }
}
