//! The publisher's side of KV events: a ZMTP 3.1 PUB and the ROUTER that replays, over any connection.
//!
//! Sources: <https://rfc.zeromq.org/spec/23/> and <https://rfc.zeromq.org/spec/37/>. Written out here, and not left to a
//! ZMQ library, because it must also run over connections in memory and in paused time.

use super::events::{self, EventSink};
use crate::KvChange;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use parking_lot::Mutex;
use std::{collections::VecDeque, io, net::SocketAddr, sync::Arc};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpListener,
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
};

/// Publishes batches to subscribers and replays them to whoever missed some. All clones are the same.
#[derive(Clone)]
pub struct Publisher {
    inner: Arc<Inner>,
}

struct Inner {
    topic: Bytes,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    buffer: VecDeque<(u64, Bytes)>,
    subscribers: Vec<UnboundedSender<(u64, Bytes)>>,
}

#[derive(Clone, Copy)]
enum Kind {
    Pub,
    Router,
}

enum Frame {
    Command(Bytes),
    /// The frames of a message.
    Message(Vec<Bytes>),
}

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Batches that can be replayed: vLLM's `buffer_steps`.
const BUFFER: usize = 10_000;
/// Nobody sends a publisher more than this.
const MAX_FRAME: u64 = 1 << 16;
const MAX_FRAMES: usize = 16;

// === impl Publisher ===

impl Publisher {
    /// A publisher of this topic.
    pub fn new(topic: impl Into<String>) -> Self {
        Self {
            inner: Arc::new(Inner {
                topic: topic.into().into(),
                state: Mutex::default(),
            }),
        }
    }

    /// Its topic.
    pub fn topic(&self) -> &[u8] {
        &self.inner.topic
    }

    /// Accepts subscribers on a socket, for ever.
    pub async fn listen(self, listener: TcpListener) -> io::Result<()> {
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let this = self.clone();
            tokio::spawn(async move { this.serve(stream).await });
        }
    }

    /// Accepts those who want a replay on a socket, for ever.
    pub async fn listen_replay(self, listener: TcpListener) -> io::Result<()> {
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let this = self.clone();
            tokio::spawn(async move { this.serve_replay(stream).await });
        }
    }

    /// Publishes to one subscriber until it leaves.
    pub async fn serve(self, mut io: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
        let mut input = handshake(&mut io, Kind::Pub).await?;
        let (sender, mut batches) = unbounded_channel();
        let mut sender = Some(sender);
        // No batch is sent before a subscription, as a PUB does.
        let mut wanted: Vec<Bytes> = Vec::new();
        let mut parts = Vec::new();
        loop {
            tokio::select! {
                batch = next(&mut batches) => {
                    let (seq, payload) = batch;
                    if wanted.iter().any(|prefix| self.inner.topic.starts_with(prefix)) {
                        let seq = Bytes::copy_from_slice(&seq.to_be_bytes());
                        send(&mut io, &[self.inner.topic.clone(), seq, payload]).await?;
                    }
                }
                frame = read(&mut io, &mut input, &mut parts) => match subscription(frame?) {
                    Said::Subscribe(prefix) => {
                        wanted.push(prefix);
                        if let Some(sender) = sender.take() {
                            self.inner.state.lock().subscribers.push(sender);
                        }
                    }
                    Said::Cancel(prefix) => wanted.retain(|w| *w != prefix),
                    Said::Ping(context) => pong(&mut io, &context).await?,
                    Said::Other => {}
                }
            }
        }
    }

    /// Answers one peer's requests for a replay until it leaves.
    pub async fn serve_replay(self, mut io: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
        let mut input = handshake(&mut io, Kind::Router).await?;
        let mut parts = Vec::new();
        loop {
            let frames = match read(&mut io, &mut input, &mut parts).await? {
                Frame::Message(frames) => frames,
                command => {
                    if let Said::Ping(context) = subscription(command) {
                        pong(&mut io, &context).await?;
                    }
                    continue;
                }
            };
            // Anything else gets no answer, as in vLLM.
            let [delimiter, start] = frames.as_slice() else {
                continue;
            };
            let Ok(start) = <[u8; 8]>::try_from(&start[..]).map(u64::from_be_bytes) else {
                continue;
            };
            let batches: Vec<_> = {
                let state = self.inner.state.lock();
                let batches = state.buffer.iter().filter(|(seq, _)| *seq >= start);
                batches.cloned().collect()
            };
            for (seq, payload) in batches {
                let seq = Bytes::copy_from_slice(&seq.to_be_bytes());
                let topic = self.inner.topic.clone();
                send(&mut io, &[delimiter.clone(), topic, seq, payload]).await?;
            }
            let end = Bytes::copy_from_slice(&(-1i64).to_be_bytes());
            send(
                &mut io,
                &[delimiter.clone(), Bytes::new(), end, Bytes::new()],
            )
            .await?;
        }
    }
}

impl EventSink for Publisher {
    fn publish(&mut self, seq: u64, ts: f64, changes: &[KvChange]) {
        let payload = Bytes::from(events::payload(ts, changes));
        let mut state = self.inner.state.lock();
        state.buffer.push_back((seq, payload.clone()));
        if state.buffer.len() > BUFFER {
            state.buffer.pop_front();
        }
        let alive = |to: &UnboundedSender<_>| to.send((seq, payload.clone())).is_ok();
        state.subscribers.retain(alive);
    }
}

/// The two sockets of a publisher, opened at ports that the kernel chooses.
#[derive(Clone, Copy, Debug)]
pub struct Sockets {
    /// Where subscribers connect.
    pub live: SocketAddr,
    /// Where replays are asked for.
    pub replay: SocketAddr,
}

/// Opens both sockets of a publisher on this host and serves them for ever.
pub async fn open(publisher: &Publisher, host: &str) -> io::Result<Sockets> {
    let live = TcpListener::bind((host, 0)).await?;
    let replay = TcpListener::bind((host, 0)).await?;
    let sockets = Sockets {
        live: live.local_addr()?,
        replay: replay.local_addr()?,
    };
    tokio::spawn(publisher.clone().listen(live));
    tokio::spawn(publisher.clone().listen_replay(replay));
    Ok(sockets)
}

/// The next batch; never ends, also before there is a subscription.
async fn next(batches: &mut UnboundedReceiver<(u64, Bytes)>) -> (u64, Bytes) {
    match batches.recv().await {
        Some(batch) => batch,
        None => std::future::pending().await,
    }
}

/// What a subscriber says.
enum Said {
    Subscribe(Bytes),
    Cancel(Bytes),
    Ping(Bytes),
    Other,
}

/// Subscriptions are messages in ZMTP 3.0 and commands from 3.1 on; libzmq sends messages to both.
fn subscription(frame: Frame) -> Said {
    match frame {
        Frame::Message(mut frames) => {
            let Some(mut first) = frames.drain(..).next() else {
                return Said::Other;
            };
            match first.first() {
                Some(1) => Said::Subscribe(first.split_off(1)),
                Some(0) => Said::Cancel(first.split_off(1)),
                _ => Said::Other,
            }
        }
        Frame::Command(mut command) => {
            let name = match command.first() {
                Some(&n) if command.len() > usize::from(n) => {
                    command.advance(1);
                    command.split_to(n.into())
                }
                _ => return Said::Other,
            };
            match &name[..] {
                b"SUBSCRIBE" => Said::Subscribe(command),
                b"CANCEL" => Said::Cancel(command),
                // Two bytes of time to live, then what comes back.
                b"PING" if command.len() >= 2 => Said::Ping(command.split_off(2)),
                _ => Said::Other,
            }
        }
    }
}

async fn pong(io: &mut (impl AsyncWrite + Unpin), context: &[u8]) -> io::Result<()> {
    let mut body = vec![4];
    body.extend(b"PONG");
    body.extend(context);
    let mut out = BytesMut::new();
    put_frame(&mut out, COMMAND, &body);
    io.write_all(&out).await
}

/// Greeting and READY, both ways; gives what was read beyond them.
async fn handshake(
    io: &mut (impl AsyncRead + AsyncWrite + Unpin),
    kind: Kind,
) -> io::Result<BytesMut> {
    let mut out = BytesMut::new();
    out.put_slice(&[0xFF, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F, 3, 1]);
    out.put_slice(b"NULL");
    out.resize(64, 0);
    let mut ready = vec![5];
    ready.extend(b"READY");
    ready.push(11);
    ready.extend(b"Socket-Type");
    let name: &[u8] = match kind {
        Kind::Pub => b"PUB",
        Kind::Router => b"ROUTER",
    };
    ready.extend((name.len() as u32).to_be_bytes());
    ready.extend(name);
    put_frame(&mut out, COMMAND, &ready);
    io.write_all(&out).await?;

    let mut input = BytesMut::new();
    while input.len() < 64 {
        fill(io, &mut input).await?;
    }
    let greeting = input.split_to(64);
    if greeting.first() != Some(&0xFF) || greeting.get(10).is_none_or(|major| *major < 3) {
        return Err(invalid("not ZMTP 3"));
    }
    match read(io, &mut input, &mut Vec::new()).await? {
        Frame::Command(command) if command.starts_with(b"\x05READY") => Ok(input),
        _ => Err(invalid("no READY")),
    }
}

/// The next command or message; what has come of one so far stays in `input` and `parts`, so that this can be dropped.
async fn read(
    io: &mut (impl AsyncRead + Unpin),
    input: &mut BytesMut,
    parts: &mut Vec<Bytes>,
) -> io::Result<Frame> {
    loop {
        let Some((flags, body)) = take_frame(input)? else {
            fill(io, input).await?;
            continue;
        };
        if flags & COMMAND != 0 {
            return Ok(Frame::Command(body));
        }
        parts.push(body);
        if parts.len() > MAX_FRAMES {
            return Err(invalid("too many frames"));
        }
        if flags & MORE == 0 {
            return Ok(Frame::Message(std::mem::take(parts)));
        }
    }
}

fn take_frame(input: &mut BytesMut) -> io::Result<Option<(u8, Bytes)>> {
    let mut header = &input[..];
    let Ok(flags) = header.try_get_u8() else {
        return Ok(None);
    };
    let len = if flags & LONG != 0 {
        header.try_get_u64().ok()
    } else {
        header.try_get_u8().ok().map(u64::from)
    };
    let Some(len) = len else {
        return Ok(None);
    };
    if len > MAX_FRAME {
        return Err(invalid("a frame that is too long"));
    }
    if (header.len() as u64) < len {
        return Ok(None);
    }
    let start = input.len() - header.len();
    input.advance(start);
    Ok(Some((flags, input.split_to(len as usize).freeze())))
}

async fn fill(io: &mut (impl AsyncRead + Unpin), input: &mut BytesMut) -> io::Result<()> {
    match io.read_buf(input).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    }
}

async fn send(io: &mut (impl AsyncWrite + Unpin), frames: &[Bytes]) -> io::Result<()> {
    let mut out = BytesMut::new();
    for (i, frame) in frames.iter().enumerate() {
        let more = if i + 1 < frames.len() { MORE } else { 0 };
        put_frame(&mut out, more, frame);
    }
    io.write_all(&out).await
}

fn put_frame(out: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(len) => {
            out.put_u8(flags);
            out.put_u8(len);
        }
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(body.len() as u64);
        }
    }
    out.put_slice(body);
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
