//! A small ZMTP 3 client over TCP: what it takes to be a SUB or a DEALER of one peer.
//!
//! Sources: ZMTP 3.0 (<https://rfc.zeromq.org/spec/23/>) and the heartbeat commands of 3.1
//! (<https://rfc.zeromq.org/spec/37/>). Why not the `zeromq` crate (0.7): it reserves memory for whatever length a frame
//! header claims, so that nine bytes from a peer end the process; its reconnecting is a task of its own, which hides the
//! very reconnects after which a replay is due; and it has no heartbeat, so that a peer that vanished without a FIN is
//! never missed. Here a connection is a value: it has a size limit, it ends with an error, and dropping it closes it.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::{io, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep_until, timeout},
};

/// The two kinds of socket that a listener to KV events needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketType {
    Sub,
    Dealer,
}

/// Bounds of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// To connect and shake hands.
    pub(crate) connect: Duration,
    /// Bytes in a message, all frames together.
    pub(crate) message: usize,
    /// Silence after which the peer is asked for a sign of life, if it understands that.
    pub(crate) ping: Duration,
    /// Silence after which the peer is gone, if it was asked.
    pub(crate) silence: Duration,
}

/// Why a connection cannot be had, or ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ZmtpError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("no handshake in time")]
    Timeout,
    #[error("the peer closed the connection")]
    Closed,
    #[error("the peer has been silent for too long")]
    Silent,
    #[error("the peer speaks no ZMTP 3 without encryption: {0}")]
    Handshake(&'static str),
    #[error("the peer refused: {0}")]
    Refused(String),
    #[error("a message of more than {limit} bytes or {MAX_FRAMES} frames")]
    TooLarge { limit: usize },
}

/// A connection to one peer.
pub(crate) struct Socket {
    stream: TcpStream,
    limits: Limits,
    /// Whether the peer knows PING (ZMTP 3.1).
    heartbeats: bool,
    input: BytesMut,
    output: BytesMut,
    /// Frames of a message whose last frame is still to come.
    parts: Vec<Bytes>,
    parts_bytes: usize,
}

enum Frame {
    Command(Bytes),
    Message(Vec<Bytes>),
}

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
const MAX_FRAMES: usize = 16;
const GREETING: usize = 64;
/// Answers that may wait to be written before further ones are left out.
const MAX_OUTPUT: usize = 4096;

// === impl SocketType ===

impl SocketType {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Sub => b"SUB",
            Self::Dealer => b"DEALER",
        }
    }

    fn peers(self) -> [&'static [u8]; 2] {
        match self {
            Self::Sub => [b"PUB", b"XPUB"],
            Self::Dealer => [b"ROUTER", b"REP"],
        }
    }
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            message: 8 << 20,
            ping: Duration::from_secs(2),
            silence: Duration::from_secs(10),
        }
    }
}

// === impl Socket ===

impl Socket {
    /// Connects and shakes hands.
    pub(crate) async fn connect(
        address: (&str, u16),
        kind: SocketType,
        limits: Limits,
    ) -> Result<Self, ZmtpError> {
        timeout(limits.connect, async {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let mut socket = Self {
                stream,
                limits,
                heartbeats: false,
                input: BytesMut::new(),
                output: BytesMut::new(),
                parts: Vec::new(),
                parts_bytes: 0,
            };
            socket.handshake(kind).await?;
            Ok(socket)
        })
        .await
        .unwrap_or(Err(ZmtpError::Timeout))
    }

    /// Subscribes to every topic (SUB).
    pub(crate) async fn subscribe_all(&mut self) -> Result<(), ZmtpError> {
        self.send(&[Bytes::from_static(&[1])]).await
    }

    /// Sends one message.
    pub(crate) async fn send(&mut self, frames: &[Bytes]) -> Result<(), ZmtpError> {
        for (i, frame) in frames.iter().enumerate() {
            let more = if i + 1 < frames.len() { MORE } else { 0 };
            put_frame(&mut self.output, more, frame);
        }
        self.stream.write_all_buf(&mut self.output).await?;
        Ok(())
    }

    /// Waits for the next message. Nothing is lost when the future is dropped.
    pub(crate) async fn recv(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        let mut heard = Instant::now();
        let mut asked = heard;
        loop {
            while let Some(frame) = self.next_frame()? {
                match frame {
                    Frame::Message(parts) => return Ok(parts),
                    Frame::Command(body) => self.command(&body)?,
                }
            }
            let (mut read, mut write) = self.stream.split();
            tokio::select! {
                written = write.write_buf(&mut self.output), if !self.output.is_empty() => {
                    written?;
                }
                n = read.read_buf(&mut self.input) => {
                    if n? == 0 {
                        return Err(ZmtpError::Closed);
                    }
                    heard = Instant::now();
                    asked = heard;
                }
                () = sleep_until(asked + self.limits.ping), if self.heartbeats => {
                    asked = Instant::now();
                    if asked.saturating_duration_since(heard) >= self.limits.silence {
                        return Err(ZmtpError::Silent);
                    }
                    // A time to live of 0: the peer need not watch us in turn.
                    self.put_command(b"\x04PING\0\0");
                }
            }
        }
    }

    async fn handshake(&mut self, kind: SocketType) -> Result<(), ZmtpError> {
        let mut greeting = [0; GREETING];
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10] = 3;
        greeting[12..16].copy_from_slice(b"NULL");
        self.output.extend_from_slice(&greeting);
        let mut ready = BytesMut::new();
        ready.extend_from_slice(b"\x05READY\x0bSocket-Type");
        ready.put_u32(kind.name().len() as u32);
        ready.extend_from_slice(kind.name());
        put_frame(&mut self.output, COMMAND, &ready);
        self.stream.write_all_buf(&mut self.output).await?;

        while self.input.len() < GREETING {
            // Whatever talks first and not like this is not worth waiting for.
            if self.input.first().is_some_and(|b| *b != 0xff) {
                return Err(ZmtpError::Handshake("no greeting"));
            }
            self.fill().await?;
        }
        let theirs = self.input.split_to(GREETING);
        let (signature, rest) = theirs.split_at(10);
        if signature.first() != Some(&0xff) || signature.last() != Some(&0x7f) {
            return Err(ZmtpError::Handshake("no greeting"));
        }
        let minor = match rest {
            [3, minor, mechanism @ ..] if mechanism.starts_with(b"NULL\0") => *minor,
            [3, ..] => return Err(ZmtpError::Handshake("it wants a security mechanism")),
            _ => return Err(ZmtpError::Handshake("another version")),
        };
        self.heartbeats = minor >= 1;
        loop {
            match self.next_frame()? {
                Some(Frame::Command(body)) if body.starts_with(b"\x05READY") => {
                    let theirs = socket_type(&body);
                    return match theirs {
                        Some(name) if kind.peers().contains(&name) => Ok(()),
                        _ => Err(ZmtpError::Handshake("it is another type of socket")),
                    };
                }
                Some(Frame::Command(body)) => self.command(&body)?,
                Some(Frame::Message(_)) => return Err(ZmtpError::Handshake("no READY")),
                None => self.fill().await?,
            }
        }
    }

    async fn fill(&mut self) -> Result<(), ZmtpError> {
        match self.stream.read_buf(&mut self.input).await? {
            0 => Err(ZmtpError::Closed),
            _ => Ok(()),
        }
    }

    fn command(&mut self, body: &[u8]) -> Result<(), ZmtpError> {
        if let Some(ping) = body.strip_prefix(b"\x04PING") {
            // Two bytes of time to live, then a context of at most 16 bytes to send back.
            let context = ping.get(2..).unwrap_or_default();
            let context = context.get(..16).unwrap_or(context);
            self.put_command(&[b"\x04PONG", context].concat());
        } else if let Some(reason) = body.strip_prefix(b"\x05ERROR") {
            let reason = reason.get(1..).unwrap_or_default();
            let reason = String::from_utf8_lossy(reason);
            return Err(ZmtpError::Refused(
                reason.escape_debug().take(200).collect(),
            ));
        }
        Ok(())
    }

    fn put_command(&mut self, body: &[u8]) {
        if self.output.len() < MAX_OUTPUT {
            put_frame(&mut self.output, COMMAND, body);
        }
    }

    /// Takes a command or a whole message out of the input, if one is there.
    fn next_frame(&mut self) -> Result<Option<Frame>, ZmtpError> {
        loop {
            let Some((flags, header, size)) = self.header() else {
                return Ok(None);
            };
            let too_large = ZmtpError::TooLarge {
                limit: self.limits.message,
            };
            let size = match usize::try_from(size) {
                Ok(size) if size <= self.limits.message.saturating_sub(self.parts_bytes) => size,
                _ => return Err(too_large),
            };
            if self.input.len() < header + size {
                return Ok(None);
            }
            self.input.advance(header);
            let body = self.input.split_to(size).freeze();
            if flags & COMMAND != 0 {
                return Ok(Some(Frame::Command(body)));
            }
            if self.parts.len() == MAX_FRAMES {
                return Err(too_large);
            }
            self.parts_bytes += size;
            self.parts.push(body);
            if flags & MORE == 0 {
                self.parts_bytes = 0;
                return Ok(Some(Frame::Message(std::mem::take(&mut self.parts))));
            }
        }
    }

    /// The next frame's flags, the length of its header, and its size.
    fn header(&self) -> Option<(u8, usize, u64)> {
        let (flags, rest) = self.input.split_first()?;
        match flags & LONG {
            0 => Some((*flags, 2, u64::from(*rest.first()?))),
            _ => Some((*flags, 9, u64::from_be_bytes(*rest.first_chunk()?))),
        }
    }
}

fn put_frame(out: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(len) => out.extend_from_slice(&[flags, len]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(body.len() as u64);
        }
    }
    out.extend_from_slice(body);
}

/// The property `Socket-Type` of a READY command.
fn socket_type(ready: &[u8]) -> Option<&[u8]> {
    let mut rest = ready.get(6..)?;
    while let Some((name_len, after)) = rest.split_first() {
        let (name, after) = after.split_at_checked(usize::from(*name_len))?;
        let (value_len, after) = after.split_first_chunk::<4>()?;
        let value_len = usize::try_from(u32::from_be_bytes(*value_len)).ok()?;
        let (value, after) = after.split_at_checked(value_len)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        rest = after;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;
    use zeromq::{Socket as _, SocketRecv, SocketSend, ZmqMessage};

    /// A peer by hand: its greeting, its READY, then whatever the test says.
    async fn peer(minor: u8, then: &'static [u8]) -> (u16, tokio::task::JoinHandle<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut hello = [0; GREETING];
            hello[0] = 0xff;
            hello[9] = 0x7f;
            hello[10] = 3;
            hello[11] = minor;
            hello[12..16].copy_from_slice(b"NULL");
            let mut out = BytesMut::from(&hello[..]);
            put_frame(
                &mut out,
                COMMAND,
                b"\x05READY\x08Identity\0\0\0\0\x0bSocket-Type\0\0\0\x03PUB",
            );
            out.extend_from_slice(then);
            stream.write_all(&out).await.unwrap();
            // Until the client closes.
            let mut heard = Vec::new();
            let _ = stream.read_to_end(&mut heard).await;
            heard
        });
        (port, task)
    }

    async fn sub(port: u16, limits: Limits) -> Result<Socket, ZmtpError> {
        Socket::connect(("127.0.0.1", port), SocketType::Sub, limits).await
    }

    fn limits() -> Limits {
        Limits {
            message: 1000,
            ping: Duration::from_millis(20),
            silence: Duration::from_millis(200),
            ..Limits::default()
        }
    }

    #[tokio::test]
    async fn hears_another_implementation_and_talks_to_it() {
        let mut publisher = zeromq::PubSocket::new();
        let bound = publisher.bind("tcp://127.0.0.1:0").await.unwrap();
        let zeromq::Endpoint::Tcp(_, port) = bound else {
            panic!("{bound}");
        };
        let mut socket = sub(port, Limits::default()).await.unwrap();
        socket.subscribe_all().await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        let big = Bytes::from(vec![7; 300_000]);
        for frames in [
            vec![Bytes::from_static(b"t"), Bytes::new(), big.clone()],
            vec![Bytes::from_static(b"u")],
        ] {
            publisher
                .send(ZmqMessage::try_from(frames.clone()).unwrap())
                .await
                .unwrap();
            assert_eq!(socket.recv().await.unwrap(), frames);
        }
        drop(publisher);
        assert!(matches!(
            socket.recv().await,
            Err(ZmtpError::Closed | ZmtpError::Io(_))
        ));

        let mut router = zeromq::RouterSocket::new();
        let zeromq::Endpoint::Tcp(_, port) = router.bind("tcp://127.0.0.1:0").await.unwrap() else {
            panic!("no port");
        };
        let mut dealer =
            Socket::connect(("127.0.0.1", port), SocketType::Dealer, Limits::default())
                .await
                .unwrap();
        let asked = [Bytes::new(), Bytes::from_static(b"12345678")];
        dealer.send(&asked).await.unwrap();
        let heard = router.recv().await.unwrap();
        assert_eq!(heard.iter().skip(1).cloned().collect::<Vec<_>>(), asked);
        router.send(heard).await.unwrap();
        assert_eq!(dealer.recv().await.unwrap(), asked);
    }

    #[tokio::test]
    async fn a_frame_that_claims_too_much_is_refused_before_it_is_buffered() {
        for then in [
            // 2^46 bytes, in one frame.
            &[LONG, 0, 0, 0x40, 0, 0, 0, 0, 0, b'x'][..],
            &[LONG, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            // 17 empty frames.
            &[MORE, 0].repeat(17).leak()[..],
            // Two frames that fit alone.
            &[
                &[MORE | LONG, 0, 0, 0, 0, 0, 0, 3, 0][..],
                &[0; 768],
                &[0, 0xff],
            ]
            .concat()
            .leak()[..],
            // A command.
            &[COMMAND | LONG, 0, 0, 0, 0, 1, 0, 0, 0],
        ] {
            let (port, peer) = peer(0, then).await;
            let mut socket = sub(port, limits()).await.unwrap();
            let error = socket.recv().await.unwrap_err();
            assert!(
                matches!(error, ZmtpError::TooLarge { limit: 1000 }),
                "{error}"
            );
            drop(socket);
            peer.await.unwrap();
        }
    }

    #[tokio::test]
    async fn asks_a_silent_peer_for_a_sign_of_life_and_misses_it() {
        let (port, peer) = peer(1, b"").await;
        let mut socket = sub(port, limits()).await.unwrap();
        assert!(matches!(socket.recv().await, Err(ZmtpError::Silent)));
        drop(socket);
        let heard = peer.await.unwrap();
        let pings = heard.windows(7).filter(|w| *w == b"\x04PING\0\0").count();
        assert!((2..=20).contains(&pings), "{pings}");
    }

    #[tokio::test]
    async fn a_peer_of_3_0_is_not_pinged() {
        let (port, peer) = peer(0, b"").await;
        let mut socket = sub(port, limits()).await.unwrap();
        let waited = timeout(Duration::from_millis(300), socket.recv()).await;
        assert!(waited.is_err(), "{waited:?}");
        drop(socket);
        let heard = peer.await.unwrap();
        assert!(!heard.windows(4).any(|w| w == b"PING"));
    }

    #[tokio::test]
    async fn answers_pings_between_messages() {
        let (port, peer) = peer(1, b"\x04\x0a\x04PING\0\x0aabc\x00\x02hi").await;
        let mut socket = sub(port, limits()).await.unwrap();
        assert_eq!(socket.recv().await.unwrap(), [Bytes::from_static(b"hi")]);
        // The answer leaves with the next wait.
        let _ = timeout(Duration::from_millis(10), socket.recv()).await;
        drop(socket);
        let heard = peer.await.unwrap();
        assert!(
            heard.windows(10).any(|w| w == b"\x04\x08\x04PONGabc"),
            "{heard:?}"
        );
    }

    #[tokio::test]
    async fn says_why_there_is_no_handshake() {
        // Something that is no ZMQ at all.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let http = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream
                .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                .await
                .unwrap();
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
        });
        let error = sub(port, Limits::default()).await.err().unwrap();
        assert!(error.to_string().contains("no greeting"), "{error}");
        http.await.unwrap();

        // Something that accepts and says nothing.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let limits = Limits {
            connect: Duration::from_millis(50),
            ..Limits::default()
        };
        assert!(matches!(sub(port, limits).await, Err(ZmtpError::Timeout)));

        // A ROUTER where a PUB should be.
        let mut router = zeromq::RouterSocket::new();
        let zeromq::Endpoint::Tcp(_, port) = router.bind("tcp://127.0.0.1:0").await.unwrap() else {
            panic!("no port");
        };
        let error = sub(port, Limits::default()).await.err().unwrap();
        assert!(
            matches!(
                error,
                ZmtpError::Handshake(_) | ZmtpError::Closed | ZmtpError::Io(_)
            ),
            "{error}"
        );
    }
}
