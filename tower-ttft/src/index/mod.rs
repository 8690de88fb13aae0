//! Which endpoint holds which blocks.
use crate::{
    chain::{Chain, KeySpace},
    events::KvEvent,
};
use std::sync::Arc;

/// The prefix index of one base model.
#[derive(Clone)]
pub struct PrefixIndex {}

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
pub struct Holder {}

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
}

/// Matching prefix length per endpoint, reusable between lookups.
#[derive(Default)]
pub struct Matches {}

impl PrefixIndex {
    /// An empty index.
    pub fn new(_params: IndexParams) -> Self {
        unimplemented!()
    }
    /// A place for one endpoint.
    pub fn holder(&self) -> Holder {
        unimplemented!()
    }
    /// Applies one event of an endpoint.
    pub fn apply(&self, _holder: &Holder, _event: &KvEvent) -> Applied {
        unimplemented!()
    }
    /// Forgets what an endpoint holds.
    pub fn clear(&self, _holder: &Holder) {
        unimplemented!()
    }
    /// Finds how many leading tokens of a chain each endpoint holds.
    pub fn matches(&self, _chain: &Chain, _out: &mut Matches) {
        unimplemented!()
    }
    /// How many leading tokens of a chain one endpoint holds.
    pub fn depth(&self, _holder: &Holder, _chain: &Chain) -> u32 {
        unimplemented!()
    }
    /// Changes with every change of the index.
    pub fn version(&self) -> u64 {
        unimplemented!()
    }
}

impl Holder {
    /// The block size seen in this endpoint's events, 0 before the first.
    pub fn block_size(&self) -> u32 {
        unimplemented!()
    }
    /// Distinct blocks that it holds now.
    pub fn blocks(&self) -> u64 {
        unimplemented!()
    }
}

impl Matches {
    /// Leading tokens (whole blocks, not clipped to the prompt) that an endpoint holds.
    pub fn get(&self, _holder: &Holder) -> u32 {
        unimplemented!()
    }
}
