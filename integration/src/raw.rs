//! An HTTP/1.1 client that is only a socket: it writes what it is told, when it is told, and hangs up in any way.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};

/// A connection.
pub struct Raw {
    socket: TcpStream,
    /// All that came.
    pub seen: Vec<u8>,
}

/// How to hang up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HangUp {
    /// FIN, and goes on reading.
    Half,
    /// Closes: FIN, or RST if something was not read.
    Close,
    /// RST.
    Reset,
}

// === impl Raw ===

impl Raw {
    /// Connects.
    pub async fn connect(authority: &str) -> Result<Self> {
        let socket = TcpStream::connect(authority)
            .await
            .with_context(|| format!("connect to {authority}"))?;
        socket.set_nodelay(true)?;
        Ok(Self {
            socket,
            seen: Vec::new(),
        })
    }

    /// Connects and sends a POST of a JSON value.
    pub async fn post(authority: &str, path: &str, id: &str, body: &Value) -> Result<Self> {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {authority}\r\nx-request-id: {id}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let mut raw = Self::connect(authority).await?;
        raw.write(head.as_bytes()).await?;
        raw.write(body.as_bytes()).await?;
        Ok(raw)
    }

    /// Writes bytes.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.socket.write_all(bytes).await?)
    }

    /// Reads until `wanted` has come `count` times.
    pub async fn until(&mut self, wanted: &str, count: usize, limit: Duration) -> Result<()> {
        let read = async {
            loop {
                if self.text().matches(wanted).count() >= count {
                    return anyhow::Ok(());
                }
                let n = self.socket.read_buf(&mut self.seen).await?;
                ensure!(n > 0, "the connection ended early: {:.600}", self.text());
            }
        };
        let result = timeout(limit, read).await;
        result.with_context(|| {
            let seen = String::from_utf8_lossy(&self.seen);
            format!("`{wanted}` did not come {count} times within {limit:?}: {seen:.600}")
        })?
    }

    /// Reads to the end, however it comes.
    pub async fn to_end(&mut self, limit: Duration) -> Result<()> {
        let read = async {
            while let Ok(n) = self.socket.read_buf(&mut self.seen).await {
                if n == 0 {
                    break;
                }
            }
        };
        timeout(limit, read)
            .await
            .with_context(|| format!("the connection does not end within {limit:?}"))
    }

    /// All that came, as text.
    pub fn text(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.seen)
    }

    /// Hangs up; says when, and gives back what is still open.
    pub async fn hang_up(mut self, how: HangUp) -> Result<(Instant, Option<Self>)> {
        match how {
            HangUp::Half => {
                let at = Instant::now();
                self.socket.shutdown().await?;
                Ok((at, Some(self)))
            }
            HangUp::Close => {
                let at = Instant::now();
                drop(self);
                Ok((at, None))
            }
            HangUp::Reset => {
                self.socket.set_zero_linger()?;
                let at = Instant::now();
                drop(self);
                Ok((at, None))
            }
        }
    }
}
