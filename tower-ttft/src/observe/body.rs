//! The response body that is watched.

use super::{
    End, Observer,
    classify::{EventKind, classify_event},
    sse::{Framed, SseEvent, SseFramer},
    usage::UsageParts,
    watch::JsonWatch,
};
use crate::peek::Api;
use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use memchr::memmem;
use pin_project_lite::pin_project;
use std::{
    pin::Pin,
    sync::LazyLock,
    task::{Context, Poll, ready},
};
use tokio::time::Instant;

/// Events of more bytes than this are passed on unread. A `response.completed` holds the whole answer once more, so it
/// is far above what deltas need; only an event that comes in pieces is held at all.
const MAX_EVENT: usize = 1 << 20;

/// Behind the first token, an event without any of these words holds nothing that is told to an observer.
static WORDS: LazyLock<[memmem::Finder<'static>; 6]> = LazyLock::new(|| {
    [
        "\"usage\"",
        "error",
        "[DONE]",
        "message_stop",
        "response.completed",
        "response.incomplete",
    ]
    .map(memmem::Finder::new)
});

pin_project! {
    /// Passes an answer's frames on untouched and unbuffered, and tells `O` what is in them.
    ///
    /// A body with a `Content-Encoding` is not read: only its first byte and its end are told. Dropping the body tells
    /// nothing more, which an observer sees as cancelled, unless the answer had already said its end: a client may
    /// leave at `[DONE]`.
    pub struct ObserveBody<B, O: Observer> {
        #[pin]
        inner: B,
        watch: Option<Watch<O>>,
    }

    impl<B, O: Observer> PinnedDrop for ObserveBody<B, O> {
        fn drop(this: Pin<&mut Self>) {
            if let Some(watch) = this.project().watch.take() {
                watch.dropped();
            }
        }
    }
}

/// What is known of an answer so far.
struct Watch<O> {
    observer: O,
    api: Api,
    /// The status alone says that this is no answer.
    refused: bool,
    shape: Shape,
    any_byte: bool,
    any_token: bool,
    usage: UsageParts,
    failed: bool,
    /// The protocol's own end has come.
    terminal: bool,
}

enum Shape {
    Events(SseFramer),
    Json(JsonWatch),
    Opaque,
}

// === impl ObserveBody ===

impl<B, O: Observer> ObserveBody<B, O> {
    /// Watches `inner`, the body of an answer of `api` with this head.
    pub fn new(
        inner: B,
        api: Api,
        status: StatusCode,
        headers: &HeaderMap,
        observer: O,
    ) -> ObserveBody<B, O> {
        Self {
            inner,
            watch: Some(Watch {
                observer,
                api,
                refused: status.is_client_error() || status.is_server_error(),
                shape: Shape::of(headers),
                any_byte: false,
                any_token: false,
                usage: UsageParts::default(),
                failed: false,
                terminal: false,
            }),
        }
    }
}

impl<B, O> Body for ObserveBody<B, O>
where
    B: Body<Data = Bytes>,
    O: Observer,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let mut this = self.project();
        let frame = ready!(this.inner.as_mut().poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                if let (Some(watch), Some(data)) = (this.watch.as_mut(), frame.data_ref()) {
                    watch.data(data);
                }
                // A body of known length is not polled again behind its last frame.
                if this.inner.is_end_stream()
                    && let Some(watch) = this.watch.take()
                {
                    watch.ended();
                }
            }
            None => {
                if let Some(watch) = this.watch.take() {
                    watch.ended();
                }
            }
            Some(Err(_)) => {
                if let Some(watch) = this.watch.take() {
                    watch.broke();
                }
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

// === impl Shape ===

impl Shape {
    fn of(headers: &HeaderMap) -> Self {
        let is = |value: &[u8], kind: &[u8]| {
            let value = value.split(|b| *b == b';').next().unwrap_or_default();
            value.trim_ascii().eq_ignore_ascii_case(kind)
        };
        let content_type = headers
            .get(header::CONTENT_TYPE)
            .map_or(&b""[..], |v| v.as_bytes());
        if headers.contains_key(header::CONTENT_ENCODING) {
            Self::Opaque
        } else if is(content_type, b"text/event-stream") {
            Self::Events(SseFramer::new(MAX_EVENT))
        } else if is(content_type, b"application/json") {
            Self::Json(JsonWatch::default())
        } else {
            Self::Opaque
        }
    }
}

// === impl Watch ===

impl<O: Observer> Watch<O> {
    fn data(&mut self, data: &Bytes) {
        if data.is_empty() {
            return;
        }
        if !self.any_byte {
            self.any_byte = true;
            self.observer.first_byte(Instant::now());
        }
        // Taken out while events are read, which changes the rest.
        match std::mem::replace(&mut self.shape, Shape::Opaque) {
            Shape::Events(mut framer) => {
                framer.push(data, |framed| self.framed(framed));
                self.shape = Shape::Events(framer);
            }
            Shape::Json(mut watch) => {
                watch.push(data);
                self.shape = Shape::Json(watch);
            }
            Shape::Opaque => {}
        }
    }

    fn framed(&mut self, framed: Framed<'_>) {
        match framed {
            Framed::Event(event) => {
                if !self.any_token || WORDS.iter().any(|w| w.find(event.raw()).is_some()) {
                    self.event(&event);
                }
            }
            // The end of a response is the only event that grows with the answer: its name is enough for the end.
            Framed::TooLong(head) => match head.name() {
                Some(b"response.completed" | b"response.incomplete") => self.terminal = true,
                Some(b"response.failed" | b"error") => self.failed = true,
                _ => {}
            },
        }
    }

    fn event(&mut self, event: &SseEvent<'_>) {
        let classified = classify_event(self.api, event);
        match classified.kind {
            EventKind::Token if !self.any_token => {
                self.any_token = true;
                self.observer.first_token(Instant::now());
            }
            EventKind::Error(_) => self.failed = true,
            // What was aborted is no answer, unless tokens came first: then some client asked for the abort.
            EventKind::AbortEmpty if !self.any_token => self.failed = true,
            EventKind::Terminal => self.terminal = true,
            _ => {}
        }
        if let Some(parts) = classified.usage {
            self.usage.update(parts);
            self.observer.usage(self.usage.usage());
        }
    }

    /// Reads what is left at the end of the bytes.
    fn finish(&mut self) {
        match std::mem::replace(&mut self.shape, Shape::Opaque) {
            Shape::Events(mut framer) => {
                framer.finish(|framed| self.framed(framed));
                // Of other APIs the end is not known; a whole body has to do.
                self.terminal |= self.api == Api::Other;
            }
            Shape::Json(watch) => {
                self.terminal = watch.is_complete();
                self.failed |= watch.error().is_some();
                if let Some(parts) = watch.usage().and_then(UsageParts::read) {
                    self.usage.update(parts);
                    self.observer.usage(self.usage.usage());
                }
            }
            Shape::Opaque => self.terminal = true,
        }
    }

    /// The body came to its end.
    fn ended(mut self) {
        self.finish();
        let end = if self.failed || self.refused {
            End::EngineError
        } else if self.terminal {
            End::Complete
        } else {
            End::Broken
        };
        self.observer.end(Instant::now(), end);
    }

    /// The body broke off. An error that the engine still told is the better reason.
    fn broke(mut self) {
        self.finish();
        let end = if self.failed {
            End::EngineError
        } else {
            End::Broken
        };
        self.observer.end(Instant::now(), end);
    }

    /// Nobody reads on.
    fn dropped(mut self) {
        let events = matches!(self.shape, Shape::Events(_));
        if events && self.failed {
            self.observer.end(Instant::now(), End::EngineError);
        } else if events && self.terminal {
            self.observer.end(Instant::now(), End::Complete);
        }
    }
}

#[cfg(test)]
mod tests;
