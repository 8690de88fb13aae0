//! Who holds the slots of a chunk, as runs of slots with the same set.
use super::sets::{EMPTY, SetId};

/// Slots of a chunk.
pub(super) const SLOTS: usize = 32;

/// The sets of all slots of a chunk. Runs of slots with the same set are stored once: a chunk that one holder has in
/// part and a thousand have whole takes two runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Runs {
    /// A bit where a run starts; bit 0 is always set.
    cuts: u32,
    /// One per run, in order.
    ids: [SetId; SLOTS],
}

/// The slots of a run.
#[inline]
pub(super) fn span_mask(from: usize, to: usize) -> u32 {
    let below = |n: usize| {
        if n >= SLOTS {
            u32::MAX
        } else {
            (1u32 << n) - 1
        }
    };
    below(to) & !below(from)
}

/// Where the run that starts at a slot ends.
#[inline]
pub(super) fn run_end(cuts: u32, start: usize) -> usize {
    let after = cuts & !span_mask(0, start + 1);
    (after.trailing_zeros() as usize).min(SLOTS)
}

/// Which run covers a slot.
#[inline]
pub(super) fn run_of(cuts: u32, slot: usize) -> usize {
    (cuts & span_mask(0, slot + 1)).count_ones().max(1) as usize - 1
}

// === impl Runs ===

impl Runs {
    /// One run.
    pub(super) fn uniform(id: SetId) -> Self {
        let mut ids = [EMPTY; SLOTS];
        ids[0] = id;
        Self { cuts: 1, ids }
    }

    /// As read from a chunk; `id` gives the set of each run.
    pub(super) fn read(cuts: u32, id: impl Fn(usize) -> SetId) -> Self {
        let mut runs = Self {
            cuts: cuts | 1,
            ids: [EMPTY; SLOTS],
        };
        for i in 0..runs.len() {
            runs.ids[i] = id(i);
        }
        runs
    }

    pub(super) fn cuts(&self) -> u32 {
        self.cuts
    }

    /// How many runs.
    pub(super) fn len(&self) -> usize {
        self.cuts.count_ones() as usize
    }

    /// The sets, one per run.
    pub(super) fn ids(&self) -> &[SetId] {
        &self.ids[..self.len()]
    }

    /// The slots whose set passes a test.
    pub(super) fn mask(&self, test: impl Fn(SetId) -> bool) -> u32 {
        let (mut mask, mut start) = (0, 0);
        for id in self.ids() {
            let end = run_end(self.cuts, start);
            if test(*id) {
                mask |= span_mask(start, end);
            }
            start = end;
        }
        mask
    }

    /// The slots that anyone holds.
    pub(super) fn alive(&self) -> u32 {
        self.mask(|id| id != EMPTY)
    }

    /// The set of a slot.
    pub(super) fn at(&self, slot: usize) -> SetId {
        self.ids[run_of(self.cuts, slot)]
    }

    /// The runs with the sets of some slots replaced.
    pub(super) fn edit(&self, mask: u32, mut replace: impl FnMut(SetId) -> SetId) -> Self {
        let mut new = Self {
            cuts: 0,
            ids: [EMPTY; SLOTS],
        };
        // Wherever a run or the mask changes, the result may.
        let mut bounds = self.cuts | (mask ^ (mask << 1)) | 1;
        let (mut n, mut last) = (0, None);
        while bounds != 0 {
            let slot = bounds.trailing_zeros() as usize;
            bounds &= bounds - 1;
            let mut id = self.at(slot);
            if mask >> slot & 1 == 1 {
                id = replace(id);
            }
            if last != Some(id) {
                new.cuts |= 1 << slot;
                new.ids[n] = id;
                n += 1;
                last = Some(id);
            }
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_an_array_of_sets(ops in prop::collection::vec((any::<u32>(), any::<u32>(), 0u32..4), 0..40)) {
            let (mut runs, mut model) = (Runs::uniform(EMPTY), [EMPTY; SLOTS]);
            for (a, b, id) in ops {
                let mask = a & b;
                runs = runs.edit(mask, |_| id);
                for (slot, m) in model.iter_mut().enumerate() {
                    if mask >> slot & 1 == 1 { *m = id; }
                }
                for (slot, m) in model.iter().enumerate() {
                    prop_assert_eq!(runs.at(slot), *m);
                }
                prop_assert!(runs.ids().windows(2).all(|w| w[0] != w[1]), "runs are as long as they can be");
                let again = Runs::read(runs.cuts(), |i| runs.ids()[i]);
                prop_assert_eq!(again, runs);
                for want in 0..4 {
                    let mask = (0..SLOTS).fold(0, |m, s| m | u32::from(model[s] == want) << s);
                    prop_assert_eq!(runs.mask(|id| id == want), mask);
                }
            }
        }
    }
}
