//! Latches that have to fall before the proxy is ready, and the one thing that ends it.

use crate::server::drain::{Draining, Phase};
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Whether the proxy is ready. Clones are the same.
#[derive(Clone, Debug)]
pub struct Readiness {
    latches: Arc<Latches>,
    draining: Draining,
}

#[derive(Debug, Default)]
struct Latches {
    listening: AtomicBool,
    discovered: AtomicBool,
}

// === impl Readiness ===

impl Readiness {
    /// Not ready yet.
    pub fn new(draining: Draining) -> Self {
        Self {
            latches: Arc::default(),
            draining,
        }
    }

    /// Clients are listened to.
    pub fn listening(&self) {
        self.latches.listening.store(true, Ordering::Release);
    }

    /// Every engine has been asked once.
    pub fn discovered(&self) {
        self.latches.discovered.store(true, Ordering::Release);
    }

    /// Why it is not ready; none if it is.
    pub fn missing(&self) -> Option<&'static str> {
        if self.draining.phase() > Phase::Running {
            Some("stopping\n")
        } else if !self.latches.listening.load(Ordering::Acquire) {
            Some("starting: not listening yet\n")
        } else if !self.latches.discovered.load(Ordering::Acquire) {
            Some("starting: engines have not been asked yet\n")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::drain;

    #[test]
    fn every_latch_counts() {
        let (drain, draining) = drain::channel();
        let ready = Readiness::new(draining);
        ready.discovered();
        assert_eq!(ready.missing(), Some("starting: not listening yet\n"));
        ready.listening();
        assert_eq!(ready.missing(), None);
        drain.advance(Phase::LameDuck);
        assert_eq!(ready.missing(), Some("stopping\n"));
    }
}
