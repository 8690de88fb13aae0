use super::*;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::sync::Arc;
use tokio::time::Instant;

/// What an engine really takes; the model never sees these numbers.
#[derive(Clone, Copy)]
struct Engine {
    /// Seconds per token.
    token: f64,
    /// Attention per token of context.
    attention: f64,
    /// Seconds per byte of prompt.
    byte: f64,
    /// Seconds for anything.
    base: f64,
    /// Standard deviation of the log of the noise.
    noise: f64,
}

const CPU: Engine = Engine {
    token: 4e-4,
    attention: 2e-5,
    byte: 2e-6,
    base: 0.08,
    noise: 0.25,
};

const GPU: Engine = Engine {
    token: 2e-5,
    attention: 3e-5,
    byte: 2e-6,
    base: 0.012,
    noise: 0.05,
};

// === impl Engine ===

impl Engine {
    fn work(&self, uncached: u32, cached: u32) -> f64 {
        let (u, c) = (f64::from(uncached), f64::from(cached));
        (u + self.attention * u * (c + u / 2.0)) * self.token
    }

    /// TTFT with so many seconds of work ahead.
    fn ttft(&self, i: &Inputs, ahead: f64, rng: &mut StdRng) -> f64 {
        let noise = (self.noise * normal(rng)).exp();
        (self.base
            + self.byte * f64::from(i.bytes)
            + ahead
            + self.work(i.tokens - i.cached, i.cached))
            * noise
    }
}

fn normal(rng: &mut StdRng) -> f64 {
    (0..12).map(|_| rng.random_range(0.0..1.0)).sum::<f64>() - 6.0
}

fn inputs(tokens: u32, cached: u32) -> Inputs {
    Inputs {
        tokens,
        cached,
        bytes: tokens * 4,
        ..Default::default()
    }
}

/// One request, predicted, answered and learned.
fn one(
    m: &mut TtftModel,
    slot: Slot,
    e: &Engine,
    i: &Inputs,
    ahead: f64,
    now: Instant,
    rng: &mut StdRng,
) -> (f64, f64) {
    let p = m.predict(slot, i, now);
    let actual = e.ttft(i, ahead, rng);
    m.learn(slot, i, &p, actual, now);
    (p.ttft.as_secs_f64(), actual)
}

/// A prompt as conversations have them: a quarter cold, the rest mostly held.
fn some(rng: &mut StdRng) -> Inputs {
    let tokens = rng.random_range(600..16_000);
    let cached = if rng.random_bool(0.25) {
        0
    } else {
        tokens * rng.random_range(50..98) / 100
    };
    inputs(tokens, cached)
}

#[tokio::test(start_paused = true)]
async fn five_requests_are_enough_on_any_machine() {
    let now = Instant::now();
    for e in [CPU, GPU] {
        let mut rng = StdRng::seed_from_u64(1);
        let (mut m, quiet) = (TtftModel::default(), Engine { noise: 0.0, ..e });
        let slot = m.add(None);
        for tokens in [2000, 40, 3000, 900, 8000] {
            one(&mut m, slot, &e, &inputs(tokens, 0), 0.0, now, &mut rng);
        }
        for tokens in [1000, 4000, 16_000] {
            let i = inputs(tokens, 0);
            let predicted = m.predict(slot, &i, now).ttft.as_secs_f64();
            let actual = quiet.ttft(&i, 0.0, &mut rng);
            let error = (predicted / actual).ln().abs();
            assert!(error < 0.4, "{tokens} tokens: {predicted} s for {actual} s");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_order_of_unlike_endpoints_is_right() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(2);
    // From half to three times the speed of the first, and none labelled.
    let engines = [1.0, 1.0, 0.5, 3.0].map(|speed| Engine {
        token: CPU.token / speed,
        ..CPU
    });
    let mut m = TtftModel::default();
    let slots = engines.map(|_| m.add(None));
    let (mut right, mut pairs, mut counted) = (0, 0, 0);
    for n in 0..400 {
        let all: Vec<Inputs> = {
            let base = some(&mut rng);
            // Each endpoint holds another part of the same prompt, behind other work.
            (0..4)
                .map(|_| {
                    let cached = base.cached * rng.random_range(0..=1);
                    let ahead =
                        f64::from(rng.random_range(0..3)) * f64::from(rng.random_range(0..4000));
                    Inputs {
                        cached,
                        ahead,
                        ..base
                    }
                })
                .collect()
        };
        let predicted: Vec<f64> = (0..4)
            .map(|e| m.predict(slots[e], &all[e], now).ttft.as_secs_f64())
            .collect();
        let truth: Vec<f64> = (0..4)
            .map(|e| {
                let quiet = Engine {
                    noise: 0.0,
                    ..engines[e]
                };
                quiet.ttft(&all[e], all[e].ahead * engines[e].token, &mut rng)
            })
            .collect();
        for a in 0..4 {
            for b in 0..a {
                let apart = (truth[a] / truth[b]).ln().abs() > 1.2f64.ln();
                if n >= 40 && apart {
                    pairs += 1;
                    right += i32::from((truth[a] < truth[b]) == (predicted[a] < predicted[b]));
                    let fewer = |e: usize| all[e].tokens - all[e].cached;
                    counted += i32::from((truth[a] < truth[b]) == (fewer(a) < fewer(b)));
                }
            }
        }
        // As routing would: only the best learns.
        let best = (0..4)
            .min_by(|a, b| predicted[*a].total_cmp(&predicted[*b]))
            .expect("four");
        let ahead = all[best].ahead * engines[best].token;
        one(
            &mut m,
            slots[best],
            &engines[best],
            &all[best],
            ahead,
            now,
            &mut rng,
        );
    }
    let (right, counted) = (
        f64::from(right) / f64::from(pairs),
        f64::from(counted) / f64::from(pairs),
    );
    assert!(
        right >= 0.93,
        "{right} of {pairs} pairs, counting tokens {counted}"
    );
    assert!(
        counted < right - 0.1,
        "counting tokens is as good: {counted}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_change_of_speed_is_noticed() {
    let now = Instant::now();
    for factor in [4.0, 0.25] {
        let mut rng = StdRng::seed_from_u64(3);
        let mut m = TtftModel::default();
        let slot = m.add(None);
        for _ in 0..200 {
            one(&mut m, slot, &CPU, &inputs(3000, 0), 0.0, now, &mut rng);
        }
        assert_eq!(m.changes(slot), 0, "steady noise is no change");
        let other = Engine {
            token: CPU.token * factor,
            ..CPU
        };
        for _ in 0..6 {
            one(&mut m, slot, &other, &inputs(3000, 0), 0.0, now, &mut rng);
        }
        let i = inputs(3000, 0);
        let quiet = Engine {
            noise: 0.0,
            ..other
        };
        let error = (m.predict(slot, &i, now).ttft.as_secs_f64() / quiet.ttft(&i, 0.0, &mut rng))
            .ln()
            .abs();
        assert!(m.changes(slot) > 0 && error < 0.35, "{factor}: {error}");
    }
}

#[tokio::test(start_paused = true)]
async fn one_outlier_is_no_change() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(4);
    let mut m = TtftModel::default();
    let slot = m.add(None);
    for _ in 0..50 {
        one(&mut m, slot, &GPU, &inputs(4000, 0), 0.0, now, &mut rng);
    }
    let before = m.predict(slot, &inputs(4000, 0), now).ttft.as_secs_f64();
    let p = m.predict(slot, &inputs(4000, 0), now);
    m.learn(slot, &inputs(4000, 0), &p, before * 30.0, now);
    let after = m.predict(slot, &inputs(4000, 0), now).ttft.as_secs_f64();
    assert!(after < before * 1.1, "{before} became {after}");
    assert_eq!(m.changes(slot), 0);
}

#[tokio::test(start_paused = true)]
async fn a_slow_frontend_is_told_from_base_and_prefill() {
    let now = Instant::now();
    for byte in [2e-6, 1e-8] {
        let e = Engine { byte, ..GPU };
        let mut rng = StdRng::seed_from_u64(5);
        let mut m = TtftModel::default();
        let slot = m.add(None);
        for n in 0..60 {
            let tokens = if n % 2 == 0 { 16_000 } else { 60 };
            one(
                &mut m,
                slot,
                &e,
                &inputs(tokens, tokens - 30),
                0.0,
                now,
                &mut rng,
            );
        }
        let p = m.predict(slot, &inputs(16_000, 15_970), now);
        let truth = byte * 64_000.0;
        assert!(
            (p.terms.frontend - truth).abs() < 0.02,
            "{} for {truth}",
            p.terms.frontend
        );
        assert!((p.terms.base - e.base).abs() < 0.015, "{}", p.terms.base);
    }
}

/// Half the CPU is twice the frontend: what is true of one endpoint's hits is not true of another's.
#[tokio::test(start_paused = true)]
async fn hits_are_ordered_where_only_the_frontend_differs() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(11);
    let half = Engine {
        byte: 2.0 * CPU.byte,
        base: 2.0 * CPU.base,
        token: 2.0 * CPU.token,
        ..CPU
    };
    let mut m = TtftModel::default();
    let gpu: Option<Arc<str>> = Some("cpu".into());
    let (a, b) = (m.add(gpu.clone()), m.add(gpu));
    let (mut right, mut pairs) = (0, 0);
    for n in 0..60 {
        let tokens = rng.random_range(1000..16_000);
        let i = inputs(tokens, tokens - 40);
        let (pa, _) = one(&mut m, a, &CPU, &i, 0.0, now, &mut rng);
        let (pb, _) = one(&mut m, b, &half, &i, 0.0, now, &mut rng);
        if n >= 10 {
            pairs += 1;
            right += i32::from(pa < pb);
        }
    }
    assert!(right * 100 >= pairs * 95, "{right} of {pairs}");
    let truth = half.byte * 64_000.0;
    let p = m.predict(b, &inputs(16_000, 15_960), now);
    assert!(
        (p.terms.frontend / truth).ln().abs() < 0.5,
        "{}",
        p.terms.frontend
    );
}

#[tokio::test(start_paused = true)]
async fn peers_lend_their_gain_and_strangers_less() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(6);
    let mut m = TtftModel::default();
    let h100: Option<Arc<str>> = Some("h100".into());
    let (fast, slow) = (m.add(h100.clone()), m.add(Some("cpu".into())));
    for _ in 0..10 {
        one(&mut m, fast, &GPU, &inputs(4000, 0), 0.0, now, &mut rng);
        one(&mut m, slow, &CPU, &inputs(4000, 0), 0.0, now, &mut rng);
    }
    let new = m.add(h100);
    let ratio = m.seconds_per_token(new, now) / m.seconds_per_token(fast, now);
    assert!((ratio - 1.0).abs() < 0.1, "{ratio}");
    // No peer, but the engine itself says.
    let lone = m.add(Some("l4".into()));
    m.engine_prefill(lone, 10.0, 50_000);
    assert!((m.seconds_per_token(lone, now) - 2e-4).abs() < 1e-9);
    // Nothing at all: between those that are known.
    let stranger = m.add(None);
    let s = m.seconds_per_token(stranger, now);
    assert!(s > m.seconds_per_token(fast, now) && s < m.seconds_per_token(slow, now));
    // An endpoint that has been idle for long drifts to its peers.
    let other = Engine { token: 1e-4, ..GPU };
    for _ in 0..6 {
        one(&mut m, new, &other, &inputs(8000, 0), 0.0, now, &mut rng);
    }
    let later = now + Duration::from_secs(7200);
    assert!(m.seconds_per_token(new, later) < m.seconds_per_token(new, now) * 0.9);
}

#[tokio::test(start_paused = true)]
async fn one_slow_first_answer_is_not_believed_for_ever() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(10);
    let mut m = TtftModel::default();
    let (unlucky, other) = (m.add(None), m.add(None));
    let i = inputs(2000, 0);
    let p = m.predict(unlucky, &i, now);
    m.learn(unlucky, &i, &p, 4.0, now);
    for _ in 0..10 {
        one(&mut m, other, &CPU, &i, 0.0, now, &mut rng);
    }
    let later = now + Duration::from_secs(600);
    let ratio = |at| m.seconds_per_token(unlucky, at) / m.seconds_per_token(other, at);
    assert!(
        ratio(now) < 3.5 && ratio(later) < 1.7,
        "{} {}",
        ratio(now),
        ratio(later)
    );
}

#[tokio::test(start_paused = true)]
async fn attention_is_learned_where_it_matters() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(7);
    // A tiny model: nearly all of a long prompt's work is attention.
    let e = Engine {
        attention: 6e-4,
        token: 1e-4,
        noise: 0.1,
        ..CPU
    };
    let mut m = TtftModel::default();
    let slot = m.add(None);
    for _ in 0..300 {
        let tokens = rng.random_range(600..16_000);
        one(&mut m, slot, &e, &inputs(tokens, 0), 0.0, now, &mut rng);
    }
    let quiet = Engine { noise: 0.0, ..e };
    for tokens in [1000, 16_000] {
        let i = inputs(tokens, 0);
        let error = (m.predict(slot, &i, now).ttft.as_secs_f64() / quiet.ttft(&i, 0.0, &mut rng))
            .ln()
            .abs();
        assert!(error < 0.4, "{tokens}: {error}");
    }
}

#[tokio::test(start_paused = true)]
async fn it_says_when_not_to_be_trusted_and_recovers() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(8);
    let mut m = TtftModel::default();
    let slot = m.add(None);
    let i = inputs(4000, 0);
    assert!(m.predict(slot, &i, now).trusted);
    for n in 0..40 {
        // An engine without rhyme: milliseconds or minutes.
        let actual = if n % 2 == 0 { 0.01 } else { 60.0 };
        let p = m.predict(slot, &i, now);
        m.learn(slot, &i, &p, actual, now);
    }
    let p = m.predict(slot, &i, now);
    assert!(!p.trusted && p.error > 1.386, "{}", p.error);
    // Hits are another regime.
    assert!(m.predict(slot, &inputs(4000, 3900), now).trusted);
    for _ in 0..80 {
        one(&mut m, slot, &CPU, &i, 0.0, now, &mut rng);
    }
    let p = m.predict(slot, &i, now);
    assert!(p.trusted && p.error < 0.4, "{}", p.error);
}

/// A burst that comes before the first answer is predicted by guess alone, and says nothing of what is learned then.
#[tokio::test(start_paused = true)]
async fn first_guesses_do_not_cost_its_trust() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(12);
    let slow = Engine { token: 1e-3, ..CPU };
    let mut m = TtftModel::default();
    let slot = m.add(None);
    let i = inputs(4000, 0);
    let guessed: Vec<Prediction> = (0..32).map(|_| m.predict(slot, &i, now)).collect();
    for p in guessed {
        let actual = slow.ttft(&i, 0.0, &mut rng);
        assert!(actual > 4.0 * p.ttft.as_secs_f64());
        m.learn(slot, &i, &p, actual, now);
    }
    assert!(m.predict(slot, &i, now).trusted);
}

#[tokio::test(start_paused = true)]
async fn its_own_error_is_the_error_that_it_makes() {
    let now = Instant::now();
    let mut rng = StdRng::seed_from_u64(9);
    let mut m = TtftModel::default();
    let slot = m.add(None);
    let mut errors = Vec::new();
    let mut below_p90 = 0;
    for n in 0..264 {
        let i = inputs(5000, 0);
        let p = m.predict(slot, &i, now);
        let (predicted, actual) = one(&mut m, slot, &CPU, &i, 0.0, now, &mut rng);
        if n >= 200 {
            errors.push((actual / predicted).ln().abs());
            below_p90 += usize::from(actual <= p.p90.as_secs_f64());
        }
    }
    errors.sort_by(f64::total_cmp);
    let said = m.predict(slot, &inputs(5000, 0), now).error;
    assert!((said - errors[31]).abs() < 1e-9, "{said} {}", errors[31]);
    assert!(
        (50..=64).contains(&below_p90),
        "{below_p90} of 64 below the 90th percentile"
    );
}

proptest! {
    #[test]
    fn nothing_makes_it_less_than_a_number(
        samples in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u32>(), any::<f64>(), any::<f64>(), any::<f64>()), 1..60),
    ) {
        let rt = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
        rt.block_on(async {
            let now = Instant::now();
            let mut m = TtftModel::default();
            let slot = m.add(None);
            for (tokens, cached, bytes, ahead, running, actual) in samples {
                let i = Inputs { tokens, cached, bytes, ahead, others: 0.0, running, slot: 0.0 };
                let p = m.predict(slot, &i, now);
                m.learn(slot, &i, &p, actual, now);
                m.engine_prefill(slot, actual, u64::from(tokens));
            }
            for i in [inputs(100, 0), inputs(10_000, 5_000)] {
                let p = m.predict(slot, &i, now);
                assert!(p.terms.prefill.is_finite() && p.terms.base.is_finite() && p.terms.frontend.is_finite());
                assert!(p.ttft > Duration::ZERO && p.error.is_finite());
                assert!((2e-6..=5e-3).contains(&m.seconds_per_token(slot, now)), "{}", m.seconds_per_token(slot, now));
            }
        });
    }
}
