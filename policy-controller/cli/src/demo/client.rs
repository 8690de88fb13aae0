//! The client of the published run: a connection for each request, which it closes at `[DONE]`. Its clock starts when the
//! request begins to be written, and its first token is the first chunk with text.

use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use std::{io, net::SocketAddr};
use tokio::{net::TcpStream, task::JoinSet, time::Instant};

/// The longest line that is taken.
const MAX_LINE: usize = 1 << 20;

/// What came back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// Prompt tokens.
    pub(super) prompt: u32,
    /// Of these cached.
    pub(super) cached: u32,
}

/// Why no whole answer came.
#[derive(Debug, thiserror::Error)]
pub(super) enum AskError {
    /// The connection failed.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// HTTP failed.
    #[error("http: {0}")]
    Hyper(#[from] hyper::Error),
    /// It was no request.
    #[error("request: {0}")]
    Http(#[from] http::Error),
    /// Another status than 200.
    #[error("status {0}")]
    Status(StatusCode),
    /// The answer is none of ours.
    #[error("an event that cannot be read: {0}")]
    Event(#[from] serde_json::Error),
    /// The stream says that it failed.
    #[error("an error in the stream")]
    Told,
    /// The stream ended before its end.
    #[error("the answer broke off")]
    Broken,
}

/// One event of a stream, as far as it matters here.
#[derive(Debug, Deserialize)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Counts>,
    error: Option<serde::de::IgnoredAny>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    delta: Delta,
}

#[derive(Debug, Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Counts {
    prompt_tokens: u32,
    prompt_tokens_details: Option<Details>,
}

#[derive(Debug, Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
}

/// The stream so far.
#[derive(Debug, Default)]
struct Answer {
    pending: Vec<u8>,
    usage: Usage,
    /// Whether text has come.
    text: bool,
    done: bool,
}

/// Asks, tells when the first token came (seconds), and reads to the end.
pub(super) async fn ask(
    server: SocketAddr,
    name: &str,
    body: Bytes,
    first: impl Fn(f64),
) -> Result<Usage, AskError> {
    let io = TcpStream::connect(server).await?;
    io.set_nodelay(true)?;
    let (mut send, connection) = handshake(TokioIo::new(io)).await?;
    // Dropped, and so closed, with this request.
    let mut tasks = JoinSet::new();
    tasks.spawn(connection);
    let request = Request::post("/v1/chat/completions")
        .header(header::HOST, server.to_string())
        .header(header::CONTENT_TYPE, "application/json")
        .header("x-request-id", name)
        .body(Full::new(body))?;
    let started = Instant::now();
    let mut response = send.send_request(request).await?;
    if response.status() != StatusCode::OK {
        return Err(AskError::Status(response.status()));
    }
    let mut answer = Answer::default();
    while let Some(frame) = response.body_mut().frame().await {
        let Ok(data) = frame?.into_data() else {
            continue;
        };
        let had_text = answer.text;
        answer.read(&data)?;
        if answer.text && !had_text {
            let now = Instant::now();
            first(now.saturating_duration_since(started).as_secs_f64());
        }
        if answer.done {
            return Ok(answer.usage);
        }
    }
    Err(AskError::Broken)
}

// === impl Answer ===

impl Answer {
    fn read(&mut self, data: &[u8]) -> Result<(), AskError> {
        self.pending.extend_from_slice(data);
        while let Some(end) = self.pending.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            if let Some(event) = line.trim_ascii().strip_prefix(b"data:") {
                self.event(event.trim_ascii())?;
            }
        }
        if self.pending.len() > MAX_LINE {
            return Err(AskError::Broken);
        }
        Ok(())
    }

    fn event(&mut self, data: &[u8]) -> Result<(), AskError> {
        if data == b"[DONE]" {
            // Without a token it is no answer.
            self.done = self.text;
            return if self.text {
                Ok(())
            } else {
                Err(AskError::Broken)
            };
        }
        let event: Event = serde_json::from_slice(data)?;
        if event.error.is_some() {
            return Err(AskError::Told);
        }
        let texts = event
            .choices
            .iter()
            .filter_map(|c| c.delta.content.as_ref());
        self.text |= texts.into_iter().any(|t| !t.is_empty());
        if let Some(usage) = event.usage {
            self.usage.prompt = usage.prompt_tokens;
            let details = usage.prompt_tokens_details;
            if let Some(cached) = details.and_then(|d| d.cached_tokens) {
                self.usage.cached = cached;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLE: &[u8] =
        b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    const TEXT: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":{\"prompt_tokens\":9}}\n\n";
    const END: &[u8] = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\ndata: [DONE]\n\n";

    #[test]
    fn the_first_text_is_the_first_token_however_it_is_cut() {
        for cut in 1..40 {
            let mut answer = Answer::default();
            for piece in ROLE.chunks(cut) {
                answer.read(piece).unwrap();
            }
            assert!(!answer.text, "an empty text is none");
            for piece in TEXT.chunks(cut) {
                answer.read(piece).unwrap();
            }
            assert!(answer.text && !answer.done);
            for piece in END.chunks(cut) {
                answer.read(piece).unwrap();
            }
            let usage = Usage {
                prompt: 9,
                cached: 8,
            };
            assert!(answer.done && answer.usage == usage);
        }
    }

    #[test]
    fn errors_in_the_stream_and_empty_answers_are_failures() {
        let error = b"data: {\"error\":{\"message\":\"x\"}}\n\n";
        let mut answer = Answer::default();
        assert!(matches!(answer.read(error), Err(AskError::Told)));
        let mut answer = Answer::default();
        assert!(matches!(
            answer.read(b"data: [DONE]\n\n"),
            Err(AskError::Broken)
        ));
    }
}
