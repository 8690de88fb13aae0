//! Bodies of the admin server: whole, or line by line as they come.

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};
use tokio::sync::mpsc;

/// A body.
pub(super) enum Body {
    /// All of it.
    Full(Option<Bytes>),
    /// Lines, until their sender is gone.
    Lines(mpsc::Receiver<Bytes>),
}

// === impl Body ===

impl Body {
    pub(super) fn full(body: impl Into<Bytes>) -> Self {
        let body = body.into();
        Self::Full((!body.is_empty()).then_some(body))
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Full(body) => Poll::Ready(body.take().map(|b| Ok(Frame::data(b)))),
            Self::Lines(lines) => lines
                .poll_recv(cx)
                .map(|line| line.map(|l| Ok(Frame::data(l)))),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Full(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(body) => SizeHint::with_exact(body.as_ref().map_or(0, |b| b.len() as u64)),
            Self::Lines(_) => SizeHint::default(),
        }
    }
}
