//! A guess at what an engine's cache holds, from what it was sent: an LRU list of blocks, as the engine keeps one.
//!
//! vLLM frees a request's blocks in reverse order, so the deepest are evicted first; a block that no longer has contents
//! worth finding still takes its turn in the list. Where an answer shows that a block was gone, everything that was
//! last used before it is gone too.

use crate::chain::{ATOM_BYTES, ATOM_TOKENS, Chain, ChainKind};
use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

/// Blocks that are kept at most, whatever an engine says of its cache: some 4 MB.
const MAX_BLOCKS: usize = 1 << 16;

/// What an engine whose size is not known is taken to hold, tokens.
const DEFAULT_TOKENS: u64 = 1 << 18;

/// The block size where none is known, tokens. vLLM's own default.
pub(crate) const DEFAULT_BLOCK: u32 = 16;

/// The end of the list.
const NIL: u32 = u32::MAX;

/// An LRU model of one engine's cache.
#[derive(Debug)]
pub(crate) struct CacheModel {
    places: HashMap<u64, u32, BuildHasherDefault<KeyHasher>>,
    blocks: Vec<Block>,
    free: Vec<u32>,
    /// Least and most recently used.
    oldest: u32,
    newest: u32,
    /// Tokens in the list.
    tokens: u64,
    capacity: u64,
    block_size: u32,
    anonymous: u64,
}

/// Keys are hashes already.
#[derive(Debug, Default)]
pub(crate) struct KeyHasher(u64);

#[derive(Clone, Copy, Debug)]
struct Block {
    key: u64,
    weight: u32,
    /// Towards the oldest.
    older: u32,
    newer: u32,
}

/// How a chain is cut into an engine's blocks.
#[derive(Clone, Copy)]
struct Cut {
    /// Atoms per block.
    atoms: usize,
    /// Tokens per block.
    tokens: u32,
}

// === impl CacheModel ===

impl CacheModel {
    pub(crate) fn new(block_size: Option<u32>, blocks: Option<u64>) -> Self {
        let mut model = Self {
            places: HashMap::default(),
            blocks: Vec::new(),
            free: Vec::new(),
            oldest: NIL,
            newest: NIL,
            tokens: 0,
            capacity: 0,
            block_size: DEFAULT_BLOCK,
            anonymous: 0,
        };
        model.resize(block_size, blocks);
        model
    }

    /// Corrects the engine's sizes. Another block size starts afresh: its blocks have other keys.
    pub(crate) fn resize(&mut self, block_size: Option<u32>, blocks: Option<u64>) {
        let size = block_size.filter(|b| *b > 0).unwrap_or(DEFAULT_BLOCK);
        if size != self.block_size {
            self.clear();
            self.block_size = size;
        }
        // vLLM keeps one block for itself.
        self.capacity = blocks.map_or(DEFAULT_TOKENS, |n| {
            n.saturating_sub(1).saturating_mul(u64::from(size))
        });
        self.evict();
    }

    pub(crate) fn clear(&mut self) {
        self.places.clear();
        self.blocks.clear();
        self.free.clear();
        (self.oldest, self.newest) = (NIL, NIL);
        self.tokens = 0;
    }

    /// Tokens in the list.
    pub(crate) fn resident(&self) -> u64 {
        self.tokens
    }

    /// Leading tokens of a prompt that the engine is thought to hold: whole blocks, not clipped.
    pub(crate) fn held(&self, chain: &Chain, tokens: u32, bytes: u32) -> u32 {
        let cut = self.cut(chain.kind(), tokens, bytes);
        let blocks = chain.keys().len() / cut.atoms;
        // Prefixes are evicted from their end, so what is held is a prefix of the blocks.
        let (mut lo, mut hi) = (0, blocks);
        while lo < hi {
            let mid = lo + (hi - lo).div_ceil(2);
            if self
                .key(chain, cut, mid - 1)
                .is_some_and(|k| self.places.contains_key(&k))
            {
                lo = mid;
            } else {
                hi = mid - 1;
            }
        }
        (lo as u64 * u64::from(cut.tokens)).min(u64::from(tokens)) as u32
    }

    /// The engine computed or used this prompt. At its end, `generated` says how many tokens came behind it, whose blocks
    /// take space.
    pub(crate) fn used(&mut self, chain: &Chain, tokens: u32, bytes: u32, generated: Option<u32>) {
        let cut = self.cut(chain.kind(), tokens, bytes);
        let blocks = chain.keys().len() / cut.atoms;
        // What follows cannot be named, not even when the next turn shows it behind this prompt: it is remembered as used
        // space. The engine keeps the blocks of the tokens that it sampled, and the next turn brings tokens of a text.
        // Those differ wherever sampling did not choose what the tokenizer would, and where the template drops the
        // reasoning of earlier turns, prints tool calls in another way, or the client sends back something else. From
        // outside they cannot be told apart, and a block that is believed in and not there is worse than the other way
        // round: the turn goes to the engine that has its last prompt anyway.
        if let Some(generated) = generated {
            let whole = blocks as u64 * u64::from(cut.tokens);
            let rest = (u64::from(tokens) + u64::from(generated)).saturating_sub(whole);
            let size = u64::from(self.block_size);
            for _ in 0..rest.div_ceil(size).min(MAX_BLOCKS as u64) {
                self.anonymous += 1;
                let key = self.anonymous.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                self.push(key, self.block_size);
            }
        }
        for block in (0..blocks).rev() {
            if let Some(key) = self.key(chain, cut, block) {
                self.push(key, cut.tokens);
            }
        }
        self.evict();
    }

    /// An answer showed that only so many tokens were held: the next block was gone, and with it all that was used less
    /// recently.
    pub(crate) fn missed(&mut self, chain: &Chain, tokens: u32, bytes: u32, held: u32) {
        let cut = self.cut(chain.kind(), tokens, bytes);
        let Some(key) = self.key(chain, cut, (held / cut.tokens.max(1)) as usize) else {
            return;
        };
        if !self.places.contains_key(&key) {
            return;
        }
        while self.oldest != NIL && self.places.contains_key(&key) {
            self.pop_oldest();
        }
    }

    fn cut(&self, kind: ChainKind, tokens: u32, bytes: u32) -> Cut {
        let atom = ATOM_TOKENS as u32;
        match kind {
            ChainKind::Tokens if self.block_size.is_multiple_of(atom) => Cut {
                atoms: (self.block_size / atom) as usize,
                tokens: self.block_size,
            },
            // Blocks that are no whole number of atoms are followed atom by atom.
            ChainKind::Tokens => Cut {
                atoms: 1,
                tokens: atom,
            },
            ChainKind::Bytes => {
                let per = u64::from(tokens) * ATOM_BYTES as u64 / u64::from(bytes.max(1));
                Cut {
                    atoms: 1,
                    tokens: per.clamp(1, ATOM_BYTES as u64) as u32,
                }
            }
        }
    }

    fn key(&self, chain: &Chain, cut: Cut, block: usize) -> Option<u64> {
        chain.keys().get((block + 1) * cut.atoms - 1).copied()
    }

    /// Makes a block the most recently used.
    fn push(&mut self, key: u64, weight: u32) {
        let place = match self.places.get(&key) {
            Some(place) => {
                let place = *place;
                self.unlink(place);
                place
            }
            None => {
                self.tokens += u64::from(weight);
                let block = Block {
                    key,
                    weight,
                    older: NIL,
                    newer: NIL,
                };
                let place = match self.free.pop() {
                    Some(place) => place,
                    None => {
                        self.blocks.push(block);
                        self.blocks.len() as u32 - 1
                    }
                };
                if let Some(b) = self.blocks.get_mut(place as usize) {
                    *b = block;
                }
                self.places.insert(key, place);
                place
            }
        };
        let newest = self.newest;
        if let Some(b) = self.blocks.get_mut(place as usize) {
            (b.older, b.newer) = (newest, NIL);
        }
        match self.blocks.get_mut(newest as usize) {
            Some(b) => b.newer = place,
            None => self.oldest = place,
        }
        self.newest = place;
    }

    fn unlink(&mut self, place: u32) {
        let Some(Block { older, newer, .. }) = self.blocks.get(place as usize).copied() else {
            return;
        };
        match self.blocks.get_mut(older as usize) {
            Some(b) => b.newer = newer,
            None => self.oldest = newer,
        }
        match self.blocks.get_mut(newer as usize) {
            Some(b) => b.older = older,
            None => self.newest = older,
        }
    }

    fn pop_oldest(&mut self) {
        let place = self.oldest;
        let Some(block) = self.blocks.get(place as usize).copied() else {
            return;
        };
        self.unlink(place);
        self.places.remove(&block.key);
        self.tokens = self.tokens.saturating_sub(u64::from(block.weight));
        self.free.push(place);
    }

    fn evict(&mut self) {
        while (self.tokens > self.capacity || self.places.len() > MAX_BLOCKS) && self.oldest != NIL
        {
            self.pop_oldest();
        }
    }
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

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::KeySpace;
    use proptest::prelude::*;

    fn chain(tokens: &[u32]) -> Chain {
        let ks = KeySpace::new(1);
        ks.tokens(ks.root(ChainKind::Tokens, "m", None, None), tokens)
    }

    fn numbered(n: u32, tokens: u32) -> Chain {
        chain(&(0..tokens).map(|t| t + n * 100_000).collect::<Vec<_>>())
    }

    #[test]
    fn holds_whole_blocks_of_what_was_used() {
        let mut m = CacheModel::new(Some(32), Some(100));
        let a = numbered(1, 100);
        assert_eq!(m.held(&a, 100, 0), 0);
        m.used(&a, 100, 0, None);
        assert_eq!(m.held(&a, 100, 0), 96);
        // A longer prompt that begins alike shares the blocks.
        let longer = numbered(1, 1000);
        assert_eq!(m.held(&longer, 1000, 0), 96);
        m.clear();
        assert_eq!((m.held(&a, 100, 0), m.resident()), (0, 0));
    }

    #[test]
    fn evicts_the_least_recent_from_its_end() {
        // Ten usable blocks.
        let mut m = CacheModel::new(Some(16), Some(11));
        let (a, b, c) = (numbered(1, 64), numbered(2, 64), numbered(3, 64));
        m.used(&a, 64, 0, None);
        m.used(&b, 64, 0, None);
        m.used(&a, 64, 0, None);
        m.used(&c, 64, 0, None);
        assert_eq!(m.held(&a, 64, 0), 64);
        assert_eq!(m.held(&b, 64, 0), 32, "its last two blocks went first");
        assert_eq!(m.held(&c, 64, 0), 64);
        assert!(m.resident() <= 160);
    }

    #[test]
    fn generated_tokens_take_space() {
        let mut m = CacheModel::new(Some(16), Some(11));
        let (a, b) = (numbered(1, 64), numbered(2, 64));
        m.used(&a, 64, 0, None);
        m.used(&b, 64, 0, Some(40));
        assert!(m.held(&a, 64, 0) < 64);
        assert_eq!(m.held(&b, 64, 0), 64);
    }

    #[test]
    fn a_miss_tells_of_all_that_is_older() {
        let mut m = CacheModel::new(Some(16), Some(1000));
        let (a, b, c) = (numbered(1, 64), numbered(2, 64), numbered(3, 64));
        for x in [&a, &b, &c] {
            m.used(x, 64, 0, None);
        }
        m.missed(&b, 64, 0, 32);
        assert_eq!(m.held(&a, 64, 0), 0, "used before b");
        assert_eq!(m.held(&b, 64, 0), 32, "the answer said so");
        assert_eq!(m.held(&c, 64, 0), 64, "used after b");
    }

    #[test]
    fn bytes_stand_for_tokens() {
        let ks = KeySpace::new(1);
        let root = ks.root(ChainKind::Bytes, "m", None, None);
        let text = vec![b'x'; 6400];
        let c = ks.bytes(root, &text);
        let mut m = CacheModel::new(Some(16), Some(1000));
        m.used(&c, 1600, 6400, None);
        assert_eq!(m.held(&c, 1600, 6400), 1600);
        let half = ks.bytes(root, &text[..3200]);
        assert_eq!(m.held(&half, 800, 3200), 800);
    }

    #[test]
    fn odd_block_sizes_are_followed_by_atoms() {
        let mut m = CacheModel::new(Some(24), Some(100));
        let a = numbered(1, 100);
        m.used(&a, 100, 0, None);
        assert_eq!(m.held(&a, 100, 0), 96);
    }

    proptest! {
        /// Against a literal list.
        #[test]
        fn is_a_bounded_lru_list(ops in prop::collection::vec((0u32..6, 1u32..12, 0u32..3), 1..60)) {
            let mut m = CacheModel::new(Some(16), Some(21));
            let mut list: Vec<u64> = Vec::new();
            let mut anonymous = 1u64 << 60;
            for (which, atoms, generated) in ops {
                let c = numbered(which, atoms * 16);
                m.used(&c, atoms * 16, 0, Some(generated * 16));
                for _ in 0..generated {
                    anonymous += 1;
                    list.push(anonymous);
                }
                for key in c.keys().iter().rev() {
                    list.retain(|k| k != key);
                    list.push(*key);
                }
                let over = list.len().saturating_sub(20);
                list.drain(..over);
                prop_assert_eq!(m.resident(), list.len() as u64 * 16);
                prop_assert_eq!(m.places.len(), list.len());
                for other in 0..6 {
                    let c = numbered(other, 12 * 16);
                    let held = c.keys().iter().take_while(|k| list.contains(k)).count() as u32;
                    prop_assert_eq!(m.held(&c, 12 * 16, 0), held * 16);
                }
            }
        }
    }
}
