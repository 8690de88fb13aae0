use super::*;
use rand::{SeedableRng, rngs::StdRng};

#[test]
fn the_built_in_kinds_are_ordered_by_speed() {
    let step = |kind: &str| {
        let spec = PodSpec::kind(kind).expect("a built-in kind");
        (spec.per_token, spec.step_base + spec.step_floor)
    };
    assert!(step("h100") < step("l40s") && step("l40s") < step("a10"));
    assert_eq!(
        PodSpec::kind("l40s").map(|s| s.kv_tokens()).ok(),
        Some(205_408)
    );
}

#[test]
fn mistakes_are_named() {
    let error = |yaml: &str| PodSpec::kinds(yaml).expect_err("a mistake").to_string();
    let unknown = KINDS.replacen("step_base", "step_bass", 1);
    assert!(error(&unknown).contains("step_bass"), "{}", error(&unknown));
    let negative = KINDS.replacen("per_token: 0.000392", "per_token: -1", 1);
    assert!(error(&negative).contains("pod kind l40s: per_token must be"));
    let tight = KINDS.replacen("kv_blocks: 262", "kv_blocks: 4", 1);
    assert!(error(&tight).contains("kv_blocks must be above extra_blocks"));
    let missing = PodSpec::kind("tpu").expect_err("no such kind").to_string();
    assert_eq!(missing, "no pod kind tpu; there are: a10, h100, l40s");
}

#[test]
fn perturbed_times_stay_in_range_and_sizes_stay() {
    let spec = PodSpec::kind("l40s").expect("a built-in kind");
    let mut rng = StdRng::seed_from_u64(1);
    let factors: Vec<f64> = (0..200)
        .map(|_| {
            let other = spec.perturbed(&mut rng, 0.7..1.4);
            assert_eq!((other.block_size, other.kv_blocks), (784, 262));
            assert_ne!(
                other.per_token / spec.per_token,
                other.step_base / spec.step_base
            );
            other.per_token / spec.per_token
        })
        .collect();
    assert!(factors.iter().all(|f| (0.7..1.4).contains(f)));
    assert!(factors.iter().any(|f| *f < 0.8) && factors.iter().any(|f| *f > 1.25));
}
