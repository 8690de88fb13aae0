//! Validation and the places of top-level values, in one pass.

use super::{MAX_DEPTH, MAX_FIELDS, MAX_INT_DIGITS, text};
use std::{borrow::Cow, ops::Range, str};

/// A key of the outermost object and where its value lies in the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field<'a> {
    /// The key, unescaped.
    pub key: Cow<'a, str>,
    /// The bytes of the value, without white space around it.
    pub value: Range<usize>,
}

/// Why a body cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Not UTF-8 with lone surrogates allowed.
    #[error("the text is not UTF-8 (at byte {0})")]
    Encoding(usize),
    /// Something else than JSON asks for here, or the end of the body.
    #[error("the text is not JSON (at byte {0})")]
    Syntax(usize),
    /// JSON, but no object.
    #[error("the text is JSON but no object")]
    NotAnObject,
    /// Deeper than [`MAX_DEPTH`].
    #[error("values nest deeper than {MAX_DEPTH} levels (at byte {0})")]
    TooDeep(usize),
    /// More keys than [`MAX_FIELDS`].
    #[error("the object has more than {MAX_FIELDS} keys")]
    TooManyFields,
}

/// Reads over `bytes[at..]`.
pub(super) struct Scanner<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
}

/// Which of the open containers are objects: one bit each, so that nesting costs no allocation.
struct Open {
    objects: [u64; MAX_DEPTH.div_ceil(64)],
    depth: usize,
}

/// All keys of the object in `body` in their order, each occurrence of a repeated key on its own. Keys that cannot be
/// told in UTF-8 (lone surrogates) are left out: no name that anybody asks for equals them.
pub fn fields(body: &[u8]) -> Result<Vec<Field<'_>>, Malformed> {
    text::check_encoding(body)?;
    let start = if body.starts_with(b"\xef\xbb\xbf") {
        3
    } else {
        0
    };
    let mut scan = Scanner {
        bytes: body,
        at: start,
    };
    scan.white_space();
    let fields = if scan.peek() == Some(b'{') {
        Some(scan.outermost_object()?)
    } else {
        scan.value(MAX_DEPTH)?;
        None
    };
    scan.white_space();
    if scan.at != body.len() {
        return Err(scan.syntax());
    }
    fields.ok_or(Malformed::NotAnObject)
}

/// The items of the array `raw`, without white space around them. At most [`MAX_FIELDS`] are allowed.
pub fn items(raw: &[u8]) -> Result<Vec<&[u8]>, Malformed> {
    text::check_encoding(raw)?;
    let mut scan = Scanner { bytes: raw, at: 0 };
    scan.white_space();
    scan.expect(b'[')?;
    scan.white_space();
    let mut items = Vec::new();
    if !scan.eat(b']') {
        loop {
            let start = scan.at;
            scan.value(MAX_DEPTH - 1)?;
            if items.len() == MAX_FIELDS {
                return Err(Malformed::TooManyFields);
            }
            items.push(scan.slice(start..scan.at));
            scan.white_space();
            if scan.eat(b']') {
                break;
            }
            scan.expect(b',')?;
            scan.white_space();
        }
    }
    scan.white_space();
    if scan.at != raw.len() {
        return Err(scan.syntax());
    }
    Ok(items)
}

/// The last value of the key `name` in the object `raw`; none if it is missing or null, or if `raw` is no object.
pub fn member<'a>(raw: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let fields = fields(raw).ok()?;
    let field = fields.iter().rev().find(|f| f.key == name)?;
    raw.get(field.value.clone()).filter(|v| *v != b"null")
}

// === impl Scanner ===

impl<'a> Scanner<'a> {
    fn outermost_object(&mut self) -> Result<Vec<Field<'a>>, Malformed> {
        let mut fields = Vec::with_capacity(16);
        let mut seen = 0;
        self.at += 1;
        self.white_space();
        if self.eat(b'}') {
            return Ok(fields);
        }
        loop {
            let (key, escaped) = self.key()?;
            let start = self.at;
            self.value(MAX_DEPTH - 1)?;
            let value = start..self.at;
            seen += 1;
            if seen > MAX_FIELDS {
                return Err(Malformed::TooManyFields);
            }
            let key = if escaped {
                text::unescape(key).ok()
            } else {
                str::from_utf8(key).ok().map(Cow::Borrowed)
            };
            if let Some(key) = key {
                fields.push(Field { key, value });
            }
            self.white_space();
            if self.eat(b'}') {
                return Ok(fields);
            }
            self.expect(b',')?;
            self.white_space();
        }
    }

    /// Passes over one value; containers in it may nest `levels` deep.
    pub(super) fn value(&mut self, levels: usize) -> Result<(), Malformed> {
        let mut open = Open::new();
        loop {
            let opened = match self.peek() {
                Some(b'"') => {
                    self.string()?;
                    false
                }
                Some(b @ (b'{' | b'[')) => {
                    if open.depth >= levels || !open.push(b == b'{') {
                        return Err(Malformed::TooDeep(self.at));
                    }
                    self.at += 1;
                    self.white_space();
                    let close = if b == b'{' { b'}' } else { b']' };
                    if self.eat(close) {
                        open.depth -= 1;
                        false
                    } else {
                        if b == b'{' {
                            self.key()?;
                        }
                        true
                    }
                }
                _ => {
                    self.scalar()?;
                    false
                }
            };
            if opened {
                continue;
            }
            // A value has ended: close what ends with it, up to where the next value begins.
            loop {
                if open.depth == 0 {
                    return Ok(());
                }
                self.white_space();
                let object = open.in_object();
                match self.peek() {
                    Some(b',') => {
                        self.at += 1;
                        self.white_space();
                        if object {
                            self.key()?;
                        }
                        break;
                    }
                    Some(b'}') if object => {
                        self.at += 1;
                        open.depth -= 1;
                    }
                    Some(b']') if !object => {
                        self.at += 1;
                        open.depth -= 1;
                    }
                    _ => return Err(self.syntax()),
                }
            }
        }
    }

    /// Passes over a key, its colon and the white space behind it; gives the raw text between the quotes and whether
    /// anything in it is escaped.
    pub(super) fn key(&mut self) -> Result<(&'a [u8], bool), Malformed> {
        if self.peek() != Some(b'"') {
            return Err(self.syntax());
        }
        let start = self.at + 1;
        let escaped = self.string()?;
        let raw = self.slice(start..self.at - 1);
        self.white_space();
        self.expect(b':')?;
        self.white_space();
        Ok((raw, escaped))
    }

    /// Passes over a string, `at` being at its opening quote; true if anything in it is escaped.
    pub(super) fn string(&mut self) -> Result<bool, Malformed> {
        let mut escaped = false;
        self.at += 1;
        loop {
            self.plain_text();
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(escaped);
                }
                Some(b'\\') => {
                    escaped = true;
                    match self.bytes.get(self.at + 1) {
                        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                            self.at += 2;
                        }
                        Some(b'u') => {
                            let digits = self.bytes.get(self.at + 2..self.at + 6);
                            if !digits.is_some_and(|d| d.iter().all(u8::is_ascii_hexdigit)) {
                                return Err(self.syntax());
                            }
                            self.at += 6;
                        }
                        _ => return Err(self.syntax()),
                    }
                }
                _ => return Err(self.syntax()),
            }
        }
    }

    /// Passes over string text up to the next quote, backslash or control character, eight bytes at a time: prompts
    /// have an escape every few dozen bytes, too dense for wider steps to pay.
    fn plain_text(&mut self) {
        const ONES: u64 = u64::MAX / 255;
        const HIGH: u64 = ONES << 7;
        while let Some(chunk) = self.bytes.get(self.at..).and_then(|b| b.first_chunk::<8>()) {
            let word = u64::from_le_bytes(*chunk);
            let quote = word ^ (ONES * b'"' as u64);
            let backslash = word ^ (ONES * b'\\' as u64);
            // The high bit of each byte below 0x20, equal to a quote or equal to a backslash. A borrow can only flag a
            // byte above a true hit, and the lowest hit is what is taken.
            let hits = (word.wrapping_sub(ONES * 0x20) & !word)
                | (quote.wrapping_sub(ONES) & !quote)
                | (backslash.wrapping_sub(ONES) & !backslash);
            let hits = hits & HIGH;
            if hits != 0 {
                self.at += (hits.trailing_zeros() / 8) as usize;
                return;
            }
            self.at += 8;
        }
        while let Some(b) = self.peek() {
            if b < 0x20 || b == b'"' || b == b'\\' {
                return;
            }
            self.at += 1;
        }
    }

    /// Passes over a number or a word.
    pub(super) fn scalar(&mut self) -> Result<(), Malformed> {
        let words: &[&[u8]] = match self.peek() {
            Some(b'0'..=b'9') => return self.number(),
            Some(b'-') if self.bytes.get(self.at + 1) != Some(&b'I') => return self.number(),
            Some(b'-') => &[b"-Infinity"],
            Some(b't') => &[b"true"],
            Some(b'f') => &[b"false"],
            Some(b'n') => &[b"null"],
            Some(b'N') => &[b"NaN"],
            Some(b'I') => &[b"Infinity"],
            _ => &[],
        };
        for word in words {
            if self
                .bytes
                .get(self.at..)
                .is_some_and(|b| b.starts_with(word))
            {
                self.at += word.len();
                return Ok(());
            }
        }
        Err(self.syntax())
    }

    fn number(&mut self) -> Result<(), Malformed> {
        self.eat(b'-');
        let start = self.at;
        match self.digits() {
            0 => return Err(self.syntax()),
            n if n > 1 && self.bytes.get(start) == Some(&b'0') => return Err(self.syntax()),
            _ => {}
        }
        let int_digits = self.at - start;
        let mut integer = true;
        if self.eat(b'.') {
            integer = false;
            if self.digits() == 0 {
                return Err(self.syntax());
            }
        }
        if self.eat(b'e') || self.eat(b'E') {
            integer = false;
            if !self.eat(b'+') {
                self.eat(b'-');
            }
            if self.digits() == 0 {
                return Err(self.syntax());
            }
        }
        if integer && int_digits > MAX_INT_DIGITS {
            return Err(self.syntax());
        }
        Ok(())
    }

    fn digits(&mut self) -> usize {
        let start = self.at;
        while self.peek().is_some_and(|b| b.is_ascii_digit()) {
            self.at += 1;
        }
        self.at - start
    }

    #[inline]
    pub(super) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    #[inline]
    pub(super) fn white_space(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.at += 1;
        }
    }

    #[inline]
    pub(super) fn eat(&mut self, byte: u8) -> bool {
        let is = self.peek() == Some(byte);
        self.at += usize::from(is);
        is
    }

    pub(super) fn expect(&mut self, byte: u8) -> Result<(), Malformed> {
        if self.eat(byte) {
            Ok(())
        } else {
            Err(self.syntax())
        }
    }

    pub(super) fn slice(&self, range: Range<usize>) -> &'a [u8] {
        self.bytes.get(range).unwrap_or_default()
    }

    pub(super) fn syntax(&self) -> Malformed {
        Malformed::Syntax(self.at)
    }
}

// === impl Open ===

impl Open {
    fn new() -> Self {
        Self {
            objects: [0; MAX_DEPTH.div_ceil(64)],
            depth: 0,
        }
    }

    /// Opens a container; false if there is no room.
    fn push(&mut self, object: bool) -> bool {
        let bit = 1u64 << (self.depth % 64);
        let Some(word) = self.objects.get_mut(self.depth / 64) else {
            return false;
        };
        if object {
            *word |= bit;
        } else {
            *word &= !bit;
        }
        self.depth += 1;
        true
    }

    /// Whether the innermost open container is an object.
    fn in_object(&self) -> bool {
        let at = self.depth.saturating_sub(1);
        self.objects
            .get(at / 64)
            .is_some_and(|word| word & (1 << (at % 64)) != 0)
    }
}
