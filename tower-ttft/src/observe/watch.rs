//! The outermost `usage` and `error` of a JSON answer of any size, in constant memory.

/// A value is not kept beyond this many bytes; engines' `usage` and `error` objects are far below.
const MAX_VALUE: usize = 16 * 1024;

/// The longest key that is looked for.
const MAX_KEY: usize = 8;

/// Reads a JSON object as it comes.
///
/// It checks no grammar. It follows strings and brackets, which is enough to tell the outermost keys from the same
/// words inside of content.
#[derive(Debug, Default)]
pub(super) struct JsonWatch {
    depth: u64,
    /// Inside a string; the byte before was a backslash that escapes.
    in_string: bool,
    escaped: bool,
    /// At depth 1: behind a key's colon.
    in_value: bool,
    /// The last string at depth 1, as far as it may be a key that is looked for.
    key: Vec<u8>,
    /// What the value at hand is kept as.
    keep: Option<Kept>,
    too_long: bool,
    value: Vec<u8>,
    usage: Option<Vec<u8>>,
    error: Option<Vec<u8>>,
    opened: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Usage,
    Error,
}

// === impl JsonWatch ===

impl JsonWatch {
    /// The raw `usage`, if it has come.
    pub(super) fn usage(&self) -> Option<&[u8]> {
        self.usage.as_deref()
    }

    /// The raw `error`, if one has come that is not null; empty if it was too long to keep.
    pub(super) fn error(&self) -> Option<&[u8]> {
        self.error.as_deref()
    }

    /// Whether the object has been closed.
    pub(super) fn is_complete(&self) -> bool {
        self.opened && self.depth == 0
    }

    /// Takes the next bytes.
    pub(super) fn push(&mut self, chunk: &[u8]) {
        let mut rest = chunk;
        while let Some((&byte, tail)) = rest.split_first() {
            if self.in_string {
                let text = self.string(rest);
                let (text, tail) = rest.split_at_checked(text).unwrap_or((rest, &[]));
                self.take(text);
                if self.depth == 1 && !self.in_value {
                    let room = (MAX_KEY + 1).saturating_sub(self.key.len());
                    self.key.extend(text.iter().take(room));
                }
                rest = tail;
                continue;
            }
            match byte {
                b'"' => {
                    self.in_string = true;
                    if self.depth == 1 && !self.in_value {
                        self.key.clear();
                    }
                }
                b'{' | b'[' => {
                    self.depth += 1;
                    self.opened = true;
                }
                b'}' | b']' => {
                    if self.depth == 1 {
                        self.end_value();
                    }
                    self.depth = self.depth.saturating_sub(1);
                }
                b',' if self.depth == 1 => self.end_value(),
                b':' if self.depth == 1 && !self.in_value => {
                    self.in_value = true;
                    self.keep = match &*self.key {
                        b"usage\"" => Some(Kept::Usage),
                        b"error\"" => Some(Kept::Error),
                        _ => None,
                    };
                    rest = tail;
                    continue;
                }
                _ => {}
            }
            if self.in_value {
                self.take(&[byte]);
            }
            rest = tail;
        }
    }

    /// How much of `rest` belongs to the string at hand, its closing quote included.
    fn string(&mut self, rest: &[u8]) -> usize {
        let mut at = 0;
        if std::mem::take(&mut self.escaped) {
            at = 1;
        }
        while let Some(found) = rest.get(at..).and_then(|r| memchr::memchr2(b'"', b'\\', r)) {
            at += found;
            if rest.get(at) == Some(&b'"') {
                self.in_string = false;
                return at + 1;
            }
            at += 2;
        }
        // A backslash at the very end escapes what comes next.
        self.escaped = at > rest.len();
        rest.len()
    }

    fn take(&mut self, bytes: &[u8]) {
        if self.keep.is_none() || self.too_long {
            return;
        }
        if self.value.len() + bytes.len() > MAX_VALUE {
            self.too_long = true;
            self.value.clear();
            return;
        }
        self.value.extend_from_slice(bytes);
    }

    fn end_value(&mut self) {
        self.in_value = false;
        self.key.clear();
        let value = std::mem::take(&mut self.value);
        let too_long = std::mem::take(&mut self.too_long);
        let value = value.trim_ascii();
        match self.keep.take() {
            Some(Kept::Usage) if !too_long && value != b"null" => self.usage = Some(value.to_vec()),
            Some(Kept::Error) if value != b"null" => self.error = Some(value.to_vec()),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn watched(json: &[u8], cuts: &[usize]) -> (Option<Vec<u8>>, Option<Vec<u8>>, bool) {
        let mut watch = JsonWatch::default();
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c % (json.len() + 1)).collect();
        cuts.extend([0, json.len()]);
        cuts.sort_unstable();
        for pair in cuts.windows(2) {
            watch.push(&json[pair[0]..pair[1]]);
            assert!(watch.value.len() <= MAX_VALUE && watch.key.len() <= MAX_KEY + 1);
        }
        let own = |raw: Option<&[u8]>| raw.map(<[u8]>::to_vec);
        (own(watch.usage()), own(watch.error()), watch.is_complete())
    }

    const ANSWER: &[u8] = br#" {"id":"x","choices":[{"message":{"content":"say \"usage\":{\"prompt_tokens\":9}, \"error\": {} \\","usage":{"prompt_tokens":8}}}],"key":"error","error":null, "usage" : {"prompt_tokens":13,"d":{"cached_tokens":[1]}, "s":"},\""} ,"prompt_token_ids":[1,2,3]} "#;

    #[test]
    fn only_the_outermost_keys_count() {
        let usage = br#"{"prompt_tokens":13,"d":{"cached_tokens":[1]}, "s":"},\""}"#;
        for cut in 0..=ANSWER.len() {
            assert_eq!(
                watched(ANSWER, &[cut]),
                (Some(usage.to_vec()), None, true),
                "cut at {cut}"
            );
        }
        for end in 0..ANSWER.len() - 2 {
            let (_, error, complete) = watched(&ANSWER[..end], &[]);
            assert_eq!((error, complete), (None, false), "ends at {end}");
        }
    }

    #[test]
    fn errors() {
        let body = br#"{"error":{"message":"EngineCore encountered an issue.","code":500}}"#;
        let (usage, error, complete) = watched(body, &[]);
        assert_eq!((usage, complete), (None, true));
        assert_eq!(error.as_deref(), Some(&body[9..body.len() - 1]));
        let long = format!(r#"{{"usage":"{0}","error":"{0}"}}"#, "x".repeat(MAX_VALUE));
        assert_eq!(
            watched(long.as_bytes(), &[5, 100, 9000]),
            (None, Some(vec![]), true)
        );
    }

    #[test]
    fn large_answers_take_no_memory() {
        let mut watch = JsonWatch::default();
        watch.push(b"{\"data\":[");
        for _ in 0..1000 {
            watch.push(
                "{\"embedding\":[0.1,-0.2,\"usage\"],\"usage\":{\"prompt_tokens\":1}},"
                    .repeat(20)
                    .as_bytes(),
            );
        }
        watch.push(b"0],\"usage\":{\"prompt_tokens\":5}}");
        assert_eq!(watch.usage(), Some(&b"{\"prompt_tokens\":5}"[..]));
        assert!(watch.value.capacity() <= MAX_VALUE);
    }

    proptest! {
        #[test]
        fn splits_never_matter(cuts in prop::collection::vec(any::<usize>(), 0..60)) {
            prop_assert_eq!(watched(ANSWER, &cuts), watched(ANSWER, &[]));
        }

        #[test]
        fn nothing_crashes(bytes in prop::collection::vec(prop::sample::select(&b"{}[]\":,\\ usage error null 1"[..]), 0..80), cuts in prop::collection::vec(any::<usize>(), 0..10)) {
            prop_assert_eq!(watched(&bytes, &cuts), watched(&bytes, &[]));
        }
    }
}
