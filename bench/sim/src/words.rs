use crate::Dice;
use std::sync::LazyLock;

/// Texts of exactly so many tokens under the crate's tokenizer: each word, with the space before it, is one token.
#[derive(Clone, Debug)]
pub struct Words(Dice);

static WORDS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    let mut words: Vec<_> = include_str!("../tokenizer/words.txt")
        .split_whitespace()
        .collect();
    words.sort_unstable();
    words
});

// === impl Words ===

impl Words {
    /// A source of texts. Different seeds give texts that differ within the first tokens.
    pub fn new(seed: u64) -> Self {
        Self(Dice::new(seed))
    }

    /// The next word, with a space before it.
    pub fn push_one(&mut self, text: &mut String) {
        if let Some(word) = WORDS.get(self.0.below(WORDS.len())) {
            text.push(' ');
            text.push_str(word);
        }
    }

    /// A text of so many tokens.
    pub fn text(&mut self, tokens: usize) -> String {
        let mut text = String::with_capacity(tokens * 6);
        for _ in 0..tokens {
            self.push_one(&mut text);
        }
        text
    }
}
