//! What is known of one request as it goes its way; whoever learns something notes it here.

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelValue;
use std::{fmt, sync::Arc, time::Duration};
use tokio::time::Instant;
use tower_ttft::{
    endpoint::EndpointId,
    observe::{End, Observer, Usage},
    peek::Api,
    prompt::{Encode, Prompt},
};

/// The notes on one request. Clones are the same notes; an extension of the request.
#[derive(Clone, Debug)]
pub struct Record(Arc<Mutex<Notes>>);

/// What a [`Record`] says.
#[derive(Clone, Debug)]
pub struct Notes {
    /// The request's id.
    pub id: Arc<str>,
    /// Its API.
    pub api: Api,
    /// The pool's name, once it is known.
    pub model: Option<Arc<str>>,
    /// Where the answer comes from.
    pub endpoint: Option<EndpointId>,
    /// When the request came in.
    pub started: Instant,
    /// From then to the first token of a stream.
    pub first_token: Option<Duration>,
    /// What the engine counted.
    pub usage: Option<Usage>,
    /// What its token count teaches, if anything.
    pub lesson: Option<Lesson>,
    /// How often it was tried again elsewhere.
    pub retries: u32,
    /// How it ended, once something other than the body's end says so.
    pub outcome: Option<Outcome>,
}

/// Bytes of text whose tokens an engine counts, and who learns from it.
#[derive(Clone)]
pub struct Lesson {
    encoder: Arc<dyn Encode>,
    bytes: u32,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case")]
pub enum Outcome {
    /// With a whole answer.
    complete,
    /// With an answer that the client is to blame for.
    refused,
    /// With an error of the engine's, as it told it.
    engine_error,
    /// The engine's connection broke within the answer.
    broken,
    /// The engine kept silent for too long.
    timeout,
    /// No engine could answer.
    failed,
    /// There was no endpoint in time.
    no_endpoint,
    /// The client left.
    cancelled,
}

// === impl Record ===

impl Record {
    /// Notes on a request that comes in now.
    pub fn new(id: Arc<str>, api: Api) -> Self {
        Self(Arc::new(Mutex::new(Notes {
            id,
            api,
            model: None,
            endpoint: None,
            started: Instant::now(),
            first_token: None,
            usage: None,
            lesson: None,
            retries: 0,
            outcome: None,
        })))
    }

    /// Changes the notes.
    pub fn note<T>(&self, note: impl FnOnce(&mut Notes) -> T) -> T {
        note(&mut self.0.lock())
    }

    /// The first token came.
    pub fn first_token(&self, now: Instant) {
        self.note(|notes| {
            let after = now.saturating_duration_since(notes.started);
            notes.first_token.get_or_insert(after);
        });
    }

    /// The engine counted.
    pub fn usage(&self, usage: Usage) {
        self.note(|notes| notes.usage = Some(usage));
    }

    /// It ended like this. What was noted first is the reason, the rest follows from it.
    pub fn outcome(&self, outcome: Outcome) {
        self.note(|notes| *notes.outcome.get_or_insert(outcome));
    }
}

// === impl Lesson ===

impl Lesson {
    /// What a prompt that `encoder` made will teach it, once an engine has counted its tokens.
    pub fn of(encoder: &Arc<dyn Encode>, prompt: &Prompt) -> Option<Self> {
        prompt.is_lesson().then(|| Self {
            encoder: encoder.clone(),
            bytes: prompt.bytes,
        })
    }

    /// An engine counted.
    pub fn learn(&self, usage: Usage) {
        self.encoder.learn(self.bytes, usage.prompt_tokens);
    }
}

impl fmt::Debug for Lesson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lesson")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// Answers that do not stream are noted by their observer.
impl Observer for Record {
    fn first_byte(&mut self, _: Instant) {}

    fn first_token(&mut self, now: Instant) {
        Record::first_token(self, now);
    }

    fn usage(&mut self, usage: Usage) {
        Record::usage(self, usage);
    }

    fn end(&mut self, _: Instant, end: End) {
        if end == End::EngineError {
            // A refusal (4xx) is told apart by its status, which is looked at when the request is settled.
            self.outcome(Outcome::engine_error);
        }
    }
}
