//! How the process stops, as one value that everything watches.

use tokio::sync::watch;

/// How far the process is on its way out. Phases only go forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// It serves.
    Running,
    /// It still takes connections but is no longer ready: load balancers have time to notice.
    LameDuck,
    /// It takes no connections and finishes what is open.
    Draining,
    /// It ends what is open.
    Now,
}

/// Moves the process towards its end.
#[derive(Clone, Debug)]
pub struct Drain(watch::Sender<Phase>);

/// Sees how far the process is.
#[derive(Clone, Debug)]
pub struct Draining(watch::Receiver<Phase>);

/// A running process.
pub fn channel() -> (Drain, Draining) {
    let (tx, rx) = watch::channel(Phase::Running);
    (Drain(tx), Draining(rx))
}

// === impl Drain ===

impl Drain {
    /// Goes on to `phase`; going back does nothing.
    pub fn advance(&self, phase: Phase) {
        self.0.send_if_modified(|now| {
            let forward = phase > *now;
            *now = phase.max(*now);
            forward
        });
    }

    /// How far the process is.
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }
}

// === impl Draining ===

impl Draining {
    /// How far the process is.
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Resolves once the process is as far as `phase`, or if nobody is left to move it.
    pub async fn reached(&mut self, phase: Phase) {
        // An error means that the sender is gone with the process it stands for.
        let _ = self.0.wait_for(|now| *now >= phase).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn only_forward() {
        let (drain, mut draining) = channel();
        assert_eq!(draining.phase(), Phase::Running);
        assert!(draining.reached(Phase::LameDuck).now_or_never().is_none());
        drain.advance(Phase::Draining);
        drain.advance(Phase::LameDuck);
        assert_eq!(draining.phase(), Phase::Draining);
        assert!(draining.reached(Phase::LameDuck).now_or_never().is_some());
        assert!(draining.reached(Phase::Now).now_or_never().is_none());
    }
}
