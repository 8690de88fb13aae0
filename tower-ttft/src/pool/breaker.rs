//! Keeps requests from an address that fails, and lets it prove itself again.
//!
//! Every failure in a row makes an address look four times as slow, so that failing fast never looks like low latency.
//! After [`TRIP`] failures in a row it gets nothing for 2 s, then one request at a time; each failed probe doubles the
//! wait up to 10 s, one success closes the breaker.

use std::time::Duration;
use tokio::time::Instant;

/// Failures in a row that open a breaker.
const TRIP: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_secs(2);
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Failures are forgiven after this long without another.
const FORGIVE: Duration = Duration::from_secs(60);

/// The breaker of one address.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    failures: u32,
    last: Option<Instant>,
    open: Option<Open>,
    /// Full, by its own word, until then.
    busy_until: Option<Instant>,
}

/// What a breaker lets through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Gate {
    /// Requests, their score multiplied.
    Closed(f64),
    /// One request, to see.
    Probe,
    /// Nothing.
    Open,
}

#[derive(Debug)]
struct Open {
    until: Instant,
    wait: Duration,
    /// Probes in flight.
    probes: u32,
}

// === impl Breaker ===

impl Breaker {
    pub(crate) fn gate(&self, now: Instant) -> Gate {
        match &self.open {
            None => Gate::Closed(self.penalty(now)),
            Some(o) if now >= o.until && o.probes == 0 => Gate::Probe,
            Some(_) => Gate::Open,
        }
    }

    /// What a recent failure costs where the breaker cannot or may not keep requests away.
    pub(crate) fn penalty(&self, now: Instant) -> f64 {
        match self.last {
            Some(last) if now.saturating_duration_since(last) < FORGIVE => {
                4f64.powi(self.failures.min(5) as i32)
            }
            _ => 1.0,
        }
    }

    /// Whether it is open, for metrics.
    pub(crate) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Seconds for which it has said that it is full.
    pub(crate) fn busy(&self, now: Instant) -> f64 {
        self.busy_until.map_or(0.0, |until| {
            until.saturating_duration_since(now).as_secs_f64()
        })
    }

    pub(crate) fn set_busy(&mut self, until: Instant) {
        self.busy_until = Some(until);
    }

    /// A request is sent. Whether it is a probe, which must be given back in [`Breaker::left`].
    pub(crate) fn enter(&mut self, now: Instant) -> bool {
        match &mut self.open {
            Some(o) if now >= o.until => {
                o.probes += 1;
                true
            }
            _ => false,
        }
    }

    /// A probe ended, one way or another.
    pub(crate) fn left(&mut self) {
        if let Some(o) = &mut self.open {
            o.probes = o.probes.saturating_sub(1);
        }
    }

    pub(crate) fn success(&mut self) {
        self.failures = 0;
        self.last = None;
        self.open = None;
    }

    pub(crate) fn failure(&mut self, now: Instant) {
        if self
            .last
            .is_some_and(|last| now.saturating_duration_since(last) >= FORGIVE)
        {
            self.failures = 0;
        }
        self.failures = self.failures.saturating_add(1);
        self.last = Some(now);
        match &mut self.open {
            // Requests that were on their way when it opened add nothing.
            Some(o) if now < o.until => {}
            Some(o) => {
                o.wait = (o.wait * 2).min(MAX_WAIT);
                o.until = now + o.wait;
            }
            None if self.failures >= TRIP => {
                self.open = Some(Open {
                    until: now + FIRST_WAIT,
                    wait: FIRST_WAIT,
                    probes: 0,
                });
            }
            None => {}
        }
    }

    /// Another process listens there now: one request will tell.
    pub(crate) fn renew(&mut self, now: Instant) {
        if let Some(o) = &mut self.open {
            o.until = now;
            o.wait = FIRST_WAIT;
            o.probes = 0;
        }
        self.busy_until = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn opens_probes_and_closes() {
        let mut now = Instant::now();
        let mut b = Breaker::default();
        for n in 1..TRIP {
            b.failure(now);
            assert_eq!(b.gate(now), Gate::Closed(4f64.powi(n as i32)));
        }
        b.failure(now);
        assert_eq!(b.gate(now), Gate::Open);
        // Latecomers change nothing.
        b.failure(now);
        now += FIRST_WAIT;
        assert_eq!(b.gate(now), Gate::Probe);
        assert!(b.enter(now));
        assert_eq!(b.gate(now), Gate::Open, "one at a time");
        b.failure(now);
        b.left();
        assert_eq!(b.gate(now + 3 * SECOND), Gate::Open);
        now += 4 * SECOND;
        assert_eq!(b.gate(now), Gate::Probe);
        assert!(b.enter(now));
        b.success();
        b.left();
        assert_eq!(b.gate(now), Gate::Closed(1.0));
        assert!(!b.enter(now));
    }

    #[tokio::test(start_paused = true)]
    async fn waits_no_longer_than_ten_seconds() {
        let mut now = Instant::now();
        let mut b = Breaker::default();
        for _ in 0..TRIP {
            b.failure(now);
        }
        for _ in 0..20 {
            let mut waited = Duration::ZERO;
            while b.gate(now) != Gate::Probe {
                now += SECOND;
                waited += SECOND;
            }
            assert!(waited <= MAX_WAIT);
            b.enter(now);
            b.failure(now);
            b.left();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_the_client_left_is_given_back() {
        let now = Instant::now();
        let mut b = Breaker::default();
        for _ in 0..TRIP {
            b.failure(now);
        }
        let later = now + FIRST_WAIT;
        assert!(b.enter(later));
        b.left();
        assert_eq!(b.gate(later), Gate::Probe);
    }

    #[tokio::test(start_paused = true)]
    async fn old_failures_are_forgiven() {
        let now = Instant::now();
        let mut b = Breaker::default();
        for _ in 0..TRIP - 1 {
            b.failure(now);
        }
        let later = now + FORGIVE;
        assert_eq!(b.gate(later), Gate::Closed(1.0));
        b.failure(later);
        assert_eq!(b.gate(later), Gate::Closed(4.0));
    }
}
