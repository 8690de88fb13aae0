//! Which protocol a client speaks, from its first bytes. Nothing is taken from the socket.

use std::{io, time::Duration};
use tokio::{net::TcpStream, time};

/// What an HTTP/2 client with prior knowledge says first (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Between two looks at a preface that arrives in pieces. A socket with bytes in it is always readable, so there is
/// nothing to wait for but time.
const PIECES: Duration = Duration::from_millis(5);

/// What a client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
    /// It went away.
    Closed,
    /// It said too little in time.
    Silent,
}

/// Looks at the first bytes of a connection.
pub(super) async fn detect(stream: &TcpStream, timeout: Duration) -> Protocol {
    time::timeout(timeout, look(stream))
        .await
        .unwrap_or(Ok(Protocol::Silent))
        .unwrap_or(Protocol::Closed)
}

async fn look(stream: &TcpStream) -> io::Result<Protocol> {
    let mut buf = [0u8; PREFACE.len()];
    loop {
        let n = stream.peek(&mut buf).await?;
        match judge(buf.get(..n).unwrap_or_default()) {
            Some(protocol) => return Ok(protocol),
            None => time::sleep(PIECES).await,
        }
    }
}

fn judge(head: &[u8]) -> Option<Protocol> {
    if head.is_empty() {
        Some(Protocol::Closed)
    } else if head == PREFACE {
        Some(Protocol::Http2)
    } else if PREFACE.starts_with(head) {
        None
    } else {
        Some(Protocol::Http1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{io::AsyncWriteExt, net::TcpListener};

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn first_bytes() {
        let long = Duration::from_secs(10);
        let short = Duration::from_millis(50);
        for (bytes, timeout, protocol) in [
            (&b"GET / HTTP/1.1\r\n"[..], long, Protocol::Http1),
            (b"POST", long, Protocol::Http1),
            (b"\x16\x03\x01", long, Protocol::Http1),
            (PREFACE, long, Protocol::Http2),
            (
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nand more",
                long,
                Protocol::Http2,
            ),
            (b"PRI", short, Protocol::Silent),
            (b"", short, Protocol::Silent),
        ] {
            let (mut client, server) = pair().await;
            client.write_all(bytes).await.unwrap();
            assert_eq!(detect(&server, timeout).await, protocol, "{bytes:?}");
        }
    }

    #[tokio::test]
    async fn in_pieces_or_not_at_all() {
        let (mut client, server) = pair().await;
        let seen = tokio::spawn(async move { detect(&server, Duration::from_secs(10)).await });
        for piece in PREFACE.chunks(7) {
            client.write_all(piece).await.unwrap();
            time::sleep(Duration::from_millis(3)).await;
        }
        assert_eq!(seen.await.unwrap(), Protocol::Http2);

        let (client, server) = pair().await;
        drop(client);
        assert_eq!(
            detect(&server, Duration::from_secs(10)).await,
            Protocol::Closed
        );
    }
}
