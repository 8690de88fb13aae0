//! What a request costs apart from its computed tokens: so much for any, and so much for each byte of text.
//!
//! The two are told apart by a Kalman filter over (base, frontend): an answer of measured time `y` for a text of `x`
//! (in [`FRONTEND_BYTES`]) says `y = base + frontend · x`, with an error of a fifth of it. Old knowledge fades by a
//! twentieth with each sample, so that it follows a change within some tens of answers.

/// The frontend's rate is learned in seconds for this many bytes.
pub(super) const FRONTEND_BYTES: f64 = 65_536.0;
/// Below this no engine answers; an answer from its own cache would look like it.
const BASE: f64 = 0.01;
/// 1 µs a byte: the geometric middle of a slow tokenizer and none would be lower, but too low is the costlier error.
const FRONTEND: f64 = 1e-6 * FRONTEND_BYTES;
const MAX_BASE: f64 = 10.0;
/// 20 µs a byte: slower tokenizers were never seen.
const MAX_FRONTEND: f64 = 2e-5 * FRONTEND_BYTES;
/// How far from what it borrows an endpoint may be, at first.
const BASE_SPREAD: f64 = 0.03;
/// The engines of one pool tokenize alike, but not on half the CPU.
const FRONTEND_SPREAD: f64 = 0.05;
/// Relative error of a measurement, and seconds of it that do not shrink with it.
const NOISE: (f64, f64) = (0.2, 0.003);
/// Knowledge that is kept from one sample to the next.
const KEPT: f64 = 0.95;

/// Costs of an endpoint, and how well they are known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fixed {
    costs: Costs,
    /// Variances of base and frontend, and their covariance.
    base: f64,
    frontend: f64,
    both: f64,
    samples: u64,
}

/// Seconds for any request, and for [`FRONTEND_BYTES`] of text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Costs {
    pub(super) base: f64,
    pub(super) frontend: f64,
}

// === impl Fixed ===

impl Default for Fixed {
    fn default() -> Self {
        Self {
            costs: Costs::default(),
            base: BASE_SPREAD * BASE_SPREAD,
            frontend: FRONTEND_SPREAD * FRONTEND_SPREAD,
            both: 0.0,
            samples: 0,
        }
    }
}

impl Fixed {
    /// What was learned, and nothing borrowed.
    pub(super) fn own(&self) -> Option<Costs> {
        (self.samples > 0).then_some(self.costs)
    }

    /// The costs to use: an endpoint without samples borrows from the others.
    pub(super) fn costs(&self, others: Option<Costs>) -> Costs {
        match others {
            Some(others) if self.samples == 0 => others,
            _ => self.costs,
        }
    }

    /// Takes how long a request of `bytes` took apart from its computed tokens, seconds, out of `actual` altogether.
    pub(super) fn learn(&mut self, bytes: f64, took: f64, actual: f64, others: Option<Costs>) {
        if !(took.is_finite() && bytes.is_finite()) {
            return;
        }
        self.costs = self.costs(others);
        let known = self.samples >= 3 || others.is_some();
        self.samples += 1;
        let x = bytes / FRONTEND_BYTES;
        let Costs { base, frontend } = self.costs;
        let noise = NOISE.0 * actual + NOISE.1;
        let spread_base = self.base + self.both * x;
        let spread_frontend = self.both + self.frontend * x;
        let spread = spread_base + spread_frontend * x + noise * noise;
        let mut off = took - base - frontend * x;
        if known {
            // One answer that took far longer must not teach a lot: others waited for something else.
            off = off.min(2.0 * (base + frontend * x).max(BASE));
        }
        let (gain_base, gain_frontend) = (spread_base / spread, spread_frontend / spread);
        self.costs = Costs {
            base: (base + gain_base * off).clamp(0.0, MAX_BASE),
            frontend: (frontend + gain_frontend * off).clamp(0.0, MAX_FRONTEND),
        };
        self.base -= gain_base * spread_base;
        self.frontend -= gain_frontend * spread_frontend;
        self.both -= gain_base * spread_frontend;
        self.fade();
    }

    /// Old knowledge counts less; never less than at first.
    fn fade(&mut self) {
        self.base = (self.base / KEPT).min(BASE_SPREAD * BASE_SPREAD);
        self.frontend = (self.frontend / KEPT).min(FRONTEND_SPREAD * FRONTEND_SPREAD);
        let limit = (self.base * self.frontend).max(0.0).sqrt();
        self.both = (self.both / KEPT).clamp(-limit, limit);
    }
}

// === impl Costs ===

impl Default for Costs {
    fn default() -> Self {
        Self {
            base: BASE,
            frontend: FRONTEND,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_base_and_frontend_apart() {
        let mut fixed = Fixed::default();
        for i in 0..40 {
            let bytes = f64::from(i % 8 + 1) * 2_000.0;
            let took = 0.016 + 0.025 * bytes / FRONTEND_BYTES;
            fixed.learn(bytes, took, took, None);
        }
        let costs = fixed.costs(None);
        assert!((costs.base - 0.016).abs() < 0.001, "{costs:?}");
        assert!((costs.frontend - 0.025).abs() < 0.003, "{costs:?}");
    }

    #[test]
    fn follows_a_change_and_forgives_an_outlier() {
        let mut fixed = Fixed::default();
        for _ in 0..100 {
            fixed.learn(1_000.0, 0.02, 0.02, None);
        }
        fixed.learn(1_000.0, 2.0, 2.0, None);
        assert!(fixed.costs(None).base < 0.03, "{fixed:?}");
        for _ in 0..60 {
            fixed.learn(1_000.0, 0.06, 0.06, None);
        }
        assert!(fixed.costs(None).base > 0.05, "{fixed:?}");
    }

    #[test]
    fn borrows_until_it_knows() {
        let others = Some(Costs {
            base: 0.2,
            frontend: 0.1,
        });
        let mut fixed = Fixed::default();
        assert_eq!(fixed.costs(others).base, 0.2);
        fixed.learn(1_000.0, 0.1, 0.1, others);
        let base = fixed.costs(others).base;
        assert!((0.1..0.19).contains(&base), "{base}");
        fixed.learn(f64::NAN, 0.1, 0.1, others);
        assert_eq!(fixed.costs(others).base, base);
    }
}
