//! The statistics of the published run.
//!
//! A request that got no first token, or whose answer broke off, counts with an infinite TTFT. Quantiles are taken over
//! the requests of all trials together, each with the same weight.

/// The share of requests that must keep a service level objective for it to be met.
pub const MET: f64 = 0.9;

/// What one trial measured in its window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trial {
    /// TTFT of each measured request in the order of sending, seconds; infinite where none came.
    pub ttft: Vec<f64>,
    /// The window's length, seconds.
    pub window: f64,
}

/// A quantile of sorted numbers by linear interpolation; not a number if there are none.
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = sorted.len().saturating_sub(1) as f64 * q.clamp(0.0, 1.0);
    let (below, share) = (at.floor(), at.fract());
    let low = sorted.get(below as usize).copied().unwrap_or(f64::NAN);
    match sorted.get(below as usize + 1) {
        // Infinity times nothing, or less infinity, is not a number.
        Some(high) if share > 0.0 && *high > low => low + (high - low) * share,
        _ => low,
    }
}

/// A quantile of numbers in any order, which are sorted.
pub fn quantile_of(values: &mut [f64], q: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    quantile(values, q)
}

/// The mean; not a number if there are none.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The share of TTFTs that keep an objective; not a number if there are none.
pub fn attainment(ttft: &[f64], slo: f64) -> f64 {
    kept(ttft, slo) / ttft.len() as f64
}

/// Requests per minute that kept an objective, over so many seconds of windows.
pub fn goodput(ttft: &[f64], slo: f64, seconds: f64) -> f64 {
    kept(ttft, slo) / seconds * 60.0
}

fn kept(ttft: &[f64], slo: f64) -> f64 {
    ttft.iter().filter(|t| **t <= slo).count() as f64
}

/// All values of all trials.
pub fn pooled(trials: &[Trial]) -> Vec<f64> {
    trials.iter().flat_map(|t| t.ttft.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.5), 2.0);
        assert_eq!(quantile(&[1.0, 2.0, 4.0, 8.0], 0.5), 3.0);
        assert!((quantile(&[0.0, 10.0], 0.95) - 9.5).abs() < 1e-12);
        assert!(quantile(&[], 0.5).is_nan());
        assert_eq!(quantile(&[1.0, f64::INFINITY], 0.0), 1.0);
        assert_eq!(quantile(&[1.0, f64::INFINITY], 0.5), f64::INFINITY);
        assert_eq!(quantile(&[f64::INFINITY; 2], 0.5), f64::INFINITY);
        assert_eq!(quantile_of(&mut [4.0, 1.0, 2.0], 1.0), 4.0);
    }

    #[test]
    fn what_never_came_is_no_goodput() {
        let ttft = [0.5, 7.9, 8.0, 8.1, f64::INFINITY];
        assert_eq!(attainment(&ttft, 8.0), 0.6);
        assert_eq!(goodput(&ttft, 8.0, 180.0), 1.0);
    }
}
