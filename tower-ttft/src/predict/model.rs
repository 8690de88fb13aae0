use super::{
    Prediction, Terms,
    accuracy::{Accuracy, Regime, RegimeError},
    fixed::{Costs, FRONTEND_BYTES, Fixed},
    gain::{Gain, MAX_LOG},
    seconds,
};
use std::sync::Arc;
use tokio::time::Instant;

/// Seconds per token that no machine is far from on a log scale: a small CPU model takes four times as long, a large GPU
/// a fifth.
const NEUTRAL: f64 = 1e-4;
/// Requests that compute at least this many tokens train the gain.
const CLEAN: u32 = 512;
/// Attention relative to the linear work, per token of context.
const ATTENTION: Shared = Shared::new(3e-5, 1e-6, 3e-3);
/// Slowdown per running decode.
const DECODES: Shared = Shared::new(0.01, 1e-4, 0.2);

/// Predicts and learns, for all endpoints of one model.
#[derive(Clone, Debug)]
pub struct TtftModel {
    endpoints: Vec<Option<EndpointModel>>,
    known: Known,
    attention: Shared,
    decodes: Shared,
    accuracy: Accuracy,
}

/// An endpoint's place in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(usize);

/// What a prediction rests on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Inputs {
    /// Prompt tokens.
    pub tokens: u32,
    /// Of these, held.
    pub cached: u32,
    /// Bytes of prompt text.
    pub bytes: u32,
    /// Our work ahead, in [`TtftModel::shape`]'s unit.
    pub ahead: f64,
    /// Others' work ahead, as far as reported, in the same unit.
    pub others: f64,
    /// Running decodes.
    pub running: f64,
    /// Wait for a KV or sequence slot, seconds.
    pub slot: f64,
}

#[derive(Clone, Debug)]
struct EndpointModel {
    gpu: Option<Arc<str>>,
    gain: Gain,
    /// The log gain that the engine's own prefill time suggests.
    engine: Option<f64>,
    fixed: Fixed,
}

/// What endpoints have learned, summed up, so that a prediction need not look at all of them.
#[derive(Clone, Debug, Default)]
struct Known {
    gain: Sum,
    base: Sum,
    frontend: Sum,
    by_gpu: Vec<(Arc<str>, Sum)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    sum: f64,
    n: u32,
}

/// A positive number that all endpoints share: learned slowly, by whether residuals grow with how much it matters.
#[derive(Clone, Copy, Debug)]
struct Shared {
    value: f64,
    min: f64,
    max: f64,
    /// Mean of how much it mattered in samples so far; differences from it are what can be told apart from the gain.
    mean: f64,
    samples: f64,
}

/// The parts of a prediction, before they are durations.
struct Parts {
    terms: Terms,
    ttft: f64,
    own: f64,
    log_gain: f64,
    borrowed: bool,
}

// === impl TtftModel ===

impl Default for TtftModel {
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            known: Known::default(),
            attention: ATTENTION,
            decodes: DECODES,
            accuracy: Accuracy::default(),
        }
    }
}

impl TtftModel {
    /// A place for an endpoint. Those with the same GPU label lend each other their gain.
    pub fn add(&mut self, gpu: Option<Arc<str>>) -> Slot {
        let endpoint = EndpointModel {
            gpu,
            gain: Gain::default(),
            engine: None,
            fixed: Fixed::default(),
        };
        match self.endpoints.iter_mut().position(|e| e.is_none()) {
            Some(free) => {
                if let Some(place) = self.endpoints.get_mut(free) {
                    *place = Some(endpoint);
                }
                Slot(free)
            }
            None => {
                self.endpoints.push(Some(endpoint));
                Slot(self.endpoints.len() - 1)
            }
        }
    }

    /// Forgets an endpoint.
    pub fn remove(&mut self, slot: Slot) {
        if let Some(place) = self.endpoints.get_mut(slot.0) {
            *place = None;
        }
        self.sum_up();
    }

    /// Corrects an endpoint's GPU label.
    pub fn set_gpu(&mut self, slot: Slot, gpu: Option<Arc<str>>) {
        if let Some(e) = self.get_mut(slot) {
            e.gpu = gpu;
        }
        self.sum_up();
    }

    /// The work of computing `uncached` tokens behind `cached` ones, in tokens.
    pub fn shape(&self, uncached: u32, cached: u32) -> f64 {
        let (u, c) = (f64::from(uncached), f64::from(cached));
        u + self.attention.value * u * (c + u / 2.0)
    }

    /// Samples that an endpoint has trained its gain with.
    pub fn samples(&self, slot: Slot) -> u64 {
        self.get(slot).map_or(0, |e| e.gain.samples())
    }

    /// Seconds per token that an endpoint is thought to take, idle and without context.
    pub fn seconds_per_token(&self, slot: Slot, now: Instant) -> f64 {
        NEUTRAL * self.log_gain(slot, now).0.exp()
    }

    /// Changes of an endpoint's speed that were detected.
    pub fn changes(&self, slot: Slot) -> u64 {
        self.get(slot).map_or(0, |e| e.gain.changes())
    }

    /// How predictions went, per regime.
    pub fn accuracy(&self) -> Vec<RegimeError> {
        self.accuracy.report()
    }

    /// Takes what an engine says of its own prefill: so many tokens computed in so many seconds. Requests that share steps
    /// overlap, so this is an upper bound, good for a start.
    pub fn engine_prefill(&mut self, slot: Slot, seconds: f64, tokens: u64) {
        let log = (seconds / tokens as f64 / NEUTRAL).ln();
        if tokens >= u64::from(CLEAN)
            && log.is_finite()
            && let Some(e) = self.get_mut(slot)
        {
            let log = log.clamp(-MAX_LOG, MAX_LOG);
            e.engine = Some(e.engine.map_or(log, |old| old + 0.3 * (log - old)));
        }
    }

    /// The prediction for an endpoint.
    pub fn predict(&self, slot: Slot, inputs: &Inputs, now: Instant) -> Prediction {
        let parts = self.parts(slot, inputs, now);
        let regime = Self::regime(inputs, &parts.terms, parts.ttft);
        let (p50, p90) = self.accuracy.spread(regime);
        Prediction {
            ttft: seconds(parts.ttft),
            own: seconds(parts.own),
            terms: parts.terms,
            error: self.accuracy.error(regime),
            trusted: parts.ttft.is_finite() && self.accuracy.trusted(regime),
            p50: seconds(parts.ttft * p50),
            p90: seconds(parts.ttft * p90),
        }
    }

    /// The regime of a prediction.
    pub fn regime_of(inputs: &Inputs, prediction: &Prediction) -> Regime {
        Self::regime(inputs, &prediction.terms, prediction.ttft.as_secs_f64())
    }

    /// Takes what came of a prediction: the TTFT of a streamed answer, from when the request was on the wire.
    pub fn learn(
        &mut self,
        slot: Slot,
        inputs: &Inputs,
        predicted: &Prediction,
        actual: f64,
        now: Instant,
    ) {
        if !(actual.is_finite() && actual > 0.0 && inputs.sane()) || self.get(slot).is_none() {
            return;
        }
        let regime = Self::regime_of(inputs, predicted);
        self.accuracy
            .record(regime, predicted.ttft.as_secs_f64(), actual);

        let parts = self.parts(slot, inputs, now);
        let uncached = inputs.tokens.saturating_sub(inputs.cached);
        let own = self.shape(uncached, inputs.cached);
        let work = own + inputs.ahead + inputs.others;
        let fixed = parts.terms.frontend + parts.terms.base + parts.terms.slot;
        if uncached >= CLEAN || (parts.terms.backlog > 0.5 * parts.ttft && inputs.others == 0.0) {
            let per_token = NEUTRAL * parts.log_gain.exp() * parts.terms.slowdown;
            let spent = (actual - fixed).max(0.1 * actual);
            let residual = (spent / (work * per_token)).ln();
            // Own prefill is known exactly, what is ahead less so, and what base and frontend take is not prefill.
            let weight =
                (own / work).clamp(0.1, 1.0) * (work * per_token / parts.ttft).clamp(0.1, 1.0);
            if let Some(e) = self.get_mut(slot) {
                e.gain
                    .learn(residual, weight, parts.log_gain, parts.borrowed, now);
            }
            if own > 0.5 * work && !parts.borrowed {
                self.learn_shared(inputs, residual);
            }
        } else if parts.terms.backlog < 0.25 * parts.ttft {
            let computed = parts.terms.backlog + parts.terms.prefill + parts.terms.slot;
            let others = self.other_costs(slot);
            if let Some(e) = self.get_mut(slot) {
                let bytes = f64::from(inputs.bytes);
                e.fixed.learn(bytes, actual - computed, actual, others);
            }
        }
        self.sum_up();
    }

    /// Residuals that grow with the share of attention, or of running decodes, say that it is priced too low.
    fn learn_shared(&mut self, inputs: &Inputs, residual: f64) {
        let uncached = f64::from(inputs.tokens.saturating_sub(inputs.cached));
        let context = f64::from(inputs.cached) + uncached / 2.0;
        let residual = residual.clamp(-1.0, 1.0);
        let a = self.attention.value * context;
        self.attention.learn(residual, a / (1.0 + a));
        let d = self.decodes.value * inputs.running;
        self.decodes.learn(residual, d / (1.0 + d));
    }

    fn parts(&self, slot: Slot, inputs: &Inputs, now: Instant) -> Parts {
        let (log_gain, borrowed) = self.log_gain(slot, now);
        let fixed = self.costs(slot);
        let uncached = inputs.tokens.saturating_sub(inputs.cached);
        let per_token = NEUTRAL * log_gain.exp();
        let slowdown = 1.0 + self.decodes.value * inputs.running.max(0.0);
        let terms = Terms {
            frontend: fixed.frontend * f64::from(inputs.bytes) / FRONTEND_BYTES,
            base: fixed.base,
            backlog: (inputs.ahead + inputs.others) * per_token * slowdown,
            prefill: self.shape(uncached, inputs.cached) * per_token * slowdown,
            slot: inputs.slot,
            slowdown,
        };
        Parts {
            ttft: terms.frontend + terms.base + terms.backlog + terms.prefill + terms.slot,
            own: terms.prefill,
            terms,
            log_gain,
            borrowed,
        }
    }

    fn costs(&self, slot: Slot) -> Costs {
        let own = self.get(slot).map(|e| e.fixed).unwrap_or_default();
        own.costs(self.other_costs(slot))
    }

    /// What the others have learned, on average.
    fn other_costs(&self, slot: Slot) -> Option<Costs> {
        let own = self.get(slot).and_then(|e| e.fixed.own());
        Some(Costs {
            base: self.known.base.without(own.map(|o| o.base))?,
            frontend: self.known.frontend.without(own.map(|o| o.frontend))?,
        })
    }

    /// The log gain in use, and whether it is wholly borrowed: from peers with the same label, from what the engine says
    /// of itself, from all others.
    fn log_gain(&self, slot: Slot, now: Instant) -> (f64, bool) {
        let Some(e) = self.get(slot) else {
            return (0.0, false);
        };
        let own = e.gain.own();
        let peers = e.gpu.as_ref().and_then(|gpu| {
            let (_, sum) = self.known.by_gpu.iter().find(|(g, _)| g == gpu)?;
            sum.without(own)
        });
        let others = peers.or(e.engine).or_else(|| self.known.gain.without(own));
        (e.gain.log(others, now), own.is_none() && others.is_some())
    }

    /// Sums up anew, after something was learned or the set changed. Sums that are only added to would drift.
    fn sum_up(&mut self) {
        let mut known = Known::default();
        for e in self.endpoints.iter().flatten() {
            let fixed = e.fixed.own();
            known.base.add(fixed.map(|f| f.base));
            known.frontend.add(fixed.map(|f| f.frontend));
            known.gain.add(e.gain.own());
            let Some(gpu) = &e.gpu else {
                continue;
            };
            match known.by_gpu.iter_mut().find(|(g, _)| g == gpu) {
                Some((_, sum)) => sum.add(e.gain.own()),
                None => {
                    let mut sum = Sum::default();
                    sum.add(e.gain.own());
                    known.by_gpu.push((gpu.clone(), sum));
                }
            }
        }
        self.known = known;
    }

    fn regime(inputs: &Inputs, terms: &Terms, ttft: f64) -> Regime {
        let share = if ttft > 0.0 {
            (terms.backlog + terms.slot) / ttft
        } else {
            0.0
        };
        Regime::of(inputs.tokens, inputs.cached, share)
    }

    fn get(&self, slot: Slot) -> Option<&EndpointModel> {
        self.endpoints.get(slot.0)?.as_ref()
    }

    fn get_mut(&mut self, slot: Slot) -> Option<&mut EndpointModel> {
        self.endpoints.get_mut(slot.0)?.as_mut()
    }
}

// === impl Sum ===

impl Sum {
    fn add(&mut self, value: Option<f64>) {
        if let Some(value) = value {
            self.sum += value;
            self.n += 1;
        }
    }

    /// The mean of all but one's own.
    fn without(&self, own: Option<f64>) -> Option<f64> {
        let n = self.n - u32::from(own.is_some() && self.n > 0);
        (n > 0).then(|| (self.sum - own.unwrap_or(0.0)) / f64::from(n))
    }
}

// === impl Inputs ===

impl Inputs {
    /// Whether these can come from a real endpoint; nothing is learned from others.
    fn sane(&self) -> bool {
        [self.ahead, self.others, self.running, self.slot]
            .iter()
            .all(|x| (0.0..1e15).contains(x))
    }
}

// === impl Shared ===

impl Shared {
    const fn new(value: f64, min: f64, max: f64) -> Self {
        Self {
            value,
            min,
            max,
            mean: 0.0,
            samples: 0.0,
        }
    }

    /// `matter` is d log(prefill) / d log(value), 0 to 1.
    fn learn(&mut self, residual: f64, matter: f64) {
        self.samples += 1.0;
        let centred = matter - self.mean;
        self.mean += centred * (1.0 / self.samples).max(0.02);
        // The first samples teach the gains.
        if self.samples > 8.0 {
            let log = (0.5 * residual * centred).clamp(-0.1, 0.1);
            self.value = (self.value * log.exp()).clamp(self.min, self.max);
        }
    }
}
