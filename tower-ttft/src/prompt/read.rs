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

/// The text of a request as bytes to be hashed, in the order in which templates usually print it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bytes {
    /// What identifies the prompt: text, names of roles, media.
    pub(super) prefix: Vec<u8>,
    /// Bytes of text in all prompts together, each counted as often as the engine reads it.
    pub(super) text: usize,
    /// Media parts.
    pub(super) media: u32,
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
            if ids.is_empty() || req.field("echo") == Some(b"true") || bytes(req).media > 0 {
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

/// The bytes that stand for a request's prompt where its tokens are not known.
pub(super) fn bytes(req: &InferenceRequest) -> Bytes {
    let mut out = Bytes::default();
    if req.read != BodyRead::Parsed {
        return out;
    }
    match req.api {
        Api::Chat => out.fields(req, &["tools", "messages"]),
        Api::Messages => out.fields(req, &["tools", "system", "messages"]),
        Api::Responses => out.fields(req, &["tools", "instructions", "input"]),
        Api::Completions => out.fields(req, &["prompt", "prompt_embeds"]),
        Api::Embeddings => out.fields(req, &["input", "messages"]),
        Api::Score | Api::Rerank => out.pairs(req),
        Api::Audio | Api::Other => {}
    }
    out
}

// === impl Bytes ===

impl Bytes {
    fn fields(&mut self, req: &InferenceRequest, names: &[&str]) {
        for name in names {
            let Some(raw) = req.field(name) else { continue };
            match Json::parse(raw) {
                Ok(value) => self.walk(name, &value, false),
                // Nothing that an engine would take, but the same again is still the same.
                Err(_) => self.push(raw, false),
            }
        }
    }

    /// Queries and documents: an engine reads a single query once with each document.
    fn pairs(&mut self, req: &InferenceRequest) {
        self.fields(req, &["query", "queries", "text_1", "data_1"]);
        let query = self.text;
        self.fields(req, &["documents", "items", "text_2", "data_2"]);
        let documents = ["documents", "items", "text_2", "data_2"]
            .iter()
            .filter_map(|name| Json::parse(req.field(name)?).ok())
            .filter_map(|value| value.as_array().map(<[_]>::len))
            .sum::<usize>();
        self.text = self
            .text
            .saturating_add(query.saturating_mul(documents.saturating_sub(1)));
    }

    /// Every string in it, in its order. The depth is bounded by the reader's.
    fn walk(&mut self, key: &str, value: &Json<'_>, media: bool) {
        let media = media || MEDIA_KEYS.contains(&key);
        match value {
            Json::Str(s) => {
                self.media += u32::from(media);
                self.push(s.as_bytes(), media);
            }
            Json::Array(items) => items.iter().for_each(|v| self.walk("", v, media)),
            Json::Object(pairs) => pairs.iter().for_each(|(k, v)| self.walk(k, v, media)),
            Json::Int(i) => self.push(i.to_string().as_bytes(), media),
            Json::BigInt(s) => self.push(s.as_bytes(), media),
            Json::Float(f) => self.push(f.to_string().as_bytes(), media),
            Json::Bool(_) | Json::Null => {}
        }
    }

    fn push(&mut self, bytes: &[u8], media: bool) {
        self.prefix.extend_from_slice(bytes);
        self.prefix.push(0);
        if !media {
            self.text = self.text.saturating_add(bytes.len());
        }
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
            bytes(&request(Api::Chat, short)),
            bytes(&request(Api::Chat, long)),
        );
        assert!(long.prefix.starts_with(&short.prefix));
        assert!(!short.prefix.is_empty());
        assert!(long.text > short.text);
    }

    #[test]
    fn media_identifies_but_is_no_text() {
        let of = |url: &str| {
            bytes(&request(
                Api::Chat,
                &format!(
                    r#"{{"messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"{url}"}}}},{{"type":"text","text":"what"}}]}}]}}"#
                ),
            ))
        };
        let (a, b) = (
            of("data:image/png;base64,AAAA"),
            of("data:image/png;base64,BBBBBBBB"),
        );
        assert_ne!(a.prefix, b.prefix);
        assert_eq!((a.text, a.media), (b.text, 1));
    }

    #[test]
    fn a_query_counts_with_each_document() {
        let one = bytes(&request(
            Api::Rerank,
            r#"{"query":"qqqq","documents":["d"]}"#,
        ));
        let three = bytes(&request(
            Api::Rerank,
            r#"{"query":"qqqq","documents":["d","d","d"]}"#,
        ));
        assert_eq!(one.text, 5);
        assert_eq!(three.text, 15);
    }

    #[test]
    fn odd_bodies_are_no_trouble() {
        for api in [
            Api::Chat,
            Api::Completions,
            Api::Responses,
            Api::Messages,
            Api::Embeddings,
            Api::Score,
            Api::Rerank,
            Api::Audio,
            Api::Other,
        ] {
            for body in [
                "{}",
                r#"{"messages":5,"prompt":{},"input":null,"documents":"x"}"#,
            ] {
                let req = request(api, body);
                let _ = (ids(&req), bytes(&req));
            }
        }
    }
}
