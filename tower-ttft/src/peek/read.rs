//! From a whole body to what is known of the request.

use super::{
    coerce,
    json::{self, Field},
    multipart,
    request::{Api, BodyRead, InferenceRequest},
};
use bytes::Bytes;
use http::{HeaderMap, header};
use std::sync::Arc;

/// The keys that policies act on.
const CONTROLLED: [&str; 3] = ["model", "cache_salt", "priority"];

/// Reads a whole body. Never fails: what cannot be read says so in [`InferenceRequest::read`].
///
/// The cost is one pass over the body; nothing of it is copied but the keys and the few values kept.
pub fn read(api: Api, headers: &HeaderMap, body: Bytes) -> InferenceRequest {
    if is_encoded(headers) {
        return InferenceRequest::unread(api, BodyRead::Encoded);
    }
    if body.is_empty() {
        return InferenceRequest::unread(api, BodyRead::Empty);
    }
    if let Some(boundary) = multipart::boundary(headers) {
        return read_form(api, &boundary, body);
    }
    let mut req = match json::fields(&body) {
        Ok(fields) => read_fields(api, &body, fields),
        Err(_) => InferenceRequest::unread(api, BodyRead::Unreadable),
    };
    req.body = body;
    req
}

/// Whether a body has to be decoded before it can be read, which is not done: vLLM refuses such bodies.
pub(super) fn is_encoded(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::CONTENT_ENCODING)
        .iter()
        .any(|v| !v.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity"))
}

fn read_fields(api: Api, body: &[u8], fields: Vec<Field<'_>>) -> InferenceRequest {
    let mut req = InferenceRequest::unread(api, BodyRead::Parsed);
    req.duplicates = CONTROLLED
        .into_iter()
        .filter(|name| fields.iter().filter(|f| f.key == *name).count() > 1)
        .collect();
    req.fields = last_of_each(fields);
    let field = |name: &str| {
        let (_, range) = req.fields.iter().find(|(key, _)| &**key == name)?;
        body.get(range.clone())
    };
    let text = |name| {
        let text = field(name).and_then(coerce::string)?;
        (!text.is_empty()).then(|| Arc::from(text))
    };
    let int = |name| field(name).and_then(coerce::integer);
    let model = text("model");
    let cache_salt = text("cache_salt");
    let stream = field("stream").and_then(coerce::boolean);
    let include_usage = field("stream_options").and_then(include_usage);
    let max_tokens = max_tokens_names(api)
        .iter()
        .find_map(|name| int(name))
        .filter(|n| *n > 0);
    let n = int("n").filter(|n| *n > 0);
    let priority = int("priority");
    req.model = model;
    req.cache_salt = cache_salt;
    req.stream = stream.unwrap_or(false);
    req.include_usage = include_usage.unwrap_or(false);
    req.max_tokens = max_tokens.map(|n| u64::try_from(n).unwrap_or(u64::MAX));
    req.n = n.map_or(1, |n| u32::try_from(n).unwrap_or(u32::MAX));
    req.priority = priority.and_then(|p| i64::try_from(p).ok());
    req
}

/// What an API calls its output budget. In chats the older name counts only where the newer one is missing or null.
fn max_tokens_names(api: Api) -> &'static [&'static str] {
    match api {
        Api::Chat => &["max_completion_tokens", "max_tokens"],
        Api::Responses => &["max_output_tokens"],
        Api::Completions | Api::Messages => &["max_tokens"],
        _ => &[],
    }
}

/// `stream_options.include_usage`, of equal keys the last.
fn include_usage(options: &[u8]) -> Option<bool> {
    let fields = json::fields(options).ok()?;
    let field = fields.iter().rev().find(|f| f.key == "include_usage")?;
    coerce::boolean(options.get(field.value.clone())?)
}

/// Keeps the last occurrence of each key, in the order of the body. Sorting keeps a body of thousands of equal keys
/// from costing their square.
fn last_of_each(mut fields: Vec<Field<'_>>) -> Arc<[(Box<str>, std::ops::Range<usize>)]> {
    fields.sort_by(|a, b| a.key.cmp(&b.key).then(b.value.start.cmp(&a.value.start)));
    fields.dedup_by(|later, first| later.key == first.key);
    fields.sort_by_key(|f| f.value.start);
    fields
        .into_iter()
        .map(|f| (f.key.into_owned().into_boxed_str(), f.value))
        .collect()
}

/// A form: of equal fields the last counts, as in Starlette.
fn read_form(api: Api, boundary: &[u8], body: Bytes) -> InferenceRequest {
    let form = multipart::fields(&body, boundary, &["model", "stream"]);
    let mut req = InferenceRequest::unread(api, BodyRead::Parsed);
    let last = |name| form.iter().rev().find(|(n, _)| *n == name).map(|(_, v)| *v);
    req.model = last("model")
        .and_then(|v| std::str::from_utf8(v).ok())
        .filter(|v| !v.is_empty())
        .map(Arc::from);
    req.stream = last("stream").is_some_and(|v| {
        std::str::from_utf8(v)
            .ok()
            .and_then(coerce::boolean_text)
            .unwrap_or(false)
    });
    if form.iter().filter(|(n, _)| *n == "model").count() > 1 {
        req.duplicates.push("model");
    }
    req.body = body;
    req
}

#[cfg(test)]
mod tests;
