use super::*;
use crate::{
    crew,
    load::{Pattern, Windows, Workload},
    world::Arm,
};
use forebay_sim::PodSpec;

fn world(workload: Workload, streams: u32, windows: Windows) -> World {
    let spec = Arc::new(PodSpec::kind("l40s").expect("a built-in kind"));
    let pattern = Pattern::Closed { streams };
    World {
        windows,
        ..World::published(&spec, workload, pattern, Arm::Priced, 11)
    }
}

fn direct(world: &World) -> Run {
    let runs = crew::all(std::slice::from_ref(world), 1, World::run);
    runs.expect("a runtime starts").remove(0).expect("runs")
}

const SHORT: Windows = Windows {
    warmup: 0.0,
    measure: 60.0,
    cooldown: 20.0,
};

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let of = |seed| {
        let world = World {
            seed,
            ..world(Workload::Shared, 4, SHORT)
        };
        format!("{:?}", run(&world).expect("runs").records)
    };
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
}

/// One request at a time, so that nothing but the choice itself can differ.
#[test]
fn the_stack_chooses_as_the_pool_alone() {
    for workload in [Workload::Shared, Workload::Multiturn] {
        let world = world(workload, 1, Windows::CAPACITY);
        let (stack, pool) = (run(&world).expect("runs"), direct(&world));
        let n = stack.records.len().min(pool.records.len());
        assert!(n > 15, "{n}");
        for (i, (a, b)) in stack.records.iter().zip(&pool.records).enumerate() {
            assert_eq!(
                (a.number, a.turn, a.tokens),
                (b.number, b.turn, b.tokens),
                "{workload:?} {i}"
            );
            assert_eq!((a.pod, a.held), (b.pod, b.held), "{workload:?} {i}");
            if let (Some(x), Some(y)) = (a.ttft, b.ttft) {
                assert!((x - y).abs() < 0.05 * y, "{workload:?} {i}: {x} {y}");
            }
            if let (Some(x), Some(y)) = (a.cached, b.cached) {
                assert_eq!(x, y, "{workload:?} {i}");
            }
        }
    }
}

/// Many at once: the path adds nothing to speak of.
#[test]
fn the_stack_is_as_good_as_the_pool_alone() {
    let world = world(Workload::Shared, 16, Windows::CAPACITY);
    let good = |run: &Run| run.measured().filter(|r| r.counted() <= 8.0).count() as f64;
    let (stack, pool) = (run(&world).expect("runs"), direct(&world));
    let (a, b) = (good(&stack), good(&pool));
    assert!(b > 100.0 && (a - b).abs() < 0.1 * b, "{a} {b}");
}
