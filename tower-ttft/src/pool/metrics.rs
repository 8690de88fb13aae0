//! Metrics of pools. Labels are models and members of pools; a member's series go with it.

use super::{AuditState, NoEndpoint, Rung, audit::Audited, decision};
use crate::{endpoint::EndpointId, observe::End, predict::Regime, queue::QueueError};
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};
use std::{
    fmt::{self, Write},
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

/// The metrics of all pools of a process.
#[derive(Clone, Debug)]
pub struct PoolMetricFamilies {
    decisions: Family<RungLabels, Counter>,
    refused: Family<ReasonLabels, Counter>,
    fallbacks: Family<ReasonLabels, Counter>,
    picks: Family<EndpointLabels, Counter>,
    in_flight: Family<StateLabels, Gauge>,
    ready: Family<EndpointLabels, Gauge>,
    breaker_open: Family<EndpointLabels, Gauge>,
    failures: Family<EndpointLabels, Counter>,
    ends: Family<EndLabels, Counter>,
    predicted: Family<EndpointLabels, Histogram>,
    actual: Family<EndpointLabels, Histogram>,
    error: Family<RegimeLabels, Histogram>,
    audit: Family<AuditLabels, Counter>,
    token_mismatch: Family<EndpointLabels, Counter>,
    distrusted: Family<EndpointLabels, Counter>,
    audit_state: Family<EndpointLabels, Gauge>,
    seconds_per_token: Family<EndpointLabels, Gauge<f64, AtomicU64>>,
    events: Family<EventLabels, Counter>,
    queue_length: Family<ModelLabels, Gauge>,
    queue_bytes: Family<ModelLabels, Gauge>,
    queue_wait: Family<ModelLabels, Histogram>,
    queue_dropped: Family<ReasonLabels, Counter>,
}

/// The metrics of one pool.
#[derive(Clone, Debug)]
pub(crate) struct PoolMetrics {
    model: Name,
    families: PoolMetricFamilies,
    decisions: [Counter; 5],
    queue_length: Gauge,
    queue_bytes: Gauge,
    queue_wait: Histogram,
}

/// The metrics of one member.
#[derive(Debug)]
pub(crate) struct EndpointMetrics {
    labels: EndpointLabels,
    families: PoolMetricFamilies,
    pub(crate) picks: Counter,
    pub(crate) booked: Gauge,
    pub(crate) running: Gauge,
    pub(crate) ready: Gauge,
    pub(crate) breaker_open: Gauge,
    pub(crate) failures: Counter,
    pub(crate) predicted: Histogram,
    pub(crate) actual: Histogram,
    pub(crate) token_mismatch: Counter,
    pub(crate) distrusted: Counter,
    pub(crate) seconds_per_token: Gauge<f64, AtomicU64>,
    audit_state: Gauge,
    /// As [`ENDS`], [`AUDITED`] and [`BLOCKS`]. Held from the start: whoever looks a series up makes it, also after its
    /// endpoint is gone.
    ends: [Counter; 4],
    audited: [Counter; 3],
    blocks: [Counter; 4],
}

/// A text of which there are few.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Name(Arc<str>);

/// One of a fixed set of words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Word(&'static str);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: Name,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndpointLabels {
    model: Name,
    endpoint: Name,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RungLabels {
    model: Name,
    rung: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    model: Name,
    reason: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    model: Name,
    endpoint: Name,
    state: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabels {
    model: Name,
    endpoint: Name,
    end: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RegimeLabels {
    model: Name,
    regime: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AuditLabels {
    model: Name,
    endpoint: Name,
    cached: Word,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EventLabels {
    model: Name,
    endpoint: Name,
    blocks: Word,
}

/// Words of [`AuditLabels`], in the order of [`Audited`].
const AUDITED: [&str; 3] = ["equal", "over", "under"];
/// Words of [`EndLabels`].
const ENDS: [End; 4] = [End::Complete, End::EngineError, End::Broken, End::Cancelled];
/// Words of [`EventLabels`].
const BLOCKS: [&str; 4] = ["stored", "removed", "orphan", "unkeyed"];

// === impl PoolMetricFamilies ===

impl Default for PoolMetricFamilies {
    fn default() -> Self {
        // TTFT from 5 ms to three minutes, the same for what was predicted and what came.
        let ttft: fn() -> Histogram = || Histogram::new(exponential_buckets(0.005, 1.7, 20));
        Self {
            decisions: Family::default(),
            refused: Family::default(),
            fallbacks: Family::default(),
            picks: Family::default(),
            in_flight: Family::default(),
            ready: Family::default(),
            breaker_open: Family::default(),
            failures: Family::default(),
            ends: Family::default(),
            predicted: Family::new_with_constructor(ttft),
            actual: Family::new_with_constructor(ttft),
            // |log| of actual over predicted: 0.05 is 5 %, 0.7 a factor of two.
            error: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(0.025, 1.6, 12))
            }),
            audit: Family::default(),
            token_mismatch: Family::default(),
            distrusted: Family::default(),
            audit_state: Family::default(),
            seconds_per_token: Family::default(),
            events: Family::default(),
            queue_length: Family::default(),
            queue_bytes: Family::default(),
            queue_wait: Family::new_with_constructor(|| {
                Histogram::new(exponential_buckets(0.001, 2.5, 14))
            }),
            queue_dropped: Family::default(),
        }
    }
}

impl PoolMetricFamilies {
    /// Makes them visible.
    pub fn register(&self, r: &mut Registry) {
        let f = self.clone();
        r.register("forebay_decisions", "Requests that were sent somewhere, by how good the knowledge was (exact, guessed, load, in_flight, random)", f.decisions);
        r.register(
            "forebay_refused",
            "Requests that no endpoint could take, by reason",
            f.refused,
        );
        r.register(
            "forebay_decision_fallbacks",
            "Decisions that could not use all knowledge, by reason",
            f.fallbacks,
        );
        r.register("forebay_picks", "Requests sent to an endpoint", f.picks);
        r.register(
            "forebay_in_flight",
            "Requests at an endpoint, booked (before the first token) or running",
            f.in_flight,
        );
        r.register(
            "forebay_endpoint_ready",
            "Whether an endpoint is a candidate",
            f.ready,
        );
        r.register(
            "forebay_breaker_open",
            "Whether an endpoint is kept from requests after failures",
            f.breaker_open,
        );
        r.register(
            "forebay_endpoint_failures",
            "Failures of an endpoint that its breaker counted",
            f.failures,
        );
        r.register("forebay_answers", "How answers ended", f.ends);
        r.register(
            "forebay_ttft_predicted_seconds",
            "Predicted time to first token of the endpoint that was chosen",
            f.predicted,
        );
        r.register(
            "forebay_ttft_actual_seconds",
            "Time from the request on the wire to the first token",
            f.actual,
        );
        r.register(
            "forebay_ttft_error",
            "Relative error of predictions, |ln(actual / predicted)|, by regime",
            f.error,
        );
        r.register("forebay_audit_cached", "Cached tokens that answers reported, against those predicted (over: more were predicted)", f.audit);
        r.register(
            "forebay_audit_token_mismatch",
            "Prompts whose exact token count differs from the engine's",
            f.token_mismatch,
        );
        r.register(
            "forebay_audit_distrusted",
            "Times that an endpoint's residency was forgotten because answers denied it",
            f.distrusted,
        );
        r.register(
            "forebay_audit_state",
            "Whether answers tell cached tokens: 0 off, 1 partial, 2 on",
            f.audit_state,
        );
        r.register(
            "forebay_seconds_per_token",
            "Learned prefill cost of an endpoint",
            f.seconds_per_token,
        );
        r.register(
            "forebay_kv_event_blocks",
            "Blocks in KV events: stored, removed, orphan (unknown parent or removal), unkeyed",
            f.events,
        );
        r.register(
            "forebay_pending_demand",
            "Requests that wait for an endpoint to exist",
            f.queue_length,
        );
        r.register(
            "forebay_pending_demand_bytes",
            "Bytes of bodies that wait for an endpoint to exist",
            f.queue_bytes,
        );
        r.register(
            "forebay_queue_wait_seconds",
            "Time that requests waited for an endpoint, whatever came of it",
            f.queue_wait,
        );
        r.register(
            "forebay_queue_dropped",
            "Requests that could not wait, or not longer, by reason",
            f.queue_dropped,
        );
    }

    pub(crate) fn of(&self, model: &Arc<str>) -> PoolMetrics {
        let model = Name(model.clone());
        let labels = ModelLabels {
            model: model.clone(),
        };
        let rung = |rung: Rung| {
            self.decisions.get_or_create_owned(&RungLabels {
                model: model.clone(),
                rung: Word(rung.name()),
            })
        };
        PoolMetrics {
            decisions: [
                rung(Rung::Exact),
                rung(Rung::Guessed),
                rung(Rung::Load),
                rung(Rung::InFlight),
                rung(Rung::Random),
            ],
            queue_length: self.queue_length.get_or_create_owned(&labels),
            queue_bytes: self.queue_bytes.get_or_create_owned(&labels),
            queue_wait: self.queue_wait.get_or_create_owned(&labels),
            families: self.clone(),
            model,
        }
    }
}

// === impl PoolMetrics ===

impl PoolMetrics {
    pub(crate) fn decided(&self, rung: Rung) {
        if let Some(c) = self.decisions.get(rung as usize) {
            c.inc();
        }
    }

    pub(crate) fn refused(&self, why: NoEndpoint) {
        let reason = match why {
            NoEndpoint::AllExcluded => "all_excluded",
        };
        self.reason(&self.families.refused, reason);
    }

    /// A decision that could not use all knowledge.
    pub(crate) fn fallback(&self, reason: &'static str) {
        self.reason(&self.families.fallbacks, reason);
    }

    pub(crate) fn dropped(&self, why: QueueError) {
        let reason = match why {
            QueueError::Full => "full",
            QueueError::Deadline => "deadline",
        };
        self.reason(&self.families.queue_dropped, reason);
    }

    /// What waits now.
    pub(crate) fn length(&self, requests: usize, bytes: usize) {
        self.queue_length.set(requests as i64);
        self.queue_bytes.set(bytes as i64);
    }

    pub(crate) fn waited(&self, waited: Duration) {
        self.queue_wait.observe(waited.as_secs_f64());
    }

    pub(crate) fn error(&self, regime: Regime, log: f64) {
        if log.is_finite() {
            self.families
                .error
                .get_or_create(&RegimeLabels {
                    model: self.model.clone(),
                    regime: Word(regime.name()),
                })
                .observe(log.abs());
        }
    }

    pub(crate) fn endpoint(&self, id: &EndpointId) -> EndpointMetrics {
        let labels = EndpointLabels {
            model: self.model.clone(),
            endpoint: Name(id.to_string().into()),
        };
        let f = &self.families;
        let state = |state| {
            f.in_flight.get_or_create_owned(&StateLabels {
                model: labels.model.clone(),
                endpoint: labels.endpoint.clone(),
                state: Word(state),
            })
        };
        EndpointMetrics {
            picks: f.picks.get_or_create_owned(&labels),
            booked: state("booked"),
            running: state("running"),
            ready: f.ready.get_or_create_owned(&labels),
            breaker_open: f.breaker_open.get_or_create_owned(&labels),
            failures: f.failures.get_or_create_owned(&labels),
            predicted: f.predicted.get_or_create_owned(&labels),
            actual: f.actual.get_or_create_owned(&labels),
            token_mismatch: f.token_mismatch.get_or_create_owned(&labels),
            distrusted: f.distrusted.get_or_create_owned(&labels),
            seconds_per_token: f.seconds_per_token.get_or_create_owned(&labels),
            audit_state: f.audit_state.get_or_create_owned(&labels),
            ends: ENDS.map(|end| f.ends.get_or_create_owned(&labels.end(end))),
            audited: AUDITED.map(|w| f.audit.get_or_create_owned(&labels.audit(w))),
            blocks: BLOCKS.map(|w| f.events.get_or_create_owned(&labels.event(w))),
            families: f.clone(),
            labels,
        }
    }

    fn reason(&self, family: &Family<ReasonLabels, Counter>, reason: &'static str) {
        family
            .get_or_create(&ReasonLabels {
                model: self.model.clone(),
                reason: Word(reason),
            })
            .inc();
    }
}

// === impl EndpointMetrics ===

impl EndpointMetrics {
    pub(crate) fn ended(&self, end: End) {
        let counters = ENDS.iter().zip(&self.ends);
        for (_, counter) in counters.filter(|(e, _)| **e == end) {
            counter.inc();
        }
    }

    pub(crate) fn audited(&self, audited: Audited) {
        if let Some(counter) = self.audited.get(audited as usize) {
            counter.inc();
        }
    }

    pub(crate) fn audit_state(&self, state: AuditState) {
        self.audit_state.set(match state {
            AuditState::Off => 0,
            AuditState::Partial => 1,
            AuditState::On => 2,
        });
    }

    pub(crate) fn applied(&self, applied: crate::index::Applied) {
        let counts = [
            applied.stored,
            applied.removed,
            applied.orphans,
            applied.unkeyed,
        ];
        for (counter, n) in self.blocks.iter().zip(counts) {
            counter.inc_by(u64::from(n));
        }
    }

    /// Takes this member's series away. Handles that are still held keep working and are seen no more.
    pub(crate) fn remove(&self) {
        let f = &self.families;
        for counters in [&f.picks, &f.failures, &f.token_mismatch, &f.distrusted] {
            counters.remove(&self.labels);
        }
        for gauges in [&f.ready, &f.breaker_open, &f.audit_state] {
            gauges.remove(&self.labels);
        }
        for histograms in [&f.predicted, &f.actual] {
            histograms.remove(&self.labels);
        }
        f.seconds_per_token.remove(&self.labels);
        for state in ["booked", "running"] {
            f.in_flight.remove(&StateLabels {
                model: self.labels.model.clone(),
                endpoint: self.labels.endpoint.clone(),
                state: Word(state),
            });
        }
        for end in ENDS {
            f.ends.remove(&self.labels.end(end));
        }
        for word in AUDITED {
            f.audit.remove(&self.labels.audit(word));
        }
        for word in BLOCKS {
            f.events.remove(&self.labels.event(word));
        }
    }
}

// === impl EndpointLabels ===

impl EndpointLabels {
    fn end(&self, end: End) -> EndLabels {
        EndLabels {
            model: self.model.clone(),
            endpoint: self.endpoint.clone(),
            end: Word(decision::name(end)),
        }
    }

    fn audit(&self, cached: &'static str) -> AuditLabels {
        AuditLabels {
            model: self.model.clone(),
            endpoint: self.endpoint.clone(),
            cached: Word(cached),
        }
    }

    fn event(&self, blocks: &'static str) -> EventLabels {
        EventLabels {
            model: self.model.clone(),
            endpoint: self.endpoint.clone(),
            blocks: Word(blocks),
        }
    }
}

// === impl Name ===

impl EncodeLabelValue for Name {
    fn encode(&self, e: &mut LabelValueEncoder<'_>) -> fmt::Result {
        e.write_str(&self.0)
    }
}

// === impl Word ===

impl EncodeLabelValue for Word {
    fn encode(&self, e: &mut LabelValueEncoder<'_>) -> fmt::Result {
        e.write_str(self.0)
    }
}
