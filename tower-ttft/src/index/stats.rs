//! What events changed, and what an index holds.
use std::ops::AddAssign;

/// What an event changed, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Copies recorded.
    pub stored: u32,
    /// Copies removed.
    pub removed: u32,
    /// Stored blocks whose parent is not known, or removals of unknown blocks.
    pub orphans: u32,
    /// Blocks that are tracked for removal only or ignored: media keys, other attention groups, odd block sizes.
    pub unkeyed: u32,
    /// Blocks of an event whose numbers of hashes and tokens do not agree; nothing of it was applied.
    pub rejected: u32,
    /// Blocks that were not recorded because the index has reached its bound.
    pub refused: u32,
}

/// What an index holds, and what it takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Memory, in bytes.
    pub bytes: usize,
    /// The bound on it.
    pub max_bytes: usize,
    /// Endpoints with a place.
    pub holders: u64,
    /// Domains: block sizes and media in use.
    pub domains: u64,
    /// Distinct blocks that any endpoint holds, on any medium.
    pub blocks: u64,
    /// Distinct blocks on accelerators, summed over the endpoints.
    pub pairs: u64,
    /// Chunks in use, of up to 32 blocks each.
    pub chunks: u64,
    /// Interned sets of two or more endpoints.
    pub sets: u64,
    /// All that was applied.
    pub applied: AppliedTotals,
}

/// Sums of [`Applied`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AppliedTotals {
    /// Copies recorded.
    pub stored: u64,
    /// Copies removed, but for those forgotten at once.
    pub removed: u64,
    /// Stored blocks whose parent was not known, and removals of unknown blocks.
    pub orphans: u64,
    /// Blocks that cannot count as residency.
    pub unkeyed: u64,
    /// Blocks of malformed events.
    pub rejected: u64,
    /// Blocks for which there was no room.
    pub refused: u64,
    /// Times that an endpoint's blocks were forgotten at once.
    pub clears: u64,
}

// === impl Applied ===

impl AddAssign for Applied {
    fn add_assign(&mut self, other: Self) {
        self.stored += other.stored;
        self.removed += other.removed;
        self.orphans += other.orphans;
        self.unkeyed += other.unkeyed;
        self.rejected += other.rejected;
        self.refused += other.refused;
    }
}
