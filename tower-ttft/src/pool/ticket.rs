use super::{Decision, Endpoint, Inner, Outcome, Rung, audit::Audited, endpoint::Member};
use crate::{
    chain::ChainKind,
    observe::{End, Observer, Usage},
    predict::{Inputs, Prediction, TtftModel},
    prompt::Prompt,
};
use http::StatusCode;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// How long an engine that says it is full is taken to be.
const BUSY: Duration = Duration::from_secs(1);

/// The record of one request at one endpoint. What it booked is released when it is dropped. It observes the answer.
pub struct Ticket {
    p: Box<TicketParams>,
    cuts: u64,
    sent: Option<Instant>,
    ttft: Option<Duration>,
    status: Option<StatusCode>,
    usage: Option<Usage>,
    stage: Stage,
}

/// What a pick hands to its ticket.
pub(super) struct TicketParams {
    pub(super) endpoint: Endpoint,
    /// Names the request in the endpoint's load and hints.
    pub(super) id: u64,
    pub(super) decision: Arc<Decision>,
    pub(super) prompt: Prompt,
    pub(super) stream: bool,
    pub(super) inputs: Inputs,
    /// Cached tokens that were known or guessed.
    pub(super) believed: u32,
    /// More was expected because others meet there.
    pub(super) met: bool,
    pub(super) prediction: Prediction,
    /// Cached tokens that events had announced, clipped, and the engine's clears by then.
    pub(super) announced: Option<(u32, u64)>,
    /// It was let through to see whether the address works again.
    pub(super) probe: bool,
    pub(super) now: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Booked,
    Running,
    Ended,
}

// === impl Ticket ===

impl Ticket {
    pub(super) fn new(p: TicketParams) -> Self {
        let member = &p.endpoint.member;
        member.metrics.picks.inc();
        member.metrics.booked.inc();
        member
            .metrics
            .predicted
            .observe(p.prediction.ttft.as_secs_f64());
        let cuts = *member.cuts.borrow();
        Self {
            cuts,
            p: Box::new(p),
            sent: None,
            ttft: None,
            status: None,
            usage: None,
            stage: Stage::Booked,
        }
    }

    /// Where to.
    pub fn endpoint(&self) -> &Endpoint {
        &self.p.endpoint
    }

    /// Why.
    pub fn decision(&self) -> &Arc<Decision> {
        &self.p.decision
    }

    /// The request is on the wire; TTFT counts from here.
    pub fn sent(&mut self, now: Instant) {
        self.sent = Some(now);
    }

    /// The engine answered with this status. An error of the client's (4xx) does not speak against the endpoint; a full
    /// engine (503) is avoided for a second.
    pub fn responded(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    /// Resolves when the endpoint was cut or removed.
    pub fn cut(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut cuts = self.p.endpoint.member.cuts.subscribe();
        let seen = self.cuts;
        async move {
            // An error says that the endpoint is gone altogether, which its ticket keeps from happening.
            let _ = cuts.wait_for(|n| *n != seen).await;
        }
    }

    /// Time since `sent` that was predicted.
    pub fn predicted(&self) -> Duration {
        self.p.prediction.ttft
    }

    /// Ends it as failed before there was an answer.
    pub fn fail(mut self, now: Instant) {
        self.finish(now, End::Broken);
    }

    fn pool(&self) -> &Inner {
        &self.p.endpoint.pool
    }

    fn member(&self) -> &Member {
        &self.p.endpoint.member
    }

    /// The prompt is computed, as far as can be seen from here.
    fn computed(&mut self, now: Instant) {
        if self.stage != Stage::Booked {
            return;
        }
        self.stage = Stage::Running;
        let member = self.member();
        member.metrics.booked.dec();
        member.metrics.running.inc();
        {
            let mut state = member.state.lock();
            state.load.first_token(self.p.id, now);
            match self.p.announced {
                Some(_) => state.hints.computed(self.p.id),
                // Without events the guess takes over.
                None => state.hints.forget(self.p.id),
            }
            state.first_tokens += 1;
        }
        let p = &self.p.prompt;
        member.guess.lock().used(&p.chain, p.tokens, p.bytes, None);
    }

    /// What a first token teaches.
    fn learn(&mut self, now: Instant) {
        let Some(sent) = self.sent.filter(|_| self.p.stream && self.ttft.is_none()) else {
            return;
        };
        let ttft = now.saturating_duration_since(sent);
        self.ttft = Some(ttft);
        let (pool, member) = (self.pool(), self.member());
        let actual = ttft.as_secs_f64();
        member.metrics.actual.observe(actual);
        let regime = TtftModel::regime_of(&self.p.inputs, &self.p.prediction);
        let error = (actual / self.p.prediction.ttft.as_secs_f64()).ln();
        pool.metrics.error(regime, error);
        let mut choice = pool.choice.lock();
        // Bytes that stand for tokens would teach another unit, and what was merely to be expected is no measure.
        if self.p.inputs.tokens > 0 && !self.p.met {
            choice
                .model
                .learn(member.slot, &self.p.inputs, &self.p.prediction, actual, now);
            let rate = choice.model.seconds_per_token(member.slot, now);
            member.metrics.seconds_per_token.set(rate);
        }
    }

    fn finish(&mut self, now: Instant, end: End) {
        if self.stage == Stage::Ended {
            return;
        }
        if end == End::Complete {
            self.computed(now);
        }
        let ran = self.stage == Stage::Running;
        self.stage = Stage::Ended;
        let member = self.member();
        if ran {
            member.metrics.running.dec();
        } else {
            member.metrics.booked.dec();
        }
        member.metrics.ended(end);
        {
            let mut state = member.state.lock();
            state.load.end(self.p.id, now, end == End::Complete);
            state.hints.end(self.p.id, now);
        }
        if ran {
            // The engine frees the blocks now, which makes them the most recently used.
            let p = &self.p.prompt;
            let generated = self.usage.map_or(0, |u| u.completion_tokens);
            member
                .guess
                .lock()
                .used(&p.chain, p.tokens, p.bytes, Some(generated));
        }
        self.judge(now, end);
        if end == End::Complete {
            self.audit();
        }
        let outcome = Outcome {
            ttft: self.ttft.map(|d| d.as_secs_f64()),
            duration: self
                .sent
                .map(|sent| now.saturating_duration_since(sent).as_secs_f64()),
            prompt_tokens: self.usage.map(|u| u.prompt_tokens),
            cached_tokens: self.usage.and_then(|u| u.cached_tokens),
            completion_tokens: self.usage.map(|u| u.completion_tokens),
            end,
        };
        self.pool().decisions.end(&self.p.decision, outcome);
    }

    /// What the end says of the endpoint. A status counts also where nobody cared to read the body.
    fn judge(&self, now: Instant, end: End) {
        let (pool, member) = (self.pool(), self.member());
        match (self.status, end) {
            // Full, or still loading: not failed, but not for now.
            (Some(StatusCode::SERVICE_UNAVAILABLE), _) => pool.busy(member, now + BUSY),
            (Some(s), _) if s.is_server_error() => pool.failed(member, now),
            // An engine that refuses a bad request works.
            (Some(s), _) if s.is_client_error() => {}
            (_, End::Complete) => pool.succeeded(member),
            (_, End::Cancelled) => {}
            // A removed or restarted engine is no failing one: whoever cut it has its own evidence.
            (_, End::Broken) if *member.cuts.borrow() != self.cuts => {}
            (_, End::EngineError | End::Broken) => pool.failed(member, now),
        }
        if self.p.probe {
            pool.probed(member);
        }
    }

    /// Compares the answer's own account with what was predicted.
    fn audit(&self) {
        let member = self.member();
        let usage = self.usage.unwrap_or_default();
        let exact_tokens =
            self.p.prompt.chain.kind() == ChainKind::Tokens && self.p.prompt.source.is_exact();
        let counted = self.usage.is_some() && exact_tokens;
        let same_tokens = usage.prompt_tokens == self.p.prompt.tokens;
        let predicted = self.p.believed;
        let mut distrust = false;
        let audited = {
            let mut state = member.state.lock();
            let reported = usage.cached_tokens;
            if counted && !same_tokens {
                state.audit.counts.token_mismatch += 1;
            }
            let audited = state.audit.answer(predicted, reported);
            if let (Some((announced, clears)), Some(reported)) = (self.p.announced, reported)
                && clears == state.clears
                && same_tokens
            {
                distrust = state.audit.denied(announced, reported);
            }
            member.metrics.audit_state(state.audit.state());
            audited
        };
        if self.p.met
            && let Some(reported) = usage.cached_tokens
        {
            let share = f64::from(reported) / f64::from(usage.prompt_tokens.max(1));
            self.pool().choice.lock().company.found(share);
        }
        if counted && !same_tokens {
            member.metrics.token_mismatch.inc();
        }
        if let Some(audited) = audited {
            member.metrics.audited(audited);
        }
        if distrust {
            // The engine's cache was emptied and nothing said so.
            tracing::warn!(endpoint = %member.id, "Answers deny the announced cache; forgetting it");
            member.metrics.distrusted.inc();
            self.p.endpoint.clear();
        }
        if let (Some(Audited::Over), Some(reported)) = (audited, usage.cached_tokens)
            && (same_tokens || !exact_tokens && reported < predicted / 2)
            && self.rung() != Rung::Exact
        {
            let p = &self.p.prompt;
            let mut guess = member.guess.lock();
            guess.missed(&p.chain, p.tokens, p.bytes, reported);
            // This request itself was computed since.
            guess.used(&p.chain, p.tokens, p.bytes, None);
        }
    }

    fn rung(&self) -> Rung {
        self.p.decision.chosen().map_or(Rung::Random, |c| c.rung)
    }
}

impl Observer for Ticket {
    fn first_byte(&mut self, _now: Instant) {}

    fn first_token(&mut self, now: Instant) {
        self.computed(now);
        self.learn(now);
    }

    fn usage(&mut self, usage: Usage) {
        self.usage = Some(usage);
    }

    fn end(&mut self, now: Instant, end: End) {
        self.finish(now, end);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // Without an end the client left. The time only orders hints.
        let now = Instant::now().max(self.p.now);
        self.finish(now, End::Cancelled);
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket")
            .field("endpoint", &self.p.endpoint.id())
            .field("decision", &self.p.decision.id)
            .field("stage", &self.stage)
            .finish()
    }
}
