//! Helpers of this module's tests: what an engine would send.

pub(crate) mod http;

use super::source::TcpAddress;
use crate::events::{BlockStored, ExtraKey, GroupKind, KvEvent, Medium};
use bytes::Bytes;
use parking_lot::Mutex;
use rmp::encode as mp;
use std::{collections::HashSet, sync::Arc, time::Duration};
use zeromq::{Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

/// Which of vLLM's two encodings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Up to 0.23.
    Array,
    /// From 0.24 on.
    Map,
}

/// One block of four tokens.
pub(crate) fn stored(hash: u64, parent: Option<u64>) -> KvEvent {
    KvEvent::Stored(BlockStored {
        hashes: vec![hash],
        parent,
        tokens: vec![1, 2, 3, 4],
        block_size: 4,
        lora_name: None,
        extra_keys: vec![vec![]],
        medium: Medium::Gpu,
        group: 0,
        kind: GroupKind::Full,
    })
}

/// The payload of a batch.
pub(crate) fn payload(encoding: Encoding, ts: f64, events: &[KvEvent]) -> Vec<u8> {
    let mut out = Vec::new();
    mp::write_array_len(&mut out, 3).unwrap();
    mp::write_f64(&mut out, ts).unwrap();
    mp::write_array_len(&mut out, events.len() as u32).unwrap();
    for event in events {
        write_event(&mut out, encoding, event);
    }
    mp::write_uint(&mut out, 0).unwrap();
    out
}

fn write_event(out: &mut Vec<u8>, encoding: Encoding, event: &KvEvent) {
    let (tag, fields) = match event {
        KvEvent::Stored(s) => ("BlockStored", stored_fields(s)),
        KvEvent::Removed(r) => (
            "BlockRemoved",
            vec![
                ("block_hashes", hashes(&r.hashes)),
                ("medium", text(Some(word(r.medium)))),
                ("group_idx", uint(r.group.into())),
            ],
        ),
        KvEvent::Cleared => ("AllBlocksCleared", vec![]),
    };
    match encoding {
        Encoding::Array => {
            mp::write_array_len(out, 1 + fields.len() as u32).unwrap();
            mp::write_str(out, tag).unwrap();
            for (_, value) in fields {
                out.extend(value);
            }
        }
        Encoding::Map => {
            mp::write_map_len(out, 1 + fields.len() as u32).unwrap();
            mp::write_str(out, "type").unwrap();
            mp::write_str(out, tag).unwrap();
            for (key, value) in fields {
                mp::write_str(out, key).unwrap();
                out.extend(value);
            }
        }
    }
}

fn stored_fields(s: &BlockStored) -> Vec<(&'static str, Vec<u8>)> {
    let mut tokens = Vec::new();
    mp::write_array_len(&mut tokens, s.tokens.len() as u32).unwrap();
    for token in &s.tokens {
        mp::write_uint(&mut tokens, (*token).into()).unwrap();
    }
    let mut extra = Vec::new();
    mp::write_array_len(&mut extra, s.extra_keys.len() as u32).unwrap();
    for keys in &s.extra_keys {
        if keys.is_empty() {
            mp::write_nil(&mut extra).unwrap();
            continue;
        }
        mp::write_array_len(&mut extra, keys.len() as u32).unwrap();
        for key in keys {
            match key {
                ExtraKey::Text(word) => mp::write_str(&mut extra, word).unwrap(),
                ExtraKey::Opaque => {
                    mp::write_array_len(&mut extra, 2).unwrap();
                    mp::write_str(&mut extra, "media").unwrap();
                    mp::write_uint(&mut extra, 7).unwrap();
                }
            }
        }
    }
    let kind = match s.kind {
        GroupKind::Full => "full_attention",
        GroupKind::Other => "sliding_window",
    };
    vec![
        ("block_hashes", hashes(&s.hashes)),
        (
            "parent_block_hash",
            s.parent.map_or_else(|| text(None), uint),
        ),
        ("token_ids", tokens),
        ("block_size", uint(s.block_size.into())),
        ("lora_id", text(None)),
        ("medium", text(Some(word(s.medium)))),
        ("lora_name", text(s.lora_name.as_deref())),
        ("extra_keys", extra),
        ("group_idx", uint(s.group.into())),
        ("kv_cache_spec_kind", text(Some(kind))),
    ]
}

fn word(medium: Medium) -> &'static str {
    match medium {
        Medium::Gpu => "GPU",
        Medium::Cpu => "cpu",
        Medium::Disk => "STORAGE",
        Medium::Other => "holographic",
    }
}

fn hashes(hashes: &[u64]) -> Vec<u8> {
    let mut out = Vec::new();
    mp::write_array_len(&mut out, hashes.len() as u32).unwrap();
    for hash in hashes {
        mp::write_uint(&mut out, *hash).unwrap();
    }
    out
}

fn uint(n: u64) -> Vec<u8> {
    let mut out = Vec::new();
    mp::write_uint(&mut out, n).unwrap();
    out
}

fn text(word: Option<&str>) -> Vec<u8> {
    let mut out = Vec::new();
    match word {
        Some(word) => mp::write_str(&mut out, word).unwrap(),
        None => mp::write_nil(&mut out).unwrap(),
    }
    out
}

/// A publisher of KV events with a replay socket, in the ways that engines are and in the ways that they fail.
pub(crate) struct FakeEngine {
    publisher: zeromq::PubSocket,
    shared: Arc<Mutex<Fake>>,
    router: tokio::task::JoinHandle<()>,
    pub(crate) live: TcpAddress,
    pub(crate) replay: TcpAddress,
}

/// What the fake does.
#[derive(Default)]
pub(crate) struct Fake {
    /// Published batches that are still in the replay buffer.
    pub(crate) buffer: Vec<(u64, Vec<u8>)>,
    pub(crate) shape: Shape,
    /// The next replay stops after so many batches, for ever.
    pub(crate) stall_after: Option<usize>,
    /// Batches that no replay sends, as if the send queue had been full.
    pub(crate) omit: HashSet<u64>,
    /// The next replay leaves these out, the one after that does not.
    pub(crate) omit_once: HashSet<u64>,
    /// Junk goes in front of each replay.
    pub(crate) garbage: bool,
    /// Requests are not answered at all.
    pub(crate) mute: bool,
    /// The starts of the replays that were asked for.
    pub(crate) asked: Vec<u64>,
}

/// Frames of a replayed message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Shape {
    /// `["", sequence, payload]`
    Three,
    /// `["", topic, sequence, payload]`
    #[default]
    Four,
    /// `[sequence, payload]`
    NoDelimiter,
}

// === impl FakeEngine ===

impl FakeEngine {
    pub(crate) async fn start() -> Self {
        Self::start_at(0, 0).await
    }

    /// Another process at the same addresses.
    pub(crate) async fn restart(self) -> Self {
        let (live, replay) = (self.live.port, self.replay.port);
        self.stop().await;
        Self::start_at(live, replay).await
    }

    pub(crate) async fn stop(self) {
        self.router.abort();
        let _ = self.router.await;
        self.publisher.close().await;
    }

    pub(crate) async fn start_at(live: u16, replay: u16) -> Self {
        let mut publisher = zeromq::PubSocket::new();
        let live = bind(&mut publisher, live).await;
        let mut router = zeromq::RouterSocket::new();
        let replay = bind(&mut router, replay).await;
        let shared = Arc::<Mutex<Fake>>::default();
        let router = tokio::spawn(serve(router, shared.clone()));
        Self {
            publisher,
            shared,
            router,
            live,
            replay,
        }
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut Fake)) {
        change(&mut self.shared.lock());
    }

    pub(crate) fn asked(&self) -> Vec<u64> {
        self.shared.lock().asked.clone()
    }

    /// Puts a batch into the replay buffer; the live stream loses it.
    pub(crate) fn lose(&self, seq: u64, ts: f64, events: &[KvEvent]) -> Vec<u8> {
        let payload = payload(Encoding::Map, ts, events);
        self.shared.lock().buffer.push((seq, payload.clone()));
        payload
    }

    pub(crate) async fn publish(&mut self, seq: u64, ts: f64, events: &[KvEvent]) {
        let payload = self.lose(seq, ts, events);
        self.send(&[b"kv@fake", &seq.to_be_bytes(), &payload]).await;
    }

    pub(crate) async fn send(&mut self, frames: &[&[u8]]) {
        self.publisher.send(message(frames)).await.unwrap();
    }
}

async fn bind(socket: &mut impl zeromq::Socket, port: u16) -> TcpAddress {
    // The port of a socket that was just closed may take a moment.
    for _ in 0..100 {
        match socket.bind(&format!("tcp://127.0.0.1:{port}")).await {
            Ok(bound) => return TcpAddress::parse(&bound.to_string()).unwrap(),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    panic!("port {port} stays taken");
}

fn message(frames: &[&[u8]]) -> ZmqMessage {
    let frames: Vec<_> = frames.iter().map(|f| Bytes::copy_from_slice(f)).collect();
    ZmqMessage::try_from(frames).unwrap()
}

async fn serve(mut router: zeromq::RouterSocket, shared: Arc<Mutex<Fake>>) {
    loop {
        let Ok(request) = router.recv().await else {
            continue;
        };
        let frames = request.into_vec();
        let [peer, delimiter, from] = &frames[..] else {
            continue;
        };
        assert!(delimiter.is_empty());
        let from = u64::from_be_bytes(from[..].try_into().unwrap());
        let mut out: Vec<Vec<Vec<u8>>> = Vec::new();
        {
            let mut fake = shared.lock();
            fake.asked.push(from);
            if fake.mute {
                continue;
            }
            if fake.garbage {
                out.push(vec![b"two".to_vec(), b"frames".to_vec()]);
                out.push(vec![vec![]]);
            }
            let stall = fake.stall_after.take();
            let once = std::mem::take(&mut fake.omit_once);
            let batches = fake
                .buffer
                .iter()
                .filter(|(seq, _)| *seq >= from && !fake.omit.contains(seq) && !once.contains(seq));
            for (seq, payload) in batches.take(stall.unwrap_or(usize::MAX)) {
                let seq = seq.to_be_bytes().to_vec();
                out.push(match fake.shape {
                    Shape::Three => vec![vec![], seq, payload.clone()],
                    Shape::Four => vec![vec![], b"kv@fake".to_vec(), seq, payload.clone()],
                    Shape::NoDelimiter => vec![seq, payload.clone()],
                });
            }
            if stall.is_none() {
                let end = (-1i64).to_be_bytes().to_vec();
                out.push(match fake.shape {
                    Shape::Three => vec![vec![], end, vec![]],
                    Shape::Four => vec![vec![], vec![], end, vec![]],
                    Shape::NoDelimiter => vec![end, vec![]],
                });
            }
        }
        for frames in out {
            let mut all = vec![&peer[..]];
            all.extend(frames.iter().map(|f| &f[..]));
            if router.send(message(&all)).await.is_err() {
                break;
            }
        }
    }
}
