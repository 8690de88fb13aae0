//! How Python prints values and what its strings can do, where minijinja differs.
use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Tuple, ValueKind},
};
use std::fmt::Write;

/// White space as `str.isspace` and `str.strip` know it: Unicode's and the four separators.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.strip`.
pub(super) fn strip<'s>(s: &'s str, chars: Option<&str>) -> &'s str {
    lstrip(rstrip(s, chars), chars)
}

/// `str.lstrip`.
pub(super) fn lstrip<'s>(s: &'s str, chars: Option<&str>) -> &'s str {
    match chars {
        None => s.trim_start_matches(is_space),
        Some(chars) => s.trim_start_matches(|c| chars.contains(c)),
    }
}

/// `str.rstrip`.
pub(super) fn rstrip<'s>(s: &'s str, chars: Option<&str>) -> &'s str {
    match chars {
        None => s.trim_end_matches(is_space),
        Some(chars) => s.trim_end_matches(|c| chars.contains(c)),
    }
}

/// `repr` of a float. Rust writes the same shortest digits and changes to exponents at the same sizes.
pub(super) fn float(f: f64) -> String {
    if f.is_nan() {
        return "nan".into();
    }
    if f.is_infinite() {
        return if f > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let text = format!("{f:?}");
    let Some((digits, exponent)) = text.split_once('e') else {
        return text;
    };
    let (sign, size) = match exponent.strip_prefix('-') {
        Some(size) => ('-', size),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{size:0>2}")
}

/// `str(value)`.
pub(super) fn str(value: &Value) -> String {
    match value.as_str() {
        Some(s) => s.to_owned(),
        None => {
            let mut out = String::new();
            repr(value, &mut out, 0);
            out
        }
    }
}

/// Lists in lists, at most; the rest is left out.
const MAX_DEPTH: usize = 220;

/// `repr(value)`.
fn repr(value: &Value, out: &mut String, depth: usize) {
    if depth > MAX_DEPTH {
        out.push_str("...");
        return;
    }
    match value.kind() {
        ValueKind::String => repr_str(value.as_str().unwrap_or(""), out),
        ValueKind::Number => match as_float(value) {
            Some(f) => out.push_str(&float(f)),
            None => {
                let _ = write!(out, "{value}");
            }
        },
        ValueKind::Seq => {
            let tuple = value.downcast_object_ref::<Tuple>().is_some();
            out.push(if tuple { '(' } else { '[' });
            let mut n = 0;
            for item in items(value) {
                if n > 0 {
                    out.push_str(", ");
                }
                repr(&item, out, depth + 1);
                n += 1;
            }
            if tuple && n == 1 {
                out.push(',');
            }
            out.push(if tuple { ')' } else { ']' });
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in items(value).enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                repr(&key, out, depth + 1);
                out.push_str(": ");
                repr(&value.get_item(&key).unwrap_or_default(), out, depth + 1);
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// The items of a list or the keys of a map.
pub(super) fn items(value: &Value) -> impl Iterator<Item = Value> {
    value.try_iter().into_iter().flatten()
}

/// The float in a value, none if it is an integer or no number.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    if value.kind() != ValueKind::Number || value.is_integer() {
        return None;
    }
    f64::try_from(value.clone()).ok()
}

fn repr_str(s: &str, out: &mut String) {
    let quote = if s.contains('\'') && !s.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in s.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if is_printable(c) => out.push(c),
            c => {
                let _ = match u32::from(c) {
                    n @ ..=0xff => write!(out, "\\x{n:02x}"),
                    n @ ..=0xffff => write!(out, "\\u{n:04x}"),
                    n => write!(out, "\\U{n:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// `str.isprintable`: Rust's debug output of a string escapes the same categories, but for a mark at its beginning.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    let mut buffer = [0; 5];
    let text = c.encode_utf8(buffer.get_mut(1..).unwrap_or_default()).len();
    if let Some(first) = buffer.first_mut() {
        *first = b'a';
    }
    let both = buffer
        .get(..=text)
        .and_then(|b| std::str::from_utf8(b).ok());
    both.is_some_and(|s| s.escape_debug().nth(1) == Some(c))
}

/// Methods of Python's types. What is not here comes from minijinja's own collection.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(s) = value.as_str()
        && let Some(result) = str_method(s, name, args)
    {
        return result;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// A method of `str`, or none if it is not one of those that differ.
fn str_method(s: &str, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let arg = |i: usize| args.get(i).filter(|v| !v.is_none());
    let text = |i: usize| match arg(i) {
        None => Ok(None),
        Some(v) => v.as_str().map(Some).ok_or_else(|| bad_argument(name)),
    };
    let cut = |f: fn(&str, Option<&str>) -> Value| text(0).map(|chars| f(s, chars));
    Some(match name {
        "strip" => cut(|s, chars| strip(s, chars).into()),
        "lstrip" => cut(|s, chars| lstrip(s, chars).into()),
        "rstrip" => cut(|s, chars| rstrip(s, chars).into()),
        "removeprefix" => {
            text(0).map(|p| Value::from(s.strip_prefix(p.unwrap_or("")).unwrap_or(s)))
        }
        "removesuffix" => {
            text(0).map(|p| Value::from(s.strip_suffix(p.unwrap_or("")).unwrap_or(s)))
        }
        "split" | "rsplit" => text(0).and_then(|separator| {
            let most = match arg(1) {
                None => None,
                Some(n) => n.as_i64().map(Some).ok_or_else(|| bad_argument(name))?,
            };
            split(s, separator, most, name == "rsplit").ok_or_else(|| bad_argument(name))
        }),
        "partition" | "rpartition" => text(0).and_then(|separator| {
            let separator = separator
                .filter(|p| !p.is_empty())
                .ok_or_else(|| bad_argument(name))?;
            let parts = if name == "partition" {
                s.split_once(separator)
                    .map_or([s, "", ""], |(a, b)| [a, separator, b])
            } else {
                s.rsplit_once(separator)
                    .map_or(["", "", s], |(a, b)| [a, separator, b])
            };
            Ok(Value::from(Tuple::from(parts.map(Value::from).to_vec())))
        }),
        "splitlines" => Ok(lines(s, args.first().is_some_and(Value::is_true))),
        _ => return None,
    })
}

fn bad_argument(method: &str) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("str.{method} got an argument that it does not take"),
    )
}

/// `str.split` and `str.rsplit`; none for an empty separator.
fn split(s: &str, separator: Option<&str>, most: Option<i64>, from_right: bool) -> Option<Value> {
    let most = most.and_then(|m| usize::try_from(m).ok());
    let mut parts: Vec<&str> = Vec::new();
    match separator {
        Some("") => return None,
        Some(sep) if from_right => {
            match most {
                None => parts.extend(s.rsplit(sep)),
                Some(m) => parts.extend(s.rsplitn(m.saturating_add(1), sep)),
            }
            parts.reverse();
        }
        Some(sep) => match most {
            None => parts.extend(s.split(sep)),
            Some(m) => parts.extend(s.splitn(m.saturating_add(1), sep)),
        },
        None if from_right => {
            let mut rest = s.trim_end_matches(is_space);
            while !rest.is_empty() {
                if most == Some(parts.len()) {
                    parts.push(rest);
                    break;
                }
                let start = rest.rfind(is_space).map_or(0, |i| {
                    i + rest
                        .get(i..)
                        .and_then(|r| r.chars().next())
                        .map_or(1, char::len_utf8)
                });
                let (before, word) = rest.split_at(start);
                parts.push(word);
                rest = before.trim_end_matches(is_space);
            }
            parts.retain(|p| !p.is_empty());
            parts.reverse();
        }
        None => {
            let mut rest = s.trim_start_matches(is_space);
            while !rest.is_empty() {
                if most == Some(parts.len()) {
                    parts.push(rest.trim_end_matches(is_space));
                    break;
                }
                let (word, after) = rest.split_at(rest.find(is_space).unwrap_or(rest.len()));
                parts.push(word);
                rest = after.trim_start_matches(is_space);
            }
        }
    }
    Some(parts.into_iter().map(Value::from).collect())
}

/// `str.splitlines`: more characters end a line there than in Rust.
fn lines(s: &str, keep_ends: bool) -> Value {
    let mut out: Vec<&str> = Vec::new();
    let mut start = 0;
    let mut chars = s.char_indices().peekable();
    while let Some((i, c)) = chars.next() {
        let ends = matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        );
        if !ends {
            continue;
        }
        let mut end = i + c.len_utf8();
        if c == '\r' && chars.peek().is_some_and(|(_, c)| *c == '\n') {
            chars.next();
            end += 1;
        }
        out.push(s.get(start..if keep_ends { end } else { i }).unwrap_or(""));
        start = end;
    }
    if start < s.len() {
        out.push(s.get(start..).unwrap_or(""));
    }
    out.into_iter().map(Value::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Printed by Python.
    #[test]
    fn floats_print_as_pythons() {
        for (f, want) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (9999999999999998.0, "9999999999999998.0"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
            (5e-324, "5e-324"),
            (123456.789, "123456.789"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(float(f), want);
        }
    }

    #[test]
    fn values_print_as_pythons() {
        let v = super::super::environment::map(
            [
                ("a".into(), Value::from("it's \"x\"\n")),
                (
                    "b".into(),
                    Value::from(vec![
                        Value::from(1),
                        Value::from(2.5),
                        Value::from(true),
                        Value::from(()),
                    ]),
                ),
                ("c".into(), Value::from("it's")),
            ]
            .into_iter(),
        );
        assert_eq!(
            str(&v),
            r#"{'a': 'it\'s "x"\n', 'b': [1, 2.5, True, None], 'c': "it's"}"#
        );
        let odd = Value::from(vec![Value::from(
            "e\u{301}\u{200d}\u{2028}\u{a0}\u{ad}\u{7f}é🙂\u{e0001}",
        )]);
        assert_eq!(
            str(&odd),
            "['e\u{301}\\u200d\\u2028\\xa0\\xad\\x7fé🙂\\U000e0001']"
        );
        assert_eq!(str(&Value::from("plain")), "plain");
        assert_eq!(str(&Value::UNDEFINED), "");
    }

    fn call(s: &str, name: &str, args: &[Value]) -> String {
        str(&str_method(s, name, args).unwrap().unwrap())
    }

    #[test]
    fn methods_are_pythons() {
        let v = |s: &str| Value::from(s);
        assert_eq!(call("\u{1c} a \u{a0}", "strip", &[]), "a");
        assert_eq!(call("xxaxx", "lstrip", &[v("x")]), "axx");
        assert_eq!(call("a b  c ", "split", &[]), "['a', 'b', 'c']");
        assert_eq!(
            call(" a b  c ", "split", &[Value::from(()), Value::from(1)]),
            "['a', 'b  c']"
        );
        assert_eq!(
            call("a,b,c", "split", &[v(","), Value::from(1)]),
            "['a', 'b,c']"
        );
        assert_eq!(
            call("a,b,c", "rsplit", &[v(","), Value::from(1)]),
            "['a,b', 'c']"
        );
        assert_eq!(
            call(" a b  c ", "rsplit", &[Value::from(()), Value::from(1)]),
            "[' a b', 'c']"
        );
        assert_eq!(
            call("a--b--c", "partition", &[v("--")]),
            "('a', '--', 'b--c')"
        );
        assert_eq!(
            call("a--b--c", "rpartition", &[v("--")]),
            "('a--b', '--', 'c')"
        );
        assert_eq!(call("abc", "rpartition", &[v("-")]), "('', '', 'abc')");
        assert_eq!(call("prefix-x", "removeprefix", &[v("prefix-")]), "x");
        assert_eq!(
            call("a\r\nb\u{2028}c\n", "splitlines", &[]),
            "['a', 'b', 'c']"
        );
        assert_eq!(
            call("a\r\nb", "splitlines", &[Value::from(true)]),
            "['a\\r\\n', 'b']"
        );
        assert!(str_method("a", "split", &[v("")]).unwrap().is_err());
        assert!(
            str_method("a", "strip", &[Value::from(1)])
                .unwrap()
                .is_err()
        );
        assert!(str_method("a", "upper", &[]).is_none());
    }
}
