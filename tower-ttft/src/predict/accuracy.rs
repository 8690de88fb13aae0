/// Errors kept per regime.
const KEPT: usize = 64;
/// Fewer errors than this say nothing.
const ENOUGH: usize = 16;
/// A median error above this factor is not to be trusted.
const UNTRUSTED: f64 = 1.386; // ln 4
/// The error that is assumed before anything is known: a factor of e.
const UNKNOWN: f64 = 1.0;

/// How much of a prompt was held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cached {
    /// At least three quarters.
    Hit,
    /// Something between.
    Partial,
    /// Less than a tenth.
    Miss,
}

/// Where predictions are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Regime {
    /// How much was held.
    pub cached: Cached,
    /// Whether work was ahead.
    pub queued: bool,
}

/// How predictions went in one regime, as log(actual / predicted).
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct RegimeError {
    /// Which regime.
    #[serde(flatten)]
    pub regime: Regime,
    /// Samples ever.
    pub samples: u64,
    /// Median of |log|.
    pub median: f64,
    /// 90th percentile of |log|.
    pub p90: f64,
    /// Median of the signed log: above 0, answers came later than predicted.
    pub bias: f64,
}

/// The last errors of each regime.
#[derive(Clone, Debug, Default)]
pub(super) struct Accuracy {
    regimes: [Window; 6],
}

#[derive(Clone, Debug, Default)]
struct Window {
    errors: Vec<f64>,
    next: usize,
    samples: u64,
    median: f64,
    p90: f64,
    signed_p50: f64,
    signed_p90: f64,
}

// === impl Regime ===

impl Regime {
    /// All of them.
    pub const ALL: [Regime; 6] = [
        Regime::new(Cached::Hit, false),
        Regime::new(Cached::Hit, true),
        Regime::new(Cached::Partial, false),
        Regime::new(Cached::Partial, true),
        Regime::new(Cached::Miss, false),
        Regime::new(Cached::Miss, true),
    ];

    const fn new(cached: Cached, queued: bool) -> Self {
        Self { cached, queued }
    }

    /// The regime of a prompt with so many tokens, so many of them held, and this share of the TTFT being backlog.
    pub fn of(tokens: u32, cached: u32, backlog_share: f64) -> Self {
        let share = f64::from(cached) / f64::from(tokens.max(1));
        let cached = if share >= 0.75 {
            Cached::Hit
        } else if share < 0.1 {
            Cached::Miss
        } else {
            Cached::Partial
        };
        Self {
            cached,
            queued: backlog_share > 0.2,
        }
    }

    /// For metrics.
    pub fn name(&self) -> &'static str {
        match (self.cached, self.queued) {
            (Cached::Hit, false) => "hit_idle",
            (Cached::Hit, true) => "hit_queued",
            (Cached::Partial, false) => "partial_idle",
            (Cached::Partial, true) => "partial_queued",
            (Cached::Miss, false) => "miss_idle",
            (Cached::Miss, true) => "miss_queued",
        }
    }

    fn index(&self) -> usize {
        let cached = match self.cached {
            Cached::Hit => 0,
            Cached::Partial => 2,
            Cached::Miss => 4,
        };
        cached + usize::from(self.queued)
    }
}

// === impl Accuracy ===

impl Accuracy {
    /// Takes one prediction and what came of it, seconds.
    pub(super) fn record(&mut self, regime: Regime, predicted: f64, actual: f64) {
        let error = (actual / predicted).ln();
        if error.is_finite()
            && let Some(w) = self.regimes.get_mut(regime.index())
        {
            w.push(error);
        }
    }

    /// The median |log| error of a regime; of nothing better known, a factor of e.
    pub(super) fn error(&self, regime: Regime) -> f64 {
        self.window(regime)
            .filter(|w| w.samples >= 4)
            .map_or(UNKNOWN, |w| w.median)
    }

    /// Not after many predictions of this kind were wrong by more than a factor of four. Where there are not many yet,
    /// the same prompts with, or without, work ahead speak for it.
    pub(super) fn trusted(&self, regime: Regime) -> bool {
        let verdict = |regime| {
            let w = self.window(regime)?;
            (w.errors.len() >= ENOUGH).then_some(w.median < UNTRUSTED)
        };
        let other = Regime {
            queued: !regime.queued,
            ..regime
        };
        verdict(regime).or_else(|| verdict(other)).unwrap_or(true)
    }

    /// Factors from a prediction to the median and to the 90th percentile of what comes.
    pub(super) fn spread(&self, regime: Regime) -> (f64, f64) {
        match self.window(regime).filter(|w| w.samples >= 4) {
            Some(w) => (w.signed_p50.exp(), w.signed_p90.exp()),
            None => (1.0, std::f64::consts::E),
        }
    }

    /// For metrics and the admin port.
    pub(super) fn report(&self) -> Vec<RegimeError> {
        Regime::ALL
            .iter()
            .filter_map(|regime| {
                let w = self.window(*regime)?;
                Some(RegimeError {
                    regime: *regime,
                    samples: w.samples,
                    median: w.median,
                    p90: w.p90,
                    bias: w.signed_p50,
                })
            })
            .collect()
    }

    fn window(&self, regime: Regime) -> Option<&Window> {
        self.regimes.get(regime.index())
    }
}

// === impl Window ===

impl Window {
    fn push(&mut self, error: f64) {
        if self.errors.len() < KEPT {
            self.errors.push(error);
        } else if let Some(e) = self.errors.get_mut(self.next) {
            *e = error;
        }
        self.next = (self.next + 1) % KEPT;
        self.samples += 1;
        let mut sorted = self.errors.clone();
        sorted.sort_by(f64::total_cmp);
        self.signed_p50 = quantile(&sorted, 0.5);
        self.signed_p90 = quantile(&sorted, 0.9);
        for e in &mut sorted {
            *e = e.abs();
        }
        sorted.sort_by(f64::total_cmp);
        self.median = quantile(&sorted, 0.5);
        self.p90 = quantile(&sorted, 0.9);
    }
}

/// The nearest-rank quantile of sorted numbers.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let rank = (q * sorted.len() as f64).ceil().max(1.0) as usize - 1;
    sorted.get(rank).copied().unwrap_or(0.0)
}
