//! A small HTTP/1.1 client: one connection per request, so that dropping an answer closes its socket, and every part of
//! an answer with the time at which it came.

use anyhow::{Context, Result, ensure};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::time::Duration;
use tokio::{net::TcpStream, task::AbortHandle, time::Instant};

/// An answer whose body is still coming. Dropping it closes the connection.
pub struct Open {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// From the start of the request to its head.
    pub head_after: Duration,
    started: Instant,
    body: Incoming,
    buffer: BytesMut,
    connection: Connection,
}

/// An answer that has ended.
#[derive(Debug)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body as far as it came.
    pub body: Bytes,
    /// From the start of the request to the first byte of the body.
    pub first_byte_after: Option<Duration>,
    /// From the start of the request to the end.
    pub ended_after: Duration,
    /// Why the body ended before its protocol's end; none for a clean end.
    pub broken: Option<String>,
}

/// One server-sent event.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The text behind `data:`; of several lines joined with line feeds.
    pub data: String,
    /// The `event:` name.
    pub name: Option<String>,
    /// From the start of the request to the arrival of the event's end.
    pub after: Duration,
}

/// A request for this client.
pub struct Request<'a> {
    /// `host:port`.
    pub authority: &'a str,
    /// The method.
    pub method: Method,
    /// Path and query.
    pub path: &'a str,
    /// More headers than `host`, `content-type` and `content-length`.
    pub headers: Vec<(&'static str, String)>,
    /// The body.
    pub body: Bytes,
}

/// Ends the connection's task, and with it the socket, on drop.
struct Connection(AbortHandle);

// === impl Request ===

impl<'a> Request<'a> {
    /// A GET.
    pub fn get(authority: &'a str, path: &'a str) -> Self {
        Self {
            authority,
            method: Method::GET,
            path,
            headers: Vec::new(),
            body: Bytes::new(),
        }
    }

    /// A POST of a JSON value.
    pub fn post(authority: &'a str, path: &'a str, body: &Value) -> Self {
        Self {
            authority,
            method: Method::POST,
            path,
            headers: vec![("content-type", "application/json".into())],
            body: body.to_string().into(),
        }
    }

    /// With one more header.
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Sends it and waits for the head of the answer.
    pub async fn open(self) -> Result<Open> {
        let started = Instant::now();
        let what = format!("{} http://{}{}", self.method, self.authority, self.path);
        let socket = TcpStream::connect(self.authority)
            .await
            .with_context(|| format!("{what}: connect"))?;
        socket.set_nodelay(true)?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(socket)).await?;
        let connection = Connection(tokio::spawn(connection).abort_handle());
        let mut request = http::Request::builder()
            .method(self.method)
            .uri(self.path)
            .header("host", self.authority);
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        let response = sender
            .send_request(request.body(Full::new(self.body))?)
            .await
            .with_context(|| what)?;
        let (parts, body) = response.into_parts();
        Ok(Open {
            status: parts.status,
            headers: parts.headers,
            head_after: Instant::now().saturating_duration_since(started),
            started,
            body,
            buffer: BytesMut::new(),
            connection,
        })
    }

    /// Sends it and waits for the whole answer, however that ends.
    pub async fn send(self) -> Result<Answer> {
        Ok(self.open().await?.finish().await)
    }

    /// Sends it and reads the answer, which must be a 200, as JSON.
    pub async fn json(self) -> Result<Value> {
        let what = format!("{} http://{}{}", self.method, self.authority, self.path);
        self.send().await?.json().context(what)
    }
}

// === impl Open ===

impl Open {
    /// The next server-sent event that holds data; none when the stream ended as it should.
    ///
    /// # Errors
    /// When the connection broke or the body was cut off.
    pub async fn event(&mut self) -> Result<Option<Event>> {
        loop {
            while let Some(block) = take_block(&mut self.buffer) {
                let after = Instant::now().saturating_duration_since(self.started);
                if let Some(event) = parse_block(&block, after) {
                    return Ok(Some(event));
                }
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return Err(error).context("the stream broke"),
                None => return Ok(None),
            }
        }
    }

    /// Time since the request started.
    pub fn age(&self) -> Duration {
        Instant::now().saturating_duration_since(self.started)
    }

    /// The rest of the body.
    pub async fn finish(mut self) -> Answer {
        let mut first_byte_after = None;
        let mut broken = None;
        while let Some(frame) = self.body.frame().await {
            match frame.map(|f| f.into_data()) {
                Ok(Ok(data)) => {
                    if !data.is_empty() && first_byte_after.is_none() {
                        first_byte_after = Some(self.age());
                    }
                    self.buffer.extend_from_slice(&data);
                }
                Ok(Err(_trailers)) => {}
                Err(error) => {
                    broken = Some(format!("{:#}", anyhow::Error::from(error)));
                    break;
                }
            }
        }
        let ended_after = self.age();
        drop(self.connection);
        Answer {
            status: self.status,
            headers: self.headers,
            body: self.buffer.freeze(),
            first_byte_after,
            ended_after,
            broken,
        }
    }
}

// === impl Answer ===

impl Answer {
    /// The body of a 200 as JSON.
    pub fn json(&self) -> Result<Value> {
        ensure!(
            self.status == StatusCode::OK && self.broken.is_none(),
            "status {} ({}): {}",
            self.status,
            self.broken.as_deref().unwrap_or("complete"),
            self.text().chars().take(400).collect::<String>()
        );
        serde_json::from_slice(&self.body).context("the body is no JSON")
    }

    /// The body as text.
    pub fn text(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.body)
    }
}

// === impl Connection ===

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Takes everything up to the next blank line.
fn take_block(buffer: &mut BytesMut) -> Option<Bytes> {
    let (at, gap) = buffer
        .windows(2)
        .position(|w| w == b"\n\n")
        .map(|at| (at, 2))
        .into_iter()
        .chain(
            buffer
                .windows(4)
                .position(|w| w == b"\r\n\r\n")
                .map(|at| (at, 4)),
        )
        .min()?;
    let block = buffer.split_to(at + gap);
    Some(block.freeze().slice(..at))
}

fn parse_block(block: &[u8], after: Duration) -> Option<Event> {
    let text = String::from_utf8_lossy(block);
    let mut data: Option<String> = None;
    let mut name = None;
    for line in text.lines() {
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => match &mut data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => data = Some(value.to_owned()),
            },
            "event" => name = Some(value.to_owned()),
            _ => {}
        }
    }
    data.map(|data| Event { data, name, after })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_cut_at_blank_lines_of_both_kinds() {
        let mut buffer = BytesMut::from(
            &b": hello\n\ndata: a\ndata: b\n\nevent: x\r\ndata:c\r\n\r\ndata: half"[..],
        );
        let mut events = Vec::new();
        while let Some(block) = take_block(&mut buffer) {
            events.extend(
                parse_block(&block, Duration::ZERO).map(|e| (e.name.unwrap_or_default(), e.data)),
            );
        }
        assert_eq!(
            events,
            [("".into(), "a\nb".into()), ("x".into(), "c".to_string())]
        );
        assert_eq!(&buffer[..], b"data: half");
    }
}
