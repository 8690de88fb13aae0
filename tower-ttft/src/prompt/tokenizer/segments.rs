//! Ids of text segments that were tokenized before.
//!
//! Added tokens cut a text into segments that are tokenized each for itself, so a segment's ids depend on nothing
//! around it. A system prompt that all conversations share is one entry, and the ninth turn of a conversation finds the
//! eight before it. Text is not kept: a keyed 128-bit hash names a segment. Should two collide, routing takes a prompt
//! for another; the seed keeps users from finding such pairs.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::Arc,
};
use twox_hash::XxHash3_128;

/// What an entry takes besides its ids: key, pointer, length, reference counts and the map's own share.
const ENTRY_BYTES: usize = 96;

/// The name of a segment.
type Key = u128;

/// Segments by name, bounded in bytes. Two generations: what is used moves to the young one; when that is full the old
/// one goes as a whole. An entry that is used lives on, one that is not is gone after two fills.
pub(super) struct Segments {
    seed: u64,
    /// Bytes of one generation.
    limit: usize,
    generations: Mutex<Generations>,
}

#[derive(Default)]
struct Generations {
    young: Generation,
    old: Generation,
    stats: SegmentCacheStats,
}

#[derive(Default)]
struct Generation {
    entries: HashMap<Key, Arc<[u32]>, BuildHasherDefault<KeyHasher>>,
    bytes: usize,
}

/// What a segment cache did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentCacheStats {
    /// Bytes of text whose ids were found.
    pub hit_bytes: u64,
    /// Bytes of text that had to be tokenized.
    pub miss_bytes: u64,
    /// Entries now.
    pub entries: usize,
    /// Bytes that they take now, about.
    pub bytes: usize,
}

/// Keys are hashes already.
#[derive(Default)]
struct KeyHasher(u64);

// === impl Segments ===

impl Segments {
    pub(super) fn new(bytes: usize, seed: u64) -> Self {
        Self {
            seed,
            limit: bytes / 2,
            generations: Mutex::default(),
        }
    }

    pub(super) fn key(&self, text: &str) -> Key {
        XxHash3_128::oneshot_with_seed(self.seed, text.as_bytes())
    }

    /// Looks up many segments under one lock; each found entry counts as used.
    pub(super) fn get_all<'a>(
        &self,
        wanted: impl Iterator<Item = (Key, usize)> + 'a,
    ) -> Vec<Option<Arc<[u32]>>> {
        let mut g = self.generations.lock();
        wanted
            .map(|(key, bytes)| {
                let found = g.get(key, self.limit);
                match &found {
                    Some(_) => g.stats.hit_bytes += bytes as u64,
                    None => g.stats.miss_bytes += bytes as u64,
                }
                found
            })
            .collect()
    }

    /// How many bytes of these segments are not there. Counts nothing as used.
    pub(super) fn missing(&self, wanted: impl Iterator<Item = (Key, usize)>) -> usize {
        let g = self.generations.lock();
        wanted
            .filter(|(key, _)| {
                !g.young.entries.contains_key(key) && !g.old.entries.contains_key(key)
            })
            .map(|(_, bytes)| bytes)
            .sum()
    }

    pub(super) fn insert_all(&self, new: impl Iterator<Item = (Key, Arc<[u32]>)>) {
        let mut g = self.generations.lock();
        for (key, ids) in new {
            g.insert(key, ids, self.limit);
        }
    }

    pub(super) fn stats(&self) -> SegmentCacheStats {
        let g = self.generations.lock();
        SegmentCacheStats {
            entries: g.young.entries.len() + g.old.entries.len(),
            bytes: g.young.bytes + g.old.bytes,
            ..g.stats
        }
    }
}

// === impl Generations ===

impl Generations {
    fn get(&mut self, key: Key, limit: usize) -> Option<Arc<[u32]>> {
        if let Some(ids) = self.young.entries.get(&key) {
            return Some(ids.clone());
        }
        let ids = self.old.entries.remove(&key)?;
        self.old.bytes = self.old.bytes.saturating_sub(size(&ids));
        self.insert(key, ids.clone(), limit);
        Some(ids)
    }

    fn insert(&mut self, key: Key, ids: Arc<[u32]>, limit: usize) {
        let size = size(&ids);
        if size > limit {
            return;
        }
        if self.young.bytes + size > limit {
            self.old = std::mem::take(&mut self.young);
        }
        if self.young.entries.insert(key, ids).is_none() {
            self.young.bytes += size;
        }
    }
}

fn size(ids: &[u32]) -> usize {
    ENTRY_BYTES + std::mem::size_of_val(ids)
}

// === impl KeyHasher ===

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*b);
        }
    }

    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(n: usize) -> Arc<[u32]> {
        (0..n as u32).collect()
    }

    fn put(s: &Segments, text: &str, n: usize) {
        s.insert_all(std::iter::once((s.key(text), ids(n))));
    }

    fn has(s: &Segments, text: &str) -> bool {
        s.get_all(std::iter::once((s.key(text), text.len())))
            .pop()
            .flatten()
            .is_some()
    }

    #[test]
    fn bytes_are_bounded_and_used_entries_stay() {
        let s = Segments::new(20_000, 7);
        put(&s, "kept", 10);
        for i in 0..1_000 {
            put(&s, &format!("other {i}"), 100);
            assert!(s.stats().bytes <= 20_000, "{:?}", s.stats());
            assert!(has(&s, "kept"), "after {i}");
        }
        assert!(!has(&s, "other 0"));
        assert!(has(&s, "other 999"));
        put(&s, "too large for it", 100_000);
        assert!(!has(&s, "too large for it"));
        assert!(s.stats().bytes <= 20_000);
    }

    #[test]
    fn the_same_entry_twice_counts_once() {
        let s = Segments::new(20_000, 7);
        put(&s, "a", 10);
        put(&s, "a", 10);
        assert_eq!(s.stats().entries, 1);
        assert_eq!(s.stats().bytes, size(&ids(10)));
    }

    #[test]
    fn keys_depend_on_the_seed() {
        assert_ne!(Segments::new(0, 1).key("a"), Segments::new(0, 2).key("a"));
    }

    #[test]
    fn missing_counts_without_use() {
        let s = Segments::new(20_000, 7);
        put(&s, "here", 1);
        let wanted = ["here", "gone"].map(|t| (s.key(t), t.len()));
        assert_eq!(s.missing(wanted.into_iter()), 4);
        assert_eq!(s.stats().hit_bytes + s.stats().miss_bytes, 0);
    }
}
