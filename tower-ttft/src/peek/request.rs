//! What is known of a request.

use bytes::Bytes;
use std::{borrow::Cow, fmt, ops::Range, sync::Arc};

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

/// How far a body was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

/// What was read of a request. An extension of the request that [`super::PeekLayer`] passes on.
///
/// A field that vLLM would refuse (`"max_tokens": "many"`) reads as missing here: the engine's answer is the answer.
#[derive(Clone)]
pub struct InferenceRequest {
    /// The API.
    pub api: Api,
    /// The `model` field as given; none if missing, null, empty (vLLM takes its default model for all three), no string,
    /// or unread.
    pub model: Option<Arc<str>>,
    /// Whether the answer streams.
    pub stream: bool,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
    /// The output budget in tokens: `max_completion_tokens`, `max_tokens` or `max_output_tokens`.
    pub max_tokens: Option<u64>,
    /// How many choices: `n` (1 if missing).
    pub n: u32,
    /// `cache_salt`; none if missing or empty.
    pub cache_salt: Option<Arc<str>>,
    /// `priority`.
    pub priority: Option<i64>,
    /// How the body was read.
    pub read: BodyRead,
    /// The whole body if it is buffered; empty else.
    pub body: Bytes,
    /// Top-level keys and the byte range of their value in `body`, the last of duplicates only.
    pub fields: Arc<[(Box<str>, Range<usize>)]>,
    /// Which of the keys that policies act on (`model`, `cache_salt`, `priority`) occur more than once. The last one
    /// counts, here as in vLLM, but whoever enforces a policy answers 400: another reader may take another one.
    pub duplicates: Vec<&'static str>,
}

// === impl Api ===

impl Api {
    /// The API that a request path (without its query) names. Escapes (`%2F`) are resolved first, as uvicorn does, so
    /// that no spelling of a path gets past what is decided by it.
    pub fn from_path(path: &str) -> Self {
        match &*percent_decoded(path) {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            "/v1/embeddings" | "/pooling" => Self::Embeddings,
            "/score" | "/v1/score" => Self::Score,
            "/rerank" | "/v1/rerank" | "/v2/rerank" => Self::Rerank,
            path if path.starts_with("/v1/audio/") => Self::Audio,
            _ => Self::Other,
        }
    }
}

/// Escapes that are none, or that are no UTF-8, stay: no known path has any.
fn percent_decoded(path: &str) -> Cow<'_, str> {
    if !path.contains('%') {
        return Cow::Borrowed(path);
    }
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&b, tail)) = rest.split_first() {
        let hex = |i: usize| tail.get(i).and_then(|&d| char::from(d).to_digit(16));
        match (b, hex(0), hex(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high << 4 | low) as u8);
                rest = tail.get(2..).unwrap_or_default();
            }
            _ => {
                bytes.push(b);
                rest = tail;
            }
        }
    }
    String::from_utf8(bytes).map_or(Cow::Borrowed(path), Cow::Owned)
}

// === impl InferenceRequest ===

impl InferenceRequest {
    /// A request of which nothing is known but its API.
    pub fn unread(api: Api, read: BodyRead) -> Self {
        Self {
            api,
            model: None,
            stream: false,
            include_usage: false,
            max_tokens: None,
            n: 1,
            cache_salt: None,
            priority: None,
            read,
            body: Bytes::new(),
            fields: Arc::new([]),
            duplicates: Vec::new(),
        }
    }

    /// The raw JSON of a top-level field.
    pub fn field(&self, name: &str) -> Option<&[u8]> {
        self.range(name).and_then(|r| self.body.get(r))
    }

    /// Where the value of a top-level field lies in the body.
    pub fn range(&self, name: &str) -> Option<Range<usize>> {
        self.fields
            .iter()
            .find(|(k, _)| &**k == name)
            .map(|(_, r)| r.clone())
    }

    /// Lets go of the body, once nobody needs its text any more; what was read of it stays.
    pub fn forget_body(&mut self) {
        self.body = Bytes::new();
        self.fields = Arc::new([]);
    }
}

/// Neither the body nor its keys nor the salt: this gets logged.
impl fmt::Debug for InferenceRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InferenceRequest")
            .field("api", &self.api)
            .field("model", &self.model)
            .field("stream", &self.stream)
            .field("include_usage", &self.include_usage)
            .field("max_tokens", &self.max_tokens)
            .field("n", &self.n)
            .field("cache_salt", &self.cache_salt.as_ref().map(|_| "…"))
            .field("priority", &self.priority)
            .field("read", &self.read)
            .field("body_bytes", &self.body.len())
            .field("fields", &self.fields.len())
            .field("duplicates", &self.duplicates)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        for (path, api) in [
            ("/v1/chat/completions", Api::Chat),
            ("/v1/chat%2Fcompletions", Api::Chat),
            ("/v1/ch%61t/completions", Api::Chat),
            ("/v1/completions", Api::Completions),
            ("/v1/responses", Api::Responses),
            ("/v1/messages", Api::Messages),
            ("/v1/messages/count_tokens", Api::Other),
            ("/v1/embeddings", Api::Embeddings),
            ("/pooling", Api::Embeddings),
            ("/score", Api::Score),
            ("/v1/score", Api::Score),
            ("/rerank", Api::Rerank),
            ("/v2/rerank", Api::Rerank),
            ("/v1/audio/transcriptions", Api::Audio),
            ("/v1/models", Api::Other),
            ("/v1/chat/completions/", Api::Other),
            ("/v1/chat/completions/render", Api::Other),
            ("/v1/chat%2", Api::Other),
            ("/%ff", Api::Other),
            ("%", Api::Other),
            ("", Api::Other),
        ] {
            assert_eq!(Api::from_path(path), api, "{path}");
        }
    }

    #[test]
    fn debug_tells_nothing_of_what_was_asked() {
        let mut req = InferenceRequest::unread(Api::Chat, BodyRead::Parsed);
        req.body = Bytes::from_static(b"{\"a secret\":\"a prompt\"}");
        req.fields = Arc::new([("a secret".into(), 12..22)]);
        req.cache_salt = Some("a salt".into());
        let text = format!("{req:?}");
        assert!(!text.contains("a prompt"), "{text}");
        assert!(!text.contains("a secret"), "{text}");
        assert!(!text.contains("a salt"), "{text}");
    }

    #[test]
    fn a_field_that_is_not_in_the_body_is_none() {
        let mut req = InferenceRequest::unread(Api::Chat, BodyRead::Parsed);
        req.fields = Arc::new([("a".into(), 1..9)]);
        assert_eq!(req.field("a"), None);
        assert_eq!(req.field("b"), None);
    }
}
