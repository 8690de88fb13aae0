//! Hash tables of the writer, small in bytes and growing in small steps.
use super::bytes::vec_bytes;

/// No block, no value.
pub(super) const NIL: u32 = u32::MAX;

/// A table of `u32` whose keys live elsewhere: the caller compares and hashes. One cache line per search, mostly.
///
/// Twelve one-byte tags and twelve values share a line; what does not fit goes to the next line and is counted in
/// those that it passed by, so that a removal leaves no tombstone and moves nothing (the idea is F14's). It is cut into
/// segments that grow by an eighth each: no long pause, no doubling.
pub(super) struct RefTable {
    segments: Box<[Segment]>,
    bytes: usize,
}

#[derive(Default)]
struct Segment {
    buckets: Vec<Bucket>,
    used: usize,
}

#[derive(Clone)]
#[repr(align(64))]
struct Bucket {
    /// 0 is free.
    tags: [u8; WIDTH],
    /// Entries that found this bucket full on their way; [`u8::MAX`] sticks.
    passed: u8,
    values: [u32; WIDTH],
}

/// A map from an engine's block ids to `u32`, with the keys inside: linear probing, no tombstones.
#[derive(Default)]
pub(super) struct IdMap {
    seed: u64,
    keys: Vec<u64>,
    values: Vec<u32>,
    used: usize,
}

const WIDTH: usize = 12;
const SEGMENT_BITS: u32 = 6;

/// Spreads a key over 64 bits.
#[inline]
pub(super) fn spread(seed: u64, key: u64) -> u64 {
    let x = u128::from(key ^ seed) * 0x9E37_79B9_7F4A_7C15;
    let y = ((x as u64) ^ ((x >> 64) as u64)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    y ^ (y >> 32)
}

/// Maps the low half of a hash to `0..n`.
#[inline]
fn reduce(hash: u64, n: usize) -> usize {
    (((hash & 0xFFFF_FFFF) * n as u64) >> 32) as usize
}

// === impl RefTable ===

impl RefTable {
    pub(super) fn new() -> Self {
        let segments: Box<[Segment]> = (0..1 << SEGMENT_BITS).map(|_| Segment::default()).collect();
        Self {
            bytes: size_of_val(&*segments),
            segments,
        }
    }

    /// Heap bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes by which an insertion of this hash would grow the table, while both old and new exist.
    pub(super) fn growth(&self, hash: u64) -> usize {
        let s = &self.segments[segment(hash)];
        if s.is_full() {
            s.next_size() * size_of::<Bucket>()
        } else {
            0
        }
    }

    /// The value under a hash that `eq` accepts.
    #[inline]
    pub(super) fn find(&self, hash: u64, eq: impl Fn(u32) -> bool) -> Option<u32> {
        let s = &self.segments[segment(hash)];
        let n = s.buckets.len();
        if n == 0 {
            return None;
        }
        let (tag, mut b) = (tag(hash), reduce(hash, n));
        for _ in 0..n {
            let bucket = &s.buckets[b];
            let mut hits = bucket.hits(tag);
            while hits != 0 {
                let value = bucket.values[hits.trailing_zeros() as usize];
                if eq(value) {
                    return Some(value);
                }
                hits &= hits - 1;
            }
            if bucket.passed == 0 {
                return None;
            }
            b = if b + 1 == n { 0 } else { b + 1 };
        }
        None
    }

    /// Adds a value that is not in the table; `rehash` gives the hash of any value in it.
    pub(super) fn insert(&mut self, hash: u64, value: u32, rehash: impl Fn(u32) -> u64) {
        let s = &mut self.segments[segment(hash)];
        if s.is_full() {
            self.bytes += s.grow(rehash);
        }
        s.put(hash, value);
    }

    /// Takes a value out; tells whether it was there.
    pub(super) fn remove(&mut self, hash: u64, value: u32) -> bool {
        self.segments[segment(hash)].take(hash, value)
    }
}

#[inline]
fn segment(hash: u64) -> usize {
    (hash >> (64 - SEGMENT_BITS)) as usize
}

/// From bits that neither the segment nor the bucket uses.
#[inline]
fn tag(hash: u64) -> u8 {
    ((hash >> 40) as u8).max(1)
}

// === impl Segment ===

impl Segment {
    #[inline]
    fn is_full(&self) -> bool {
        self.used * 8 >= self.buckets.len() * WIDTH * 7
    }

    fn next_size(&self) -> usize {
        self.buckets.len() + self.buckets.len() / 8 + 1
    }

    /// Returns the bytes that it grew by.
    fn grow(&mut self, rehash: impl Fn(u32) -> u64) -> usize {
        let mut buckets = Vec::new();
        buckets.reserve_exact(self.next_size());
        buckets.resize(self.next_size(), Bucket::EMPTY);
        let old = std::mem::replace(&mut self.buckets, buckets);
        self.used = 0;
        for bucket in &old {
            for (tag, value) in bucket.tags.iter().zip(bucket.values) {
                if *tag != 0 {
                    self.put(rehash(value), value);
                }
            }
        }
        vec_bytes(&self.buckets) - vec_bytes(&old)
    }

    fn put(&mut self, hash: u64, value: u32) {
        let n = self.buckets.len();
        let mut b = reduce(hash, n);
        for _ in 0..n {
            let bucket = &mut self.buckets[b];
            if let Some(i) = bucket.tags.iter().position(|t| *t == 0) {
                bucket.tags[i] = tag(hash);
                bucket.values[i] = value;
                self.used += 1;
                return;
            }
            bucket.passed = bucket.passed.saturating_add(1);
            b = if b + 1 == n { 0 } else { b + 1 };
        }
    }

    fn take(&mut self, hash: u64, value: u32) -> bool {
        let n = self.buckets.len();
        if n == 0 {
            return false;
        }
        let home = reduce(hash, n);
        let mut found = None;
        for step in 0..n {
            let bucket = &mut self.buckets[(home + step) % n];
            let hit = (0..WIDTH).find(|i| bucket.tags[*i] != 0 && bucket.values[*i] == value);
            if let Some(i) = hit {
                bucket.tags[i] = 0;
                bucket.values[i] = NIL;
                self.used -= 1;
                found = Some(step);
                break;
            }
            if bucket.passed == 0 {
                break;
            }
        }
        for step in 0..found.unwrap_or(0) {
            let bucket = &mut self.buckets[(home + step) % n];
            if bucket.passed != u8::MAX {
                bucket.passed -= 1;
            }
        }
        found.is_some()
    }
}

// === impl Bucket ===

impl Bucket {
    const EMPTY: Self = Self {
        tags: [0; WIDTH],
        passed: 0,
        values: [NIL; WIDTH],
    };

    /// A bit per slot with that tag.
    #[inline]
    fn hits(&self, tag: u8) -> u32 {
        let mut bits = 0;
        for (i, t) in self.tags.iter().enumerate() {
            bits |= u32::from(*t == tag) << i;
        }
        bits
    }
}

// === impl IdMap ===

impl IdMap {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            seed,
            ..Self::default()
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    pub(super) fn len(&self) -> usize {
        self.used
    }

    /// Heap bytes.
    pub(super) fn bytes(&self) -> usize {
        vec_bytes(&self.keys) + vec_bytes(&self.values)
    }

    /// Bytes by which one more key would grow the map, while both old and new exist.
    pub(super) fn growth(&self) -> usize {
        if self.is_full() {
            self.next_size() * (size_of::<u64>() + size_of::<u32>())
        } else {
            0
        }
    }

    pub(super) fn get(&self, key: u64) -> Option<u32> {
        let value = *self.values.get(self.slot(key)?)?;
        (value != NIL).then_some(value)
    }

    /// Sets a key's value; [`NIL`] is no value.
    pub(super) fn insert(&mut self, key: u64, value: u32) {
        debug_assert_ne!(value, NIL);
        if self.is_full() {
            self.grow();
        }
        if let Some(i) = self.slot(key) {
            self.used += usize::from(self.values[i] == NIL);
            self.keys[i] = key;
            self.values[i] = value;
        }
    }

    pub(super) fn remove(&mut self, key: u64) -> Option<u32> {
        let n = self.values.len();
        let mut gap = self.slot(key)?;
        let value = std::mem::replace(&mut self.values[gap], NIL);
        if value == NIL {
            return None;
        }
        self.used -= 1;
        // Move back what would no longer be found behind the gap.
        let mut i = gap;
        loop {
            i = if i + 1 == n { 0 } else { i + 1 };
            if self.values[i] == NIL {
                return Some(value);
            }
            let home = reduce(spread(self.seed, self.keys[i]), n);
            if (i + n - home) % n >= (i + n - gap) % n {
                self.keys[gap] = self.keys[i];
                self.values[gap] = std::mem::replace(&mut self.values[i], NIL);
                gap = i;
            }
        }
    }

    fn is_full(&self) -> bool {
        self.used * 5 >= self.values.len() * 4
    }

    fn next_size(&self) -> usize {
        self.values.len() + self.values.len() / 4 + 8
    }

    fn grow(&mut self) {
        let n = self.next_size();
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        keys.reserve_exact(n);
        keys.resize(n, 0);
        values.reserve_exact(n);
        values.resize(n, NIL);
        let keys = std::mem::replace(&mut self.keys, keys);
        let values = std::mem::replace(&mut self.values, values);
        for (key, value) in keys.into_iter().zip(values) {
            if value != NIL
                && let Some(i) = self.slot(key)
            {
                self.keys[i] = key;
                self.values[i] = value;
            }
        }
    }

    /// Where a key is, or would go. There is always a free place, but in an empty map.
    fn slot(&self, key: u64) -> Option<usize> {
        let n = self.values.len();
        if n == 0 {
            return None;
        }
        let mut i = reduce(spread(self.seed, key), n);
        while self.values[i] != NIL && self.keys[i] != key {
            i = if i + 1 == n { 0 } else { i + 1 };
        }
        Some(i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        #[test]
        fn an_id_map_is_a_map(ops in prop::collection::vec((0u64..60, 0u32..5, any::<bool>()), 0..600)) {
            let (mut map, mut model) = (IdMap::new(3), HashMap::new());
            for (key, value, insert) in ops {
                if insert {
                    map.insert(key, value);
                    model.insert(key, value);
                } else {
                    prop_assert_eq!(map.remove(key), model.remove(&key));
                }
                prop_assert_eq!(map.len(), model.len());
                for k in 0..60 {
                    prop_assert_eq!(map.get(k), model.get(&k).copied());
                }
            }
        }

        /// Few distinct hashes: buckets overflow into their neighbours all the time.
        #[test]
        fn a_ref_table_is_a_set(ops in prop::collection::vec((0u32..300, any::<bool>()), 0..900), clash in 1u64..8) {
            let hash = |v: u32| spread(1, u64::from(v) % clash);
            let (mut table, mut model) = (RefTable::new(), HashMap::new());
            for (value, insert) in ops {
                let known = model.contains_key(&value);
                if insert && !known {
                    table.insert(hash(value), value, hash);
                    model.insert(value, ());
                } else if !insert {
                    prop_assert_eq!(table.remove(hash(value), value), known);
                    model.remove(&value);
                }
            }
            for v in 0..300 {
                let found = table.find(hash(v), |x| x == v);
                prop_assert_eq!(found.is_some(), model.contains_key(&v));
            }
        }
    }

    #[test]
    fn tables_say_what_they_take() {
        let mut table = RefTable::new();
        let before = table.bytes();
        for v in 0..10_000u32 {
            table.insert(spread(9, v.into()), v, |v| spread(9, v.into()));
        }
        let each = (table.bytes() - before) as f64 / 10_000.0;
        assert!((5.3..8.5).contains(&each), "{each} bytes each");
        let buckets: usize = table.segments.iter().map(|s| s.buckets.capacity()).sum();
        assert_eq!(table.bytes(), before + buckets * 64);
    }
}
