//! What one endpoint costs, told apart by an extended Kalman filter over four numbers:
//!
//! ```text
//! ttft = base + frontend·bytes + (ahead + u + κ·u·(c + u/2))·c₀·gain·slowdown + wait for a slot
//! ```
//!
//! `base` and `frontend` are seconds, `gain` and `κ` (attention) positive, so their logarithms are what is filtered. Each
//! answer moves each number by as much as it can have been at fault: a long miss the gain, a long hit the frontend and
//! attention, a short one the base. What an endpoint borrows from its peers is where the filter starts, and how far
//! peers are usually apart says how much the first answers count. (Kalman filter with fading memory: Simon, *Optimal
//! State Estimation*, 2006, §7.4 and §13.3.)

use std::time::Duration;
use tokio::time::Instant;

/// Seconds per token that no machine is far from on a log scale: a small CPU model takes four times as long, a large GPU
/// a fifth.
pub(super) const NEUTRAL: f64 = 1e-4;
/// The frontend's rate is learned in seconds for this many bytes.
pub(super) const FRONTEND_BYTES: f64 = 65_536.0;
/// Gains stay within this factor of neutral, both ways: 2 µs to 5 ms per token.
pub(super) const MAX_LOG: f64 = 3.912; // ln 50
/// Attention relative to linear work per token of context: first guess and bounds. Large models have the least.
const ATTENTION: f64 = 1e-5;
const MIN_ATTENTION: f64 = 1e-7;
const MAX_ATTENTION: f64 = 3e-3;
/// Below this no engine answers; an answer from its own cache would look like it.
const BASE: f64 = 0.01;
const MAX_BASE: f64 = 10.0;
/// 1 µs a byte: the geometric middle of a slow tokenizer and none would be lower, but too low is the costlier error.
const FRONTEND: f64 = 1e-6 * FRONTEND_BYTES;
/// 20 µs a byte: slower tokenizers were never seen.
const MAX_FRONTEND: f64 = 2e-5 * FRONTEND_BYTES;
/// Standard deviations at first, where nothing is borrowed: base, frontend, log gain, log κ. Also the most that faded
/// knowledge is worth.
const SPREAD: [f64; N] = [0.03, 0.05, 2.0, 1.2];
/// The log gain fades to this and no further: an endpoint does not become another machine.
const FADED_GAIN: f64 = 0.5;
/// Knowledge that is kept from one sample to the next. Speed changes with what else the machine does; what a byte or a
/// token of context costs beside a token hardly does.
const KEPT: [f64; N] = [0.96, 0.99, 0.96, 0.998];
/// Relative error of an answer before there were any to tell.
const NOISE: f64 = 0.2;
/// Seconds of error that do not shrink with the answer: timers, network.
const JITTER: f64 = 0.002;
/// Relative error of our own work ahead (when it began is not known), and of what others are reported to have there.
const AHEAD_NOISE: f64 = 0.35;
const OTHERS_NOISE: f64 = 0.7;
/// How much of the prior is left after one sample: of the gain, and of base and frontend, in which peers differ less.
const FIRST: (f64, f64) = (0.6, 0.75);
/// An endpoint's first answers are often slow for reasons of their own: where peers say what is usual, these count as no
/// slower than by a third.
const SLOW_START: f64 = 0.3;
/// Samples after which an answer far off is an outlier until more say so.
const SETTLED: u64 = 3;
/// Samples for which the gain is uncertain after a change was detected.
const HURRY: u32 = 8;
/// Residuals count as no more than this.
const CLIP: f64 = 1.5;
/// Variance that an idle endpoint's log gain gains in [`IDLE`].
const IDLE_VARIANCE: f64 = 0.3;
const IDLE: Duration = Duration::from_secs(600);

const N: usize = 4;
// Places of log gain and log κ.
const G: usize = 2;
const K: usize = 3;

/// The four numbers: seconds, seconds for [`FRONTEND_BYTES`], log gain, log κ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Costs {
    pub(super) base: f64,
    pub(super) frontend: f64,
    pub(super) gain: f64,
    pub(super) attention: f64,
}

/// Where an endpoint without samples stands: what it borrows, and the variance of the log gain about that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prior {
    pub(super) costs: Costs,
    pub(super) gain_variance: f64,
    /// Base, frontend and κ come from others.
    pub(super) borrowed: bool,
}

/// One request's work, in tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    pub(super) bytes: f64,
    /// Linear tokens: u.
    pub(super) uncached: f64,
    /// Tokens times tokens of context: u·(c + u/2).
    pub(super) context: f64,
    /// Ours, ahead of it.
    pub(super) ahead: f64,
    pub(super) others: f64,
    pub(super) slowdown: f64,
    /// Seconds.
    pub(super) slot: f64,
}

/// The parts of a prediction, seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Parts {
    pub(super) base: f64,
    pub(super) frontend: f64,
    pub(super) ahead: f64,
    pub(super) others: f64,
    pub(super) linear: f64,
    pub(super) attention: f64,
    pub(super) slot: f64,
}

#[derive(Clone, Debug)]
pub(super) struct Filter {
    state: [f64; N],
    /// Covariances.
    cov: [[f64; N]; N],
    samples: u64,
    last: Option<Instant>,
    /// Mean |log residual|: what is normal here.
    noise: f64,
    /// CUSUM of residuals up and down.
    up: f64,
    down: f64,
    hurry: u32,
    changes: u64,
}

// === impl Costs ===

impl Default for Costs {
    fn default() -> Self {
        Self {
            base: BASE,
            frontend: FRONTEND,
            gain: 0.0,
            attention: ATTENTION.ln(),
        }
    }
}

impl Costs {
    fn of([base, frontend, gain, attention]: [f64; N]) -> Self {
        Self {
            base,
            frontend,
            gain,
            attention,
        }
    }

    /// Work in tokens.
    pub(super) fn shape(&self, uncached: f64, context: f64) -> f64 {
        uncached + self.attention.exp() * context
    }

    pub(super) fn parts(&self, work: &Work) -> Parts {
        let token = NEUTRAL * self.gain.exp() * work.slowdown;
        Parts {
            base: self.base,
            frontend: self.frontend * work.bytes / FRONTEND_BYTES,
            ahead: work.ahead * token,
            others: work.others * token,
            linear: work.uncached * token,
            attention: self.attention.exp() * work.context * token,
            slot: work.slot,
        }
    }
}

// === impl Prior ===

impl Default for Prior {
    fn default() -> Self {
        Self {
            costs: Costs::default(),
            gain_variance: SPREAD[G] * SPREAD[G],
            borrowed: false,
        }
    }
}

// === impl Parts ===

impl Parts {
    pub(super) fn prefill(&self) -> f64 {
        self.linear + self.attention
    }

    pub(super) fn backlog(&self) -> f64 {
        self.ahead + self.others
    }

    pub(super) fn ttft(&self) -> f64 {
        self.base + self.frontend + self.backlog() + self.prefill() + self.slot
    }

    /// How much the prediction grows with each number.
    fn slopes(&self, work: &Work) -> [f64; N] {
        [
            1.0,
            work.bytes / FRONTEND_BYTES,
            self.backlog() + self.prefill(),
            self.attention,
        ]
    }

    /// The variance of a measurement, if `noise` is the relative error that is usual.
    fn variance(&self, noise: f64) -> f64 {
        let own = self.ttft() - self.backlog();
        [
            noise * own,
            AHEAD_NOISE * self.ahead,
            OTHERS_NOISE * self.others,
            JITTER,
        ]
        .map(|sd| sd * sd)
        .iter()
        .sum()
    }
}

// === impl Filter ===

impl Default for Filter {
    fn default() -> Self {
        Self {
            state: [0.0; N],
            cov: [[0.0; N]; N],
            samples: 0,
            last: None,
            noise: NOISE,
            up: 0.0,
            down: 0.0,
            hurry: 0,
            changes: 0,
        }
    }
}

impl Filter {
    pub(super) fn samples(&self) -> u64 {
        self.samples
    }

    /// Changes that were detected.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// What was learned, and nothing borrowed.
    pub(super) fn own(&self) -> Option<Costs> {
        (self.samples > 0).then(|| Costs::of(self.state))
    }

    /// The numbers to use: what was learned, drawn to the prior while there are few samples, the gain again while idle.
    /// Without that, one slow first answer would keep requests away, and so the samples that would correct it.
    pub(super) fn costs(&self, prior: &Prior, now: Instant) -> Costs {
        let Some(mut own) = self.own() else {
            return prior.costs;
        };
        let learned = |first: f64| 1.0 - first.powf(self.samples as f64);
        let kept = prior.gain_variance / (prior.gain_variance + self.idle(now));
        let drawn = |own: f64, prior: f64, weight: f64| prior + weight * (own - prior);
        own.gain = drawn(own.gain, prior.costs.gain, learned(FIRST.0) * kept);
        if prior.borrowed {
            own.base = drawn(own.base, prior.costs.base, learned(FIRST.1));
            own.frontend = drawn(own.frontend, prior.costs.frontend, learned(FIRST.1));
        }
        own
    }

    /// Takes what an answer took, seconds.
    pub(super) fn learn(&mut self, work: &Work, actual: f64, prior: &Prior, now: Instant) {
        if self.samples == 0 {
            self.start(prior);
        }
        self.cov[G][G] += self.idle(now);
        let settled = self.samples >= SETTLED;
        let predicted = Costs::of(self.state).parts(work);
        let residual = (actual / predicted.ttft()).ln();
        if !residual.is_finite() {
            return;
        }
        if settled && predicted.prefill() + predicted.backlog() > 0.5 * predicted.ttft() {
            self.detect(residual);
        }
        let actual = if settled && self.hurry == 0 {
            let limit = (2.5 * self.noise).clamp(0.2, CLIP);
            predicted.ttft() * residual.clamp(-limit, limit).exp()
        } else if !settled && prior.borrowed {
            predicted.ttft() * residual.min(SLOW_START).exp()
        } else {
            actual
        };
        // Far from the truth the model is no plane: the first answers are gone through more than once.
        self.update(work, actual, if settled { 1 } else { 4 });
        self.hurry = self.hurry.saturating_sub(1);
        self.samples += 1;
        let step = (1.0 / (self.samples as f64 + 2.0)).max(0.05);
        self.noise += step * (residual.abs().min(CLIP) - self.noise);
        self.last = Some(now);
    }

    fn start(&mut self, prior: &Prior) {
        let Costs {
            base,
            frontend,
            gain,
            attention,
        } = prior.costs;
        self.state = [base, frontend, gain, attention];
        self.cov = [[0.0; N]; N];
        for (i, row) in self.cov.iter_mut().enumerate() {
            if let (Some(v), Some(sd)) = (row.get_mut(i), SPREAD.get(i)) {
                *v = sd * sd;
            }
        }
        self.cov[G][G] = prior.gain_variance;
        if prior.borrowed {
            // Engines of one pool run one model: what attention costs differs little.
            self.cov[K][K] = 0.09;
        }
    }

    /// The variance that being idle has added to the log gain.
    fn idle(&self, now: Instant) -> f64 {
        let idle = self
            .last
            .map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        (IDLE_VARIANCE * idle.as_secs_f64() / IDLE.as_secs_f64()).min(4.0)
    }

    /// An iterated update.
    fn update(&mut self, work: &Work, actual: f64, rounds: u32) {
        let start = self.state;
        let noise = self.noise.clamp(0.05, 0.5);
        for _ in 0..rounds {
            let (parts, slopes, spread, total) = self.plane(work, noise);
            let mut moved = start;
            for (m, s) in moved.iter_mut().zip(&self.state) {
                *m -= s;
            }
            let off = actual - parts.ttft() - dot(&moved, &slopes);
            if !(total.is_finite() && total > 0.0 && off.is_finite()) {
                self.state = start;
                return;
            }
            let mut next = start;
            for (x, s) in next.iter_mut().zip(&spread) {
                *x += s / total * off;
            }
            self.state = bounded(next);
        }
        let (_, _, spread, total) = self.plane(work, noise);
        for (row, a) in self.cov.iter_mut().zip(&spread) {
            for (v, b) in row.iter_mut().zip(&spread) {
                *v -= a * b / total;
            }
        }
        self.fade();
    }

    /// The model as a plane about the present state: the prediction, how it grows with each number, how each number goes
    /// with it, and the variance of what will be measured.
    fn plane(&self, work: &Work, noise: f64) -> (Parts, [f64; N], [f64; N], f64) {
        let parts = Costs::of(self.state).parts(work);
        let slopes = parts.slopes(work);
        let spread = self.cov.map(|row| dot(&row, &slopes));
        let total = dot(&spread, &slopes) + parts.variance(noise);
        (parts, slopes, spread, total)
    }

    /// Old knowledge counts less, down to a limit.
    fn fade(&mut self) {
        let mut caps = SPREAD;
        caps[G] = if self.samples < SETTLED {
            SPREAD[G]
        } else {
            FADED_GAIN
        };
        let mut scale = [1.0; N];
        let numbers = caps.iter().zip(&KEPT).zip(scale.iter_mut());
        for (i, ((cap, kept), scale)) in numbers.enumerate() {
            if let Some(v) = self.cov.get_mut(i).and_then(|row| row.get_mut(i)) {
                *v = v.max(1e-12);
                *scale = (1.0 / kept).min(cap * cap / *v).sqrt();
            }
        }
        for (row, a) in self.cov.iter_mut().zip(&scale) {
            for (v, b) in row.iter_mut().zip(&scale) {
                *v *= a * b;
            }
        }
    }

    /// CUSUM in both directions. One outlier never suffices; a steady fourfold change takes two samples.
    fn detect(&mut self, residual: f64) {
        let slack = self.noise.clamp(0.25, 0.75);
        let limit = (5.0 * self.noise).clamp(1.5, 4.0);
        let r = residual.clamp(-0.8 * limit, 0.8 * limit);
        self.up = (self.up + r - slack).max(0.0);
        self.down = (self.down - r - slack).max(0.0);
        if self.up > limit || self.down > limit {
            (self.up, self.down) = (0.0, 0.0);
            for row in &mut self.cov {
                row[G] = 0.0;
            }
            self.cov[G] = [0.0; N];
            self.cov[G][G] = 1.0;
            self.hurry = HURRY;
            self.changes += 1;
        } else if self.hurry > 0 {
            self.cov[G][G] = self.cov[G][G].max(0.1);
        }
    }
}

fn dot(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn bounded([base, frontend, gain, attention]: [f64; N]) -> [f64; N] {
    [
        base.clamp(0.0, MAX_BASE),
        frontend.clamp(0.0, MAX_FRONTEND),
        gain.clamp(-MAX_LOG, MAX_LOG),
        attention.clamp(MIN_ATTENTION.ln(), MAX_ATTENTION.ln()),
    ]
}
