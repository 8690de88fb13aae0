//! Reads what routing needs from a request's body without changing a byte of it.
use bytes::Bytes;
use std::sync::Arc;

/// Which API a request speaks, from its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/v1/embeddings`, `/pooling`
    Embeddings,
    /// `/score`, `/v1/score`
    Score,
    /// `/rerank`, `/v1/rerank`, `/v2/rerank`
    Rerank,
    /// `/v1/audio/*` (multipart)
    Audio,
    /// Anything else.
    Other,
}

/// What was read of a request. An extension of the request that [`PeekLayer`] passes on.
#[derive(Clone, Debug)]
pub struct InferenceRequest {
    /// The API.
    pub api: Api,
    /// The `model` field as given; none if missing or unread.
    pub model: Option<Arc<str>>,
    /// Whether the answer streams.
    pub stream: bool,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
    /// The output budget: `max_completion_tokens`, `max_tokens` or `max_output_tokens`.
    pub max_tokens: Option<u64>,
    /// How many choices: `n` (1 if missing).
    pub n: u32,
    /// `cache_salt`.
    pub cache_salt: Option<Arc<str>>,
    /// `priority`.
    pub priority: Option<i64>,
    /// How the body was read.
    pub read: BodyRead,
    /// The whole body if it is buffered; empty else.
    pub body: Bytes,
    /// Top-level keys and the byte range of their value in `body`, the last of duplicates only.
    pub fields: Arc<[(Box<str>, std::ops::Range<usize>)]>,
}

/// How far a body was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyRead {
    /// Whole and understood.
    Parsed,
    /// No JSON that can be read, or not JSON at all.
    Unreadable,
    /// It has a `Content-Encoding`.
    Encoded,
    /// Over the peek cap or the memory budget: streamed on unread.
    TooLarge,
    /// The memory budget was used up for too long.
    NoBudget,
    /// There is no body.
    Empty,
}

impl InferenceRequest {
    /// The raw JSON of a top-level field.
    pub fn field(&self, name: &str) -> Option<&[u8]> {
        self.fields
            .iter()
            .find(|(k, _)| &**k == name)
            .map(|(_, r)| &self.body[r.clone()])
    }
}
