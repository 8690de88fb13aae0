//! Takes a request from its head to its answer.

use super::{
    Body, RequestBody,
    client::{Client, Timeouts},
    headers::{X_ENDPOINT, X_REQUEST_ID},
    hold::Hold,
    models::{ModelPool, ModelTarget},
    path::Route,
    record::{Lesson, Outcome, Record},
    reply::Reply,
    rescue::{Rescued, no_endpoint, rescue},
    retry::Retry,
    route::{is_ready, route},
    settle::Settlement,
    stack::Inner,
};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use std::sync::Arc;
use tower_service::Service;
use tower_ttft::{
    Error,
    balance::Balance,
    chain::{Chain, ChainKind},
    endpoint::EndpointId,
    peek::{Api, InferenceRequest, read, splice},
    prompt::{Prompt, Reason, Source},
};

impl Inner {
    /// The answer to a request.
    pub(super) async fn answer(self: Arc<Self>, mut request: Request<Incoming>) -> Response<Body> {
        let api = Api::from_path(request.uri().path());
        let id = self.ids.assign(request.headers_mut());
        let record = Record::new(id.clone(), api);
        let settlement = Settlement::begin(record.clone(), &self.metrics.settle);
        let mut response = match self.serve(request, api, &record).await {
            Ok(response) => response,
            Err(reply) => {
                if reply.status.is_client_error() {
                    record.outcome(Outcome::refused);
                }
                reply.into_response(api)
            }
        };
        if let Ok(id) = HeaderValue::from_str(&id) {
            response.headers_mut().insert(X_REQUEST_ID, id);
        }
        // What the layers know of the answer is not the server's.
        *response.extensions_mut() = http::Extensions::new();
        settlement.answered(response)
    }

    async fn serve(
        &self,
        request: Request<Incoming>,
        api: Api,
        record: &Record,
    ) -> Result<Response<Body>, Reply> {
        let (parts, body) = request.into_parts();
        if let Some(local) = self.local.answer(&parts) {
            return Ok(local.map(full));
        }
        let inference = match Route::of(&parts.method, parts.uri.path()) {
            Route::Inference(_) => true,
            Route::Plain => false,
            Route::WrongMethod(allow) => {
                let mut reply = Reply::new(
                    StatusCode::METHOD_NOT_ALLOWED,
                    "method_not_allowed",
                    format!("this path takes {allow}"),
                );
                reply.allow = Some(allow);
                return Err(reply);
            }
            Route::Unknown => {
                return Err(Reply::new(
                    StatusCode::NOT_FOUND,
                    "not_found",
                    "there is no such path here; only inference APIs are forwarded",
                ));
            }
        };
        let request = Request::from_parts(parts, body);
        let mut request = match self.peek.peek(request).await {
            Ok(request) => request,
            Err(error) => return Self::rescued(error.into(), None, record),
        };
        let read = request
            .extensions()
            .get::<InferenceRequest>()
            .cloned()
            .unwrap_or_else(|| InferenceRequest::unread(api, tower_ttft::peek::BodyRead::Empty));
        let models = self.models.load_full();
        let target = route(&models, request.method(), &read, self.peek.peek_cap)?;
        record.note(|n| n.model = Some(target.pool.name().clone()));
        let (read, pool) = match target {
            ModelTarget {
                pool,
                rewrite: None,
            } => (read, pool),
            ModelTarget {
                pool,
                rewrite: Some(name),
            } => {
                let rewritten;
                (request, rewritten) = rewrite(request, read, &name);
                (rewritten, pool)
            }
        };
        let prompt = if inference {
            let encoder = pool.encoder();
            let prompt = encoder.encode(&read).await;
            record.note(|n| n.lesson = Lesson::of(&encoder, &prompt));
            prompt
        } else if is_ready(&pool) {
            nothing()
        } else {
            // Whoever asks how things are is not kept waiting.
            record.outcome(Outcome::no_endpoint);
            return Err(no_endpoint(
                "no_endpoint_ready",
                "so none can be asked",
                Some(&pool),
            ));
        };
        let policy = pool.policy();
        let extensions = request.extensions_mut();
        extensions.insert(read);
        extensions.insert(prompt);
        extensions.insert(record.clone());
        extensions.insert(Timeouts {
            connect: policy.connect_timeout,
            head: policy.first_token_timeout,
        });
        extensions.insert(policy.clone());
        match self.send(&pool, request).await {
            Ok(mut response) => {
                if policy.endpoint_header
                    && let Some(endpoint) = response.extensions().get::<EndpointId>()
                    && let Ok(name) = HeaderValue::from_str(&endpoint.to_string())
                {
                    response.headers_mut().insert(X_ENDPOINT, name);
                }
                Ok(response)
            }
            Err(error) => Self::rescued(error, Some(&pool), record),
        }
    }

    /// Sends a request to where its first token comes soonest.
    async fn send(
        &self,
        pool: &ModelPool,
        request: Request<RequestBody>,
    ) -> Result<Response<Body>, Error> {
        let client: Client<RequestBody> = self.client.clone();
        // All of these are handles; what is dear lives in the pool and the client.
        let balance = Balance::new(pool.pool().clone(), client);
        let hold = Hold::new(balance, self.metrics.hold.clone());
        let mut retry = Retry::new(hold, self.retries.clone(), self.metrics.retry.clone());
        let response = retry.call(request).await?;
        Ok(response.map(BodyExt::boxed_unsync))
    }

    fn rescued(
        error: Error,
        pool: Option<&ModelPool>,
        record: &Record,
    ) -> Result<Response<Body>, Reply> {
        match rescue(error, pool) {
            Rescued::Reply(reply, outcome) => {
                record.outcome(outcome);
                Err(reply)
            }
            Rescued::Answer(answer, outcome) => {
                record.outcome(outcome);
                Ok(answer.map(full))
            }
        }
    }
}

/// The same request for the model `name`. A body without a `model` that could be replaced stays as it is.
fn rewrite(
    request: Request<RequestBody>,
    read_before: InferenceRequest,
    name: &str,
) -> (Request<RequestBody>, InferenceRequest) {
    let json = serde_json::Value::from(name).to_string();
    let body = read_before
        .range("model")
        .and_then(|range| splice(&read_before.body, range, json.as_bytes()));
    match body {
        Some(body) => {
            let rewritten = read(read_before.api, request.headers(), body.clone());
            (request.map(|b| b.with_bytes(body)), rewritten)
        }
        None => (request, read_before),
    }
}

/// The prompt of a request that runs no model.
fn nothing() -> Prompt {
    Prompt {
        chain: Chain::empty(ChainKind::Tokens),
        tokens: 0,
        ids: None,
        bytes: 0,
        whole_text: false,
        source: Source::Approximate(Reason::Unread),
    }
}

fn full(bytes: Bytes) -> Body {
    Full::new(bytes)
        .map_err(|never| match never {})
        .boxed_unsync()
}
