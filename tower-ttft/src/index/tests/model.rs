//! A literal model: per endpoint a multiset of (id, medium, block size, group), and what block each id names.
use crate::{
    chain::{Chain, ChainKind, KeySpace},
    events::{BlockRemoved, BlockStored, ExtraKey, GroupKind, KvEvent, Medium},
    index::Applied,
};
use std::collections::{HashMap, HashSet};

/// A block by its meaning: the prefix that it ends, as a node of a trie. 0 is no block.
pub(super) type Node = u32;

#[derive(Default)]
pub(super) struct Trie {
    nodes: HashMap<(Node, Vec<u32>), Node>,
    roots: HashMap<(u32, Option<String>, Option<String>), Node>,
    last: Node,
}

/// A prompt, with adapter and salt.
#[derive(Clone, Debug)]
pub(super) struct Doc {
    pub(super) tokens: Vec<u32>,
    pub(super) lora: Option<String>,
    pub(super) salt: Option<String>,
    /// The first token that media stand for.
    pub(super) media: Option<usize>,
}

#[derive(Default)]
pub(super) struct Endpoint {
    names: HashMap<(Medium, u32, u64), Node>,
    copies: HashMap<(Medium, u32, u64, u32), u32>,
    unkeyed: HashMap<(Medium, u64, u32), u32>,
    others: HashSet<(Medium, u32)>,
}

pub(super) const MODEL: &str = "model";

pub(super) fn keys() -> KeySpace {
    KeySpace::new(11)
}

// === impl Trie ===

impl Trie {
    pub(super) fn root(&mut self, block: u32, lora: Option<&str>, salt: Option<&str>) -> Node {
        let key = (block, lora.map(Into::into), salt.map(Into::into));
        *self.roots.entry(key).or_insert_with(|| {
            self.last += 1;
            self.last
        })
    }

    pub(super) fn child(&mut self, parent: Node, tokens: &[u32]) -> Node {
        *self
            .nodes
            .entry((parent, tokens.into()))
            .or_insert_with(|| {
                self.last += 1;
                self.last
            })
    }

    /// The blocks of a prompt.
    pub(super) fn path(&mut self, doc: &Doc, block: u32) -> Vec<Node> {
        let mut node = self.root(block, doc.lora.as_deref(), doc.salt.as_deref());
        let mut path = Vec::new();
        for tokens in doc.tokens.chunks_exact(block as usize) {
            node = self.child(node, tokens);
            path.push(node);
        }
        path
    }
}

// === impl Doc ===

impl Doc {
    pub(super) fn chain(&self) -> Chain {
        let root = keys().root(
            ChainKind::Tokens,
            MODEL,
            self.lora.as_deref(),
            self.salt.as_deref(),
        );
        keys().tokens(root, &self.tokens)
    }

    /// The event that stores some blocks.
    pub(super) fn stored(
        &self,
        block: u32,
        range: std::ops::Range<usize>,
        id: impl Fn(usize) -> u64,
        medium: Medium,
        group: u32,
        kind: GroupKind,
    ) -> BlockStored {
        let b = block as usize;
        let extra = range.clone().map(|j| {
            let text = |s: &String| ExtraKey::Text(s.as_str().into());
            let mut extra: Vec<ExtraKey> = self.lora.iter().map(text).collect();
            if j == 0 {
                extra.extend(self.salt.iter().map(text));
            }
            // vLLM puts it on every block that overlaps with the item; one item that never ends will do.
            if self.media.is_some_and(|m| (j + 1) * b > m) {
                extra.push(ExtraKey::Opaque);
            }
            extra
        });
        BlockStored {
            hashes: range.clone().map(&id).collect(),
            parent: range.start.checked_sub(1).map(&id),
            tokens: self.tokens[range.start * b..range.end * b].to_vec(),
            block_size: block,
            lora_name: self.lora.as_deref().map(Into::into),
            extra_keys: extra.collect(),
            medium,
            group,
            kind,
        }
    }
}

// === impl Endpoint ===

impl Endpoint {
    pub(super) fn apply(&mut self, trie: &mut Trie, event: &KvEvent) -> Applied {
        match event {
            KvEvent::Stored(e) => self.store(trie, e),
            KvEvent::Removed(e) => self.remove(e),
            KvEvent::Cleared => {
                self.names.retain(|k, _| k.0 != Medium::Gpu);
                self.copies.retain(|k, _| k.0 != Medium::Gpu);
                self.unkeyed.retain(|k, _| k.0 != Medium::Gpu);
                Applied::default()
            }
        }
    }

    fn store(&mut self, trie: &mut Trie, e: &BlockStored) -> Applied {
        let mut applied = Applied::default();
        let n = e.hashes.len() as u32;
        let b = e.block_size;
        if e.kind == GroupKind::Other {
            self.others.insert((e.medium, e.group));
            applied.unkeyed = n;
            return applied;
        }
        self.others.remove(&(e.medium, e.group));
        if b == 0 || e.medium == Medium::Other {
            applied.unkeyed = n;
            return applied;
        }
        if e.tokens.len() != e.hashes.len() * b as usize {
            applied.rejected = n;
            return applied;
        }
        if !b.is_multiple_of(16) {
            applied.unkeyed = n;
            return applied;
        }
        let mut node = match e.parent {
            // Only the adapter and one string may be there.
            None => {
                let texts = e.extra_keys.first().into_iter().flatten();
                let mut texts: Vec<String> = texts
                    .filter_map(|k| match k {
                        ExtraKey::Text(t) => Some(t.to_string()),
                        ExtraKey::Opaque => None,
                    })
                    .collect();
                if let Some(lora) = e.lora_name.as_deref()
                    && let Some(i) = texts.iter().position(|t| t == lora)
                {
                    texts.remove(i);
                }
                trie.root(b, e.lora_name.as_deref(), texts.first().map(|t| &**t))
            }
            Some(p) => match self.names.get(&(e.medium, b, p)) {
                Some(node) => *node,
                None if self.unkeyed.contains_key(&(e.medium, p, e.group)) => 0,
                None => {
                    applied.orphans = n;
                    return applied;
                }
            },
        };
        let chunks = e.tokens.chunks_exact(b as usize);
        for (j, (id, tokens)) in e.hashes.iter().zip(chunks).enumerate() {
            let opaque = e
                .extra_keys
                .get(j)
                .is_some_and(|x| x.contains(&ExtraKey::Opaque));
            if node == 0 || opaque {
                node = 0;
                applied.unkeyed += 1;
                *self.unkeyed.entry((e.medium, *id, e.group)).or_default() += 1;
                continue;
            }
            node = trie.child(node, tokens);
            if let Some(old) = self.names.insert((e.medium, b, *id), node)
                && old != node
            {
                self.copies
                    .retain(|k, _| (k.0, k.1, k.2) != (e.medium, b, *id));
            }
            *self.copies.entry((e.medium, b, *id, e.group)).or_default() += 1;
            applied.stored += 1;
        }
        applied
    }

    fn remove(&mut self, e: &BlockRemoved) -> Applied {
        let mut applied = Applied::default();
        for id in &e.hashes {
            let of = |k: &&(Medium, u32, u64, u32)| k.0 == e.medium && k.2 == *id && k.3 == e.group;
            if let Some(key) = self.copies.keys().find(of).copied() {
                applied.removed += 1;
                less(&mut self.copies, key);
                let name = (key.0, key.1, key.2);
                if !self.copies.keys().any(|k| (k.0, k.1, k.2) == name) {
                    self.names.remove(&name);
                }
            } else if self.unkeyed.contains_key(&(e.medium, *id, e.group)) {
                applied.unkeyed += 1;
                less(&mut self.unkeyed, (e.medium, *id, e.group));
            } else if self.others.contains(&(e.medium, e.group)) || e.medium == Medium::Other {
                applied.unkeyed += 1;
            } else {
                applied.orphans += 1;
            }
        }
        applied
    }

    /// The blocks that it holds on a medium.
    pub(super) fn held(&self, medium: Medium) -> HashSet<Node> {
        let of = self.names.iter().filter(|(k, _)| k.0 == medium);
        of.map(|(_, node)| *node).collect()
    }

    /// Ids that it knows.
    pub(super) fn ids(&self) -> Vec<(Medium, u64, u32)> {
        let keyed = self.copies.keys().map(|k| (k.0, k.2, k.3));
        let mut ids: Vec<_> = keyed.chain(self.unkeyed.keys().copied()).collect();
        ids.sort_by_key(|k| (k.1, k.2, k.0 as u8));
        ids
    }
}

fn less<K: std::hash::Hash + Eq>(map: &mut HashMap<K, u32>, key: K) {
    if let Some(n) = map.get_mut(&key) {
        *n -= 1;
        if *n == 0 {
            map.remove(&key);
        }
    }
}

impl Endpoint {
    /// What it knows of groups outlives its blocks.
    pub(super) fn into_others(self) -> HashSet<(Medium, u32)> {
        self.others
    }

    pub(super) fn with_others(others: HashSet<(Medium, u32)>) -> Self {
        Self {
            others,
            ..Self::default()
        }
    }
}
