//! What this proxy answers by itself on the clients' port: the models that it serves, and whether it can.
//!
//! - `GET /v1/models`: all models of all pools in OpenAI's shape: declared ones whether or not an endpoint is ready
//!   (their existence must not depend on what this process has seen), aliases, and what engines add (their other names,
//!   adapters). `max_model_len` is the smallest among the engines that say one.
//! - `GET /v1/models/{id}`: one of them.
//! - `GET /health`: `200` if at least one endpoint of any pool is ready and the process is not stopping, else `503`.
//!   For load balancers that look at the port they send to; an operator's probes belong on the admin port.

use crate::{
    http::{Local, Models},
    server::drain::{Draining, Phase},
};
use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderValue, Method, Response, StatusCode, header, request::Parts};
use serde_json::{Value, json};
use std::{borrow::Cow, collections::BTreeMap, sync::Arc};
use tower_ttft::vllm::Model;

/// The answers about models, ready to send.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Catalog {
    list: Bytes,
    models: BTreeMap<Arc<str>, Bytes>,
}

/// A name that clients may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Served {
    pub(super) id: Arc<str>,
    /// What it is another name of, or an adapter on.
    pub(super) parent: Option<Arc<str>>,
    pub(super) root: Option<Arc<str>>,
    pub(super) max_model_len: Option<u32>,
}

/// Answers on the clients' port.
pub struct Answers {
    catalog: Arc<ArcSwap<Catalog>>,
    models: Arc<ArcSwap<Models>>,
    draining: Draining,
}

// === impl Served ===

impl Served {
    pub(super) fn named(id: &Arc<str>) -> Self {
        Self {
            id: id.clone(),
            parent: None,
            root: None,
            max_model_len: None,
        }
    }

    /// Adds what an engine says of it.
    pub(super) fn learn(&mut self, model: &Model) {
        if self.parent.is_none() {
            self.parent.clone_from(&model.parent);
        }
        if self.root.is_none() {
            self.root.clone_from(&model.root);
        }
        self.max_model_len = match (self.max_model_len, model.max_model_len) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
}

// === impl Catalog ===

impl Catalog {
    /// `created` is one time for all, in seconds since the epoch: engines say the time of the question, which is no
    /// use to anyone.
    pub(super) fn new(served: &[Served], created: u64) -> Self {
        let all: Vec<_> = served
            .iter()
            .map(|s| {
                let model = json!({
                    "id": s.id,
                    "object": "model",
                    "created": created,
                    "owned_by": "forebay",
                    "root": s.root.as_ref().unwrap_or(&s.id),
                    "parent": s.parent,
                    "max_model_len": s.max_model_len,
                });
                (s.id.clone(), model)
            })
            .collect();
        let list = json!({
            "object": "list",
            "data": all.iter().map(|(_, model)| model).collect::<Vec<_>>(),
        });
        Self {
            list: list.to_string().into(),
            models: all
                .into_iter()
                .map(|(id, model)| (id, model.to_string().into()))
                .collect(),
        }
    }

    fn get(&self, id: &str) -> Response<Bytes> {
        match self.models.get(id) {
            Some(model) => reply(StatusCode::OK, model.clone()),
            None => reply(
                StatusCode::NOT_FOUND,
                json!({"error": {
                    "message": format!(
                        "The model `{id}` does not exist. Served: {}.",
                        self.models.keys().map(|id| format!("`{id}`")).collect::<Vec<_>>().join(", ")
                    ),
                    "type": "NotFoundError",
                    "param": "model",
                    "code": 404,
                }})
                .to_string()
                .into(),
            ),
        }
    }
}

// === impl Answers ===

impl Answers {
    /// Answers from these.
    pub fn new(
        catalog: Arc<ArcSwap<Catalog>>,
        models: Arc<ArcSwap<Models>>,
        draining: Draining,
    ) -> Self {
        Self {
            catalog,
            models,
            draining,
        }
    }

    fn health(&self) -> Response<Bytes> {
        let (mut ready, mut endpoints) = (0, 0);
        for pool in self.models.load().pools() {
            for endpoint in pool.pool().endpoints() {
                endpoints += 1;
                ready += usize::from(endpoint.is_ready());
            }
        }
        let stopping = self.draining.phase() > Phase::Running;
        let ok = ready > 0 && !stopping;
        let status = match (ok, stopping) {
            (true, _) => "ok",
            (_, true) => "stopping",
            _ => "no endpoint is ready",
        };
        let body: Value = json!({"status": status, "ready": ready, "endpoints": endpoints});
        if ok {
            return reply(StatusCode::OK, body.to_string().into());
        }
        let mut response = reply(StatusCode::SERVICE_UNAVAILABLE, body.to_string().into());
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        response
    }
}

impl Local for Answers {
    fn answer(&self, request: &Parts) -> Option<Response<Bytes>> {
        if request.method != Method::GET && request.method != Method::HEAD {
            return None;
        }
        match request.uri.path() {
            "/v1/models" => Some(reply(StatusCode::OK, self.catalog.load().list.clone())),
            "/health" | "/ping" => Some(self.health()),
            path => {
                let id = path.strip_prefix("/v1/models/")?;
                Some(self.catalog.load().get(&decode(id)))
            }
        }
    }
}

fn reply(status: StatusCode, body: Bytes) -> Response<Bytes> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}

/// Takes percent escapes out: clients write `org%2Fname`. What is no escape stays.
pub(crate) fn decode(path: &str) -> Cow<'_, str> {
    if !path.contains('%') {
        return Cow::Borrowed(path);
    }
    let mut out = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let escaped = match (first, tail) {
            (b'%', [high, low, after @ ..]) => {
                hex(*high).zip(hex(*low)).map(|(h, l)| (h * 16 + l, after))
            }
            _ => None,
        };
        let (byte, after) = escaped.unwrap_or((*first, tail));
        out.push(byte);
        rest = after;
    }
    Cow::Owned(String::from_utf8_lossy(&out).into_owned())
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit)
        .to_digit(16)
        .and_then(|d| u8::try_from(d).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::drain;
    use http::Request;

    fn answers(served: &[Served]) -> (Answers, drain::Drain) {
        let (drain, draining) = drain::channel();
        let catalog = Arc::new(ArcSwap::from_pointee(Catalog::new(served, 7)));
        (Answers::new(catalog, Arc::default(), draining), drain)
    }

    fn get(answers: &Answers, method: Method, path: &str) -> Option<(StatusCode, Value)> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .body(())
            .unwrap();
        let response = answers.answer(&request.into_parts().0)?;
        let body = serde_json::from_slice(response.body()).unwrap();
        Some((response.status(), body))
    }

    fn two() -> Vec<Served> {
        let mut tiny = Served::named(&"org/tiny".into());
        for len in [None, Some(4096), Some(1024)] {
            tiny.learn(&Model {
                id: "org/tiny".into(),
                root: Some("/models/tiny".into()),
                parent: None,
                max_model_len: len,
            });
        }
        let mut adapter = Served::named(&"ad".into());
        adapter.learn(&Model {
            id: "ad".into(),
            root: None,
            parent: Some("org/tiny".into()),
            max_model_len: None,
        });
        vec![tiny, adapter]
    }

    #[test]
    fn lists_models_as_openai_does() {
        let (answers, _drain) = answers(&two());
        let (status, list) = get(&answers, Method::GET, "/v1/models").unwrap();
        assert_eq!(status, StatusCode::OK);
        assert_eq!(list["object"], "list");
        assert_eq!(list["data"][0]["id"], "org/tiny");
        assert_eq!(list["data"][0]["object"], "model");
        assert_eq!(list["data"][0]["created"], 7);
        assert_eq!(list["data"][0]["max_model_len"], 1024);
        assert_eq!(list["data"][1]["parent"], "org/tiny");
        assert_eq!(list["data"][1]["max_model_len"], Value::Null);
        for path in [
            "/v1/models/org/tiny",
            "/v1/models/org%2Ftiny",
            "/v1/models/org%2ftiny",
        ] {
            let (status, one) = get(&answers, Method::HEAD, path).unwrap();
            assert_eq!((status, &one), (StatusCode::OK, &list["data"][0]), "{path}");
        }
        let (status, missing) = get(&answers, Method::GET, "/v1/models/x%zz%").unwrap();
        assert_eq!(status, StatusCode::NOT_FOUND);
        let message = missing["error"]["message"].as_str().unwrap();
        assert!(
            message.contains("`x%zz%`") && message.contains("`org/tiny`"),
            "{message}"
        );
    }

    #[test]
    fn an_empty_list_is_no_error() {
        let (answers, _drain) = answers(&[]);
        let (status, list) = get(&answers, Method::GET, "/v1/models").unwrap();
        assert_eq!((status, &list["data"]), (StatusCode::OK, &json!([])));
    }

    #[test]
    fn the_rest_is_for_others() {
        let (answers, _drain) = answers(&[]);
        for (method, path) in [
            (Method::POST, "/v1/models"),
            (Method::GET, "/v1/chat/completions"),
            (Method::GET, "/version"),
            (Method::DELETE, "/v1/models/x"),
        ] {
            assert!(get(&answers, method, path).is_none(), "{path}");
        }
    }

    #[test]
    fn health_without_an_endpoint() {
        let (answers, drain) = answers(&[]);
        let (status, body) = get(&answers, Method::GET, "/health").unwrap();
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(body["status"], "no endpoint is ready");
        drain.advance(Phase::LameDuck);
        assert_eq!(
            get(&answers, Method::GET, "/health").unwrap().1["status"],
            "stopping"
        );
    }
}
