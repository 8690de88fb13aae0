//! Turns errors into answers: the one place where an error gets a status.

use super::{
    client::ClientError,
    headers::X_DROPPED_REASON,
    hold::{HoldError, Unanswered},
    models::ModelPool,
    record::Outcome,
    reply::Reply,
    retry::Failed,
};
use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header::RETRY_AFTER};
use std::time::Duration;
use tower_ttft::{Error, peek::PeekError, pool::NoEndpoint, queue::QueueError};

/// When to come back while no endpoint is ready. Engines take seconds to minutes to start; much longer than this and
/// clients would give up.
const NO_ENDPOINT_AFTER: Duration = Duration::from_secs(5);

/// When to come back to full engines.
const BUSY_AFTER: Duration = Duration::from_secs(1);

/// An answer in place of an error.
#[derive(Debug)]
pub(super) enum Rescued {
    /// Our own words.
    Reply(Reply, Outcome),
    /// The engine's.
    Answer(Response<Bytes>, Outcome),
}

/// The answer to a request that ended with this error.
pub(super) fn rescue(error: Error, pool: Option<&ModelPool>) -> Rescued {
    let error = match error.downcast::<Failed>() {
        Ok(failed) => match failed.answer {
            // All that could be asked have been asked: then their own words say it best.
            Some(answer) => return Rescued::Answer(with_retry_after(answer), Outcome::failed),
            None => failed.source,
        },
        Err(error) => error,
    };
    let (reply, outcome) = reply(&error, pool);
    Rescued::Reply(reply, outcome)
}

fn reply(error: &Error, pool: Option<&ModelPool>) -> (Reply, Outcome) {
    if let Some(peek) = cause::<PeekError>(error) {
        return (of_peek(peek), Outcome::refused);
    }
    if let Some(queue) = cause::<QueueError>(error) {
        let (code, why) = match queue {
            QueueError::Full => ("queue_full", "and too many requests wait for one already"),
            QueueError::Deadline => ("no_endpoint_ready", "and none became ready in time"),
        };
        return (no_endpoint(code, why, pool), Outcome::no_endpoint);
    }
    if cause::<NoEndpoint>(error).is_some() {
        let why = "and those that are have failed this request";
        return (
            no_endpoint("no_endpoint_left", why, pool),
            Outcome::no_endpoint,
        );
    }
    if let Some(Unanswered { source, .. }) = cause::<Unanswered>(error) {
        let status = match source {
            HoldError::FirstToken(_) | HoldError::Idle(_) => StatusCode::GATEWAY_TIMEOUT,
            HoldError::Refused(_) | HoldError::Broken(_) => StatusCode::BAD_GATEWAY,
        };
        let reply = Reply::new(status, source.code(), source.message());
        return (reply, source.outcome());
    }
    if let Some(ClientError::HeadTimeout(timeout)) = cause::<ClientError>(error) {
        let source = HoldError::FirstToken(*timeout);
        let status = StatusCode::GATEWAY_TIMEOUT;
        let reply = Reply::new(status, source.code(), source.message());
        return (reply, source.outcome());
    }
    let reply = Reply::new(
        StatusCode::BAD_GATEWAY,
        "endpoint_failed",
        "the engine failed before it answered; send the request again",
    );
    (reply, Outcome::failed)
}

fn of_peek(error: &PeekError) -> Reply {
    match error {
        PeekError::TooLarge { cap } => Reply::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "body_too_large",
            format!("the request body is over the limit of {cap} bytes"),
        ),
        PeekError::Stalled { idle } => Reply::new(
            StatusCode::REQUEST_TIMEOUT,
            "body_stalled",
            format!(
                "the request body made no progress for {} s",
                idle.as_secs_f64()
            ),
        ),
        PeekError::Body(_) => Reply::new(
            StatusCode::BAD_REQUEST,
            "body_broken",
            "the request body broke off",
        ),
    }
}

/// No endpoint is ready: which model, and how many there are.
pub(super) fn no_endpoint(code: &'static str, why: &str, pool: Option<&ModelPool>) -> Reply {
    let message = match pool {
        Some(pool) => {
            let endpoints = pool.pool().endpoints();
            let ready = endpoints.iter().filter(|e| e.is_ready()).count();
            format!(
                "the model `{}` has {ready} of {} endpoints ready, {why}",
                pool.name(),
                endpoints.len()
            )
        }
        None => format!("no endpoint is ready, {why}"),
    };
    Reply::new(StatusCode::SERVICE_UNAVAILABLE, code, message).retry_after(NO_ENDPOINT_AFTER)
}

/// vLLM does not say when to come back when it is full.
fn with_retry_after(mut answer: Response<Bytes>) -> Response<Bytes> {
    if answer.status() == StatusCode::SERVICE_UNAVAILABLE {
        let headers = answer.headers_mut();
        headers.insert(X_DROPPED_REASON, HeaderValue::from_static("engines_busy"));
        headers
            .entry(RETRY_AFTER)
            .or_insert(HeaderValue::from(BUSY_AFTER.as_secs()));
    }
    answer
}

/// The first error of this type in the chain.
fn cause<E: std::error::Error + 'static>(error: &Error) -> Option<&E> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(&**error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}
