//! What an engine's cache holds, worked out from what it announced by the plainest means: the truth that predictions are
//! held against when they differ from what the engine reported.

use crate::{
    engine::BLOCK,
    tap::{Announced, Batch},
};
use serde_json::Value;
use std::collections::HashMap;

/// The cache of one engine process.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    /// Which id the engine gave to a block behind another one.
    names: HashMap<(String, Vec<u32>, String), String>,
    /// How many copies of it there are.
    copies: HashMap<String, u32>,
}

// === impl Cache ===

impl Cache {
    /// The cache after these batches.
    pub fn after<'a>(batches: impl IntoIterator<Item = &'a Batch>) -> Self {
        let mut cache = Self::default();
        for batch in batches {
            batch.events.iter().for_each(|e| cache.apply(e));
        }
        cache
    }

    /// Applies an event.
    pub fn apply(&mut self, event: &Announced) {
        match event {
            Announced::Stored {
                stored,
                parent,
                tokens,
                extra,
            } => {
                let mut before = name(parent.as_ref().unwrap_or(&Value::Null));
                for (i, (id, tokens)) in stored.iter().zip(tokens.chunks(BLOCK)).enumerate() {
                    let extra = extra.as_ref().and_then(|e| e.get(i));
                    let id = name(id);
                    self.names.insert(
                        (before, tokens.to_vec(), name(extra.unwrap_or(&Value::Null))),
                        id.clone(),
                    );
                    *self.copies.entry(id.clone()).or_default() += 1;
                    before = id;
                }
            }
            Announced::Removed { removed } => {
                for id in removed {
                    let copies = self.copies.entry(name(id)).or_default();
                    *copies = copies.saturating_sub(1);
                }
            }
            Announced::Cleared { .. } => self.copies.clear(),
        }
    }

    /// How many tokens of a prompt would be found: whole blocks from its start, and never the last token. `salt` is the
    /// request's `cache_salt`.
    pub fn cached(&self, prompt: &[u32], salt: Option<&str>) -> usize {
        let mut before = name(&Value::Null);
        let mut depth = 0;
        for (i, tokens) in prompt.chunks_exact(BLOCK).enumerate() {
            let extra = match salt {
                Some(salt) if i == 0 => name(&Value::from(vec![salt])),
                _ => name(&Value::Null),
            };
            match self.names.get(&(before, tokens.to_vec(), extra)) {
                Some(id) if self.copies.get(id).is_some_and(|n| *n > 0) => before = id.clone(),
                _ => break,
            }
            depth += 1;
        }
        depth.min(prompt.len().saturating_sub(1) / BLOCK) * BLOCK
    }
}

fn name(value: &Value) -> String {
    value.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn copies_are_counted_and_the_last_token_is_never_cached() {
        let prompt: Vec<u32> = (0..96).collect();
        let stored = |ids: &[u64], parent: Option<u64>, tokens: &[u32]| Announced::Stored {
            stored: ids.iter().map(|i| json!(i)).collect(),
            parent: parent.map(|p| json!(p)),
            tokens: tokens.to_vec(),
            extra: None,
        };
        let mut cache = Cache::default();
        cache.apply(&stored(&[1, 2], None, &prompt[..64]));
        cache.apply(&stored(&[3], Some(2), &prompt[64..]));
        assert_eq!(cache.cached(&prompt, None), 64);
        assert_eq!(cache.cached(&[&prompt[..], &[7]].concat(), None), 96);
        assert_eq!(cache.cached(&prompt, Some("salt")), 0);
        cache.apply(&stored(&[2], Some(1), &prompt[32..64]));
        let removed = Announced::Removed {
            removed: vec![json!(2)],
        };
        cache.apply(&removed);
        assert_eq!(cache.cached(&prompt, None), 64);
        cache.apply(&removed);
        assert_eq!(cache.cached(&prompt, None), 32);
        cache.apply(&Announced::Cleared { cleared: true });
        assert_eq!(cache.cached(&prompt, None), 0);
    }
}
