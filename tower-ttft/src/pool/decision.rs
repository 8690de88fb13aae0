//! Why each request went where it went, and what came of it. No text, no tokens and no keys of a prompt are in here.

use crate::{endpoint::EndpointId, observe::End, predict::Prediction};
use parking_lot::Mutex;
use serde::{Serialize, Serializer, ser::SerializeStruct};
use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{sync::broadcast, time::Instant};

/// Records that a slow reader may be behind before it misses some.
const BEHIND: usize = 256;

/// How good the knowledge behind a decision was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rung {
    /// Exact residency from KV events, fresh load.
    Exact,
    /// Residency guessed from own routing, or the engine's load not known.
    Guessed,
    /// Load only.
    Load,
    /// Own in-flight requests only.
    InFlight,
    /// Nothing.
    Random,
}

/// One candidate of a decision.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Which.
    pub endpoint: EndpointId,
    /// Tokens it is thought to have cached, clipped as the engine clips.
    pub cached: u32,
    /// The prediction.
    pub prediction: Prediction,
    /// What the policy made of it; the smallest wins.
    pub score: f64,
    /// How good the knowledge of this endpoint was.
    pub rung: Rung,
    /// Sequence number of its last KV event batch that was applied by then.
    pub seq: Option<u64>,
    /// Tokens of `cached` that KV events had announced.
    pub announced: Option<u32>,
    /// Our requests there before their first token.
    pub booked: u32,
    /// Our requests there past it.
    pub running: u32,
    /// Others' requests there, as far as a report that counts tells.
    pub others: u32,
    /// The age of that report.
    pub report_age: Option<Duration>,
    /// Recent failures multiply its score.
    pub bias: f64,
}

/// Why a request went where it went; later, what came of it.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Counts up in each pool.
    pub id: u64,
    /// The request's id.
    pub request_id: Option<Arc<str>>,
    /// When.
    pub at: Instant,
    /// When, in seconds since the epoch, for comparison with the engines' clocks.
    pub unix: f64,
    /// The base model.
    pub model: Arc<str>,
    /// What it rests on.
    pub rung: Rung,
    /// Prompt tokens.
    pub tokens: u32,
    /// All that were scored.
    pub candidates: Vec<Candidate>,
    /// Index into `candidates`.
    pub chosen: usize,
}

/// What came of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Seconds from the request on the wire to its first token, of answers that stream.
    pub ttft: Option<f64>,
    /// Seconds from the request on the wire to the end.
    pub duration: Option<f64>,
    /// Prompt tokens, as the engine counted.
    pub prompt_tokens: Option<u32>,
    /// Of these cached, as the engine says.
    pub cached_tokens: Option<u32>,
    /// Tokens generated.
    pub completion_tokens: Option<u32>,
    /// How it ended.
    #[serde(serialize_with = "end_name")]
    pub end: End,
}

/// A decision, and what came of it once that is known.
#[derive(Clone, Debug)]
pub struct DecisionRecord {
    /// The decision.
    pub decision: Arc<Decision>,
    /// None while the answer lasts.
    pub outcome: Option<Outcome>,
}

/// The last decisions of a pool. Clones are the same log.
#[derive(Clone, Debug)]
pub struct DecisionLog {
    inner: Arc<Log>,
}

#[derive(Debug)]
struct Log {
    size: AtomicUsize,
    ring: Mutex<VecDeque<DecisionRecord>>,
    live: broadcast::Sender<DecisionRecord>,
}

// === impl Rung ===

impl Rung {
    /// For metrics and people.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Guessed => "guessed",
            Self::Load => "load",
            Self::InFlight => "in_flight",
            Self::Random => "random",
        }
    }
}

// === impl Candidate ===

impl Serialize for Candidate {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let p = &self.prediction;
        let mut out = s.serialize_struct("Candidate", 17)?;
        out.serialize_field("endpoint", &self.endpoint.to_string())?;
        out.serialize_field("incarnation", self.endpoint.incarnation.as_str())?;
        out.serialize_field("cached", &self.cached)?;
        out.serialize_field("announced", &self.announced)?;
        out.serialize_field("ttft", &p.ttft.as_secs_f64())?;
        out.serialize_field("p50", &p.p50.as_secs_f64())?;
        out.serialize_field("p90", &p.p90.as_secs_f64())?;
        out.serialize_field("own", &p.own.as_secs_f64())?;
        out.serialize_field("terms", &p.terms)?;
        out.serialize_field("error", &p.error)?;
        out.serialize_field("trusted", &p.trusted)?;
        // JSON has no infinity: such a score is null.
        out.serialize_field("score", &self.score.is_finite().then_some(self.score))?;
        out.serialize_field("bias", &self.bias)?;
        out.serialize_field("rung", &self.rung)?;
        out.serialize_field("seq", &self.seq)?;
        out.serialize_field(
            "load",
            &serde_json::json!({
                "booked": self.booked,
                "running": self.running,
                "others": self.others,
            }),
        )?;
        out.serialize_field("reportAge", &self.report_age.map(|d| d.as_secs_f64()))?;
        out.end()
    }
}

// === impl Decision ===

impl Decision {
    /// The candidate that was chosen.
    pub fn chosen(&self) -> Option<&Candidate> {
        self.candidates.get(self.chosen)
    }
}

impl Serialize for Decision {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut out = s.serialize_struct("Decision", 8)?;
        out.serialize_field("id", &self.id)?;
        out.serialize_field("requestId", &self.request_id)?;
        out.serialize_field("model", &self.model)?;
        out.serialize_field("unix", &self.unix)?;
        out.serialize_field("rung", &self.rung)?;
        out.serialize_field("tokens", &self.tokens)?;
        out.serialize_field("chosen", &self.chosen)?;
        out.serialize_field("candidates", &self.candidates)?;
        out.end()
    }
}

// === impl DecisionRecord ===

impl Serialize for DecisionRecord {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut out = s.serialize_struct("DecisionRecord", 2)?;
        out.serialize_field("decision", &*self.decision)?;
        out.serialize_field("outcome", &self.outcome)?;
        out.end()
    }
}

// === impl DecisionLog ===

impl DecisionLog {
    /// A log of the last `size` decisions.
    pub fn new(size: usize) -> Self {
        Self {
            inner: Arc::new(Log {
                size: AtomicUsize::new(size),
                ring: Mutex::new(VecDeque::new()),
                live: broadcast::Sender::new(BEHIND),
            }),
        }
    }

    /// Keeps so many from now on.
    pub fn set_size(&self, size: usize) {
        self.inner.size.store(size, Ordering::Relaxed);
        let mut ring = self.inner.ring.lock();
        let over = ring.len().saturating_sub(size);
        ring.drain(..over);
    }

    /// The last decisions, oldest first.
    pub fn last(&self, n: usize) -> Vec<DecisionRecord> {
        let ring = self.inner.ring.lock();
        let skip = ring.len().saturating_sub(n);
        ring.iter().skip(skip).cloned().collect()
    }

    /// The record of a decision, while it is kept.
    pub fn get(&self, id: u64) -> Option<DecisionRecord> {
        let ring = self.inner.ring.lock();
        let found = ring.iter().rev().find(|r| r.decision.id == id);
        found.cloned()
    }

    /// Every record as it is made, and again when its outcome is known. A reader that falls behind misses some.
    pub fn subscribe(&self) -> broadcast::Receiver<DecisionRecord> {
        self.inner.live.subscribe()
    }

    pub(crate) fn push(&self, decision: Arc<Decision>) {
        let record = DecisionRecord {
            decision,
            outcome: None,
        };
        let size = self.inner.size.load(Ordering::Relaxed);
        if size > 0 {
            let mut ring = self.inner.ring.lock();
            while ring.len() >= size {
                ring.pop_front();
            }
            ring.push_back(record.clone());
        }
        self.tell(record);
    }

    pub(crate) fn end(&self, decision: &Arc<Decision>, outcome: Outcome) {
        {
            let mut ring = self.inner.ring.lock();
            // Ids count up, so the distance from the last one is the distance in the ring, or a little less.
            let at = ring.partition_point(|r| r.decision.id < decision.id);
            if let Some(r) = ring.get_mut(at).filter(|r| r.decision.id == decision.id) {
                r.outcome = Some(outcome);
            }
        }
        self.tell(DecisionRecord {
            decision: decision.clone(),
            outcome: Some(outcome),
        });
    }

    fn tell(&self, record: DecisionRecord) {
        if self.inner.live.receiver_count() > 0 {
            // An error says that nobody listens any more.
            let _ = self.inner.live.send(record);
        }
    }
}

/// For metrics and records.
pub(crate) fn name(end: End) -> &'static str {
    match end {
        End::Complete => "complete",
        End::EngineError => "engine_error",
        End::Broken => "broken",
        End::Cancelled => "cancelled",
    }
}

fn end_name<S: Serializer>(end: &End, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(name(*end))
}
