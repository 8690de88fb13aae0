//! Compares what was thought of an answer with what the engine says of it.

use serde::Serialize;

/// Answers to look at before saying that an audit is on.
const ENOUGH: f64 = 0.9;

/// Whether residency and token counts are audited: it takes `--enable-prompt-tokens-details` on the engine and usage in
/// the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditState {
    /// No answer tells.
    #[default]
    Off,
    /// Some do.
    Partial,
    /// Nearly all do.
    On,
}

/// How an endpoint's answers compared with what was predicted of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AuditCounts {
    /// Complete answers.
    pub answers: u64,
    /// Of these, with `cached_tokens`.
    pub audited: u64,
    /// As many cached tokens as predicted.
    pub equal: u64,
    /// Predicted more than there were.
    pub over: u64,
    /// Predicted fewer than there were.
    pub under: u64,
    /// Prompts whose number of tokens was counted exactly here and differs at the engine.
    pub token_mismatch: u64,
    /// Times that an endpoint's residency was forgotten because answers denied it.
    pub distrusted: u64,
}

/// The outcome of one comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Audited {
    Equal,
    Over,
    Under,
}

/// An endpoint's audit.
#[derive(Debug, Default)]
pub(crate) struct Audit {
    pub(crate) counts: AuditCounts,
    /// Share of recent answers that tell.
    share: f64,
    seen: u64,
    /// Answers in a row that denied most of what exact knowledge had promised.
    strikes: u32,
}

// === impl Audit ===

impl Audit {
    pub(crate) fn state(&self) -> AuditState {
        if self.counts.audited == 0 {
            AuditState::Off
        } else if self.share >= ENOUGH {
            AuditState::On
        } else {
            AuditState::Partial
        }
    }

    /// A complete answer, with or without cached tokens.
    pub(crate) fn answer(&mut self, predicted: u32, reported: Option<u32>) -> Option<Audited> {
        self.counts.answers += 1;
        self.seen += 1;
        let told = f64::from(u8::from(reported.is_some()));
        self.share += (told - self.share) * (1.0 / self.seen as f64).max(0.05);
        let reported = reported?;
        self.counts.audited += 1;
        Some(match predicted.cmp(&reported) {
            std::cmp::Ordering::Equal => {
                self.counts.equal += 1;
                Audited::Equal
            }
            std::cmp::Ordering::Greater => {
                self.counts.over += 1;
                Audited::Over
            }
            std::cmp::Ordering::Less => {
                self.counts.under += 1;
                Audited::Under
            }
        })
    }

    /// Exact knowledge promised `promised` tokens and the answer had `reported`, though nothing announced that the cache
    /// was emptied. True when this happened so often that the knowledge must be wrong.
    pub(crate) fn denied(&mut self, promised: u32, reported: u32) -> bool {
        if promised == 0 || reported.saturating_mul(4) >= promised {
            if promised > 0 {
                self.strikes = 0;
            }
            return false;
        }
        self.strikes += 1;
        if self.strikes < 2 {
            return false;
        }
        self.strikes = 0;
        self.counts.distrusted += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_off_partial_or_on() {
        let mut a = Audit::default();
        assert_eq!(a.state(), AuditState::Off);
        for _ in 0..10 {
            a.answer(16, None);
        }
        assert_eq!(a.state(), AuditState::Off);
        assert_eq!(a.answer(16, Some(16)), Some(Audited::Equal));
        assert_eq!(a.state(), AuditState::Partial);
        for _ in 0..60 {
            a.answer(16, Some(0));
        }
        assert_eq!(a.state(), AuditState::On);
        assert_eq!((a.counts.equal, a.counts.over, a.counts.under), (1, 60, 0));
    }

    #[test]
    fn two_denials_in_a_row_are_enough() {
        let mut a = Audit::default();
        assert!(!a.denied(1000, 0));
        assert!(!a.denied(1000, 900), "the second one was fine");
        assert!(!a.denied(1000, 0));
        assert!(!a.denied(0, 0), "nothing was promised");
        assert!(a.denied(1000, 100));
    }
}
