//! From a request to tokens and prefix keys.
use crate::{chain::Chain, peek::InferenceRequest};
use futures::future::BoxFuture;
use std::sync::Arc;

/// A prompt as routing sees it. An extension of the request.
#[derive(Clone, Debug)]
pub struct Prompt {
    /// Prefix keys as far as the prompt is known (up to the first media part).
    pub chain: Chain,
    /// Prompt tokens, exact or estimated (see `source`). For several prompts in one request: their sum.
    pub tokens: u32,
    /// The ids where they are known exactly, for tests and audits.
    pub ids: Option<Arc<[u32]>>,
    /// Bytes of text in the prompt, for the engine's frontend cost.
    pub bytes: u32,
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
}
