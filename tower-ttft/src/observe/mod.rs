//! Watches an answer for its first token, its usage and its end.
//!
//! [`ObserveBody`] passes every frame on as it came, at once, and tells an [`Observer`] what it saw. Streams of
//! server-sent events are framed by [`SseFramer`] and read by [`classify_event`]; after the first token an event is read
//! only if it holds a word that matters. Other JSON is watched for its outermost `usage` and `error` in constant memory.

mod body;
mod classify;
mod sse;
mod usage;
mod watch;

pub use self::{
    body::ObserveBody,
    classify::{Classified, EngineError, EventKind, classify_event, classify_json},
    sse::{Framed, SseEvent, SseFramer},
    usage::UsageParts,
};
use tokio::time::Instant;

/// What is told about an answer, in this order. Dropping the observer without [`Observer::end`] means that the client left.
pub trait Observer {
    /// The first byte of the body arrived.
    fn first_byte(&mut self, now: Instant);
    /// The first token arrived: the first non-empty content, reasoning or tool call of a stream.
    fn first_token(&mut self, now: Instant);
    /// The answer's usage, when it says so; may come several times (`continuous_usage_stats`), the last one counts.
    fn usage(&mut self, usage: Usage);
    /// The answer ended.
    fn end(&mut self, now: Instant, end: End);
}

/// `usage` of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens, cached ones included.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// Prompt tokens found in the prefix cache, where the engine tells.
    pub cached_tokens: Option<u32>,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// As its protocol says it ends.
    Complete,
    /// An error event or error body of the engine.
    EngineError,
    /// The engine's connection broke.
    Broken,
    /// The client left.
    Cancelled,
}
