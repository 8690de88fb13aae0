//! A pod behind the HTTP API of vLLM 0.32 and its KV events.
//!
//! A [`Server`] owns a pod and one task that lets it live: it sleeps until the pod's next event. Time is tokio's, so
//! everything also runs in paused time, and [`Server::serve`] takes any connection, also one in memory. With a scale
//! above 1 the pod lives so many times faster than the clock.

mod answer;
mod ask;
mod events;
mod http;
mod metrics;
mod zmq;

pub use self::{
    events::{EventSink, payload},
    zmq::{Publisher, Sockets, open},
};

use self::metrics::Counts;
use crate::{Arrival, Load, Output, Pod, PodSpec, Prompt};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};
use tokio::{
    sync::{
        Notify,
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    },
    time::{Duration, Instant, sleep_until},
};
use tower_ttft::prompt::LocalModel;

/// Parameters of a [`Server`].
pub struct ServerParams {
    /// The pod's constants.
    pub spec: Arc<PodSpec>,
    /// Draws hiccups and the words of answers.
    pub seed: u64,
    /// The model's name.
    pub model: Arc<str>,
    /// The most tokens of a prompt and its answer.
    pub max_model_len: u32,
    /// Seconds of the pod in a second of the clock.
    pub scale: f64,
    /// Generated tokens in one event of a stream after the first: more make streams cheaper to watch.
    pub tokens_per_event: u32,
    /// Tokens of an answer where the request does not say.
    pub default_output: u32,
    /// The tokenizer and template.
    pub tokenizer: Arc<dyn LocalModel>,
    /// The time of the start, seconds since the epoch.
    pub epoch: f64,
    /// Whether `/v1/chat/completions/render` and `/v1/completions/render` are there (`--enable-scale-out`).
    pub render: bool,
    /// Takes the KV events.
    pub events: Option<Box<dyn EventSink>>,
    /// Where the KV events are, for `/kv_event_sources`.
    pub sources: Option<Sources>,
}

/// What `/kv_event_sources` says.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The ZMQ endpoint of the events, `tcp://host:port`.
    pub live: String,
    /// The ZMQ endpoint of the replay.
    pub replay: Option<String>,
    /// The topic.
    pub topic: String,
}

/// A pod behind vLLM's API. All clones are the same; the pod's task ends with the last of them.
#[derive(Clone)]
pub struct Server {
    inner: Arc<Inner>,
    /// Ends the task when the last clone goes.
    _task: Arc<Task>,
}

struct Inner {
    spec: Arc<PodSpec>,
    model: Arc<str>,
    max_model_len: u32,
    scale: f64,
    tokens_per_event: u32,
    default_output: u32,
    seed: u64,
    tokenizer: Arc<dyn LocalModel>,
    epoch: f64,
    render: bool,
    sources: Option<Sources>,
    start: Instant,
    changed: Notify,
    state: Mutex<State>,
}

struct State {
    pod: Pod,
    flights: HashMap<u64, Flight>,
    next_id: u64,
    next_seq: u64,
    sink: Option<Box<dyn EventSink>>,
    counts: Counts,
    out: Vec<Output>,
}

/// A request whose answer somebody waits for.
struct Flight {
    arrived: f64,
    to: UnboundedSender<Progress>,
}

/// What a request's answer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Tokens(u32),
    Done { cached: u32 },
    Refused,
}

/// A request in the pod. Dropping it is what a client's leaving is.
struct Ticket {
    inner: Arc<Inner>,
    id: u64,
    progress: UnboundedReceiver<Progress>,
}

struct Task(tokio::task::JoinHandle<()>);

// === impl ServerParams ===

impl ServerParams {
    /// A pod in real time that starts at `epoch`, with the rest as vLLM has it by default: render endpoints off, and no
    /// KV events.
    pub fn new(
        spec: Arc<PodSpec>,
        model: impl Into<Arc<str>>,
        tokenizer: Arc<dyn LocalModel>,
        epoch: f64,
    ) -> Self {
        Self {
            max_model_len: spec.kv_tokens().min(131_072) as u32,
            spec,
            seed: 0,
            model: model.into(),
            scale: 1.0,
            tokens_per_event: 1,
            default_output: 256,
            tokenizer,
            epoch,
            render: false,
            events: None,
            sources: None,
        }
    }
}

// === impl Server ===

impl Server {
    /// Starts the pod. Call it inside a tokio runtime.
    pub fn new(params: ServerParams) -> Self {
        let inner = Arc::new(Inner {
            state: Mutex::new(State {
                pod: Pod::new(params.spec.clone(), params.seed),
                flights: HashMap::new(),
                next_id: 0,
                next_seq: 0,
                sink: params.events,
                counts: Counts::default(),
                out: Vec::new(),
            }),
            spec: params.spec,
            model: params.model,
            max_model_len: params.max_model_len,
            scale: params.scale,
            tokens_per_event: params.tokens_per_event.max(1),
            default_output: params.default_output.max(1),
            seed: params.seed,
            tokenizer: params.tokenizer,
            epoch: params.epoch,
            render: params.render,
            sources: params.sources,
            start: Instant::now(),
            changed: Notify::new(),
        });
        let task = tokio::spawn(live(inner.clone()));
        Self {
            inner,
            _task: Arc::new(Task(task)),
        }
    }

    /// A copy of the pod as it is now, and the pod's time.
    pub fn pod(&self) -> (f64, Pod) {
        let now = self.inner.now();
        let mut state = self.inner.state.lock();
        self.inner.advance(&mut state, now);
        (now, state.pod.clone())
    }

    /// What the pod reports now.
    pub fn load(&self) -> Load {
        self.inner.load().0
    }

    /// Empties the prefix cache, if nothing runs.
    pub fn clear_cache(&self) -> bool {
        self.inner.state.lock().pod.clear_cache()
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Wakes the pod whenever something happens in it.
async fn live(inner: Arc<Inner>) {
    loop {
        let next = {
            let mut state = inner.state.lock();
            inner.advance(&mut state, inner.now());
            state.pod.next_event()
        };
        let changed = inner.changed.notified();
        match next {
            Some(at) => tokio::select! {
                () = sleep_until(inner.instant(at)) => {}
                () = changed => {}
            },
            None => changed.await,
        }
    }
}

// === impl Inner ===

impl Inner {
    /// The pod's time.
    fn now(&self) -> f64 {
        let elapsed = Instant::now().saturating_duration_since(self.start);
        elapsed.as_secs_f64() * self.scale
    }

    fn instant(&self, at: f64) -> Instant {
        // A clock of whole nanoseconds must not come to lie just before the event.
        let after = (at / self.scale * 1e9).ceil() + 1.0;
        self.start + Duration::from_nanos(after as u64)
    }

    /// The clock at a moment of the pod, seconds since the epoch.
    fn wall(&self, at: f64) -> f64 {
        self.epoch + at / self.scale
    }

    fn advance(&self, state: &mut State, now: f64) {
        let mut out = std::mem::take(&mut state.out);
        state.pod.advance(now, &mut out);
        for output in out.drain(..) {
            self.tell(state, output);
        }
        state.out = out;
    }

    fn tell(&self, state: &mut State, output: Output) {
        let (id, progress) = match output {
            Output::FirstToken { id, at } => {
                if let Some(flight) = state.flights.get(&id) {
                    state.counts.first_token(at - flight.arrived);
                }
                (id, Progress::Tokens(1))
            }
            Output::Tokens { id, n, .. } => (id, Progress::Tokens(n)),
            Output::Done { id, at, cached, .. } => {
                if let Some(flight) = state.flights.get(&id) {
                    state.counts.done(at - flight.arrived);
                }
                (id, Progress::Done { cached })
            }
            Output::Refused { id, .. } => (id, Progress::Refused),
            Output::Kv { at, batch } => {
                let seq = state.next_seq;
                state.next_seq += 1;
                let ts = self.wall(at);
                if let Some(sink) = &mut state.sink {
                    sink.publish(seq, ts, &batch);
                }
                return;
            }
        };
        if let Some(flight) = state.flights.get(&id) {
            // Whoever does not listen any more cancels in a moment.
            let _ = flight.to.send(progress);
        }
        if !matches!(progress, Progress::Tokens(_)) {
            state.flights.remove(&id);
        }
    }

    fn submit(self: &Arc<Self>, prompt: Arc<Prompt>, output: u32) -> Ticket {
        let (to, progress) = unbounded_channel();
        let now = self.now();
        let mut state = self.state.lock();
        self.advance(&mut state, now);
        let id = state.next_id;
        state.next_id += 1;
        let arrived = now;
        state.flights.insert(id, Flight { arrived, to });
        state.pod.submit(now, Arrival { id, prompt, output });
        drop(state);
        self.changed.notify_one();
        Ticket {
            inner: self.clone(),
            id,
            progress,
        }
    }

    fn load(&self) -> (Load, Counts) {
        let now = self.now();
        let mut state = self.state.lock();
        self.advance(&mut state, now);
        (state.pod.load(), state.counts.clone())
    }
}

// === impl Ticket ===

impl Drop for Ticket {
    fn drop(&mut self) {
        let now = self.inner.now();
        let mut state = self.inner.state.lock();
        self.inner.advance(&mut state, now);
        if state.flights.remove(&self.id).is_some() {
            state.pod.cancel(self.id);
            drop(state);
            self.inner.changed.notify_one();
        }
    }
}

#[cfg(all(test, feature = "tokenizer"))]
mod tests;
