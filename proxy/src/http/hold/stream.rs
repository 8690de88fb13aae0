//! The body of a stream, before and after it is committed.

use super::{
    HoldError,
    events::{Events, MAX_EVENT, Read},
};
use crate::http::{
    models::PathPolicy,
    record::{Outcome, Record},
    reply::Reply,
};
use bytes::Bytes;
use http::StatusCode;
use http_body::{Body, Frame};
use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::{Instant, Sleep};
use tower_ttft::{Error, observe::EventKind, peek::Api};

/// Between our last event and the abnormal end: the server must have sent the event before it learns of the end, for
/// it throws away what it has not sent yet.
const LAST_WORDS: Duration = Duration::from_millis(50);

/// What clients get when nothing else may be said yet: a comment, which their parsers skip.
const COMMENT: &[u8] = b": still waiting for the first token\n\n";

/// Reads a stream of events and knows how long it may be silent.
pub(super) struct Stream<B> {
    /// None once it has ended.
    inner: Option<Pin<Box<B>>>,
    events: Events,
    api: Api,
    record: Record,
    /// When the engine was asked.
    sent: Instant,
    first_token_timeout: Duration,
    idle_timeout: Duration,
    keep_alive: Duration,
    /// Something other than a comment came.
    begun: bool,
    last: Instant,
    timer: Pin<Box<Sleep>>,
}

/// What a stream did.
pub(super) enum Step {
    /// Bytes came.
    Read(Read),
    /// It ended in order.
    End,
    /// It broke off, or was silent for too long.
    Failed(HoldError),
}

/// The body of a committed stream: whole events as they come, then the stream's own end, or an event that says why there
/// is none and an abnormal end.
pub struct StreamBody<B> {
    stream: Stream<B>,
    state: State,
    /// When the next comment is due, while nothing came.
    comment: Option<Pin<Box<Sleep>>>,
}

enum State {
    Streaming,
    /// The last words are out; the end comes when they have had time to leave.
    Failing(Pin<Box<Sleep>>),
    Done,
}

/// The abnormal end of a stream. Servers turn it into a body that is visibly not whole: no last chunk in HTTP/1, a reset
/// in HTTP/2.
#[derive(Debug, thiserror::Error)]
#[error("the stream ended before the answer did")]
pub struct Aborted(());

// === impl Stream ===

impl<B> Stream<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Error>,
{
    pub(super) fn new(
        inner: B,
        api: Api,
        record: Record,
        sent: Instant,
        policy: &PathPolicy,
    ) -> Self {
        Self {
            inner: Some(Box::pin(inner)),
            events: Events::new(api, record.clone()),
            api,
            record,
            sent,
            first_token_timeout: policy.first_token_timeout,
            idle_timeout: policy.idle_timeout,
            keep_alive: policy.keep_alive,
            begun: false,
            last: sent,
            timer: Box::pin(tokio::time::sleep_until(sent + policy.first_token_timeout)),
        }
    }

    pub(super) fn events(&self) -> &Events {
        &self.events
    }

    /// Whether so much of the first event came that it is passed on unread.
    pub(super) fn is_full(&self) -> bool {
        self.events.held() > MAX_EVENT
    }

    /// Drops the engine's body, which ends its ticket and its connection.
    pub(super) fn close(&mut self) {
        self.inner = None;
    }

    pub(super) fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<Step> {
        let Some(inner) = self.inner.as_mut() else {
            return Poll::Ready(Step::End);
        };
        loop {
            match inner.as_mut().poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    // Trailers of an engine say nothing that a client of ours could want.
                    let Ok(data) = frame.into_data() else {
                        continue;
                    };
                    self.last = Instant::now();
                    let read = self.events.push(data);
                    self.begun |= !matches!(read, Read::Nothing);
                    return Poll::Ready(Step::Read(read));
                }
                Poll::Ready(Some(Err(error))) => {
                    self.inner = None;
                    return Poll::Ready(Step::Failed(HoldError::Broken(error.into())));
                }
                Poll::Ready(None) => {
                    self.inner = None;
                    self.events.finish();
                    return Poll::Ready(Step::End);
                }
                Poll::Pending => break,
            }
        }
        let error = ready!(self.poll_silence(cx));
        self.inner = None;
        Poll::Ready(Step::Failed(error))
    }

    /// Resolves when it has been silent for too long.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<HoldError> {
        loop {
            let (deadline, error) = if self.begun {
                let error = HoldError::Idle(self.idle_timeout);
                (self.last + self.idle_timeout, error)
            } else {
                let error = HoldError::FirstToken(self.first_token_timeout);
                (self.sent + self.first_token_timeout, error)
            };
            // The timer is moved when it fires, not with every frame; only an earlier deadline cannot wait for that.
            if deadline < self.timer.deadline() {
                self.timer.as_mut().reset(deadline);
            }
            ready!(self.timer.as_mut().poll(cx));
            if Instant::now() >= deadline {
                return Poll::Ready(error);
            }
            self.timer.as_mut().reset(deadline);
        }
    }
}

// === impl StreamBody ===

impl<B> StreamBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Error>,
{
    /// Commits a stream. `comments`: nothing came yet.
    pub(super) fn new(stream: Stream<B>, comments: bool) -> Self {
        let comment = comments.then(|| Box::pin(tokio::time::sleep(Duration::ZERO)));
        Self {
            stream,
            state: State::Streaming,
            comment,
        }
    }

    /// Commits a stream that has just read an error.
    pub(super) fn failing(stream: Stream<B>) -> Self {
        let mut body = Self::new(stream, false);
        body.fail(Outcome::engine_error);
        body
    }

    /// Nothing but what is ready goes out now; then comes the abnormal end.
    fn fail(&mut self, outcome: Outcome) {
        self.stream.record.outcome(outcome);
        self.stream.close();
        self.comment = None;
        self.state = State::Failing(Box::pin(tokio::time::sleep(LAST_WORDS)));
    }

    /// The engine did not say why its stream ends, so we do.
    fn explain(&mut self, error: &HoldError) -> Bytes {
        tracing::debug!(%error, "A stream died");
        let (outcome, reply) = match error {
            HoldError::FirstToken(_) | HoldError::Idle(_) => (
                Outcome::timeout,
                Reply::new(StatusCode::GATEWAY_TIMEOUT, error.code(), error.message()),
            ),
            _ => (
                Outcome::broken,
                Reply::new(StatusCode::BAD_GATEWAY, error.code(), error.message()),
            ),
        };
        let broken_up = self.stream.events.is_broken_up();
        // What is left of an event would only spoil ours.
        self.stream.events.clear();
        self.fail(outcome);
        let events = &self.stream.events;
        let event = reply.into_event(self.stream.api, events.count(), events.response());
        if broken_up {
            [b"\n\n", &event[..]].concat().into()
        } else {
            event
        }
    }

    fn poll_comment(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(comment) = self.comment.as_mut() else {
            return Poll::Pending;
        };
        ready!(comment.as_mut().poll(cx));
        comment
            .as_mut()
            .reset(Instant::now() + self.stream.keep_alive);
        Poll::Ready(())
    }
}

impl<B> Body for StreamBody<B>
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
        loop {
            if let Some(bytes) = this.stream.events.pop() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            match &mut this.state {
                State::Streaming => {}
                State::Failing(until) => {
                    ready!(until.as_mut().poll(cx));
                    this.state = State::Done;
                    return Poll::Ready(Some(Err(Aborted(()).into())));
                }
                State::Done => return Poll::Ready(None),
            }
            match this.stream.poll_step(cx) {
                Poll::Ready(Step::Read(read)) => {
                    // The first event may still be the one by which an engine refuses.
                    let first = this.comment.is_some() && this.stream.begun;
                    match read {
                        Read::Events(EventKind::AbortEmpty) if first => {
                            let error = HoldError::Refused(super::Refusal::aborted);
                            let event = this.explain(&error);
                            return Poll::Ready(Some(Ok(Frame::data(event))));
                        }
                        Read::Error(_) => this.fail(Outcome::engine_error),
                        _ if first => this.comment = None,
                        _ => {}
                    }
                }
                Poll::Ready(Step::End) => {
                    this.state = State::Done;
                    this.comment = None;
                }
                Poll::Ready(Step::Failed(error)) => {
                    let event = this.explain(&error);
                    return Poll::Ready(Some(Ok(Frame::data(event))));
                }
                Poll::Pending => {
                    ready!(this.poll_comment(cx));
                    return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, State::Done) && self.stream.events.held() == 0
    }
}

impl<B> fmt::Debug for StreamBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamBody").finish_non_exhaustive()
    }
}
