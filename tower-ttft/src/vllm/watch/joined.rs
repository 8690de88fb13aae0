//! What a watcher has put into the pool, taken out again when it goes.

use crate::{
    endpoint::EndpointId,
    pool::EndpointInfo,
    vllm::{
        member::{Member, Registry},
        source::TcpAddress,
        status::{EventsState, EventsStatus},
        subscribe::{Shared, Sink, SubscribeParams, Subscription, Times},
        zmtp::Limits,
    },
};
use std::sync::Arc;
use tokio::task::JoinHandle;

/// Where the events of one endpoint are, or why there are none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    Follow {
        live: TcpAddress,
        replay: Option<TcpAddress>,
    },
    Without(String),
}

/// One endpoint in the pool. Dropping it stops its subscription and takes it out.
pub(crate) struct Joined<R: Registry> {
    registry: R,
    id: EndpointId,
    member: R::Member,
    info: EndpointInfo,
    plan: Plan,
    events: Events,
    following: Option<Abort>,
    asleep: bool,
    /// Another incarnation has taken its place in the pool.
    replaced: bool,
}

/// What can be seen of an endpoint's events.
#[derive(Clone, Debug)]
pub(crate) enum Events {
    Following {
        rank: Option<u32>,
        shared: Arc<Shared>,
    },
    Without {
        rank: Option<u32>,
        why: String,
    },
}

/// A task that ends with its owner.
struct Abort(JoinHandle<()>);

// === impl Joined ===

impl<R: Registry> Joined<R> {
    pub(crate) fn new(
        registry: R,
        id: EndpointId,
        info: EndpointInfo,
        plan: Plan,
        seed: u64,
    ) -> Self {
        let member = registry.insert(id.clone(), info.clone());
        let why = String::new();
        let events = Events::Without {
            rank: id.rank,
            why: why.clone(),
        };
        let mut joined = Self {
            registry,
            id,
            member,
            info,
            plan: Plan::Without(why),
            events,
            following: None,
            asleep: false,
            replaced: false,
        };
        joined.follow(plan, seed);
        joined
    }

    pub(crate) fn id(&self) -> &EndpointId {
        &self.id
    }

    pub(crate) fn member(&self) -> &R::Member {
        &self.member
    }

    /// Its place in the pool is another's now.
    pub(crate) fn replaced(&mut self) {
        self.replaced = true;
    }

    /// Follows events as planned; a plan that has not changed changes nothing.
    pub(crate) fn follow(&mut self, plan: Plan, seed: u64) {
        if self.plan == plan {
            return;
        }
        if self.following.take().is_some() {
            // What was followed so far is no longer: whatever comes next has to be known from its beginning.
            self.member.set_events_live(false);
            self.member.clear();
        }
        let rank = self.id.rank;
        self.events = match &plan {
            Plan::Without(why) => Events::Without {
                rank,
                why: why.clone(),
            },
            Plan::Follow { live, replay } => {
                let params = SubscribeParams {
                    live: live.clone(),
                    replay: replay.clone(),
                    rank,
                    seed,
                    times: Times::default(),
                    limits: Limits::default(),
                };
                let shared = Arc::<Shared>::default();
                let subscription = Subscription::new(params, self.member.clone(), shared.clone());
                self.following = Some(Abort(tokio::spawn(async move {
                    match subscription.run().await {}
                })));
                Events::Following { rank, shared }
            }
        };
        self.plan = plan;
    }

    /// Updates what the pool knows of it.
    pub(crate) fn set_info(&mut self, info: EndpointInfo) {
        let same = info.gpu == self.info.gpu
            && info.block_size == self.info.block_size
            && info.blocks == self.info.blocks
            && info.max_seqs == self.info.max_seqs
            && info.events == self.info.events;
        if !same {
            self.member.set_info(info.clone());
            self.info = info;
        }
    }

    /// Notes whether it sleeps. Falling asleep throws the cache away, and the event that says so may be long in coming.
    pub(crate) fn set_asleep(&mut self, asleep: bool) {
        if asleep && !self.asleep {
            self.member.clear();
        }
        self.asleep = asleep;
    }

    pub(crate) fn is_asleep(&self) -> bool {
        self.asleep
    }

    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Whether the event socket was had and is lost.
    pub(crate) fn events_down(&self) -> bool {
        self.events.following().is_some_and(|shared| {
            let status = shared.status.lock();
            status.counts.connects > 0 && status.state == EventsState::Connecting
        })
    }

    pub(crate) fn info(&self) -> &EndpointInfo {
        &self.info
    }
}

impl<R: Registry> Drop for Joined<R> {
    fn drop(&mut self) {
        self.following = None;
        if !self.replaced {
            self.registry.remove(&self.id);
        }
    }
}

// === impl Events ===

impl Events {
    pub(crate) fn following(&self) -> Option<&Arc<Shared>> {
        match self {
            Self::Following { shared, .. } => Some(shared),
            Self::Without { .. } => None,
        }
    }

    pub(crate) fn status(&self) -> EventsStatus {
        match self {
            Self::Following { rank, shared } => EventsStatus {
                rank: *rank,
                ..shared.status.lock().clone()
            },
            Self::Without { rank, why } => EventsStatus {
                rank: *rank,
                why: Some(why.clone()),
                ..EventsStatus::default()
            },
        }
    }
}

// === impl Abort ===

impl Drop for Abort {
    fn drop(&mut self) {
        self.0.abort();
    }
}
