//! Time as the pods have it: some times faster than ours.

use std::time::Duration;
use tokio::time::Instant;

/// Seconds of the pods since a moment of ours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    start: Instant,
    speed: f64,
}

// === impl Clock ===

impl Clock {
    /// A clock that starts now and goes so many times faster than ours.
    pub(super) fn start(speed: f64) -> Self {
        Self {
            start: Instant::now(),
            speed,
        }
    }

    /// Pod seconds since the start.
    pub(super) fn now(&self) -> f64 {
        let now = Instant::now();
        now.saturating_duration_since(self.start).as_secs_f64() * self.speed
    }

    /// When it shows so many pod seconds, never too early.
    pub(super) fn when(&self, at: f64) -> Instant {
        let ours = (at / self.speed).clamp(0.0, 1e9);
        self.start + Duration::from_secs_f64(ours) + Duration::from_nanos(1)
    }

    /// Pod seconds in so many of ours.
    pub(super) fn scaled(&self, seconds: f64) -> f64 {
        seconds * self.speed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::sleep_until;

    #[tokio::test(start_paused = true)]
    async fn runs_faster_and_is_never_early() {
        let clock = Clock::start(15.0);
        for at in [0.1, 3.0, 61.7] {
            sleep_until(clock.when(at)).await;
            assert!((at..at + 0.04).contains(&clock.now()), "{}", clock.now());
        }
        assert_eq!(clock.scaled(2.0), 30.0);
    }
}
