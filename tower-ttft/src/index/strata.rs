//! One domain: the blocks of one size on one medium, as chunks, and the one writer of it.
//!
//! A key has one address. It is either in its parent's chunk, or the head of a chunk of its own: a chain that leaves
//! a chunk half way starts a sibling there. So lookups walk a chain in steps of up to 32 blocks, and a key that is
//! equal at the end of a chunk proves all of it, because keys cover their whole prefix.
use super::{
    bytes::{Budget, Reported, vec_bytes},
    chunk::{Addr, CHUNK_PAGE, Chunk, ChunkId, Chunks, Spill, Spills},
    heads::{Fill, Heads},
    runs::{Runs, SLOTS},
    sets::{EMPTY, SetWords, Sets},
    table::{RefTable, spread},
};
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use std::sync::{Arc, atomic::AtomicU32};

/// A domain.
pub(super) struct Strata {
    /// Tokens in a block.
    pub(super) block: u32,
    pub(super) medium: crate::events::Medium,
    pub(super) shared: Shared,
    pub(super) writer: Mutex<Writer>,
}

/// What readers see.
pub(super) struct Shared {
    pub(super) heads: ArcSwap<Heads>,
    pub(super) chunks: Chunks,
    pub(super) spills: Spills,
    pub(super) sets: SetWords,
}

/// What only the writer needs.
pub(super) struct Writer {
    seed: u64,
    backs: Vec<Box<[Back]>>,
    /// Chunks that were ever in use.
    chunks: u32,
    free: Vec<ChunkId>,
    spills: u32,
    free_spills: Vec<u32>,
    fill: Fill,
    heads_bytes: usize,
    page_bytes: usize,
    /// Shared names: an engine's id to the block that all endpoints mean by it.
    names: RefTable,
    sets: Sets,
    blocks: u64,
    /// What was reported.
    reported: Reported,
    sizes: Sizes,
}

/// The writer's side of a chunk.
struct Back {
    /// Slots whose id is in `names`.
    named: u32,
    /// Those ids.
    ids: [u64; SLOTS],
}

/// Where to look for a block: behind which one, in which slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Position {
    pub(super) key: u64,
    pub(super) parent: Option<Addr>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    blocks: u64,
    chunks: u64,
}

// === impl Strata ===

impl Strata {
    pub(super) fn new(seed: u64, block: u32, medium: crate::events::Medium) -> Self {
        let heads = Heads::new(seed, 0);
        Self {
            block,
            medium,
            writer: Mutex::new(Writer {
                seed,
                backs: Vec::new(),
                chunks: 0,
                free: Vec::new(),
                spills: 0,
                free_spills: Vec::new(),
                fill: Fill::default(),
                heads_bytes: heads.bytes(),
                page_bytes: Chunks::BASE_BYTES + Spills::BASE_BYTES,
                names: RefTable::new(),
                sets: Sets::new(seed),
                blocks: 0,
                reported: Reported::default(),
                sizes: Sizes::default(),
            }),
            shared: Shared {
                heads: ArcSwap::from_pointee(heads),
                chunks: Chunks::new(),
                spills: Spills::new(),
                sets: SetWords::new(),
            },
        }
    }
}

// === impl Position ===

impl Position {
    #[inline]
    fn slot(&self) -> usize {
        self.parent.map_or(0, |p| (p.slot() + 1) % SLOTS)
    }
}

// === impl Writer ===

impl Writer {
    /// Heap bytes of the domain.
    fn bytes(&self) -> usize {
        self.page_bytes
            + self.heads_bytes
            + self.names.bytes()
            + self.sets.bytes()
            + vec_bytes(&self.backs)
            + vec_bytes(&self.free)
            + vec_bytes(&self.free_spills)
    }

    /// Reports the domain's bytes and sizes.
    pub(super) fn report(&mut self, budget: &Budget) {
        let now = self.bytes();
        self.reported.update(budget, now);
        let sizes = self.sizes();
        budget.blocks.update(self.sizes.blocks, sizes.blocks);
        budget.chunks.update(self.sizes.chunks, sizes.chunks);
        self.sizes = sizes;
    }

    /// Takes the domain's bytes out of the budget: it is not to be used any more.
    pub(super) fn retire(&mut self, budget: &Budget) {
        self.reported.update(budget, 0);
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            blocks: self.blocks,
            chunks: u64::from(self.chunks) - self.free.len() as u64,
        }
    }

    /// Interned sets in use.
    pub(super) fn sets(&self) -> usize {
        self.sets.live()
    }

    /// Bytes that one more chunk may take.
    pub(super) fn chunk_growth(&self, shared: &Shared) -> usize {
        let page = if self.free.is_empty() && (self.chunks as usize).is_multiple_of(CHUNK_PAGE) {
            Chunks::PAGE_BYTES + CHUNK_PAGE * size_of::<Back>()
        } else {
            0
        };
        page + shared.heads.load().growth(self.fill)
    }

    /// Bytes that one more shared name may take.
    pub(super) fn name_growth(&self, id: u64) -> usize {
        self.names.growth(spread(self.seed, id))
    }

    /// The address of a key that the domain knows.
    pub(super) fn find(&self, shared: &Shared, at: Position) -> Option<Addr> {
        let slot = at.slot();
        if slot != 0
            && let Some(parent) = at.parent
            && let Some(chunk) = shared.chunks.get(parent.chunk() as usize)
            && slot < chunk.span().end
            && chunk.key(slot) == at.key
        {
            return Some(Addr::new(parent.chunk(), slot));
        }
        let head = shared.heads.load().candidates(at.key).find(|c| {
            shared.chunks.get(*c as usize).is_some_and(|chunk| {
                let span = chunk.span();
                span.start == slot && span.end > slot && chunk.key(slot) == at.key
            })
        });
        head.map(|c| Addr::new(c, slot))
    }

    /// Whether a key that is not known would go behind its parent, which takes no new chunk.
    pub(super) fn appends(&self, shared: &Shared, at: Position) -> bool {
        let slot = at.slot();
        slot != 0
            && at
                .parent
                .and_then(|p| shared.chunks.get(p.chunk() as usize))
                .is_some_and(|chunk| chunk.span().end == slot)
    }

    /// Makes an address for a key that is not known. Nobody holds it yet. None if the domain can grow no further.
    pub(super) fn create(&mut self, shared: &Shared, at: Position) -> Option<Addr> {
        let slot = at.slot();
        if self.appends(shared, at) {
            let chunk = at.parent?.chunk();
            shared.chunks.get(chunk as usize)?.append(at.key);
            return Some(Addr::new(chunk, slot));
        }
        let c = match self.free.pop() {
            Some(c) => c,
            None => self.add_chunk(shared)?,
        };
        shared.chunks.get(c as usize)?.start(slot, at.key);
        self.add_head(shared, at.key, c);
        Some(Addr::new(c, slot))
    }

    fn add_chunk(&mut self, shared: &Shared) -> Option<ChunkId> {
        let c = self.chunks;
        // An address is a chunk and five bits of slot, and one value means none.
        if c >= u32::MAX >> 5 {
            return None;
        }
        self.page_bytes += shared.chunks.ensure(c as usize, Chunk::new)?;
        if (c as usize).is_multiple_of(CHUNK_PAGE) {
            let page: Box<[Back]> = (0..CHUNK_PAGE).map(|_| Back::new()).collect();
            self.page_bytes += size_of_val(&*page);
            self.backs.push(page);
        }
        self.chunks += 1;
        Some(c)
    }

    fn add_head(&mut self, shared: &Shared, key: u64, c: ChunkId) {
        let heads = shared.heads.load();
        if !heads.is_full(self.fill) {
            heads.insert(&mut self.fill, key, c);
            return;
        }
        let live = self.chunks as usize - self.free.len();
        let new = Heads::new(self.seed, live);
        let mut fill = Fill::default();
        // The new chunk is among them.
        for c in 0..self.chunks {
            if let Some(chunk) = shared.chunks.get(c as usize) {
                let span = chunk.span();
                if span.end > span.start {
                    new.insert(&mut fill, chunk.key(span.start), c);
                }
            }
        }
        self.heads_bytes = new.bytes();
        self.fill = fill;
        shared.heads.store(Arc::new(new));
    }

    fn back(&self, c: ChunkId) -> Option<&Back> {
        self.backs
            .get(c as usize / CHUNK_PAGE)?
            .get(c as usize % CHUNK_PAGE)
    }

    fn back_mut(&mut self, c: ChunkId) -> Option<&mut Back> {
        self.backs
            .get_mut(c as usize / CHUNK_PAGE)?
            .get_mut(c as usize % CHUNK_PAGE)
    }

    /// The key of a block.
    pub(super) fn key(&self, shared: &Shared, at: Addr) -> Option<u64> {
        let chunk = shared.chunks.get(at.chunk() as usize)?;
        Some(chunk.key(at.slot()))
    }

    /// The shared id of a block, if it has one.
    pub(super) fn name_of(&self, at: Addr) -> Option<u64> {
        let back = self.back(at.chunk())?;
        (back.named & at.bit() != 0).then(|| back.ids[at.slot()])
    }

    /// The block with a shared id.
    pub(super) fn named(&self, id: u64) -> Option<Addr> {
        self.names
            .find(spread(self.seed, id), |a| self.name_of(Addr(a)) == Some(id))
            .map(Addr)
    }

    /// Gives a block its shared id. Neither may have another.
    pub(super) fn name(&mut self, at: Addr, id: u64) {
        let seed = self.seed;
        if let Some(back) = self.back_mut(at.chunk()) {
            back.named |= at.bit();
            back.ids[at.slot()] = id;
            let backs = &self.backs;
            self.names.insert(spread(seed, id), at.0, |a| {
                let (a, slot) = (Addr(a).chunk() as usize, Addr(a).slot());
                let back = backs
                    .get(a / CHUNK_PAGE)
                    .and_then(|p| p.get(a % CHUNK_PAGE));
                spread(seed, back.map_or(0, |b| b.ids[slot]))
            });
        }
    }

    fn unname(&mut self, at: Addr) {
        if let Some(id) = self.name_of(at) {
            self.names.remove(spread(self.seed, id), at.0);
            if let Some(back) = self.back_mut(at.chunk()) {
                back.named &= !at.bit();
            }
        }
    }

    /// Whether a holder has a block.
    pub(super) fn holds(&self, shared: &Shared, at: Addr, holder: u16) -> bool {
        shared.chunks.get(at.chunk() as usize).is_some_and(|chunk| {
            let id = chunk.set_of(&shared.spills, at.slot());
            shared.sets.contains(id, holder)
        })
    }

    /// The slots of a chunk that a holder has.
    pub(super) fn mask(&self, shared: &Shared, c: ChunkId, holder: u16) -> u32 {
        shared.chunks.get(c as usize).map_or(0, |chunk| {
            let runs = chunk.runs(&shared.spills);
            runs.mask(|id| shared.sets.contains(id, holder))
        })
    }

    /// Calls `f` with each block that a holder has, chunk by chunk.
    pub(super) fn each_held(&self, shared: &Shared, holder: u16, mut f: impl FnMut(Addr)) {
        for c in 0..self.chunks {
            let mut mask = self.mask(shared, c, holder);
            while mask != 0 {
                f(Addr::new(c, mask.trailing_zeros() as usize));
                mask &= mask - 1;
            }
        }
    }

    /// Makes a holder have some slots of a chunk.
    pub(super) fn cover(&mut self, shared: &Shared, c: ChunkId, mask: u32, holder: u16) {
        if let Some(chunk) = shared.chunks.get(c as usize) {
            let old = chunk.runs(&shared.spills);
            let new = old.edit(mask, |id| self.sets.with(&shared.sets, id, holder));
            self.blocks += u64::from((new.alive() & !old.alive()).count_ones());
            self.replace(shared, chunk, &old, &new, chunk.span().end);
        }
    }

    /// Makes a holder have some slots of a chunk no more. Blocks that nobody has are forgotten.
    pub(super) fn uncover(&mut self, shared: &Shared, c: ChunkId, mask: u32, holder: u16) {
        let Some(chunk) = shared.chunks.get(c as usize) else {
            return;
        };
        let old = chunk.runs(&shared.spills);
        let new = old.edit(mask, |id| self.sets.without(&shared.sets, id, holder));
        let alive = new.alive();
        let mut dead = old.alive() & !alive;
        self.blocks -= u64::from(dead.count_ones());
        while dead != 0 {
            self.unname(Addr::new(c, dead.trailing_zeros() as usize));
            dead &= dead - 1;
        }
        let span = chunk.span();
        let end = SLOTS - alive.leading_zeros() as usize;
        if alive == 0 {
            let heads = shared.heads.load();
            heads.remove(&mut self.fill, chunk.key(span.start), c);
            self.replace(shared, chunk, &old, &Runs::uniform(EMPTY), span.start);
            self.free.push(c);
        } else {
            self.replace(shared, chunk, &old, &new, end);
        }
    }

    fn replace(&mut self, shared: &Shared, chunk: &Chunk, old: &Runs, new: &Runs, end: usize) {
        for id in new.ids() {
            self.sets.retain(*id);
        }
        let had = chunk.spilled();
        let place = if Chunk::spills(new) {
            had.or_else(|| self.spill_place(shared))
        } else {
            None
        };
        let spill: Option<(u32, &Spill)> =
            place.and_then(|i| Some((i, shared.spills.get(i as usize)?)));
        chunk.set_runs(new, end, spill);
        if let Some(i) = had
            && spill.is_none()
        {
            self.free_spills.push(i);
        }
        for id in old.ids() {
            self.sets.release(*id);
        }
        self.sets.sweep(&shared.sets);
    }

    fn spill_place(&mut self, shared: &Shared) -> Option<u32> {
        if let Some(i) = self.free_spills.pop() {
            return Some(i);
        }
        let make = || std::array::from_fn(|_| AtomicU32::new(EMPTY));
        self.page_bytes += shared.spills.ensure(self.spills as usize, make)?;
        self.spills += 1;
        Some(self.spills - 1)
    }

    /// Takes a holder out of up to `count` chunks from `from` on. Returns where to go on, and how many blocks went.
    pub(super) fn clear(
        &mut self,
        shared: &Shared,
        holder: u16,
        from: ChunkId,
        count: u32,
    ) -> (Option<ChunkId>, u64) {
        let to = from.saturating_add(count).min(self.chunks);
        let mut gone = 0;
        for c in from..to {
            let mask = self.mask(shared, c, holder);
            if mask != 0 {
                gone += u64::from(mask.count_ones());
                self.uncover(shared, c, mask, holder);
            }
        }
        ((to < self.chunks).then_some(to), gone)
    }
}

// === impl Back ===

impl Back {
    fn new() -> Self {
        Self {
            named: 0,
            ids: [0; SLOTS],
        }
    }
}
