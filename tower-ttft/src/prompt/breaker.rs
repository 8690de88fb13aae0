//! A breaker for questions to engines: after some failures in a row nobody asks for a while, then one probes.
use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;

const FAILURES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The state, behind a lock that is held for an instant.
#[derive(Debug, Default)]
pub(super) struct Breaker {
    failures: u32,
    open_until: Option<Instant>,
    probing: bool,
}

/// One question. Dropped without a word (the caller left), it is neither success nor failure.
pub(super) struct Attempt<'a> {
    breaker: &'a Mutex<Breaker>,
    probe: bool,
}

// === impl Breaker ===

impl Breaker {
    /// A question, unless the breaker is open.
    pub(super) fn attempt(this: &Mutex<Self>, now: Instant) -> Option<Attempt<'_>> {
        let mut b = this.lock();
        let probe = match b.open_until {
            None => false,
            Some(until) if now < until || b.probing => return None,
            Some(_) => true,
        };
        b.probing |= probe;
        Some(Attempt {
            breaker: this,
            probe,
        })
    }
}

// === impl Attempt ===

impl Attempt<'_> {
    pub(super) fn succeeded(&mut self) {
        let mut b = self.breaker.lock();
        b.failures = 0;
        b.open_until = None;
    }

    pub(super) fn failed(&mut self, now: Instant) {
        let mut b = self.breaker.lock();
        b.failures = b.failures.saturating_add(1);
        if b.failures >= FAILURES {
            let doublings = (b.failures - FAILURES).min(16);
            let pause = FIRST_PAUSE
                .saturating_mul(1 << doublings)
                .min(LONGEST_PAUSE);
            b.open_until = Some(now + pause);
        }
    }

    /// The engine is there but the question was not for it.
    pub(super) fn neither(&mut self) {}
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if self.probe {
            self.breaker.lock().probing = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn opens_after_failures_in_a_row_and_closes_with_a_probe() {
        let breaker = Mutex::new(Breaker::default());
        let fail =
            || Breaker::attempt(&breaker, Instant::now()).map(|mut a| a.failed(Instant::now()));
        for _ in 0..FAILURES {
            assert!(fail().is_some());
        }
        assert!(fail().is_none());
        tokio::time::advance(FIRST_PAUSE).await;
        let probe = Breaker::attempt(&breaker, Instant::now());
        assert!(probe.is_some());
        assert!(
            Breaker::attempt(&breaker, Instant::now()).is_none(),
            "one probe at a time"
        );
        drop(probe);
        // A probe that came to no end leaves the place to the next.
        assert!(fail().is_some());
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(fail().is_none(), "the pause doubled");
        tokio::time::advance(FIRST_PAUSE).await;
        let mut probe = Breaker::attempt(&breaker, Instant::now()).unwrap();
        probe.succeeded();
        drop(probe);
        for _ in 0..FAILURES {
            assert!(fail().is_some());
        }
        assert!(fail().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_is_bounded() {
        let breaker = Mutex::new(Breaker::default());
        for _ in 0..100 {
            if let Some(mut a) = Breaker::attempt(&breaker, Instant::now()) {
                a.failed(Instant::now());
            }
            tokio::time::advance(LONGEST_PAUSE).await;
        }
        assert!(Breaker::attempt(&breaker, Instant::now()).is_some());
    }
}
