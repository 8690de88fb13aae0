//! The indexes under test, behind one trait: ours, a flat hash table, and SMG's.
use super::trace::tokens;
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};
use std::collections::HashMap;
use tower_ttft::{
    chain::{Chain, ChainKind, KeySpace},
    events::{BlockRemoved, BlockStored, GroupKind, KvEvent, Medium},
    index::{Holder, IndexParams, Matches, PrefixIndex},
};

/// An index. What it is given is prepared before the clock runs.
pub(super) trait Arm {
    /// What a store takes.
    type Store;
    /// What a lookup takes.
    type Query;
    /// For the table.
    fn name(&self) -> &'static str;
    /// Prepares a store of blocks (id, content) behind a parent.
    fn prepare(&self, engine: usize, parent: Option<u64>, blocks: &[(u64, u64)]) -> Self::Store;
    /// Stores.
    fn store(&mut self, engine: usize, store: &Self::Store);
    /// Removes one block: engines announce evictions one by one.
    fn remove(&mut self, engine: usize, id: u64);
    /// Prepares a lookup.
    fn query(&self, contents: &[u64]) -> Self::Query;
    /// Looks up; the answer stays inside.
    fn find(&mut self, query: &Self::Query);
    /// Blocks that an engine holds of the last lookup.
    fn depth(&self, engine: usize) -> u32;
}

/// Ours.
pub(super) struct Strata {
    /// The index.
    pub(super) index: PrefixIndex,
    /// The engines' places.
    pub(super) holders: Vec<Holder>,
    matches: Matches,
    removed: KvEvent,
}

/// A hash table from key to a set of engines, one entry per block, looked up block by block: the plain thing to do.
pub(super) struct Flat {
    keys: KeySpace,
    blocks: HashMap<u64, Box<[u64]>>,
    ids: HashMap<(usize, u64), u64>,
    words: usize,
    alive: Vec<u64>,
    depths: Vec<u32>,
}

/// `kv-index` of SMG.
pub(super) struct Smg {
    index: ChainIndex,
    workers: Vec<u32>,
    maps: Vec<ChainBlockMap>,
    depths: Vec<u32>,
}

/// The key space of all arms.
pub(super) fn keys() -> KeySpace {
    KeySpace::new(1)
}

/// The chain of a prompt.
pub(super) fn chain(contents: &[u64]) -> Chain {
    let all: Vec<u32> = contents.iter().flat_map(|c| tokens(*c)).collect();
    keys().tokens(keys().root(ChainKind::Tokens, "model", None, None), &all)
}

/// The event that stores blocks.
pub(super) fn stored(parent: Option<u64>, blocks: &[(u64, u64)]) -> KvEvent {
    KvEvent::Stored(BlockStored {
        hashes: blocks.iter().map(|b| b.0).collect(),
        parent,
        tokens: blocks.iter().flat_map(|b| tokens(b.1)).collect(),
        block_size: 16,
        lora_name: None,
        extra_keys: Vec::new(),
        medium: Medium::Gpu,
        group: 0,
        kind: GroupKind::Full,
    })
}

/// The event that removes one block.
pub(super) fn removed(id: u64) -> KvEvent {
    KvEvent::Removed(BlockRemoved {
        hashes: vec![id],
        medium: Medium::Gpu,
        group: 0,
    })
}

// === impl Strata ===

impl Strata {
    /// An empty index.
    pub(super) fn new(engines: usize) -> Self {
        let index = PrefixIndex::new(IndexParams {
            keys: keys(),
            model: "model".into(),
            max_bytes: 4 << 30,
        });
        Self {
            holders: (0..engines).map(|_| index.holder()).collect(),
            index,
            matches: Matches::default(),
            removed: removed(0),
        }
    }
}

impl Arm for Strata {
    type Store = KvEvent;
    type Query = Chain;

    fn name(&self) -> &'static str {
        "forebay"
    }

    fn prepare(&self, _: usize, parent: Option<u64>, blocks: &[(u64, u64)]) -> KvEvent {
        stored(parent, blocks)
    }

    fn store(&mut self, engine: usize, event: &KvEvent) {
        self.index.apply(&self.holders[engine], event);
    }

    fn remove(&mut self, engine: usize, id: u64) {
        if let KvEvent::Removed(r) = &mut self.removed {
            r.hashes[0] = id;
        }
        self.index.apply(&self.holders[engine], &self.removed);
    }

    fn query(&self, contents: &[u64]) -> Chain {
        chain(contents)
    }

    fn find(&mut self, query: &Chain) {
        self.index.matches(query, &mut self.matches);
    }

    fn depth(&self, engine: usize) -> u32 {
        self.matches.get(&self.holders[engine]) / 16
    }
}

// === impl Flat ===

impl Flat {
    /// An empty table.
    pub(super) fn new(engines: usize) -> Self {
        Self {
            keys: keys(),
            blocks: HashMap::new(),
            ids: HashMap::new(),
            words: engines.div_ceil(64),
            alive: Vec::new(),
            depths: vec![0; engines],
        }
    }
}

impl Arm for Flat {
    type Store = (Option<u64>, Vec<u64>, Vec<u32>);
    type Query = Chain;

    fn name(&self) -> &'static str {
        "flat hash table"
    }

    fn prepare(&self, _: usize, parent: Option<u64>, blocks: &[(u64, u64)]) -> Self::Store {
        let ids = blocks.iter().map(|b| b.0).collect();
        (
            parent,
            ids,
            blocks.iter().flat_map(|b| tokens(b.1)).collect(),
        )
    }

    fn store(&mut self, engine: usize, (parent, ids, tokens): &Self::Store) {
        let root = || self.keys.root(ChainKind::Tokens, "model", None, None).0;
        let parent = match parent {
            None => Some(root()),
            Some(id) => self.ids.get(&(engine, *id)).copied(),
        };
        let Some(mut key) = parent else { return };
        for (id, atom) in ids.iter().zip(tokens.chunks_exact(16)) {
            key = self.keys.next(key, atom);
            let set = self.blocks.entry(key);
            let set = set.or_insert_with(|| vec![0; self.words].into_boxed_slice());
            set[engine / 64] |= 1 << (engine % 64);
            self.ids.insert((engine, *id), key);
        }
    }

    fn remove(&mut self, engine: usize, id: u64) {
        if let Some(key) = self.ids.remove(&(engine, id))
            && let Some(set) = self.blocks.get_mut(&key)
        {
            set[engine / 64] &= !(1 << (engine % 64));
            if set.iter().all(|w| *w == 0) {
                self.blocks.remove(&key);
            }
        }
    }

    fn query(&self, contents: &[u64]) -> Chain {
        chain(contents)
    }

    fn find(&mut self, query: &Chain) {
        self.depths.fill(0);
        self.alive.clear();
        self.alive.resize(self.words, u64::MAX);
        for key in query.keys() {
            let Some(set) = self.blocks.get(key) else {
                return;
            };
            let mut any = 0;
            for (w, (alive, set)) in self.alive.iter_mut().zip(set.iter()).enumerate() {
                *alive &= set;
                any |= *alive;
                let mut left = *alive;
                while left != 0 {
                    self.depths[w * 64 + left.trailing_zeros() as usize] += 1;
                    left &= left - 1;
                }
            }
            if any == 0 {
                return;
            }
        }
    }

    fn depth(&self, engine: usize) -> u32 {
        self.depths[engine]
    }
}

// === impl Smg ===

impl Smg {
    /// An empty index.
    pub(super) fn new(engines: usize) -> Self {
        let index = ChainIndex::with_max_workers(engines.max(64));
        let worker = |e: usize| index.intern_worker(&format!("w{e}")).unwrap_or(0);
        Self {
            workers: (0..engines).map(worker).collect(),
            maps: (0..engines).map(|_| ChainBlockMap::new()).collect(),
            depths: vec![0; engines],
            index,
        }
    }
}

impl Arm for Smg {
    type Store = (Option<u64>, Vec<StoredBlock>);
    type Query = Vec<u64>;

    fn name(&self) -> &'static str {
        "SMG kv-index"
    }

    fn prepare(&self, _: usize, parent: Option<u64>, blocks: &[(u64, u64)]) -> Self::Store {
        let blocks = blocks.iter().map(|b| StoredBlock {
            seq_hash: SequenceHash(b.0),
            content_hash: ContentHash(b.1),
        });
        (parent, blocks.collect())
    }

    fn store(&mut self, engine: usize, (parent, blocks): &Self::Store) {
        let (worker, map) = (self.workers[engine], &mut self.maps[engine]);
        let parent = parent.map(SequenceHash);
        // A block whose parent is unknown is an error here; the trace has none.
        let _ = self.index.apply_stored(worker, blocks, parent, map);
    }

    fn remove(&mut self, engine: usize, id: u64) {
        let (worker, map) = (self.workers[engine], &mut self.maps[engine]);
        self.index.apply_removed(worker, &[SequenceHash(id)], map);
    }

    fn query(&self, contents: &[u64]) -> Vec<u64> {
        contents.to_vec()
    }

    fn find(&mut self, query: &Vec<u64>) {
        self.depths.fill(0);
        let Self {
            index,
            workers,
            depths,
            ..
        } = self;
        index.score_into(
            query,
            |c| *c,
            false,
            |worker, depth| {
                if let Some(e) = workers.iter().position(|w| *w == worker) {
                    depths[e] = depth;
                }
            },
        );
    }

    fn depth(&self, engine: usize) -> u32 {
        self.depths[engine]
    }
}
