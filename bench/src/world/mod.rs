//! A world in virtual time: simulated pods, a client's script, and one way of routing between them.
//!
//! Time is a number of seconds from the start of the run. The loop goes from one moment at which something happens to the next,
//! so an hour passes in seconds and the same seed gives the same run. What pods announce and report reaches the router as late as
//! it would in the real world.

mod arm;
mod fleet;
mod pooled;
mod record;
mod stage;

pub use self::{
    arm::{Arm, Router},
    fleet::{Fleet, Request},
    pooled::{MODEL, Pooled, PooledParams, endpoint_id, event_batch, load_report},
    record::{Causes, Probe, Record, Run},
};

use crate::{
    Error,
    load::{Pattern, Windows, Workload},
    stack,
};
use forebay_sim::PodSpec;
use std::sync::Arc;

/// Everything that decides a run.
#[derive(Clone, Debug)]
pub struct World {
    /// The pods, one spec each.
    pub pods: Vec<Arc<PodSpec>>,
    /// What is sent.
    pub workload: Workload,
    /// When.
    pub pattern: Pattern,
    /// For how long.
    pub windows: Windows,
    /// How it is routed.
    pub arm: Arm,
    /// What routers learn of pods.
    pub senses: Senses,
    /// Proxies that share the traffic, each with its own tickets.
    pub proxies: usize,
    /// The share of requests that go past all proxies to a random pod.
    pub bypass: f64,
    /// What changes on the way, in order.
    pub changes: Vec<(f64, Change)>,
    /// λ of the priced policy.
    pub lambda: f64,
    /// Whether each decision is compared with forked simulations of all candidates.
    pub probe: bool,
    /// Fixes prompts, arrivals and all random choices.
    pub seed: u64,
}

/// What routers learn of pods, and how late.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Senses {
    /// Seconds until a KV event has arrived; none if there are no events.
    pub events: Option<f64>,
    /// Seconds between two reports of load.
    pub every: f64,
    /// Seconds until a report has arrived.
    pub delay: f64,
}

/// Something that happens to a pod.
#[derive(Clone, Debug)]
pub enum Change {
    /// From now on it works at other times.
    Times(usize, Arc<PodSpec>),
    /// It joins. Pods that are to join are not there before.
    Join(usize),
}

// === impl World ===

impl World {
    /// The published set-up: three of a kind, one proxy, events after 20 ms and a report each second.
    pub fn published(
        spec: &Arc<PodSpec>,
        workload: Workload,
        pattern: Pattern,
        arm: Arm,
        seed: u64,
    ) -> Self {
        Self {
            pods: vec![spec.clone(); 3],
            workload,
            pattern,
            windows: match pattern {
                Pattern::Open { .. } => Windows::LATENCY,
                Pattern::Closed { .. } => Windows::CAPACITY,
            },
            arm,
            senses: Senses::default(),
            proxies: 1,
            bypass: 0.0,
            changes: Vec::new(),
            lambda: 1.0,
            probe: false,
            seed,
        }
    }

    /// Lives through it. Must be called within a runtime whose clock is paused, since pools read it.
    ///
    /// # Errors
    /// If the whole path cannot be built.
    pub fn run(&self) -> Result<Run, Error> {
        if self.arm.is_stack() {
            stack::run(self)
        } else {
            Ok(stage::run(self))
        }
    }
}

// === impl Senses ===

impl Default for Senses {
    fn default() -> Self {
        Self {
            events: Some(0.02),
            every: 1.0,
            delay: 0.005,
        }
    }
}

#[cfg(test)]
mod tests;
