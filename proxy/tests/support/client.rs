//! Clients that look closely: at the framing, at the end, and at when each byte came.

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::Instant,
};

/// The protocol of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Http {
    One,
    Two,
}

/// An answer and how it ended.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
    /// The body is whole by its framing.
    pub clean: bool,
    /// When each piece came.
    pub pieces: Vec<(Instant, usize)>,
    /// When the head came.
    pub head_at: Instant,
}

// === impl Answer ===

impl Answer {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }
}

/// Posts and reads all of the answer, for at most ten seconds.
pub async fn post(http: Http, address: &str, path: &str, body: impl Into<String>) -> Answer {
    let request = Request::post(path)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.into())))
        .expect("a request");
    send(http, address, request).await
}

/// Gets and reads all of the answer.
pub async fn get(http: Http, address: &str, path: &str) -> Answer {
    let request = Request::get(path).body(Full::default()).expect("a request");
    send(http, address, request).await
}

/// Sends and reads all of the answer, for at most ten seconds.
pub async fn send(http: Http, address: &str, mut request: Request<Full<Bytes>>) -> Answer {
    let read = async {
        let io = TokioIo::new(
            TcpStream::connect(address)
                .await
                .expect("the gateway listens"),
        );
        let response = match http {
            Http::One => {
                let (mut sender, connection) = hyper::client::conn::http1::handshake(io)
                    .await
                    .expect("HTTP/1");
                tokio::spawn(connection);
                request
                    .headers_mut()
                    .insert("host", "gateway".parse().expect("a host"));
                sender.send_request(request).await
            }
            Http::Two => {
                let (mut sender, connection) =
                    hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
                        .await
                        .expect("HTTP/2");
                tokio::spawn(connection);
                let uri = format!("http://gateway{}", request.uri());
                *request.uri_mut() = uri.parse().expect("a URI");
                sender.send_request(request).await
            }
        };
        let (parts, mut incoming) = response.expect("an answer").into_parts();
        let mut answer = Answer {
            status: parts.status,
            headers: parts.headers,
            body: Vec::new(),
            clean: true,
            pieces: Vec::new(),
            head_at: Instant::now(),
        };
        while let Some(frame) = incoming.frame().await {
            match frame {
                Ok(frame) => {
                    // HTTP/2 may end with an empty frame.
                    if let Ok(data) = frame.into_data()
                        && !data.is_empty()
                    {
                        answer.pieces.push((Instant::now(), data.len()));
                        answer.body.extend_from_slice(&data);
                    }
                }
                // Said once; HTTP/2 would say it for ever.
                Err(_) => {
                    answer.clean = false;
                    break;
                }
            }
        }
        answer
    };
    tokio::time::timeout(Duration::from_secs(10), read)
        .await
        .expect("an answer within ten seconds")
}

/// An HTTP/1.1 connection whose bytes are looked at one by one.
pub struct RawClient {
    io: TcpStream,
}

// === impl RawClient ===

impl RawClient {
    /// Connects and posts.
    pub async fn post(address: &str, path: &str, body: &str) -> Self {
        let mut io = TcpStream::connect(address)
            .await
            .expect("the gateway listens");
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        io.write_all(request.as_bytes())
            .await
            .expect("the gateway reads");
        Self { io }
    }

    /// Connects and writes these bytes.
    pub async fn write(address: &str, bytes: &[u8]) -> Self {
        let mut io = TcpStream::connect(address)
            .await
            .expect("the gateway listens");
        io.write_all(bytes).await.expect("the gateway reads");
        Self { io }
    }

    /// Reads until this text has come.
    pub async fn read_until(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        let read = async {
            while memchr::memmem::find(&seen, text.as_bytes()).is_none() {
                if self.io.read_buf(&mut seen).await.expect("bytes") == 0 {
                    panic!("closed before {text:?}: {}", String::from_utf8_lossy(&seen));
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(5), read)
            .await
            .unwrap_or_else(|_| panic!("no {text:?}"));
        String::from_utf8_lossy(&seen).into_owned()
    }

    /// Closes; says when.
    pub fn leave(self) -> Instant {
        drop(self);
        Instant::now()
    }

    /// Closes the sending side only.
    pub async fn half_close(&mut self) {
        self.io.shutdown().await.expect("open");
    }
}
