//! What an event or a JSON answer of an engine says.

use super::{sse::SseEvent, usage::UsageParts};
use crate::peek::{Api, json};
use std::fmt;

/// What an event is, above all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// No data: comments, `retry`.
    Comment,
    /// Part of the answer, but nothing generated yet: a role, a message's start, an empty delta.
    Empty,
    /// Generated content, reasoning, or a tool call.
    Token,
    /// The engine failed.
    Error(EngineError),
    /// Every choice is empty and one was aborted: how a draining engine refuses. Telling only before the first token.
    AbortEmpty,
    /// Nothing but usage.
    Usage,
    /// The end that the protocol asks for.
    Terminal,
    /// Nothing known.
    Other,
}

/// An event's kind and the usage that may come with any kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Classified {
    /// What it is.
    pub kind: EventKind,
    /// The usage in it.
    pub usage: Option<UsageParts>,
}

/// An engine's error. Its message may quote the request and is kept out of `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct EngineError {
    /// The status that the engine gives it.
    pub code: Option<u16>,
    /// Its type, `InternalServerError` for example.
    pub kind: Option<Box<str>>,
    /// What the engine says; empty if it says nothing.
    pub message: Box<str>,
}

/// Reads an event of a stream of `api`.
pub fn classify_event(api: Api, event: &SseEvent<'_>) -> Classified {
    let Some(data) = event.data() else {
        return EventKind::Comment.into();
    };
    if data.trim_ascii() == b"[DONE]" {
        return match api {
            // These end with an event of their own; behind it this says nothing, without it it does not count.
            Api::Responses | Api::Messages => EventKind::Other.into(),
            _ => EventKind::Terminal.into(),
        };
    }
    let mut classified = classify_json(&data);
    if event.name() == Some(b"error") && !matches!(classified.kind, EventKind::Error(_)) {
        classified.kind = EventKind::Error(EngineError::unknown());
    }
    classified
}

/// Reads the JSON of an event, or of a whole answer that does not stream.
pub fn classify_json(data: &[u8]) -> Classified {
    let Ok(fields) = json::fields(data) else {
        return EventKind::Other.into();
    };
    let field = |name: &str| {
        let field = fields.iter().rev().find(|f| f.key == name)?;
        data.get(field.value.clone()).filter(|v| *v != b"null")
    };
    let kind = field("type").and_then(text).unwrap_or_default();
    let response = field("response");
    // Where the APIs put it: chat, completions and a message's later parts; a message's start; the end of responses.
    let usage = field("usage")
        .or_else(|| json::member(field("message")?, "usage"))
        .or_else(|| json::member(response?, "usage"))
        .and_then(UsageParts::read);
    let error = field("error").or_else(|| json::member(response?, "error"));
    let kind = if let Some(error) = error {
        EventKind::Error(EngineError::read(error))
    } else if kind == "error"
        || kind == "response.failed"
        || field("object").and_then(text).as_deref() == Some("error")
    {
        EventKind::Error(EngineError::read(data))
    } else if let Some(choices) = field("choices") {
        classify_choices(choices, usage.is_some())
    } else {
        classify_typed(&kind, &field)
    };
    Classified { kind, usage }
}

/// `choices` of chat and completions, streamed (`delta`) or not (`message`).
fn classify_choices(choices: &[u8], usage: bool) -> EventKind {
    let Ok(choices) = json::items(choices) else {
        return EventKind::Other;
    };
    if choices.is_empty() && usage {
        return EventKind::Usage;
    }
    let mut aborted = false;
    for choice in choices {
        let Ok(fields) = json::fields(choice) else {
            continue;
        };
        for field in &fields {
            let Some(value) = choice.get(field.value.clone()) else {
                continue;
            };
            match &*field.key {
                "text" | "token_ids" if !is_empty(value) => return EventKind::Token,
                "delta" | "message" if holds_content(value) => return EventKind::Token,
                "finish_reason" => aborted |= value == b"\"abort\"",
                _ => {}
            }
        }
    }
    if aborted {
        EventKind::AbortEmpty
    } else {
        EventKind::Empty
    }
}

/// Whether a chat's `delta` or `message` holds anything generated.
fn holds_content(delta: &[u8]) -> bool {
    const GENERATED: [&str; 7] = [
        "content",
        "reasoning",
        "reasoning_content",
        "refusal",
        "tool_calls",
        "function_call",
        "audio",
    ];
    let Ok(fields) = json::fields(delta) else {
        return false;
    };
    fields.iter().any(|f| {
        GENERATED.contains(&&*f.key) && delta.get(f.value.clone()).is_some_and(|v| !is_empty(v))
    })
}

/// Events that say their type: responses and messages.
fn classify_typed<'a>(kind: &str, field: &impl Fn(&str) -> Option<&'a [u8]>) -> EventKind {
    let filled = |value: Option<&[u8]>| {
        if value.is_some_and(|v| !is_empty(v)) {
            EventKind::Token
        } else {
            EventKind::Empty
        }
    };
    match kind {
        "response.completed" | "response.incomplete" | "message_stop" => EventKind::Terminal,
        // A tool's call begins with its name, before any of its arguments.
        "response.output_item.added" => match field("item")
            .and_then(|item| json::member(item, "type"))
            .and_then(text)
            .as_deref()
        {
            Some("function_call" | "custom_tool_call" | "mcp_call") => EventKind::Token,
            _ => EventKind::Empty,
        },
        kind if kind.starts_with("response.") && kind.ends_with(".delta") => filled(field("delta")),
        kind if kind.starts_with("response.") => EventKind::Empty,
        "message_start" | "content_block_stop" => EventKind::Empty,
        "content_block_start" => {
            let Some(block) = field("content_block") else {
                return EventKind::Empty;
            };
            match json::member(block, "type").and_then(text).as_deref() {
                Some("text" | "thinking") => {
                    filled(json::member(block, "text").or_else(|| json::member(block, "thinking")))
                }
                _ => EventKind::Token,
            }
        }
        "content_block_delta" => {
            let delta = field("delta").unwrap_or_default();
            filled(
                ["text", "thinking", "partial_json"]
                    .into_iter()
                    .find_map(|name| json::member(delta, name)),
            )
        }
        "message_delta" => EventKind::Usage,
        _ => EventKind::Other,
    }
}

/// Null, `""`, `[]` or `{}`.
fn is_empty(raw: &[u8]) -> bool {
    match raw {
        b"null" => true,
        [b'"', inside @ .., b'"'] => inside.is_empty(),
        [b'[', inside @ .., b']'] | [b'{', inside @ .., b'}'] => inside.trim_ascii().is_empty(),
        _ => false,
    }
}

fn text(raw: &[u8]) -> Option<std::borrow::Cow<'_, str>> {
    json::unescape(raw.strip_prefix(b"\"")?.strip_suffix(b"\"")?).ok()
}

// === impl Classified ===

impl From<EventKind> for Classified {
    fn from(kind: EventKind) -> Self {
        Self { kind, usage: None }
    }
}

// === impl EngineError ===

impl EngineError {
    /// An error that says nothing.
    pub fn unknown() -> Self {
        Self {
            code: None,
            kind: None,
            message: "".into(),
        }
    }

    /// Reads what stands at `error`, an object or a text.
    pub fn read(raw: &[u8]) -> Self {
        if let Some(message) = text(raw) {
            return Self {
                message: message.into(),
                ..Self::unknown()
            };
        }
        // A number, or a number in a text.
        let code = json::member(raw, "code").and_then(|code| {
            let digits = std::str::from_utf8(code).ok()?;
            digits.trim_matches('"').parse().ok()
        });
        let words = |name| json::member(raw, name).and_then(text);
        Self {
            code,
            kind: words("type").map(Into::into),
            message: words("message").unwrap_or_default().into(),
        }
    }
}

impl fmt::Debug for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineError")
            .field("code", &self.code)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
