//! The loop through time.

use super::{Change, Fleet, Record, Request, Router, Run, World};
use crate::load::Script;
use forebay_sim::{KvChange, Load, Output};
use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, HashMap},
};

/// Something on its way to the router.
struct Parcel {
    at: f64,
    /// Ties go by the order of sending.
    order: u64,
    what: What,
}

enum What {
    Kv(usize, Vec<KvChange>),
    /// A pod is asked for a report by a proxy.
    Ask(usize, usize),
    Report(usize, usize, Box<Load>),
    Change(Change),
}

/// A run in progress.
struct Stage<'w> {
    world: &'w World,
    fleet: Fleet,
    script: Script,
    router: Box<dyn Router>,
    parcels: BinaryHeap<Reverse<Parcel>>,
    order: u64,
    records: Vec<Record>,
    /// Requests in flight.
    open: HashMap<u64, Request>,
}

pub(super) fn run(world: &World) -> Run {
    let mut stage = Stage {
        fleet: Fleet::new(world),
        script: Script::new(world.workload, world.pattern, world.windows, world.seed),
        router: world.arm.router(world),
        parcels: BinaryHeap::new(),
        order: 0,
        records: Vec::new(),
        open: HashMap::new(),
        world,
    };
    stage.prepare();
    stage.play();
    Run {
        windows: world.windows,
        accuracy: stage.router.accuracy(),
        records: stage.records,
    }
}

// === impl Stage ===

impl Stage<'_> {
    fn prepare(&mut self) {
        for (at, change) in &self.world.changes {
            self.post(*at, What::Change(change.clone()));
        }
        let every = self.world.senses.every;
        for proxy in 0..self.world.proxies.max(1) {
            for pod in 0..self.world.pods.len() {
                // Nobody asks all at once.
                let phase = (0.1 + 0.37 * pod as f64 + 0.61 * proxy as f64).fract() * every;
                self.post(phase, What::Ask(proxy, pod));
            }
        }
    }

    fn play(&mut self) {
        let end = self.world.windows.end();
        let mut said = Vec::new();
        loop {
            let parcel = self.parcels.peek().map(|p| p.0.at);
            let moments = [self.fleet.next_event(), parcel, self.script.due()];
            let next = moments.into_iter().flatten().min_by(f64::total_cmp);
            let Some(now) = next.filter(|at| *at < end) else {
                return;
            };
            self.fleet.advance(now, &mut said);
            for (pod, output) in said.drain(..) {
                self.say(pod, output);
            }
            while self.parcels.peek().is_some_and(|p| p.0.at <= now) {
                if let Some(Reverse(parcel)) = self.parcels.pop() {
                    self.deliver(now, parcel.what);
                }
            }
            while self.script.due().is_some_and(|at| at <= now) {
                self.send(now);
            }
        }
    }

    fn send(&mut self, now: f64) {
        let Some(sent) = self.script.send() else {
            return;
        };
        let request = Request::new(sent);
        let (pod, probe) = self.router.route(now, &request, &self.fleet);
        let prompt = &request.prompt;
        let pods = self.fleet.joined();
        let best = pods.map(|i| self.fleet.cached(i, prompt)).max();
        self.records.push(Record {
            pod,
            known: self.fleet.known(prompt),
            best: best.unwrap_or(0),
            held: self.fleet.cached(pod, prompt),
            ahead: self.fleet.before_first_token(pod),
            probe,
            ..Record::sent(now, &request)
        });
        self.fleet.submit(pod, now, &request);
        self.open.insert(request.sent.id, request);
    }

    fn say(&mut self, pod: usize, output: Output) {
        match output {
            Output::FirstToken { id, at } => {
                if let Some(r) = self.records.get_mut(id as usize) {
                    r.ttft = Some(at - r.at);
                }
                self.fleet.first_token(pod);
                self.router.first_token(at, id);
            }
            Output::Tokens { .. } => {}
            Output::Done {
                id,
                at,
                cached,
                output,
                ..
            } => {
                if let Some(r) = self.records.get_mut(id as usize) {
                    r.end = Some(at);
                    r.cached = Some(cached);
                }
                self.fleet.ended(pod, true);
                if let Some(request) = self.open.remove(&id) {
                    self.router.done(at, &request, cached, output);
                }
                self.script.ended(id, at, true);
            }
            Output::Refused { id, at } => {
                self.fleet.ended(pod, false);
                self.open.remove(&id);
                self.router.failed(at, id);
                self.script.ended(id, at, false);
            }
            Output::Kv { at, batch } => {
                self.fleet.note(&batch, self.world.arm.is_bound());
                if let Some(delay) = self.world.senses.events {
                    self.post(at + delay, What::Kv(pod, batch));
                }
            }
        }
    }

    fn deliver(&mut self, now: f64, what: What) {
        match what {
            What::Kv(pod, batch) => self.router.heard(now, pod, &batch),
            What::Ask(proxy, pod) => {
                if let Some(p) = self.fleet.pods().get(pod) {
                    let load = Box::new(p.load());
                    self.post(
                        now + self.world.senses.delay,
                        What::Report(proxy, pod, load),
                    );
                }
                self.post(now + self.world.senses.every, What::Ask(proxy, pod));
            }
            What::Report(proxy, pod, load) => self.router.reported(now, proxy, pod, &load),
            What::Change(change) => {
                self.fleet.change(&change);
                if let Change::Join(pod) = change {
                    self.router.joined(pod);
                }
            }
        }
    }

    fn post(&mut self, at: f64, what: What) {
        self.order += 1;
        self.parcels.push(Reverse(Parcel {
            at,
            order: self.order,
            what,
        }));
    }
}

// === impl Parcel ===

impl Ord for Parcel {
    fn cmp(&self, other: &Self) -> Ordering {
        let at = self.at.total_cmp(&other.at);
        at.then(self.order.cmp(&other.order))
    }
}

impl PartialOrd for Parcel {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Parcel {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Parcel {}
