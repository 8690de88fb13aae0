//! A body that does as it is told.

use crate::Error;
use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::{Sleep, sleep};

/// Gives its frames one by one.
pub(super) struct Scripted {
    steps: VecDeque<Step>,
    left: Option<u64>,
}

enum Step {
    Frame(Frame<Bytes>),
    Fail,
    Pause(Pin<Box<Sleep>>),
    Stall,
}

// === impl Scripted ===

impl Scripted {
    pub(super) fn new(parts: impl IntoIterator<Item = Bytes>) -> Self {
        Self {
            steps: parts
                .into_iter()
                .map(|p| Step::Frame(Frame::data(p)))
                .collect(),
            left: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    /// The size hint is exact.
    pub(super) fn say_length(&mut self, bytes: u64) {
        self.left = Some(bytes);
    }

    pub(super) fn push(&mut self, part: Bytes) {
        self.steps.push_back(Step::Frame(Frame::data(part)));
    }

    pub(super) fn push_trailers(&mut self, trailers: HeaderMap) {
        self.steps.push_back(Step::Frame(Frame::trailers(trailers)));
    }

    /// An error in place of the `at`th frame and of all behind it.
    pub(super) fn fail_at(&mut self, at: usize) {
        self.steps.truncate(at);
        self.steps.push_back(Step::Fail);
    }

    /// Nothing comes for a while.
    pub(super) fn pause(&mut self, time: Duration) {
        self.steps.push_back(Step::Pause(Box::pin(sleep(time))));
    }

    /// Nothing comes any more.
    pub(super) fn stall(&mut self) {
        self.steps.push_back(Step::Stall);
    }
}

impl Body for Scripted {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        loop {
            match self.steps.front_mut() {
                Some(Step::Stall) => return Poll::Pending,
                Some(Step::Pause(sleep)) => {
                    std::task::ready!(sleep.as_mut().poll(cx));
                    self.steps.pop_front();
                }
                _ => break,
            }
        }
        Poll::Ready(match self.steps.pop_front() {
            Some(Step::Frame(frame)) => {
                if let (Some(left), Some(data)) = (&mut self.left, frame.data_ref()) {
                    *left = left.saturating_sub(data.len() as u64);
                }
                Some(Ok(frame))
            }
            Some(_) => Some(Err("the client is gone".into())),
            None => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.steps.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.left
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
