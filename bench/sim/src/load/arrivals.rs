use rand::{RngExt, SeedableRng, rngs::StdRng};

/// How many workers the published run's tool has by default: each draws the same gaps, so they come in runs of ten.
const WORKERS: u32 = 10;

/// How gaps between arrivals are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gaps {
    /// Each anew: a Poisson process.
    Poisson,
    /// Ten times the same, as the published run's tool does unless told otherwise: its ten workers share one clock but each draws
    /// from a generator with the same seed.
    Tens,
}

/// Arrival times, seconds from the start.
#[derive(Debug)]
pub struct Arrivals {
    rng: StdRng,
    rate: f64,
    gaps: Gaps,
    gap: f64,
    left: u32,
    at: f64,
}

// === impl Gaps ===

impl Gaps {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Tens, Self::Poisson];

    /// For tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Poisson => "poisson",
            Self::Tens => "tens",
        }
    }

    /// Workers of the client; a conversation stays with its worker.
    pub fn workers(self) -> u32 {
        match self {
            Self::Poisson => 1,
            Self::Tens => WORKERS,
        }
    }
}

// === impl Arrivals ===

impl Arrivals {
    /// Arrivals at a mean rate per second.
    pub fn new(rate: f64, gaps: Gaps, seed: u64) -> Self {
        Self {
            rng: StdRng::seed_from_u64(seed),
            rate,
            gaps,
            gap: 0.0,
            left: 0,
            at: 0.0,
        }
    }
}

impl Iterator for Arrivals {
    type Item = f64;

    fn next(&mut self) -> Option<f64> {
        if self.left == 0 {
            let u: f64 = self.rng.random_range(0.0..1.0);
            self.gap = -(1.0 - u).ln() / self.rate;
            self.left = self.gaps.workers();
        }
        self.left -= 1;
        self.at += self.gap;
        Some(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(of: Gaps, n: usize) -> Vec<f64> {
        let all: Vec<f64> = Arrivals::new(0.25, of, 5).take(n).collect();
        all.windows(2).map(|w| w[1] - w[0]).collect()
    }

    #[test]
    fn tens_come_in_tens() {
        let gaps = gaps(Gaps::Tens, 100);
        for (i, w) in gaps.windows(2).enumerate() {
            // Gap number i ends at arrival number i + 1.
            let same_run = (i + 1) / 10 == (i + 2) / 10;
            assert_eq!((w[1] - w[0]).abs() < 1e-9, same_run, "gap {i}");
        }
    }

    #[test]
    fn both_keep_the_rate_and_poisson_has_its_variance() {
        for of in Gaps::ALL {
            let gaps = gaps(of, 20_000);
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            assert!((mean - 4.0).abs() < 0.3, "{of:?}: {mean}");
        }
        let gaps = gaps(Gaps::Poisson, 20_000);
        let short = gaps.iter().filter(|g| **g < 4.0).count() as f64 / gaps.len() as f64;
        assert!((short - 0.632).abs() < 0.02, "{short}");
    }
}
