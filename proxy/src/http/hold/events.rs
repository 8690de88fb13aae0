//! Reads a stream's events as they pass, and finds where they end.

use crate::http::record::Record;
use bytes::Bytes;
use memchr::memmem::Finder;
use std::{collections::VecDeque, sync::LazyLock};
use tokio::time::Instant;
use tower_ttft::{
    observe::{EventKind, Framed, SseEvent, SseFramer, UsageParts, classify_event},
    peek::{Api, json},
};

/// An event that is not complete after this many bytes is passed on in pieces.
pub(super) const MAX_EVENT: usize = 64 * 1024;

/// An event of up to this many bytes is still read: the last one of a response holds the whole answer and its usage.
const MAX_READ: usize = 1 << 20;

static ERROR: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("error"));
static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"usage\""));

/// The events of one stream. Bytes go in as they come and out in whole events, so that whatever has to be said when a
/// stream dies stands on a line of its own. Nothing is copied and nothing waits that is complete.
pub(super) struct Events {
    api: Api,
    framer: SseFramer,
    record: Record,
    /// Whole events.
    ready: VecDeque<Bytes>,
    /// The beginning of an event.
    tail: VecDeque<Bytes>,
    tail_len: usize,
    /// A part of the event at hand has been passed on.
    broken_up: bool,
    any_token: bool,
    usage: UsageParts,
    count: u64,
    response: Option<Box<str>>,
}

/// What came of some bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// No event is complete yet.
    Nothing,
    /// Events other than errors are complete; what the first one is.
    Events(EventKind),
    /// An error event is complete, and what came behind it has been dropped.
    Error(EventKind),
}

// === impl Events ===

impl Events {
    pub(super) fn new(api: Api, record: Record) -> Self {
        Self {
            api,
            framer: SseFramer::new(MAX_READ),
            record,
            ready: VecDeque::new(),
            tail: VecDeque::new(),
            tail_len: 0,
            broken_up: false,
            any_token: false,
            usage: UsageParts::default(),
            count: 0,
            response: None,
        }
    }

    /// Events so far, comments not counted.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The id of the response that the events belong to, where the first one says it.
    pub(super) fn response(&self) -> Option<&str> {
        self.response.as_deref()
    }

    /// Bytes that are kept.
    pub(super) fn held(&self) -> usize {
        self.tail_len + self.ready.iter().map(Bytes::len).sum::<usize>()
    }

    /// The next bytes to pass on.
    pub(super) fn pop(&mut self) -> Option<Bytes> {
        self.ready.pop_front()
    }

    /// Whether a client that was given all of [`Self::pop`] is within an event.
    pub(super) fn is_broken_up(&self) -> bool {
        self.broken_up
    }

    /// Forgets the events that are ready and the tail.
    pub(super) fn clear(&mut self) {
        self.ready.clear();
        self.tail.clear();
        self.tail_len = 0;
    }

    /// Takes the next bytes of the stream.
    pub(super) fn push(&mut self, chunk: Bytes) -> Read {
        let mut read = Read::Nothing;
        // Up to where the chunk was read, and up to where its events are complete.
        let (mut at, mut complete) = (0, 0);
        while let Some(rest) = chunk.get(at..).filter(|rest| !rest.is_empty()) {
            // One event at a time, so that it is known where an error ends.
            let len = if self.framer.held() > 0 {
                line(rest)
            } else {
                event(rest)
            };
            let mut kind = None;
            let mut framer = std::mem::replace(&mut self.framer, SseFramer::new(0));
            framer.push(rest.get(..len).unwrap_or(rest), |framed| {
                kind = Some(self.read(framed));
            });
            self.framer = framer;
            at += len;
            if self.framer.held() == 0 {
                complete = at;
            }
            match kind {
                None | Some(EventKind::Comment) => {}
                Some(kind @ EventKind::Error(_)) => {
                    self.release(chunk.slice(..at));
                    return Read::Error(kind);
                }
                Some(kind) => {
                    self.count += 1;
                    if read == Read::Nothing {
                        read = Read::Events(kind);
                    }
                }
            }
        }
        if complete > 0 {
            self.release(chunk.slice(..complete));
        }
        let rest = chunk.slice(complete..);
        if !rest.is_empty() {
            self.tail_len += rest.len();
            self.tail.push_back(rest);
        }
        if self.tail_len > 0 && (self.broken_up || self.tail_len > MAX_EVENT) {
            self.flush();
            self.broken_up = true;
        }
        read
    }

    /// The stream ended: what is left of it goes out too, whatever it is.
    pub(super) fn finish(&mut self) {
        let mut framer = std::mem::replace(&mut self.framer, SseFramer::new(0));
        framer.finish(|framed| {
            self.read(framed);
        });
        self.flush();
    }

    /// Puts bytes that end an event behind its beginning.
    fn release(&mut self, bytes: Bytes) {
        self.flush();
        self.broken_up = false;
        self.ready.push_back(bytes);
    }

    fn flush(&mut self) {
        self.ready.append(&mut self.tail);
        self.tail_len = 0;
    }

    fn read(&mut self, framed: Framed<'_>) -> EventKind {
        let event = match framed {
            Framed::Event(event) => event,
            // Of long ones the name has to do.
            Framed::TooLong(head) => {
                return match head.name() {
                    Some(b"error" | b"response.failed") => {
                        EventKind::Error(tower_ttft::observe::EngineError::unknown())
                    }
                    _ => EventKind::Other,
                };
            }
        };
        let raw = event.raw();
        let errors = ERROR.find(raw).is_some();
        if self.any_token && !errors && USAGE.find(raw).is_none() {
            return if raw.starts_with(b":") {
                EventKind::Comment
            } else {
                EventKind::Other
            };
        }
        let classified = classify_event(self.api, &event);
        if classified.kind == EventKind::Token && !self.any_token {
            self.any_token = true;
            self.record.first_token(Instant::now());
        }
        if let Some(parts) = classified.usage {
            self.usage.update(parts);
            self.record.usage(self.usage.usage());
        }
        if self.count == 0 && self.api == Api::Responses {
            self.response = response_id(&event);
        }
        classified.kind
    }
}

/// `response.id` of an event.
fn response_id(event: &SseEvent<'_>) -> Option<Box<str>> {
    let data = event.data()?;
    let response = json::member(&data, "response")?;
    let id = json::member(response, "id")?;
    let id: String = serde_json::from_slice(id).ok()?;
    (id.len() <= 256).then(|| id.into())
}

/// The length of the first line with its end.
fn line(bytes: &[u8]) -> usize {
    memchr::memchr2(b'\n', b'\r', bytes).map_or(bytes.len(), |at| at + 1)
}

/// The length of the first event with its empty line, if it is whole; else of all.
fn event(bytes: &[u8]) -> usize {
    let mut at = 0;
    while let Some(rest) = bytes.get(at..) {
        let Some(end) = memchr::memchr2(b'\n', b'\r', rest) else {
            break;
        };
        at += end + 1;
        if rest.get(end..).is_some_and(|r| r.starts_with(b"\r\n")) {
            at += 1;
        }
        match bytes.get(at..) {
            Some([b'\r', b'\n', ..]) => return at + 2,
            Some([b'\n' | b'\r', ..]) => return at + 1,
            _ => {}
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests;
