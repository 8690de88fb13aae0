//! Server-sent events, framed from any split of their bytes
//! (<https://html.spec.whatwg.org/multipage/server-sent-events.html>).

use std::borrow::Cow;

/// Of an event that is too long, this much is still given: enough for its name.
const HEAD: usize = 256;

/// Finds events in a stream. Lines end with LF, CRLF or CR, an empty line ends an event.
///
/// It holds at most one unfinished event of at most `cap` bytes; events that arrive whole are not copied.
#[derive(Debug)]
pub struct SseFramer {
    cap: usize,
    /// The unfinished event, as far as it came with earlier chunks.
    held: Vec<u8>,
    /// The unfinished event is over the cap; `held` is its head.
    too_long: bool,
    /// Nothing is on the current line yet.
    line_empty: bool,
    /// The last byte was a CR, so that an LF right behind it ends no further line.
    after_cr: bool,
    /// No event was given yet: a byte order mark may come.
    at_start: bool,
}

/// What [`SseFramer`] found.
#[derive(Clone, Copy, Debug)]
pub enum Framed<'a> {
    /// An event, or a block of comments.
    Event(SseEvent<'a>),
    /// An event of more bytes than the cap; only its beginning is here.
    TooLong(SseEvent<'a>),
}

/// An event as it came, without the empty line that ends it.
#[derive(Clone, Copy)]
pub struct SseEvent<'a> {
    raw: &'a [u8],
}

// === impl SseFramer ===

impl SseFramer {
    /// A framer of events of at most `cap` bytes.
    pub fn new(cap: usize) -> Self {
        Self {
            cap,
            held: Vec::new(),
            too_long: false,
            line_empty: true,
            after_cr: false,
            at_start: true,
        }
    }

    /// How many bytes of an unfinished event are held.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Takes the next bytes of the stream and gives the events that end in them.
    pub fn push(&mut self, chunk: &[u8], mut found: impl FnMut(Framed<'_>)) {
        // Where the current event goes on in this chunk, and up to where the chunk was looked at.
        let (mut start, mut seen) = (0, 0);
        while let Some(rest) = chunk.get(seen..).filter(|rest| !rest.is_empty()) {
            let Some(text) = memchr::memchr2(b'\n', b'\r', rest) else {
                self.line_empty = false;
                self.after_cr = false;
                break;
            };
            let at = seen + text;
            seen = at + 1;
            if text > 0 {
                self.line_empty = false;
                self.after_cr = false;
            }
            let cr = rest.get(text) == Some(&b'\r');
            if !cr && self.after_cr {
                self.after_cr = false;
                // The rest of a CRLF. Behind the end of an event it belongs to no event.
                if start == at && self.held.is_empty() {
                    start = seen;
                }
                continue;
            }
            self.after_cr = cr;
            if self.line_empty {
                self.end_event(chunk.get(start..at).unwrap_or_default(), &mut found);
                start = seen;
            }
            self.line_empty = true;
        }
        self.hold(chunk.get(start..).unwrap_or_default());
    }

    /// The stream ended: gives what is left without an empty line behind it. Clients drop such an event; whoever counts
    /// tokens must not.
    pub fn finish(&mut self, mut found: impl FnMut(Framed<'_>)) {
        self.end_event(&[], &mut found);
    }

    fn end_event(&mut self, tail: &[u8], found: &mut impl FnMut(Framed<'_>)) {
        let mut held = std::mem::take(&mut self.held);
        let too_long = self.too_long || held.len() + tail.len() > self.cap;
        self.too_long = false;
        let whole = if held.is_empty() {
            tail
        } else if too_long {
            // Only the head is given.
            held.extend(tail.iter().take(HEAD));
            &held
        } else {
            held.extend_from_slice(tail);
            &held
        };
        let raw = if self.at_start {
            whole.strip_prefix(b"\xef\xbb\xbf").unwrap_or(whole)
        } else {
            whole
        };
        if raw.iter().all(|b| matches!(b, b'\r' | b'\n')) {
            return;
        }
        self.at_start = false;
        if too_long {
            let raw = raw.get(..HEAD).unwrap_or(raw);
            found(Framed::TooLong(SseEvent { raw }));
        } else {
            found(Framed::Event(SseEvent { raw }));
        }
    }

    fn hold(&mut self, part: &[u8]) {
        if !self.too_long && self.held.len() + part.len() <= self.cap {
            self.held.extend_from_slice(part);
            return;
        }
        if !self.too_long {
            self.too_long = true;
            self.held.truncate(HEAD);
            self.held.shrink_to_fit();
        }
        let missing = HEAD.saturating_sub(self.held.len());
        self.held.extend(part.iter().take(missing));
    }
}

// === impl SseEvent ===

impl<'a> SseEvent<'a> {
    /// An event from the bytes of its lines.
    pub fn new(raw: &'a [u8]) -> Self {
        Self { raw }
    }

    /// The event's lines as they came.
    pub fn raw(&self) -> &'a [u8] {
        self.raw
    }

    /// The `event` field.
    pub fn name(&self) -> Option<&'a [u8]> {
        self.values(b"event").last()
    }

    /// The `data` fields, joined by line feeds; none if there is none.
    pub fn data(&self) -> Option<Cow<'a, [u8]>> {
        let mut lines = self.values(b"data");
        let mut data = Cow::Borrowed(lines.next()?);
        for line in lines {
            let data = data.to_mut();
            data.push(b'\n');
            data.extend_from_slice(line);
        }
        Some(data)
    }

    fn values(&self, field: &'static [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.raw
            .split(|b| matches!(b, b'\n' | b'\r'))
            .filter_map(move |line| {
                let rest = line.strip_prefix(field)?;
                if rest.is_empty() {
                    return Some(rest);
                }
                let value = rest.strip_prefix(b":")?;
                Some(value.strip_prefix(b" ").unwrap_or(value))
            })
    }
}

/// Its size only: events hold answers.
impl std::fmt::Debug for SseEvent<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SseEvent")
            .field("bytes", &self.raw.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What came of `stream` cut at `cuts`: `(too long, name, data)` of each event.
    type Found = Vec<(bool, Option<Vec<u8>>, Option<Vec<u8>>)>;

    fn framed(stream: &[u8], cuts: &[usize], cap: usize) -> Found {
        let mut found = Vec::new();
        let mut framer = SseFramer::new(cap);
        let mut note = |framed: Framed<'_>| {
            let (long, event) = match framed {
                Framed::Event(event) => (false, event),
                Framed::TooLong(event) => (true, event),
            };
            found.push((
                long,
                event.name().map(<[u8]>::to_vec),
                event.data().filter(|_| !long).map(Cow::into_owned),
            ));
        };
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c % (stream.len() + 1)).collect();
        cuts.extend([0, stream.len()]);
        cuts.sort_unstable();
        for pair in cuts.windows(2) {
            framer.push(&stream[pair[0]..pair[1]], &mut note);
            assert!(framer.held() <= cap.max(HEAD));
        }
        framer.finish(&mut note);
        found
    }

    fn event(name: Option<&str>, data: Option<&str>) -> (bool, Option<Vec<u8>>, Option<Vec<u8>>) {
        (false, name.map(Into::into), data.map(Into::into))
    }

    const STREAM: &str = "\u{feff}data: one\n\n: a comment\n\nevent: e\ndata: two\ndata:  lines\n\n\ndata\n\ndata:{\"é\":1}\nid: 7\n\ndatax: no\n\ndata: end";

    fn expected() -> Found {
        vec![
            event(None, Some("one")),
            event(None, None),
            event(Some("e"), Some("two\n lines")),
            event(None, Some("")),
            event(None, Some("{\"é\":1}")),
            event(None, None),
            event(None, Some("end")),
        ]
    }

    #[test]
    fn every_line_end_and_every_single_cut() {
        for newline in ["\n", "\r\n", "\r"] {
            let stream = STREAM.replace('\n', newline);
            for cut in 0..=stream.len() {
                let found = framed(stream.as_bytes(), &[cut], 1000);
                assert_eq!(found, expected(), "{newline:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn what_is_too_long_passes_and_is_forgotten() {
        let long = "x".repeat(3000);
        let stream = format!("data: a\n\nevent: response.completed\ndata: {long}\n\ndata: b\n\n");
        for cuts in [vec![], vec![500, 1000, 1500, 2000], (0..3100).collect()] {
            let found = framed(stream.as_bytes(), &cuts, 1000);
            assert_eq!(
                found,
                [
                    event(None, Some("a")),
                    (true, Some(b"response.completed".to_vec()), None),
                    event(None, Some("b")),
                ]
            );
        }
    }

    #[test]
    fn a_line_without_end_holds_no_memory() {
        let mut framer = SseFramer::new(1024);
        let mut found = 0;
        for _ in 0..10_000 {
            framer.push(&[b'x'; 4096], |_| found += 1);
            assert!(framer.held() <= HEAD);
            assert!(framer.held.capacity() <= 1024);
        }
        assert_eq!(found, 0);
    }

    proptest! {
        #[test]
        fn splits_never_matter(cuts in prop::collection::vec(any::<usize>(), 0..40), newlines in prop::collection::vec(prop::sample::select(&["\n", "\r\n", "\r"][..]), 1..5)) {
            // Line ends may even change within a stream, but a CR must not meet an LF that is meant as a line of its own.
            let mut ends = newlines.iter().cycle();
            let mut stream = String::new();
            for c in STREAM.chars() {
                let mut end = *ends.next().expect("endless");
                if c == '\n' {
                    if end == "\n" && stream.ends_with('\r') {
                        end = "\r\n";
                    }
                    stream.push_str(end);
                } else {
                    stream.push(c);
                }
            }
            prop_assert_eq!(framed(stream.as_bytes(), &cuts, 1000), expected());
        }

        #[test]
        fn any_bytes_in_any_split_give_the_same(stream in prop::collection::vec(prop::sample::select(&b"\r\n:ad taevn\xef\xbb\xbf"[..]), 0..80), cuts in prop::collection::vec(any::<usize>(), 0..20), cap in 0usize..30) {
            prop_assert_eq!(framed(&stream, &cuts, cap), framed(&stream, &[], cap));
        }
    }
}
