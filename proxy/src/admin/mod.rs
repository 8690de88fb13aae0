//! What operators reach, on a listener and a thread of its own.
//!
//! | page | what |
//! |---|---|
//! | `GET /live` | `200` as long as the process turns its wheels |
//! | `GET /ready` | `200` once clients are listened to and engines have been asked, until the process stops |
//! | `GET /metrics` | Prometheus' text format |
//! | `GET /config` | the configuration in force, and what became of the file since |
//! | `GET /endpoints` | what is known of each endpoint, with what an operator should do about it |
//! | `GET /decisions` | the last decisions: `?n=` how many, `?request_id=`, `?model=`; `?follow=1` goes on, one line each |
//! | `GET /log-level`, `PUT /log-level` | the log filter |
//!
//! The first three are for everyone who reaches the port; the others are for loopback only, unless the pool file says
//! `adminOpen: true`. No page shows prompts, tokens or keys.

mod body;
mod decisions;
mod endpoints;
mod ready;

pub use self::ready::Readiness;

use self::{
    body::Body,
    decisions::{Followers, Query},
};
use crate::{
    app::{Directory, ReloadStatus},
    telemetry::log::LogHandle,
};
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use prometheus_client::{encoding::text, registry::Registry};
use serde_json::{Value, json};
use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet, time};

/// Connections at once. Scrapers and people are few; more is a mistake or an attack, and must not take files from
/// clients.
const MAX_CONNECTIONS: usize = 64;

/// How long a request's head may take, and a connection may be idle.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest body that is taken: a log filter.
const MAX_BODY: usize = 4096;

/// How long to wait when the kernel gives no connection, before asking again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Parameters of an [`Admin`].
pub struct AdminParams {
    /// What `/metrics` shows.
    pub registry: Arc<Registry>,
    /// What is served.
    pub directory: Arc<Directory>,
    /// What `/ready` shows.
    pub readiness: Readiness,
    /// What became of the pool file.
    pub reload: Arc<Mutex<ReloadStatus>>,
    /// What is logged.
    pub log: LogHandle,
}

/// The admin server.
pub struct Admin {
    params: AdminParams,
    followers: Followers,
}

// === impl Admin ===

impl Admin {
    /// A server of these.
    pub fn new(params: AdminParams) -> Self {
        Self {
            params,
            followers: Followers::default(),
        }
    }

    /// Serves until dropped.
    pub async fn serve(self, listener: TcpListener) {
        let admin = Arc::new(self);
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut connections = JoinSet::new();
        loop {
            let (stream, peer) = tokio::select! {
                Some(_) = connections.join_next() => continue,
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::debug!(%error, "Cannot accept an admin connection");
                        time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
            };
            // Closed without a word: there is no room for words.
            let Ok(permit) = room.clone().try_acquire_owned() else {
                continue;
            };
            let admin = admin.clone();
            connections.spawn(async move {
                let service = hyper::service::service_fn(|request| {
                    let admin = admin.clone();
                    async move { Ok::<_, Infallible>(admin.answer(request, peer).await) }
                });
                let served = hyper::server::conn::http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEADER_TIMEOUT)
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
                if let Err(error) = served {
                    tracing::debug!(%error, %peer, "Admin connection ended");
                }
                drop(permit);
            });
        }
    }

    async fn answer(&self, request: Request<Incoming>, peer: SocketAddr) -> Response<Body> {
        let path = request.uri().path().to_owned();
        match path.as_str() {
            "/live" | "/ready" | "/metrics" => {}
            "/config" | "/endpoints" | "/decisions" | "/log-level" => {
                let open = self.params.directory.config().admin_open;
                if !allowed(peer, open) {
                    return text(
                        StatusCode::FORBIDDEN,
                        "for loopback only; set `adminOpen: true` in the pool file to open it\n",
                    );
                }
            }
            _ => {
                return text(
                    StatusCode::NOT_FOUND,
                    "pages: /live /ready /metrics /config /endpoints /decisions /log-level\n",
                );
            }
        }
        let get = request.method() == Method::GET || request.method() == Method::HEAD;
        match path.as_str() {
            "/log-level" if request.method() == Method::PUT => self.set_log_level(request).await,
            _ if !get => {
                let allowed = if path == "/log-level" {
                    "GET, HEAD, PUT"
                } else {
                    "GET, HEAD"
                };
                let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "");
                response
                    .headers_mut()
                    .insert(header::ALLOW, HeaderValue::from_static(allowed));
                response
            }
            "/live" => text(StatusCode::OK, "live\n"),
            "/ready" => match self.params.readiness.missing() {
                None => text(StatusCode::OK, "ready\n"),
                Some(missing) => text(StatusCode::SERVICE_UNAVAILABLE, missing),
            },
            "/metrics" => self.metrics(),
            "/config" => as_json(&self.config()),
            "/endpoints" => as_json(&endpoints::page(&self.params.directory)),
            "/decisions" => match Query::parse(request.uri().query().unwrap_or_default()) {
                Ok(query) => decisions::page(&self.params.directory, &self.followers, query),
                Err(error) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
            },
            _ => text(StatusCode::OK, format!("{}\n", self.params.log.filter())),
        }
    }

    fn metrics(&self) -> Response<Body> {
        let mut out = String::new();
        if text::encode(&mut out, &self.params.registry).is_err() {
            return text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "metrics could not be written\n",
            );
        }
        let mut response = Response::new(Body::full(out));
        response.headers_mut().insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8"),
        );
        response
    }

    fn config(&self) -> Value {
        let status = self.params.reload.lock().clone();
        json!({
            "config": self.params.directory.config().to_json(),
            "reload": status,
        })
    }

    async fn set_log_level(&self, request: Request<Incoming>) -> Response<Body> {
        let body = Limited::new(request.into_body(), MAX_BODY).collect();
        let Ok(Ok(body)) = time::timeout(HEADER_TIMEOUT, body).await else {
            return text(
                StatusCode::PAYLOAD_TOO_LARGE,
                "a log filter of up to 4 KiB is expected\n",
            );
        };
        let body = body.to_bytes();
        let Ok(filter) = std::str::from_utf8(&body) else {
            return text(StatusCode::BAD_REQUEST, "the log filter is not UTF-8\n");
        };
        match self.params.log.set(filter) {
            Ok(()) => {
                tracing::info!(filter, "Log filter changed");
                text(StatusCode::OK, format!("{}\n", self.params.log.filter()))
            }
            Err(error) => text(StatusCode::BAD_REQUEST, format!("{error}\n")),
        }
    }
}

/// Whether a peer may see more than whether the proxy lives.
fn allowed(peer: SocketAddr, open: bool) -> bool {
    // A listener on `::` sees 127.0.0.1 as ::ffff:127.0.0.1.
    open || peer.ip().to_canonical().is_loopback()
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}

fn as_json(value: &Value) -> Response<Body> {
    let mut response = Response::new(Body::full(format!("{value}\n")));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_only_unless_opened() {
        for (peer, inside) in [
            ("127.0.0.1:1", true),
            ("127.9.9.9:1", true),
            ("[::1]:1", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("[::ffff:10.0.0.1]:1", false),
            ("10.0.0.1:1", false),
            ("[fe80::1]:1", false),
            ("0.0.0.0:1", false),
        ] {
            let peer = peer.parse().unwrap();
            assert_eq!(allowed(peer, false), inside, "{peer}");
            assert!(allowed(peer, true), "{peer}");
        }
    }
}
