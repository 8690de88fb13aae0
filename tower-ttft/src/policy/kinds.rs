use super::{PolicySpec, Routing};
use rand::{RngExt, rngs::StdRng};
use smallvec::SmallVec;
use std::cmp::Ordering;

/// Up to this many endpoints, all are scored; above it a sample.
const SCORE_ALL: usize = 64;

/// Endpoints in a sample that hold the most of the prompt.
const HOLDERS: usize = 4;

/// Seconds that no one notices and no one outside an engine can tell apart: less than half a scheduler step of most.
/// Without it, whichever of some idle and quick endpoints looks a few milliseconds better would get every cold prompt.
const NOISE: f64 = 0.01;

/// One endpoint as a policy sees it, for one request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Contender {
    /// Predicted TTFT, seconds.
    pub ttft: f64,
    /// Predicted prefill time of this request alone, seconds.
    pub own: f64,
    /// Prompt tokens.
    pub tokens: u32,
    /// Of these, tokens that it would compute.
    pub uncached: u32,
    /// Requests in flight: ours, and others' as far as reported.
    pub in_flight: f64,
    /// Prefill work ahead, tokens or seconds of the same unit at all contenders.
    pub ahead: f64,
    /// Share of the cache that is filled, 0 to 1, or tokens where the capacity is not known.
    pub resident: f64,
    /// When it was last chosen, as a count of choices.
    pub last: u64,
    /// Multiplies the score: above 1 for recent failures, below 1 for a newcomer that should be tried.
    pub bias: f64,
    /// The predictor's own relative error for this prediction.
    pub error: f64,
    /// Seconds that requests with this prefix have waited at its holders lately; 0 at a holder. Where λ prices work, a
    /// copy is paid for with it.
    pub rent: f64,
    /// Among equals, others go first for now: a newcomer that has had its share.
    pub yields: bool,
}

/// Which contenders to score.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sample {
    /// All.
    All,
    /// These, by index.
    Some(SmallVec<[usize; 8]>),
}

/// What makes one endpoint better than another for a request. The smallest score wins; near-ties go to who holds more of
/// the prompt (where residency counts at all), then to the emptiest cache, then to the least recently chosen, then at
/// random.
pub trait Policy: Send + Sync + std::fmt::Debug {
    /// Which of the endpoints to score, given the tokens of the prompt that each holds.
    fn sample(&self, cached: &[u32], _rng: &mut StdRng) -> Sample {
        let _ = cached;
        Sample::All
    }

    /// The score, before `bias`.
    fn score(&self, c: &Contender) -> f64;

    /// Scores that are worse than the best by no more than this, in the score's unit, are near-ties.
    fn band(&self, best: &Contender, score: f64) -> f64;

    /// Whether near-ties go first to those that hold more of the prompt.
    fn affine(&self) -> bool {
        false
    }

    /// Whether near-ties are broken at random alone.
    fn random(&self) -> bool {
        false
    }
}

/// Predicted TTFT plus λ × own prefill (λ = 0: predicted TTFT alone).
#[derive(Clone, Copy, Debug)]
struct Priced {
    lambda: f64,
    always_sample: bool,
}

#[derive(Clone, Copy, Debug)]
struct LMetric;

#[derive(Clone, Copy, Debug)]
struct LeastLoad;

#[derive(Clone, Copy, Debug)]
struct Random;

#[derive(Clone, Copy, Debug)]
struct LeastWork;

#[derive(Clone, Copy, Debug)]
struct FewerOfTwo;

/// The policy of a specification.
pub fn policy(spec: &PolicySpec) -> Box<dyn Policy> {
    match spec.routing {
        Routing::PricedTtft => Box::new(Priced {
            lambda: spec.lambda,
            always_sample: false,
        }),
        Routing::Ttft => Box::new(Priced {
            lambda: 0.0,
            always_sample: false,
        }),
        Routing::P2c => Box::new(Priced {
            lambda: 0.0,
            always_sample: true,
        }),
        Routing::LMetric => Box::new(LMetric),
        Routing::LeastLoad => Box::new(LeastLoad),
        Routing::Random => Box::new(Random),
    }
}

/// What is left when predictions are not to be trusted: the least work until the first token, then the fewest requests.
pub(crate) const LEAST_WORK: &dyn Policy = &LeastWork;

/// What is left when nothing is known of a prompt: the fewer requests of two.
pub(crate) const FEWER_OF_TWO: &dyn Policy = &FewerOfTwo;

/// Scores the contenders and chooses among them; fills `scores` (infinite where not finite). None if there are none.
pub fn choose(
    policy: &dyn Policy,
    contenders: &[Contender],
    scores: &mut Vec<f64>,
    rng: &mut StdRng,
) -> Option<usize> {
    scores.clear();
    scores.extend(contenders.iter().map(|c| {
        let score = policy.score(c) * c.bias;
        // Nothing that is not a number may win, or upset the order.
        if score.is_finite() {
            score
        } else {
            f64::INFINITY
        }
    }));
    let (best, best_score) = scores
        .iter()
        .copied()
        .enumerate()
        .min_by(|a, b| a.1.total_cmp(&b.1))?;
    if best_score.is_infinite() {
        return Some(rng.random_range(0..contenders.len()));
    }
    let limit = best_score + policy.band(contenders.get(best)?, best_score);
    let mut ties: SmallVec<[usize; 8]> = (0..contenders.len())
        .filter(|i| scores.get(*i).is_some_and(|s| *s <= limit))
        .collect();
    if ties.len() > 1 && policy.affine() {
        // A block or so more or less is no difference.
        let most = ties
            .iter()
            .filter_map(|i| contenders.get(*i))
            .map(|c| c.uncached.saturating_add(c.tokens / 64))
            .min()?;
        ties.retain(|i| contenders.get(*i).is_some_and(|c| c.uncached <= most));
    }
    if ties.len() > 1 && !policy.random() {
        if ties
            .iter()
            .any(|i| contenders.get(*i).is_some_and(|c| !c.yields))
        {
            ties.retain(|i| contenders.get(*i).is_some_and(|c| !c.yields));
        }
        let least = ties
            .iter()
            .filter_map(|i| contenders.get(*i))
            .min_by(|a, b| order(a, b))
            .copied()?;
        ties.retain(|i| {
            contenders
                .get(*i)
                .is_some_and(|c| order(c, &least) == Ordering::Equal)
        });
    }
    let nth = rng.random_range(0..ties.len().max(1));
    ties.get(nth).copied()
}

/// The order among near-ties.
fn order(a: &Contender, b: &Contender) -> Ordering {
    a.resident
        .total_cmp(&b.resident)
        .then_with(|| a.last.cmp(&b.last))
}

/// Two different ones of `n`, at random.
fn two(n: usize, rng: &mut StdRng) -> Sample {
    if n <= 2 {
        return Sample::All;
    }
    let a = rng.random_range(0..n);
    let b = (a + rng.random_range(1..n)) % n;
    Sample::Some(SmallVec::from_slice(&[a, b]))
}

/// Two random endpoints and those that hold the most: without the holders, two samples lose the cache.
fn two_and_holders(cached: &[u32], rng: &mut StdRng) -> Sample {
    let Sample::Some(mut picked) = two(cached.len(), rng) else {
        return Sample::All;
    };
    let mut holders: SmallVec<[(u32, usize); HOLDERS]> = SmallVec::new();
    for (i, c) in cached.iter().enumerate().filter(|(_, c)| **c > 0) {
        if holders.len() < HOLDERS {
            holders.push((*c, i));
        } else if let Some(least) = holders.iter_mut().min()
            && *c > least.0
        {
            *least = (*c, i);
        }
    }
    for (_, i) in holders {
        if !picked.contains(&i) {
            picked.push(i);
        }
    }
    Sample::Some(picked)
}

// === impl Priced ===

impl Policy for Priced {
    fn sample(&self, cached: &[u32], rng: &mut StdRng) -> Sample {
        if self.always_sample || cached.len() > SCORE_ALL {
            two_and_holders(cached, rng)
        } else {
            Sample::All
        }
    }

    fn score(&self, c: &Contender) -> f64 {
        if self.lambda > 0.0 {
            let score = c.ttft + self.lambda * c.own - c.rent;
            // Not `max`, which would make a number of what is none.
            if score < 0.0 { 0.0 } else { score }
        } else {
            c.ttft
        }
    }

    fn band(&self, best: &Contender, score: f64) -> f64 {
        // A difference inside the predictor's own error says nothing, and within a tenth the choice costs little.
        (best.error.clamp(0.1, 0.15) * score).max(NOISE)
    }

    fn affine(&self) -> bool {
        true
    }
}

// === impl LMetric ===

impl Policy for LMetric {
    /// After LMetric (arXiv 2603.15202): new prefill tokens × batch size.
    fn score(&self, c: &Contender) -> f64 {
        f64::from(c.uncached.max(1)) * (1.0 + c.in_flight)
    }

    fn band(&self, _: &Contender, score: f64) -> f64 {
        0.02 * score
    }
}

// === impl LeastLoad ===

impl Policy for LeastLoad {
    fn score(&self, c: &Contender) -> f64 {
        // One more, so that a bias also counts at an idle endpoint.
        1.0 + c.in_flight
    }

    fn band(&self, _: &Contender, _: f64) -> f64 {
        0.0
    }
}

// === impl LeastWork ===

impl Policy for LeastWork {
    fn score(&self, c: &Contender) -> f64 {
        // What is to be computed until its first token, its own tokens too: that predictions are not to be trusted says
        // nothing against what is known of caches. A request costs something even where no prefill is ahead: 64 tokens'
        // worth.
        (1.0 + c.ahead + f64::from(c.uncached)) / 64.0 + c.in_flight
    }

    fn band(&self, _: &Contender, score: f64) -> f64 {
        0.02 * score
    }
}

// === impl FewerOfTwo ===

impl Policy for FewerOfTwo {
    fn sample(&self, cached: &[u32], rng: &mut StdRng) -> Sample {
        two(cached.len(), rng)
    }

    fn score(&self, c: &Contender) -> f64 {
        1.0 + c.in_flight
    }

    fn band(&self, _: &Contender, _: f64) -> f64 {
        0.0
    }
}

// === impl Random ===

impl Policy for Random {
    fn score(&self, _: &Contender) -> f64 {
        1.0
    }

    fn band(&self, _: &Contender, _: f64) -> f64 {
        0.0
    }

    fn random(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn rng() -> StdRng {
        StdRng::seed_from_u64(7)
    }

    fn contender(ttft: f64, own: f64) -> Contender {
        Contender {
            ttft,
            own,
            bias: 1.0,
            ..Default::default()
        }
    }

    fn kind(routing: Routing) -> Box<dyn Policy> {
        policy(&PolicySpec {
            routing,
            ..Default::default()
        })
    }

    fn chosen(routing: Routing, cs: &[Contender]) -> Option<usize> {
        choose(&*kind(routing), cs, &mut Vec::new(), &mut rng())
    }

    #[test]
    fn lambda_prices_the_work() {
        // The holder answers a little later but burns nothing.
        let cs = [contender(1.2, 0.1), contender(1.0, 1.0)];
        assert_eq!(chosen(Routing::PricedTtft, &cs), Some(0));
        assert_eq!(chosen(Routing::Ttft, &cs), Some(1));
    }

    #[test]
    fn near_ties_go_to_the_emptiest_then_the_least_recent() {
        let mut cs = [
            contender(1.0, 0.0),
            contender(1.01, 0.0),
            contender(1.5, 0.0),
        ];
        cs[0].resident = 0.5;
        cs[2].resident = 0.0;
        assert_eq!(chosen(Routing::PricedTtft, &cs), Some(1));
        cs[1].resident = 0.5;
        (cs[0].last, cs[1].last) = (3, 2);
        assert_eq!(chosen(Routing::PricedTtft, &cs), Some(1));
        cs[1].yields = true;
        assert_eq!(chosen(Routing::PricedTtft, &cs), Some(0));
    }

    #[test]
    fn near_ties_stay_where_more_is_held() {
        let mut cs = [contender(0.40, 0.0), contender(0.42, 0.0)];
        (cs[0].tokens, cs[0].uncached, cs[1].tokens) = (2000, 200, 2000);
        cs[1].uncached = 100;
        (cs[0].last, cs[1].last) = (1, 2);
        assert_eq!(chosen(Routing::PricedTtft, &cs), Some(1));
        // A block is no difference: the least recent.
        cs[1].uncached = 184;
        assert_eq!(chosen(Routing::PricedTtft, &cs), Some(0));
        // Who only counts requests does not look.
        cs[1].uncached = 0;
        assert_eq!(chosen(Routing::LeastLoad, &cs), Some(0));
    }

    #[test]
    fn nothing_but_numbers_wins() {
        let cs = [
            contender(f64::NAN, 0.0),
            contender(9.0, 0.0),
            contender(f64::INFINITY, 1.0),
        ];
        assert_eq!(chosen(Routing::PricedTtft, &cs), Some(1));
        let all = [contender(f64::NAN, 0.0); 3];
        assert!(chosen(Routing::PricedTtft, &all).is_some_and(|i| i < 3));
        assert_eq!(chosen(Routing::PricedTtft, &[]), None);
    }

    #[test]
    fn a_sample_has_two_and_the_longest_holders() {
        let mut cached = vec![0u32; 100];
        (cached[40], cached[41], cached[42], cached[43], cached[44]) = (10, 50, 40, 30, 20);
        for seed in 0..50 {
            let mut rng = StdRng::seed_from_u64(seed);
            let Sample::Some(s) = kind(Routing::PricedTtft).sample(&cached, &mut rng) else {
                panic!("a pool above the limit is sampled");
            };
            assert!((41..=44).all(|i| s.contains(&i)), "{s:?}");
            let mut unique = s.to_vec();
            unique.sort_unstable();
            unique.dedup();
            assert_eq!(unique.len(), s.len());
            assert!(s.len() <= 2 + HOLDERS);
        }
        assert_eq!(
            kind(Routing::PricedTtft).sample(&cached[..64], &mut rng()),
            Sample::All
        );
    }

    #[test]
    fn random_is_even() {
        let cs = [contender(1.0, 0.0), contender(100.0, 9.0)];
        let p = kind(Routing::Random);
        let mut rng = rng();
        let ones = (0..1000)
            .filter(|_| choose(&*p, &cs, &mut Vec::new(), &mut rng) == Some(1))
            .count();
        assert!((400..600).contains(&ones), "{ones}");
    }

    #[test]
    fn lmetric_and_least_load_count_what_they_name() {
        let mut cs = [contender(0.0, 0.0), contender(0.0, 0.0)];
        (cs[0].uncached, cs[0].in_flight) = (100, 8.0);
        (cs[1].uncached, cs[1].in_flight) = (800, 1.0);
        assert_eq!(chosen(Routing::LMetric, &cs), Some(0));
        assert_eq!(chosen(Routing::LeastLoad, &cs), Some(1));
    }
}
