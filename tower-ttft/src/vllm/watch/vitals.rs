//! Whether an engine is there, judged from what its connections did.

/// What a probe saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// It accepted a connection.
    Connected,
    /// It answered.
    Answered,
    /// Nobody listens.
    Refused,
    /// It accepted and broke the connection.
    Reset,
    /// Neither yes nor no.
    Unreachable,
}

/// What to make of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// As far as anyone can tell it lives; it may be slow.
    Alive,
    /// Look again at once.
    Suspect,
    /// The process is gone.
    Gone,
    /// It cannot be reached, for long enough that nobody should be sent there.
    Unreachable,
}

/// The evidence so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Vitals {
    refused: u32,
    reset: u32,
    unreachable: u32,
}

/// Refusals in a row that are a death; one is enough if the event socket is lost too.
const DEATH: u32 = 2;
/// Probes in a row without yes or no after which it counts as unreachable.
const PATIENCE: u32 = 5;

// === impl Vitals ===

impl Vitals {
    /// Takes evidence in. `events_down` tells whether the event socket was had and is lost.
    pub(crate) fn observe(&mut self, evidence: Evidence, events_down: bool) -> Verdict {
        match evidence {
            Evidence::Answered => *self = Self::default(),
            // A listening port ends a row of refusals. It proves nothing against resets, which come after it.
            Evidence::Connected => {
                self.refused = 0;
                self.unreachable = 0;
            }
            Evidence::Refused => self.refused += 1,
            Evidence::Reset => self.reset += 1,
            Evidence::Unreachable => self.unreachable += 1,
        }
        let gone = self.refused.saturating_add(self.reset);
        if gone >= DEATH || (gone > 0 && events_down) {
            Verdict::Gone
        } else if gone > 0 {
            Verdict::Suspect
        } else if self.unreachable >= PATIENCE {
            Verdict::Unreachable
        } else {
            Verdict::Alive
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Evidence::*, *};

    fn verdicts(evidence: &[Evidence], events_down: bool) -> Vec<Verdict> {
        let mut vitals = Vitals::default();
        evidence
            .iter()
            .map(|e| vitals.observe(*e, events_down))
            .collect()
    }

    #[test]
    fn two_refusals_in_a_row_are_a_death() {
        use Verdict::*;
        assert_eq!(verdicts(&[Refused, Refused], false), [Suspect, Gone]);
        assert_eq!(verdicts(&[Reset, Refused], false), [Suspect, Gone]);
        assert_eq!(
            verdicts(&[Refused, Connected, Refused], false),
            [Suspect, Alive, Suspect]
        );
        assert_eq!(
            verdicts(&[Refused, Answered, Reset], false),
            [Suspect, Alive, Suspect]
        );
    }

    #[test]
    fn resets_are_counted_across_the_connections_that_they_end() {
        use Verdict::*;
        assert_eq!(
            verdicts(&[Connected, Reset, Connected, Reset], false),
            [Alive, Suspect, Suspect, Gone]
        );
        assert_eq!(
            verdicts(&[Connected, Reset, Connected, Answered], false),
            [Alive, Suspect, Suspect, Alive]
        );
    }

    #[test]
    fn one_is_enough_without_the_event_socket() {
        assert_eq!(verdicts(&[Refused], true), [Verdict::Gone]);
        assert_eq!(verdicts(&[Reset], true), [Verdict::Gone]);
        assert_eq!(
            verdicts(&[Connected, Answered, Unreachable], true),
            [Verdict::Alive; 3]
        );
    }

    #[test]
    fn slowness_is_never_a_death() {
        let mut many = verdicts(&[Unreachable; 100], true);
        assert_eq!(many.split_off(4), [Verdict::Unreachable; 96]);
        assert_eq!(many, [Verdict::Alive; 4]);
        assert_eq!(verdicts(&[Connected; 100], true), [Verdict::Alive; 100]);
    }
}
