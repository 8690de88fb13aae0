//! What was sent lately: bridges the time until an engine's events tell of it.
//!
//! A hint never counts as load. It lives while its ticket does and 2 s longer, and ends at once if the ticket ended
//! before its first token. A hint whose ticket still waits for its first token speaks of a prefix that is being
//! computed: whoever queues behind it finds it when admitted.

use crate::chain::{ATOM_BYTES, ATOM_TOKENS, Chain, ChainKind};
use smallvec::SmallVec;
use std::{collections::VecDeque, time::Duration};
use tokio::time::Instant;

/// How long a hint outlives its ticket.
const LINGER: Duration = Duration::from_secs(2);

/// Hints kept per endpoint; the oldest goes first.
const MAX_HINTS: usize = 1024;

/// The recent dispatches to one endpoint.
#[derive(Debug, Default)]
pub(crate) struct Hints {
    list: VecDeque<Hint>,
}

#[derive(Debug)]
struct Hint {
    ticket: u64,
    chain: Chain,
    /// None while the ticket lives.
    until: Option<Instant>,
    /// Past its first token.
    computed: bool,
    /// Something else knows of it: it is no hint any more and only tells what is in use.
    known: bool,
}

// === impl Hints ===

impl Hints {
    pub(crate) fn push(&mut self, ticket: u64, chain: &Chain) {
        if chain.keys().is_empty() {
            return;
        }
        if self.list.len() >= MAX_HINTS {
            self.list.pop_front();
        }
        self.list.push_back(Hint {
            ticket,
            chain: chain.clone(),
            until: None,
            computed: false,
            known: false,
        });
    }

    /// The ticket had its first token: the prompt is computed.
    pub(crate) fn computed(&mut self, ticket: u64) {
        if let Some(h) = self.list.iter_mut().find(|h| h.ticket == ticket) {
            h.computed = true;
        }
    }

    /// Something else knows of the ticket's prompt now.
    pub(crate) fn forget(&mut self, ticket: u64) {
        if let Some(h) = self.list.iter_mut().find(|h| h.ticket == ticket) {
            h.known = true;
        }
    }

    pub(crate) fn end(&mut self, ticket: u64, now: Instant) {
        self.list.retain_mut(|h| {
            if h.ticket == ticket {
                h.until = Some(now + LINGER);
                h.computed && !h.known
            } else {
                h.until.is_none_or(|until| until > now)
            }
        });
    }

    /// The engine's cache was emptied: only what is being computed will be there.
    pub(crate) fn clear(&mut self) {
        self.list.retain_mut(|h| {
            h.known = false;
            !h.computed && h.until.is_none()
        });
    }

    /// Leading tokens that a chain has in common with a recent dispatch.
    pub(crate) fn depth(&self, chain: &Chain, tokens: u32, bytes: u32, now: Instant) -> u32 {
        self.common(chain, tokens, bytes, |h| {
            !h.known && h.until.is_none_or(|until| until > now)
        })
    }

    /// Leading tokens that a chain has in common with a request that is still there.
    pub(crate) fn live(&self, chain: &Chain, tokens: u32, bytes: u32) -> u32 {
        self.common(chain, tokens, bytes, |h| h.until.is_none())
    }

    fn common(&self, chain: &Chain, tokens: u32, bytes: u32, with: impl Fn(&Hint) -> bool) -> u32 {
        let atoms = self
            .list
            .iter()
            .filter(|h| with(h))
            .map(|h| h.chain.common_atoms(chain))
            .max()
            .unwrap_or(0) as u64;
        let tokens = u64::from(tokens);
        let depth = match chain.kind() {
            ChainKind::Tokens => atoms * ATOM_TOKENS as u64,
            ChainKind::Bytes => atoms * ATOM_BYTES as u64 * tokens / u64::from(bytes.max(1)),
        };
        depth.min(tokens) as u32
    }

    /// Tickets that wait for their first token with nearly all of these leading atoms of a chain.
    pub(crate) fn alike(&self, chain: &Chain, atoms: usize) -> SmallVec<[u64; 16]> {
        self.list
            .iter()
            .filter(|h| h.until.is_none() && !h.computed)
            .filter(|h| h.chain.common_atoms(chain) * 10 >= atoms * 9)
            .map(|h| h.ticket)
            .collect()
    }

    /// Asks of every hint how many of its leading tokens are announced by now. Those that are wholly announced are
    /// hints no more; `progress` is called with the ticket and the tokens of the others and of these.
    pub(crate) fn announced(
        &mut self,
        block_size: u32,
        depth: impl Fn(&Chain) -> u32,
        mut progress: impl FnMut(u64, u32),
    ) {
        self.list.retain_mut(|h| {
            if h.chain.kind() != ChainKind::Tokens || h.known {
                return true;
            }
            let announced = depth(&h.chain);
            progress(h.ticket, announced);
            let known = (h.chain.keys().len() * ATOM_TOKENS) as u32;
            let whole = known / block_size.max(1) * block_size.max(1);
            h.known = announced >= whole.max(1);
            !h.known || h.until.is_none()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::KeySpace;

    #[tokio::test(start_paused = true)]
    async fn what_is_announced_is_no_hint_but_still_in_use() {
        let keys = KeySpace::new(1);
        let root = keys.root(ChainKind::Tokens, "m", None, None);
        let chain = keys.tokens(root, &(0..320).collect::<Vec<u32>>());
        let now = Instant::now();
        let mut hints = Hints::default();
        hints.push(1, &chain);
        let depth = |hints: &Hints| hints.depth(&chain, 320, 1280, now);
        let live = |hints: &Hints| hints.live(&chain, 320, 1280);
        assert_eq!((depth(&hints), live(&hints)), (320, 320));
        assert_eq!(hints.alike(&chain, 20)[..], [1]);
        hints.announced(16, |_| 320, |_, _| {});
        assert_eq!((depth(&hints), live(&hints)), (0, 320));
        hints.computed(1);
        assert!(hints.alike(&chain, 20).is_empty());
        hints.end(1, now);
        assert_eq!((depth(&hints), live(&hints)), (0, 0));
        assert!(hints.list.is_empty());
    }
}
