//! A chunk: 32 consecutive blocks at positions that are a multiple of 32, and who holds them.
use super::{
    pages::Pages,
    runs::{Runs, SLOTS, run_of},
    sets::SetId,
};
use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

/// A chunk's name.
pub(super) type ChunkId = u32;

/// A block's address: its chunk and slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Addr(pub(super) u32);

/// What readers see of a chunk. Everything is atomic and guarded by a version (a seqlock): one writer, which never
/// waits; readers never wait either, they read again if the version moved. Half a cache line of header, then keys.
#[repr(C, align(32))]
pub(super) struct Chunk {
    /// Odd while it is being written.
    version: AtomicU32,
    /// First slot, end of slots, and whether the runs are spilled.
    span: AtomicU32,
    /// A bit where a run starts.
    cuts: AtomicU32,
    /// The runs' sets; where they are more than fit, the first is the place of a [`Spill`].
    runs: [AtomicU32; INLINE],
    /// Chain keys. Those below the first slot or at and past the end mean nothing.
    keys: [AtomicU64; SLOTS],
}

/// The runs of a chunk that has many.
pub(super) type Spill = [AtomicU32; SLOTS];

/// Which slots of a chunk have keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) end: usize,
    spilled: bool,
}

/// A consistent look at the header, as far as one can tell before [`Chunk::unchanged`].
pub(super) struct Look<'a> {
    chunk: &'a Chunk,
    version: u32,
    pub(super) span: Span,
    pub(super) cuts: u32,
    spill: Option<&'a Spill>,
}

pub(super) type Chunks = Pages<Chunk, CHUNK_PAGE>;
pub(super) type Spills = Pages<Spill, SPILL_PAGE>;

pub(super) const CHUNK_PAGE: usize = 256;
const SPILL_PAGE: usize = 64;
/// Runs in a chunk's header.
const INLINE: usize = 5;
const SPILLED: u32 = 1 << 16;
/// How often a reader tries again. The writer is at a chunk for some 50 ns, so only one that was stopped half way makes a
/// reader give up.
const SPINS: u32 = 200;

// === impl Addr ===

impl Addr {
    pub(super) fn new(chunk: ChunkId, slot: usize) -> Self {
        Self(chunk << 5 | slot as u32)
    }

    #[inline]
    pub(super) fn chunk(self) -> ChunkId {
        self.0 >> 5
    }

    #[inline]
    pub(super) fn slot(self) -> usize {
        (self.0 & 31) as usize
    }

    #[inline]
    pub(super) fn bit(self) -> u32 {
        1 << (self.0 & 31)
    }
}

// === impl Chunk ===

impl Chunk {
    pub(super) fn new() -> Self {
        Self {
            version: AtomicU32::new(0),
            span: AtomicU32::new(0),
            cuts: AtomicU32::new(1),
            runs: Default::default(),
            keys: Default::default(),
        }
    }

    /// Loads a line of the header and one of the keys, so that they are near when they are needed.
    #[inline]
    pub(super) fn touch(&self) -> u64 {
        u64::from(self.version.load(Relaxed)) ^ self.keys[SLOTS - 1].load(Relaxed)
    }

    #[inline]
    pub(super) fn key(&self, slot: usize) -> u64 {
        self.keys[slot & 31].load(Relaxed)
    }

    #[inline]
    pub(super) fn span(&self) -> Span {
        let s = self.span.load(Relaxed);
        Span {
            start: (s & 0xFF) as usize & 31,
            end: ((s >> 8 & 0xFF) as usize).min(SLOTS),
            spilled: s & SPILLED != 0,
        }
    }

    /// Reads until nothing changed meanwhile. None if the writer is at this chunk all the time; whoever then takes the
    /// writer's turn reads in peace.
    #[inline]
    pub(super) fn read<'a, R>(
        &'a self,
        spills: &'a Spills,
        mut f: impl FnMut(&Look<'a>) -> R,
    ) -> Option<R> {
        for _ in 0..SPINS {
            let version = self.version.load(Acquire);
            if version & 1 == 0 {
                let span = self.span();
                let look = Look {
                    chunk: self,
                    version,
                    span,
                    cuts: self.cuts.load(Relaxed) | 1,
                    spill: self.spill(spills, span),
                };
                let r = f(&look);
                if look.unchanged() {
                    return Some(r);
                }
            }
            std::hint::spin_loop();
        }
        None
    }

    #[inline]
    fn spill<'a>(&self, spills: &'a Spills, span: Span) -> Option<&'a Spill> {
        if span.spilled {
            spills.get(self.runs[0].load(Relaxed) as usize)
        } else {
            None
        }
    }

    #[inline]
    fn run(&self, spill: Option<&Spill>, i: usize) -> SetId {
        match spill {
            Some(s) => s[i & 31].load(Relaxed),
            None => self.runs[i.min(INLINE - 1)].load(Relaxed),
        }
    }

    // What follows is for the one writer.

    /// The runs, for the writer.
    pub(super) fn runs(&self, spills: &Spills) -> Runs {
        let spill = self.spill(spills, self.span());
        Runs::read(self.cuts.load(Relaxed), |i| self.run(spill, i))
    }

    /// The set of one slot, for the writer.
    pub(super) fn set_of(&self, spills: &Spills, slot: usize) -> SetId {
        let spill = self.spill(spills, self.span());
        self.run(spill, run_of(self.cuts.load(Relaxed) | 1, slot))
    }

    /// The place of the spilled runs.
    pub(super) fn spilled(&self) -> Option<u32> {
        self.span().spilled.then(|| self.runs[0].load(Relaxed))
    }

    /// Whether runs need a place of their own.
    pub(super) fn spills(runs: &Runs) -> bool {
        runs.len() > INLINE
    }

    /// Changes the chunk under its version.
    fn write(&self, f: impl FnOnce()) {
        let v = self.version.load(Relaxed);
        self.version.store(v.wrapping_add(1), Relaxed);
        fence(Release);
        f();
        self.version.store(v.wrapping_add(2), Release);
    }

    /// Begins anew with one key and no holders.
    pub(super) fn start(&self, slot: usize, key: u64) {
        self.write(|| {
            self.keys[slot].store(key, Relaxed);
            self.set_span(slot, slot + 1, false);
            self.cuts.store(1, Relaxed);
            self.runs[0].store(super::sets::EMPTY, Relaxed);
        });
    }

    /// Adds a key behind the last.
    pub(super) fn append(&self, key: u64) {
        let span = self.span();
        if span.end < SLOTS {
            self.write(|| {
                self.keys[span.end].store(key, Relaxed);
                self.set_span(span.start, span.end + 1, span.spilled);
            });
        }
    }

    /// Replaces the runs and the end. `spill` is a place for runs that do not fit, with its number.
    pub(super) fn set_runs(&self, runs: &Runs, end: usize, spill: Option<(u32, &Spill)>) {
        let start = self.span().start;
        self.write(|| {
            self.cuts.store(runs.cuts(), Relaxed);
            match spill {
                Some((i, place)) => {
                    for (to, id) in place.iter().zip(runs.ids()) {
                        to.store(*id, Relaxed);
                    }
                    self.runs[0].store(i, Relaxed);
                }
                None => {
                    for (to, id) in self.runs.iter().zip(runs.ids()) {
                        to.store(*id, Relaxed);
                    }
                }
            }
            self.set_span(start, end, spill.is_some());
        });
    }

    fn set_span(&self, start: usize, end: usize, spilled: bool) {
        let flag = if spilled { SPILLED } else { 0 };
        self.span
            .store(start as u32 | (end as u32) << 8 | flag, Relaxed);
    }
}

// === impl Look ===

impl Look<'_> {
    #[inline]
    pub(super) fn key(&self, slot: usize) -> u64 {
        self.chunk.key(slot)
    }

    /// The set of a run.
    #[inline]
    pub(super) fn run(&self, i: usize) -> SetId {
        self.chunk.run(self.spill, i)
    }

    /// Whether all that was read through this look, and through the sets that it names, was of one moment.
    #[inline]
    fn unchanged(&self) -> bool {
        fence(Acquire);
        self.chunk.version.load(Relaxed) == self.version
    }
}
