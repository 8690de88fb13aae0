//! The body of an engine's answer, which owns its connection.

use super::{connect::Connection, pool::Idle};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use std::{
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, ready},
};

/// The body of an engine's answer. Dropping it before its end closes the connection.
pub struct EngineBody<B: Send + 'static> {
    incoming: Incoming,
    lease: Option<Lease<B>>,
}

struct Lease<B> {
    address: Arc<str>,
    connection: Connection<B>,
    idle: Weak<Idle<B>>,
}

/// An answer broke off.
#[derive(Debug, thiserror::Error)]
#[error("the answer broke off: {0}")]
pub struct BodyError(#[source] hyper::Error);

// === impl EngineBody ===

impl<B: Send + 'static> EngineBody<B> {
    pub(super) fn new(
        incoming: Incoming,
        address: Arc<str>,
        connection: Connection<B>,
        idle: Weak<Idle<B>>,
    ) -> Self {
        let mut body = Self {
            incoming,
            lease: Some(Lease {
                address,
                connection,
                idle,
            }),
        };
        body.release_at_end();
        body
    }

    fn release_at_end(&mut self) {
        if self.incoming.is_end_stream() {
            self.release();
        }
    }

    fn release(&mut self) {
        if let Some(lease) = self.lease.take()
            && let Some(idle) = lease.idle.upgrade()
        {
            idle.put(&lease.address, lease.connection);
        }
    }
}

impl<B: Send + Unpin + 'static> Body for EngineBody<B> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match ready!(Pin::new(&mut self.incoming).poll_frame(cx)) {
            Some(Ok(frame)) => {
                self.release_at_end();
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => {
                self.lease = None;
                Poll::Ready(Some(Err(BodyError(error))))
            }
            None => {
                self.release();
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
