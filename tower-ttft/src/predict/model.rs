use super::{
    Prediction, Terms,
    accuracy::{Accuracy, Regime, RegimeError},
    filter::{Costs, Filter, MAX_LOG, NEUTRAL, Parts, Prior, Work},
    seconds,
};
use std::sync::Arc;
use tokio::time::Instant;

/// What an engine says of its own prefill counts from so many tokens on.
const CLEAN: u64 = 512;
/// Slowdown per running decode.
const DECODES: Shared = Shared::new(0.01, 1e-4, 0.2);
/// How far the log gains of peers with one label, of what an engine says of itself, and of any endpoints of one pool are
/// usually apart: standard deviations.
const PEERS: f64 = 0.3;
const ENGINE: f64 = 0.5;
const POOL: f64 = 0.7;

/// Predicts and learns, for all endpoints of one model.
#[derive(Clone, Debug)]
pub struct TtftModel {
    endpoints: Vec<Option<EndpointModel>>,
    known: Known,
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
    /// Our work ahead, as [`TtftModel::ahead`] gives it.
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
    filter: Filter,
    /// The log gain that the engine's own prefill time suggests.
    engine: Option<f64>,
}

/// What endpoints have learned, summed up, so that a prediction need not look at all of them.
#[derive(Clone, Debug, Default)]
struct Known {
    gain: Sum,
    base: Sum,
    frontend: Sum,
    attention: Sum,
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

// === impl TtftModel ===

impl Default for TtftModel {
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            known: Known::default(),
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
            filter: Filter::default(),
            engine: None,
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

    /// What of `work` is left at an endpoint, in tokens: of each piece its uncached tokens, the cached ones that they stand
    /// behind, and the share that is still to be computed.
    pub fn ahead(&self, slot: Slot, work: &[(u32, u32, f64)], now: Instant) -> f64 {
        let costs = self.costs(slot, now);
        work.iter()
            .map(|(uncached, cached, left)| {
                let (u, c) = (f64::from(*uncached), f64::from(*cached));
                costs.shape(u, u * (c + u / 2.0)) * left
            })
            .sum()
    }

    /// Answers that an endpoint has learned from.
    pub fn samples(&self, slot: Slot) -> u64 {
        self.get(slot).map_or(0, |e| e.filter.samples())
    }

    /// Seconds per token that an endpoint is thought to take, idle and without context.
    pub fn seconds_per_token(&self, slot: Slot, now: Instant) -> f64 {
        NEUTRAL * self.costs(slot, now).gain.exp()
    }

    /// Changes of an endpoint's speed that were detected.
    pub fn changes(&self, slot: Slot) -> u64 {
        self.get(slot).map_or(0, |e| e.filter.changes())
    }

    /// How predictions went, per regime.
    pub fn accuracy(&self) -> Vec<RegimeError> {
        self.accuracy.report()
    }

    /// Takes what an engine says of its own prefill: so many tokens computed in so many seconds. Requests that share steps
    /// overlap, so this is an upper bound, good for a start.
    pub fn engine_prefill(&mut self, slot: Slot, seconds: f64, tokens: u64) {
        let log = (seconds / tokens as f64 / NEUTRAL).ln();
        if tokens >= CLEAN
            && log.is_finite()
            && let Some(e) = self.get_mut(slot)
        {
            let log = log.clamp(-MAX_LOG, MAX_LOG);
            e.engine = Some(e.engine.map_or(log, |old| old + 0.3 * (log - old)));
        }
    }

    /// The prediction for an endpoint.
    pub fn predict(&self, slot: Slot, inputs: &Inputs, now: Instant) -> Prediction {
        let work = self.work(inputs);
        let parts = self.costs(slot, now).parts(&work);
        let (terms, ttft) = (terms(&parts, &work), parts.ttft());
        let regime = Self::regime(inputs, &terms, ttft);
        let (p50, p90) = self.accuracy.spread(regime);
        Prediction {
            ttft: seconds(ttft),
            own: seconds(parts.prefill()),
            terms,
            error: self.accuracy.error(regime),
            trusted: ttft.is_finite() && self.accuracy.trusted(regime),
            informed: self.known.base.n > 0,
            p50: seconds(ttft * p50),
            p90: seconds(ttft * p90),
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
        // Of a burst before the first answer all predictions are first guesses. Were these to count, it would be long
        // until the predictor was trusted again.
        if predicted.informed {
            let regime = Self::regime_of(inputs, predicted);
            self.accuracy
                .record(regime, predicted.ttft.as_secs_f64(), actual);
        }

        let work = self.work(inputs);
        let parts = self.costs(slot, now).parts(&work);
        let prior = self.prior(slot);
        // No answer takes a month; larger numbers would only lose digits.
        let actual = actual.min(2.6e6);
        if let Some(e) = self.get_mut(slot) {
            e.filter.learn(&work, actual, &prior, now);
        }
        if parts.prefill() > 0.5 * parts.ttft() && self.samples(slot) > 3 {
            self.learn_decodes(inputs, (actual / parts.ttft()).ln());
        }
        self.sum_up();
    }

    /// Residuals that grow with the share of running decodes say that these are priced too low.
    fn learn_decodes(&mut self, inputs: &Inputs, residual: f64) {
        let d = self.decodes.value * inputs.running;
        self.decodes.learn(residual.clamp(-1.0, 1.0), d / (1.0 + d));
    }

    fn work(&self, inputs: &Inputs) -> Work {
        let u = f64::from(inputs.tokens.saturating_sub(inputs.cached));
        Work {
            bytes: f64::from(inputs.bytes),
            uncached: u,
            context: u * (f64::from(inputs.cached) + u / 2.0),
            ahead: inputs.ahead,
            others: inputs.others,
            slowdown: 1.0 + self.decodes.value * inputs.running.max(0.0),
            slot: inputs.slot,
        }
    }

    fn costs(&self, slot: Slot, now: Instant) -> Costs {
        match self.get(slot) {
            Some(e) => e.filter.costs(&self.prior(slot), now),
            None => Costs::default(),
        }
    }

    /// What an endpoint borrows: the gain from peers with the same label, from what the engine says of itself, from all
    /// others; the rest from all others.
    fn prior(&self, slot: Slot) -> Prior {
        let mut prior = Prior::default();
        let Some(e) = self.get(slot) else {
            return prior;
        };
        let own = e.filter.own();
        let gain = own.map(|o| o.gain);
        let peers = e.gpu.as_ref().and_then(|gpu| {
            let (_, sum) = self.known.by_gpu.iter().find(|(g, _)| g == gpu)?;
            sum.without(gain)
        });
        let lent = peers
            .map(|log| (log, PEERS))
            .or_else(|| Some((e.engine?, ENGINE)))
            .or_else(|| Some((self.known.gain.without(gain)?, POOL)));
        if let Some((log, spread)) = lent {
            (prior.costs.gain, prior.gain_variance) = (log, spread * spread);
        }
        if let Some(base) = self.known.base.without(own.map(|o| o.base)) {
            prior.borrowed = true;
            prior.costs.base = base;
        }
        if let Some(frontend) = self.known.frontend.without(own.map(|o| o.frontend)) {
            prior.costs.frontend = frontend;
        }
        if let Some(attention) = self.known.attention.without(own.map(|o| o.attention)) {
            prior.costs.attention = attention;
        }
        prior
    }

    /// Sums up anew, after something was learned or the set changed. Sums that are only added to would drift.
    fn sum_up(&mut self) {
        let mut known = Known::default();
        for e in self.endpoints.iter().flatten() {
            let own = e.filter.own();
            let gain = own.map(|o| o.gain);
            known.base.add(own.map(|o| o.base));
            known.frontend.add(own.map(|o| o.frontend));
            known.attention.add(own.map(|o| o.attention));
            known.gain.add(gain);
            let Some(gpu) = &e.gpu else {
                continue;
            };
            match known.by_gpu.iter_mut().find(|(g, _)| g == gpu) {
                Some((_, sum)) => sum.add(gain),
                None => {
                    let mut sum = Sum::default();
                    sum.add(gain);
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

fn terms(parts: &Parts, work: &Work) -> Terms {
    Terms {
        frontend: parts.frontend,
        base: parts.base,
        backlog: parts.backlog(),
        prefill: parts.prefill(),
        slot: parts.slot,
        slowdown: work.slowdown,
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
