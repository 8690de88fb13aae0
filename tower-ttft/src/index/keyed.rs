//! From an event to chain keys: what of it can be keyed, and from which root.
use crate::{
    chain::{ATOM_TOKENS, ChainKind, KeySpace, Root},
    events::{BlockStored, ExtraKey},
};

/// The leading blocks of an event whose keys can be rebuilt from tokens, and the cache salt of the first.
///
/// The adapter's name may stand in every block's extra keys and one other string in those of the prompt's first block:
/// that is the salt. Anything else (media, embeddings, a second string) is part of the engine's hash that we cannot
/// rebuild, so the chain ends there. The order of the keys differs between engine versions and does not matter.
pub(super) fn keyed(event: &BlockStored) -> (usize, Option<&str>) {
    let mut salt = None;
    for block in 0..event.hashes.len() {
        let mut lora = event.lora_name.as_deref();
        let extra = event.extra_keys.get(block).map_or(&[][..], |e| &e[..]);
        for key in extra {
            match key {
                ExtraKey::Text(t) if lora == Some(&**t) => lora = None,
                ExtraKey::Text(t) if block == 0 && event.parent.is_none() && salt.is_none() => {
                    salt = Some(&**t);
                }
                _ => return (block, salt),
            }
        }
    }
    (event.hashes.len(), salt)
}

/// The root of an event's chain, for an event without a parent.
pub(super) fn root(keys: &KeySpace, model: &str, event: &BlockStored, salt: Option<&str>) -> Root {
    keys.root(ChainKind::Tokens, model, event.lora_name.as_deref(), salt)
}

/// The key of a block of whole atoms behind the block with key `parent`.
#[inline]
pub(super) fn next(keys: &KeySpace, parent: u64, tokens: &[u32]) -> u64 {
    tokens
        .chunks_exact(ATOM_TOKENS)
        .fold(parent, |key, atom| keys.next(key, atom))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{GroupKind, Medium};

    fn text(s: &str) -> ExtraKey {
        ExtraKey::Text(s.into())
    }

    fn event(lora: Option<&str>, parent: Option<u64>, extra: Vec<Vec<ExtraKey>>) -> BlockStored {
        BlockStored {
            hashes: vec![1, 2, 3],
            parent,
            tokens: vec![0; 48],
            block_size: 16,
            lora_name: lora.map(Into::into),
            extra_keys: extra,
            medium: Medium::Gpu,
            group: 0,
            kind: GroupKind::Full,
        }
    }

    #[test]
    fn the_other_string_of_the_first_block_is_the_salt() {
        let lora = || vec![text("ad")];
        for first in [vec![text("ad"), text("s")], vec![text("s"), text("ad")]] {
            let e = event(Some("ad"), None, vec![first, lora(), lora()]);
            assert_eq!(keyed(&e), (3, Some("s")));
        }
        let e = event(None, None, vec![vec![text("s")], vec![]]);
        assert_eq!(keyed(&e), (3, Some("s")));
        // A salt may be spelt like the adapter.
        let e = event(Some("ad"), None, vec![vec![text("ad"), text("ad")]]);
        assert_eq!(keyed(&e), (3, Some("ad")));
        assert_eq!(
            keyed(&event(Some("ad"), Some(9), vec![lora(), lora(), lora()])),
            (3, None)
        );
    }

    #[test]
    fn any_other_extra_key_ends_the_chain() {
        let media = || vec![ExtraKey::Opaque];
        assert_eq!(keyed(&event(None, None, vec![vec![], media()])), (1, None));
        assert_eq!(keyed(&event(None, None, vec![media()])), (0, None));
        // A string in a later block is no salt, nor is a second one in the first.
        assert_eq!(
            keyed(&event(None, None, vec![vec![], vec![text("x")]])),
            (1, None)
        );
        assert_eq!(
            keyed(&event(None, Some(9), vec![vec![text("x")]])),
            (0, None)
        );
        let two = vec![vec![text("a"), text("b")]];
        assert_eq!(keyed(&event(None, None, two)), (0, Some("a")));
    }
}
