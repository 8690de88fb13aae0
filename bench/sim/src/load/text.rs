//! Prompts as token ids that are written down by a seed.

use super::Workload;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use std::sync::Arc;

/// Prefixes of the shared workload.
const PREFIXES: usize = 24;
const PREFIX: usize = 16_000;
const OWN: usize = 256;
const CONTROL: usize = 16_256;
const FIRST_TURN: usize = 8_000;
const NEXT_TURN: usize = 400;
/// Turns of a conversation.
const TURNS: u32 = 8;
/// What a chat template puts before the first message, between two, and before the answer.
const HEAD: usize = 4;
const BETWEEN: usize = 5;
const TAIL: usize = 6;
/// Ids below this are the template's.
const SPECIAL: u32 = 100;
/// Ids of words end here.
const WORDS: u32 = 150_000;

/// Writes the prompts of one run. A number names each independent prompt or conversation.
#[derive(Debug)]
pub(super) struct Writer {
    workload: Workload,
    seed: u64,
    prefixes: Vec<Arc<[u32]>>,
    rng: StdRng,
}

/// A prompt's token ids.
pub type Text = Arc<[u32]>;

/// A prompt that may have a next turn.
#[derive(Clone, Debug)]
pub struct Chat {
    /// Which conversation.
    pub number: u64,
    /// Which turn of it, from 0.
    pub turn: u32,
    /// What it has in common with others: its prefix, or else its conversation.
    pub group: u64,
    /// The messages as a client sends them: its own, and those of the assistant in turn; in the shared workload a system message
    /// and one of the user.
    pub messages: Vec<Text>,
    /// All of it, templated.
    pub tokens: Text,
    conversation: bool,
}

// === impl Writer ===

impl Writer {
    pub(super) fn new(workload: Workload, seed: u64) -> Self {
        let prefixes = match workload {
            Workload::Shared => (0..PREFIXES as u64)
                .map(|n| words(seed, 1, n, 0, PREFIX).into())
                .collect(),
            _ => Vec::new(),
        };
        Self {
            workload,
            seed,
            prefixes,
            rng: StdRng::seed_from_u64(seed ^ 0x7072_6566_6978),
        }
    }

    /// The first, and often only, prompt of a number. Must be asked in order: which prefix comes next depends on how many came
    /// before.
    pub(super) fn first(&mut self, number: u64) -> Chat {
        let mut group = number;
        let messages = match self.workload {
            Workload::Control => vec![words(self.seed, 2, number, 0, CONTROL).into()],
            Workload::Shared => {
                let which = self.rng.random_range(0..self.prefixes.len().max(1));
                group = which as u64;
                let own = words(self.seed, 3, number, 0, OWN).into();
                self.prefixes
                    .get(which)
                    .cloned()
                    .into_iter()
                    .chain([own])
                    .collect()
            }
            Workload::Multiturn => vec![words(self.seed, 4, number, 0, FIRST_TURN).into()],
        };
        Chat::new(number, 0, group, messages)
    }

    /// The next turn of a conversation, if it has one.
    pub(super) fn next(&self, chat: &Chat) -> Option<Chat> {
        let turn = chat.turn + 1;
        if self.workload != Workload::Multiturn || turn >= TURNS {
            return None;
        }
        let mut messages = chat.messages.clone();
        let part =
            |kind, tokens| words(self.seed, kind, chat.number, u64::from(turn), tokens).into();
        // What an engine generated is sent back as text, and reasoning is dropped on the way: other tokens than those that it
        // has cached.
        messages.push(part(5, self.workload.output() as usize));
        messages.push(part(4, NEXT_TURN));
        Some(Chat::new(chat.number, turn, chat.group, messages))
    }
}

// === impl Chat ===

impl Chat {
    /// What the template puts before the first message, between two, and before the answer.
    pub fn template() -> [Vec<u32>; 3] {
        [
            (0..HEAD as u32).collect(),
            (10..10 + BETWEEN as u32).collect(),
            (20..20 + TAIL as u32).collect(),
        ]
    }

    /// Whether its messages are those of a user and an assistant in turn.
    fn is_conversation(&self) -> bool {
        self.conversation
    }

    /// The request as the published run's client sends it, for so many tokens of output; `text` writes tokens.
    pub fn request(&self, model: &str, output: u32, text: impl Fn(&[u32]) -> String) -> Value {
        let messages: Vec<_> = match self.messages.as_slice() {
            // One message: a list of parts.
            [only] => {
                vec![json!({"role": "user", "content": [{"type": "text", "text": text(only)}]})]
            }
            many => {
                // A prefix is the system's; in a conversation the user begins.
                let begins = if self.is_conversation() {
                    ["user", "assistant"]
                } else {
                    ["system", "user"]
                };
                let roles = begins.into_iter().cycle();
                let message =
                    |(role, tokens): (&str, &Text)| json!({"role": role, "content": text(tokens)});
                roles.zip(many).map(message).collect()
            }
        };
        json!({
            "model": model,
            "messages": messages,
            "stream": true,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true},
            "max_completion_tokens": output,
            "ignore_eos": true,
        })
    }

    fn new(number: u64, turn: u32, group: u64, messages: Vec<Text>) -> Self {
        let [mut tokens, between, tail] = Self::template();
        for (i, m) in messages.iter().enumerate() {
            if i > 0 {
                tokens.extend_from_slice(&between);
            }
            tokens.extend_from_slice(m);
        }
        tokens.extend(tail);
        Self {
            number,
            turn,
            group,
            conversation: turn > 0,
            messages,
            tokens: tokens.into(),
        }
    }
}

/// So many words that no other place has.
fn words(seed: u64, kind: u64, number: u64, part: u64, n: usize) -> Vec<u32> {
    let mut state = mix(mix(mix(mix(seed) ^ kind) ^ number) ^ part);
    (0..n)
        .map(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            SPECIAL + (mix(state) % u64::from(WORDS - SPECIAL)) as u32
        })
        .collect()
}

/// SplitMix64's finaliser (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014).
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_prompts_have_nothing_in_common() {
        let mut w = Writer::new(Workload::Control, 1);
        let (a, b) = (w.first(0), w.first(1));
        assert_eq!(a.tokens.len(), CONTROL + HEAD + TAIL);
        assert_ne!(a.tokens[HEAD..HEAD + 8], b.tokens[HEAD..HEAD + 8]);
        assert!(w.next(&a).is_none());
    }

    #[test]
    fn shared_prompts_begin_with_one_of_24() {
        let mut w = Writer::new(Workload::Shared, 1);
        let mut seen = std::collections::HashMap::new();
        for n in 0..240 {
            let chat = w.first(n);
            let prefix: Vec<u32> = chat.tokens[..HEAD + PREFIX].to_vec();
            *seen.entry(prefix).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), PREFIXES);
        assert!(seen.values().all(|n| *n < 30), "drawn evenly");
    }

    #[test]
    fn turns_repeat_what_was_said() {
        let mut w = Writer::new(Workload::Multiturn, 1);
        let mut chat = w.first(7);
        assert_eq!(chat.tokens.len(), FIRST_TURN + HEAD + TAIL);
        let mut turns = 1;
        while let Some(next) = w.next(&chat) {
            let kept = chat.tokens.len() - TAIL;
            assert_eq!(next.tokens[..kept], chat.tokens[..kept]);
            assert_eq!(next.tokens.len(), chat.tokens.len() + 600 + 2 * BETWEEN);
            chat = next;
            turns += 1;
        }
        assert_eq!(turns, TURNS);
    }

    #[test]
    fn seeds_repeat_and_differ() {
        let of = |seed| Writer::new(Workload::Shared, seed).first(0).tokens;
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }
}
