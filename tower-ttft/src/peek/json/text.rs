//! Encoding and escapes.

use super::Malformed;
use std::{borrow::Cow, str};

/// A string holds half of a surrogate pair, which UTF-8 has no form for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the string holds half of a surrogate pair")]
pub struct LoneSurrogate;

/// Python decodes with `surrogatepass`: the three-byte forms of U+D800 to U+DFFF pass, every other error does not.
pub(super) fn check_encoding(mut text: &[u8]) -> Result<(), Malformed> {
    let whole = text.len();
    while let Err(error) = str::from_utf8(text) {
        let rest = text.get(error.valid_up_to()..).unwrap_or_default();
        let Some([0xed, 0xa0..=0xbf, 0x80..=0xbf]) = rest.first_chunk::<3>() else {
            return Err(Malformed::Encoding(whole - rest.len()));
        };
        text = rest.get(3..).unwrap_or_default();
    }
    Ok(())
}

/// The text that `raw`, the inside of a valid JSON string, stands for.
pub fn unescape(raw: &[u8]) -> Result<Cow<'_, str>, LoneSurrogate> {
    let Some(first) = memchr::memchr(b'\\', raw) else {
        // What is not UTF-8 in a valid string can only be a surrogate.
        return str::from_utf8(raw)
            .map(Cow::Borrowed)
            .map_err(|_| LoneSurrogate);
    };
    // Built as bytes and checked once: between two escapes there are a few dozen bytes only.
    let mut text = Vec::with_capacity(raw.len());
    let mut rest = raw;
    let mut next = Some(first);
    while let Some(at) = next {
        let (plain, escape) = rest.split_at_checked(at).ok_or(LoneSurrogate)?;
        text.extend_from_slice(plain);
        let (c, len) = escaped(escape)?;
        match u8::try_from(c) {
            Ok(b) if b.is_ascii() => text.push(b),
            _ => text.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
        rest = escape.get(len..).unwrap_or_default();
        next = memchr::memchr(b'\\', rest);
    }
    text.extend_from_slice(rest);
    String::from_utf8(text)
        .map(Cow::Owned)
        .map_err(|_| LoneSurrogate)
}

/// The character that `escape` begins with and how many bytes stand for it.
fn escaped(escape: &[u8]) -> Result<(char, usize), LoneSurrogate> {
    let c = match escape.get(1) {
        Some(b'n') => '\n',
        Some(b't') => '\t',
        Some(b'r') => '\r',
        Some(b'b') => '\u{8}',
        Some(b'f') => '\u{c}',
        Some(b'u') => {
            let high = code_unit(escape).ok_or(LoneSurrogate)?;
            if let Some(c) = char::from_u32(high) {
                return Ok((c, 6));
            }
            let low = escape.get(6..).and_then(code_unit).ok_or(LoneSurrogate)?;
            if !(0xd800..0xdc00).contains(&high) || !(0xdc00..0xe000).contains(&low) {
                return Err(LoneSurrogate);
            }
            let c = char::from_u32(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00));
            return Ok((c.ok_or(LoneSurrogate)?, 12));
        }
        Some(&b) => char::from(b),
        None => return Err(LoneSurrogate),
    };
    Ok((c, 2))
}

/// The code unit of `\uXXXX` at the beginning of `escape`.
fn code_unit(escape: &[u8]) -> Option<u32> {
    let digits = escape.strip_prefix(b"\\u")?.first_chunk::<4>()?;
    digits
        .iter()
        .try_fold(0, |unit, &d| Some(unit << 4 | char::from(d).to_digit(16)?))
}
