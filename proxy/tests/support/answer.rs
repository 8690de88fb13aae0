//! The answers of vLLM, in its own bytes.

use super::engine::Step;
use bytes::Bytes;
use std::time::Duration;

/// vLLM's words when its engine process died.
pub const ENGINE_CORE: &str =
    "EngineCore encountered an issue. See stack trace (above) for the root cause.";
/// vLLM's words while it drains.
pub const DRAINING: &str = "cannot schedule new futures after shutdown";
/// vLLM's words when its queue is full.
pub const BUSY: &str = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance.";

/// A head with these fields.
pub fn head(status: &str, fields: &[&str]) -> Step {
    let mut text = format!("HTTP/1.1 {status}\r\n");
    for field in fields {
        text.push_str(field);
        text.push_str("\r\n");
    }
    text.push_str("\r\n");
    Step::Write(text.into())
}

/// The head of a stream.
pub fn sse_head() -> Step {
    head(
        "200 OK",
        &[
            "server: uvicorn",
            "content-type: text/event-stream; charset=utf-8",
            "transfer-encoding: chunked",
        ],
    )
}

/// One chunk of a chunked body.
pub fn chunk(data: impl AsRef<[u8]>) -> Step {
    let data = data.as_ref();
    let mut bytes = format!("{:x}\r\n", data.len()).into_bytes();
    bytes.extend_from_slice(data);
    bytes.extend_from_slice(b"\r\n");
    Step::Write(bytes.into())
}

/// The end of a chunked body.
pub fn end() -> Step {
    Step::Write(Bytes::from_static(b"0\r\n\r\n"))
}

/// A pause in milliseconds.
pub fn pause(millis: u64) -> Step {
    Step::Sleep(Duration::from_millis(millis))
}

/// An event of a chat stream.
pub fn chat_event(text: &str) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"tiny\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":{}}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n",
        serde_json::Value::from(text)
    )
}

/// The event by which vLLM says that a request was aborted before it began.
pub fn abort_event() -> String {
    "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1,\"model\":\"tiny\",\"choices\":[{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"abort\",\"stop_reason\":null}]}\n\n".to_owned()
}

/// The event that carries usage.
pub fn usage_event(prompt: u32, completion: u32, cached: u32) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"tiny\",\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{},\"completion_tokens\":{completion},\"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}}}}}\n\n",
        prompt + completion
    )
}

/// An error event in vLLM's words.
pub fn error_event(message: &str) -> String {
    format!(
        "data: {{\"error\": {{\"message\": \"{message}\", \"type\": \"InternalServerError\", \"param\": null, \"code\": 500}}}}\n\n"
    )
}

/// The end of a stream.
pub const DONE: &str = "data: [DONE]\n\n";

/// A whole stream of these texts.
pub fn chat_stream(texts: &[&str]) -> Vec<Step> {
    let mut steps = vec![sse_head()];
    steps.extend(texts.iter().map(|text| chunk(chat_event(text))));
    steps.push(chunk(usage_event(13, texts.len() as u32, 0)));
    steps.push(chunk(DONE));
    steps.push(end());
    steps
}

/// A whole JSON answer.
pub fn json(status: &str, body: impl AsRef<str>) -> Vec<Step> {
    let body = body.as_ref();
    vec![
        head(
            status,
            &[
                "server: uvicorn",
                &format!("content-length: {}", body.len()),
                "content-type: application/json",
            ],
        ),
        Step::Write(body.to_owned().into()),
    ]
}

/// An error in vLLM's shape.
pub fn error(status: &str, message: &str) -> Vec<Step> {
    let code = &status[..3];
    json(
        status,
        format!(
            "{{\"error\":{{\"message\":\"{message}\",\"type\":\"InternalServerError\",\"param\":null,\"code\":{code}}}}}"
        ),
    )
}

/// A chat answer that does not stream.
pub fn chat_json(text: &str) -> String {
    format!(
        "{{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"tiny\",\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":{}}},\"logprobs\":null,\"finish_reason\":\"stop\"}}],\"usage\":{{\"prompt_tokens\":13,\"total_tokens\":14,\"completion_tokens\":1}}}}",
        serde_json::Value::from(text)
    )
}
