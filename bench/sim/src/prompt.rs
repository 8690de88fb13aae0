use std::sync::{Arc, OnceLock};
use twox_hash::XxHash3_64;

/// A prompt as an engine sees it: token ids, and per block of them a key over everything up to its end.
#[derive(Debug)]
pub struct Prompt {
    ids: Arc<[u32]>,
    bytes: u32,
    /// Keys by block size, computed when first asked for. More sizes than cells are recomputed each time.
    keys: [OnceLock<(u32, Arc<[u64]>)>; 3],
}

/// The key before the first block: the same in every pod, as in vLLM.
const ROOT: u64 = 0x5EED_0F0F_B10C_5EED;

// === impl Prompt ===

impl Prompt {
    /// A prompt of these tokens, which took so many bytes of text.
    pub fn new(ids: impl Into<Arc<[u32]>>, bytes: u32) -> Self {
        Self {
            ids: ids.into(),
            bytes,
            keys: Default::default(),
        }
    }

    /// The token ids.
    pub fn ids(&self) -> &Arc<[u32]> {
        &self.ids
    }

    /// Tokens.
    pub fn tokens(&self) -> u32 {
        self.ids.len() as u32
    }

    /// Bytes of text.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// One key per whole block of so many tokens.
    pub fn keys(&self, block_size: u32) -> Arc<[u64]> {
        for cell in &self.keys {
            let (size, keys) = cell.get_or_init(|| (block_size, self.chain(block_size)));
            if *size == block_size {
                return keys.clone();
            }
        }
        self.chain(block_size)
    }

    fn chain(&self, block_size: u32) -> Arc<[u64]> {
        let mut parent = ROOT;
        let mut bytes = Vec::with_capacity(block_size as usize * 4);
        self.ids
            .chunks_exact(block_size.max(1) as usize)
            .map(|block| {
                bytes.clear();
                bytes.extend(block.iter().flat_map(|id| id.to_le_bytes()));
                // Even: odd keys are those of recurrent states in the pool.
                parent = XxHash3_64::oneshot_with_seed(parent, &bytes) << 1;
                parent
            })
            .collect()
    }
}
