//! The body of an answer that does not stream, once it is committed.

use super::HoldError;
use crate::http::record::{Outcome, Record};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep};
use tower_ttft::Error;

/// An answer as it comes, however large it is. It may pause only for so long.
pub struct PlainBody<B> {
    /// What came before the answer was committed.
    first: Option<Frame<Bytes>>,
    inner: Option<Pin<Box<B>>>,
    record: Record,
    idle_timeout: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    last: Instant,
}

// === impl PlainBody ===

impl<B> PlainBody<B> {
    pub(super) fn new(
        first: Option<Frame<Bytes>>,
        inner: Option<Pin<Box<B>>>,
        record: Record,
        idle_timeout: Duration,
    ) -> Self {
        Self {
            first,
            inner,
            record,
            idle_timeout,
            timer: None,
            last: Instant::now(),
        }
    }

    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let deadline = self.last + self.idle_timeout;
            let timer = self
                .timer
                .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
            ready!(timer.as_mut().poll(cx));
            if Instant::now() >= deadline {
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
    }
}

impl<B> Body for PlainBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Error>,
{
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = self.get_mut();
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let Some(inner) = this.inner.as_mut() else {
            return Poll::Ready(None);
        };
        match inner.as_mut().poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                this.last = Instant::now();
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                this.inner = None;
                this.record.outcome(Outcome::broken);
                Poll::Ready(Some(Err(HoldError::Broken(error.into()).into())))
            }
            Poll::Ready(None) => {
                this.inner = None;
                Poll::Ready(None)
            }
            Poll::Pending => {
                ready!(this.poll_silence(cx));
                this.inner = None;
                this.record.outcome(Outcome::timeout);
                Poll::Ready(Some(Err(HoldError::Idle(this.idle_timeout).into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none()
            && self
                .inner
                .as_ref()
                .is_none_or(|inner| inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = self
            .inner
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), |inner| inner.size_hint());
        let first = self.first.as_ref().and_then(Frame::data_ref);
        let first = first.map_or(0, |data| data.len() as u64);
        // The upper bound first: it must never be below the lower one.
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + first);
        }
        hint.set_lower(hint.lower() + first);
        hint
    }
}

impl<B> fmt::Debug for PlainBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainBody").finish_non_exhaustive()
    }
}
