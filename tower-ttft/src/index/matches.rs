//! The answer of a lookup.
use super::{
    Holder,
    lookup::Probe,
    runs::SLOTS,
    sets::{EMPTY, SetId, SetWords, only},
};
use std::sync::atomic::Ordering::Relaxed;

/// Matching prefix length per endpoint, reusable between lookups.
#[derive(Debug, Default)]
pub struct Matches {
    index: u64,
    version: u64,
    /// Tokens per holder.
    tokens: Vec<u32>,
    /// The holders that have any.
    some: Vec<u16>,
    scratch: Scratch,
}

/// Room for one walk.
#[derive(Debug, Default)]
struct Scratch {
    words: usize,
    /// Who held all blocks so far.
    alive: Vec<u64>,
    /// Sets of a chunk's runs that are not yet known to be consistent.
    loaded: Vec<u64>,
    ids: [SetId; SLOTS],
}

/// Collects all holders of one domain.
pub(super) struct All<'a> {
    matches: &'a mut Matches,
    block: u32,
    started: bool,
}

/// Looks at one holder only.
pub(super) struct One {
    holder: u16,
    has: [bool; SLOTS],
}

// === impl Matches ===

impl Matches {
    /// Leading tokens (whole blocks, not clipped to the prompt) that an endpoint holds. 0 for an endpoint that joined
    /// after the lookup, or of another index.
    pub fn get(&self, holder: &Holder) -> u32 {
        if holder.index() != self.index || holder.born() > self.version {
            return 0;
        }
        let tokens = holder.slot().map(|s| self.tokens.get(usize::from(s)));
        tokens.flatten().copied().unwrap_or(0)
    }

    /// Whether no endpoint holds any of it.
    pub fn is_empty(&self) -> bool {
        self.some.is_empty()
    }

    /// The version of the index that the answer is at least as new as, to tell whether it still holds.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Forgets the last answer.
    pub(super) fn begin(&mut self, index: u64, version: u64, holders: usize) {
        for h in self.some.drain(..) {
            if let Some(t) = self.tokens.get_mut(usize::from(h)) {
                *t = 0;
            }
        }
        (self.index, self.version) = (index, version);
        let words = holders.div_ceil(64);
        if self.tokens.len() < words * 64 {
            self.tokens.resize(words * 64, 0);
        }
        self.scratch.words = words;
        self.scratch.alive.resize(words, 0);
        self.scratch.loaded.resize(words * SLOTS, 0);
    }

    fn set(&mut self, holder: usize, tokens: u32) {
        if let Some(t) = self.tokens.get_mut(holder)
            && *t < tokens
        {
            if *t == 0 {
                self.some.push(holder as u16);
            }
            *t = tokens;
        }
    }
}

// === impl All ===

impl<'a> All<'a> {
    pub(super) fn new(matches: &'a mut Matches, block: u32) -> Self {
        Self {
            matches,
            block,
            started: false,
        }
    }

    /// Those who are left hold `blocks`.
    pub(super) fn finish(mut self, blocks: usize) {
        if !self.started {
            return;
        }
        let tokens = (blocks as u32).saturating_mul(self.block);
        for w in 0..self.matches.scratch.words {
            let left = self.matches.scratch.alive[w];
            self.end(w, left, tokens);
        }
    }

    /// The holders in `bits` of a word hold that many tokens and no more.
    #[inline]
    fn end(&mut self, word: usize, mut bits: u64, tokens: u32) {
        while bits != 0 {
            let h = word * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            self.matches.set(h, tokens);
        }
    }
}

impl Probe for All<'_> {
    #[inline]
    fn load(&mut self, run: usize, id: SetId, sets: &SetWords) {
        let s = &mut self.matches.scratch;
        s.ids[run] = id;
        if id == EMPTY || only(id).is_some() {
            return;
        }
        let words = sets.words(id);
        let to = &mut s.loaded[run * s.words..(run + 1) * s.words];
        let (to, rest) = to.split_at_mut(words.len().min(s.words));
        for (t, w) in to.iter_mut().zip(words) {
            *t = w.load(Relaxed);
        }
        rest.fill(0);
    }

    #[inline]
    fn commit(&mut self, run: usize, from: usize) -> bool {
        let started = std::mem::replace(&mut self.started, true);
        let m = &mut *self.matches;
        let (words, id) = (m.scratch.words, m.scratch.ids[run]);
        let loaded = &mut m.scratch.loaded[run * words..(run + 1) * words];
        if id == EMPTY || only(id).is_some() {
            loaded.fill(0);
            if let Some(h) = only(id)
                && let Some(word) = loaded.get_mut(usize::from(h) / 64)
            {
                *word = 1 << (h % 64);
            }
        }
        if !started {
            m.scratch.alive.copy_from_slice(loaded);
            return m.scratch.alive.iter().any(|w| *w != 0);
        }
        // `loaded` becomes those who end here.
        let (mut any, mut gone) = (0, 0);
        for (alive, set) in m.scratch.alive.iter_mut().zip(loaded) {
            let (had, has) = (*alive, *set);
            *alive = had & has;
            *set = had & !has;
            any |= had & has;
            gone |= had & !has;
        }
        if gone != 0 {
            let tokens = (from as u32).saturating_mul(self.block);
            for w in 0..words {
                let bits = self.matches.scratch.loaded[run * words + w];
                self.end(w, bits, tokens);
            }
        }
        any != 0
    }
}

// === impl One ===

impl One {
    pub(super) fn new(holder: u16) -> Self {
        Self {
            holder,
            has: [false; SLOTS],
        }
    }
}

impl Probe for One {
    #[inline]
    fn load(&mut self, run: usize, id: SetId, sets: &SetWords) {
        self.has[run] = sets.contains(id, self.holder);
    }

    #[inline]
    fn commit(&mut self, run: usize, _from: usize) -> bool {
        self.has[run]
    }
}
