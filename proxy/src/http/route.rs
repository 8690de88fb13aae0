//! From what was read of a request to the pool that serves its model.

use super::{
    models::{ModelTarget, Models},
    reply::Reply,
};
use http::{Method, StatusCode};
use std::sync::Arc;
use tower_ttft::peek::{BodyRead, InferenceRequest};

/// As many served names as an error lists.
const LISTED: usize = 50;

/// The longest part of a client's model name that an error repeats, characters.
const QUOTED: usize = 100;

/// The pool of a request. With one model behind the listener whatever cannot be read is passed on as it is: the
/// engine's answer is the answer. With several, what cannot be told apart is refused.
pub(super) fn route(
    models: &Models,
    method: &Method,
    read: &InferenceRequest,
    peek_cap: usize,
) -> Result<ModelTarget, Reply> {
    if let Some(field) = read.duplicates.first() {
        return Err(Reply::new(
            StatusCode::BAD_REQUEST,
            "duplicate_field",
            format!("`{field}` occurs more than once in the request body; send it once"),
        )
        .param(field));
    }
    if let Some(model) = &read.model {
        return models
            .get(model)
            .cloned()
            .ok_or_else(|| unknown(models, model));
    }
    if let Some(pool) = models.only() {
        return Ok(ModelTarget {
            pool: Arc::clone(pool),
            rewrite: None,
        });
    }
    if models.pools().is_empty() {
        return Err(Reply::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "no_models",
            "no model is known here yet",
        )
        .retry_after(std::time::Duration::from_secs(5)));
    }
    // Reading is for all models alike: the first that can answer does.
    if method != Method::POST {
        let ready = |pool: &&Arc<_>| is_ready(pool);
        let pool = models.pools().iter().find(ready);
        if let Some(pool) = pool.or(models.pools().first()) {
            return Ok(ModelTarget {
                pool: Arc::clone(pool),
                rewrite: None,
            });
        }
    }
    Err(unreadable(models, read.read, peek_cap))
}

/// Whether a pool has an endpoint that can be asked now.
pub(super) fn is_ready(pool: &super::ModelPool) -> bool {
    pool.pool().endpoints().iter().any(|e| e.is_ready())
}

fn unknown(models: &Models, model: &str) -> Reply {
    let mut quoted: String = model.chars().take(QUOTED).collect();
    if quoted.len() < model.len() {
        quoted.push('…');
    }
    Reply::new(
        StatusCode::NOT_FOUND,
        "model_not_found",
        format!(
            "The model `{quoted}` does not exist. Served models: {}.",
            listed(models)
        ),
    )
    .param("model")
}

fn unreadable(models: &Models, read: BodyRead, peek_cap: usize) -> Reply {
    let served = listed(models);
    match read {
        BodyRead::Parsed | BodyRead::Empty => Reply::new(
            StatusCode::BAD_REQUEST,
            "model_missing",
            format!("`model` is missing; several models are served here: {served}."),
        )
        .param("model"),
        BodyRead::Unreadable => Reply::new(
            StatusCode::BAD_REQUEST,
            "body_unreadable",
            "the request body is not JSON that can be read, so its `model` is not known; several models are served here",
        ),
        BodyRead::Encoded => Reply::new(
            StatusCode::BAD_REQUEST,
            "body_encoded",
            "the request body has a Content-Encoding, so its `model` is not known; send it unencoded",
        ),
        BodyRead::TooLarge => Reply::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "body_too_large",
            format!(
                "the request body is over the {peek_cap} bytes that are read to find its `model`"
            ),
        ),
        BodyRead::NoBudget => Reply::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "memory_budget",
            "too many request bodies are held in memory; send the request again",
        )
        .retry_after(std::time::Duration::from_secs(1)),
    }
}

fn listed(models: &Models) -> String {
    let served = models.served();
    let mut list = served
        .iter()
        .take(LISTED)
        .map(|name| &**name)
        .collect::<Vec<_>>()
        .join(", ");
    if served.len() > LISTED {
        list.push_str(&format!(" and {} more", served.len() - LISTED));
    }
    if list.is_empty() {
        list.push_str("none");
    }
    list
}
