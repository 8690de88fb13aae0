//! Interned sets of holders: equal sets have equal ids, so that most of the index compares ids instead of sets.
use super::{
    bytes::vec_bytes,
    pages::Pages,
    table::{RefTable, spread},
};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A set's name: 0 is the empty set; with the top bit set it names its only holder; else size class and place.
pub(super) type SetId = u32;

/// The empty set.
pub(super) const EMPTY: SetId = 0;

/// The words of the sets, for readers. A set's words never change while a chunk refers to it.
pub(super) struct SetWords {
    classes: [Pages<AtomicU64, PAGE_WORDS>; CLASSES],
}

/// The writer's half: who is where, how often referred to.
pub(super) struct Sets {
    seed: u64,
    classes: [Class; CLASSES],
    table: RefTable,
    memo: Box<[(u64, SetId)]>,
    scratch: Vec<u64>,
    live: usize,
    dead: usize,
    page_bytes: usize,
}

#[derive(Default)]
struct Class {
    /// References per place; [`FREE`] is none at all.
    refs: Vec<u32>,
    free: Vec<u32>,
}

/// Sets of 1, 2, 4 … 1,024 words.
const CLASSES: usize = 11;
const CLASS_SHIFT: u32 = 26;
const PAGE_WORDS: usize = 1024;
const SINGLE: u32 = 1 << 31;
const FREE: u32 = u32::MAX;
const MEMO: usize = 1024;

#[inline]
fn single(holder: u16) -> SetId {
    SINGLE | u32::from(holder)
}

/// The holder that a set consists of, if it names one.
#[inline]
pub(super) fn only(id: SetId) -> Option<u16> {
    (id & SINGLE != 0).then_some(id as u16)
}

#[inline]
fn place(id: SetId) -> (usize, usize) {
    let class = ((id >> CLASS_SHIFT) as usize).wrapping_sub(1);
    (class, (id & ((1 << CLASS_SHIFT) - 1)) as usize)
}

// === impl SetWords ===

impl SetWords {
    pub(super) fn new() -> Self {
        Self {
            classes: std::array::from_fn(|_| Pages::new()),
        }
    }

    /// Heap bytes while there are no sets.
    pub(super) const BASE_BYTES: usize = CLASSES * Pages::<AtomicU64, PAGE_WORDS>::BASE_BYTES;

    /// The words of a set that is neither empty nor a single holder. A reader may come too late and see any words: it
    /// finds out by its chunk's version.
    #[inline]
    pub(super) fn words(&self, id: SetId) -> &[AtomicU64] {
        let (class, i) = place(id);
        match self.classes.get(class) {
            Some(pages) => pages.slice(i << class, 1 << class).unwrap_or(&[]),
            None => &[],
        }
    }

    #[inline]
    pub(super) fn contains(&self, id: SetId, holder: u16) -> bool {
        match only(id) {
            Some(h) => h == holder,
            None if id == EMPTY => false,
            None => self
                .words(id)
                .get(usize::from(holder) / 64)
                .is_some_and(|w| w.load(Relaxed) >> (holder % 64) & 1 == 1),
        }
    }
}

// === impl Sets ===

impl Sets {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            seed,
            classes: Default::default(),
            table: RefTable::new(),
            memo: vec![(u64::MAX, EMPTY); MEMO].into_boxed_slice(),
            scratch: Vec::new(),
            live: 0,
            dead: 0,
            page_bytes: SetWords::BASE_BYTES,
        }
    }

    /// Heap bytes, the readers' words too.
    pub(super) fn bytes(&self) -> usize {
        let places: usize = self
            .classes
            .iter()
            .map(|c| vec_bytes(&c.refs) + vec_bytes(&c.free))
            .sum();
        let memo = size_of_val(&*self.memo);
        self.page_bytes + places + self.table.bytes() + memo + vec_bytes(&self.scratch)
    }

    /// Interned sets in use.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// The set with a holder more.
    pub(super) fn with(&mut self, words: &SetWords, id: SetId, holder: u16) -> SetId {
        if id == EMPTY {
            return single(holder);
        }
        if words.contains(id, holder) {
            return id;
        }
        self.toggled(words, id, holder)
    }

    /// The set with a holder less.
    pub(super) fn without(&mut self, words: &SetWords, id: SetId, holder: u16) -> SetId {
        if !words.contains(id, holder) {
            return id;
        }
        if id == single(holder) {
            return EMPTY;
        }
        self.toggled(words, id, holder)
    }

    fn toggled(&mut self, words: &SetWords, id: SetId, holder: u16) -> SetId {
        let key = u64::from(id) << 16 | u64::from(holder);
        let m = spread(0, key) as usize % MEMO;
        if self.memo[m].0 == key {
            return self.memo[m].1;
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        match only(id) {
            Some(h) => flip(&mut scratch, h),
            None => scratch.extend(words.words(id).iter().map(|w| w.load(Relaxed))),
        }
        flip(&mut scratch, holder);
        let new = self.intern(words, &mut scratch);
        self.scratch = scratch;
        self.memo[m] = (key, new);
        new
    }

    /// The id of the set with these bits.
    fn intern(&mut self, words: &SetWords, bits: &mut Vec<u64>) -> SetId {
        while bits.last() == Some(&0) {
            bits.pop();
        }
        match bits.iter().map(|w| w.count_ones()).sum::<u32>() {
            0 => return EMPTY,
            1 => {
                let w = bits.len() - 1;
                return single((w * 64) as u16 + bits[w].trailing_zeros() as u16);
            }
            _ => {}
        }
        bits.resize(bits.len().next_power_of_two(), 0);
        let hash = hash(self.seed, bits.iter().copied());
        let same = |id: SetId| {
            let w = words.words(id);
            w.len() == bits.len() && w.iter().zip(&*bits).all(|(a, b)| a.load(Relaxed) == *b)
        };
        if let Some(id) = self.table.find(hash, same) {
            return id;
        }
        let class = bits.len().trailing_zeros() as usize;
        let c = &mut self.classes[class];
        let i = c.free.pop().unwrap_or_else(|| {
            c.refs.push(FREE);
            c.refs.len() as u32 - 1
        });
        // 2^26 places per class, more than there are chunks: the pages always reach.
        let grown = words.classes[class].ensure((i as usize) << class, || AtomicU64::new(0));
        self.page_bytes += grown.unwrap_or(0);
        c.refs[i as usize] = 0;
        self.dead += 1;
        let id = (class as u32 + 1) << CLASS_SHIFT | i;
        for (w, b) in words.words(id).iter().zip(bits) {
            w.store(*b, Relaxed);
        }
        let seed = self.seed;
        self.table.insert(hash, id, |id| hash_of(seed, words, id));
        id
    }

    /// One more reference.
    pub(super) fn retain(&mut self, id: SetId) {
        if let Some(n) = self.refs(id) {
            *n += 1;
            if *n == 1 {
                self.dead -= 1;
                self.live += 1;
            }
        }
    }

    /// One reference less. The set stays interned until the next [`Sets::sweep`].
    pub(super) fn release(&mut self, id: SetId) {
        if let Some(n) = self.refs(id) {
            *n -= 1;
            if *n == 0 {
                self.dead += 1;
                self.live -= 1;
            }
        }
    }

    fn refs(&mut self, id: SetId) -> Option<&mut u32> {
        if id == EMPTY || id & SINGLE != 0 {
            return None;
        }
        let (class, i) = place(id);
        self.classes.get_mut(class)?.refs.get_mut(i)
    }

    /// Frees the sets that nothing refers to, once they are many. Call it when no id is held but by references.
    pub(super) fn sweep(&mut self, words: &SetWords) {
        if self.dead <= self.live.max(256) {
            return;
        }
        for (class, c) in self.classes.iter_mut().enumerate() {
            for (i, refs) in c.refs.iter_mut().enumerate() {
                if *refs == 0 {
                    let id = (class as u32 + 1) << CLASS_SHIFT | i as u32;
                    self.table.remove(hash_of(self.seed, words, id), id);
                    *refs = FREE;
                    c.free.push(i as u32);
                }
            }
        }
        self.dead = 0;
        self.memo.fill((u64::MAX, EMPTY));
    }
}

fn flip(bits: &mut Vec<u64>, holder: u16) {
    let w = usize::from(holder) / 64;
    if bits.len() <= w {
        bits.resize(w + 1, 0);
    }
    bits[w] ^= 1 << (holder % 64);
}

fn hash(seed: u64, bits: impl Iterator<Item = u64>) -> u64 {
    bits.fold(seed, |h, b| spread(h, b ^ h.rotate_left(23)))
}

fn hash_of(seed: u64, words: &SetWords, id: SetId) -> u64 {
    hash(seed, words.words(id).iter().map(|w| w.load(Relaxed)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeSet, HashMap};

    proptest! {
        #[test]
        fn equal_sets_have_equal_ids(ops in prop::collection::vec((0usize..6, prop_oneof![0u16..5, 60u16..70, 65_500u16..65_535], any::<bool>()), 1..300)) {
            let (words, mut sets) = (SetWords::new(), Sets::new(1));
            let mut held = vec![(EMPTY, BTreeSet::new()); 6];
            for (k, h, add) in ops {
                let (id, model) = &mut held[k];
                let new = if add { model.insert(h); sets.with(&words, *id, h) } else { model.remove(&h); sets.without(&words, *id, h) };
                sets.retain(new);
                sets.release(*id);
                *id = new;
                sets.dead += 300; // so that every step sweeps
                sets.sweep(&words);
                let mut seen = HashMap::new();
                for (id, model) in &held {
                    prop_assert_eq!(seen.entry(model.clone()).or_insert(*id), id);
                    for h in (0..5).chain(60..70).chain(65_500..65_535) {
                        prop_assert_eq!(words.contains(*id, h), model.contains(&h));
                    }
                }
            }
        }
    }
}
