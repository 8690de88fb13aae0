//! The two-stage bootstrap of nested data: trials, then the requests within each (Davison and Hinkley, Bootstrap Methods
//! and their Application, 1997, section 3.8). Trial numbers are drawn once for both arms, since both saw the same prompts.

use super::{Trial, quantile_of};
use rand::{RngExt, rngs::StdRng};

/// A figure and the percentile interval that holds it in 95 of 100 experiments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The figure.
    pub value: f64,
    /// The lower limit.
    pub low: f64,
    /// The upper limit.
    pub high: f64,
}

/// One resample: which trials it is made of.
#[derive(Clone, Debug)]
pub struct Draw {
    trials: Vec<usize>,
    /// Everything as it was measured.
    whole: bool,
}

/// A statistic with its interval. `f` is asked first for the data as they are, then for each resample; it takes the values of
/// each arm through [`Draw::pool`].
pub fn bootstrap(
    trials: usize,
    resamples: usize,
    rng: &mut StdRng,
    mut f: impl FnMut(&Draw, &mut StdRng) -> f64,
) -> Interval {
    let mut draw = Draw {
        trials: (0..trials).collect(),
        whole: true,
    };
    let value = f(&draw, rng);
    draw.whole = false;
    let mut values = Vec::with_capacity(resamples);
    for _ in 0..resamples {
        for t in &mut draw.trials {
            *t = rng.random_range(0..trials.max(1));
        }
        let v = f(&draw, rng);
        if !v.is_nan() {
            values.push(v);
        }
    }
    Interval {
        value,
        low: quantile_of(&mut values, 0.025),
        high: quantile_of(&mut values, 0.975),
    }
}

// === impl Draw ===

impl Draw {
    /// Fills `into` with an arm's requests: from each drawn trial as many as it has, with replacement.
    pub fn pool(&self, arm: &[Trial], rng: &mut StdRng, into: &mut Vec<f64>) {
        into.clear();
        for t in self.trials.iter().filter_map(|t| arm.get(*t)) {
            let n = t.ttft.len();
            if self.whole {
                into.extend_from_slice(&t.ttft);
            } else {
                into.extend((0..n).filter_map(|_| t.ttft.get(rng.random_range(0..n)).copied()));
            }
        }
    }

    /// The length of the drawn windows, seconds.
    pub fn seconds(&self, arm: &[Trial]) -> f64 {
        let drawn = self.trials.iter().filter_map(|t| arm.get(*t));
        drawn.map(|t| t.window).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn normal(rng: &mut StdRng) -> f64 {
        (0..12).map(|_| rng.random_range(0.0..1.0)).sum::<f64>() - 6.0
    }

    /// Log-normal TTFTs around `median`, with a common shift in each trial.
    fn arm(median: f64, between: f64, trials: usize, rng: &mut StdRng) -> Vec<Trial> {
        (0..trials)
            .map(|_| {
                let shift = between * normal(rng);
                Trial {
                    ttft: (0..15)
                        .map(|_| median * (shift + 0.5 * normal(rng)).exp())
                        .collect(),
                    window: 240.0,
                }
            })
            .collect()
    }

    fn ratio(a: &[Trial], b: &[Trial], rng: &mut StdRng) -> Interval {
        let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
        bootstrap(a.len(), 200, rng, |draw, rng| {
            draw.pool(a, rng, &mut of_a);
            draw.pool(b, rng, &mut of_b);
            quantile_of(&mut of_a, 0.5) / quantile_of(&mut of_b, 0.5)
        })
    }

    /// The share of 150 experiments whose interval holds the true ratio of medians; with every request a trial of its
    /// own if `flat`.
    fn coverage(trials: usize, between: f64, flat: bool) -> f64 {
        let mut rng = StdRng::seed_from_u64(11);
        let flatten = |arm: Vec<Trial>| {
            if !flat {
                return arm;
            }
            let all = super::super::pooled(&arm);
            let single = |t| Trial {
                ttft: vec![t],
                window: 8.0,
            };
            all.into_iter().map(single).collect()
        };
        let held = (0..150)
            .filter(|_| {
                let a = flatten(arm(0.5, between, trials, &mut rng));
                let b = flatten(arm(1.0, between, trials, &mut rng));
                let i = ratio(&a, &b, &mut rng);
                (i.low..=i.high).contains(&0.5)
            })
            .count();
        held as f64 / 150.0
    }

    #[test]
    fn intervals_hold_what_they_say() {
        for (trials, between) in [(3, 0.1), (10, 0.3)] {
            let share = coverage(trials, between, false);
            assert!(
                (0.88..=1.0).contains(&share),
                "{trials} trials, {between} between them: {share}"
            );
        }
        // Requests of a trial are not independent: who takes them for it is wrong far too often.
        let flat = coverage(10, 0.5, true);
        assert!(flat < 0.8, "{flat}");
    }

    #[test]
    fn the_figure_is_that_of_the_data_and_seeds_repeat() {
        let mut rng = StdRng::seed_from_u64(3);
        let (a, b) = (arm(0.5, 0.1, 3, &mut rng), arm(1.0, 0.1, 3, &mut rng));
        let of = |seed| ratio(&a, &b, &mut StdRng::seed_from_u64(seed));
        assert_eq!(of(1), of(1));
        let (mut x, mut y) = (super::super::pooled(&a), super::super::pooled(&b));
        let expected = quantile_of(&mut x, 0.5) / quantile_of(&mut y, 0.5);
        assert_eq!(of(1).value, expected);
        assert!(of(1).low < expected && expected < of(1).high);
    }

    #[test]
    fn windows_add_up_as_drawn() {
        let trial = |window| Trial {
            ttft: vec![1.0],
            window,
        };
        let arm = [trial(180.0), trial(180.0)];
        let mut rng = StdRng::seed_from_u64(1);
        let seconds = bootstrap(2, 10, &mut rng, |draw, _| draw.seconds(&arm));
        assert_eq!((seconds.value, seconds.low), (360.0, 360.0));
    }
}
