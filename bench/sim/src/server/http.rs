//! Routes and connections.

use super::{
    Inner, Progress, Server,
    answer::{Head, Stream},
    ask::{self, Ask, Refusal},
    metrics,
};
use crate::Words;
use ::http::{HeaderValue, Method, Request, Response, StatusCode, header};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::json;
use std::{convert::Infallible, io, sync::Arc};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
};
use tower_ttft::peek::Api;

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// The most bytes of a body.
const MAX_BODY: usize = 64 << 20;

// === impl Server ===

impl Server {
    /// Serves one connection until it ends.
    pub async fn serve(
        &self,
        io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) -> hyper::Result<()> {
        let inner = self.inner.clone();
        let service = service_fn(move |request| {
            let inner = inner.clone();
            async move { Ok::<_, Infallible>(route(&inner, request).await) }
        });
        http1::Builder::new()
            .serve_connection(TokioIo::new(io), service)
            .await
    }

    /// Serves the connections of a socket, for ever.
    pub async fn listen(&self, listener: TcpListener) -> io::Result<()> {
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let this = self.clone();
            tokio::spawn(async move { this.serve(stream).await });
        }
    }
}

async fn route(inner: &Arc<Inner>, request: Request<Incoming>) -> Answer {
    let (head, body) = request.into_parts();
    let post = head.method == Method::POST;
    match (post, head.uri.path()) {
        (false, "/health" | "/ping") if head.method == Method::GET => {
            whole(StatusCode::OK, None, "")
        }
        (false, "/version") => json_answer(json!({"version": "0.32.0"}).to_string()),
        (false, "/v1/models") => json_answer(models(inner)),
        (false, "/kv_event_sources") => json_answer(sources(inner)),
        (false, "/metrics") => {
            let (load, counts) = inner.load();
            let text = metrics::render(&load, &counts, &inner.spec, &inner.model, inner.epoch);
            whole(
                StatusCode::OK,
                Some("text/plain; version=1.0.0; charset=utf-8"),
                text,
            )
        }
        (true, "/reset_prefix_cache") => {
            inner.state.lock().pod.clear_cache();
            whole(StatusCode::OK, None, "")
        }
        (true, path) => {
            let (api, what) = match path {
                "/v1/chat/completions" => (Api::Chat, What::Generate),
                "/v1/completions" => (Api::Completions, What::Generate),
                "/v1/chat/completions/render" if inner.render => (Api::Chat, What::Render),
                "/v1/completions/render" if inner.render => (Api::Completions, What::Render),
                "/tokenize" => (Api::Other, What::Tokenize),
                _ => return not_found(),
            };
            let limited = http_body_util::Limited::new(body, MAX_BODY);
            let Ok(body) = limited.collect().await.map(|b| b.to_bytes()) else {
                return whole(StatusCode::PAYLOAD_TOO_LARGE, None, "");
            };
            let answer = match what {
                What::Generate => match ask::read(inner, api, &head.headers, body) {
                    Ok(ask) => generate(inner, api, &head.headers, ask).await,
                    Err(refusal) => Err(refusal),
                },
                What::Render => ask::tokens(inner, &head.headers, body)
                    .map(|prompt| json_answer(json!({"token_ids": &**prompt.ids()}).to_string())),
                What::Tokenize => ask::tokens(inner, &head.headers, body).map(|prompt| {
                    json_answer(
                        json!({"count": prompt.tokens(), "max_model_len": inner.max_model_len, "tokens": &**prompt.ids(), "token_strs": null})
                            .to_string(),
                    )
                }),
            };
            answer.unwrap_or_else(|refusal| {
                whole(refusal.status, Some("application/json"), refusal.body())
            })
        }
        _ => not_found(),
    }
}

enum What {
    Generate,
    Render,
    Tokenize,
}

async fn generate(
    inner: &Arc<Inner>,
    api: Api,
    headers: &::http::HeaderMap,
    ask: Ask,
) -> Result<Answer, Refusal> {
    let mut ticket = inner.submit(ask.prompt.clone(), ask.output);
    let chat = api == Api::Chat;
    let given = headers.get("x-request-id").and_then(|v| v.to_str().ok());
    let id = match given.or(ask.request_id.as_deref()) {
        Some(id) => id.to_owned(),
        None => format!("{:016x}", ticket.id),
    };
    let head = Head {
        chat,
        id: format!("{}-{id}", if chat { "chatcmpl" } else { "cmpl" }),
        created: inner.wall(inner.now()) as u64,
        model: inner.model.clone(),
        block_size: inner.spec.block_size,
        tokens_per_event: inner.tokens_per_event,
    };
    let mut words = Words::new(inner.seed ^ ticket.id.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    if ask.stream {
        // As in vLLM, the head of the answer leaves before the prompt is computed.
        let body = Stream::new(head, ask, ticket, words);
        let mut answer = Response::new(UnsyncBoxBody::new(body));
        let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
        answer.headers_mut().insert(header::CONTENT_TYPE, kind);
        return Ok(answer);
    }
    let mut generated = 0;
    while let Some(progress) = ticket.progress.recv().await {
        match progress {
            Progress::Tokens(n) => generated += n,
            Progress::Refused => break,
            Progress::Done { cached } => {
                let text = words.text(generated as usize);
                return Ok(json_answer(head.whole(&ask, text, generated, cached)));
            }
        }
    }
    Err(Refusal::busy())
}

fn models(inner: &Inner) -> String {
    let created = inner.epoch as u64;
    json!({"object": "list", "data": [{"id": &*inner.model, "object": "model", "created": created, "owned_by": "vllm", "root": &*inner.model, "parent": null, "max_model_len": inner.max_model_len, "permission": []}]})
        .to_string()
}

fn sources(inner: &Inner) -> String {
    let Some(sources) = &inner.sources else {
        return "{}".into();
    };
    json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": sources.live, "replay_endpoint": sources.replay, "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": sources.topic}})
        .to_string()
}

fn not_found() -> Answer {
    let body = json!({"detail": "Not Found"}).to_string();
    whole(StatusCode::NOT_FOUND, Some("application/json"), body)
}

fn json_answer(body: String) -> Answer {
    whole(StatusCode::OK, Some("application/json"), body)
}

fn whole(status: StatusCode, kind: Option<&'static str>, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(UnsyncBoxBody::new(Full::new(body.into())));
    *answer.status_mut() = status;
    if let Some(kind) = kind {
        let kind = HeaderValue::from_static(kind);
        answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    answer
}
