//! Prefix keys: one 64-bit key per atom, each over its parent's, so that equal keys mean equal prefixes.
//!
//! `root = H(seed, base model, lora name, cache salt)` and `key = xxh3(atom) seeded with the parent's key`. Keys are
//! computed from tokens, so an engine's own hash algorithm and seed never matter. The seed keeps users from crafting
//! collisions; a collision would cost a worse choice, never a wrong answer.

use std::{hash::Hasher, sync::Arc};
use twox_hash::XxHash3_64;

/// Tokens in an atom of a [`ChainKind::Tokens`] chain.
pub const ATOM_TOKENS: usize = 16;

/// Bytes in an atom of a [`ChainKind::Bytes`] chain.
pub const ATOM_BYTES: usize = 64;

/// What a chain's atoms are made of. Chains of different kinds never compare equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChainKind {
    /// Atoms of [`ATOM_TOKENS`] tokens, exact.
    Tokens,
    /// Atoms of [`ATOM_BYTES`] bytes of text, where tokens are not known. Good for guessed residency only.
    Bytes,
}

/// The seed of an installation: all keys that are compared with each other come from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySpace {
    seed: u64,
}

/// The key before the first atom: it separates models, adapters and salts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Root(pub u64);

/// The prefix keys of one prompt.
#[derive(Clone, Debug)]
pub struct Chain {
    kind: ChainKind,
    root: Root,
    keys: Arc<[u64]>,
}

// === impl KeySpace ===

impl KeySpace {
    /// A key space with the installation's seed.
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The root of a model, an optional adapter and an optional cache salt. An absent part differs from an empty one.
    pub fn root(
        &self,
        kind: ChainKind,
        model: &str,
        lora: Option<&str>,
        salt: Option<&str>,
    ) -> Root {
        let mut h = XxHash3_64::with_seed(self.seed);
        h.write(match kind {
            ChainKind::Tokens => b"tokens/1",
            ChainKind::Bytes => b"bytes-/1",
        });
        for part in [Some(model), lora, salt] {
            match part {
                None => h.write(&u64::MAX.to_le_bytes()),
                Some(s) => {
                    h.write(&(s.len() as u64).to_le_bytes());
                    h.write(s.as_bytes());
                }
            }
        }
        Root(h.finish())
    }

    /// The key of an atom of exactly [`ATOM_TOKENS`] tokens behind `parent`.
    #[inline]
    pub fn next(&self, parent: u64, atom: &[u32]) -> u64 {
        let mut bytes = [0u8; ATOM_TOKENS * 4];
        for (b, t) in bytes.chunks_exact_mut(4).zip(atom) {
            b.copy_from_slice(&t.to_le_bytes());
        }
        XxHash3_64::oneshot_with_seed(parent, &bytes)
    }

    /// The chain of `tokens` behind `root`; a last atom that is not full has no key.
    pub fn tokens(&self, root: Root, tokens: &[u32]) -> Chain {
        let mut key = root.0;
        let keys = tokens
            .chunks_exact(ATOM_TOKENS)
            .map(|atom| {
                key = self.next(key, atom);
                key
            })
            .collect();
        Chain {
            kind: ChainKind::Tokens,
            root,
            keys,
        }
    }

    /// The approximate chain of a text behind `root`; a last atom that is not full has no key.
    pub fn bytes(&self, root: Root, text: &[u8]) -> Chain {
        let mut key = root.0;
        let keys = text
            .chunks_exact(ATOM_BYTES)
            .map(|atom| {
                key = XxHash3_64::oneshot_with_seed(key, atom);
                key
            })
            .collect();
        Chain {
            kind: ChainKind::Bytes,
            root,
            keys,
        }
    }
}

// === impl Chain ===

impl Chain {
    /// A chain without keys: nothing is known of the prompt.
    pub fn empty(kind: ChainKind) -> Self {
        Self {
            kind,
            root: Root(0),
            keys: Arc::new([]),
        }
    }

    /// What the atoms are made of.
    pub fn kind(&self) -> ChainKind {
        self.kind
    }

    /// The key before the first atom.
    pub fn root(&self) -> Root {
        self.root
    }

    /// One key per full atom.
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// How many leading atoms this chain has in common with another: keys cover their whole prefix, so one
    /// bisection finds it.
    pub fn common_atoms(&self, other: &Chain) -> usize {
        if self.kind != other.kind {
            return 0;
        }
        let n = self.keys.len().min(other.keys.len());
        if n == 0 || self.keys[0] != other.keys[0] {
            return 0;
        }
        let (mut lo, mut hi) = (1, n);
        while lo < hi {
            let mid = lo + (hi - lo).div_ceil(2);
            if self.keys[mid - 1] == other.keys[mid - 1] {
                lo = mid;
            } else {
                hi = mid - 1;
            }
        }
        lo
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chain(tokens: &[u32]) -> Chain {
        let ks = KeySpace::new(7);
        ks.tokens(ks.root(ChainKind::Tokens, "m", None, None), tokens)
    }

    #[test]
    fn roots_keep_models_adapters_and_salts_apart() {
        let ks = KeySpace::new(1);
        let t = ChainKind::Tokens;
        let roots = [
            ks.root(t, "m", None, None),
            ks.root(t, "n", None, None),
            ks.root(t, "m", Some("a"), None),
            ks.root(t, "m", None, Some("a")),
            ks.root(t, "m", Some(""), None),
            ks.root(ChainKind::Bytes, "m", None, None),
            KeySpace::new(2).root(t, "m", None, None),
        ];
        for (i, a) in roots.iter().enumerate() {
            for b in &roots[i + 1..] {
                assert_ne!(a, b);
            }
        }
    }

    #[test]
    fn the_same_atom_behind_another_parent_has_another_key() {
        let (x, y) = ([1u32; 16], [2u32; 16]);
        let xy = chain(&[x, y].concat());
        let yy = chain(&[y, y].concat());
        assert_ne!(xy.keys()[1], yy.keys()[1]);
        assert_eq!(xy.common_atoms(&yy), 0);
    }

    #[test]
    fn kinds_never_compare() {
        let ks = KeySpace::new(1);
        let a = ks.bytes(ks.root(ChainKind::Bytes, "m", None, None), &[0; 64]);
        assert_eq!(a.keys().len(), 1);
        assert_eq!(a.common_atoms(&chain(&[0; 16])), 0);
    }

    proptest! {
        #[test]
        fn common_atoms_is_the_first_difference(a in prop::collection::vec(0u32..2, 0..200), b in prop::collection::vec(0u32..2, 0..200), share in 0usize..200) {
            let share = share.min(a.len());
            let b = [&a[..share], &b[..]].concat();
            let same = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
            prop_assert_eq!(chain(&a).common_atoms(&chain(&b)), same / ATOM_TOKENS);
        }
    }
}
