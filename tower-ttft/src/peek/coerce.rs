//! Values as pydantic's lax mode takes them, which is what vLLM's request models use. Each function reads the raw JSON
//! of one value and gives none where pydantic refuses it or takes it for null.

use super::json;
use std::{borrow::Cow, str};

/// A `bool` field.
pub(super) fn boolean(raw: &[u8]) -> Option<bool> {
    match raw {
        b"true" => Some(true),
        b"false" => Some(false),
        [b'"', ..] => boolean_text(&string(raw)?),
        _ => match number(raw)? {
            1 => Some(true),
            0 => Some(false),
            _ => None,
        },
    }
}

/// A `bool` field given as text.
pub(super) fn boolean_text(text: &str) -> Option<bool> {
    let is = |words: &[&str]| words.iter().any(|w| w.eq_ignore_ascii_case(text));
    if is(&["true", "1", "on", "t", "y", "yes"]) {
        Some(true)
    } else if is(&["false", "0", "off", "f", "n", "no"]) {
        Some(false)
    } else {
        None
    }
}

/// An `int` field; what does not fit is the nearest that does.
pub(super) fn integer(raw: &[u8]) -> Option<i128> {
    match raw {
        b"true" => Some(1),
        b"false" => Some(0),
        [b'"', ..] => integer_in_text(string(raw)?.trim()),
        _ => number(raw),
    }
}

/// A `str` field.
pub(super) fn string(raw: &[u8]) -> Option<Cow<'_, str>> {
    let inside = raw.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    json::unescape(inside).ok()
}

/// A number literal without a fractional part.
fn number(raw: &[u8]) -> Option<i128> {
    let text = str::from_utf8(raw).ok()?;
    if text.contains(['.', 'e', 'E']) {
        let float: f64 = text.parse().ok()?;
        // Beyond 64 bits pydantic takes no float for an integer.
        return (float.fract() == 0.0 && float.abs() < 2f64.powi(63)).then_some(float as i128);
    }
    saturating(text)
}

/// An integer in a string: a sign, single underscores between digits and an empty fraction are allowed.
fn integer_in_text(text: &str) -> Option<i128> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let (int, fraction) = unsigned.split_once('.').unwrap_or((unsigned, "0"));
    let groups = |s: &str| {
        s.split('_')
            .all(|g| !g.is_empty() && g.bytes().all(|b| b.is_ascii_digit()))
    };
    let zeros = !fraction.is_empty() && fraction.bytes().all(|b| b == b'0');
    if !groups(int) || !zeros {
        return None;
    }
    let digits = int.replace('_', "");
    saturating(&if text.starts_with('-') {
        format!("-{digits}")
    } else {
        digits
    })
}

fn saturating(digits: &str) -> Option<i128> {
    let unsigned = digits.strip_prefix('-').unwrap_or(digits);
    if unsigned.is_empty() || !unsigned.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some(digits.parse().unwrap_or(if digits.starts_with('-') {
        i128::MIN
    } else {
        i128::MAX
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measured with pydantic 2.14 (`TypeAdapter(bool | None).validate_python(json.loads(raw))`).
    #[test]
    fn booleans_as_pydantic() {
        for raw in [
            "true",
            "1",
            "1.0",
            "1e0",
            "\"true\"",
            "\"TRUE\"",
            "\"tRue\"",
            "\"1\"",
            "\"on\"",
            "\"t\"",
            "\"y\"",
            "\"yes\"",
            "\"\\u0031\"",
        ] {
            assert_eq!(boolean(raw.as_bytes()), Some(true), "{raw}");
        }
        for raw in [
            "false", "0", "0.0", "-0", "-0.0", "\"off\"", "\"OFF\"", "\"f\"", "\"n\"", "\"no\"",
            "\"0\"",
        ] {
            assert_eq!(boolean(raw.as_bytes()), Some(false), "{raw}");
        }
        for raw in [
            "2",
            "-1",
            "0.5",
            "\" true\"",
            "\"\"",
            "\"1.0\"",
            "null",
            "[]",
            "{}",
            "NaN",
            "1000000000000000000000000000000",
            "\"\\ud83d\"",
            "",
        ] {
            assert_eq!(boolean(raw.as_bytes()), None, "{raw}");
        }
    }

    /// Measured likewise with `int | None`.
    #[test]
    fn integers_as_pydantic() {
        for (raw, int) in [
            ("true", 1),
            ("1", 1),
            ("1.0", 1),
            ("1e3", 1000),
            ("-7", -7),
            ("\"1\"", 1),
            ("\" 12 \"", 12),
            ("\"\u{a0}1\"", 1),
            ("\"\\n1\\t\"", 1),
            ("\"1.0\"", 1),
            ("\"1.00000\"", 1),
            ("\" +1.0 \"", 1),
            ("\"1_000\"", 1000),
            ("\"0_1\"", 1),
            ("\"+1\"", 1),
            ("\"-1\"", -1),
            ("\"01\"", 1),
            ("\"-0\"", 0),
            ("1e16", 10_000_000_000_000_000),
            (
                "1000000000000000000000000000000",
                1_000_000_000_000_000_000_000_000_000_000,
            ),
            ("-9999999999999999999999999999999999999999", i128::MIN),
            ("9999999999999999999999999999999999999999", i128::MAX),
        ] {
            assert_eq!(integer(raw.as_bytes()), Some(int), "{raw}");
        }
        for raw in [
            "1.5", "1e19", "1e300", "1e999", "NaN", "Infinity", "\"1.5\"", "\"_1\"", "\"1_\"",
            "\"1__0\"", "\"1._0\"", "\"1 .0\"", "\"0x10\"", "\"1e3\"", "\"\"", "\"1.\"", "\".0\"",
            "\"+ 1\"", "\"--1\"", "\"１\"", "null", "[]", "", "-",
        ] {
            assert_eq!(integer(raw.as_bytes()), None, "{raw}");
        }
    }

    #[test]
    fn strings() {
        assert_eq!(string(b"\"org\\/name\"").as_deref(), Some("org/name"));
        assert_eq!(string(b"\"\"").as_deref(), Some(""));
        for raw in ["1", "null", "true", "\"\\ud83d\"", "\"", ""] {
            assert_eq!(string(raw.as_bytes()), None, "{raw}");
        }
    }
}
