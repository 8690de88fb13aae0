//! What has become of the requests so far: written by the load, read by the display and in the end by the statistics.
//! Times are pod seconds.

use super::client::Usage;
use parking_lot::Mutex;

/// One way to send requests to pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arm {
    /// Through the gateway.
    Forebay,
    /// To a random pod.
    Service,
}

/// A request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sample {
    /// When it was sent.
    pub(super) at: f64,
    /// To its first token, once that has come.
    pub(super) ttft: Option<f64>,
    /// What was counted, once it has ended well.
    pub(super) usage: Option<Usage>,
    /// Why it failed, if it did.
    pub(super) failed: Option<String>,
}

/// The requests of both arms.
#[derive(Debug, Default)]
pub(super) struct Board {
    forebay: Mutex<Vec<Sample>>,
    service: Mutex<Vec<Sample>>,
}

// === impl Arm ===

impl Arm {
    /// Both.
    pub(super) const ALL: [Self; 2] = [Self::Forebay, Self::Service];

    /// For tables and files.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Forebay => "forebay",
            Self::Service => "random",
        }
    }
}

// === impl Board ===

impl Board {
    /// Adds the next request; requests have numbers from 0.
    pub(super) fn sent(&self, arm: Arm, at: f64) {
        let sample = Sample {
            at,
            ..Sample::default()
        };
        self.of(arm).lock().push(sample);
    }

    /// Changes what is known of a request.
    pub(super) fn note(&self, arm: Arm, id: u64, change: impl FnOnce(&mut Sample)) {
        if let Some(sample) = self.of(arm).lock().get_mut(id as usize) {
            change(sample);
        }
    }

    /// All requests so far.
    pub(super) fn samples(&self, arm: Arm) -> Vec<Sample> {
        self.of(arm).lock().clone()
    }

    fn of(&self, arm: Arm) -> &Mutex<Vec<Sample>> {
        match arm {
            Arm::Forebay => &self.forebay,
            Arm::Service => &self.service,
        }
    }
}
