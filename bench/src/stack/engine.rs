//! Simulated pods that speak HTTP in memory.

use crate::world::{Change, Fleet, Record, Request as Sent, World, event_batch, load_report};
use bytes::Bytes;
use forebay_proxy::http::client::{BoxIo, Connect};
use forebay_sim::{KvChange, Output};
use futures::future::BoxFuture;
use http::{Request, Response, header};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    collections::{HashMap, VecDeque},
    convert::Infallible,
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant, sleep_until},
};
use tower_ttft::pool::Endpoint;

/// Bytes that a connection holds in each direction: a request fits.
const BUFFER: usize = 128 << 10;

/// Generated tokens per event of a stream after the first.
const TOKENS_PER_EVENT: u32 = 16;

/// The pods of a world and the task that lets them live. All clones are the same.
#[derive(Clone)]
pub(super) struct Engines {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Something happens earlier than was known.
    woken: Notify,
    start: Instant,
}

struct State {
    fleet: Fleet,
    /// Requests that are on their way, by number.
    expected: HashMap<u64, Sent>,
    /// Where tokens go, and where the request is.
    open: HashMap<u64, Stream>,
    /// KV events on their way.
    events: VecDeque<(f64, usize, Vec<KvChange>)>,
    /// What is known of each request that arrived.
    went: HashMap<u64, Went>,
    said: Vec<(usize, Output)>,
    /// Seconds until an event has arrived; none if there are none.
    delay: Option<f64>,
}

/// Where a request went, and what was held when it arrived.
struct Went {
    pod: usize,
    known: u32,
    best: u32,
    held: u32,
    ahead: u32,
}

struct Stream {
    pod: usize,
    to: mpsc::UnboundedSender<Bytes>,
    prompt: u32,
    generated: u32,
}

/// Connects to pods.
pub(super) struct InMemory {
    engines: Engines,
}

/// The events of an answer. Dropping it tells the pod.
struct Events {
    id: u64,
    from: mpsc::UnboundedReceiver<Bytes>,
    engines: Engines,
}

// === impl Engines ===

impl Engines {
    /// Starts pods whose endpoints hear of them.
    pub(super) fn start(world: &World, endpoints: Vec<Endpoint>, start: Instant) -> Self {
        let engines = Self {
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    fleet: Fleet::new(world),
                    expected: HashMap::new(),
                    open: HashMap::new(),
                    events: VecDeque::new(),
                    went: HashMap::new(),
                    said: Vec::new(),
                    delay: world.senses.events,
                }),
                woken: Notify::new(),
                start,
            }),
        };
        let senses = world.senses;
        let reports = (0..endpoints.len())
            .map(|pod| ((0.1 + 0.37 * pod as f64).fract() * senses.every, pod))
            .collect();
        let life = Life {
            engines: engines.clone(),
            endpoints,
            seqs: vec![0; world.pods.len()],
            reports,
            every: senses.every,
            changes: world.changes.iter().cloned().collect(),
        };
        tokio::spawn(life.live());
        engines
    }

    /// A request of this number will come.
    pub(super) fn expect(&self, id: u64, request: Sent) {
        self.shared.state.lock().expected.insert(id, request);
    }

    /// Adds to records what only pods know.
    pub(super) fn fill(&self, records: &mut [Record]) {
        let state = self.shared.state.lock();
        for (id, went) in &state.went {
            if let Some(r) = records.get_mut(*id as usize) {
                (r.pod, r.ahead) = (went.pod, went.ahead);
                (r.known, r.best, r.held) = (went.known, went.best, went.held);
            }
        }
    }

    fn now(&self) -> f64 {
        let now = Instant::now();
        now.saturating_duration_since(self.shared.start)
            .as_secs_f64()
    }

    /// A request arrives at a pod; its events.
    fn submit(&self, id: u64, pod: usize) -> Option<Events> {
        let now = self.now();
        let mut state = self.shared.state.lock();
        state.live(now);
        let request = state.expected.remove(&id)?;
        let joined: Vec<usize> = state.fleet.joined().collect();
        let held = |i: usize| state.fleet.cached(i, &request.prompt);
        let best = joined.into_iter().map(held).max().unwrap_or(0);
        let went = Went {
            pod,
            known: state.fleet.known(&request.prompt),
            best,
            held: held(pod),
            ahead: state.fleet.before_first_token(pod),
        };
        state.went.insert(id, went);
        state.fleet.submit(pod, now, &request);
        let (to, from) = mpsc::unbounded_channel();
        state.open.insert(
            id,
            Stream {
                pod,
                to,
                prompt: request.tokens(),
                generated: 0,
            },
        );
        self.shared.woken.notify_one();
        Some(Events {
            id,
            from,
            engines: self.clone(),
        })
    }

    fn cancel(&self, id: u64) {
        let now = self.now();
        let mut state = self.shared.state.lock();
        if let Some(stream) = state.open.remove(&id) {
            state.live(now);
            state.fleet.cancel(stream.pod, id, stream.generated > 0);
            self.shared.woken.notify_one();
        }
    }
}

/// The task of all pods.
struct Life {
    engines: Engines,
    endpoints: Vec<Endpoint>,
    seqs: Vec<u64>,
    reports: Vec<(f64, usize)>,
    every: f64,
    changes: VecDeque<(f64, Change)>,
}

// === impl Life ===

impl Life {
    async fn live(mut self) {
        let shared = self.engines.shared.clone();
        loop {
            let next = self.step();
            let at = super::moment(shared.start, next);
            tokio::select! {
                biased;
                () = shared.woken.notified() => {}
                () = sleep_until(at) => {}
            }
        }
    }

    /// Does what is due; when something is next.
    fn step(&mut self) -> f64 {
        let now = self.engines.now();
        let mut state = self.engines.shared.state.lock();
        while let Some((_, change)) = self.changes.pop_front_if(|(at, _)| *at <= now) {
            state.live(now);
            state.fleet.change(&change);
            if let Change::Join(pod) = change
                && let Some(endpoint) = self.endpoints.get(pod)
            {
                endpoint.set_ready(true);
            }
        }
        state.live(now);
        while let Some((_, pod, batch)) = state.events.pop_front_if(|(at, ..)| *at <= now) {
            if let (Some(endpoint), Some(seq)) = (self.endpoints.get(pod), self.seqs.get_mut(pod)) {
                endpoint.apply(&event_batch(&batch, *seq, now));
                *seq += 1;
            }
        }
        for (at, pod) in &mut self.reports {
            if *at <= now {
                if let (Some(p), Some(endpoint)) =
                    (state.fleet.pods().get(*pod), self.endpoints.get(*pod))
                {
                    endpoint.report(load_report(&p.load(), Instant::now()));
                }
                *at += self.every;
            }
        }
        let reports = self.reports.iter().map(|r| r.0);
        let events = state.events.front().map(|e| e.0);
        let change = self.changes.front().map(|c| c.0);
        reports
            .chain(state.fleet.next_event())
            .chain(events)
            .chain(change)
            .fold(f64::INFINITY, f64::min)
    }
}

// === impl State ===

impl State {
    /// Lives until now; tokens go out, events begin their way.
    fn live(&mut self, now: f64) {
        let mut said = std::mem::take(&mut self.said);
        self.fleet.advance(now, &mut said);
        for (pod, output) in &mut said {
            match output {
                Output::FirstToken { id, .. } => {
                    self.fleet.first_token(*pod);
                    self.token(*id, 1, true);
                }
                Output::Tokens { id, n, .. } => self.token(*id, *n, false),
                Output::Done { id, cached, .. } => {
                    self.fleet.ended(*pod, true);
                    self.done(*id, *cached);
                }
                // The stream ends without a word; the test would show it.
                Output::Refused { id, .. } => {
                    self.fleet.ended(*pod, false);
                    self.open.remove(id);
                }
                Output::Kv { at, batch } => {
                    self.fleet.note(batch, false);
                    if let Some(delay) = self.delay {
                        let batch = std::mem::take(batch);
                        self.events.push_back((*at + delay, *pod, batch));
                    }
                }
            }
        }
        said.clear();
        self.said = said;
    }

    fn token(&mut self, id: u64, n: u32, first: bool) {
        let Some(s) = self.open.get_mut(&id) else {
            return;
        };
        let before = s.generated;
        s.generated += n;
        if first {
            s.send(id, &json!({"role": "assistant", "content": ""}));
        }
        if first || before / TOKENS_PER_EVENT != s.generated / TOKENS_PER_EVENT {
            s.send(id, &json!({"content": "word "}));
        }
    }

    fn done(&mut self, id: u64, cached: u32) {
        let Some(s) = self.open.remove(&id) else {
            return;
        };
        let last = json!([{"index": 0, "delta": {"content": ""}, "finish_reason": "length"}]);
        // All of these go nowhere if the client left.
        let _ = s.to.send(event(id, &last, &s.usage(None)));
        let _ = s.to.send(event(id, &json!([]), &s.usage(Some(cached))));
        let _ = s.to.send(Bytes::from_static(b"data: [DONE]\n\n"));
    }
}

// === impl Stream ===

impl Stream {
    fn usage(&self, cached: Option<u32>) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": cached.map(|c| json!({"cached_tokens": c})),
        })
    }

    /// Sends an event; it goes nowhere if the client left.
    fn send(&self, id: u64, delta: &Value) {
        let usage = self.usage(None);
        let _ = self.to.send(event(
            id,
            &json!([{"index": 0, "delta": delta, "finish_reason": null}]),
            &usage,
        ));
    }
}

/// An event of a stream.
fn event(id: u64, choices: &Value, usage: &Value) -> Bytes {
    let chunk = json!({
        "id": format!("chatcmpl-{id}"),
        "object": "chat.completion.chunk",
        "model": super::MODEL,
        "choices": choices,
        "usage": usage,
    });
    format!("data: {chunk}\n\n").into()
}

// === impl InMemory ===

impl InMemory {
    pub(super) fn new(engines: Engines) -> Self {
        Self { engines }
    }
}

impl Connect for InMemory {
    fn connect(&self, address: &str) -> BoxFuture<'static, io::Result<BoxIo>> {
        let engines = self.engines.clone();
        let pod = pod(address);
        Box::pin(async move {
            let pod = pod.ok_or(io::ErrorKind::ConnectionRefused)?;
            let (here, there) = tokio::io::duplex(BUFFER);
            tokio::spawn(async move {
                let answer = service_fn(move |request| answer(engines.clone(), pod, request));
                // An error says that the other side left.
                let _ = http1::Builder::new()
                    .serve_connection(TokioIo::new(there), answer)
                    .await;
            });
            Ok(Box::new(here) as BoxIo)
        })
    }
}

impl fmt::Debug for InMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InMemory")
    }
}

/// The number of the pod at an address.
fn pod(address: &str) -> Option<usize> {
    let (host, _) = address.split_once(':')?;
    host.rsplit('.').next()?.parse().ok()
}

async fn answer(
    engines: Engines,
    pod: usize,
    request: Request<Incoming>,
) -> Result<Response<Events>, crate::Error> {
    let id = request
        .headers()
        .get("x-request-id")
        .and_then(|v| v.to_str().ok());
    let id: u64 = id
        .and_then(|id| id.parse().ok())
        .ok_or("a request without a number")?;
    // The whole prompt arrives before anything is done with it.
    request.into_body().collect().await?;
    let events = engines
        .submit(id, pod)
        .ok_or("a request that nobody expects")?;
    Ok(Response::builder()
        .header(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")
        .body(events)?)
}

// === impl Events ===

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.from
            .poll_recv(cx)
            .map(|bytes| bytes.map(|b| Ok(Frame::data(b))))
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.engines.cancel(self.id);
    }
}
