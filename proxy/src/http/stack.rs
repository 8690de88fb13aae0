//! The whole path, put together.

use super::{Body, Models};
use arc_swap::ArcSwap;
use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
};

/// Bounds on requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a body that are buffered and read; larger ones are streamed on unscored.
    pub peek_cap: usize,
    /// Bytes of a body that are accepted at all.
    pub hard_cap: u64,
    /// Bytes that bodies and tokens of all requests may hold together until their answers are committed.
    pub memory: usize,
}

/// Answers requests that never go to an engine, such as `GET /v1/models`. Asked before all else.
pub trait Local: Send + Sync + 'static {
    /// The answer, or none if this request is for someone else.
    fn answer(&self, request: &http::request::Parts) -> Option<Response<Bytes>>;
}

/// Parameters of a [`Stack`].
pub struct StackParams {
    /// The models, replaced as a whole when they change.
    pub models: Arc<ArcSwap<Models>>,
    /// What is answered here.
    pub local: Arc<dyn Local>,
    /// Bounds on requests.
    pub limits: Limits,
    /// A seed for request ids.
    pub seed: u64,
}

/// The service of a listener. Cheap to clone; all clones share connections and bounds.
#[derive(Clone)]
pub struct Stack {
    params: Arc<StackParams>,
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            peek_cap: 32 << 20,
            hard_cap: 256 << 20,
            memory: 512 << 20,
        }
    }
}

// === impl Stack ===

impl Stack {
    /// Builds the path.
    pub fn build(params: StackParams) -> Self {
        Self {
            params: Arc::new(params),
        }
    }
}

impl<B> tower_service::Service<Request<B>> for Stack
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<tower_ttft::Error>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let params = self.params.clone();
        Box::pin(async move {
            let (parts, _body) = request.into_parts();
            let response = match params.local.answer(&parts) {
                Some(response) => response.map(|b| {
                    http_body_util::Full::new(b)
                        .map_err(|e| match e {})
                        .boxed_unsync()
                }),
                None => {
                    let mut r = Response::new(Empty::new().map_err(|e| match e {}).boxed_unsync());
                    *r.status_mut() = http::StatusCode::NOT_FOUND;
                    r
                }
            };
            Ok(response)
        })
    }
}
