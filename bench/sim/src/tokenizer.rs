//! The tokenizer that comes with the crate: byte-level BPE of some 1,500 entries and a ChatML template.
//!
//! `tokenizer/make.py` makes it from a list of words, each of which is one token with a space before it; [`crate::Words`]
//! writes texts of such words.

use std::{fs, io, path::Path};

/// The files, in Hugging Face's layout.
pub const FILES: [(&str, &str); 2] = [
    (
        "tokenizer.json",
        include_str!("../tokenizer/tokenizer.json"),
    ),
    (
        "tokenizer_config.json",
        include_str!("../tokenizer/tokenizer_config.json"),
    ),
];

/// Writes the files into a directory, which must exist.
pub fn install(dir: &Path) -> io::Result<()> {
    for (name, content) in FILES {
        fs::write(dir.join(name), content)?;
    }
    Ok(())
}

#[cfg(all(test, feature = "tokenizer"))]
mod tests {
    use super::*;
    use crate::Words;
    use tower_ttft::prompt::{LocalParams, LocalTokenizer};

    fn load() -> LocalTokenizer {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tokenizer");
        LocalTokenizer::load(&dir, LocalParams::new(1)).expect("the tokenizer")
    }

    #[test]
    fn a_text_has_as_many_tokens_as_asked() {
        let tokenizer = load();
        for (seed, tokens) in [(1, 1), (2, 17), (3, 400), (4, 16_256)] {
            let text = Words::new(seed).text(tokens);
            let ids = tokenizer.encode_whole(&text, false).expect("ids");
            assert_eq!(ids.len(), tokens);
        }
    }

    #[test]
    fn texts_of_different_seeds_differ_from_the_start() {
        let start = |seed| Words::new(seed).text(4);
        let mut starts: Vec<_> = (0..2_000).map(start).collect();
        starts.sort();
        starts.dedup();
        assert!(starts.len() > 1_990, "{}", starts.len());
    }

    #[test]
    fn anything_can_be_tokenized() {
        let ids = load().encode_whole("Zürich, 3 €\n\tfn main() {}", false);
        assert!(ids.is_ok_and(|ids| ids.len() > 20));
    }
}
