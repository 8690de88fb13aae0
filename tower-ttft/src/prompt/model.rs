//! What a local tokenizer does, so that the encoder works with any and without one.
use super::Reason;
use crate::peek::InferenceRequest;
use std::fmt;

/// A tokenizer and template at hand. All methods are plain computation; the encoder decides on which thread they run.
pub trait LocalModel: Send + Sync + 'static {
    /// Reads a request and renders its template.
    ///
    /// # Errors
    /// Why only the engine, or nobody, can tell what this request's prompt is.
    fn render(&self, req: &InferenceRequest) -> Result<Rendered, Reason>;

    /// Bytes of text that [`LocalModel::tokenize`] would have to tokenize now; the rest is remembered.
    fn uncached(&self, text: &Text) -> usize;

    /// The ids of a text.
    ///
    /// # Errors
    /// [`Reason::Unsupported`] if the tokenizer cannot do it.
    fn tokenize(&self, text: &Text) -> Result<Vec<u32>, Reason>;
}

/// The prompts of a request as text.
#[derive(Clone, PartialEq)]
pub struct Rendered {
    /// The texts, at least one.
    pub texts: Vec<Text>,
    /// The request asks for at most so many tokens of a prompt; longer ones are cut by the engine.
    pub truncate: Option<u32>,
}

/// The text of one prompt.
#[derive(Clone, PartialEq)]
pub struct Text {
    /// The text up to its end, or up to the first media part.
    pub text: String,
    /// The tokenizer's own special tokens (BOS) are put around it.
    pub add_special_tokens: bool,
    /// What follows the first media part, where there is one.
    pub after_media: Option<Media>,
}

/// What a text's first media part hides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Media {
    /// Media parts in the prompt.
    pub parts: u32,
    /// Bytes of text behind the first of them.
    pub text_bytes: usize,
}

impl Text {
    /// A whole text.
    pub fn new(text: impl Into<String>, add_special_tokens: bool) -> Self {
        Self {
            text: text.into(),
            add_special_tokens,
            after_media: None,
        }
    }
}

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Text")
            .field("bytes", &self.text.len())
            .field("add_special_tokens", &self.add_special_tokens)
            .field("after_media", &self.after_media)
            .finish()
    }
}

impl fmt::Debug for Rendered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rendered")
            .field("texts", &self.texts)
            .field("truncate", &self.truncate)
            .finish()
    }
}
