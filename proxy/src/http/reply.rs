//! Answers that are made here: errors in the shape of the API that was asked.

use super::{Body, headers::X_DROPPED_REASON};
use bytes::Bytes;
use http::{
    HeaderValue, Response, StatusCode,
    header::{ALLOW, CONTENT_TYPE, RETRY_AFTER},
};
use http_body_util::{BodyExt, Full};
use serde_json::json;
use std::time::Duration;
use tower_ttft::peek::Api;

/// An error for a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The status.
    pub status: StatusCode,
    /// A word for machines; also the dropped reason.
    pub code: &'static str,
    /// What is wrong and what helps. Nothing of the prompt.
    pub message: String,
    /// The field that is wrong.
    pub param: Option<&'static str>,
    /// When it may be tried again.
    pub retry_after: Option<Duration>,
    /// Methods that would do.
    pub allow: Option<&'static str>,
}

// === impl Reply ===

impl Reply {
    /// An error with a message.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            param: None,
            retry_after: None,
            allow: None,
        }
    }

    /// The same, about this field.
    pub fn param(self, param: &'static str) -> Self {
        Self {
            param: Some(param),
            ..self
        }
    }

    /// The same, to be tried again later.
    pub fn retry_after(self, after: Duration) -> Self {
        Self {
            retry_after: Some(after),
            ..self
        }
    }

    /// The whole answer.
    pub fn into_response(self, api: Api) -> Response<Body> {
        let body = Full::new(Bytes::from(self.json(api).to_string()));
        let mut response = Response::new(body.map_err(|never| match never {}).boxed_unsync());
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(X_DROPPED_REASON, HeaderValue::from_static(self.code));
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if let Some(allow) = self.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        response
    }

    /// The event by which a stream of this API says the same, when its head is out already. `sequence` counts the
    /// stream's events, `response` is the id of the response they belong to.
    pub fn into_event(self, api: Api, sequence: u64, response: Option<&str>) -> Bytes {
        let event = match api {
            Api::Messages => format!("event: error\ndata: {}\n\n", self.json(api)),
            // https://platform.openai.com/docs/api-reference/responses-streaming/response/failed
            Api::Responses => format!(
                "event: response.failed\ndata: {}\n\n",
                json!({
                    "type": "response.failed",
                    "sequence_number": sequence,
                    "response": {
                        "id": response,
                        "object": "response",
                        "status": "failed",
                        "error": {"code": "server_error", "message": self.message},
                        "output": [],
                    },
                })
            ),
            _ => format!("data: {}\n\n", self.json(api)),
        };
        event.into()
    }

    fn json(&self, api: Api) -> serde_json::Value {
        match api {
            // https://docs.anthropic.com/en/api/errors
            Api::Messages => json!({
                "type": "error",
                "error": {"type": self.anthropic_type(), "message": self.message},
            }),
            // https://platform.openai.com/docs/guides/error-codes
            _ => json!({
                "error": {
                    "message": self.message,
                    "type": self.openai_type(),
                    "param": self.param,
                    "code": self.code,
                },
            }),
        }
    }

    fn openai_type(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            s if s.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn anthropic_type(&self) -> &'static str {
        match self.status {
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            s if s.is_server_error() => "api_error",
            _ => "invalid_request_error",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn body(reply: Reply, api: Api) -> (http::response::Parts, serde_json::Value) {
        let (parts, body) = reply.into_response(api).into_parts();
        let bytes = body
            .collect()
            .now_or_never()
            .expect("it is all here")
            .expect("it cannot fail")
            .to_bytes();
        (parts, serde_json::from_slice(&bytes).expect("JSON"))
    }

    #[test]
    fn shapes() {
        let reply = Reply::new(StatusCode::NOT_FOUND, "model_not_found", "no").param("model");
        let (parts, json) = body(reply.clone(), Api::Chat);
        assert_eq!(parts.status, 404);
        assert_eq!(parts.headers[X_DROPPED_REASON], "model_not_found");
        assert_eq!(parts.headers[CONTENT_TYPE], "application/json");
        assert_eq!(
            json,
            json!({"error": {"message": "no", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}})
        );
        let (_, json) = body(reply, Api::Messages);
        assert_eq!(
            json,
            json!({"type": "error", "error": {"type": "not_found_error", "message": "no"}})
        );
    }

    #[test]
    fn retry_after_is_whole_seconds() {
        for (after, header) in [(0, "1"), (900, "1"), (1000, "1"), (1001, "2"), (5000, "5")] {
            let reply = Reply::new(StatusCode::SERVICE_UNAVAILABLE, "x", "y")
                .retry_after(Duration::from_millis(after));
            let (parts, _) = body(reply, Api::Chat);
            assert_eq!(parts.headers[RETRY_AFTER], header);
        }
    }

    /// A10: each family's own last event.
    #[test]
    fn events() {
        let reply = Reply::new(StatusCode::BAD_GATEWAY, "endpoint_failed", "gone");
        let text = |api| {
            let event = reply.clone().into_event(api, 7, Some("resp_1"));
            String::from_utf8(event.to_vec()).expect("text")
        };
        assert_eq!(
            text(Api::Chat),
            "data: {\"error\":{\"message\":\"gone\",\"type\":\"server_error\",\"param\":null,\"code\":\"endpoint_failed\"}}\n\n"
        );
        assert_eq!(text(Api::Completions), text(Api::Chat));
        assert_eq!(
            text(Api::Messages),
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"gone\"}}\n\n"
        );
        let responses = text(Api::Responses);
        assert!(responses.starts_with("event: response.failed\ndata: {\"type\":\"response.failed\",\"sequence_number\":7,\"response\":{\"id\":\"resp_1\","), "{responses}");
    }
}
