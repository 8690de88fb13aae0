use super::*;
use crate::load::Gaps;

fn spec() -> Arc<PodSpec> {
    Arc::new(PodSpec::kind("l40s").expect("a built-in kind"))
}

fn closed(workload: Workload, streams: u32, arm: Arm) -> World {
    World::published(&spec(), workload, Pattern::Closed { streams }, arm, 42)
}

/// Runs on a paused clock.
fn run(world: &World) -> Run {
    let runs = crate::crew::all(std::slice::from_ref(world), 1, World::run);
    runs.expect("a runtime starts").remove(0).expect("runs")
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let world = World {
        bypass: 0.2,
        proxies: 2,
        ..closed(Workload::Shared, 8, Arm::Priced)
    };
    let of = |seed| {
        let run = run(&World {
            seed,
            ..world.clone()
        });
        format!("{:?}", run.records)
    };
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
}

#[test]
fn all_arms_get_the_same_requests() {
    let pattern = Pattern::Open {
        rate: 0.2,
        gaps: Gaps::Tens,
    };
    let sent = |arm| {
        let world = World::published(&spec(), Workload::Shared, pattern, arm, 7);
        run(&world).records
    };
    let service = sent(Arm::Service);
    assert!(service.len() > 20);
    for arm in Arm::ALL {
        let own = sent(arm);
        assert_eq!(own.len(), service.len(), "{}", arm.name());
        for (a, b) in own.iter().zip(&service) {
            assert_eq!((a.number, a.turn, a.tokens), (b.number, b.turn, b.tokens));
            // The whole path's timers have a resolution of 1 ms.
            let late = a.at - b.at;
            assert!((0.0..0.002).contains(&late), "{}: {late}", arm.name());
        }
    }
}

#[test]
fn every_computed_token_has_a_cause() {
    for arm in [Arm::Service, Arm::Priced] {
        let run = run(&closed(Workload::Shared, 16, arm));
        let (hits, tokens) = run.hits();
        let c = run.causes();
        assert_eq!(c.tokens, tokens);
        let computed = c.cold + c.evicted + c.elsewhere + c.lost;
        assert_eq!(computed + hits, tokens, "{c:?}");
    }
}

#[test]
fn knowledge_pays() {
    let good = |arm| {
        let run = run(&closed(Workload::Shared, 16, arm));
        run.measured().filter(|r| r.counted() <= 8.0).count()
    };
    let [service, least, priced, bound] =
        [Arm::Service, Arm::LeastRequests, Arm::Priced, Arm::Bound].map(good);
    assert!(service < least, "{service} {least}");
    assert!(least * 2 < priced, "{least} {priced}");
    assert!(priced <= bound + 5, "{priced} {bound}");
}

#[test]
fn probes_know_the_truth_of_the_chosen() {
    let world = World {
        probe: true,
        ..closed(Workload::Shared, 4, Arm::Priced)
    };
    let run = run(&world);
    let mut told = 0;
    for r in run.measured() {
        let (Some(p), Some(ttft)) = (&r.probe, r.ttft) else {
            continue;
        };
        let (_, truth) = p.candidates[p.chosen];
        // Later arrivals change what a fork cannot know.
        told += u32::from((truth - ttft).abs() < 0.05 * ttft);
        assert_eq!(p.candidates.len(), 3);
    }
    let all = run.measured().count() as u32;
    assert!(told * 10 > all * 7, "{told} of {all}");
}

#[test]
fn who_joins_late_gets_nothing_before() {
    let world = World {
        changes: vec![(100.0, Change::Join(2))],
        ..closed(Workload::Shared, 16, Arm::Priced)
    };
    let run = run(&world);
    let there = |from: f64, to: f64| {
        let all = run.records.iter();
        all.filter(|r| r.pod == 2 && (from..to).contains(&r.at))
            .count()
    };
    assert_eq!(there(0.0, 100.0), 0);
    assert!(there(100.0, 200.0) > 5, "it is used");
}
