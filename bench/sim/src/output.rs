use crate::Prompt;
use std::{ops::Range, sync::Arc};

/// What a pod says while it works. Times are seconds from the run's start.
#[derive(Clone, Debug)]
pub enum Output {
    /// A request's first token.
    FirstToken {
        /// The request.
        id: u64,
        /// When.
        at: f64,
    },
    /// Further tokens.
    Tokens {
        /// The request.
        id: u64,
        /// When.
        at: f64,
        /// How many.
        n: u32,
    },
    /// A request is complete. Comes right after its last token.
    Done {
        /// The request.
        id: u64,
        /// When.
        at: f64,
        /// Prompt tokens that came from the prefix cache.
        cached: u32,
        /// Prompt tokens.
        prompt: u32,
        /// Generated tokens.
        output: u32,
    },
    /// A request needs more memory than the pool has, ever: no token comes.
    Refused {
        /// The request.
        id: u64,
        /// When.
        at: f64,
    },
    /// Changes of the prefix cache in one step, in the order to apply them.
    Kv {
        /// When.
        at: f64,
        /// The changes.
        batch: Vec<KvChange>,
    },
}

/// A change of the prefix cache.
#[derive(Clone, Debug)]
pub enum KvChange {
    /// Blocks became reusable. The same hash may be stored more than once.
    Stored(Stored),
    /// One copy of each named block is gone.
    Removed(Vec<u64>),
    /// The whole cache is gone.
    Cleared,
}

/// Blocks that became reusable.
#[derive(Clone, Debug)]
pub struct Stored {
    /// One hash per block, in order.
    pub hashes: Vec<u64>,
    /// The hash of the block before the first; none at position 0.
    pub parent: Option<u64>,
    /// The prompt whose tokens are in the blocks, and which of them.
    pub prompt: Arc<Prompt>,
    /// Positions in the prompt: `hashes.len() × block_size` of them.
    pub range: Range<usize>,
    /// Tokens in a block.
    pub block_size: u32,
}

// === impl Stored ===

impl Stored {
    /// The tokens of all the blocks.
    pub fn tokens(&self) -> &[u32] {
        self.prompt.ids().get(self.range.clone()).unwrap_or(&[])
    }
}
