//! The table of first blocks: chain key to chunk. Readers probe it while the writer changes it.
use super::chunk::ChunkId;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// Open addressing over words of 32 bits of key and a chunk. An entry never moves and a place never becomes empty
/// again, so a probe that passes other entries always gets to its own; a table with too many tombstones is replaced.
pub(super) struct Heads {
    seed: u64,
    slots: Box<[AtomicU64]>,
}

/// The writer's count of what is in a table.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fill {
    live: usize,
    tombs: usize,
}

/// Chunks that may begin with a key.
pub(super) struct Candidates<'a> {
    heads: &'a Heads,
    at: usize,
    tag: u64,
    left: usize,
}

const EMPTY: u64 = 0;
const TOMB: u64 = 1;
/// Entries are above the two marks.
const FIRST: u64 = 2;

// === impl Heads ===

impl Heads {
    pub(super) fn new(seed: u64, live: usize) -> Self {
        let n = (live * 5 / 3 + 16).div_ceil(8) * 8;
        Self {
            seed,
            slots: (0..n).map(|_| AtomicU64::new(EMPTY)).collect(),
        }
    }

    /// Heap bytes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }

    /// Heap bytes of the table that would replace this one if it took one more entry.
    pub(super) fn growth(&self, fill: Fill) -> usize {
        if self.is_full(fill) {
            (fill.live * 5 / 3 + 24) * size_of::<AtomicU64>()
        } else {
            0
        }
    }

    /// Whether the table must be replaced before the next insertion.
    pub(super) fn is_full(&self, fill: Fill) -> bool {
        (fill.live + fill.tombs + 1) * 4 > self.slots.len() * 3
    }

    #[inline]
    fn place(&self, key: u64) -> (usize, u64) {
        let h = super::table::spread(self.seed, key);
        let at = ((u128::from(h) * self.slots.len() as u128) >> 64) as usize;
        (at, h << 32)
    }

    /// The chunks that may begin with a key; their own keys decide.
    #[inline]
    pub(super) fn candidates(&self, key: u64) -> Candidates<'_> {
        let (at, tag) = self.place(key);
        Candidates {
            heads: self,
            at,
            tag,
            left: self.slots.len(),
        }
    }

    /// Adds a chunk. The table must not be full.
    pub(super) fn insert(&self, fill: &mut Fill, key: u64, chunk: ChunkId) {
        let (mut at, tag) = self.place(key);
        for _ in 0..self.slots.len() {
            let slot = &self.slots[at];
            let word = slot.load(Relaxed);
            if word == EMPTY || word == TOMB {
                fill.tombs -= usize::from(word == TOMB);
                fill.live += 1;
                slot.store(tag | (u64::from(chunk) + FIRST), Release);
                return;
            }
            at = if at + 1 == self.slots.len() {
                0
            } else {
                at + 1
            };
        }
    }

    /// Takes a chunk out.
    pub(super) fn remove(&self, fill: &mut Fill, key: u64, chunk: ChunkId) {
        let (mut at, tag) = self.place(key);
        let entry = tag | (u64::from(chunk) + FIRST);
        for _ in 0..self.slots.len() {
            let slot = &self.slots[at];
            match slot.load(Relaxed) {
                word if word == entry => {
                    slot.store(TOMB, Release);
                    fill.live -= 1;
                    fill.tombs += 1;
                    return;
                }
                EMPTY => return,
                _ => {}
            }
            at = if at + 1 == self.slots.len() {
                0
            } else {
                at + 1
            };
        }
    }
}

// === impl Candidates ===

impl Iterator for Candidates<'_> {
    type Item = ChunkId;

    #[inline]
    fn next(&mut self) -> Option<ChunkId> {
        let slots = &self.heads.slots;
        while self.left > 0 {
            self.left -= 1;
            let word = slots[self.at].load(Acquire);
            self.at = if self.at + 1 == slots.len() {
                0
            } else {
                self.at + 1
            };
            if word == EMPTY {
                self.left = 0;
                return None;
            }
            let low = word & 0xFFFF_FFFF;
            if low >= FIRST && word ^ low == self.tag {
                return Some((low - FIRST) as ChunkId);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn churn_keeps_every_entry_findable() {
        let (mut heads, mut fill) = (Heads::new(5, 0), Fill::default());
        for round in 0..2_000u32 {
            if heads.is_full(fill) {
                let mut new = Fill::default();
                let bigger = Heads::new(5, fill.live);
                for c in round.saturating_sub(50)..round {
                    bigger.insert(&mut new, u64::from(c) * 7, c);
                }
                assert_eq!((new.live, new.tombs), (fill.live, 0));
                (heads, fill) = (bigger, new);
            }
            heads.insert(&mut fill, u64::from(round) * 7, round);
            if let Some(old) = round.checked_sub(50) {
                heads.remove(&mut fill, u64::from(old) * 7, old);
                assert!(!heads.candidates(u64::from(old) * 7).any(|c| c == old));
            }
            for c in round.saturating_sub(49)..=round {
                assert!(heads.candidates(u64::from(c) * 7).any(|x| x == c));
            }
        }
        assert!(heads.slots.len() < 200, "tombstones are cleaned up");
    }
}
