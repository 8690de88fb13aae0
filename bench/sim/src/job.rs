use crate::Prompt;
use smallvec::SmallVec;
use std::sync::Arc;

/// A request inside a pod.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) id: u64,
    pub(crate) prompt: Arc<Prompt>,
    pub(crate) keys: Arc<[u64]>,
    /// Tokens to generate.
    pub(crate) output: u32,
    pub(crate) generated: u32,
    /// Tokens whose KV is there.
    pub(crate) computed: u32,
    /// Of the prompt, what the cache gave when it was first admitted; none before that.
    pub(crate) cached: Option<u32>,
    /// When it was first admitted.
    pub(crate) admitted: f64,
    /// Its blocks, in order.
    pub(crate) blocks: SmallVec<[u32; 24]>,
    /// Blocks beside those of its tokens.
    pub(crate) extra: SmallVec<[u32; 4]>,
    /// How many of its blocks are known to others.
    pub(crate) committed: u32,
    /// Whether its state was offered to others.
    pub(crate) saved: bool,
    /// Tokens in the step that is under way.
    pub(crate) step: u32,
    /// Its client left: it goes when the step ends.
    pub(crate) gone: bool,
}

// === impl Job ===

impl Job {
    /// Tokens that exist: the prompt and what was generated.
    pub(crate) fn tokens(&self) -> u32 {
        self.prompt.tokens() + self.generated
    }

    /// Whether more than the newest token has to be computed before the next one.
    pub(crate) fn prefills(&self) -> bool {
        self.generated == 0 || self.computed + 1 < self.tokens()
    }

    /// How many tokens the next step computes within a budget. While it prefills, chunks end on a block's end, and what
    /// is behind the last whole block is a chunk of its own, because only whole chunks leave reusable state (as vLLM
    /// splits the prefills of hybrid models).
    pub(crate) fn chunk(&self, budget: u32, block_size: u32) -> u32 {
        let left = self.tokens() - self.computed;
        let n = left.min(budget);
        if !self.prefills() {
            return n;
        }
        let last = self.tokens() - self.tokens() % block_size;
        let end = self.computed + n;
        if end < last {
            n - n % block_size
        } else if self.computed < last && last < end {
            last - self.computed
        } else {
            n
        }
    }
}
