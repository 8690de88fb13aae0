//! From a request to tokens and prefix keys.
//!
//! An [`Encoder`] serves one base model. It takes token ids from the request itself where it has some, else from the
//! local tokenizer and template (`LocalTokenizer`, feature `tokenizer`), else from an engine ([`RemoteTokenizer`]),
//! and else lets bytes stand for tokens. It never fails a request: every fallback is counted by its reason in
//! `forebay_prompt_source_total` and visible in [`Prompt::source`]. [`EncodeLayer`] puts it on the path of requests.

mod approximate;
mod breaker;
#[cfg(feature = "tokenizer")]
mod chat;
mod encoder;
mod json;
mod layer;
mod metrics;
mod model;
mod offload;
mod read;
mod remote;
#[cfg(feature = "tokenizer")]
mod template;
#[cfg(feature = "tokenizer")]
mod tokenizer;
mod verify;

#[cfg(feature = "tokenizer")]
pub use self::tokenizer::{
    ChatTemplate, LoadError, LocalParams, LocalTokenizer, SegmentCacheStats,
};
pub use self::{
    encoder::{Adapter, Encoder, EncoderParams},
    layer::{EncodeLayer, EncodeService},
    metrics::PromptFamilies,
    model::{LocalModel, Media, Rendered, Text},
    offload::{BlockingPool, Full, InPlace, Job, Offload},
    remote::{RemoteError, RemotePrompt, RemoteTokenizer},
    verify::Verdict,
};

use crate::{chain::Chain, peek::InferenceRequest};
use futures::future::BoxFuture;
use std::{fmt, sync::Arc};

/// A prompt as routing sees it. An extension of the request.
///
/// Its `Debug` output says how long things are and never what they are: prompts must not reach logs.
#[derive(Clone)]
pub struct Prompt {
    /// Prefix keys as far as the prompt is known (up to the first media part). Of several prompts in one request: the
    /// keys of the first.
    pub chain: Chain,
    /// Prompt tokens, exact or estimated (see `source`). For several prompts in one request: their sum.
    pub tokens: u32,
    /// The ids of the first prompt where they are known exactly, for tests and audits.
    pub ids: Option<Arc<[u32]>>,
    /// Bytes of text in the prompt, for the engine's frontend cost.
    pub bytes: u32,
    /// Whether `bytes` were counted one by one and are all that the engine will read: no media, nothing that only the
    /// engine has, nothing that it cuts off.
    pub whole_text: bool,
    /// Where the tokens came from.
    pub source: Source,
}

/// Where a prompt's tokens came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// Token ids in the request itself.
    Ids,
    /// The local tokenizer and template.
    Local,
    /// The engine's render endpoint.
    Render,
    /// The engine's `/tokenize`.
    Tokenize,
    /// Not known: bytes stand for tokens.
    Approximate(Reason),
}

/// Why tokens are only approximate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No local tokenizer and no engine that could be asked.
    NoTokenizer,
    /// The body could not be read.
    Unread,
    /// The template refused the messages.
    Template,
    /// The request asks for something that only the engine does (own template, truncation, media first…).
    Unsupported,
    /// The time budget ran out.
    Timeout,
    /// The offload pool was full.
    Busy,
    /// The engine that was asked failed.
    Remote,
    /// Self-verification found other tokens than the engine's.
    Mismatch,
}

/// Turns requests of one model into prompts. Never fails: what it cannot tokenize becomes approximate.
pub trait Encode: Send + Sync + 'static {
    /// The prompt of a request.
    fn encode<'a>(&'a self, req: &'a InferenceRequest) -> BoxFuture<'a, Prompt>;

    /// An engine counted `tokens` in a prompt of `bytes` of text whose count is a lesson ([`Prompt::is_lesson`]).
    fn learn(&self, _bytes: u32, _tokens: u32) {}
}

// === impl Prompt ===

impl Prompt {
    /// Whether an engine's count of this prompt's tokens says how many bytes a token of its model has. Prompts of the
    /// local tokenizer do not: their bytes are those of the rendered text, and nobody has to guess their tokens.
    pub fn is_lesson(&self) -> bool {
        self.whole_text && !matches!(self.source, Source::Ids | Source::Local)
    }

    /// Lets the length of a body that was not read stand for its text.
    fn weigh_unread(&mut self, bytes: u32) {
        self.bytes = bytes;
        self.tokens = approximate::Ratio::default().tokens(bytes as usize, 0);
    }
}

impl fmt::Debug for Prompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prompt")
            .field("kind", &self.chain.kind())
            .field("atoms", &self.chain.keys().len())
            .field("tokens", &self.tokens)
            .field("ids", &self.ids.as_ref().map(|ids| ids.len()))
            .field("bytes", &self.bytes)
            .field("source", &self.source)
            .finish()
    }
}

// === impl Source ===

impl Source {
    /// Whether the tokens are the engine's own, as far as we can know.
    pub fn is_exact(&self) -> bool {
        !matches!(self, Self::Approximate(_))
    }
}
