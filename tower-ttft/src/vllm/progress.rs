//! Where a listener is in an engine's sequence of batches, and what the next message means.

/// The last batch that was applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Applied {
    pub(crate) seq: u64,
    /// The engine's clock in it: the proof that a sequence number still means the same batch.
    pub(crate) ts: f64,
}

/// A position in the stream of one publisher process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    last: Option<Applied>,
    /// The last sequence heard live on this connection.
    live: Option<u64>,
}

/// What a live message means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Live {
    /// The next one.
    Apply,
    /// Known already, from a replay.
    Drop,
    /// Others are missing before it.
    Gap,
    /// The sequence went back: another process publishes here.
    Restart,
}

/// What a replayed message means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replay {
    /// The next one.
    Apply,
    /// Known already.
    Drop,
    /// Others are missing before it.
    Hole,
    /// The sequence number that was known now names another batch.
    Restart,
}

// === impl Progress ===

impl Progress {
    pub(crate) fn last(&self) -> Option<Applied> {
        self.last
    }

    /// The sequence that is due.
    pub(crate) fn next(&self) -> u64 {
        self.last.map_or(0, |last| last.seq.saturating_add(1))
    }

    /// Where a replay should start: with the last batch that is known, which shows whether this is still the same
    /// process, or from the beginning.
    pub(crate) fn replay_from(&self) -> u64 {
        self.last.map_or(0, |last| last.seq)
    }

    /// A connection is new: nothing was heard on it.
    pub(crate) fn connected(&mut self) {
        self.live = None;
    }

    pub(crate) fn applied(&mut self, applied: Applied) {
        self.last = Some(applied);
    }

    /// Nothing is known any more.
    pub(crate) fn forget(&mut self) {
        self.last = None;
    }

    /// Judges a live message.
    ///
    /// A sequence that is not new is either a batch that a replay has brought already or the work of a new process that
    /// counts from 0 again. The new process's clock is later than all that was applied; and within one connection the
    /// live sequence never goes back.
    pub(crate) fn live(&mut self, seq: u64, ts: f64) -> Live {
        let before = self.live.replace(seq);
        let Some(last) = self.last else {
            return match seq {
                0 => Live::Apply,
                _ => Live::Gap,
            };
        };
        if seq > last.seq {
            return match seq == self.next() {
                true => Live::Apply,
                false => Live::Gap,
            };
        }
        let back = before.is_some_and(|before| seq <= before);
        let again = seq == last.seq && ts == last.ts;
        match !again && (ts > last.ts || back) {
            true => Live::Restart,
            false => Live::Drop,
        }
    }

    /// Judges a message of a replay that was asked for from [`Self::replay_from`].
    pub(crate) fn replayed(&self, seq: u64, ts: f64) -> Replay {
        let Some(last) = self.last else {
            return match seq {
                0 => Replay::Apply,
                _ => Replay::Hole,
            };
        };
        if seq > last.seq {
            return match seq == self.next() {
                false => Replay::Hole,
                true if ts < last.ts => Replay::Restart,
                true => Replay::Apply,
            };
        }
        match seq == last.seq && ts != last.ts {
            true => Replay::Restart,
            false => Replay::Drop,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seq: u64, ts: f64) -> Progress {
        let mut progress = Progress::default();
        progress.applied(Applied { seq, ts });
        progress
    }

    #[test]
    fn a_stream_from_its_beginning_needs_no_replay() {
        let mut progress = Progress::default();
        assert_eq!((progress.next(), progress.replay_from()), (0, 0));
        assert_eq!(progress.live(0, 1.0), Live::Apply);
        progress.applied(Applied { seq: 0, ts: 1.0 });
        assert_eq!(progress.live(1, 2.0), Live::Apply);
        progress.applied(Applied { seq: 1, ts: 2.0 });
        assert_eq!((progress.next(), progress.replay_from()), (2, 1));
        assert_eq!(progress.live(3, 4.0), Live::Gap);
    }

    #[test]
    fn joining_late_is_a_gap() {
        assert_eq!(Progress::default().live(7, 1.0), Live::Gap);
        assert_eq!(Progress::default().replayed(7, 1.0), Replay::Hole);
        assert_eq!(Progress::default().replayed(0, 1.0), Replay::Apply);
    }

    #[test]
    fn what_a_replay_has_brought_is_dropped_from_the_live_stream() {
        let mut progress = at(9, 90.0);
        progress.connected();
        for seq in 5..=9 {
            assert_eq!(progress.live(seq, seq as f64 * 10.0), Live::Drop, "{seq}");
        }
        assert_eq!(progress.live(10, 100.0), Live::Apply);
    }

    #[test]
    fn a_sequence_that_goes_back_is_a_new_process() {
        // By its clock, on a new connection.
        assert_eq!(at(9, 90.0).live(0, 95.0), Live::Restart);
        assert_eq!(at(9, 90.0).live(9, 95.0), Live::Restart);
        // Within a connection even if the clock stands still.
        let mut progress = at(8, 1.0);
        assert_eq!(progress.live(9, 1.0), Live::Apply);
        progress.applied(Applied { seq: 9, ts: 1.0 });
        assert_eq!(progress.live(0, 1.0), Live::Restart);
        // The very same message again is no restart.
        let mut progress = at(8, 1.0);
        assert_eq!(progress.live(9, 1.0), Live::Apply);
        progress.applied(Applied { seq: 9, ts: 1.0 });
        assert_eq!(progress.live(9, 1.0), Live::Drop);
    }

    #[test]
    fn a_replay_begins_with_a_witness() {
        let progress = at(9, 90.0);
        assert_eq!(progress.replayed(9, 90.0), Replay::Drop);
        assert_eq!(progress.replayed(10, 100.0), Replay::Apply);
        assert_eq!(progress.replayed(9, 95.0), Replay::Restart);
        assert_eq!(progress.replayed(10, 80.0), Replay::Restart);
        assert_eq!(progress.replayed(11, 110.0), Replay::Hole);
        assert_eq!(progress.replayed(3, 30.0), Replay::Drop);
    }

    #[test]
    fn the_last_sequence_there_is_does_not_overflow() {
        let mut progress = at(u64::MAX, 1.0);
        assert_eq!(progress.next(), u64::MAX);
        assert_eq!(progress.live(u64::MAX, 1.0), Live::Drop);
    }
}
