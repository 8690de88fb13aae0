use super::*;
use crate::Hiccups;
use std::collections::{BTreeMap, BTreeSet};

fn spec(kind: &str) -> Arc<PodSpec> {
    Arc::new(PodSpec::kind(kind).expect("a built-in kind"))
}

/// So many tokens that begin no other text.
fn text(which: u64, tokens: usize) -> Vec<u32> {
    let mut dice = Dice::new(which);
    (0..tokens).map(|_| dice.bits() as u32).collect()
}

fn prompt(ids: Vec<u32>) -> Arc<Prompt> {
    let bytes = ids.len() as u32 * 5;
    Arc::new(Prompt::new(ids, bytes))
}

fn begun(prefix: &[u32], which: u64, tokens: usize) -> Arc<Prompt> {
    let mut ids = prefix.to_vec();
    ids.extend(text(which, tokens));
    prompt(ids)
}

fn arrival(id: u64, prompt: &Arc<Prompt>, output: u32) -> Arrival {
    Arrival {
        id,
        prompt: prompt.clone(),
        output,
    }
}

/// Runs until nothing is left to do; gives when that was.
fn drain(pod: &mut Pod, out: &mut Vec<Output>) -> f64 {
    let mut now = 0.0;
    while let Some(at) = pod.next_event() {
        now = at;
        pod.advance(at, out);
    }
    now
}

/// TTFT and end of one request in an otherwise idle pod, and what the cache gave.
fn alone(pod: &mut Pod, now: f64, prompt: &Arc<Prompt>, output: u32) -> (f64, f64, u32) {
    let mut out = Vec::new();
    pod.submit(now, arrival(0, prompt, output));
    drain(pod, &mut out);
    let first = out.iter().find_map(|o| match o {
        Output::FirstToken { at, .. } => Some(at - now),
        _ => None,
    });
    let done = out.iter().find_map(|o| match o {
        Output::Done { at, cached, .. } => Some((at - now, *cached)),
        _ => None,
    });
    let (end, cached) = done.expect("an end");
    (first.expect("a first token"), end, cached)
}

fn near(what: &str, got: f64, range: std::ops::Range<f64>) {
    assert!(range.contains(&got), "{what}: {got:.4} is not in {range:?}");
}

#[test]
fn an_idle_l40s_takes_as_long_as_published() {
    let mut pod = Pod::new(spec("l40s"), 0);
    let control = prompt(text(1, 16_256));
    let (ttft, end, cached) = alone(&mut pod, 0.0, &control, 256);
    near("uncached 16k", ttft, 6.75..6.95);
    near("between tokens", (end - ttft) / 255.0, 0.0415..0.0425);
    assert_eq!(cached, 0);

    let prefix = text(2, 16_000);
    alone(&mut pod, 100.0, &begun(&prefix, 3, 256), 256);
    let (ttft, _, cached) = alone(&mut pod, 200.0, &begun(&prefix, 4, 256), 256);
    near("cached 16k", ttft, 0.30..0.34);
    assert_eq!(cached, 15_680);

    let turn = text(5, 8_000);
    let (ttft, _, _) = alone(&mut pod, 300.0, &prompt(turn.clone()), 200);
    near("first turn", ttft, 3.2..3.4);
    let (mut history, mut later) = (turn, Vec::new());
    for n in 1..8 {
        history.extend(text(n + 10, 600));
        let next = prompt(history.clone());
        later.push(alone(&mut pod, 300.0 + 100.0 * n as f64, &next, 200).0);
    }
    let mean = later.iter().sum::<f64>() / later.len() as f64;
    near("later turns", mean, 0.44..0.56);
}

#[test]
fn a_hit_leaves_the_last_token_to_compute() {
    let mut pod = Pod::new(spec("l40s"), 0);
    let whole = prompt(text(1, 784 * 3));
    alone(&mut pod, 0.0, &whole, 1);
    assert_eq!(pod.cached(&whole), 784 * 2);
    assert_eq!(alone(&mut pod, 50.0, &whole, 1).2, 784 * 2);
    assert_eq!(pod.cached(&begun(whole.ids(), 2, 1)), 784 * 3);
}

#[test]
fn one_that_waits_hits_what_the_one_before_it_computed() {
    let mut pod = Pod::new(spec("l40s"), 0);
    let prefix = text(1, 16_000);
    let mut out = Vec::new();
    for id in 0..4 {
        pod.submit(0.0, arrival(id, &begun(&prefix, 10 + id, 256), 8));
    }
    drain(&mut pod, &mut out);
    let cached: BTreeMap<u64, u32> = out
        .iter()
        .filter_map(|o| match o {
            Output::Done { id, cached, .. } => Some((*id, *cached)),
            _ => None,
        })
        .collect();
    let expected = [(0, 0), (1, 15_680), (2, 15_680), (3, 15_680)];
    assert_eq!(cached, BTreeMap::from(expected));
}

#[test]
fn first_come_first_served() {
    let mut pod = Pod::new(spec("l40s"), 0);
    let mut out = Vec::new();
    for id in 0..6 {
        pod.submit(0.01 * id as f64, arrival(id, &prompt(text(id, 3_000)), 4));
    }
    drain(&mut pod, &mut out);
    let order: Vec<f64> = (0..6)
        .map(|id| {
            out.iter()
                .find_map(|o| match o {
                    Output::FirstToken { id: i, at } if *i == id => Some(*at),
                    _ => None,
                })
                .expect("a first token")
        })
        .collect();
    assert!(order.is_sorted(), "{order:?}");
}

/// Requests whose client left, and how many outputs there had been by then.
type Gone = BTreeMap<u64, usize>;

/// A busy hour with shared prefixes, cancellations and a pool that is too small: everything that must hold, holds.
fn crowd(kind: &str, blocks: u32, block_size: u32, seed: u64) -> (Vec<Output>, Pod, Gone) {
    let spec = PodSpec {
        kv_blocks: blocks,
        block_size,
        reserve_output: false,
        hiccups: Some(Hiccups {
            rate: 0.05,
            seconds: 0.4,
        }),
        ..PodSpec::kind(kind).expect("a built-in kind")
    };
    let mut pod = Pod::new(Arc::new(spec), seed);
    let mut dice = Dice::new(seed);
    let prefixes: Vec<Vec<u32>> = (0..5).map(|p| text(1000 + p, 3_000)).collect();
    let (mut out, mut now, mut gone) = (Vec::new(), 0.0, Gone::new());
    for id in 0..400 {
        now += dice.gap(1.2);
        pod.advance(now, &mut out);
        check(&pod);
        let own = dice.below(1500);
        let asked = begun(&prefixes[dice.below(5)], 5000 + id, own);
        pod.submit(now, arrival(id, &asked, 1 + dice.below(900) as u32));
        if id % 7 == 0 {
            now += dice.gap(1.0);
            pod.advance(now, &mut out);
            let who = id.saturating_sub(dice.below(4) as u64);
            pod.cancel(who);
            gone.insert(who, out.len());
            check(&pod);
        }
    }
    drain(&mut pod, &mut out);
    check(&pod);
    (out, pod, gone)
}

fn check(pod: &Pod) {
    let Cache::Paged(blocks) = &pod.cache else {
        return;
    };
    let held: usize = pod
        .running
        .iter()
        .map(|job| job.blocks.len() + job.extra.len())
        .sum();
    assert_eq!(
        blocks.uses() as usize,
        held,
        "uses of blocks and blocks held"
    );
    assert!(pod.waiting.iter().all(|job| job.blocks.is_empty()));
    let planned: u32 = pod.running.iter().map(|job| job.step).sum();
    assert!(planned <= pod.spec.max_num_batched_tokens);
    assert!(pod.running.len() <= pod.spec.max_num_seqs as usize);
}

#[test]
fn nothing_is_lost_and_the_events_tell_the_cache() {
    for (blocks, block_size) in [(20, 784), (60, 784), (1200, 16)] {
        let (out, pod, gone) = crowd("l40s", blocks, block_size, 3);
        let Cache::Paged(pool) = &pod.cache else {
            panic!("a paged cache");
        };
        assert_eq!((pool.uses(), pool.free()), (0, blocks));
        assert!(
            blocks == 60 || pod.load().preemptions > 0,
            "{:?}",
            pod.load()
        );

        let mut tokens = BTreeMap::new();
        let mut ended = BTreeSet::new();
        let mut held: BTreeMap<u64, i32> = BTreeMap::new();
        for (i, output) in out.iter().enumerate() {
            match output {
                Output::FirstToken { id, .. } => {
                    assert_eq!(tokens.insert(*id, 1u32), None, "a first token twice");
                }
                Output::Tokens { id, n, .. } => {
                    *tokens.get_mut(id).expect("a first token before") += n;
                }
                Output::Done { id, output, .. } => {
                    assert!(ended.insert(*id), "ended twice");
                    assert!(gone.get(id).is_none_or(|left| i < *left), "{id} had left");
                    assert_eq!(tokens[id], *output);
                }
                Output::Refused { .. } => panic!("refused"),
                Output::Kv { batch, .. } => batch.iter().for_each(|c| apply(&mut held, c)),
            }
        }
        let missing = (0..400).filter(|id| !ended.contains(id));
        assert_eq!(missing.filter(|id| !gone.contains_key(id)).count(), 0);
        assert!(gone.keys().any(|id| !ended.contains(id)));
        let mut cached: BTreeMap<u64, i32> = BTreeMap::new();
        for key in pool.keys().filter(|key| !is_state(*key)) {
            *cached.entry(key).or_default() += 1;
        }
        assert_eq!(held, cached);
        assert!(cached.values().sum::<i32>() <= blocks as i32);
    }
}

fn apply(held: &mut BTreeMap<u64, i32>, change: &KvChange) {
    match change {
        KvChange::Stored(stored) => {
            assert_eq!(
                stored.tokens().len(),
                stored.hashes.len() * stored.block_size as usize
            );
            if let Some(parent) = stored.parent {
                assert!(held.contains_key(&parent), "stored behind an unknown block");
            }
            for hash in &stored.hashes {
                *held.entry(*hash).or_default() += 1;
            }
        }
        KvChange::Removed(hashes) => {
            for hash in hashes {
                let n = held.get_mut(hash).expect("removed without being stored");
                *n -= 1;
                if *n == 0 {
                    held.remove(hash);
                }
            }
        }
        KvChange::Cleared => held.clear(),
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let (a, ..) = crowd("a10", 60, 784, 9);
    let (b, ..) = crowd("a10", 60, 784, 9);
    assert_eq!(format!("{a:?}"), format!("{b:?}"));
    let (c, ..) = crowd("a10", 60, 784, 10);
    assert_ne!(format!("{a:?}"), format!("{c:?}"));
}

#[test]
fn a_clone_lives_the_same_life() {
    let mut pod = Pod::new(spec("h100"), 1);
    let mut out = Vec::new();
    for id in 0..12 {
        pod.submit(
            id as f64 * 0.3,
            arrival(id, &prompt(text(id % 5, 6_000)), 60),
        );
    }
    pod.advance(2.0, &mut out);
    let mut fork = pod.clone();
    let (mut rest, mut forked) = (Vec::new(), Vec::new());
    drain(&mut pod, &mut rest);
    drain(&mut fork, &mut forked);
    assert!(rest.len() > 500);
    assert_eq!(format!("{rest:?}"), format!("{forked:?}"));
}

#[test]
fn the_oracle_is_right_and_changes_nothing() {
    let mut pod = Pod::new(spec("l40s"), 1);
    let mut out = Vec::new();
    let prefix = text(0, 9_000);
    for id in 0..6 {
        pod.submit(id as f64, arrival(id, &begun(&prefix, id + 1, 500), 120));
    }
    pod.advance(6.5, &mut out);
    let before = format!("{pod:?}");
    for asked in [begun(&prefix, 50, 700), prompt(text(51, 4_000))] {
        let predicted = pod.ttft(6.5, &asked, 10);
        assert_eq!(format!("{pod:?}"), before);
        let mut real = pod.clone();
        real.submit(6.5, arrival(99, &asked, 10));
        let mut out = Vec::new();
        drain(&mut real, &mut out);
        let at = out.iter().find_map(|o| match o {
            Output::FirstToken { id: 99, at } => Some(*at),
            _ => None,
        });
        assert_eq!(at.map(|at| at - 6.5), Some(predicted));
    }
}

#[test]
fn what_can_never_fit_is_refused() {
    let mut pod = Pod::new(spec("l40s"), 0);
    let huge = prompt(text(1, 784 * 259));
    assert_eq!(pod.ttft(0.0, &huge, 1), f64::INFINITY);
    pod.submit(0.0, arrival(1, &huge, 1));
    let mut out = Vec::new();
    drain(&mut pod, &mut out);
    assert!(matches!(out[..], [Output::Refused { id: 1, .. }]));
    assert_eq!(pod.in_flight(), 0);
}

#[test]
fn a_client_that_leaves_frees_its_blocks() {
    let mut pod = Pod::new(spec("l40s"), 0);
    let mut out = Vec::new();
    for id in 0..3 {
        pod.submit(0.0, arrival(id, &prompt(text(id, 5_000)), 500));
    }
    pod.advance(1.0, &mut out);
    assert_eq!((pod.load().running, pod.load().waiting), (1, 2));
    pod.cancel(1);
    pod.cancel(0);
    assert_eq!((pod.load().running, pod.load().waiting), (1, 1));
    pod.advance(2.0, &mut out);
    assert_eq!(pod.load().running, 1);
    drain(&mut pod, &mut out);
    assert_eq!(pod.load().kv_usage, 0.0);
    let done = out.iter().filter(|o| matches!(o, Output::Done { .. }));
    assert_eq!(done.count(), 1);
}

#[test]
fn clearing_waits_for_the_next_step_to_be_announced() {
    let mut pod = Pod::new(spec("l40s"), 0);
    let asked = prompt(text(1, 5_000));
    alone(&mut pod, 0.0, &asked, 1);
    assert!(pod.clear_cache());
    assert_eq!(pod.cached(&asked), 0);
    assert_eq!(pod.next_event(), None);
    let mut out = Vec::new();
    pod.submit(10.0, arrival(2, &prompt(text(2, 5_000)), 1));
    drain(&mut pod, &mut out);
    let first = out.iter().find_map(|o| match o {
        Output::Kv { batch, .. } => batch.first(),
        _ => None,
    });
    assert!(matches!(first, Some(KvChange::Cleared)));
}

#[test]
fn a_boundless_pod_knows_what_it_is_told_and_never_evicts() {
    let mut pod = Pod::boundless(spec("l40s"), 0);
    let other = prompt(text(1, 16_000));
    assert_eq!(pod.cached(&other), 0);
    pod.learn(&other.keys(784));
    assert_eq!(pod.cached(&other), 784 * 20);
    for id in 0..40 {
        alone(
            &mut pod,
            1000.0 * id as f64,
            &prompt(text(id + 2, 16_000)),
            2,
        );
    }
    assert_eq!(pod.cached(&other), 784 * 20);
    assert_eq!(pod.cached(&prompt(text(2, 16_000))), 784 * 20);
}

#[test]
fn hiccups_lengthen_what_they_fall_in() {
    let calm = PodSpec::kind("l40s").expect("a built-in kind");
    let shaky = PodSpec {
        hiccups: Some(Hiccups {
            rate: 0.2,
            seconds: 1.0,
        }),
        ..calm.clone()
    };
    let asked = prompt(text(1, 100));
    let (_, calm, _) = alone(&mut Pod::new(Arc::new(calm), 1), 0.0, &asked, 2_000);
    let (_, shaky, _) = alone(&mut Pod::new(Arc::new(shaky), 1), 0.0, &asked, 2_000);
    near("pauses", (shaky - calm) / (calm * 0.2), 0.6..1.8);
}

#[test]
fn of_an_unused_prompt_the_end_is_evicted_first() {
    let spec = PodSpec {
        kv_blocks: 24,
        extra_blocks: 0,
        ..PodSpec::kind("l40s").expect("a built-in kind")
    };
    let mut pod = Pod::new(Arc::new(spec), 0);
    let first = prompt(text(1, 784 * 10 + 1));
    alone(&mut pod, 0.0, &first, 1);
    assert_eq!(pod.cached(&first), 784 * 10);
    // Fourteen blocks are empty; the sixteen of this one take two more.
    alone(&mut pod, 100.0, &prompt(text(2, 784 * 15 + 1)), 1);
    assert_eq!(pod.cached(&first), 784 * 8);
}
