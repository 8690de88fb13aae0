//! Lookups beside writers.
use super::{
    fuzz::Dice,
    model::{Doc, Endpoint, MODEL, Trie, keys},
};
use crate::{
    events::{BlockRemoved, GroupKind, KvEvent, Medium},
    index::{Holder, IndexParams, Matches, PrefixIndex},
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Says that it is over, also when the test fails.
struct Done<'a>(&'a AtomicBool);

/// Blocks at the head of every prompt that are never touched once stored. The first block that is lies in the same chunk.
const STABLE: usize = 37;
const ENDPOINTS: usize = 4;
const PROMPTS: usize = 6;
const BLOCKS: usize = 90;

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn prompts() -> Vec<Doc> {
    let mut dice = Dice(5);
    let mut prompts: Vec<Doc> = Vec::new();
    for _ in 0..PROMPTS {
        let mut tokens: Vec<u32> = match prompts.first() {
            Some(first) => first.tokens[..STABLE * 16].to_vec(),
            None => Vec::new(),
        };
        tokens.extend((tokens.len()..BLOCKS * 16).map(|_| dice.below(1_000) as u32));
        prompts.push(Doc {
            tokens,
            lora: None,
            salt: None,
            media: None,
        });
    }
    prompts
}

/// What an endpoint calls a block: a common name for two endpoints, names of its own for the others.
fn id(endpoint: usize, prompt: usize, block: usize) -> u64 {
    let prompt = if block < STABLE { 0 } else { prompt };
    (endpoint.max(1) * 1_000_000 + prompt * 1_000 + block) as u64
}

fn stored(doc: &Doc, endpoint: usize, prompt: usize, range: std::ops::Range<usize>) -> KvEvent {
    let id = |j| id(endpoint, prompt, j);
    KvEvent::Stored(doc.stored(16, range, id, Medium::Gpu, 0, GroupKind::Full))
}

/// One writer's history, which never touches the stable blocks. Ends with what its model says is held.
fn write(
    index: &PrefixIndex,
    holder: &Holder,
    prompts: &[Doc],
    endpoint: usize,
    steps: usize,
) -> (Trie, Endpoint) {
    let (mut trie, mut model) = (Trie::default(), Endpoint::default());
    let mut dice = Dice(endpoint as u64);
    model.apply(&mut trie, &stored(&prompts[0], endpoint, 0, 0..STABLE));
    for _ in 0..steps {
        let prompt = dice.below(PROMPTS);
        let event = if dice.below(5) < 3 {
            let from = STABLE + dice.below(BLOCKS - STABLE);
            let from = if dice.below(2) == 0 { STABLE } else { from };
            let to = (from + 1 + dice.below(50)).min(BLOCKS);
            stored(&prompts[prompt], endpoint, prompt, from..to)
        } else {
            let any = |d: &mut Dice| STABLE + d.below(BLOCKS - STABLE);
            let ids = (0..1 + dice.below(30)).map(|_| id(endpoint, prompt, any(&mut dice)));
            KvEvent::Removed(BlockRemoved {
                hashes: ids.collect(),
                medium: Medium::Gpu,
                group: 0,
            })
        };
        let want = model.apply(&mut trie, &event);
        assert_eq!(index.apply(holder, &event), want);
    }
    (trie, model)
}

/// Four endpoints write, four threads look up. What is not touched is seen exactly, nothing is seen that cannot be, and
/// when all is quiet everything is exact.
#[test]
fn lookups_beside_writers_are_exact_where_nothing_changes() {
    let index = PrefixIndex::new(IndexParams {
        keys: keys(),
        model: MODEL.into(),
        max_bytes: 1 << 26,
    });
    let prompts = prompts();
    let holders: Vec<Holder> = (0..ENDPOINTS).map(|_| index.holder()).collect();
    for (e, holder) in holders.iter().enumerate() {
        index.apply(holder, &stored(&prompts[0], e, 0, 0..STABLE));
    }
    let chains: Vec<_> = prompts.iter().map(Doc::chain).collect();
    let (done, lookups) = (AtomicBool::new(false), AtomicU64::new(0));
    let models: Vec<(Trie, Endpoint)> = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut matches = Matches::default();
                while !done.load(Relaxed) {
                    for chain in &chains {
                        index.matches(chain, &mut matches);
                        for holder in &holders {
                            for got in [matches.get(holder), index.depth(holder, chain)] {
                                assert!(got >= STABLE as u32 * 16, "only {got}");
                                assert!(got <= BLOCKS as u32 * 16);
                            }
                        }
                        lookups.fetch_add(1, Relaxed);
                    }
                }
            });
        }
        let writers: Vec<_> = holders
            .iter()
            .enumerate()
            .map(|(e, holder)| {
                let (index, prompts) = (&index, &prompts);
                scope.spawn(move || write(index, holder, prompts, e, 1_500))
            })
            .collect();
        let models = writers.into_iter().map(|w| w.join());
        let models: Vec<_> = models.collect();
        done.store(true, Relaxed);
        models.into_iter().map(|m| m.expect("a writer")).collect()
    });
    assert!(lookups.load(Relaxed) > 0);
    let mut pairs = 0;
    for (holder, (mut trie, model)) in holders.iter().zip(models) {
        let held = model.held(Medium::Gpu);
        pairs += held.len() as u64;
        assert_eq!(holder.blocks(), held.len() as u64);
        for (doc, chain) in prompts.iter().zip(&chains) {
            let path = trie.path(doc, 16);
            let want = path.iter().take_while(|n| held.contains(n)).count() as u32 * 16;
            assert_eq!(index.depth(holder, chain), want);
        }
    }
    assert_eq!(index.stats().pairs, pairs);
    drop(holders);
    let stats = index.stats();
    assert_eq!((stats.blocks, stats.chunks, stats.bytes), (0, 0, 0));
}

/// Endpoints that come, store and go in one thread, beside one that stays: its depth never moves, and theirs are all or
/// less of what they stored.
#[test]
fn endpoints_come_and_go_beside_lookups() {
    let index = PrefixIndex::new(IndexParams {
        keys: keys(),
        model: MODEL.into(),
        max_bytes: 1 << 26,
    });
    let prompts = prompts();
    let stays = index.holder();
    index.apply(&stays, &stored(&prompts[0], 0, 0, 0..BLOCKS));
    let chain = prompts[0].chain();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut matches = Matches::default();
                while !done.load(Relaxed) {
                    index.matches(&chain, &mut matches);
                    assert_eq!(matches.get(&stays), BLOCKS as u32 * 16);
                }
            });
        }
        let _done = Done(&done);
        for round in 0..60 {
            // More than a word has bits, so that sets move between sizes.
            let guests: Vec<Holder> = (0..70).map(|_| index.holder()).collect();
            for (e, guest) in guests.iter().enumerate() {
                let to = 1 + (e * 7 + round) % BLOCKS;
                index.apply(guest, &stored(&prompts[0], e % 3, 0, 0..to));
                assert_eq!(index.depth(guest, &chain), to as u32 * 16);
            }
        }
    });
    assert_eq!(index.stats().pairs, BLOCKS as u64);
}
