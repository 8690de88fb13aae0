//! A scripted engine: it answers each request byte by byte as its script says, and records what it was asked and when
//! its peer hung up.

use bytes::Bytes;
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Notify,
    time::Instant,
};

/// One move of an engine.
#[derive(Clone, Debug)]
pub enum Step {
    /// Writes bytes as they are, in one write.
    Write(Bytes),
    /// Does nothing for a while (but notices when the peer hangs up).
    Sleep(Duration),
    /// Does nothing until the peer hangs up.
    Hang,
    /// Closes in order.
    Fin,
    /// Resets.
    Rst,
}

/// A request as the engine saw it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Counts the requests of this engine from 0.
    pub number: usize,
    /// Counts its connections from 0.
    pub connection: usize,
    pub method: String,
    pub target: String,
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

#[derive(Default)]
struct Log {
    seen: Vec<Seen>,
    /// When the peer hung up, by number of the request that was being answered.
    closed: HashMap<usize, Instant>,
    connections: usize,
    open: usize,
}

/// A running engine; it stops when this is dropped.
pub struct FakeEngine {
    pub address: String,
    log: Arc<Mutex<Log>>,
    deaf: Arc<Notify>,
    task: tokio::task::JoinHandle<()>,
}

type Script = dyn Fn(&Seen) -> Vec<Step> + Send + Sync;

// === impl FakeEngine ===

impl FakeEngine {
    /// Starts an engine that answers by this script.
    pub async fn start(script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        Self::start_on(listener, script)
    }

    /// As [`Self::start`], on this socket.
    pub fn start_on(
        listener: TcpListener,
        script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().expect("an address").to_string();
        let log = Arc::<Mutex<Log>>::default();
        let script: Arc<Script> = Arc::new(script);
        let deaf = Arc::new(Notify::new());
        let task = tokio::spawn({
            let (log, deaf) = (log.clone(), deaf.clone());
            async move {
                let mut connections = tokio::task::JoinSet::new();
                loop {
                    let io = tokio::select! {
                        accepted = listener.accept() => match accepted {
                            Ok((io, _)) => io,
                            Err(_) => break,
                        },
                        () = deaf.notified() => break,
                    };
                    let number = {
                        let mut log = log.lock();
                        log.connections += 1;
                        log.open += 1;
                        log.connections - 1
                    };
                    let (log, script) = (log.clone(), script.clone());
                    connections.spawn(async move {
                        serve(io, number, &log, &*script).await;
                        log.lock().open -= 1;
                    });
                }
                drop(listener);
                while connections.join_next().await.is_some() {}
            }
        });
        Self {
            address,
            log,
            deaf,
            task,
        }
    }

    /// Its port refuses from now on; what is open hangs on, as with a vLLM whose process group died but for a child that
    /// holds the sockets.
    pub fn refuse(&self) {
        self.deaf.notify_one();
    }

    /// What it was asked so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.log.lock().seen.clone()
    }

    /// Connections that it ever accepted.
    pub fn connections(&self) -> usize {
        self.log.lock().connections
    }

    /// Connections that are open now.
    pub fn open(&self) -> usize {
        self.log.lock().open
    }

    /// Waits until this many requests came.
    pub async fn asked(&self, count: usize) {
        within(Duration::from_secs(5), "the engine is asked", || {
            self.log.lock().seen.len() >= count
        })
        .await;
    }

    /// Waits until the peer of request `number` has hung up, and says when that was.
    pub async fn closed(&self, number: usize) -> Instant {
        within(Duration::from_secs(5), "the engine's peer hangs up", || {
            self.log.lock().closed.contains_key(&number)
        })
        .await;
        self.log.lock().closed[&number]
    }

    /// Whether the peer of request `number` has hung up before its answer was complete.
    pub fn is_closed(&self, number: usize) -> bool {
        self.log.lock().closed.contains_key(&number)
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Waits for a condition, checking every millisecond.
pub async fn within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn serve(mut io: TcpStream, connection: usize, log: &Mutex<Log>, script: &Script) {
    io.set_nodelay(true).expect("a TCP socket");
    let mut buffer = Vec::new();
    while let Some(mut seen) = read_request(&mut io, &mut buffer).await {
        seen.connection = connection;
        let steps = {
            let mut log = log.lock();
            seen.number = log.seen.len();
            log.seen.push(seen.clone());
            script(&seen)
        };
        for step in steps {
            let gone = match step {
                Step::Write(bytes) => io.write_all(&bytes).await.is_err(),
                Step::Sleep(time) => tokio::time::timeout(time, hung_up(&mut io)).await.is_ok(),
                Step::Hang => {
                    hung_up(&mut io).await;
                    true
                }
                Step::Fin => return,
                Step::Rst => {
                    let _ = socket2::SockRef::from(&io).set_linger(Some(Duration::ZERO));
                    return;
                }
            };
            if gone {
                log.lock().closed.insert(seen.number, Instant::now());
                return;
            }
        }
    }
}

/// Resolves when the peer closed or reset.
async fn hung_up(io: &mut TcpStream) {
    let more = io.peek(&mut [0]).await.unwrap_or(0);
    assert!(more == 0, "bytes after a request that has no answer yet");
}

async fn read_request(io: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Seen> {
    let head_end = loop {
        if let Some(at) = find(buffer, b"\r\n\r\n") {
            break at + 4;
        }
        if io.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(&buffer[..head_end]).into_owned();
    buffer.drain(..head_end);
    let mut lines = head.lines();
    let mut first = lines.next()?.split(' ');
    let (method, target) = (first.next()?.to_owned(), first.next()?.to_owned());
    let mut headers = HashMap::new();
    for line in lines.filter(|l| !l.is_empty()) {
        let (name, value) = line.split_once(':')?;
        let old = headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        assert!(old.is_none(), "{name} came twice");
    }
    let chunked = headers
        .get("transfer-encoding")
        .is_some_and(|v| v == "chunked");
    assert!(
        !(chunked && headers.contains_key("content-length")),
        "two framings"
    );
    let body = if chunked {
        read_chunked(io, buffer).await?
    } else {
        let length = headers
            .get("content-length")
            .map_or(0, |v| v.parse().expect("a length"));
        fill(io, buffer, length).await?;
        buffer.drain(..length).collect()
    };
    Some(Seen {
        number: 0,
        connection: 0,
        method,
        target,
        headers,
        body,
    })
}

async fn read_chunked(io: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let at = loop {
            if let Some(at) = find(buffer, b"\r\n") {
                break at;
            }
            if io.read_buf(buffer).await.ok()? == 0 {
                return None;
            }
        };
        let line = String::from_utf8_lossy(&buffer[..at]).into_owned();
        buffer.drain(..at + 2);
        let length = usize::from_str_radix(line.split(';').next()?.trim(), 16).ok()?;
        fill(io, buffer, length + 2).await?;
        body.extend(buffer.drain(..length));
        buffer.drain(..2);
        if length == 0 {
            return Some(body);
        }
    }
}

async fn fill(io: &mut TcpStream, buffer: &mut Vec<u8>, length: usize) -> Option<()> {
    while buffer.len() < length {
        if io.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    Some(())
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    memchr::memmem::find(haystack, needle)
}
