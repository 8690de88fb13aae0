//! Cases that have a name.
use super::model::{Doc, MODEL, keys};
use crate::{
    chain::{ChainKind, KeySpace},
    events::{BlockRemoved, ExtraKey, GroupKind, KvEvent, Medium},
    index::{Applied, Holder, IndexMetricFamilies, IndexParams, Matches, PrefixIndex},
};
use prometheus_client::registry::Registry;
use std::ops::Range;

const FULL: GroupKind = GroupKind::Full;

fn index() -> PrefixIndex {
    PrefixIndex::new(params(1 << 24))
}

fn params(max_bytes: usize) -> IndexParams {
    IndexParams {
        keys: keys(),
        model: MODEL.into(),
        max_bytes,
    }
}

fn doc(blocks: u32) -> Doc {
    Doc {
        tokens: (0..blocks * 16).collect(),
        lora: None,
        salt: None,
        media: None,
    }
}

/// Ids by position.
fn by_place(j: usize) -> u64 {
    1_000 + j as u64
}

fn store(index: &PrefixIndex, holder: &Holder, doc: &Doc, range: Range<usize>) -> Applied {
    let event = doc.stored(16, range, by_place, Medium::Gpu, 0, FULL);
    index.apply(holder, &KvEvent::Stored(event))
}

fn remove(index: &PrefixIndex, holder: &Holder, ids: &[u64]) -> Applied {
    remove_from(index, holder, ids, Medium::Gpu, 0)
}

fn remove_from(
    index: &PrefixIndex,
    holder: &Holder,
    ids: &[u64],
    medium: Medium,
    group: u32,
) -> Applied {
    let event = BlockRemoved {
        hashes: ids.to_vec(),
        medium,
        group,
    };
    index.apply(holder, &KvEvent::Removed(event))
}

fn stored(n: u32) -> Applied {
    Applied {
        stored: n,
        ..Applied::default()
    }
}

fn removed(n: u32) -> Applied {
    Applied {
        removed: n,
        ..Applied::default()
    }
}

#[test]
fn stored_three_times_is_removed_three_times() {
    let (index, doc) = (index(), doc(3));
    let holder = index.holder();
    for _ in 0..3 {
        assert_eq!(store(&index, &holder, &doc, 0..3), stored(3));
    }
    assert_eq!(holder.blocks(), 3);
    for left in [3, 3, 2] {
        assert_eq!(remove(&index, &holder, &[1_002]), removed(1));
        assert_eq!(index.depth(&holder, &doc.chain()), left * 16);
    }
    assert_eq!(remove(&index, &holder, &[1_002]).orphans, 1);
}

#[test]
fn a_hole_ends_the_prefix_and_can_be_filled() {
    let (index, doc) = (index(), doc(100));
    let holder = index.holder();
    store(&index, &holder, &doc, 0..100);
    remove(&index, &holder, &[1_040, 1_003]);
    assert_eq!(index.depth(&holder, &doc.chain()), 3 * 16);
    store(&index, &holder, &doc, 3..4);
    assert_eq!(index.depth(&holder, &doc.chain()), 40 * 16);
    store(&index, &holder, &doc, 40..41);
    assert_eq!(index.depth(&holder, &doc.chain()), 100 * 16);
}

/// Only a contiguous prefix counts: a block in the middle of another prompt does not.
#[test]
fn a_block_counts_only_behind_its_prefix() {
    let index = index();
    let holder = index.holder();
    let (x, y): (Vec<u32>, Vec<u32>) = ((0..16).collect(), (16..32).collect());
    let of = |tokens: Vec<u32>| Doc { tokens, ..doc(0) };
    store(&index, &holder, &of(x.clone()), 0..1);
    let yx = of([y, x.clone()].concat());
    assert_eq!(index.depth(&holder, &yx.chain()), 0);
    assert_eq!(index.depth(&holder, &of(x).chain()), 16);
}

#[test]
fn an_unknown_removal_does_not_keep_the_others() {
    let (index, doc) = (index(), doc(5));
    let holder = index.holder();
    store(&index, &holder, &doc, 0..5);
    let applied = remove(&index, &holder, &[1_004, 7, 1_003]);
    assert_eq!((applied.removed, applied.orphans), (2, 1));
    assert_eq!(holder.blocks(), 3);
}

#[test]
fn an_orphan_is_counted_and_can_come_again() {
    let (index, doc) = (index(), doc(6));
    let holder = index.holder();
    assert_eq!(store(&index, &holder, &doc, 3..6).orphans, 3);
    assert_eq!(holder.blocks(), 0);
    store(&index, &holder, &doc, 0..3);
    assert_eq!(store(&index, &holder, &doc, 3..6), stored(3));
    assert_eq!(index.depth(&holder, &doc.chain()), 96);
}

/// Another endpoint's parent is not ours, whatever its id.
#[test]
fn a_parent_is_one_of_the_same_endpoint() {
    let (index, doc) = (index(), doc(4));
    let (a, b) = (index.holder(), index.holder());
    store(&index, &a, &doc, 0..2);
    assert_eq!(store(&index, &b, &doc, 2..4).orphans, 2);
}

#[test]
fn endpoints_with_their_own_hashes_are_both_credited() {
    let (index, doc) = (index(), doc(70));
    let holders = [index.holder(), index.holder(), index.holder()];
    for (i, holder) in holders.iter().enumerate() {
        let id = |j| by_place(j) + i as u64 * 1_000_000;
        let event = doc.stored(16, 0..70, id, Medium::Gpu, 0, FULL);
        assert_eq!(index.apply(holder, &KvEvent::Stored(event)), stored(70));
    }
    let mut matches = Matches::default();
    index.matches(&doc.chain(), &mut matches);
    assert!(holders.iter().all(|h| matches.get(h) == 70 * 16));
    assert_eq!(index.stats().blocks, 70);
    assert_eq!(
        holders.each_ref().map(Holder::has_own_ids),
        [false, true, true]
    );
    // An id of one means nothing at another.
    assert_eq!(remove(&index, &holders[1], &[by_place(69)]).orphans, 1);
    assert_eq!(
        remove(&index, &holders[1], &[by_place(69) + 1_000_000]),
        removed(1)
    );
    assert_eq!(index.depth(&holders[0], &doc.chain()), 70 * 16);
    assert_eq!(index.depth(&holders[1], &doc.chain()), 69 * 16);
}

/// The same ids for other blocks: engines that number their blocks, say.
#[test]
fn the_same_ids_may_mean_other_blocks_elsewhere() {
    let index = index();
    let (a, b) = (index.holder(), index.holder());
    let mut other = doc(40);
    other.tokens[0] = 9_999;
    store(&index, &a, &doc(40), 0..40);
    store(&index, &b, &other, 0..40);
    assert_eq!(remove(&index, &b, &[by_place(39)]), removed(1));
    assert_eq!(index.depth(&a, &doc(40).chain()), 640);
    assert_eq!(index.depth(&b, &other.chain()), 39 * 16);
    assert_eq!(index.depth(&b, &doc(40).chain()), 0);
}

#[test]
fn two_ids_of_one_block_are_two_copies() {
    let (index, doc) = (index(), doc(1));
    let holder = index.holder();
    store(&index, &holder, &doc, 0..1);
    let again = doc.stored(16, 0..1, |_| 7, Medium::Gpu, 0, FULL);
    index.apply(&holder, &KvEvent::Stored(again));
    assert_eq!(holder.blocks(), 1);
    assert_eq!(remove(&index, &holder, &[1_000]), removed(1));
    assert_eq!(index.depth(&holder, &doc.chain()), 16);
    assert_eq!(remove(&index, &holder, &[1_000]).orphans, 1);
    assert_eq!(remove(&index, &holder, &[7]), removed(1));
    assert_eq!(index.depth(&holder, &doc.chain()), 0);
}

#[test]
fn base_adapters_and_salts_never_share_blocks() {
    let index = index();
    let class = |lora: Option<&str>, salt: Option<&str>| Doc {
        lora: lora.map(Into::into),
        salt: salt.map(Into::into),
        ..doc(4)
    };
    let classes = [
        class(None, None),
        class(Some("a"), None),
        class(None, Some("a")),
        class(Some("a"), Some("b")),
        class(Some("b"), Some("a")),
    ];
    let holders: Vec<Holder> = classes.iter().map(|_| index.holder()).collect();
    for (i, doc) in classes.iter().enumerate() {
        let id = |j| by_place(j) + 100 * i as u64;
        // The adapter is on every block, the salt on the first, in either order.
        let mut event = doc.stored(16, 0..4, id, Medium::Gpu, 0, FULL);
        event.extra_keys.iter_mut().for_each(|k| k.reverse());
        assert_eq!(index.apply(&holders[i], &KvEvent::Stored(event)), stored(4));
    }
    let mut matches = Matches::default();
    for (i, doc) in classes.iter().enumerate() {
        index.matches(&doc.chain(), &mut matches);
        for (j, holder) in holders.iter().enumerate() {
            assert_eq!(matches.get(holder), if i == j { 64 } else { 0 });
        }
    }
}

/// Placeholders of all images are alike, so what follows the first is unknown; the text before it counts.
#[test]
fn nothing_counts_from_the_first_media_block_on() {
    let (index, text) = (index(), doc(8));
    let holder = index.holder();
    let media = Doc {
        media: Some(40),
        ..doc(8)
    };
    let event = media.stored(16, 0..8, by_place, Medium::Gpu, 0, FULL);
    let applied = index.apply(&holder, &KvEvent::Stored(event));
    assert_eq!((applied.stored, applied.unkeyed), (2, 6));
    // A later turn behind it has no key either, and nothing of it is an orphan.
    let mut next = doc(10).stored(16, 8..10, by_place, Medium::Gpu, 0, FULL);
    next.extra_keys = vec![vec![], vec![ExtraKey::Opaque]];
    let applied = index.apply(&holder, &KvEvent::Stored(next));
    assert_eq!((applied.unkeyed, applied.orphans), (2, 0));
    assert_eq!(index.depth(&holder, &text.chain()), 32);
    let applied = remove(&index, &holder, &[1_009, 1_002, 1_001]);
    assert_eq!(
        (applied.unkeyed, applied.removed, applied.orphans),
        (2, 1, 0)
    );
}

/// A reset of the accelerator's cache keeps what was offloaded, and no medium counts for another.
#[test]
fn media_are_kept_apart() {
    let (index, doc) = (index(), doc(6));
    let holder = index.holder();
    let on = |medium| {
        let event = doc.stored(16, 0..6, by_place, medium, 0, FULL);
        index.apply(&holder, &KvEvent::Stored(event))
    };
    assert_eq!((on(Medium::Gpu), on(Medium::Cpu)), (stored(6), stored(6)));
    assert_eq!(on(Medium::Other).unkeyed, 6);
    let depth = |medium| index.depth_on(&holder, medium, &doc.chain());
    remove_from(&index, &holder, &[1_005], Medium::Cpu, 0);
    assert_eq!((depth(Medium::Gpu), depth(Medium::Cpu)), (96, 80));
    remove_from(&index, &holder, &[1_002], Medium::Gpu, 0);
    assert_eq!((depth(Medium::Gpu), depth(Medium::Cpu)), (32, 80));
    index.apply(&holder, &KvEvent::Cleared);
    assert_eq!((depth(Medium::Gpu), depth(Medium::Cpu)), (0, 80));
    assert_eq!(holder.blocks(), 0);
    index.clear(&holder);
    assert_eq!((depth(Medium::Cpu), index.stats().blocks), (0, 0));
    assert_eq!(on(Medium::Disk), stored(6));
    assert_eq!(index.depth(&holder, &doc.chain()), 0);
}

/// Recurrent groups announce one hash for thousands of tokens, in any order with the others.
#[test]
fn other_groups_and_mismatched_events_change_nothing() {
    let (index, doc) = (index(), doc(5));
    let holder = index.holder();
    let mut mismatched = doc.stored(16, 0..1, |_| 5, Medium::Gpu, 1, FULL);
    mismatched.tokens = doc.tokens.clone();
    assert_eq!(
        index.apply(&holder, &KvEvent::Stored(mismatched)).rejected,
        1
    );
    let sliding = doc.stored(16, 0..5, by_place, Medium::Gpu, 2, GroupKind::Other);
    assert_eq!(index.apply(&holder, &KvEvent::Stored(sliding)).unkeyed, 5);
    assert_eq!((holder.blocks(), holder.block_size()), (0, 16));
    store(&index, &holder, &doc, 0..5);
    let applied = remove_from(&index, &holder, &[1_004], Medium::Gpu, 2);
    assert_eq!((applied.unkeyed, applied.removed), (1, 0));
    assert_eq!(index.depth(&holder, &doc.chain()), 80);
    let mut placeholder = doc.stored(16, 0..5, by_place, Medium::Cpu, 0, FULL);
    (placeholder.block_size, placeholder.tokens) = (0, vec![]);
    assert_eq!(
        index.apply(&holder, &KvEvent::Stored(placeholder)).unkeyed,
        5
    );
}

#[test]
fn each_endpoint_counts_in_blocks_of_its_own_size() {
    let (index, doc) = (index(), doc(147));
    let sizes = [16, 32, 784];
    let holders: Vec<Holder> = sizes.map(|_| index.holder()).into();
    for (holder, size) in holders.iter().zip(sizes) {
        let blocks = doc.tokens.len() / size as usize;
        let id = |j| by_place(j) * u64::from(size);
        let event = doc.stored(size, 0..blocks, id, Medium::Gpu, 0, FULL);
        assert_eq!(
            index.apply(holder, &KvEvent::Stored(event)),
            stored(blocks as u32)
        );
        assert_eq!(holder.block_size(), size);
    }
    let mut matches = Matches::default();
    index.matches(&doc.chain(), &mut matches);
    let depths: Vec<u32> = holders.iter().map(|h| matches.get(h)).collect();
    assert_eq!(depths, [147 * 16, 73 * 32, 3 * 784]);
    let odd = index.holder();
    let mut event = doc.stored(16, 0..3, by_place, Medium::Gpu, 0, FULL);
    (event.block_size, event.hashes) = (24, vec![1, 2]);
    assert_eq!(index.apply(&odd, &KvEvent::Stored(event)).unkeyed, 2);
    assert_eq!((odd.blocks(), odd.block_size()), (0, 24));
}

#[test]
fn a_chain_of_bytes_matches_nothing() {
    let (index, doc) = (index(), doc(4));
    let holder = index.holder();
    store(&index, &holder, &doc, 0..4);
    let root = keys().root(ChainKind::Bytes, MODEL, None, None);
    let chain = keys().bytes(root, &[0; 640]);
    let mut matches = Matches::default();
    index.matches(&chain, &mut matches);
    assert!(matches.is_empty());
    assert_eq!(index.depth(&holder, &chain), 0);
}

/// Neither an old answer nor an old handle speaks for the next endpoint in the same slot.
#[test]
fn a_slot_begins_empty_for_the_next_endpoint() {
    let (index, doc) = (index(), doc(40));
    let (first, stays) = (index.holder(), index.holder());
    store(&index, &first, &doc, 0..40);
    store(&index, &stays, &doc, 0..2);
    let mut matches = Matches::default();
    index.matches(&doc.chain(), &mut matches);
    assert_eq!((matches.get(&first), matches.get(&stays)), (640, 32));
    drop(first);
    let next = index.holder();
    assert_eq!(matches.get(&next), 0, "an answer from before it came");
    index.matches(&doc.chain(), &mut matches);
    assert_eq!((matches.get(&next), matches.get(&stays)), (0, 32));
    let stats = index.stats();
    assert_eq!((stats.holders, stats.blocks, stats.pairs), (2, 2, 2));
    // Nor one of another index.
    let foreign = PrefixIndex::new(params(1 << 24)).holder();
    assert_eq!(matches.get(&foreign), 0);
    assert_eq!(index.apply(&foreign, &KvEvent::Cleared), Applied::default());
}

#[test]
fn endpoints_past_the_last_slot_record_nothing() {
    let (index, doc) = (index(), doc(2));
    let holders: Vec<Holder> = (0..65_535).map(|_| index.holder()).collect();
    let one_too_many = index.holder();
    assert_eq!(store(&index, &one_too_many, &doc, 0..2).refused, 2);
    assert_eq!(store(&index, &holders[65_534], &doc, 0..2), stored(2));
    let mut matches = Matches::default();
    index.matches(&doc.chain(), &mut matches);
    assert_eq!(matches.get(&holders[65_534]), 32);
    assert_eq!(matches.get(&one_too_many), 0);
    assert_eq!(index.depth(&one_too_many, &doc.chain()), 0);
}

#[test]
fn the_version_moves_with_changes_only() {
    let (index, doc) = (index(), doc(2));
    let holder = index.holder();
    let v0 = index.version();
    remove(&index, &holder, &[1]);
    index.apply(&holder, &KvEvent::Cleared);
    assert_eq!(index.version(), v0);
    store(&index, &holder, &doc, 0..2);
    let v1 = index.version();
    assert!(v1 > v0);
    index.apply(&holder, &KvEvent::Cleared);
    assert!(index.version() > v1);
}

/// Endpoints that come and go leave nothing behind.
#[test]
fn churn_returns_to_the_baseline() {
    let (index, doc) = (index(), doc(200));
    for round in 0..50u64 {
        let holders: Vec<Holder> = (0..5).map(|_| index.holder()).collect();
        for (i, holder) in holders.iter().enumerate() {
            let id = |j| by_place(j) + round * 7 + i as u64 % 2 * 500;
            let event = doc.stored(16, 0..200, id, Medium::Gpu, 0, FULL);
            index.apply(holder, &KvEvent::Stored(event));
        }
        assert!(index.stats().bytes > 0);
        drop(holders);
        let s = index.stats();
        assert_eq!(
            (s.bytes, s.holders, s.blocks, s.chunks, s.domains),
            (0, 0, 0, 0, 0)
        );
    }
}

#[test]
fn metrics_follow() {
    let mut registry = Registry::default();
    let families = IndexMetricFamilies::register(&mut registry);
    let index = PrefixIndex::with_metrics(params(1 << 24), families.metrics("m"));
    let (holder, doc) = (index.holder(), doc(3));
    store(&index, &holder, &doc, 0..3);
    remove(&index, &holder, &[1_002, 4]);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for line in [
        "index_blocks{model=\"m\"} 2",
        "index_pairs{model=\"m\"} 2",
        "index_chunks{model=\"m\"} 1",
        "index_holders{model=\"m\"} 1",
        "index_stored_blocks_total{model=\"m\"} 3",
        "index_removed_blocks_total{model=\"m\"} 1",
        "index_orphan_blocks_total{model=\"m\"} 1",
    ] {
        assert!(text.contains(line), "{line} not in\n{text}");
    }
    let bytes = format!("index_bytes{{model=\"m\"}} {}", index.stats().bytes);
    assert!(text.contains(&bytes));
    let shown = format!("{index:?} {holder:?}");
    assert!(!shown.contains("1002"), "no block ids in {shown}");
}

/// Two installations never agree on a key.
#[test]
fn the_seed_is_part_of_every_key() {
    let (index, doc) = (index(), doc(2));
    let holder = index.holder();
    store(&index, &holder, &doc, 0..2);
    let other = KeySpace::new(12);
    let root = other.root(ChainKind::Tokens, MODEL, None, None);
    assert_eq!(index.depth(&holder, &other.tokens(root, &doc.tokens)), 0);
}
