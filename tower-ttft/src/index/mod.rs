//! Which endpoint holds which blocks.
//!
//! Engines announce what enters and leaves their KV caches; the index keeps it under the keys of [`crate::chain`], so
//! that a prompt's chain finds in one lookup how much of it every endpoint holds. It is exact: holes, several copies of a
//! block, several ids of one block and endpoints with ids of their own are all kept apart. What it does not count as
//! residency is what cannot be reused as a prefix or cannot be known: attention groups other than full attention, blocks
//! whose hash has something in it besides tokens, adapter and salt, and blocks that are not in accelerator memory. Those
//! on host memory and disk are kept in domains of their own: neither a removal nor a clear on one medium touches another.
//!
//! # Shape
//!
//! One *domain* per block size and medium. In it, *chunks* of 32 consecutive blocks whose positions begin at a multiple of
//! 32; a chain is looked up in steps of a chunk. Who holds the slots of a chunk is kept as runs of *interned sets* of
//! holders. An engine's ids for blocks are shared by all endpoints that agree on them.
//!
//! # Concurrency
//!
//! Writers of a domain take turns; lookups do not wait for them. All that lookups read is atomic and guarded by a version
//! per chunk, so a lookup sees each chunk as it was at one moment, and different chunks perhaps at different moments. Only
//! where a writer was stopped by the scheduler in the middle of a chunk (50 ns) does a lookup of that chunk wait.

mod apply;
mod bytes;
mod chunk;
mod heads;
mod held;
mod keyed;
mod lookup;
mod matches;
mod metrics;
mod pages;
mod runs;
mod sets;
mod stats;
mod strata;
mod table;
#[cfg(test)]
mod tests;

pub use self::{
    matches::Matches,
    metrics::{IndexMetricFamilies, IndexMetrics, ModelLabels},
    stats::{Applied, AppliedTotals, IndexStats},
};

use self::{
    apply::State,
    bytes::{Budget, Sum},
    matches::{All, One},
    strata::Strata,
};
use crate::{
    chain::{ATOM_TOKENS, Chain, ChainKind, KeySpace},
    events::{KvEvent, Medium},
};
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{
            AtomicU32, AtomicU64,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
        },
    },
};

/// The prefix index of one base model. Cheap to clone; all clones are the same index.
#[derive(Clone)]
pub struct PrefixIndex(Arc<Inner>);

/// Parameters of an index.
#[derive(Clone, Debug)]
pub struct IndexParams {
    /// The installation's key space.
    pub keys: KeySpace,
    /// The base model's name, part of every root.
    pub model: Arc<str>,
    /// A bound on the memory of the index, in bytes; past it new blocks are not recorded and counted.
    pub max_bytes: usize,
}

/// An endpoint's place in the index. Dropping it forgets everything that it holds.
///
/// Events of one endpoint must be applied in their order; those of different endpoints may be applied at the same time.
pub struct Holder {
    index: Arc<Inner>,
    /// None if there are too many endpoints: its events are refused.
    slot: Option<u16>,
    /// The version of the index that it joined at: older answers say nothing of it.
    born: u64,
    state: Mutex<State>,
    block_size: AtomicU32,
    blocks: AtomicU64,
    own_ids: AtomicU32,
}

struct Inner {
    /// Tells indexes apart.
    id: u64,
    keys: KeySpace,
    model: Arc<str>,
    /// For hash tables; from the installation's seed.
    seed: u64,
    budget: Budget,
    version: AtomicU64,
    domains: ArcSwap<Vec<Arc<Strata>>>,
    slots: Mutex<Slots>,
    /// One more than the largest slot ever in use.
    slots_end: AtomicU32,
    pairs: Sum,
    metrics: IndexMetrics,
}

#[derive(Default)]
struct Slots {
    free: Vec<u16>,
    used: u32,
    /// Places of holders per domain, in the order of `domains`.
    users: Vec<usize>,
}

/// Slots are 16 bits.
const MAX_HOLDERS: u32 = u16::MAX as u32;
/// Domains of an index. Engines of one model have few block sizes; what is past the bound is counted as refused.
const MAX_DOMAINS: usize = 32;
/// Bytes that a domain takes before it holds anything, at most.
const EMPTY_DOMAIN: usize = 64 << 10;

// === impl PrefixIndex ===

impl PrefixIndex {
    /// An empty index.
    pub fn new(params: IndexParams) -> Self {
        Self::with_metrics(params, IndexMetrics::default())
    }

    /// An empty index that reports to metrics.
    pub fn with_metrics(params: IndexParams, metrics: IndexMetrics) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(1);
        metrics
            .max_bytes
            .set(i64::try_from(params.max_bytes).unwrap_or(i64::MAX));
        let seed = params
            .keys
            .root(ChainKind::Bytes, "hash tables of the index", None, None)
            .0;
        Self(Arc::new(Inner {
            id: IDS.fetch_add(1, Relaxed),
            keys: params.keys,
            model: params.model,
            seed,
            budget: Budget::new(params.max_bytes),
            version: AtomicU64::new(1),
            domains: ArcSwap::default(),
            slots: Mutex::default(),
            slots_end: AtomicU32::new(0),
            pairs: Sum::default(),
            metrics,
        }))
    }

    /// A place for one endpoint. There are 65,535; a holder past that records nothing and counts it as refused.
    pub fn holder(&self) -> Holder {
        let slot = self.0.take_slot();
        Holder {
            index: self.0.clone(),
            slot,
            born: self.0.bump(),
            state: Mutex::default(),
            block_size: AtomicU32::new(0),
            blocks: AtomicU64::new(0),
            own_ids: AtomicU32::new(0),
        }
    }

    /// Applies one event of an endpoint. Nothing is an error: what cannot be used is counted in the result and the
    /// metrics. `Cleared` forgets accelerator memory only: engines say it when they reset the device's cache, and may keep
    /// what they offloaded.
    pub fn apply(&self, holder: &Holder, event: &KvEvent) -> Applied {
        if !Arc::ptr_eq(&self.0, &holder.index) {
            return Applied::default();
        }
        holder.apply(event)
    }

    /// Forgets what an endpoint holds, on every medium.
    pub fn clear(&self, holder: &Holder) {
        if Arc::ptr_eq(&self.0, &holder.index) {
            holder.clear(None);
        }
    }

    /// Finds how many leading tokens of a chain each endpoint holds in accelerator memory. A chain of bytes matches
    /// nothing.
    pub fn matches(&self, chain: &Chain, out: &mut Matches) {
        let inner = &*self.0;
        let version = inner.version.load(Acquire);
        out.begin(inner.id, version, inner.slots_end.load(Acquire) as usize);
        if chain.kind() != ChainKind::Tokens {
            return;
        }
        for strata in inner.domains.load().iter() {
            if strata.medium == Medium::Gpu {
                let mut probe = All::new(out, strata.block);
                let blocks = walk(strata, chain, &mut probe);
                probe.finish(blocks);
            }
        }
    }

    /// How many leading tokens of a chain one endpoint holds in accelerator memory.
    pub fn depth(&self, holder: &Holder, chain: &Chain) -> u32 {
        self.depth_on(holder, Medium::Gpu, chain)
    }

    /// How many leading tokens of a chain one endpoint holds on a medium.
    pub fn depth_on(&self, holder: &Holder, medium: Medium, chain: &Chain) -> u32 {
        let Some(slot) = holder.slot else { return 0 };
        if !Arc::ptr_eq(&self.0, &holder.index) || chain.kind() != ChainKind::Tokens {
            return 0;
        }
        let domains = self.0.domains.load();
        let depths = domains.iter().filter(|s| s.medium == medium).map(|s| {
            let blocks = walk(s, chain, &mut One::new(slot));
            (blocks as u32).saturating_mul(s.block)
        });
        depths.max().unwrap_or(0)
    }

    /// Changes with every change of the index. What was looked up at one version holds as long as the version does.
    pub fn version(&self) -> u64 {
        self.0.version.load(Acquire)
    }

    /// What it holds and takes.
    pub fn stats(&self) -> IndexStats {
        self.0.stats()
    }
}

impl fmt::Debug for PrefixIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("PrefixIndex");
        s.field("model", &self.0.model).finish_non_exhaustive()
    }
}

/// Walks the blocks of a domain's size.
fn walk(strata: &Strata, chain: &Chain, probe: &mut impl lookup::Probe) -> usize {
    let keys = chain.keys();
    let atoms = strata.block as usize / ATOM_TOKENS;
    // Zero is no key of anything: `n` keeps the index inside.
    let key = |block: usize| keys.get((block + 1) * atoms - 1).copied().unwrap_or(0);
    lookup::walk(strata, keys.len() / atoms, key, probe)
}

// === impl Holder ===

impl Holder {
    /// The block size seen last in this endpoint's events of full attention in accelerator memory, in tokens; 0 before
    /// the first.
    pub fn block_size(&self) -> u32 {
        self.block_size.load(Relaxed)
    }

    /// Distinct blocks that it holds now in accelerator memory.
    pub fn blocks(&self) -> u64 {
        self.blocks.load(Relaxed)
    }

    /// Whether it names blocks in another way than other endpoints, so that its ids are kept apart: the same engine
    /// with another hash seed or algorithm. It costs about 15 bytes per block.
    pub fn has_own_ids(&self) -> bool {
        self.own_ids.load(Relaxed) != 0
    }

    fn index(&self) -> u64 {
        self.index.id
    }

    fn born(&self) -> u64 {
        self.born
    }

    fn slot(&self) -> Option<u16> {
        self.slot
    }

    fn apply(&self, event: &KvEvent) -> Applied {
        let Some(slot) = self.slot else {
            let applied = match event {
                KvEvent::Stored(e) => Applied {
                    refused: e.hashes.len() as u32,
                    ..Applied::default()
                },
                _ => Applied::default(),
            };
            self.index.count(&applied);
            return applied;
        };
        let mut state = self.state.lock();
        let applied = match event {
            KvEvent::Stored(e) => {
                let full = e.kind == crate::events::GroupKind::Full;
                if full && e.medium == Medium::Gpu && e.block_size > 0 {
                    self.block_size.store(e.block_size, Relaxed);
                }
                state.store(&self.index, slot, e)
            }
            KvEvent::Removed(e) => state.remove(&self.index, slot, e),
            KvEvent::Cleared => {
                drop(state);
                self.clear(Some(Medium::Gpu));
                return Applied::default();
            }
        };
        self.settle(&state);
        if applied.stored + applied.removed > 0 {
            self.index.bump();
        }
        self.index.count(&applied);
        applied
    }

    fn clear(&self, medium: Option<Medium>) {
        let Some(slot) = self.slot else { return };
        let mut state = self.state.lock();
        let gone = state.clear(&self.index, slot, medium);
        self.settle(&state);
        if gone > 0 {
            self.index.bump();
        }
        self.index.metrics.clears.inc();
        self.index.count(&Applied::default());
    }

    /// Brings the counts up to the state.
    fn settle(&self, state: &State) {
        let now = state.blocks(Medium::Gpu);
        let before = self.blocks.swap(now, Relaxed);
        self.index.pairs.update(before, now);
        self.own_ids.store(state.has_own_ids().into(), Relaxed);
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let Some(slot) = self.slot else { return };
        let mut state = std::mem::take(&mut *self.state.lock());
        state.leave(&self.index, slot);
        self.settle(&state);
        self.index.bump();
        // Only now may another endpoint have the slot: nothing in the index refers to it any more.
        {
            let mut slots = self.index.slots.lock();
            slots.free.push(slot);
            self.index.metrics.holders.set(slots.holders());
        }
        self.index.count(&Applied::default());
    }
}

impl fmt::Debug for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holder")
            .field("slot", &self.slot)
            .field("blocks", &self.blocks())
            .finish_non_exhaustive()
    }
}

// === impl Slots ===

impl Slots {
    fn holders(&self) -> i64 {
        i64::from(self.used) - self.free.len() as i64
    }
}

// === impl Inner ===

impl Inner {
    fn bump(&self) -> u64 {
        self.version.fetch_add(1, AcqRel) + 1
    }

    fn take_slot(&self) -> Option<u16> {
        let mut slots = self.slots.lock();
        let slot = match slots.free.pop() {
            Some(slot) => slot,
            None if slots.used == MAX_HOLDERS => return None,
            None => {
                slots.used += 1;
                self.slots_end.store(slots.used, Release);
                (slots.used - 1) as u16
            }
        };
        self.metrics.holders.set(slots.holders());
        Some(slot)
    }

    /// The domain of a block size and medium, with one user more.
    fn domain(&self, block: u32, medium: Medium) -> Option<Arc<Strata>> {
        let mut slots = self.slots.lock();
        let domains = self.domains.load();
        let is = |s: &Arc<Strata>| s.block == block && s.medium == medium;
        if let Some(i) = domains.iter().position(is) {
            slots.users[i] += 1;
            return Some(domains[i].clone());
        }
        if domains.len() == MAX_DOMAINS || !self.budget.has(EMPTY_DOMAIN) {
            return None;
        }
        let new = Arc::new(Strata::new(self.seed, block, medium));
        new.writer.lock().report(&self.budget);
        slots.users.push(1);
        let all = domains.iter().cloned().chain([new.clone()]).collect();
        self.domains.store(Arc::new(all));
        Some(new)
    }

    /// One user less; a domain without users is given up.
    fn leave(&self, strata: &Arc<Strata>) {
        let mut slots = self.slots.lock();
        let domains = self.domains.load();
        let Some(i) = domains.iter().position(|s| Arc::ptr_eq(s, strata)) else {
            return;
        };
        slots.users[i] -= 1;
        if slots.users[i] > 0 {
            return;
        }
        slots.users.remove(i);
        strata.writer.lock().retire(&self.budget);
        let all = domains
            .iter()
            .filter(|s| !Arc::ptr_eq(s, strata))
            .cloned()
            .collect();
        self.domains.store(Arc::new(all));
    }

    /// Counts what was applied.
    fn count(&self, applied: &Applied) {
        let m = &self.metrics;
        let counts = [
            (&m.stored, applied.stored),
            (&m.removed, applied.removed),
            (&m.orphans, applied.orphans),
            (&m.unkeyed, applied.unkeyed),
            (&m.rejected, applied.rejected),
            (&m.refused, applied.refused),
        ];
        for (counter, n) in counts {
            if n > 0 {
                counter.inc_by(n.into());
            }
        }
        let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        m.bytes.set(signed(self.budget.used() as u64));
        m.blocks.set(signed(self.budget.blocks.get()));
        m.chunks.set(signed(self.budget.chunks.get()));
        m.pairs.set(signed(self.pairs.get()));
    }

    fn stats(&self) -> IndexStats {
        let mut stats = IndexStats {
            bytes: self.budget.used(),
            max_bytes: self.budget.max(),
            blocks: self.budget.blocks.get(),
            chunks: self.budget.chunks.get(),
            pairs: self.pairs.get(),
            ..IndexStats::default()
        };
        for strata in self.domains.load().iter() {
            stats.domains += 1;
            stats.sets += strata.writer.lock().sets() as u64;
        }
        stats.holders = self.slots.lock().holders().unsigned_abs();
        let m = &self.metrics;
        stats.applied = AppliedTotals {
            stored: m.stored.get(),
            removed: m.removed.get(),
            orphans: m.orphans.get(),
            unkeyed: m.unkeyed.get(),
            rejected: m.rejected.get(),
            refused: m.refused.get(),
            clears: m.clears.get(),
        };
        stats
    }
}
