//! The endpoints of one model, and the choice among them.
//!
//! A request is booked at an endpoint in the same call that chooses it, so that a burst sees itself. What is known of
//! an endpoint goes by [`EndpointId`]: a process that is replaced takes its knowledge with
//! it, one that is merely not ready keeps it. Breakers go by address.
//!
//! Locks, in this order: the pool's choice (predictor, breakers, randomness), then one endpoint's state. The overlap of
//! a prompt with what endpoints hold is looked up before, under neither.

mod audit;
mod breaker;
mod company;
mod decision;
mod demand;
mod endpoint;
mod hints;
mod metrics;
mod pick;
mod residency;
#[cfg(test)]
mod tests;
mod ticket;

pub(crate) use self::metrics::PoolMetrics;
pub use self::{
    audit::{AuditCounts, AuditState},
    decision::{Candidate, Decision, DecisionLog, DecisionRecord, Outcome, Rung},
    endpoint::{Endpoint, EndpointInfo, EndpointStatus},
    metrics::PoolMetricFamilies,
    ticket::Ticket,
};

use self::{
    breaker::Breaker,
    company::Company,
    demand::Demand,
    endpoint::{Member, MemberState},
    residency::CacheModel,
};
use crate::{
    chain::KeySpace,
    endpoint::{Address, EndpointId},
    index::{IndexParams, Matches, PrefixIndex},
    policy::{Policy, PolicySpec, policy},
    predict::{RegimeError, TtftModel},
    prompt::Prompt,
    queue::{Queue, QueueParams},
};
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rand::{SeedableRng, rngs::StdRng};
use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::SystemTime,
};
use tokio::{sync::watch, time::Instant};

/// Decisions that a pool remembers.
const DECISIONS: usize = 512;

/// Parameters of a pool.
#[derive(Clone, Debug)]
pub struct PoolParams {
    /// The base model's name.
    pub model: Arc<str>,
    /// The installation's key space.
    pub keys: KeySpace,
    /// The policy it starts with.
    pub policy: PolicySpec,
    /// A seed for all random choices.
    pub seed: u64,
    /// Bytes that the prefix index may take.
    pub index_bytes: usize,
}

/// The endpoints of one model. Cheap to clone; all clones are the same pool.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

/// One request as the pool sees it.
#[derive(Clone, Debug)]
pub struct PickRequest {
    /// The prompt.
    pub prompt: Prompt,
    /// The answer streams; others never train TTFT.
    pub stream: bool,
    /// The output budget, if given.
    pub max_tokens: Option<u64>,
    /// Id for decision records.
    pub request_id: Option<Arc<str>>,
}

/// Endpoints that a request must not go to again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Excluded(pub Vec<EndpointId>);

/// The outcome of a pick.
#[derive(Debug)]
pub enum Pick {
    /// Go there; it is booked.
    Dispatch(Ticket),
    /// Nothing now; ask again when something changes, or at that time.
    Wait(Option<Instant>),
    /// Never, and why.
    None(NoEndpoint),
}

/// Why there is no endpoint for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoEndpoint {
    /// Every endpoint that there is has already failed this request.
    #[error("every endpoint has already failed this request")]
    AllExcluded,
}

struct Inner {
    model: Arc<str>,
    index: PrefixIndex,
    active: ArcSwap<Active>,
    members: ArcSwap<Vec<Arc<Member>>>,
    /// Held while the set changes.
    editing: Mutex<()>,
    choice: Mutex<Choice>,
    decisions: DecisionLog,
    metrics: PoolMetrics,
    queue: Queue,
    changed: watch::Sender<u64>,
    /// Lookup results to use again.
    scratch: Mutex<Vec<Matches>>,
    /// One moment on both clocks.
    epoch: (Instant, f64),
}

/// The policy in force.
struct Active {
    spec: PolicySpec,
    policy: Box<dyn Policy>,
}

/// All that choices share.
struct Choice {
    rng: StdRng,
    /// Choices so far.
    next: u64,
    model: TtftModel,
    breakers: HashMap<Address, Breaker>,
    demand: Demand,
    /// Mean tokens that our requests compute; others' are taken to be alike.
    uncached: Option<f64>,
    company: Company,
}

// === impl Pool ===

impl Pool {
    /// An empty pool.
    pub fn new(params: PoolParams) -> Self {
        Self::with_metrics(params, &PoolMetricFamilies::default())
    }

    /// An empty pool whose metrics are seen.
    pub fn with_metrics(params: PoolParams, families: &PoolMetricFamilies) -> Self {
        let metrics = families.of(&params.model);
        let unix = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0.0, |d| d.as_secs_f64());
        Self {
            inner: Arc::new(Inner {
                index: PrefixIndex::new(IndexParams {
                    keys: params.keys,
                    model: params.model.clone(),
                    max_bytes: params.index_bytes,
                }),
                model: params.model,
                queue: Queue::new(QueueParams::of(&params.policy), metrics.clone()),
                active: ArcSwap::from_pointee(Active::new(params.policy)),
                members: ArcSwap::default(),
                editing: Mutex::new(()),
                choice: Mutex::new(Choice {
                    rng: StdRng::seed_from_u64(params.seed),
                    next: 0,
                    model: TtftModel::default(),
                    breakers: HashMap::new(),
                    demand: Demand::default(),
                    uncached: None,
                    company: Company::default(),
                }),
                decisions: DecisionLog::new(DECISIONS),
                metrics,
                changed: watch::Sender::new(0),
                scratch: Mutex::new(Vec::new()),
                epoch: (Instant::now(), unix),
            }),
        }
    }

    /// The base model's name.
    pub fn model(&self) -> &Arc<str> {
        &self.inner.model
    }

    /// Adds an endpoint that is not ready yet, or updates what is known of it. A new incarnation of the same address and rank replaces the old one: its tickets are cut and nothing learned of it stays but the peers' gain.
    pub fn insert(&self, id: EndpointId, info: EndpointInfo) -> Endpoint {
        let inner = &self.inner;
        let _editing = inner.editing.lock();
        let mut members = Vec::clone(&inner.members.load());
        let same = |m: &Arc<Member>| m.id.address == id.address && m.id.rank == id.rank;
        let place = members.iter().position(same);
        if let Some(old) = place.and_then(|at| members.get(at)) {
            if old.id.incarnation == id.incarnation {
                let member = old.clone();
                inner.set_info(&member, info);
                return Endpoint {
                    pool: inner.clone(),
                    member,
                };
            }
            inner.forget(old);
            if let Some(b) = inner.choice.lock().breakers.get_mut(&id.address) {
                b.renew(Instant::now());
            }
        }
        let metrics = inner.metrics.endpoint(&id);
        metrics.ready.set(0);
        let member = Arc::new(Member {
            slot: inner.choice.lock().model.add(info.gpu.clone()),
            holder: inner.index.holder(),
            guess: Mutex::new(CacheModel::new(info.block_size, info.blocks)),
            info: ArcSwap::from_pointee(info),
            ready: AtomicBool::new(false),
            events_live: AtomicBool::new(false),
            cuts: watch::Sender::new(0),
            state: Mutex::new(MemberState {
                credit: 1.0,
                ..Default::default()
            }),
            metrics,
            id,
        });
        tracing::info!(endpoint = %member.id, incarnation = member.id.incarnation.as_str(), "Adding endpoint");
        match place.and_then(|at| members.get_mut(at)) {
            Some(old) => *old = member.clone(),
            None => members.push(member.clone()),
        }
        inner.members.store(Arc::new(members));
        inner.tell();
        Endpoint {
            pool: inner.clone(),
            member,
        }
    }

    /// Removes an endpoint: its tickets are cut, and it is forgotten.
    pub fn remove(&self, id: &EndpointId) {
        let inner = &self.inner;
        let _editing = inner.editing.lock();
        let mut members = Vec::clone(&inner.members.load());
        let Some(at) = members.iter().position(|m| m.id == *id) else {
            return;
        };
        let member = members.remove(at);
        tracing::info!(endpoint = %member.id, "Removing endpoint");
        // Ranks of one address share its breaker.
        if !members.iter().any(|m| m.id.address == id.address) {
            inner.choice.lock().breakers.remove(&id.address);
        }
        inner.members.store(Arc::new(members));
        inner.forget(&member);
        member.metrics.remove();
        inner.tell();
    }

    /// The members.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        let members = self.inner.members.load();
        members
            .iter()
            .map(|member| Endpoint {
                pool: self.inner.clone(),
                member: member.clone(),
            })
            .collect()
    }

    /// Replaces the policy; endpoints keep what they learned.
    pub fn set_policy(&self, policy: PolicySpec) {
        self.inner.queue.set_params(QueueParams::of(&policy));
        self.inner.active.store(Arc::new(Active::new(policy)));
        self.inner.tell();
    }

    /// The policy in force.
    pub fn policy(&self) -> PolicySpec {
        self.inner.active.load().spec.clone()
    }

    /// Changes whenever an endpoint comes, goes, becomes ready or is no longer, or the policy changes.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.inner.changed.subscribe()
    }

    /// The last decisions and their outcomes.
    pub fn decisions(&self) -> &DecisionLog {
        &self.inner.decisions
    }

    /// Where requests wait while no endpoint is ready.
    pub fn queue(&self) -> &Queue {
        &self.inner.queue
    }

    /// How predictions went, per regime.
    pub fn accuracy(&self) -> Vec<RegimeError> {
        self.inner.choice.lock().model.accuracy()
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("model", &self.inner.model)
            .field("endpoints", &self.inner.members.load().len())
            .finish()
    }
}

// === impl Inner ===

impl Inner {
    /// Whoever waits for an endpoint looks again.
    fn tell(&self) {
        self.changed.send_modify(|n| *n = n.wrapping_add(1));
    }

    /// A member leaves: nothing of it may be chosen, held or learned from any more.
    fn forget(&self, member: &Member) {
        member.ready.store(false, Ordering::Release);
        member.cuts.send_modify(|n| *n += 1);
        self.index.clear(&member.holder);
        member.guess.lock().clear();
        self.choice.lock().model.remove(member.slot);
    }

    fn set_info(&self, member: &Member, info: EndpointInfo) {
        if **member.info.load() == info {
            return;
        }
        member.guess.lock().resize(info.block_size, info.blocks);
        let gpu = info.gpu.clone();
        member.info.store(Arc::new(info));
        self.choice.lock().model.set_gpu(member.slot, gpu);
    }

    fn succeeded(&self, member: &Member) {
        let mut choice = self.choice.lock();
        if let Some(b) = choice.breakers.get_mut(&member.id.address) {
            b.success();
            member.metrics.breaker_open.set(0);
        }
    }

    fn failed(&self, member: &Member, now: Instant) {
        member.metrics.failures.inc();
        if !self.is_member(member) {
            return;
        }
        let mut choice = self.choice.lock();
        let b = choice
            .breakers
            .entry(member.id.address.clone())
            .or_default();
        b.failure(now);
        member.metrics.breaker_open.set(i64::from(b.is_open()));
    }

    fn probed(&self, member: &Member) {
        if let Some(b) = self.choice.lock().breakers.get_mut(&member.id.address) {
            b.left();
        }
    }

    fn busy(&self, member: &Member, until: Instant) {
        if self.is_member(member) {
            let mut choice = self.choice.lock();
            let breakers = &mut choice.breakers;
            breakers
                .entry(member.id.address.clone())
                .or_default()
                .set_busy(until);
        }
    }

    /// Breakers are kept for addresses of members only, so their number is bounded.
    fn is_member(&self, member: &Member) -> bool {
        self.members.load().iter().any(|m| m.id == member.id)
    }

    /// Seconds since the epoch.
    fn unix(&self, now: Instant) -> f64 {
        let (then, unix) = self.epoch;
        unix + now.saturating_duration_since(then).as_secs_f64()
    }

    fn status(&self, member: &Member, now: Instant) -> EndpointStatus {
        let max_age = self.active.load().spec.load_max_age;
        let (rate, samples, open) = {
            let choice = self.choice.lock();
            let breaker = choice.breakers.get(&member.id.address);
            (
                choice.model.seconds_per_token(member.slot, now),
                choice.model.samples(member.slot),
                breaker.is_some_and(|b| b.is_open()),
            )
        };
        let info = member.info.load();
        let state = member.state.lock();
        let view = state.load.view(now, max_age, member.capacity());
        EndpointStatus {
            endpoint: member.id.to_string(),
            incarnation: member.id.incarnation.as_str().to_owned(),
            ready: member.is_ready(),
            events: info.events,
            events_live: member.events_live.load(Ordering::Acquire),
            seq: state.seq,
            block_size: member.block_size(),
            blocks_held: member.holder.blocks(),
            blocks: info.blocks,
            booked: view.booked,
            running: view.running,
            others: view.others_running + view.others_waiting,
            report_age: view.report_age.map(|d| d.as_secs_f64()),
            picks: state.picks,
            seconds_per_token: rate,
            samples,
            breaker_open: open,
            audit: state.audit.state(),
            audited: state.audit.counts,
        }
    }
}

// === impl Active ===

impl Active {
    fn new(spec: PolicySpec) -> Self {
        Self {
            policy: policy(&spec),
            spec,
        }
    }
}
