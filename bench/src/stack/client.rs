//! The client of the published run: a connection for each request, which it closes at `[DONE]`.

use crate::Error;
use bytes::Bytes;
use forebay_proxy::http::Stack;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::{client::conn::http1::handshake, server::conn::http1};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use memchr::memmem;
use tokio::time::Instant;

/// Bytes that a connection holds in each direction: a request fits.
const BUFFER: usize = 128 << 10;

/// What came back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// Seconds to the first token.
    pub(super) ttft: f64,
    /// Cached tokens, as the engine says.
    pub(super) cached: u32,
}

/// Asks the gateway and reads the answer to its end.
pub(super) async fn ask(stack: Stack, id: u64, body: Bytes) -> Result<Answer, Error> {
    let (here, there) = tokio::io::duplex(BUFFER);
    tokio::spawn(async move {
        // An error says that the client left, which it does after each answer.
        let _ = http1::Builder::new()
            .serve_connection(TokioIo::new(there), TowerToHyperService::new(stack))
            .await;
    });
    let (mut send, connection) = handshake(TokioIo::new(here)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::post("/v1/chat/completions")
        .header(header::HOST, "forebay")
        .header(header::CONTENT_TYPE, "application/json")
        .header("x-request-id", id.to_string())
        .body(Full::new(body))?;
    let started = Instant::now();
    let mut response = send.send_request(request).await?;
    if response.status() != StatusCode::OK {
        return Err(format!("status {}", response.status()).into());
    }
    let (mut ttft, mut cached) = (None, 0);
    while let Some(frame) = response.body_mut().frame().await {
        let frame = frame?;
        let Some(data) = frame.data_ref() else {
            continue;
        };
        if ttft.is_none() && memmem::find(data, br#""content":"word "#).is_some() {
            let now = Instant::now();
            ttft = Some(now.saturating_duration_since(started).as_secs_f64());
        }
        if let Some(n) = cached_tokens(data) {
            cached = n;
        }
        if memmem::find(data, b"data: [DONE]").is_some() {
            connection.abort();
            let ttft = ttft.ok_or("an answer without a token")?;
            return Ok(Answer { ttft, cached });
        }
    }
    Err("the answer broke off".into())
}

fn cached_tokens(data: &[u8]) -> Option<u32> {
    const NAME: &[u8] = br#""cached_tokens":"#;
    let at = memmem::rfind(data, NAME)? + NAME.len();
    let digits = data.get(at..)?.iter().take_while(|b| b.is_ascii_digit());
    Some(digits.fold(0, |n, b| n * 10 + u32::from(b - b'0')))
}
