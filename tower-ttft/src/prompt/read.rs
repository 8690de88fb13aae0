//! What of a request is prompt, as far as it can be told without a tokenizer.
use super::json::Json;
use crate::peek::{Api, BodyRead, InferenceRequest};

/// Keys whose strings are media or point to it: they identify a prompt but are no text of it.
const MEDIA_KEYS: [&str; 9] = [
    "url",
    "data",
    "file_data",
    "image_url",
    "video_url",
    "audio_url",
    "image_embeds",
    "audio_embeds",
    "prompt_embeds",
];

/// What the names of queries and documents are, in this order.
const QUERIES_AND_DOCUMENTS: [&str; 8] = [
    "query",
    "queries",
    "text_1",
    "data_1",
    "documents",
    "items",
    "text_2",
    "data_2",
];

/// Fields that make an engine read more than a request says, or less.
const ELSEWHERE: [&str; 4] = [
    "previous_response_id",
    "truncate_prompt_tokens",
    "chat_template",
    "kv_transfer_params",
];

const DOCUMENTS: [&str; 4] = ["documents", "items", "text_2", "data_2"];

/// Bytes of a prompt that are hashed, at most: two prompts that agree in so much go to the same place anyway.
const PREFIX_BYTES: usize = 1 << 20;

/// A request as bytes to be hashed, in the order in which templates usually print its fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bytes {
    /// What identifies the prompt: the JSON of its fields. A longer conversation of the same client begins with the same
    /// bytes, but for the bracket at the end.
    pub(super) prefix: Vec<u8>,
    /// Bytes of text in all prompts together, each counted as often as the engine reads it.
    pub(super) text: usize,
    /// Media parts.
    pub(super) media: u32,
    /// The engine reads something else than these fields, or not all of them, or they were not parsed.
    pub(super) partial: bool,
}

/// The prompts of a request that are token ids already.
pub(super) fn ids(req: &InferenceRequest) -> Option<Vec<Vec<u32>>> {
    if req.read != BodyRead::Parsed {
        return None;
    }
    match req.api {
        Api::Completions => {
            let only_ids = ["prompt_embeds", "truncate_prompt_tokens"]
                .iter()
                .all(|f| is_null(req, f));
            only_ids.then(|| id_lists(req.field("prompt")?)).flatten()
        }
        Api::Embeddings => {
            let only_ids = ["truncate_prompt_tokens", "padding", "messages"]
                .iter()
                .all(|f| is_null(req, f));
            only_ids.then(|| id_lists(req.field("input")?)).flatten()
        }
        // The decode stage of disaggregated serving gets the ids of the prefill stage; echo makes vLLM ignore them.
        Api::Chat | Api::Messages | Api::Responses => {
            let params = req.field("kv_transfer_params")?;
            memchr::memmem::find(params, b"prompt_token_ids")?;
            let params = Json::parse(params).ok()?;
            let Json::Array(ids) = params.get("prompt_token_ids")? else {
                return None;
            };
            if ids.is_empty()
                || req.field("echo") == Some(b"true")
                || bytes(req, usize::MAX).media > 0
            {
                return None;
            }
            Some(vec![ids.iter().map(Json::as_token).collect::<Option<_>>()?])
        }
        _ => None,
    }
}

/// Whether a field is missing or null.
pub(super) fn is_null(req: &InferenceRequest, field: &str) -> bool {
    req.field(field)
        .is_none_or(|raw| raw.trim_ascii() == b"null")
}

/// A list of ids, or of lists of ids. Nothing if there is anything else in it.
fn id_lists(raw: &[u8]) -> Option<Vec<Vec<u32>>> {
    let inner = raw.trim_ascii().strip_prefix(b"[")?.trim_ascii_start();
    match inner.first()? {
        b'0'..=b'9' => serde_json::from_slice(raw).ok().map(|ids| vec![ids]),
        b'[' => serde_json::from_slice(raw).ok(),
        _ => None,
    }
}

/// The bytes that stand for a request's prompt where its tokens are not known. Fields of more than `exact` bytes together
/// are not parsed, so that no body holds its thread for long: their length stands for their text, less what is encoded
/// media.
pub(super) fn bytes(req: &InferenceRequest, exact: usize) -> Bytes {
    let mut out = Bytes::default();
    if req.read != BodyRead::Parsed {
        out.partial = true;
        return out;
    }
    out.partial = ELSEWHERE.iter().any(|field| !is_null(req, field));
    let names: &[&str] = match req.api {
        Api::Chat => &["tools", "messages"],
        Api::Messages => &["tools", "system", "messages"],
        Api::Responses => &["tools", "instructions", "input"],
        Api::Completions => &["prompt", "prompt_embeds"],
        Api::Embeddings => &["input", "messages"],
        Api::Score | Api::Rerank => &QUERIES_AND_DOCUMENTS,
        Api::Audio | Api::Other => &[],
    };
    let fields: Vec<(&str, &[u8])> = names
        .iter()
        .filter_map(|name| Some((*name, req.field(name)?)))
        .collect();
    for (_, raw) in &fields {
        let room = PREFIX_BYTES.saturating_sub(out.prefix.len());
        out.prefix.extend_from_slice(raw.get(..room).unwrap_or(raw));
    }
    let all: usize = fields.iter().map(|(_, raw)| raw.len()).sum();
    let mut query = 0;
    for (name, raw) in fields {
        let parsed = (all <= exact).then(|| Json::parse(raw).ok()).flatten();
        match parsed {
            Some(value) => {
                let documents = DOCUMENTS
                    .contains(&name)
                    .then(|| value.as_array().map_or(1, <[_]>::len));
                out.walk(name, &value, false);
                match documents {
                    // An engine reads a single query once with each document.
                    Some(n) => out.text += query * n.saturating_sub(1),
                    None => query = out.text,
                }
            }
            None => {
                out.partial = true;
                out.estimate(raw);
            }
        }
    }
    out
}

// === impl Bytes ===

impl Bytes {
    /// Whether `text` is all that the engine reads, counted and not estimated.
    pub(super) fn is_whole(&self) -> bool {
        !self.partial && self.media == 0
    }

    /// Every string in it. The depth is bounded by the reader's.
    fn walk(&mut self, key: &str, value: &Json<'_>, media: bool) {
        let media = media || MEDIA_KEYS.contains(&key);
        match value {
            Json::Str(_) if media => self.media = self.media.saturating_add(1),
            Json::Str(s) => self.text += s.len(),
            Json::Array(items) => items.iter().for_each(|v| self.walk("", v, media)),
            Json::Object(pairs) => pairs.iter().for_each(|(k, v)| self.walk(k, v, media)),
            // A token id, as long as a token's text usually is.
            Json::Int(_) => self.text += 4,
            Json::BigInt(_) | Json::Float(_) | Json::Bool(_) | Json::Null => {}
        }
    }

    fn estimate(&mut self, raw: &[u8]) {
        let mut text = raw.len();
        for at in memchr::memmem::find_iter(raw, b";base64,") {
            let data = raw.get(at..).unwrap_or_default();
            let len = memchr::memchr(b'"', data).unwrap_or(data.len());
            text = text.saturating_sub(len);
            self.media = self.media.saturating_add(1);
        }
        self.text += text;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A request as peek reads it.
    pub(in crate::prompt) fn request(api: Api, body: &str) -> InferenceRequest {
        let body = bytes::Bytes::copy_from_slice(body.as_bytes());
        crate::peek::read(api, &http::HeaderMap::new(), body)
    }

    #[test]
    fn token_ids_are_used_as_they_are() {
        let of = |api, body: &str| ids(&request(api, body));
        let c = Api::Completions;
        assert_eq!(of(c, r#"{"prompt":[1, 2,3]}"#), Some(vec![vec![1, 2, 3]]));
        assert_eq!(
            of(c, r#"{"prompt":[ [1],[2,3]]}"#),
            Some(vec![vec![1], vec![2, 3]])
        );
        assert_eq!(of(Api::Embeddings, r#"{"input":[7]}"#), Some(vec![vec![7]]));
        for other in [
            "\"a\"",
            "[\"a\"]",
            "[]",
            "[1,\"a\"]",
            "[-1]",
            "[1,[2]]",
            "[[1],2]",
            "null",
            "5",
            "[1.5]",
        ] {
            assert_eq!(of(c, &format!("{{\"prompt\":{other}}}")), None, "{other}");
        }
        assert_eq!(of(c, r#"{"prompt":[1],"truncate_prompt_tokens":3}"#), None);
    }

    #[test]
    fn forwarded_ids_replace_the_messages_unless_there_is_media() {
        let of = |body: &str| ids(&request(Api::Chat, body));
        let kv = r#""kv_transfer_params":{"prompt_token_ids":[1,2]}"#;
        assert_eq!(
            of(&format!(r#"{{"messages":[],{kv}}}"#)),
            Some(vec![vec![1, 2]])
        );
        assert_eq!(of(&format!(r#"{{"messages":[],"echo":true,{kv}}}"#)), None);
        let image = r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}"#;
        assert_eq!(of(&format!(r#"{{"messages":[{image}],{kv}}}"#)), None);
    }

    #[test]
    fn bytes_of_a_longer_conversation_begin_with_those_of_the_shorter() {
        let short = r#"{"messages":[{"role":"user","content":"a b"}]}"#;
        let long = r#"{"messages":[{"role":"user","content":"a b"},{"role":"assistant","content":[{"type":"text","text":"c"}]}]}"#;
        let (short, long) = (
            bytes(&request(Api::Chat, short), usize::MAX),
            bytes(&request(Api::Chat, long), usize::MAX),
        );
        assert!(
            long.prefix
                .starts_with(short.prefix.strip_suffix(b"]").unwrap())
        );
        assert!(!short.prefix.is_empty());
        assert!(long.text > short.text);
    }

    fn chat(content: &str) -> InferenceRequest {
        let body = format!(r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#);
        request(Api::Chat, &body)
    }

    #[test]
    fn media_identifies_but_is_no_text() {
        for exact in [0, usize::MAX] {
            let of = |url: &str| {
                let image = format!(r#"{{"type":"image_url","image_url":{{"url":"{url}"}}}}"#);
                bytes(
                    &chat(&format!(r#"[{image},{{"type":"text","text":"what"}}]"#)),
                    exact,
                )
            };
            let long = format!("data:image/png;base64,{}", "B".repeat(10_000));
            let (a, b) = (of("data:image/png;base64,AAAA"), of(&long));
            assert_ne!(a.prefix, b.prefix);
            assert_eq!((a.text, a.media), (b.text, 1));
        }
    }

    #[test]
    fn long_fields_are_estimated_near_what_they_hold() {
        let req = chat(&format!("\"{}\"", "word \\n".repeat(20_000)));
        let (exact, estimate) = (bytes(&req, usize::MAX).text, bytes(&req, 1_000).text);
        assert!(exact > 100_000);
        assert!(
            (exact..exact * 5 / 4).contains(&estimate),
            "{estimate} for {exact}"
        );
        let huge = chat(&format!("\"{}\"", "x".repeat(3 * PREFIX_BYTES)));
        assert_eq!(bytes(&huge, 1_000).prefix.len(), PREFIX_BYTES);
    }

    #[test]
    fn a_query_counts_with_each_document() {
        let of = |body: &str| bytes(&request(Api::Rerank, body), usize::MAX).text;
        assert_eq!(of(r#"{"query":"qqqq","documents":["d"]}"#), 5);
        assert_eq!(of(r#"{"query":"qqqq","documents":["d","d","d"]}"#), 15);
        assert_eq!(of(r#"{"documents":"d","query":"qqqq"}"#), 5);
    }

    #[test]
    fn odd_bodies_are_no_trouble() {
        use Api::*;
        for api in [
            Chat,
            Completions,
            Responses,
            Messages,
            Embeddings,
            Score,
            Rerank,
            Audio,
            Other,
        ] {
            for body in [
                "{}",
                r#"{"messages":5,"prompt":{},"input":null,"documents":"x"}"#,
            ] {
                let req = request(api, body);
                let _ = (ids(&req), bytes(&req, 0), bytes(&req, usize::MAX));
            }
        }
    }
}
