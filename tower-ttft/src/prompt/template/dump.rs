//! The `tojson` filter: Python's `json.dumps` with `ensure_ascii` off by default, and no HTML escapes.
use super::{
    environment::BigInt,
    python::{as_float, float, items},
};
use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, Rest, ValueKind},
};
use std::fmt::Write;

/// Lists in lists, at most.
const MAX_DEPTH: usize = 220;

struct Dump {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort: bool,
    out: String,
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let arg = |i: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match args.get(i) {
            Some(value) => Some(value.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let is_true = |v: Option<Value>| v.is_some_and(|v| v.is_true());
    let ascii = is_true(arg(0, "ensure_ascii")?);
    let indent = match arg(1, "indent")? {
        None => None,
        Some(v) => Some(match (v.as_str(), v.as_i64()) {
            (Some(s), _) => s.to_owned(),
            (None, Some(n)) => " ".repeat(usize::try_from(n.clamp(0, 64)).unwrap_or(0)),
            (None, None) => return Err(invalid("indent is neither a number nor a string")),
        }),
    };
    let (item, key) = match arg(2, "separators")? {
        Some(pair) => {
            let pair: Vec<Value> = items(&pair).collect();
            match (
                pair.first().and_then(Value::as_str),
                pair.get(1).and_then(Value::as_str),
            ) {
                (Some(item), Some(key)) if pair.len() == 2 => (item.to_owned(), key.to_owned()),
                _ => return Err(invalid("separators are not two strings")),
            }
        }
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let sort = is_true(arg(3, "sort_keys")?);
    kwargs.assert_all_used()?;
    let mut dump = Dump {
        ascii,
        indent,
        item,
        key,
        sort,
        out: String::new(),
    };
    dump.value(value, 0)?;
    Ok(Value::from(dump.out))
}

fn invalid(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

// === impl Dump ===

impl Dump {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("the value is nested too deep"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or("")),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            _ => match value.downcast_object_ref::<BigInt>() {
                Some(int) => self.out.push_str(&int.0),
                None => return Err(invalid("the value has no JSON form")),
            },
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) {
        match as_float(value) {
            None => {
                let _ = write!(self.out, "{value}");
            }
            Some(f) if f.is_nan() => self.out.push_str("NaN"),
            Some(f) if f.is_infinite() => {
                self.out
                    .push_str(if f > 0.0 { "Infinity" } else { "-Infinity" })
            }
            Some(f) => self.out.push_str(&float(f)),
        }
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut empty = true;
        self.out.push('[');
        for item in items(value) {
            self.between(empty, depth);
            empty = false;
            self.value(&item, depth + 1)?;
        }
        self.close(empty, ']', depth);
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<(String, Value)> = items(value)
            .map(|k| {
                let text = match k.kind() {
                    ValueKind::String => k.as_str().unwrap_or("").to_owned(),
                    ValueKind::None => "null".to_owned(),
                    ValueKind::Bool => (if k.is_true() { "true" } else { "false" }).to_owned(),
                    ValueKind::Number => super::python::str(&k),
                    _ => return Err(invalid("a key has no JSON form")),
                };
                Ok((text, k))
            })
            .collect::<Result<_, _>>()?;
        if self.sort {
            keys.sort_by(|a, b| a.0.cmp(&b.0));
        }
        let empty = keys.is_empty();
        self.out.push('{');
        for (i, (text, key)) in keys.into_iter().enumerate() {
            self.between(i == 0, depth);
            self.string(&text);
            self.out.push_str(&self.key);
            self.value(&value.get_item(&key)?, depth + 1)?;
        }
        self.close(empty, '}', depth);
        Ok(())
    }

    /// What comes before an item.
    fn between(&mut self, first: bool, depth: usize) {
        if !first {
            self.out.push_str(&self.item);
        }
        self.line(depth + 1);
    }

    fn close(&mut self, empty: bool, bracket: char, depth: usize) {
        if !empty {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, s: &str) {
        self.out.push('"');
        for c in s.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !(' '..='~').contains(&c)) => {
                    let mut units = [0u16; 2];
                    for unit in c.encode_utf16(&mut units) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::super::environment;
    use crate::prompt::json::Json;
    use std::{sync::Arc, time::SystemTime};

    fn dump(json: &str, call: &str) -> Result<String, String> {
        let env = environment::chat(Arc::new(|| SystemTime::UNIX_EPOCH));
        let v = environment::value(Json::parse(json.as_bytes()).unwrap());
        env.render_str(&format!("{{{{ v | {call} }}}}"), minijinja::context! { v })
            .map_err(|e| e.to_string())
    }

    // Printed by Python's json.dumps.
    #[test]
    fn dumps_as_python() {
        let v = r#"{"b": [1, 2.0, 1e16, null, true, -0.0, 123456789012345678901234567890], "a": {"é<&>'\"\\/\n\u0001\u007f😀": {}}, "c": []}"#;
        for (call, want) in [
            (
                "tojson",
                r#"{"b": [1, 2.0, 1e+16, null, true, -0.0, 123456789012345678901234567890], "a": {"é<&>'\"\\/\n\u0001😀": {}}, "c": []}"#,
            ),
            (
                "tojson(separators=(',', ':'))",
                r#"{"b":[1,2.0,1e+16,null,true,-0.0,123456789012345678901234567890],"a":{"é<&>'\"\\/\n\u0001😀":{}},"c":[]}"#,
            ),
            (
                "tojson(ensure_ascii=true, sort_keys=true)",
                r#"{"a": {"\u00e9<&>'\"\\/\n\u0001\u007f\ud83d\ude00": {}}, "b": [1, 2.0, 1e+16, null, true, -0.0, 123456789012345678901234567890], "c": []}"#,
            ),
        ] {
            assert_eq!(dump(v, call).unwrap().replace('\u{7f}', ""), want);
        }
        let small = r#"{"a":[1,{"b":2}],"e":[]}"#;
        let indented = "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ],\n  \"e\": []\n}";
        assert_eq!(dump(small, "tojson(indent=2)").unwrap(), indented);
        assert_eq!(dump(small, "tojson(False, 2)").unwrap(), indented);
        let long = "1".repeat(60);
        assert_eq!(dump(&long, "tojson").unwrap(), long);
        assert_eq!(
            dump("[NaN, Infinity, -Infinity]", "tojson").unwrap(),
            "[NaN, Infinity, -Infinity]"
        );
        assert!(dump("1", "tojson(nonsense=1)").is_err());
        assert!(dump("1", "tojson(separators=1)").is_err());
    }
}
