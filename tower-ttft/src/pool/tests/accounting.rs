//! Everything that is booked is released, where it was booked.

use super::{super::*, sim::*};
use crate::{
    endpoint::Incarnation,
    observe::{End, Observer},
    policy::Routing,
};
use proptest::prelude::*;
use std::time::Duration;

fn id(n: usize, life: u32) -> EndpointId {
    EndpointId::new(format!("10.0.0.{n}:1")).with_incarnation(Incarnation::new(life.to_string()))
}

/// In flight by the endpoint's own count and by its gauges.
fn counts(e: &Endpoint) -> (u32, u32, i64, i64) {
    let (booked, running) = e.member.state.lock().load.counts();
    let m = &e.member.metrics;
    (booked, running, m.booked.get(), m.running.get())
}

#[derive(Clone, Debug)]
enum Op {
    Pick(u32, bool),
    FirstToken(usize),
    End(usize, u8),
    Drop(usize),
    Fail(usize),
    Remove(usize),
    Insert(usize, bool),
    Ready(usize, bool),
    Cut(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (1u32..3000, any::<bool>()).prop_map(|(t, s)| Op::Pick(t, s)),
        3 => (0usize..16).prop_map(Op::FirstToken),
        3 => (0usize..16, 0u8..3).prop_map(|(t, e)| Op::End(t, e)),
        2 => (0usize..16).prop_map(Op::Drop),
        1 => (0usize..16).prop_map(Op::Fail),
        1 => (0usize..4).prop_map(Op::Remove),
        2 => (0usize..4, any::<bool>()).prop_map(|(e, n)| Op::Insert(e, n)),
        1 => (0usize..4, any::<bool>()).prop_map(|(e, r)| Op::Ready(e, r)),
        1 => (0usize..4).prop_map(Op::Cut),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever happens in whatever order, each endpoint's counts are those of its own tickets, and zero at the end (E4).
    #[test]
    fn what_is_booked_is_released(ops in prop::collection::vec(op(), 0..120)) {
        let rt = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
        rt.block_on(async {
            let pool = Pool::new(params(Routing::PricedTtft));
            let mut now = Instant::now();
            let mut lives = [0u32; 4];
            let mut all: Vec<Endpoint> = Vec::new();
            let mut live: Vec<(Ticket, bool)> = Vec::new();
            let insert = |n: usize, lives: &[u32; 4], all: &mut Vec<Endpoint>| {
                let info = EndpointInfo { block_size: Some(16), blocks: Some(100), events: n.is_multiple_of(2), ..Default::default() };
                let e = pool.insert(id(n, lives[n]), info);
                e.set_ready(true);
                all.push(e);
            };
            insert(0, &lives, &mut all);
            for op in ops {
                now += Duration::from_millis(50);
                match op {
                    Op::Pick(tokens, stream) => {
                        let mut req = request(&text(tokens % 5, tokens));
                        req.stream = stream;
                        if let Pick::Dispatch(mut t) = pool.pick(&req, &Excluded::default(), now) {
                            t.sent(now);
                            live.push((t, false));
                        }
                    }
                    Op::FirstToken(n) => if let Some((t, first)) = live.get_mut(n) {
                        t.first_token(now);
                        *first = true;
                    },
                    Op::End(n, how) => if n < live.len() {
                        let (mut t, _) = live.swap_remove(n);
                        let end = [End::Complete, End::EngineError, End::Broken][usize::from(how)];
                        t.end(now, end);
                        // Told twice is told once.
                        t.end(now, end);
                    },
                    Op::Drop(n) => if n < live.len() {
                        drop(live.swap_remove(n));
                    },
                    Op::Fail(n) => if n < live.len() {
                        live.swap_remove(n).0.fail(now);
                    },
                    Op::Remove(n) => pool.remove(&id(n, lives[n])),
                    Op::Insert(n, new) => {
                        lives[n] += u32::from(new);
                        insert(n, &lives, &mut all);
                    }
                    Op::Ready(n, ready) => for e in pool.endpoints().iter().filter(|e| *e.id() == id(n, lives[n])) {
                        e.set_ready(ready);
                    },
                    Op::Cut(n) => for e in pool.endpoints().iter().filter(|e| *e.id() == id(n, lives[n])) {
                        e.cut();
                    },
                }
                for e in &all {
                    let mine = |past: bool| live.iter().filter(|(t, first)| Arc::ptr_eq(&t.endpoint().member, &e.member) && *first == past).count() as u32;
                    let (booked, running, _, _) = counts(e);
                    assert_eq!((booked, running), (mine(false), mine(true)), "{:?}", e.id());
                }
                let gauges: i64 = pool.endpoints().iter().map(|e| { let c = counts(e); c.2.min(c.3) }).min().unwrap_or(0);
                assert!(gauges >= 0, "a gauge went below zero");
            }
            drop(live);
            for e in &all {
                assert_eq!(counts(e), (0, 0, 0, 0), "{:?}", e.id());
            }
        });
    }
}

/// E4, as it was reported: it leaves and returns under its name while requests are in flight.
#[tokio::test(start_paused = true)]
async fn a_flapping_endpoint_keeps_its_own_counts() {
    let pool = Pool::new(params(Routing::PricedTtft));
    let now = Instant::now();
    for n in 0..1000u32 {
        let e = pool.insert(id(0, 0), EndpointInfo::default());
        e.set_ready(true);
        let a = dispatch(&pool, &text(1, 100), now);
        pool.remove(&id(0, 0));
        let e2 = pool.insert(id(0, 0), EndpointInfo::default());
        e2.set_ready(true);
        let b = dispatch(&pool, &text(2, 100), now);
        let (first, second) = if n.is_multiple_of(2) { (a, b) } else { (b, a) };
        drop(first);
        for e in [&e, &e2] {
            let (booked, _, gauge, _) = counts(e);
            assert!(booked <= 1 && (0..=1).contains(&gauge));
        }
        drop(second);
        assert_eq!(counts(&e), (0, 0, 0, 0));
        assert_eq!(counts(&e2), (0, 0, 0, 0));
        pool.remove(&id(0, 0));
    }
    assert!(pool.inner.choice.lock().breakers.is_empty());
}

/// Who failed a request is not asked again; who is not ready may still come.
#[tokio::test(start_paused = true)]
async fn excluded_endpoints_are_not_asked_again() {
    let w = World::with(Routing::PricedTtft, 2, true);
    let ids: Vec<EndpointId> = w.engines.iter().map(|e| e.endpoint.id().clone()).collect();
    let req = request(&text(1, 100));
    for n in 0..10 {
        let excluded = Excluded(vec![ids[n % 2].clone()]);
        let Pick::Dispatch(t) = w.pool.pick(&req, &excluded, w.now) else {
            panic!("the other one is free");
        };
        assert_eq!(t.endpoint().id(), &ids[1 - n % 2]);
    }
    let all = Excluded(ids.clone());
    assert!(matches!(
        w.pool.pick(&req, &all, w.now),
        Pick::None(NoEndpoint::AllExcluded)
    ));
    w.engines[0].endpoint.set_ready(false);
    let excluded = Excluded(vec![ids[1].clone()]);
    assert!(matches!(
        w.pool.pick(&req, &excluded, w.now),
        Pick::Wait(None)
    ));
    assert!(matches!(
        Pool::new(params(Routing::PricedTtft)).pick(&req, &Excluded::default(), w.now),
        Pick::Wait(None)
    ));
}

/// Above the limit a sample is scored, and the holder is in it.
#[tokio::test(start_paused = true)]
async fn large_pools_are_sampled() {
    let mut w = World::with(Routing::PricedTtft, 100, true);
    let hot = text(1, 4000);
    let r = w.submit(&hot, 1);
    w.run(5.0);
    let holder = w.requests[r].engine;
    for n in 0..20 {
        let r = w.submit(&[&hot[..], &text(10 + n, 20)].concat(), 1);
        assert_eq!(w.requests[r].engine, holder);
        w.run(1.0);
    }
    let last = w.pool.decisions().last(1);
    assert!(last[0].decision.candidates.len() <= 6);
    w.finish();
    w.idle();
}

/// Records hold what a decision rested on and what came of it, and nothing of the prompt.
#[tokio::test(start_paused = true)]
async fn decisions_are_recorded() {
    let mut w = World::with(Routing::PricedTtft, 2, true);
    let mut live = w.pool.decisions().subscribe();
    w.submit(&text(4242, 1000), 3);
    w.finish();
    let record = &w.pool.decisions().last(10)[0];
    let outcome = record.outcome.expect("it ended");
    assert_eq!(outcome.end, End::Complete);
    assert_eq!(
        (outcome.prompt_tokens, outcome.cached_tokens),
        (Some(1000), Some(0))
    );
    assert!(outcome.ttft.is_some_and(|t| t > 0.1));
    assert!(live.try_recv().is_ok_and(|r| r.outcome.is_none()));
    assert!(live.try_recv().is_ok_and(|r| r.outcome.is_some()));
    let json = serde_json::to_value(record).expect("serializes");
    assert_eq!(json["decision"]["rung"], "exact");
    assert_eq!(
        json["decision"]["candidates"].as_array().map(Vec::len),
        Some(2)
    );
    assert!(json["decision"]["candidates"][0]["terms"]["prefill"].is_number());
    assert_eq!(json["outcome"]["end"], "complete");
    let token = text(4242, 1)[0].to_string();
    assert!(!json.to_string().contains(&token), "a token id");
    w.pool.decisions().set_size(3);
    for n in 0..10 {
        w.submit(&text(n, 10), 1);
    }
    w.finish();
    assert_eq!(w.pool.decisions().last(99).len(), 3);
    assert!(
        w.pool
            .decisions()
            .last(99)
            .iter()
            .all(|r| r.outcome.is_some())
    );
}

/// Metrics are there by the names that dashboards use, and go with their endpoint.
#[tokio::test(start_paused = true)]
async fn metrics_come_and_go() {
    let families = PoolMetricFamilies::default();
    let mut registry = prometheus_client::registry::Registry::default();
    families.register(&mut registry);
    let pool = Pool::with_metrics(params(Routing::PricedTtft), &families);
    let shown = || {
        let mut s = String::new();
        prometheus_client::encoding::text::encode(&mut s, &registry).expect("encodes");
        s
    };
    let now = Instant::now();
    pool.insert(id(0, 0), EndpointInfo::default())
        .set_ready(true);
    let mut t = dispatch(&pool, &text(1, 600), now);
    t.sent(now);
    t.first_token(now + Duration::from_millis(100));
    let s = shown();
    for line in [
        r#"forebay_decisions_total{model="m",rung="guessed"} 1"#,
        r#"forebay_decision_fallbacks_total{model="m",reason="no_events"} 1"#,
        r#"forebay_picks_total{model="m",endpoint="10.0.0.0:1"} 1"#,
        r#"forebay_in_flight{model="m",endpoint="10.0.0.0:1",state="running"} 1"#,
        r#"forebay_in_flight{model="m",endpoint="10.0.0.0:1",state="booked"} 0"#,
        r#"forebay_endpoint_ready{model="m",endpoint="10.0.0.0:1"} 1"#,
        r#"forebay_ttft_actual_seconds_count{model="m",endpoint="10.0.0.0:1"} 1"#,
        r#"forebay_ttft_predicted_seconds_count{model="m",endpoint="10.0.0.0:1"} 1"#,
        r#"forebay_pending_demand{model="m"} 0"#,
    ] {
        assert!(s.contains(line), "{line} is not in\n{s}");
    }
    pool.remove(&id(0, 0));
    t.end(now, End::Complete);
    assert!(!shown().contains("10.0.0.0:1"), "{}", shown());
}
