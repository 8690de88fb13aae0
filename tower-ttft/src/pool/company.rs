//! Other proxies in front of the same engines, where engines do not announce what they hold.
//!
//! Each proxy then guesses from its own requests alone, and several of them would spread the same prefixes over all endpoints.
//! So a prompt has a meeting place: the endpoint with the greatest hash of the prompt's first keys and the endpoint's name
//! (rendezvous hashing, Thaler and Ravishankar 1998), the same for all proxies of an installation. What is found there beyond
//! our own guess is others' doing; how much that is, answers tell.

use crate::{chain::Chain, endpoint::EndpointId};
use twox_hash::XxHash3_64;

/// The share of requests that must be others' for a meeting place to be worth it.
const SEEN: f64 = 0.2;

/// The atom whose key stands for a prompt: deep enough to tell prompts apart, and the same in all turns of a conversation.
const DEPTH: usize = 31;

/// Whether others are there, and what they leave behind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Company {
    /// The share of requests in flight that are not ours.
    others: f64,
    /// The share of a prompt that is found at its meeting place where we know of nothing.
    found: f64,
}

// === impl Company ===

impl Company {
    /// So many requests are in flight, ours and others'.
    pub(crate) fn see(&mut self, ours: f64, others: f64) {
        let all = ours + others;
        if all > 0.0 {
            self.others += 0.05 * (others / all - self.others);
        }
    }

    /// The share of a prompt that is to be expected at its meeting place; none if nobody else is there.
    pub(crate) fn expects(&self) -> Option<f64> {
        (self.others > SEEN).then_some(self.found)
    }

    /// Such a share was found at a meeting place.
    pub(crate) fn found(&mut self, share: f64) {
        if share.is_finite() {
            self.found += 0.05 * (share.clamp(0.0, 1.0) - self.found);
        }
    }
}

impl Default for Company {
    fn default() -> Self {
        Self {
            others: 0.0,
            found: 0.5,
        }
    }
}

/// The meeting place of a prompt among endpoints; none if nothing is known of the prompt.
pub(crate) fn meeting<'a>(
    chain: &Chain,
    endpoints: impl Iterator<Item = &'a EndpointId>,
) -> Option<usize> {
    let keys = chain.keys();
    let key = *keys.get(DEPTH.min(keys.len().checked_sub(1)?))?;
    let weight = |id: &EndpointId| {
        let seed = key ^ u64::from(id.rank.unwrap_or(0));
        XxHash3_64::oneshot_with_seed(seed, id.address.as_str().as_bytes())
    };
    let (place, _) = endpoints.enumerate().max_by_key(|(_, id)| weight(id))?;
    Some(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::{ChainKind, KeySpace};

    fn chain(first: u32, tokens: u32) -> Chain {
        let keys = KeySpace::new(1);
        let root = keys.root(ChainKind::Tokens, "m", None, None);
        let ids: Vec<u32> = (0..tokens).map(|t| first * 100_000 + t).collect();
        keys.tokens(root, &ids)
    }

    fn ids(n: usize) -> Vec<EndpointId> {
        (0..n)
            .map(|i| EndpointId::new(format!("10.0.0.{i}:8000")))
            .collect()
    }

    #[test]
    fn turns_of_a_conversation_meet_and_others_spread() {
        let ids = ids(4);
        let mut places = [0; 4];
        for conversation in 0..200 {
            let of = |tokens| meeting(&chain(conversation, tokens), ids.iter());
            let place = of(2_000).expect("it has keys");
            assert_eq!(of(4_000), Some(place));
            places[place] += 1;
        }
        assert!(places.iter().all(|n| *n > 25), "{places:?}");
        assert_eq!(meeting(&chain(0, 10), ids.iter()), None);
    }

    #[test]
    fn one_that_leaves_moves_only_its_own() {
        let (four, three) = (ids(4), ids(3));
        for conversation in 0..50 {
            let c = chain(conversation, 2_000);
            let before = meeting(&c, four.iter());
            if before != Some(3) {
                assert_eq!(meeting(&c, three.iter()), before);
            }
        }
    }

    #[test]
    fn company_must_be_seen_and_what_it_leaves_is_learned() {
        let mut c = Company::default();
        assert_eq!(c.expects(), None);
        c.see(1.0, 1.0);
        assert_eq!(c.expects(), None, "once is chance");
        for _ in 0..50 {
            c.see(1.0, 3.0);
            c.found(0.9);
        }
        assert!(c.expects().is_some_and(|share| share > 0.8));
        for _ in 0..50 {
            c.see(3.0, 0.0);
        }
        assert_eq!(c.expects(), None);
    }
}
