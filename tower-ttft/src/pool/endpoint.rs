use super::{
    AuditCounts, AuditState, Inner,
    audit::Audit,
    hints::Hints,
    metrics::EndpointMetrics,
    residency::{CacheModel, DEFAULT_BLOCK},
};
use crate::{
    chain::{ATOM_TOKENS, ChainKind},
    endpoint::EndpointId,
    events::{EventBatch, KvEvent},
    index::Holder,
    load::{Capacity, EndpointLoad, LoadReport},
    predict::Slot,
    prompt::Prompt,
};
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{sync::watch, time::Instant};

/// A member of a pool. Cheap to clone. What engines say comes in here.
///
/// A handle outlives its membership: what it is told after its endpoint was removed or replaced changes nothing.
#[derive(Clone)]
pub struct Endpoint {
    pub(super) pool: Arc<Inner>,
    pub(super) member: Arc<Member>,
}

/// What is known of an endpoint when it joins, or is learned of it later.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointInfo {
    /// Hardware label; endpoints with the same label lend each other their gain.
    pub gpu: Option<Arc<str>>,
    /// Tokens in a KV block (`cache_config_info`).
    pub block_size: Option<u32>,
    /// KV blocks in all (`cache_config_info`).
    pub blocks: Option<u64>,
    /// Sequences that run at once, where known.
    pub max_seqs: Option<u32>,
    /// Whether KV events are expected: without them residency is guessed (rung 2).
    pub events: bool,
}

/// One process behind a pool. Tickets hold it, so that what they booked is released where it was booked.
pub(super) struct Member {
    pub(super) id: EndpointId,
    pub(super) slot: Slot,
    pub(super) holder: Holder,
    pub(super) info: ArcSwap<EndpointInfo>,
    pub(super) ready: AtomicBool,
    pub(super) events_live: AtomicBool,
    /// Counts up with every cut.
    pub(super) cuts: watch::Sender<u64>,
    /// Guessed residency. Locked on its own, so that lookups keep no one from booking.
    pub(super) guess: Mutex<CacheModel>,
    /// Locked after the pool's choice, where both are.
    pub(super) state: Mutex<MemberState>,
    pub(super) metrics: EndpointMetrics,
}

#[derive(Default)]
pub(super) struct MemberState {
    pub(super) load: EndpointLoad,
    pub(super) hints: Hints,
    pub(super) audit: Audit,
    /// The last event batch that was applied.
    pub(super) seq: Option<u64>,
    /// Times that the engine announced an empty cache.
    pub(super) clears: u64,
    /// Requests ever sent there.
    pub(super) picks: u64,
    /// First tokens ever seen from there.
    pub(super) first_tokens: u64,
    /// The pool's count of choices when it was last chosen.
    pub(super) last: u64,
    /// What a newcomer may still take of the cold prompts.
    pub(super) credit: f64,
}

/// What an endpoint is thought to hold of a prompt, before clipping.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Overlap {
    /// By the index, where events feed it.
    pub(super) announced: Option<u32>,
    /// By the index or the guess.
    pub(super) tokens: u32,
    /// Events flow and speak of this kind of prompt.
    pub(super) exact: bool,
    /// Why it is not exact.
    pub(super) inexact: Option<&'static str>,
    /// Tokens that its cache holds in all.
    pub(super) resident: u64,
}

/// A picture of an endpoint for operators.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointStatus {
    /// `address` or `address#rank`.
    pub endpoint: String,
    /// The process, empty while unknown.
    pub incarnation: String,
    /// Whether it is a candidate.
    pub ready: bool,
    /// Whether its events are expected, and flow.
    pub events: bool,
    /// See `events`.
    pub events_live: bool,
    /// The last event batch that was applied.
    pub seq: Option<u64>,
    /// Tokens in a block.
    pub block_size: u32,
    /// Blocks that it is thought to hold.
    pub blocks_held: u64,
    /// Blocks in all.
    pub blocks: Option<u64>,
    /// Our requests before their first token.
    pub booked: u32,
    /// Our requests past it.
    pub running: u32,
    /// Others' requests.
    pub others: u32,
    /// Seconds since its last report that counts.
    pub report_age: Option<f64>,
    /// Requests ever sent there from here.
    pub picks: u64,
    /// Learned prefill cost.
    pub seconds_per_token: f64,
    /// Samples that taught it.
    pub samples: u64,
    /// Whether a breaker keeps requests away.
    pub breaker_open: bool,
    /// Whether answers tell cached tokens.
    pub audit: AuditState,
    /// How they compared.
    pub audited: AuditCounts,
}

// === impl Endpoint ===

impl Endpoint {
    /// Its name.
    pub fn id(&self) -> &EndpointId {
        &self.member.id
    }

    /// Ready endpoints are candidates. NotReady keeps what is known.
    pub fn set_ready(&self, ready: bool) {
        if self.member.ready.swap(ready, Ordering::AcqRel) != ready {
            self.member.metrics.ready.set(i64::from(ready));
            tracing::info!(endpoint = %self.member.id, ready, "Endpoint readiness");
            self.pool.tell();
        }
    }

    /// Whether it is a candidate.
    pub fn is_ready(&self) -> bool {
        self.member.is_ready()
    }

    /// Cuts it: not ready, and every ticket's [`Ticket::cut`](super::Ticket::cut) resolves. It may become ready again;
    /// later tickets know nothing of this cut.
    pub fn cut(&self) {
        self.set_ready(false);
        self.member.cuts.send_modify(|n| *n += 1);
        self.member.state.lock().load.forget_report();
    }

    /// Updates what is known of it.
    pub fn set_info(&self, info: EndpointInfo) {
        self.pool.set_info(&self.member, info);
    }

    /// What is known of it.
    pub fn info(&self) -> Arc<EndpointInfo> {
        self.member.info.load_full()
    }

    /// Applies what it announced. The caller sees to order and gaps.
    pub fn apply(&self, batch: &EventBatch) {
        let m = &*self.member;
        let mut cleared = false;
        for event in &batch.events {
            let applied = self.pool.index.apply(&m.holder, event);
            m.metrics.applied(applied);
            cleared |= matches!(event, KvEvent::Cleared);
        }
        if cleared {
            m.guess.lock().clear();
        }
        let mut state = m.state.lock();
        let state = &mut *state;
        state.seq = Some(batch.seq);
        if cleared {
            state.clears += 1;
            state.hints.clear();
        }
        // What is announced needs no hint, and is no longer ahead.
        let (hints, load) = (&mut state.hints, &mut state.load);
        hints.announced(
            m.block_size(),
            |chain| self.pool.index.depth(&m.holder, chain),
            |ticket, tokens| load.shrink(ticket, tokens),
        );
    }

    /// Events are flowing (true) or were lost (false, residency is no longer exact).
    pub fn set_events_live(&self, live: bool) {
        if self.member.events_live.swap(live, Ordering::AcqRel) != live {
            tracing::info!(endpoint = %self.member.id, live, "KV events");
        }
    }

    /// Forgets what its cache holds.
    pub fn clear(&self) {
        self.pool.index.clear(&self.member.holder);
        self.member.guess.lock().clear();
        let mut state = self.member.state.lock();
        state.hints.clear();
        state.clears += 1;
        state.seq = None;
    }

    /// Takes what it reports of its load.
    pub fn report(&self, report: LoadReport) {
        let prefill = self.member.state.lock().load.report(report);
        if let Some(p) = prefill {
            let mut choice = self.pool.choice.lock();
            choice
                .model
                .engine_prefill(self.member.slot, p.seconds, p.tokens);
        }
    }

    /// A request there failed in a way that speaks against the endpoint. Tickets tell of failed answers by themselves;
    /// this is for what they cannot see (a first event that is an abort, a refused connection of a probe).
    pub fn fail(&self, now: Instant) {
        self.pool.failed(&self.member, now);
    }

    /// It says that it is full: for so long it is taken to make requests wait. Not a failure.
    pub fn busy(&self, now: Instant, lasting: Duration) {
        self.pool.busy(&self.member, now + lasting);
    }

    /// A picture for operators.
    pub fn status(&self, now: Instant) -> EndpointStatus {
        self.pool.status(&self.member, now)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("id", &self.member.id)
            .field("ready", &self.is_ready())
            .finish()
    }
}

// === impl Member ===

impl Member {
    pub(super) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Tokens in a block: as its events say, else as its configuration says.
    pub(super) fn block_size(&self) -> u32 {
        match self.holder.block_size() {
            0 => self.info.load().block_size.unwrap_or(DEFAULT_BLOCK).max(1),
            size => size,
        }
    }

    pub(super) fn capacity(&self) -> Capacity {
        let info = self.info.load();
        Capacity {
            tokens: info
                .blocks
                .map(|n| n.saturating_mul(u64::from(self.block_size()))),
            sequences: info.max_seqs,
        }
    }

    /// What it holds of a prompt; `announced` looks it up in the index.
    pub(super) fn overlap(
        &self,
        prompt: &Prompt,
        announced: impl FnOnce(&Holder) -> u32,
    ) -> Overlap {
        let info = self.info.load();
        let block = self.block_size();
        let live = self.events_live.load(Ordering::Acquire);
        let inexact = if !info.events {
            Some("no_events")
        } else if prompt.chain.kind() != ChainKind::Tokens {
            Some("approximate_prompt")
        } else if !block.is_multiple_of(ATOM_TOKENS as u32) {
            Some("block_size")
        } else if !live {
            Some("events_lost")
        } else {
            None
        };
        let keyed = matches!(inexact, None | Some("events_lost"));
        let exact = inexact.is_none();
        let announced = keyed.then(|| announced(&self.holder));
        let (guessed, resident) = {
            let guess = self.guess.lock();
            let guessed = if exact {
                0
            } else {
                guess.held(&prompt.chain, prompt.tokens, prompt.bytes)
            };
            (guessed, guess.resident())
        };
        let resident = if info.events && live {
            self.holder.blocks() * u64::from(block)
        } else {
            resident
        };
        Overlap {
            announced,
            tokens: announced.unwrap_or(0).max(guessed),
            exact,
            inexact,
            resident,
        }
    }

    /// Whole blocks, and the engine always computes the last token.
    pub(super) fn clip(&self, held: u32, tokens: u32) -> u32 {
        let block = self.block_size();
        (held / block * block).min(tokens.saturating_sub(1) / block * block)
    }
}
