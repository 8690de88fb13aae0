//! Ways of routing that need no pool: what a Service does, simple balancers, and those that know everything.

use super::{Fleet, Pooled, PooledParams, Probe, Request, World};
use forebay_sim::{KvChange, Load};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::collections::HashMap;
use tower_ttft::policy::Routing;

/// How requests are routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arm {
    /// As a Kubernetes Service does: at random.
    Service,
    /// In turn.
    RoundRobin,
    /// Fewest requests in flight.
    LeastRequests,
    /// Each prefix or conversation has its pod for good.
    Static,
    /// Longest prefix that a pod truly holds, then fewest requests in flight.
    PrefixOnly,
    /// The shipped code: predicted TTFT alone.
    Ttft,
    /// The shipped code: uncached tokens times batch size.
    LMetric,
    /// The shipped code and its default: predicted TTFT and a price for work.
    Priced,
    /// `Ttft` behind the whole shipped path.
    TtftStack,
    /// `LMetric` behind the whole shipped path.
    LMetricStack,
    /// `Priced` behind the whole shipped path.
    PricedStack,
    /// The smallest TTFT by perfect knowledge of pods.
    Exact,
    /// The same over pods with unlimited memory, each of which holds what any has computed.
    Bound,
}

/// Decides where requests go. What it is told, it is told when it would hear of it.
pub trait Router {
    /// A pod for a request that is sent now, and what it thinks of it.
    fn route(&mut self, now: f64, request: &Request, fleet: &Fleet) -> (usize, Option<Probe>);

    /// A request's first token came.
    fn first_token(&mut self, _now: f64, _id: u64) {}

    /// A request is complete, with so many cached and generated tokens.
    fn done(&mut self, _now: f64, _request: &Request, _cached: u32, _output: u32) {}

    /// A request was refused.
    fn failed(&mut self, _now: f64, _id: u64) {}

    /// The KV events of one step of a pod have arrived.
    fn heard(&mut self, _now: f64, _pod: usize, _batch: &[KvChange]) {}

    /// A pod's report has arrived at one of the proxies.
    fn reported(&mut self, _now: f64, _proxy: usize, _pod: usize, _load: &Load) {}

    /// A pod joined.
    fn joined(&mut self, _pod: usize) {}

    /// How its predictions went by its own account.
    fn accuracy(&self) -> Vec<tower_ttft::predict::RegimeError> {
        Vec::new()
    }
}

/// A router that knows pods and its own requests. As with the shipped ones there may be several proxies of it, and traffic that
/// goes past them.
struct Simple {
    arm: Arm,
    turn: usize,
    rng: StdRng,
    bypass: f64,
    proxies: usize,
    /// Requests in flight of each proxy at each pod.
    open: HashMap<(usize, usize), u32>,
    /// Where each of them is, by request.
    went: HashMap<u64, (usize, usize)>,
}

// === impl Arm ===

impl Arm {
    /// All, in the order of tables.
    pub const ALL: [Self; 13] = [
        Self::Service,
        Self::RoundRobin,
        Self::LeastRequests,
        Self::Static,
        Self::PrefixOnly,
        Self::Ttft,
        Self::LMetric,
        Self::Priced,
        Self::TtftStack,
        Self::LMetricStack,
        Self::PricedStack,
        Self::Exact,
        Self::Bound,
    ];

    /// For tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Service => "service",
            Self::RoundRobin => "round robin",
            Self::LeastRequests => "least requests",
            Self::Static => "static",
            Self::PrefixOnly => "prefix only",
            Self::Ttft => "Ttft",
            Self::LMetric => "LMetric",
            Self::Priced => "PricedTtft",
            Self::TtftStack => "Ttft, whole path",
            Self::LMetricStack => "LMetric, whole path",
            Self::PricedStack => "PricedTtft, whole path",
            Self::Exact => "exact greedy",
            Self::Bound => "bound",
        }
    }

    /// The shipped policy that it stands for.
    pub fn routing(self) -> Option<Routing> {
        match self {
            Self::Ttft | Self::TtftStack => Some(Routing::Ttft),
            Self::LMetric | Self::LMetricStack => Some(Routing::LMetric),
            Self::Priced | Self::PricedStack => Some(Routing::PricedTtft),
            _ => None,
        }
    }

    /// Whether requests go through the whole shipped path.
    pub fn is_stack(self) -> bool {
        matches!(
            self,
            Self::TtftStack | Self::LMetricStack | Self::PricedStack
        )
    }

    /// Whether its pods share what they computed.
    pub fn is_bound(self) -> bool {
        self == Self::Bound
    }

    /// A router of this kind for a world.
    pub(super) fn router(self, world: &World) -> Box<dyn Router> {
        match self.routing() {
            Some(routing) => Box::new(Pooled::new(&PooledParams::of(world, routing))),
            None => Box::new(Simple {
                arm: self,
                turn: 0,
                rng: StdRng::seed_from_u64(world.seed ^ 0x726f_7574_6572),
                bypass: world.bypass,
                proxies: world.proxies.max(1),
                open: HashMap::new(),
                went: HashMap::new(),
            }),
        }
    }
}

// === impl Simple ===

impl Simple {
    /// The cheapest of the pods; ties at random.
    fn cheapest(&mut self, fleet: &Fleet, cost: impl Fn(usize) -> f64) -> usize {
        let costs: Vec<(usize, f64)> = fleet.joined().map(|i| (i, cost(i))).collect();
        let best = costs.iter().map(|c| c.1).fold(f64::INFINITY, f64::min);
        let ties: Vec<usize> = costs.iter().filter(|c| c.1 <= best).map(|c| c.0).collect();
        let nth = self.rng.random_range(0..ties.len().max(1));
        ties.get(nth).copied().unwrap_or(0)
    }
}

impl Router for Simple {
    fn route(&mut self, now: f64, request: &Request, fleet: &Fleet) -> (usize, Option<Probe>) {
        let pods: Vec<usize> = fleet.joined().collect();
        let nth = |n: usize| pods.get(n % pods.len().max(1)).copied().unwrap_or(0);
        if self.bypass > 0.0 && self.rng.random_bool(self.bypass) {
            return (nth(self.rng.random_range(0..pods.len().max(1))), None);
        }
        let proxy = match self.proxies {
            1 => 0,
            n => self.rng.random_range(0..n),
        };
        let open: Vec<f64> = (0..fleet.pods().len())
            .map(|i| self.open.get(&(proxy, i)).map_or(0.0, |n| f64::from(*n)))
            .collect();
        let open = |i: usize| open.get(i).copied().unwrap_or(0.0);
        let pod = match self.arm {
            Arm::RoundRobin => {
                self.turn += 1;
                nth(self.turn)
            }
            Arm::Static => nth(request.sent.chat.group as usize),
            Arm::LeastRequests => self.cheapest(fleet, open),
            Arm::PrefixOnly => self.cheapest(fleet, |i| {
                // More than any number of requests.
                open(i) - 1e6 * f64::from(fleet.cached(i, &request.prompt))
            }),
            Arm::Exact | Arm::Bound => self.cheapest(fleet, |i| fleet.ttft(i, now, request)),
            _ => nth(self.rng.random_range(0..pods.len().max(1))),
        };
        *self.open.entry((proxy, pod)).or_default() += 1;
        self.went.insert(request.sent.id, (proxy, pod));
        (pod, None)
    }

    fn done(&mut self, now: f64, request: &Request, _: u32, _: u32) {
        self.failed(now, request.sent.id);
    }

    fn failed(&mut self, _: f64, id: u64) {
        let there = self.went.remove(&id);
        if let Some(n) = there.and_then(|there| self.open.get_mut(&there)) {
            *n = n.saturating_sub(1);
        }
    }
}
