//! The request body that goes on: replayable if it is buffered whole, else what was read and then the live rest.

use super::service::PeekError;
use crate::Error;
use bytes::{Buf, Bytes};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Sleep, sleep};

pin_project! {
    /// A body that gives every byte of `B` exactly once, and again from the first byte in every clone.
    ///
    /// It can be cloned while it is buffered whole and until it is released. The buffer holds its share of the
    /// [`super::Budget`] until the last clone, slice and extension that refers to it is gone.
    pub struct ReplayBody<B> {
        // What was not read while peeking; none if all was.
        #[pin]
        rest: Option<B>,
        // Read but not sent yet.
        ahead: VecDeque<Bytes>,
        trailers: Option<HeaderMap>,
        replay: Option<Replay>,
        guard: Guard,
    }
}

/// What a clone starts from.
#[derive(Clone)]
struct Replay {
    body: Bytes,
    trailers: Option<HeaderMap>,
}

/// What the live rest is held to.
pub(super) struct Guard {
    /// How many bytes may still come.
    pub(super) left: u64,
    /// The hard cap, for the error.
    pub(super) cap: u64,
    /// How long nothing may come.
    pub(super) idle: Duration,
    pub(super) sleep: Option<Pin<Box<Sleep>>>,
}

// === impl ReplayBody ===

impl<B> ReplayBody<B> {
    /// A body that is wholly here.
    pub fn whole(body: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self {
            rest: None,
            ahead: VecDeque::from_iter([body.clone()]),
            trailers: trailers.clone(),
            replay: Some(Replay { body, trailers }),
            guard: Guard::none(),
        }
    }

    /// No body; it can be replayed at no cost.
    pub fn empty() -> Self {
        Self::whole(Bytes::new(), None)
    }

    /// What was read so far and the rest as it comes.
    pub(super) fn streamed(ahead: VecDeque<Bytes>, rest: B, guard: Guard) -> Self {
        Self {
            rest: Some(rest),
            ahead,
            trailers: None,
            replay: None,
            guard,
        }
    }

    /// The same body from its first byte, however much of this one has been sent: while the whole body is buffered and
    /// not released.
    pub fn try_clone(&self) -> Option<Self> {
        let replay = self.replay.clone()?;
        Some(Self::whole(replay.body, replay.trailers))
    }

    /// Whether [`ReplayBody::try_clone`] gives a clone.
    pub fn is_replayable(&self) -> bool {
        self.replay.is_some()
    }

    /// The whole body, while it can be replayed.
    pub fn bytes(&self) -> Option<&Bytes> {
        self.replay.as_ref().map(|replay| &replay.body)
    }

    /// Gives up the right to replay. What has not been sent yet still is; what has been sent is freed, as far as no
    /// clone needs it.
    pub fn release(&mut self) {
        self.replay = None;
    }

    /// The same request with another body, for a value that was spliced in; trailers stay. A body that is not
    /// buffered stays as it is.
    pub fn with_bytes(self, body: Bytes) -> Self {
        match self.replay {
            Some(replay) => Self::whole(body, replay.trailers),
            None => self,
        }
    }
}

impl<B> Body for ReplayBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Error>,
{
    type Data = Bytes;
    type Error = PeekError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, PeekError>>> {
        let mut this = self.project();
        while let Some(data) = this.ahead.pop_front() {
            if data.has_remaining() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
        }
        if let Some(trailers) = this.trailers.take() {
            return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
        }
        let Some(rest) = this.rest.as_mut().as_pin_mut() else {
            return Poll::Ready(None);
        };
        let polled = rest.poll_frame(cx);
        match ready!(this.guard.watch(polled, cx)) {
            Some(Ok(frame)) => Poll::Ready(Some(Ok(frame))),
            end => {
                // Neither after its end nor after an error is a body polled again.
                this.rest.set(None);
                Poll::Ready(end)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.iter().all(Bytes::is_empty)
            && self.trailers.is_none()
            && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let ahead = self.ahead.iter().map(|b| b.len() as u64).sum();
        let Some(rest) = &self.rest else {
            return SizeHint::with_exact(ahead);
        };
        let rest = rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(ahead.saturating_add(rest.lower()));
        if let Some(upper) = rest.upper() {
            hint.set_upper(ahead.saturating_add(upper));
        }
        hint
    }
}

impl<B> fmt::Debug for ReplayBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplayBody")
            .field("replayable", &self.is_replayable())
            .field("live", &self.rest.is_some())
            .finish_non_exhaustive()
    }
}

// === impl Guard ===

impl Guard {
    fn none() -> Self {
        Self {
            left: 0,
            cap: 0,
            idle: Duration::MAX,
            sleep: None,
        }
    }

    /// Lets what was polled of the live rest pass, if it is neither too much nor too late.
    pub(super) fn watch<E: Into<Error>>(
        &mut self,
        polled: Poll<Option<Result<Frame<Bytes>, E>>>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, PeekError>>> {
        let Poll::Ready(frame) = polled else {
            let idle = self.idle;
            let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep(idle)));
            ready!(sleep.as_mut().poll(cx));
            return Poll::Ready(Some(Err(PeekError::Stalled { idle })));
        };
        self.sleep = None;
        let frame = match frame {
            None => return Poll::Ready(None),
            Some(Err(error)) => return Poll::Ready(Some(Err(PeekError::Body(error.into())))),
            Some(Ok(frame)) => frame,
        };
        let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
        let Some(left) = self.left.checked_sub(bytes) else {
            return Poll::Ready(Some(Err(PeekError::TooLarge { cap: self.cap })));
        };
        self.left = left;
        Poll::Ready(Some(Ok(frame)))
    }
}

#[cfg(test)]
mod tests;
