//! The bound on open requests, and what they are told while the process stops.

use super::{
    drain::{Draining, Phase},
    metrics::{Held, ServerMetrics},
};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Admits requests to the service behind it while there is room. A place is taken from a request's head to the end of
/// its answer's body, whatever way it ends.
#[derive(Clone)]
pub(super) struct Admit<S> {
    inner: S,
    room: Arc<Semaphore>,
    draining: Draining,
    metrics: ServerMetrics,
}

pin_project! {
    /// The answer to an admitted request: it holds its place.
    #[project = EitherProj]
    pub(super) enum AdmitBody<B> {
        Admitted { #[pin] body: B, place: Option<Place> },
        Refused { body: Option<Bytes> },
    }
}

/// A place. Released by dropping it.
#[derive(Debug)]
pub(super) struct Place {
    _permit: OwnedSemaphorePermit,
    _held: Held,
}

// === impl Admit ===

impl<S> Admit<S> {
    pub(super) fn new(
        inner: S,
        room: Arc<Semaphore>,
        draining: Draining,
        metrics: ServerMetrics,
    ) -> Self {
        Self {
            inner,
            room,
            draining,
            metrics,
        }
    }
}

impl<S, ReqB, B> hyper::service::Service<Request<ReqB>> for Admit<S>
where
    S: tower_service::Service<Request<ReqB>, Response = Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    ReqB: Send + 'static,
    B: Send + 'static,
{
    type Response = Response<AdmitBody<B>>;
    type Error = Infallible;
    type Future = futures::future::BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn call(&self, request: Request<ReqB>) -> Self::Future {
        let close = self.draining.phase() > Phase::Running && request.version() < Version::HTTP_2;
        let place = match self.room.clone().try_acquire_owned() {
            Ok(permit) => Place {
                _permit: permit,
                _held: self.metrics.hold_request(),
            },
            Err(_) => {
                self.metrics.shed();
                return Box::pin(std::future::ready(Ok(overloaded(
                    "too many requests are open",
                    close,
                ))));
            }
        };
        let mut inner = self.inner.clone();
        Box::pin(async move {
            if let Err(never) = std::future::poll_fn(|cx| inner.poll_ready(cx)).await {
                match never {}
            }
            let response = match inner.call(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            };
            let mut response = response.map(|body| AdmitBody::Admitted {
                body,
                place: Some(place),
            });
            if close {
                response
                    .headers_mut()
                    .insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            Ok(response)
        })
    }
}

/// The answer when there is no room: to be tried again soon, here or at another replica.
pub(super) fn overloaded<B>(why: &str, close: bool) -> Response<AdmitBody<B>> {
    let body = serde_json::json!({
        "error": {
            "message": format!("this proxy is overloaded: {why}; try again later"),
            "type": "overloaded_error",
            "param": null,
            "code": 503,
        }
    })
    .to_string();
    let mut response = Response::new(AdmitBody::Refused {
        body: Some(body.into()),
    });
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    headers.insert(
        "x-forebay-dropped-reason",
        HeaderValue::from_static("overloaded"),
    );
    if close {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

// === impl AdmitBody ===

impl<B: Body<Data = Bytes>> Body for AdmitBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project() {
            EitherProj::Admitted { body, place } => {
                let frame = std::task::ready!(body.poll_frame(cx));
                // The end frees the place at once: hyper may keep the body itself a little longer.
                if !matches!(frame, Some(Ok(_))) {
                    place.take();
                }
                Poll::Ready(frame)
            }
            EitherProj::Refused { body } => Poll::Ready(body.take().map(|b| Ok(Frame::data(b)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Admitted { body, .. } => body.is_end_stream(),
            Self::Refused { body } => body.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Admitted { body, .. } => body.size_hint(),
            Self::Refused { body } => {
                SizeHint::with_exact(body.as_ref().map_or(0, |b| b.len() as u64))
            }
        }
    }
}
