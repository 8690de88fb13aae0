//! The pool of KV blocks, as vLLM keeps it: blocks that nobody uses wait in a queue, oldest first, and keep their content
//! until they are taken for something else.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

/// The pool.
#[derive(Clone, Debug)]
pub(crate) struct Blocks {
    blocks: Vec<Block>,
    /// Per key, the first of the blocks that hold it; the others follow through `Block::twin`.
    cached: HashMap<u64, u32, BuildHasherDefault<KeyHasher>>,
    /// Ends of the queue of unused blocks: the head is taken next.
    head: u32,
    tail: u32,
    free: u32,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    key: Option<u64>,
    twin: u32,
    users: u32,
    prev: u32,
    next: u32,
}

/// Keys are hashes already.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KeyHasher(u64);

/// No block.
const NONE: u32 = u32::MAX;

// === impl Blocks ===

impl Blocks {
    pub(crate) fn new(n: u32) -> Self {
        let mut pool = Self {
            blocks: (0..n)
                .map(|_| Block {
                    key: None,
                    twin: NONE,
                    users: 0,
                    prev: NONE,
                    next: NONE,
                })
                .collect(),
            cached: HashMap::default(),
            head: NONE,
            tail: NONE,
            free: 0,
        };
        for i in 0..n {
            pool.append(i);
        }
        pool
    }

    /// Blocks that nobody uses, also those that hold something reusable.
    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// Blocks in use.
    pub(crate) fn used(&self) -> u32 {
        self.blocks.len() as u32 - self.free
    }

    /// How many of these keys, from the first on, are cached; and how many of those blocks nobody uses.
    pub(crate) fn hits(&self, keys: &[u64]) -> (u32, u32) {
        let (mut hits, mut unused) = (0, 0);
        for key in keys {
            let Some(&block) = self.cached.get(key) else {
                break;
            };
            hits += 1;
            unused += u32::from(self.users(block) == 0);
        }
        (hits, unused)
    }

    /// Takes the cached block of a key into use.
    pub(crate) fn share(&mut self, key: u64) -> Option<u32> {
        let block = *self.cached.get(&key)?;
        if self.users(block) == 0 {
            self.unlink(block);
        }
        self.get_mut(block)?.users += 1;
        Some(block)
    }

    /// Takes an unused block, the oldest, for new content; gives the key that it held.
    pub(crate) fn take(&mut self) -> Option<(u32, Option<u64>)> {
        let block = self.head;
        if block == NONE {
            return None;
        }
        self.unlink(block);
        let evicted = self.forget(block);
        self.get_mut(block)?.users = 1;
        Some((block, evicted))
    }

    /// A block's content is computed: others may use it.
    pub(crate) fn commit(&mut self, block: u32, key: u64) {
        let twin = match self.cached.get(&key) {
            // The first one stays the one that is shared.
            Some(&first) => {
                let second = self.get(first).map_or(NONE, |b| b.twin);
                if let Some(b) = self.get_mut(first) {
                    b.twin = block;
                }
                second
            }
            None => {
                self.cached.insert(key, block);
                NONE
            }
        };
        if let Some(b) = self.get_mut(block) {
            b.key = Some(key);
            b.twin = twin;
        }
    }

    /// Ends one use of a block. Unused, it goes to the end of the queue and keeps its content; one that holds nothing
    /// reusable is taken next.
    pub(crate) fn release(&mut self, block: u32) {
        let Some(b) = self.get_mut(block) else {
            return;
        };
        b.users = b.users.saturating_sub(1);
        match (b.users, b.key) {
            (0, Some(_)) => self.append(block),
            (0, None) => self.prepend(block),
            _ => {}
        }
    }

    /// Puts a cached block that nobody uses at the end of the queue.
    pub(crate) fn touch(&mut self, key: u64) {
        if let Some(block) = self.share(key) {
            self.release(block);
        }
    }

    /// Forgets all content.
    pub(crate) fn clear(&mut self) {
        self.cached.clear();
        for b in &mut self.blocks {
            b.key = None;
            b.twin = NONE;
        }
    }

    /// The keys of all blocks that hold one, in no order, as often as they are held.
    #[cfg(test)]
    pub(crate) fn keys(&self) -> impl Iterator<Item = u64> + '_ {
        self.blocks.iter().filter_map(|b| b.key)
    }

    /// Uses of all blocks.
    #[cfg(test)]
    pub(crate) fn uses(&self) -> u32 {
        self.blocks.iter().map(|b| b.users).sum()
    }

    fn forget(&mut self, block: u32) -> Option<u64> {
        let b = self.get_mut(block)?;
        let (key, twin) = (b.key.take()?, b.twin);
        b.twin = NONE;
        let first = *self.cached.get(&key)?;
        if first == block {
            if twin == NONE {
                self.cached.remove(&key);
            } else {
                self.cached.insert(key, twin);
            }
            return Some(key);
        }
        let mut at = first;
        while let Some(b) = self.get_mut(at) {
            if b.twin == block {
                b.twin = twin;
                break;
            }
            at = b.twin;
        }
        Some(key)
    }

    fn append(&mut self, block: u32) {
        let tail = self.tail;
        if let Some(b) = self.get_mut(block) {
            b.prev = tail;
            b.next = NONE;
        }
        match self.get_mut(tail) {
            Some(last) => last.next = block,
            None => self.head = block,
        }
        self.tail = block;
        self.free += 1;
    }

    fn prepend(&mut self, block: u32) {
        let head = self.head;
        if let Some(b) = self.get_mut(block) {
            b.prev = NONE;
            b.next = head;
        }
        match self.get_mut(head) {
            Some(first) => first.prev = block,
            None => self.tail = block,
        }
        self.head = block;
        self.free += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Some(b) = self.get_mut(block) else {
            return;
        };
        let (prev, next) = (b.prev, b.next);
        b.prev = NONE;
        b.next = NONE;
        match self.get_mut(prev) {
            Some(p) => p.next = next,
            None => self.head = next,
        }
        match self.get_mut(next) {
            Some(n) => n.prev = prev,
            None => self.tail = prev,
        }
        self.free -= 1;
    }

    fn users(&self, block: u32) -> u32 {
        self.get(block).map_or(0, |b| b.users)
    }

    fn get(&self, block: u32) -> Option<&Block> {
        self.blocks.get(block as usize)
    }

    fn get_mut(&mut self, block: u32) -> Option<&mut Block> {
        self.blocks.get_mut(block as usize)
    }
}

// === impl KeyHasher ===

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.0 = (self.0 ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(pool: &mut Blocks, n: u32) -> Vec<u32> {
        (0..n)
            .map(|_| pool.take().expect("a free block").0)
            .collect()
    }

    #[test]
    fn the_block_released_first_is_taken_first() {
        let mut pool = Blocks::new(4);
        let blocks = taken(&mut pool, 4);
        for (i, &b) in blocks.iter().enumerate() {
            pool.commit(b, i as u64);
        }
        assert!(pool.take().is_none());
        for &b in blocks.iter().rev() {
            pool.release(b);
        }
        assert_eq!(pool.take().map(|t| t.1), Some(Some(3)));
        assert_eq!(pool.hits(&[0, 1, 2, 3]), (3, 3));
    }

    #[test]
    fn a_block_without_content_is_taken_before_any_other() {
        let mut pool = Blocks::new(3);
        let blocks = taken(&mut pool, 3);
        pool.commit(blocks[0], 5);
        pool.release(blocks[0]);
        pool.release(blocks[2]);
        pool.release(blocks[1]);
        let order: Vec<_> = (0..3).filter_map(|_| pool.take()).collect();
        let expected = [(blocks[1], None), (blocks[2], None), (blocks[0], Some(5))];
        assert_eq!(order, expected);
        assert_eq!(pool.hits(&[5]).0, 0);
    }

    #[test]
    fn a_touched_block_goes_to_the_end_of_the_queue() {
        let mut pool = Blocks::new(2);
        let blocks = taken(&mut pool, 2);
        for &b in &blocks {
            pool.commit(b, u64::from(b));
            pool.release(b);
        }
        pool.touch(u64::from(blocks[0]));
        assert_eq!(pool.take().map(|t| t.0), Some(blocks[1]));
    }

    #[test]
    fn a_shared_block_leaves_the_queue_and_comes_back_at_its_end() {
        let mut pool = Blocks::new(2);
        let blocks = taken(&mut pool, 2);
        for &b in &blocks {
            pool.commit(b, u64::from(b));
            pool.release(b);
        }
        let first = u64::from(blocks[0]);
        assert_eq!(pool.share(first), Some(blocks[0]));
        assert_eq!((pool.free(), pool.used()), (1, 1));
        pool.release(blocks[0]);
        assert_eq!(pool.take(), Some((blocks[1], Some(u64::from(blocks[1])))));
    }

    #[test]
    fn copies_of_a_key_go_one_by_one() {
        let mut pool = Blocks::new(3);
        for b in taken(&mut pool, 3) {
            pool.commit(b, 7);
            pool.release(b);
        }
        for left in [2, 1, 0] {
            assert_eq!(pool.hits(&[7]).0, 1);
            assert_eq!(pool.take().map(|t| t.1), Some(Some(7)));
            assert_eq!(pool.keys().count(), left);
        }
        assert_eq!(pool.hits(&[7]).0, 0);
    }
}
