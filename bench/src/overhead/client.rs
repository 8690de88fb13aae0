//! One keep-alive connection that streams chats.

use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use std::{net::SocketAddr, time::Duration};
use tokio::{net::TcpStream, time::Instant};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// A client with one connection.
#[derive(Debug)]
pub(super) struct Client {
    addr: SocketAddr,
    send: SendRequest<Full<Bytes>>,
}

/// When things happened, from the moment the request was handed to the connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    pub(super) first_token: Duration,
    pub(super) total: Duration,
}

// === impl Client ===

impl Client {
    pub(super) async fn connect(addr: SocketAddr) -> Result<Self, Error> {
        let socket = TcpStream::connect(addr).await?;
        socket.set_nodelay(true)?;
        let (send, conn) = handshake(TokioIo::new(socket)).await?;
        tokio::spawn(conn);
        Ok(Self { addr, send })
    }

    /// Streams one chat, whose text after the system prompt is unique to `serial`.
    pub(super) async fn chat(&mut self, serial: u64) -> Result<Timing, Error> {
        let req = Request::post("/v1/chat/completions")
            .header(header::HOST, self.addr.to_string())
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body(serial)))?;
        let started = Instant::now();
        self.send.ready().await?;
        let mut rsp = self.send.send_request(req).await?;
        if rsp.status() != http::StatusCode::OK {
            return Err(format!("status {}", rsp.status()).into());
        }
        let (mut first_token, mut done) = (None, false);
        while let Some(frame) = rsp.body_mut().frame().await {
            if let Some(data) = frame?.data_ref() {
                let now = Instant::now();
                if first_token.is_none() && memchr::memmem::find(data, b"\" word\"").is_some() {
                    first_token = Some(now.saturating_duration_since(started));
                }
                done |= memchr::memmem::find(data, b"[DONE]").is_some();
            }
        }
        if !done {
            return Err("the answer ended without [DONE]".into());
        }
        Ok(Timing {
            first_token: first_token.ok_or("an answer without a token")?,
            total: Instant::now().saturating_duration_since(started),
        })
    }
}

/// About 2 KB of chat: 500 bytes of shared system prompt, then text of this request alone.
fn body(serial: u64) -> Bytes {
    let mut text = String::with_capacity(2048);
    let mut x = serial.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    while text.len() < 1_400 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        const WORDS: [&str; 16] = [
            "water", "gate", "level", "turbine", "flow", "basin", "spill", "head", "stone",
            "river", "even", "power", "screen", "intake", "penstock", "reserve",
        ];
        text.push_str(WORDS[(x >> 60) as usize]);
        text.push(if x & 15 == 0 { '.' } else { ' ' });
    }
    let system =
        "You answer questions of the operators of a power station in short sentences. ".repeat(6);
    Bytes::from(
        serde_json::json!({
            "model": "tiny",
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
            "stream": true,
            "max_tokens": 16,
        })
        .to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reads_what_the_engine_streams() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("bind");
        let addr = listener.local_addr().expect("addr");
        tokio::spawn(super::super::engine::serve(listener));
        let mut client = Client::connect(addr).await.expect("connect");
        for serial in 0..3 {
            let t = client.chat(serial).await.expect("chat");
            assert!(t.first_token <= t.total);
        }
        assert_ne!(body(1), body(2));
        assert!((1_900..2_300).contains(&body(1).len()), "{}", body(1).len());
    }
}
