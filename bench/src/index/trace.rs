//! A trace of what engines announce and clients ask: multi-turn chats over engines that evict as vLLM does.
//!
//! Every engine has a pool of blocks: least recently used goes first, and of one request's blocks the last goes first,
//! because they are freed from the tail. Conversations start with one of some system prompts, grow turn by turn, and
//! mostly return to the same engine.
use std::collections::{BTreeMap, HashMap};

/// The shape of a trace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Engines.
    pub(super) engines: usize,
    /// Blocks of 16 tokens in each.
    pub(super) blocks: usize,
    /// Requests.
    pub(super) requests: usize,
    /// System prompts, 64 to 255 blocks each.
    pub(super) systems: usize,
    /// The share of turns that go to a random engine instead of the conversation's.
    pub(super) stray: f64,
}

/// One step of a trace; ranges point into its arrays.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// A client asks: `contents[from..to]` is the prompt.
    Ask {
        /// First content.
        from: usize,
        /// Behind the last.
        to: usize,
    },
    /// An engine stored `stored[from..to]` behind `parent`.
    Store {
        /// Which engine.
        engine: usize,
        /// The id of the block before.
        parent: Option<u64>,
        /// First block.
        from: usize,
        /// Behind the last.
        to: usize,
    },
    /// An engine evicted `evicted[from..to]`.
    Evict {
        /// Which engine.
        engine: usize,
        /// First id.
        from: usize,
        /// Behind the last.
        to: usize,
    },
}

/// A trace.
#[derive(Debug, Default)]
pub(super) struct Trace {
    /// In order.
    pub(super) steps: Vec<Step>,
    /// The first step after every engine's pool has filled up.
    pub(super) steady: usize,
    /// What is in the blocks of prompts: the seed of their tokens.
    pub(super) contents: Vec<u64>,
    /// Id and content of stored blocks.
    pub(super) stored: Vec<(u64, u64)>,
    /// Ids of evicted blocks.
    pub(super) evicted: Vec<u64>,
}

/// A small random number generator (SplitMix64).
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

struct Pool {
    room: usize,
    last_use: HashMap<u64, u64>,
    oldest: BTreeMap<u64, u64>,
    now: u64,
}

struct Conversation {
    contents: Vec<u64>,
    home: usize,
}

/// Longest conversation, in blocks.
const LONGEST: usize = 1_100;
/// Blocks in a prefill step of 8,192 tokens.
const STEP: usize = 512;

// === impl Dice ===

impl Dice {
    /// A generator.
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub(super) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// A number below 1.
    pub(super) fn share(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// The 16 tokens that a block's content stands for.
pub(super) fn tokens(content: u64) -> [u32; 16] {
    std::array::from_fn(|i| (mix(content.wrapping_add(i as u64)) % 150_000) as u32)
}

// === impl Trace ===

impl Trace {
    /// Plays a shape.
    pub(super) fn generate(shape: Shape, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let mut trace = Self::default();
        let systems: Vec<Vec<u64>> = (0..shape.systems)
            .map(|_| (0..64 + dice.below(192)).map(|_| dice.bits()).collect())
            .collect();
        let open = |dice: &mut Dice| Conversation {
            // Squared: some system prompts are much more popular than others.
            contents: systems[(dice.share().powi(2) * shape.systems as f64) as usize].clone(),
            home: dice.below(shape.engines),
        };
        let live = (shape.engines * shape.blocks / 400).max(1);
        let mut chats: Vec<Conversation> = (0..live).map(|_| open(&mut dice)).collect();
        let mut pools: Vec<Pool> = (0..shape.engines)
            .map(|_| Pool::new(shape.blocks))
            .collect();
        let mut full = vec![false; shape.engines];
        for _ in 0..shape.requests {
            let chat = &mut chats[(dice.share().powi(2) * live as f64) as usize];
            if chat.contents.len() > LONGEST || dice.share() < 0.01 {
                *chat = open(&mut dice);
            }
            let turn = 10 + dice.below(90);
            chat.contents.extend((0..turn).map(|_| dice.bits()));
            let engine = if dice.share() < shape.stray {
                dice.below(shape.engines)
            } else {
                chat.home
            };
            let from = trace.contents.len();
            trace.contents.extend(&chat.contents);
            let to = trace.contents.len();
            trace.steps.push(Step::Ask { from, to });
            let prompt = chat.contents.len();
            let answer = 5 + dice.below(30);
            chat.contents.extend((0..answer).map(|_| dice.bits()));
            full[engine] |= trace.serve(&mut pools[engine], engine, &chat.contents, prompt);
            if trace.steady == 0 && full.iter().all(|f| *f) {
                trace.steady = trace.steps.len();
            }
        }
        if trace.steady == 0 {
            trace.steady = trace.steps.len() * 3 / 4;
        }
        trace
    }

    /// One request at an engine; tells whether something had to go.
    fn serve(&mut self, pool: &mut Pool, engine: usize, contents: &[u64], prompt: usize) -> bool {
        let mut id = 0u64;
        let chain = contents.iter().map(|c| {
            id = mix(id.rotate_left(5) ^ c);
            id
        });
        let ids: Vec<u64> = chain.collect();
        let hit = ids
            .iter()
            .take_while(|i| pool.last_use.contains_key(i))
            .count();
        let (base, n) = (pool.now, ids.len());
        pool.now += n as u64 + 1;
        // The tail is freed first, so it is the older.
        let stamp = |i: usize| base + (n - i) as u64;
        for (i, id) in ids[..hit].iter().enumerate() {
            pool.touch(*id, stamp(i));
        }
        let from = self.evicted.len();
        while pool.last_use.len() + n - hit > pool.room {
            match pool.evict() {
                Some(id) => self.evicted.push(id),
                None => break,
            }
        }
        let to = self.evicted.len();
        if from < to {
            self.steps.push(Step::Evict { engine, from, to });
        }
        for (i, id) in ids.iter().enumerate().skip(hit) {
            pool.touch(*id, stamp(i));
        }
        let mut i = hit;
        while i < n {
            // The prompt comes in steps, the answer block by block.
            let end = if i < prompt {
                prompt.min(i + STEP)
            } else {
                i + 1
            };
            let from = self.stored.len();
            self.stored.extend((i..end).map(|j| (ids[j], contents[j])));
            self.steps.push(Step::Store {
                engine,
                parent: i.checked_sub(1).map(|p| ids[p]),
                from,
                to: self.stored.len(),
            });
            i = end;
        }
        from < to
    }
}

// === impl Pool ===

impl Pool {
    fn new(room: usize) -> Self {
        Self {
            room,
            last_use: HashMap::new(),
            oldest: BTreeMap::new(),
            now: 0,
        }
    }

    fn touch(&mut self, id: u64, stamp: u64) {
        if let Some(old) = self.last_use.insert(id, stamp) {
            self.oldest.remove(&old);
        }
        self.oldest.insert(stamp, id);
    }

    fn evict(&mut self) -> Option<u64> {
        let (_, id) = self.oldest.pop_first()?;
        self.last_use.remove(&id);
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn engines_evict_what_they_stored_and_never_hold_too_much() {
        let shape = Shape {
            engines: 3,
            blocks: 2_000,
            requests: 400,
            systems: 4,
            stray: 0.2,
        };
        let trace = Trace::generate(shape, 1);
        let mut held = vec![HashSet::new(); 3];
        let mut evictions = 0;
        for step in &trace.steps {
            match *step {
                Step::Ask { from, to } => assert!(from < to && to - from <= LONGEST + 200),
                Step::Store {
                    engine,
                    parent,
                    from,
                    to,
                } => {
                    assert!(parent.is_none_or(|p| held[engine].contains(&p)));
                    for (id, _) in &trace.stored[from..to] {
                        assert!(held[engine].insert(*id));
                    }
                }
                Step::Evict { engine, from, to } => {
                    evictions += to - from;
                    for id in &trace.evicted[from..to] {
                        assert!(held[engine].remove(id));
                    }
                }
            }
            assert!(held.iter().all(|h| h.len() <= 2_000));
        }
        assert!(evictions > 1_000);
    }
}
