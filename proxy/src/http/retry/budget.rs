//! How many requests may be tried again: a share of those that came lately, and a few more so that a quiet service has
//! retries at all. When all engines fail, retries must not double what hits them.

use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// Parameters of a [`Budget`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BudgetParams {
    /// Retries per request.
    pub ratio: f64,
    /// Retries per second on top.
    pub floor: f64,
    /// For how long what was not used is kept.
    pub window: Duration,
    /// The most that is kept.
    pub max: f64,
}

/// A budget of retries. Requests pay in, retries draw.
#[derive(Debug)]
pub struct Budget {
    params: BudgetParams,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// From requests; fades with the window.
    earned: f64,
    /// From time; at most a window's worth.
    given: f64,
    at: Instant,
}

// === impl BudgetParams ===

impl Default for BudgetParams {
    fn default() -> Self {
        Self {
            ratio: 0.2,
            floor: 1.0,
            window: Duration::from_secs(10),
            max: 1000.0,
        }
    }
}

// === impl Budget ===

impl Budget {
    /// A budget that holds its floor's worth of a window.
    pub fn new(params: BudgetParams, now: Instant) -> Self {
        Self {
            params,
            state: Mutex::new(State {
                earned: 0.0,
                given: params.floor * params.window.as_secs_f64(),
                at: now,
            }),
        }
    }

    /// A request came.
    pub fn deposit(&self, now: Instant) {
        let mut state = self.state.lock();
        state.age(&self.params, now);
        state.earned = (state.earned + self.params.ratio).min(self.params.max);
    }

    /// Whether a retry may be made; if so it is paid for.
    pub fn withdraw(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        state.age(&self.params, now);
        if state.earned + state.given < 1.0 {
            return false;
        }
        let earned = state.earned.min(1.0);
        state.earned -= earned;
        state.given = (state.given - (1.0 - earned)).max(0.0);
        true
    }
}

// === impl State ===

impl State {
    fn age(&mut self, params: &BudgetParams, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        if passed <= 0.0 {
            return;
        }
        self.at = now;
        let window = params.window.as_secs_f64().max(f64::MIN_POSITIVE);
        self.earned *= (-passed / window).exp();
        self.given = (self.given + params.floor * passed).min(params.floor * window);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(ratio: f64, floor: f64, now: Instant) -> Budget {
        let params = BudgetParams {
            ratio,
            floor,
            ..BudgetParams::default()
        };
        Budget::new(params, now)
    }

    fn drawn(budget: &Budget, now: Instant) -> usize {
        (0..2000).take_while(|_| budget.withdraw(now)).count()
    }

    #[tokio::test(start_paused = true)]
    async fn a_share_of_requests() {
        let now = Instant::now();
        let budget = budget(0.2, 0.0, now);
        assert_eq!(drawn(&budget, now), 0);
        for _ in 0..101 {
            budget.deposit(now);
        }
        assert_eq!(drawn(&budget, now), 20);
    }

    #[tokio::test(start_paused = true)]
    async fn a_floor() {
        let now = Instant::now();
        let budget = budget(0.0, 1.0, now);
        assert_eq!(drawn(&budget, now), 10);
        assert_eq!(drawn(&budget, now + Duration::from_secs(3)), 3);
        assert_eq!(drawn(&budget, now + Duration::from_secs(3600)), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn old_requests_count_less_and_all_is_bounded() {
        let now = Instant::now();
        let budget = budget(0.2, 0.0, now);
        for _ in 0..100_000 {
            budget.deposit(now);
        }
        assert_eq!(drawn(&budget, now), 1000);
        for _ in 0..1000 {
            budget.deposit(now);
        }
        // 200 × e^-2.3 = 20.05
        assert_eq!(drawn(&budget, now + Duration::from_secs(23)), 20);
    }
}
