//! The figures of one arm under one workload, as the published run takes them. Times are pod seconds.

use super::board::Sample;
use forebay_sim::{
    load::Windows,
    stats::{attainment, goodput, mean, quantile_of},
};
use serde::{Serialize, Serializer};

/// What an arm reached. What there is nothing to tell of is not a number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Figures {
    /// Requests that were sent in the window.
    pub(super) requests: usize,
    /// Half of the first tokens came by then, seconds. Infinite: they never came.
    #[serde(serialize_with = "finite")]
    pub(super) ttft_median: f64,
    /// 95 of 100 came by then.
    #[serde(serialize_with = "finite")]
    pub(super) ttft_p95: f64,
    /// Their mean.
    #[serde(serialize_with = "finite")]
    pub(super) ttft_mean: f64,
    /// Cached tokens among the prompt tokens of answers that ended well.
    #[serde(serialize_with = "finite")]
    pub(super) hit_share: f64,
    /// Requests a minute whose first token came within the objective.
    #[serde(serialize_with = "finite")]
    pub(super) goodput_per_minute: f64,
    /// Their share.
    #[serde(serialize_with = "finite")]
    pub(super) attainment: f64,
    /// Requests that failed.
    pub(super) errors: usize,
    /// Requests that had no first token when the run ended.
    pub(super) unanswered: usize,
}

/// How things stand while a run lasts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sofar {
    /// First tokens that came.
    pub(super) answered: usize,
    /// Requests sent.
    pub(super) sent: usize,
    /// The median of those that came.
    pub(super) median: f64,
    /// As in [`Figures`].
    pub(super) hit_share: f64,
}

// === impl Figures ===

impl Figures {
    /// Of the requests of one arm.
    pub(super) fn of(samples: &[Sample], windows: Windows, slo: f64) -> Self {
        let measured: Vec<&Sample> = samples.iter().filter(|s| windows.measures(s.at)).collect();
        let counted = |s: &&Sample| match (&s.failed, s.ttft) {
            (None, Some(ttft)) => ttft,
            _ => f64::INFINITY,
        };
        let mut ttft: Vec<f64> = measured.iter().map(counted).collect();
        let errors = measured.iter().filter(|s| s.failed.is_some()).count();
        let silent = |s: &&&Sample| s.failed.is_none() && s.ttft.is_none();
        Self {
            requests: measured.len(),
            ttft_median: quantile_of(&mut ttft, 0.5),
            ttft_p95: quantile_of(&mut ttft, 0.95),
            ttft_mean: mean(&ttft),
            hit_share: hit_share(measured.iter().copied()),
            goodput_per_minute: goodput(&ttft, slo, windows.measure),
            attainment: attainment(&ttft, slo),
            errors,
            unanswered: measured.iter().filter(silent).count(),
        }
    }
}

// === impl Sofar ===

impl Sofar {
    /// Of all requests of one arm.
    pub(super) fn of(samples: &[Sample]) -> Self {
        let mut ttft: Vec<f64> = samples.iter().filter_map(|s| s.ttft).collect();
        Self {
            answered: ttft.len(),
            sent: samples.len(),
            median: quantile_of(&mut ttft, 0.5),
            hit_share: hit_share(samples),
        }
    }
}

fn hit_share<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> f64 {
    let (mut cached, mut prompt) = (0.0, 0.0);
    for usage in samples.into_iter().filter_map(|s| s.usage) {
        cached += f64::from(usage.cached);
        prompt += f64::from(usage.prompt);
    }
    cached / prompt
}

/// JSON has neither infinity nor what is not a number: null.
pub(super) fn finite<S: Serializer>(x: &f64, s: S) -> Result<S::Ok, S::Error> {
    x.is_finite().then_some(*x).serialize(s)
}

#[cfg(test)]
mod tests {
    use super::{super::client::Usage, *};

    const WINDOWS: Windows = Windows {
        warmup: 10.0,
        measure: 60.0,
        cooldown: 10.0,
    };

    fn sample(at: f64, ttft: Option<f64>, cached: u32) -> Sample {
        let usage = ttft.map(|_| Usage {
            prompt: 100,
            cached,
        });
        Sample {
            at,
            ttft,
            usage,
            failed: None,
        }
    }

    fn samples() -> Vec<Sample> {
        let mut failed = sample(40.0, Some(0.1), 100);
        failed.failed = Some("broken".into());
        vec![
            sample(5.0, Some(99.0), 0),
            sample(10.0, Some(1.0), 80),
            sample(20.0, Some(3.0), 0),
            sample(30.0, Some(8.5), 40),
            failed,
            sample(50.0, None, 0),
            sample(70.0, Some(99.0), 0),
        ]
    }

    #[test]
    fn only_the_window_counts_and_what_failed_never_came() {
        let f = Figures::of(&samples(), WINDOWS, 8.0);
        assert_eq!((f.requests, f.errors, f.unanswered), (5, 1, 1));
        assert_eq!((f.ttft_median, f.ttft_p95), (8.5, f64::INFINITY));
        assert_eq!((f.goodput_per_minute, f.attainment), (2.0, 0.4));
        assert_eq!(f.hit_share, 220.0 / 400.0);
        let json = serde_json::to_value(f).unwrap();
        assert_eq!(
            (&json["ttftMedian"], json["ttftP95"].is_null()),
            (&8.5.into(), true)
        );
        assert_eq!(json["goodputPerMinute"], 2.0);
    }

    #[test]
    fn nothing_measured_is_not_a_number() {
        let f = Figures::of(&[], WINDOWS, 8.0);
        assert!(f.ttft_median.is_nan() && f.hit_share.is_nan() && f.ttft_mean.is_nan());
        assert_eq!((f.requests, f.goodput_per_minute), (0, 0.0));
    }

    #[test]
    fn so_far_takes_all_that_came() {
        let s = Sofar::of(&samples());
        assert_eq!((s.sent, s.answered), (7, 6));
        assert_eq!(s.median, 5.75);
    }
}
