//! Reads requests as vLLM reads them, and refuses what it refuses.

use super::Inner;
use crate::Prompt;
use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tower_ttft::peek::{self, Api};

/// A request for an answer.
pub(super) struct Ask {
    pub(super) prompt: Arc<Prompt>,
    pub(super) output: u32,
    /// Why the answer ends.
    pub(super) finish: &'static str,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) continuous_usage: bool,
    pub(super) request_id: Option<String>,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<&'static str>,
}

#[derive(Deserialize)]
struct Fields {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    messages: Option<Value>,
    #[serde(default)]
    prompt: Option<Value>,
    #[serde(default)]
    max_tokens: Option<i64>,
    #[serde(default)]
    max_completion_tokens: Option<i64>,
    #[serde(default)]
    n: Option<u32>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    stream_options: Option<StreamOptions>,
    #[serde(default)]
    request_id: Option<String>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: Option<bool>,
    #[serde(default)]
    continuous_usage_stats: Option<bool>,
}

// === impl Refusal ===

impl Refusal {
    fn bad(message: impl Into<String>, param: Option<&'static str>) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError",
            message: message.into(),
            param,
        }
    }

    /// What FastAPI finds before vLLM sees the request.
    fn invalid(what: impl std::fmt::Display, param: Option<&'static str>) -> Self {
        Self {
            kind: "Bad Request",
            ..Self::bad(format!("1 validation error:\n  {what}"), param)
        }
    }

    pub(super) fn busy() -> Self {
        Self {
            status: StatusCode::SERVICE_UNAVAILABLE,
            kind: "ServiceUnavailableError",
            ..Self::bad(
                "The prompt and its answer do not fit into the KV cache.",
                None,
            )
        }
    }

    pub(super) fn body(&self) -> String {
        let code = self.status.as_u16();
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": code}})
            .to_string()
    }
}

/// Reads the body of a chat or a completion.
pub(super) fn read(
    inner: &Inner,
    api: Api,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Ask, Refusal> {
    let fields = fields(headers, &body)?;
    check_model(inner, &fields)?;
    if fields.n.unwrap_or(1) != 1 {
        return Err(Refusal::bad(
            "The simulated engine gives one choice.",
            Some("n"),
        ));
    }
    let stream = fields.stream.unwrap_or(false);
    if fields.stream_options.is_some() && !stream {
        return Err(Refusal::bad(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            Some("stream_options"),
        ));
    }
    let asked = fields.max_completion_tokens.or(fields.max_tokens);
    if let Some(n) = asked.filter(|n| *n < 1) {
        let message =
            format!("max_tokens must be at least 1, got {n}. (parameter=max_tokens, value={n})");
        return Err(Refusal::bad(message, Some("max_tokens")));
    }
    let prompt = prompt(inner, api, headers, body, &fields)?;
    let (tokens, limit) = (prompt.tokens(), inner.max_model_len);
    if tokens >= limit {
        let message = format!(
            "This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} input \
             tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input \
             prompt. (parameter=input_tokens, value={tokens})"
        );
        return Err(Refusal::bad(message, Some("input_tokens")));
    }
    let most = i64::from(limit - tokens);
    let (output, finish) = match asked {
        Some(n) => (n.min(most), "length"),
        // Where a model would have found an end by itself.
        None => (i64::from(inner.default_output).min(most), "stop"),
    };
    let options = fields.stream_options.as_ref();
    Ok(Ask {
        prompt,
        output: u32::try_from(output).unwrap_or(1),
        finish,
        stream,
        include_usage: options.and_then(|o| o.include_usage) == Some(true),
        continuous_usage: options.and_then(|o| o.continuous_usage_stats) == Some(true),
        request_id: fields.request_id,
    })
}

/// The ids of `/tokenize` and of the render endpoints.
pub(super) fn tokens(
    inner: &Inner,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Arc<Prompt>, Refusal> {
    let fields = fields(headers, &body)?;
    check_model(inner, &fields)?;
    let api = match fields.messages {
        Some(_) => Api::Chat,
        None => Api::Completions,
    };
    prompt(inner, api, headers, body, &fields)
}

fn fields(headers: &HeaderMap, body: &[u8]) -> Result<Fields, Refusal> {
    let json = headers
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .is_some_and(|v| v.trim_start().starts_with("application/json"));
    if !json {
        return Err(Refusal::invalid(
            "Unsupported Media Type: Only 'application/json' is allowed",
            None,
        ));
    }
    if body.is_empty() {
        return Err(Refusal::invalid(
            "{'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}",
            Some("body"),
        ));
    }
    serde_json::from_slice(body).map_err(|e| Refusal::invalid(e, Some("body")))
}

fn check_model(inner: &Inner, fields: &Fields) -> Result<(), Refusal> {
    match fields.model.as_deref() {
        None | Some("") => Ok(()),
        Some(model) if model == &*inner.model => Ok(()),
        Some(model) => Err(Refusal {
            status: StatusCode::NOT_FOUND,
            kind: "NotFoundError",
            message: format!(
                "The model `{model}` does not exist. Valid aliases: {}.",
                inner.model
            ),
            param: Some("model"),
        }),
    }
}

fn prompt(
    inner: &Inner,
    api: Api,
    headers: &HeaderMap,
    body: Bytes,
    fields: &Fields,
) -> Result<Arc<Prompt>, Refusal> {
    let (given, missing) = match api {
        Api::Chat => (&fields.messages, "messages"),
        _ => (&fields.prompt, "prompt"),
    };
    let Some(given) = given else {
        let what =
            format!("{{'type': 'missing', 'loc': 'body.{missing}', 'msg': 'Field required'}}");
        return Err(Refusal::invalid(what, Some("body")));
    };
    if let (Api::Completions, Value::Array(ids)) = (api, given) {
        let ids: Option<Vec<u32>> = ids
            .iter()
            .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
            .collect();
        return match ids {
            Some(ids) if !ids.is_empty() => Ok(Arc::new(Prompt::new(ids, 0))),
            _ => Err(Refusal::bad(
                "The simulated engine takes one prompt, a text or token ids.",
                Some("prompt"),
            )),
        };
    }
    let request = peek::read(api, headers, body);
    let refuse = |reason| Refusal::bad(format!("The prompt cannot be rendered: {reason:?}"), None);
    let rendered = inner.tokenizer.render(&request).map_err(refuse)?;
    let [text] = rendered.texts.as_slice() else {
        return Err(Refusal::bad(
            "The simulated engine takes one prompt.",
            Some("prompt"),
        ));
    };
    let ids = inner.tokenizer.tokenize(text).map_err(refuse)?;
    if ids.is_empty() {
        return Err(Refusal::bad("The prompt is empty.", Some("prompt")));
    }
    Ok(Arc::new(Prompt::new(ids, text.text.len() as u32)))
}
