//! What an engine says about its KV cache, free of any wire format.

use std::sync::Arc;

/// An engine's id of a block: opaque, good for naming it again later. Byte hashes are folded to their last 8 bytes,
/// big-endian, as vLLM itself does for integers.
pub type BlockHash = u64;

/// Where an engine holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Medium {
    /// Accelerator memory (also what vLLM says on CPU).
    Gpu,
    /// Host memory.
    Cpu,
    /// Disk or a remote store.
    Disk,
    /// A word that is not known here.
    Other,
}

/// The attention kind of a KV cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// Full attention, also MLA: a block's presence means that its prefix positions are reusable.
    Full,
    /// Anything else: sliding window, Mamba, chunked local…
    Other,
}

/// One entry of a block's extra keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// A bare string: an adapter's name or a cache salt.
    Text(Arc<str>),
    /// Anything else (media, embeddings): the block's key cannot be rebuilt from tokens.
    Opaque,
}

/// Blocks that became reusable.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockStored {
    /// One id per block, in order.
    pub hashes: Vec<BlockHash>,
    /// The block before the first one; none at position 0.
    pub parent: Option<BlockHash>,
    /// The tokens of all the blocks, `hashes.len() × block_size` of them; none in a placeholder.
    pub tokens: Vec<u32>,
    /// Tokens in a block. 0 marks a placeholder, as offload connectors send them: blocks known by their ids from
    /// before now have a copy in this medium too.
    pub block_size: u32,
    /// The adapter that the blocks belong to.
    pub lora_name: Option<Arc<str>>,
    /// Per block, what else entered the engine's hash; empty where nothing did.
    pub extra_keys: Vec<Vec<ExtraKey>>,
    /// Where the blocks are.
    pub medium: Medium,
    /// The KV cache group.
    pub group: u32,
    /// The group's kind; engines that do not say have one full-attention group.
    pub kind: GroupKind,
}

/// One copy of each named block is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockRemoved {
    /// The ids, as stored.
    pub hashes: Vec<BlockHash>,
    /// Where the copy was.
    pub medium: Medium,
    /// The KV cache group.
    pub group: u32,
}

/// A change of an engine's cache.
#[derive(Clone, Debug, PartialEq)]
pub enum KvEvent {
    /// Blocks became reusable.
    Stored(BlockStored),
    /// Copies of blocks are gone.
    Removed(BlockRemoved),
    /// The whole cache is gone.
    Cleared,
}

/// What an engine announced in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct EventBatch {
    /// Counts up by one from 0 in each publisher process.
    pub seq: u64,
    /// The engine's clock when it published, seconds since the epoch.
    pub ts: f64,
    /// Data-parallel rank.
    pub rank: Option<u32>,
    /// In the order to apply them.
    pub events: Vec<KvEvent>,
}
