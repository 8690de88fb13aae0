//! What is thought to be held, and how that is corrected.

use super::{super::*, sim::*};
use crate::{
    chain::ChainKind,
    observe::{End, Observer, Usage},
    policy::Routing,
    prompt::{Reason, Source},
};
use rand::RngExt;
use std::time::Duration;

fn only(w: &World, t: &Ticket) -> Candidate {
    let _ = w;
    t.decision().chosen().expect("a candidate").clone()
}

/// With events, predicted = reported, whatever the block size and however small the cache.
#[tokio::test(start_paused = true)]
async fn exact_residency_is_exact() {
    for (block, blocks) in [(16, 400), (32, 120), (784, 20)] {
        let mut w = World::new(Routing::PricedTtft);
        for _ in 0..2 {
            w.add(GPU, block, blocks, true);
        }
        let mut wrong = 0;
        for n in 0..300u32 {
            let base = text(w.rng.random_range(0..6), 2400);
            let keep = w.rng.random_range(1..2400);
            let tail = text(100 + n, w.rng.random_range(1..300));
            let r = w.submit(&[&base[..keep], &tail].concat(), 3);
            if n == 150 {
                w.finish();
                w.reset(0, true);
            }
            w.run(10.0);
            w.report();
            wrong += usize::from(w.requests[r].cached != w.requests[r].guessed);
        }
        w.finish();
        assert!(wrong <= 1, "block {block}: {wrong} of 300 wrong");
        let counts: u64 = w
            .engines
            .iter()
            .map(|e| e.endpoint.status(w.now).audited.equal)
            .sum();
        assert!(counts >= 299);
        assert_eq!(w.pool.decisions().last(1)[0].decision.rung, Rung::Exact);
    }
}

/// Without events, the guess is nearly as good, also when the cache is small.
#[tokio::test(start_paused = true)]
async fn guessed_residency_is_nearly_exact() {
    for (block, blocks) in [(16, 400), (32, 120), (784, 20)] {
        let mut w = World::new(Routing::PricedTtft);
        for _ in 0..2 {
            w.add(GPU, block, blocks, false);
        }
        let mut near = 0;
        for n in 0..300u32 {
            let base = text(w.rng.random_range(0..6), 2400);
            let keep = w.rng.random_range(1..2400);
            let tail = text(100 + n, w.rng.random_range(1..300));
            let r = w.submit(&[&base[..keep], &tail].concat(), 0);
            w.run(10.0);
            w.report();
            let r = &w.requests[r];
            near += usize::from(r.cached.abs_diff(r.guessed) <= block);
        }
        w.finish();
        assert!(near >= 270, "block {block}: {near} of 300 within a block");
        assert_eq!(w.pool.decisions().last(1)[0].decision.rung, Rung::Guessed);
    }
}

/// An engine that is emptied without a word corrects the guess with its first answer.
#[tokio::test(start_paused = true)]
async fn answers_correct_the_guess() {
    let mut w = World::new(Routing::PricedTtft);
    w.add(GPU, 16, 2000, false);
    for n in 0..4 {
        w.submit(&text(n, 1000), 1);
        w.run(5.0);
    }
    w.reset(0, false);
    let denied = w.submit(&text(3, 1000), 1);
    w.run(5.0);
    assert_eq!(
        (w.requests[denied].guessed, w.requests[denied].cached),
        (992, 0)
    );
    // The others were used before: they are gone as well. This one has just been computed.
    for (which, guess) in [(0, 0), (1, 0), (2, 0), (3, 992)] {
        let t = dispatch(&w.pool, &text(which, 1000), w.now);
        assert_eq!(only(&w, &t).cached, guess, "{which}");
    }
}

/// D4: an engine whose cache is emptied and that never says so is found out within two answers.
#[tokio::test(start_paused = true)]
async fn an_unannounced_reset_is_found_out() {
    let mut w = World::new(Routing::PricedTtft);
    w.add(GPU, 16, 2000, true);
    w.report();
    for n in 0..5 {
        w.submit(&text(n, 1000), 1);
        w.run(5.0);
    }
    w.reset(0, false);
    for n in 0..2 {
        let r = w.submit(&text(n, 1000), 1);
        w.run(5.0);
        assert_eq!((w.requests[r].guessed, w.requests[r].cached), (992, 0));
    }
    let t = dispatch(&w.pool, &text(4, 1000), w.now);
    assert_eq!(only(&w, &t).cached, 0);
    assert_eq!(w.engines[0].endpoint.status(w.now).audited.distrusted, 1);
}

/// The same reset, announced late but announced, costs no knowledge.
#[tokio::test(start_paused = true)]
async fn a_late_clear_is_no_reason_for_distrust() {
    let mut w = World::new(Routing::PricedTtft);
    w.add(GPU, 16, 2000, true);
    w.report();
    for n in 0..6 {
        w.submit(&text(n, 1000), 1);
        w.run(5.0);
    }
    for n in 0..3 {
        w.reset(0, false);
        w.submit(&text(n, 1000), 1);
        // vLLM announces it with the next step.
        w.reset(0, true);
        w.run(5.0);
    }
    assert_eq!(w.engines[0].endpoint.status(w.now).audited.distrusted, 0);
}

/// The engine computes at least the last token, in whole blocks.
#[tokio::test(start_paused = true)]
async fn the_last_block_is_computed_again() {
    for events in [true, false] {
        let mut w = World::new(Routing::PricedTtft);
        w.add(GPU, 32, 1000, events);
        let exact = text(1, 640);
        w.submit(&exact, 1);
        w.run(5.0);
        let cached = |tokens: &[u32]| only(&w, &dispatch(&w.pool, tokens, w.now)).cached;
        assert_eq!(cached(&exact), 608);
        assert_eq!(cached(&[&exact[..], &[9]].concat()), 640);
        assert_eq!(cached(&exact[..50]), 32);
        assert_eq!(cached(&exact[..1]), 0);
    }
}

/// A prefix that is being computed is held soon: a sibling joins it, and waits for what is left of it.
#[tokio::test(start_paused = true)]
async fn a_prefix_being_computed_counts() {
    for events in [true, false] {
        let w = World::with(Routing::PricedTtft, 2, events);
        let shared = text(1, 8000);
        let first = dispatch(&w.pool, &shared, w.now);
        let sibling = [&shared[..], &text(2, 100)].concat();
        let t = dispatch(&w.pool, &sibling, w.now);
        let c = only(&w, &t);
        assert_eq!(t.endpoint().id(), first.endpoint().id());
        assert_eq!(c.cached, 8000);
        assert!(c.prediction.terms.backlog > 10.0 * c.prediction.terms.prefill);
        // Its own work is the tail alone; twice the same wait would be wrong.
        let third = dispatch(&w.pool, &sibling, w.now);
        let grown = only(&w, &third).prediction.terms.backlog - c.prediction.terms.backlog;
        assert!(grown < c.prediction.terms.backlog / 10.0);
    }
}

/// Events shrink what is ahead before the first token.
#[tokio::test(start_paused = true)]
async fn a_booked_request_shrinks_as_its_blocks_appear() {
    use crate::events::{BlockStored, EventBatch, GroupKind, KvEvent, Medium};
    let mut w = World::new(Routing::PricedTtft);
    w.add(GPU, 16, 1000, true);
    w.report();
    let long = text(1, 4096);
    let _ticket = dispatch(&w.pool, &long, w.now);
    let backlog = |w: &World| {
        let t = dispatch(&w.pool, &text(9, 10), w.now);
        only(w, &t).prediction.terms.backlog
    };
    let before = backlog(&w);
    let p = prompt(&long);
    w.engines[0].endpoint.apply(&EventBatch {
        seq: 0,
        ts: 0.0,
        rank: None,
        events: vec![KvEvent::Stored(BlockStored {
            hashes: p.chain.keys()[..192].to_vec(),
            parent: None,
            tokens: long[..3072].to_vec(),
            block_size: 16,
            lora_name: None,
            extra_keys: Vec::new(),
            medium: Medium::Gpu,
            group: 0,
            kind: GroupKind::Full,
        })],
    });
    let after = backlog(&w);
    assert!((0.15..0.4).contains(&(after / before)), "{before} {after}");
}

/// Hints bridge the lag of events, end with a failed request at once and with others after two seconds.
#[tokio::test(start_paused = true)]
async fn hints_end() {
    let w = World::with(Routing::PricedTtft, 1, true);
    let tokens = text(1, 1000);
    let cached = |now| only(&w, &dispatch(&w.pool, &tokens[..999], now)).cached;
    let mut now = w.now;
    {
        let _t = dispatch(&w.pool, &tokens, now);
        assert_eq!(cached(now), 992);
    }
    assert_eq!(cached(now), 0, "it ended before its first token");
    let mut t = dispatch(&w.pool, &tokens, now);
    t.sent(now);
    now += Duration::from_secs(1);
    t.first_token(now);
    t.end(now, End::Complete);
    assert_eq!(cached(now + Duration::from_millis(1900)), 992);
    assert_eq!(
        cached(now + Duration::from_millis(2100)),
        0,
        "no event ever told of it"
    );
}

/// D13: a readiness blip loses nothing; removal and another process do.
#[tokio::test(start_paused = true)]
async fn not_ready_keeps_what_is_known() {
    let mut w = World::with(Routing::PricedTtft, 1, true);
    let tokens = text(1, 1000);
    w.submit(&tokens, 1);
    w.run(10.0);
    let cached = |w: &World| only(w, &dispatch(&w.pool, &tokens, w.now)).cached;
    let e = w.engines[0].endpoint.clone();
    e.set_ready(false);
    assert!(matches!(
        w.pool.pick(&request(&tokens), &Excluded::default(), w.now),
        Pick::Wait(None)
    ));
    e.set_ready(true);
    assert_eq!(cached(&w), 992);
    // Another process at the same address.
    let t = dispatch(&w.pool, &tokens, w.now);
    let id = e
        .id()
        .with_incarnation(crate::endpoint::Incarnation::new("2"));
    let new = w.pool.insert(id.clone(), (*e.info()).clone());
    assert!(
        futures::FutureExt::now_or_never(t.cut()).is_some(),
        "its tickets are cut"
    );
    assert_eq!(w.pool.endpoints().len(), 1);
    new.set_events_live(true);
    new.set_ready(true);
    assert_eq!(cached(&w), 0);
    // What the old one says no longer matters.
    e.set_ready(true);
    assert_eq!(w.pool.endpoints()[0].id(), &id);
    let t = dispatch(&w.pool, &tokens, w.now);
    w.pool.remove(&id);
    assert!(futures::FutureExt::now_or_never(t.cut()).is_some());
    assert!(w.pool.endpoints().is_empty());
}

/// A cut ends the tickets of its time, not later ones.
#[tokio::test(start_paused = true)]
async fn a_cut_is_for_those_who_were_there() {
    use futures::FutureExt;
    let w = World::with(Routing::PricedTtft, 1, true);
    let e = &w.engines[0].endpoint;
    let before = dispatch(&w.pool, &text(1, 100), w.now);
    assert!(before.cut().now_or_never().is_none());
    e.cut();
    assert!(!e.is_ready() && before.cut().now_or_never().is_some());
    e.set_ready(true);
    let after = dispatch(&w.pool, &text(1, 100), w.now);
    assert!(after.cut().now_or_never().is_none());
}

/// Events that were lost lower the rung and leave a guess.
#[tokio::test(start_paused = true)]
async fn lost_events_lower_the_rung() {
    let mut w = World::with(Routing::PricedTtft, 1, true);
    let tokens = text(1, 1000);
    w.submit(&tokens, 1);
    w.run(1.5);
    w.report();
    let pick = |w: &World| {
        let t = dispatch(&w.pool, &tokens, w.now);
        (t.decision().rung, only(w, &t).cached)
    };
    assert_eq!(pick(&w), (Rung::Exact, 992));
    w.engines[0].endpoint.set_events_live(false);
    assert_eq!(pick(&w), (Rung::Guessed, 992));
    w.engines[0].endpoint.set_events_live(true);
    // A report that is too old does, too: the load of others is not known.
    w.run(60.0);
    assert_eq!(pick(&w), (Rung::Guessed, 992));
    w.report();
    w.engines[0].endpoint.clear();
    assert_eq!(pick(&w), (Rung::Exact, 0));
}

/// Prompts that are known only as bytes get affinity as well; those not known at all go by load.
#[tokio::test(start_paused = true)]
async fn what_is_known_less_is_used_as_it_is() {
    let w = World::with(Routing::PricedTtft, 2, true);
    let ks = KeySpace::new(1);
    let bytes = vec![b'a'; 40_000];
    let prompt = Prompt {
        chain: ks.bytes(ks.root(ChainKind::Bytes, MODEL, None, None), &bytes),
        tokens: 10_000,
        ids: None,
        bytes: 40_000,
        whole_text: false,
        source: Source::Approximate(Reason::NoTokenizer),
    };
    let req = PickRequest {
        prompt,
        stream: true,
        max_tokens: None,
        request_id: None,
    };
    let go = |req: &PickRequest, now| match w.pool.pick(req, &Excluded::default(), now) {
        Pick::Dispatch(t) => t,
        other => panic!("{other:?}"),
    };
    let mut t = go(&req, w.now);
    let holder = t.endpoint().id().clone();
    t.first_token(w.now);
    t.usage(Usage {
        prompt_tokens: 9_000,
        completion_tokens: 1,
        cached_tokens: Some(0),
    });
    t.end(w.now, End::Complete);
    let later = w.now + Duration::from_secs(60);
    let t = go(&req, later);
    assert_eq!(t.endpoint().id(), &holder);
    assert_eq!(t.decision().rung, Rung::Guessed);
    assert!(only(&w, &t).cached > 9_000);

    let unknown = PickRequest {
        prompt: Prompt {
            chain: crate::chain::Chain::empty(ChainKind::Bytes),
            tokens: 0,
            ids: None,
            bytes: 0,
            whole_text: false,
            source: Source::Approximate(Reason::Unread),
        },
        ..req.clone()
    };
    let tickets: Vec<Ticket> = (0..10).map(|_| go(&unknown, later)).collect();
    assert!(tickets.iter().all(|t| t.decision().rung == Rung::InFlight));
    let there = tickets
        .iter()
        .filter(|t| t.endpoint().id() == &holder)
        .count();
    assert!((4..=6).contains(&there), "{there}");
    let unkeyed = PickRequest {
        prompt: Prompt {
            tokens: 500,
            ..unknown.prompt.clone()
        },
        ..req.clone()
    };
    assert_eq!(go(&unkeyed, later).decision().rung, Rung::Load);
}

/// When predictions are wild, work ahead decides, and the record says so.
#[tokio::test(start_paused = true)]
async fn an_untrusted_predictor_steps_back() {
    let mut w = World::with(Routing::PricedTtft, 2, true);
    for n in 0..60 {
        let mut t = dispatch(&w.pool, &text(n, 2000), w.now);
        t.sent(w.now);
        let took = if n % 2 == 0 { 0.004 } else { 40.0 };
        t.first_token(w.now + Duration::from_secs_f64(took));
        t.end(w.now + Duration::from_secs_f64(took), End::Complete);
        w.run(50.0);
    }
    let tickets: Vec<Ticket> = (0..10)
        .map(|n| dispatch(&w.pool, &text(100 + n, 2000), w.now))
        .collect();
    assert!(tickets.iter().all(|t| t.decision().rung == Rung::Load));
    let first = tickets[0].endpoint().id();
    let same = tickets
        .iter()
        .filter(|t| t.endpoint().id() == first)
        .count();
    assert_eq!(same, 5);
}
