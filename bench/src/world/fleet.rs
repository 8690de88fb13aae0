use super::{Change, World};
use crate::load::Sent;
use forebay_sim::{Arrival, KvChange, Output, Pod, Prompt};
use std::{collections::HashSet, sync::Arc};

/// Bytes of text per token. 16,256 tokens of the published run's English are 86.8 kB.
pub(crate) const BYTES_PER_TOKEN: u32 = 5;

/// The pods of a world.
#[derive(Debug)]
pub struct Fleet {
    pods: Vec<Pod>,
    joined: Vec<bool>,
    /// Requests in flight at each, and those of them that had their first token.
    open: Vec<(u32, u32)>,
    /// Keys of all blocks ever computed.
    computed: HashSet<u64>,
}

/// A request on its way.
#[derive(Clone, Debug)]
pub struct Request {
    /// What the client sent.
    pub sent: Sent,
    /// Its prompt as pods see it.
    pub prompt: Arc<Prompt>,
}

// === impl Request ===

impl Request {
    /// The request of something sent.
    pub fn new(sent: Sent) -> Self {
        let bytes = sent.chat.tokens.len() as u32 * BYTES_PER_TOKEN;
        Self {
            prompt: Arc::new(Prompt::new(sent.chat.tokens.clone(), bytes)),
            sent,
        }
    }

    /// Prompt tokens.
    pub fn tokens(&self) -> u32 {
        self.prompt.tokens()
    }
}

// === impl Fleet ===

impl Fleet {
    pub(crate) fn new(world: &World) -> Self {
        let pods = world.pods.iter().enumerate();
        let later = |i| {
            let joins = |(_, c): &(f64, Change)| matches!(c, Change::Join(j) if *j == i);
            world.changes.iter().any(joins)
        };
        Self {
            pods: pods
                .clone()
                .map(|(i, spec)| {
                    let seed = world.seed.wrapping_mul(31).wrapping_add(i as u64);
                    if world.arm.is_bound() {
                        Pod::boundless(spec.clone(), seed)
                    } else {
                        Pod::new(spec.clone(), seed)
                    }
                })
                .collect(),
            joined: pods.clone().map(|(i, _)| !later(i)).collect(),
            open: pods.map(|_| (0, 0)).collect(),
            computed: HashSet::new(),
        }
    }

    /// All pods, also those that have not joined.
    pub fn pods(&self) -> &[Pod] {
        &self.pods
    }

    /// The numbers of those that take requests.
    pub fn joined(&self) -> impl Iterator<Item = usize> + '_ {
        let joined = self.joined.iter().enumerate();
        joined.filter(|(_, is)| **is).map(|(i, _)| i)
    }

    /// Requests at a pod that wait for their first token.
    pub fn before_first_token(&self, pod: usize) -> u32 {
        self.open
            .get(pod)
            .map_or(0, |(all, had)| all.saturating_sub(*had))
    }

    /// Tokens of a prompt that a pod's cache would give now.
    pub fn cached(&self, pod: usize, prompt: &Prompt) -> u32 {
        self.pods.get(pod).map_or(0, |p| p.cached(prompt))
    }

    /// The exact TTFT of a request that arrives at a pod now.
    pub fn ttft(&self, pod: usize, now: f64, request: &Request) -> f64 {
        self.pods.get(pod).map_or(f64::INFINITY, |p| {
            p.ttft(now, &request.prompt, request.sent.output)
        })
    }

    pub(crate) fn next_event(&self) -> Option<f64> {
        let events = self.pods.iter().filter_map(Pod::next_event);
        events.min_by(f64::total_cmp)
    }

    /// Lives until `to`; what each pod said, in order.
    pub(crate) fn advance(&mut self, to: f64, out: &mut Vec<(usize, Output)>) {
        let mut said = Vec::new();
        for (i, pod) in self.pods.iter_mut().enumerate() {
            pod.advance(to, &mut said);
            out.extend(said.drain(..).map(|o| (i, o)));
        }
    }

    pub(crate) fn submit(&mut self, pod: usize, at: f64, request: &Request) {
        if let Some(p) = self.pods.get_mut(pod) {
            p.submit(
                at,
                Arrival {
                    id: request.sent.id,
                    prompt: request.prompt.clone(),
                    output: request.sent.output,
                },
            );
        }
        if let Some((all, _)) = self.open.get_mut(pod) {
            *all += 1;
        }
    }

    pub(crate) fn first_token(&mut self, pod: usize) {
        if let Some((_, had)) = self.open.get_mut(pod) {
            *had += 1;
        }
    }

    pub(crate) fn cancel(&mut self, pod: usize, id: u64, had_first: bool) {
        if let Some(p) = self.pods.get_mut(pod) {
            p.cancel(id);
        }
        self.ended(pod, had_first);
    }

    pub(crate) fn ended(&mut self, pod: usize, had_first: bool) {
        if let Some((all, had)) = self.open.get_mut(pod) {
            *all = all.saturating_sub(1);
            *had = had.saturating_sub(u32::from(had_first));
        }
    }

    /// Remembers what was computed; where that is the rule, what one computed all know.
    pub(crate) fn note(&mut self, batch: &[KvChange], all_know: bool) {
        for change in batch {
            let KvChange::Stored(stored) = change else {
                continue;
            };
            self.computed.extend(&stored.hashes);
            if all_know {
                for pod in &mut self.pods {
                    pod.learn(&stored.hashes);
                }
            }
        }
    }

    /// Tokens of a prompt that were ever computed, in whole blocks.
    pub fn known(&self, prompt: &Prompt) -> u32 {
        let block = self.pods.first().map_or(16, |p| p.spec().block_size).max(1);
        let most = prompt.tokens().saturating_sub(1) / block;
        let keys = prompt.keys(block);
        let known = keys.iter().take(most as usize);
        known.take_while(|k| self.computed.contains(k)).count() as u32 * block
    }

    pub(crate) fn change(&mut self, change: &Change) {
        match change {
            Change::Times(i, spec) => {
                if let Some(p) = self.pods.get_mut(*i) {
                    p.set_times(spec);
                }
            }
            Change::Join(i) => {
                if let Some(joined) = self.joined.get_mut(*i) {
                    *joined = true;
                }
            }
        }
    }
}
