//! Bytes in place of tokens, where tokens are not known.
use super::{Prompt, Reason, Source, read};
use crate::{
    chain::{Chain, ChainKind, KeySpace, Root},
    peek::InferenceRequest,
};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of text per token before anything was learned: usual for English prose and code with large vocabularies.
const FIRST_RATIO: f64 = 4.0;

/// No vocabulary has fewer or more on average.
const RATIOS: (f64, f64) = (0.5, 16.0);

/// How far one answer moves the ratio.
const STEP: f64 = 0.05;

/// Tokens that a media part is taken for: the order of magnitude of one image. Only engines know.
const MEDIA_TOKENS: u32 = 512;

/// Bytes per token of one model, learned from what engines say.
#[derive(Debug)]
pub(super) struct Ratio {
    bits: AtomicU64,
}

// === impl Ratio ===

impl Default for Ratio {
    fn default() -> Self {
        Self {
            bits: AtomicU64::new(FIRST_RATIO.to_bits()),
        }
    }
}

impl Ratio {
    pub(super) fn get(&self) -> f64 {
        f64::from_bits(self.bits.load(Ordering::Relaxed))
    }

    /// An engine counted so many tokens in so many bytes. Short prompts are mostly template and say nothing.
    pub(super) fn learn(&self, bytes: u32, tokens: u32) {
        if bytes < 256 || tokens == 0 {
            return;
        }
        let seen = (f64::from(bytes) / f64::from(tokens)).clamp(RATIOS.0, RATIOS.1);
        // Two writers at once may lose one of their steps, which is of no weight.
        let old = self.get();
        let new = (old.ln() + STEP * (seen.ln() - old.ln())).exp();
        self.bits
            .store(new.clamp(RATIOS.0, RATIOS.1).to_bits(), Ordering::Relaxed);
    }

    /// Tokens in so many bytes of text and so many media parts.
    pub(super) fn tokens(&self, bytes: usize, media: u32) -> u32 {
        let text = (bytes as f64 / self.get()).ceil();
        // Float to integer conversion saturates.
        (text as u32).saturating_add(media.saturating_mul(MEDIA_TOKENS))
    }
}

/// The approximate prompt of a request. Fields of more than `exact` bytes are not parsed for it.
pub(super) fn prompt(
    req: &InferenceRequest,
    reason: Reason,
    keys: &KeySpace,
    root: Root,
    ratio: &Ratio,
    exact: usize,
) -> Prompt {
    let bytes = read::bytes(req, exact);
    let chain = if bytes.prefix.is_empty() {
        Chain::empty(ChainKind::Bytes)
    } else {
        keys.bytes(root, &bytes.prefix)
    };
    Prompt {
        chain,
        tokens: ratio.tokens(bytes.text, bytes.media),
        ids: None,
        bytes: u32::try_from(bytes.text).unwrap_or(u32::MAX),
        whole_text: bytes.is_whole(),
        source: Source::Approximate(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_follows_what_engines_say_within_bounds() {
        let ratio = Ratio::default();
        for _ in 0..200 {
            ratio.learn(3_000, 1_500);
        }
        assert!((ratio.get() - 2.0).abs() < 0.01, "{}", ratio.get());
        assert_eq!(ratio.tokens(4_000, 0), 2_000);
        ratio.learn(10, 1_000_000);
        assert!(
            (ratio.get() - 2.0).abs() < 0.01,
            "short prompts say nothing"
        );
        for _ in 0..10_000 {
            ratio.learn(u32::MAX, 1);
        }
        assert!(ratio.get() <= RATIOS.1);
        assert_eq!(ratio.tokens(usize::MAX, u32::MAX), u32::MAX);
    }
}
