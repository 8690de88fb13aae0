//! A tree of a value, for the few that need one.

use super::scan::Scanner;
use super::{Malformed, text};
use serde_json::{Map, Number, Value};
use std::str;

/// How deep a value may nest for [`to_value`]: trees are walked and dropped by recursion, here and in templates.
pub const MAX_VALUE_DEPTH: usize = 128;

/// Python holds this value, a [`Value`] cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unrepresentable {
    /// Half of a surrogate pair.
    #[error("a string holds half of a surrogate pair")]
    LoneSurrogate,
    /// `NaN`, an infinity, or a number that overflows to one.
    #[error("a number is not finite")]
    NotFinite,
    /// An integer beyond 64 bits.
    #[error("an integer has more than 64 bits")]
    BigInteger,
    /// Nested deeper than [`MAX_VALUE_DEPTH`].
    #[error("the value nests deeper than {MAX_VALUE_DEPTH} levels")]
    TooDeep,
    /// Not one JSON value.
    #[error("not a JSON value")]
    Malformed,
}

/// The value that `raw` stands for, as Python would hold it: of equal keys the first gives the place and the last the
/// value, integers stay integers, decimals are rounded correctly. `raw` is one value as [`super::fields`] found it.
pub fn to_value(raw: &[u8]) -> Result<Value, Unrepresentable> {
    text::check_encoding(raw)?;
    let mut scan = Scanner { bytes: raw, at: 0 };
    scan.white_space();
    let value = build(&mut scan, MAX_VALUE_DEPTH)?;
    scan.white_space();
    if scan.at != raw.len() {
        return Err(Unrepresentable::Malformed);
    }
    Ok(value)
}

fn build(scan: &mut Scanner<'_>, levels: usize) -> Result<Value, Unrepresentable> {
    let start = scan.at;
    match scan.peek() {
        Some(b'"') => {
            scan.string()?;
            let raw = scan.slice(start + 1..scan.at - 1);
            Ok(Value::String(text::unescape(raw)?.into_owned()))
        }
        Some(b'[') => {
            let levels = levels.checked_sub(1).ok_or(Unrepresentable::TooDeep)?;
            let mut items = Vec::new();
            scan.at += 1;
            scan.white_space();
            if scan.eat(b']') {
                return Ok(Value::Array(items));
            }
            loop {
                items.push(build(scan, levels)?);
                scan.white_space();
                if scan.eat(b']') {
                    return Ok(Value::Array(items));
                }
                scan.expect(b',')?;
                scan.white_space();
            }
        }
        Some(b'{') => {
            let levels = levels.checked_sub(1).ok_or(Unrepresentable::TooDeep)?;
            let mut entries = Map::new();
            scan.at += 1;
            scan.white_space();
            if scan.eat(b'}') {
                return Ok(Value::Object(entries));
            }
            loop {
                let (key, _) = scan.key()?;
                let key = text::unescape(key)?.into_owned();
                entries.insert(key, build(scan, levels)?);
                scan.white_space();
                if scan.eat(b'}') {
                    return Ok(Value::Object(entries));
                }
                scan.expect(b',')?;
                scan.white_space();
            }
        }
        _ => {
            scan.scalar()?;
            scalar(scan.slice(start..scan.at))
        }
    }
}

fn scalar(raw: &[u8]) -> Result<Value, Unrepresentable> {
    match raw {
        b"true" => return Ok(Value::Bool(true)),
        b"false" => return Ok(Value::Bool(false)),
        b"null" => return Ok(Value::Null),
        b"NaN" | b"Infinity" | b"-Infinity" => return Err(Unrepresentable::NotFinite),
        _ => {}
    }
    let digits = str::from_utf8(raw).map_err(|_| Unrepresentable::Malformed)?;
    if memchr::memchr3(b'.', b'e', b'E', raw).is_some() {
        let float: f64 = digits.parse().map_err(|_| Unrepresentable::Malformed)?;
        return Number::from_f64(float)
            .map(Value::Number)
            .ok_or(Unrepresentable::NotFinite);
    }
    // `-0` is the integer 0 in Python.
    if let Ok(int) = digits.parse::<i64>() {
        return Ok(Value::Number(int.into()));
    }
    digits
        .parse::<u64>()
        .map(|int| Value::Number(int.into()))
        .map_err(|_| Unrepresentable::BigInteger)
}

// === impl Unrepresentable ===

impl From<Malformed> for Unrepresentable {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

impl From<text::LoneSurrogate> for Unrepresentable {
    fn from(_: text::LoneSurrogate) -> Self {
        Self::LoneSurrogate
    }
}
