//! The choice: what is known of each endpoint becomes a prediction, the policy scores it, and the best is booked, all
//! in one call.

use super::{
    Candidate, Choice, Decision, Endpoint, Excluded, Inner, NoEndpoint, Pick, PickRequest, Pool,
    Rung, Ticket,
    breaker::Gate,
    company::meeting,
    endpoint::{Member, Overlap},
    ticket::TicketParams,
};
use crate::{
    chain::{ATOM_BYTES, ATOM_TOKENS, ChainKind},
    load::{Booked, LoadView},
    policy::{Contender, FEWER_OF_TWO, LEAST_WORK, Policy, Routing, Sample, choose},
    predict::{Inputs, Prediction},
    prompt::Prompt,
};
use smallvec::SmallVec;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// Requests after which an endpoint is no newcomer.
const TRIED: u64 = 8;

/// A newcomer looks this much better, so that it is tried.
const OPTIMISM: f64 = 0.8;

/// Where all are equally cold, an idle endpoint looks a half better for so many choices per endpoint that passed it over:
/// what is known of it ages, and whoever is never chosen never corrects what is thought of it. A newcomer's
/// few answers age eight times as fast.
const PASSED_OVER: f64 = 8.0;

/// But no better than this: one that is three times as slow is not tried again and again.
const CURIOSITY: f64 = 0.4;

/// A newcomer that has not answered yet and has this many requests is not sure to be quick: its backlog counts threefold.
const UNPROVEN: u32 = 2;

/// Tokens that another client's waiting request is taken to compute before any of ours was seen.
const OTHERS: f64 = 1024.0;

/// One endpoint in the running for a request.
struct Running<'a> {
    member: &'a Arc<Member>,
    overlap: Overlap,
    probe: bool,
    penalty: f64,
    busy: f64,
    cached: u32,
    /// Of these, what it is known or guessed to hold.
    believed: u32,
    /// More than that is expected because others meet there.
    met: bool,
    /// KV tokens that it would take beside those in use.
    takes: u32,
    inputs: Inputs,
    prediction: Prediction,
    view: LoadView,
    rung: Rung,
    seq: Option<u64>,
    clears: u64,
    picks: u64,
    first_tokens: u64,
    last: u64,
    credit: f64,
    /// Tokens that its cache holds or will soon.
    resident: f64,
    /// Tokens that its cache can hold.
    capacity: Option<f64>,
    contender: Contender,
}

/// The longest prefix of a prompt that anyone holds.
struct Prefix {
    /// Its last key.
    key: u64,
    /// Its tokens.
    held: u32,
    /// Its keys.
    atoms: usize,
}

// === impl Pool ===

impl Pool {
    /// Chooses and books in one step.
    pub fn pick(&self, req: &PickRequest, excluded: &Excluded, now: Instant) -> Pick {
        let inner = &*self.inner;
        let members = inner.members.load();
        let ready: SmallVec<[&Arc<Member>; 16]> = members.iter().filter(|m| m.is_ready()).collect();
        let allowed: SmallVec<[&Arc<Member>; 16]> = ready
            .iter()
            .copied()
            .filter(|m| !excluded.0.contains(&m.id))
            .collect();
        if allowed.is_empty() {
            // One that is not ready may become so.
            if members.is_empty() || members.iter().any(|m| !excluded.0.contains(&m.id)) {
                return Pick::Wait(None);
            }
            inner.metrics.refused(NoEndpoint::AllExcluded);
            return Pick::None(NoEndpoint::AllExcluded);
        }

        // What is held is looked up before the lock is taken. Nothing of it is kept for the next pick of the same request:
        // one that has to wait has returned above without a lookup, so there is one for each dispatch, a few µs, and
        // only a retry would find something kept, about an index that has changed since.
        let overlaps = inner.overlaps(&req.prompt, &allowed);
        let active = inner.active.load();
        let mut choice = inner.choice.lock();
        let choice = &mut *choice;
        let mut running = choice.eligible(&allowed, &overlaps, now);
        if running.len() > 1 {
            let held: SmallVec<[u32; 16]> = running.iter().map(|r| r.overlap.tokens).collect();
            let sampler = if req.prompt.tokens == 0 {
                FEWER_OF_TWO
            } else {
                &*active.policy
            };
            if let Sample::Some(sample) = sampler.sample(&held, &mut choice.rng) {
                let mut at = 0;
                running.retain(|_| {
                    at += 1;
                    sample.contains(&(at - 1))
                });
            }
        }
        for r in &mut running {
            choice.weigh(r, req, active.spec.load_max_age, now);
        }
        choice.meet(&mut running, &req.prompt, now);
        contend(&mut running, req.prompt.tokens);
        let prefix = choice.rent(&mut running, &req.prompt, now);

        let (policy, cap, reason) = fallback(&*active.policy, active.spec.routing, req, &running);
        let contenders: SmallVec<[Contender; 16]> = running.iter().map(|r| r.contender).collect();
        let mut scores = Vec::with_capacity(contenders.len());
        let Some(chosen) = choose(policy, &contenders, &mut scores, &mut choice.rng) else {
            // There was at least one; only a policy that chooses nothing comes here.
            return Pick::Wait(None);
        };
        let Some(winner) = running.get(chosen) else {
            return Pick::Wait(None);
        };
        let rung = cap.map_or(winner.rung, |cap| winner.rung.max(cap));

        let reason = reason.or(match winner.rung {
            Rung::Guessed => winner.overlap.inexact.or(Some("load_stale")),
            Rung::Load => Some("no_keys"),
            _ => None,
        });
        if let Some(reason) = reason.filter(|_| rung != Rung::Random) {
            inner.metrics.fallback(reason);
        }

        choice.next += 1;
        let id = choice.next;
        let decision = Arc::new(Decision {
            id,
            request_id: req.request_id.clone(),
            at: now,
            unix: inner.unix(now),
            model: inner.model.clone(),
            rung,
            tokens: req.prompt.tokens,
            candidates: running
                .iter()
                .zip(&scores)
                .map(|(r, score)| r.candidate(*score))
                .collect(),
            chosen,
        });
        let ticket = choice.book(winner, &running, id, req, now);
        if let Some(prefix) = prefix {
            choice.settle(&prefix, ticket, &req.prompt, winner, &running, now);
        }
        let params = TicketParams {
            endpoint: Endpoint {
                pool: self.inner.clone(),
                member: winner.member.clone(),
            },
            id: ticket,
            decision: decision.clone(),
            prompt: req.prompt.clone(),
            stream: req.stream,
            inputs: winner.inputs,
            believed: winner.believed,
            met: winner.met,
            prediction: winner.prediction,
            announced: winner.overlap.exact.then(|| {
                let announced = winner.overlap.announced.unwrap_or(0);
                let clipped = winner.member.clip(announced, req.prompt.tokens);
                (clipped, winner.clears)
            }),
            probe: winner.probe,
            now,
        };
        inner.metrics.decided(rung);
        let ticket = Ticket::new(params);
        // In the order of ids, so under the lock.
        inner.decisions.push(decision);
        Pick::Dispatch(ticket)
    }
}

// === impl Inner ===

impl Inner {
    fn overlaps(&self, prompt: &Prompt, members: &[&Arc<Member>]) -> Vec<Overlap> {
        let mut matches = self.scratch.lock().pop().unwrap_or_default();
        // One lookup answers for all; who has no use for it does not ask.
        let mut looked = false;
        let overlaps = members
            .iter()
            .map(|m| {
                m.overlap(prompt, |holder| {
                    if !looked {
                        self.index.matches(&prompt.chain, &mut matches);
                        looked = true;
                    }
                    matches.get(holder)
                })
            })
            .collect();
        let mut scratch = self.scratch.lock();
        if scratch.len() < 16 {
            scratch.push(matches);
        }
        overlaps
    }
}

// === impl Choice ===

impl Choice {
    /// Those that breakers let through. Never more than half of them are kept away: when most fail, the cause may be the
    /// requests.
    fn eligible<'a>(
        &self,
        members: &[&'a Arc<Member>],
        overlaps: &[Overlap],
        now: Instant,
    ) -> SmallVec<[Running<'a>; 16]> {
        let gate = |m: &Member| match self.breakers.get(&m.id.address) {
            Some(b) => (b.gate(now), b.penalty(now), b.busy(now)),
            None => (Gate::Closed(1.0), 1.0, 0.0),
        };
        let open = members.iter().filter(|m| gate(m).0 == Gate::Open).count();
        let keep_away = open <= members.len() / 2;
        members
            .iter()
            .zip(overlaps)
            .filter_map(|(member, overlap)| {
                let (gate, penalty, busy) = gate(member);
                let (penalty, probe) = match gate {
                    Gate::Closed(penalty) => (penalty, false),
                    Gate::Probe => (1.0, true),
                    Gate::Open if keep_away => return None,
                    Gate::Open => (penalty, false),
                };
                Some(Running {
                    member,
                    overlap: *overlap,
                    probe,
                    penalty,
                    busy,
                    cached: 0,
                    believed: 0,
                    met: false,
                    takes: 0,
                    inputs: Inputs::default(),
                    prediction: Prediction::default(),
                    view: LoadView::default(),
                    rung: Rung::Load,
                    seq: None,
                    clears: 0,
                    picks: 0,
                    first_tokens: 0,
                    last: 0,
                    credit: 0.0,
                    resident: 0.0,
                    capacity: None,
                    contender: Contender::default(),
                })
            })
            .collect()
    }

    /// What is known of one endpoint becomes a prediction.
    fn weigh(&self, r: &mut Running<'_>, req: &PickRequest, max_age: Duration, now: Instant) {
        let (member, prompt) = (r.member, &req.prompt);
        let state = member.state.lock();
        let n = prompt.tokens;
        // Our own dispatches bridge the lag of events, and what is being computed now will be there.
        let hinted = state.hints.depth(&prompt.chain, n, prompt.bytes, now);
        r.cached = member.clip(r.overlap.tokens.max(hinted), n);
        r.believed = r.cached;
        let capacity = member.capacity();
        r.view = state.load.view(now, max_age, capacity);
        let booked = state.load.ahead(now);
        let ahead = self.model.ahead(member.slot, &booked, now);
        // What live requests hold of it is in use already; all else takes room, cached or not.
        let live = state.hints.live(&prompt.chain, n, prompt.bytes);
        r.takes = n.saturating_sub(live.min(r.cached));
        r.inputs = Inputs {
            tokens: n,
            cached: r.cached,
            bytes: prompt.bytes,
            ahead,
            others: f64::from(r.view.others_waiting) * self.uncached.unwrap_or(OTHERS),
            running: f64::from(r.view.running + r.view.others_running),
            slot: state.load.slot_wait(&r.view, r.takes, capacity).max(r.busy),
        };
        r.prediction = self.model.predict(member.slot, &r.inputs, now);
        r.rung = if prompt.chain.keys().is_empty() && n > member.block_size() {
            Rung::Load
        } else if r.overlap.exact && r.view.report_age.is_some() {
            Rung::Exact
        } else {
            Rung::Guessed
        };
        (r.seq, r.clears) = (state.seq, state.clears);
        (r.picks, r.first_tokens) = (state.picks, state.first_tokens);
        (r.last, r.credit) = (state.last, state.credit);
        let soon: f64 = booked.iter().map(|(u, _, _)| f64::from(*u)).sum();
        r.resident = r.overlap.resident as f64 + soon;
        r.capacity = capacity.tokens.filter(|t| *t > 0).map(|t| t as f64);
    }

    /// Where nothing is announced and others send requests too, some of a prompt is expected at its meeting place.
    fn meet(&mut self, running: &mut [Running<'_>], prompt: &Prompt, now: Instant) {
        let count = |of: fn(&LoadView) -> u32| -> f64 {
            running.iter().map(|r| f64::from(of(&r.view))).sum()
        };
        let ours = count(|v| v.booked + v.running);
        let others = count(|v| v.others_waiting + v.others_running);
        self.company.see(ours, others);
        if running.iter().all(|r| r.overlap.exact) {
            return;
        }
        let Some(share) = self.company.expects() else {
            return;
        };
        let place = meeting(&prompt.chain, running.iter().map(|r| &r.member.id));
        let Some(r) = place
            .and_then(|at| running.get_mut(at))
            .filter(|r| !r.overlap.exact)
        else {
            return;
        };
        let expected = (share * f64::from(prompt.tokens)) as u32;
        let expected = r.member.clip(expected, prompt.tokens);
        if expected > r.cached {
            r.met = true;
            r.cached = expected;
            r.inputs.cached = expected;
            r.prediction = self.model.predict(r.member.slot, &r.inputs, now);
        }
    }

    /// The longest prefix that anyone holds, and how much that is. Those that do not hold it are offered the rent that was
    /// paid for it; where a copy evicts something else it costs twice as much.
    fn rent(&self, running: &mut [Running<'_>], prompt: &Prompt, now: Instant) -> Option<Prefix> {
        let held = running.iter().map(|r| r.cached).max()?;
        let atoms = match prompt.chain.kind() {
            ChainKind::Tokens => held as usize / ATOM_TOKENS,
            ChainKind::Bytes => {
                let bytes = u64::from(held) * u64::from(prompt.bytes);
                (bytes / u64::from(prompt.tokens.max(1))) as usize / ATOM_BYTES
            }
        };
        let key = *prompt.chain.keys().get(atoms.checked_sub(1)?)?;
        let rent = self.demand.rent(key, now);
        for r in running.iter_mut().filter(|r| !r.holds(held)) {
            let full = r.capacity.is_some_and(|c| r.resident >= 0.9 * c);
            r.contender.rent = if full { rent / 2.0 } else { rent };
        }
        Some(Prefix { key, held, atoms })
    }

    /// The winner is a holder, and pays rent if another was free; or it is not, and a copy is bought. Only the part of the wait
    /// that requests with this very prefix cause is rent: a copy takes no other work away from the holder.
    fn settle(
        &mut self,
        prefix: &Prefix,
        ticket: u64,
        prompt: &Prompt,
        winner: &Running<'_>,
        running: &[Running<'_>],
        now: Instant,
    ) {
        if !winner.holds(prefix.held) {
            self.demand.buy(prefix.key);
            return;
        }
        let wait = |r: &Running<'_>| r.prediction.terms.backlog + r.prediction.terms.slot;
        let free = running.iter().filter(|r| !r.holds(prefix.held)).map(wait);
        let Some(free) = free.min_by(f64::total_cmp) else {
            return;
        };
        let waits = wait(winner) - free;
        if waits > 0.0 {
            let state = winner.member.state.lock();
            let alike = state.hints.alike(&prompt.chain, prefix.atoms);
            let (own, all) = state.load.work(ticket, &alike);
            let share = own / (all + winner.inputs.others).max(1.0);
            drop(state);
            self.demand.pay(prefix.key, waits * share, now);
        }
    }

    /// Books the winner; gives its number there.
    fn book(
        &mut self,
        winner: &Running<'_>,
        running: &[Running<'_>],
        id: u64,
        req: &PickRequest,
        now: Instant,
    ) -> u64 {
        let uncached = req.prompt.tokens.saturating_sub(winner.cached);
        let mean = self.uncached.get_or_insert(f64::from(uncached));
        *mean += 0.05 * (f64::from(uncached) - *mean);
        // Of cold prompts everyone has a share; whoever catches up takes no more than it.
        if uncached > req.prompt.tokens / 2 && running.len() > 1 {
            let share = (1.25 / running.len() as f64).min(0.4);
            for r in running {
                let mut state = r.member.state.lock();
                state.credit = (state.credit + share).min(2.0);
            }
            let mut state = winner.member.state.lock();
            state.credit = (state.credit - 1.0).max(0.0);
        }
        if winner.probe
            && let Some(b) = self.breakers.get_mut(&winner.member.id.address)
        {
            b.enter(now);
        }
        let mut state = winner.member.state.lock();
        state.picks += 1;
        state.last = id;
        let ticket = state.load.book(Booked {
            tokens: req.prompt.tokens,
            cached: winner.cached,
            stream: req.stream,
            at: now,
            expected: winner.prediction.ttft.as_secs_f64(),
            takes: winner.takes,
        });
        state.hints.push(ticket, &req.prompt.chain);
        ticket
    }
}

// === impl Running ===

impl Running<'_> {
    /// Whether it holds nearly all of the longest prefix that anyone holds.
    fn holds(&self, held: u32) -> bool {
        u64::from(self.cached) * 10 >= u64::from(held) * 9
    }

    fn candidate(&self, score: f64) -> Candidate {
        Candidate {
            endpoint: self.member.id.clone(),
            cached: self.cached,
            prediction: self.prediction,
            score,
            rung: self.rung,
            seq: self.seq,
            announced: self.overlap.announced,
            booked: self.view.booked,
            running: self.view.running,
            others: self.view.others_waiting + self.view.others_running,
            report_age: self.view.report_age,
            bias: self.contender.bias,
        }
    }
}

/// What the policy is to see, now that all are known.
fn contend(running: &mut [Running<'_>], tokens: u32) {
    let count = running.len().max(1) as f64;
    // In shares where all sizes are known, else in tokens. A cache that is nearly full evicts for every newcomer: there
    // the rest makes no difference.
    let shares = running.iter().all(|r| r.capacity.is_some());
    let share = |r: &Running<'_>, tokens: f64| match r.capacity {
        Some(capacity) if shares => tokens / capacity,
        _ => tokens,
    };
    let mean = running.iter().map(|r| share(r, r.resident)).sum::<f64>() / count;
    let answered = running.iter().any(|r| r.first_tokens > 0);
    let tried = running.iter().any(|r| r.picks >= TRIED);
    let least = running
        .iter()
        .map(|r| tokens.saturating_sub(r.cached))
        .min();
    let cold = least.is_some_and(|least| 2 * least > tokens);
    let latest = running.iter().map(|r| r.last).max().unwrap_or(0);
    for r in running {
        let mut bias = r.penalty;
        let newcomer = tried && r.picks < TRIED;
        let untried = if newcomer { OPTIMISM } else { 1.0 };
        let aged = if cold && r.picks > 0 && r.view.booked == 0 {
            let passed = latest.saturating_sub(r.last) as f64 / count;
            let patience = if newcomer {
                PASSED_OVER / 8.0
            } else {
                PASSED_OVER
            };
            (1.0 / (1.0 + passed / patience)).max(CURIOSITY)
        } else {
            1.0
        };
        bias *= aged.min(untried);
        let unproven = answered && r.first_tokens == 0 && r.view.booked >= UNPROVEN;
        let doubt = if unproven {
            2.0 * r.prediction.terms.backlog
        } else {
            0.0
        };
        let resident = share(r, r.resident);
        let catching_up = resident < 0.9 * mean - share(r, 2.0 * f64::from(tokens));
        r.contender = Contender {
            ttft: r.prediction.ttft.as_secs_f64() + doubt,
            own: r.prediction.own.as_secs_f64(),
            tokens,
            uncached: tokens.saturating_sub(r.cached),
            in_flight: f64::from(
                r.view.booked + r.view.running + r.view.others_running + r.view.others_waiting,
            ),
            ahead: r.inputs.ahead + r.inputs.others,
            resident: if !shares {
                (resident / 1024.0).floor()
            } else if resident >= 0.9 {
                1.0
            } else {
                (resident * 64.0).floor() / 64.0
            },
            last: r.last,
            bias,
            error: r.prediction.error,
            rent: 0.0,
            yields: catching_up && r.credit < 1.0,
        };
    }
}

/// The policy that what is known allows: itself, or a simpler one, the rung that follows, and why.
fn fallback<'p>(
    policy: &'p dyn Policy,
    routing: Routing,
    req: &PickRequest,
    running: &[Running<'_>],
) -> (&'p dyn Policy, Option<Rung>, Option<&'static str>) {
    match routing {
        Routing::Random => (policy, Some(Rung::Random), None),
        _ if req.prompt.tokens == 0 => (FEWER_OF_TWO, Some(Rung::InFlight), Some("unknown_prompt")),
        Routing::LeastLoad => (policy, Some(Rung::Load), None),
        Routing::LMetric => (policy, None, None),
        Routing::PricedTtft | Routing::Ttft | Routing::P2c => {
            if running.iter().any(|r| !r.prediction.trusted) {
                (LEAST_WORK, Some(Rung::Load), Some("untrusted"))
            } else {
                (policy, None, None)
            }
        }
    }
}
