//! Where a request belongs, by its path alone.
//!
//! A closed list: what is not on it is never forwarded. Paths are compared as they are; spellings that a server
//! might resolve to another path (dot segments, doubled slashes, percent escapes) are on no list and so answer 404.
//! Engine routes that change the engine (`/sleep`, `/reset_prefix_cache`, `/v1/load_lora_adapter`…), show its inside
//! (`/server_info`, `/metrics`) or reach inference by a side door (`/invocations`) are left out on purpose.

use http::Method;
use tower_ttft::peek::Api;

/// What is done with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// It runs a model: peeked, encoded, sent where its first token comes soonest.
    Inference(Api),
    /// Any engine of its model can answer: sent by load alone.
    Plain,
    /// The path is known, the method is not; what it allows.
    WrongMethod(&'static str),
    /// Never forwarded.
    Unknown,
}

/// Paths that run a model, and the API they speak.
const INFERENCE: &[(&str, Api)] = &[
    ("/v1/chat/completions", Api::Chat),
    ("/v1/completions", Api::Completions),
    ("/v1/responses", Api::Responses),
    ("/v1/messages", Api::Messages),
    ("/v1/embeddings", Api::Embeddings),
    ("/pooling", Api::Embeddings),
    ("/classify", Api::Other),
    ("/score", Api::Score),
    ("/v1/score", Api::Score),
    ("/rerank", Api::Rerank),
    ("/v1/rerank", Api::Rerank),
    ("/v2/rerank", Api::Rerank),
    ("/v1/audio/transcriptions", Api::Audio),
    ("/v1/audio/translations", Api::Audio),
];

/// Paths that any engine can answer without running the model.
const PLAIN_POST: &[&str] = &[
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
];

/// Paths that only read.
const PLAIN_GET: &[&str] = &["/health", "/ping", "/version", "/v1/models"];

// === impl Route ===

impl Route {
    /// The route of a method and a path (without the query).
    pub fn of(method: &Method, path: &str) -> Self {
        let allowed = if let Some((_, api)) = INFERENCE.iter().find(|(p, _)| *p == path) {
            if method == Method::POST {
                return Self::Inference(*api);
            }
            "POST, OPTIONS"
        } else if PLAIN_POST.contains(&path) {
            if method == Method::POST {
                return Self::Plain;
            }
            "POST, OPTIONS"
        } else if PLAIN_GET.contains(&path) {
            if method == Method::GET || method == Method::HEAD {
                return Self::Plain;
            }
            "GET, HEAD, OPTIONS"
        } else {
            return Self::Unknown;
        };
        if method == Method::OPTIONS {
            // CORS preflights: whether other origins may call is the engine's to say.
            return Self::Plain;
        }
        Self::WrongMethod(allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes() {
        use Route::*;
        for (method, path, route) in [
            (Method::POST, "/v1/chat/completions", Inference(Api::Chat)),
            (Method::POST, "/v1/completions", Inference(Api::Completions)),
            (Method::POST, "/v2/rerank", Inference(Api::Rerank)),
            (Method::POST, "/tokenize", Plain),
            (Method::GET, "/health", Plain),
            (Method::HEAD, "/health", Plain),
            (Method::OPTIONS, "/v1/chat/completions", Plain),
            (
                Method::GET,
                "/v1/chat/completions",
                WrongMethod("POST, OPTIONS"),
            ),
            (Method::POST, "/version", WrongMethod("GET, HEAD, OPTIONS")),
            (Method::GET, "/", Unknown),
        ] {
            assert_eq!(Route::of(&method, path), route, "{method} {path}");
        }
    }

    /// I11: engine routes that are no business of clients.
    #[test]
    fn admin_routes_are_unknown() {
        for path in [
            "/reset_prefix_cache",
            "/reset_mm_cache",
            "/sleep",
            "/wake_up",
            "/is_sleeping",
            "/collective_rpc",
            "/server_info",
            "/pause",
            "/resume",
            "/metrics",
            "/load",
            "/invocations",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/start_profile",
            "/kv_event_sources",
            "/openapi.json",
            "/docs",
        ] {
            for method in [Method::GET, Method::POST, Method::PUT, Method::DELETE] {
                assert_eq!(Route::of(&method, path), Route::Unknown, "{method} {path}");
            }
        }
    }

    /// I12: other spellings of known paths.
    #[test]
    fn spellings_are_unknown() {
        for path in [
            "/v1//chat/completions",
            "//v1/chat/completions",
            "/v1/../invocations",
            "/v1/chat/../chat/completions",
            "/v1/chat/completions/",
            "/v1/chat/completions;x",
            "/V1/chat/completions",
            "/v1/chat%2Fcompletions",
            "/v1/%63hat/completions",
            "/v1/./chat/completions",
            "/%2e%2e/sleep",
            "",
            "*",
        ] {
            assert_eq!(Route::of(&Method::POST, path), Route::Unknown, "{path}");
        }
    }
}
