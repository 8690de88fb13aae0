//! When a hot prefix is worth a second copy: rent or buy.
//!
//! Requests that wait at the one endpoint that holds their prefix, while another that does not is free, pay rent. Once
//! the rent paid for a prefix reaches what a copy costs, the next request buys one. This is at most twice as dear as
//! knowing the future (the ski-rental problem); rent is forgotten with a half-life, so that rare waits never add up to
//! a copy.

use std::{collections::HashMap, time::Duration};
use tokio::time::Instant;

/// Prefixes that are followed.
const MAX_PREFIXES: usize = 4096;

const HALF_LIFE: Duration = Duration::from_secs(60);

/// Rent paid per prefix, seconds.
#[derive(Debug, Default)]
pub(crate) struct Demand {
    rents: HashMap<u64, Rent>,
}

#[derive(Clone, Copy, Debug)]
struct Rent {
    paid: f64,
    at: Instant,
}

// === impl Demand ===

impl Demand {
    /// Seconds of waiting that a prefix has cost lately.
    pub(crate) fn rent(&self, prefix: u64, now: Instant) -> f64 {
        self.rents.get(&prefix).map_or(0.0, |r| r.now(now))
    }

    /// A request waits so much longer at a holder than it would have elsewhere.
    pub(crate) fn pay(&mut self, prefix: u64, seconds: f64, now: Instant) {
        // NaN pays nothing.
        if !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        if self.rents.len() >= MAX_PREFIXES && !self.rents.contains_key(&prefix) {
            self.forget(now);
        }
        let paid = self.rent(prefix, now) + seconds;
        self.rents.insert(prefix, Rent { paid, at: now });
    }

    /// A copy was bought.
    pub(crate) fn buy(&mut self, prefix: u64) {
        self.rents.remove(&prefix);
    }

    /// Makes room: the lesser half goes.
    fn forget(&mut self, now: Instant) {
        let mut paid: Vec<f64> = self.rents.values().map(|r| r.now(now)).collect();
        paid.sort_by(f64::total_cmp);
        let median = paid.get(paid.len() / 2).copied().unwrap_or(0.0);
        self.rents.retain(|_, r| r.now(now) > median);
    }
}

// === impl Rent ===

impl Rent {
    fn now(&self, now: Instant) -> f64 {
        let age = now.saturating_duration_since(self.at).as_secs_f64();
        self.paid * 0.5f64.powf(age / HALF_LIFE.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn rent_adds_up_fades_and_buys() {
        let now = Instant::now();
        let mut d = Demand::default();
        d.pay(1, 2.0, now);
        d.pay(1, 2.0, now);
        d.pay(1, f64::NAN, now);
        assert_eq!(d.rent(1, now), 4.0);
        assert!((d.rent(1, now + HALF_LIFE) - 2.0).abs() < 1e-9);
        d.buy(1);
        assert_eq!(d.rent(1, now), 0.0);
    }

    #[tokio::test(start_paused = true)]
    async fn follows_the_dearest_of_a_bounded_number() {
        let now = Instant::now();
        let mut d = Demand::default();
        for n in 0..3 * MAX_PREFIXES as u64 {
            d.pay(n, 1.0 + n as f64, now);
            assert!(d.rents.len() <= MAX_PREFIXES);
        }
        assert!(d.rent(3 * MAX_PREFIXES as u64 - 1, now) > 0.0);
    }
}
