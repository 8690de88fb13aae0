use std::time::Duration;
use tokio::time::Instant;

/// Below this step an average no longer follows.
const MIN_STEP: f64 = 0.04;
/// A sample moves a settled gain by no more than this, in the log domain (a factor of 4.5).
const CLIP: f64 = 1.5;
/// Samples for which the step stays high after a change was detected.
const HURRY: u32 = 8;
/// The step while hurrying.
const HURRY_STEP: f64 = 0.3;
/// Gains stay within this factor of neutral, both ways: 2 µs to 5 ms per token.
pub(super) const MAX_LOG: f64 = 3.912; // ln 50
/// An idle endpoint's gain is half the others' after this long.
const HALF_LIFE: Duration = Duration::from_secs(600);

/// The one learned number of an endpoint: the log of its prefill cost over the neutral one.
#[derive(Clone, Debug, Default)]
pub(super) struct Gain {
    log: f64,
    /// Weight of the samples so far.
    weight: f64,
    samples: u64,
    last: Option<Instant>,
    /// Mean |log residual|: what is normal here.
    spread: f64,
    /// CUSUM of residuals up and down.
    up: f64,
    down: f64,
    hurry: u32,
    changes: u64,
}

// === impl Gain ===

impl Gain {
    /// Samples that trained it.
    pub(super) fn samples(&self) -> u64 {
        self.samples
    }

    /// Changes that were detected.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// What was learned, and nothing borrowed.
    pub(super) fn own(&self) -> Option<f64> {
        (self.samples > 0).then_some(self.log)
    }

    /// The log gain to use: what was learned, drawn to what others have while there are few samples and again while
    /// idle. Without that, one slow first answer would keep requests away, and so the samples that would correct it.
    pub(super) fn log(&self, others: Option<f64>, now: Instant) -> f64 {
        match (self.own(), others) {
            (None, others) => others.unwrap_or(0.0),
            (Some(own), None) => own,
            (Some(own), Some(others)) => {
                let weight = self.weight * self.kept(now);
                others + (own - others) * self.kept(now) * weight / (weight + 0.5)
            }
        }
    }

    /// What is left of the knowledge, 0 to 1, after having been idle.
    fn kept(&self, now: Instant) -> f64 {
        self.last.map_or(1.0, |last| {
            let idle = now.saturating_duration_since(last).as_secs_f64();
            0.5f64.powf(idle / HALF_LIFE.as_secs_f64())
        })
    }

    /// Takes a log residual (actual over predicted with `from`, the gain that was in use) of some weight, 0 to 1.
    pub(super) fn learn(
        &mut self,
        residual: f64,
        weight: f64,
        from: f64,
        borrowed: bool,
        now: Instant,
    ) {
        if !(residual.is_finite() && from.is_finite() && weight > 0.0) {
            return;
        }
        let settled = self.samples >= 3;
        if settled {
            self.detect(residual);
        }
        let clipped = if settled && self.hurry == 0 {
            residual.clamp(-CLIP, CLIP)
        } else {
            residual
        };
        // Old samples count less, so that an endpoint that was idle learns quickly.
        self.weight *= self.kept(now);
        // A borrowed gain counts as one sample, a neutral one as none.
        let prior = if borrowed { 1.0 } else { 0.0 };
        let mut step = (weight / (prior + self.weight + weight)).max(MIN_STEP * weight);
        if self.hurry > 0 {
            self.hurry -= 1;
            step = step.max(HURRY_STEP * weight);
        }
        self.log = (from + step * clipped).clamp(-MAX_LOG, MAX_LOG);
        self.weight = (self.weight + weight).min(1.0 / MIN_STEP);
        self.samples += 1;
        self.spread +=
            (residual.abs().min(CLIP) - self.spread) * (1.0 / self.samples as f64).max(0.05);
        self.last = Some(now);
    }

    /// CUSUM in both directions. One outlier never suffices; a steady fourfold change takes two samples.
    fn detect(&mut self, residual: f64) {
        let slack = self.spread.clamp(0.25, 0.75);
        let limit = (5.0 * self.spread).clamp(1.5, 4.0);
        let r = residual.clamp(-0.8 * limit, 0.8 * limit);
        self.up = (self.up + r - slack).max(0.0);
        self.down = (self.down - r - slack).max(0.0);
        if self.up > limit || self.down > limit {
            (self.up, self.down) = (0.0, 0.0);
            self.weight = 1.0;
            self.hurry = HURRY;
            self.changes += 1;
        }
    }
}
