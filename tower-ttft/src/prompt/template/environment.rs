//! The environment that transformers renders chat templates in.
use super::{Clock, dates, dump, python};
use crate::prompt::json::Json;
use indexmap::IndexMap;
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, Output, State, Value,
    syntax::SyntaxConfig,
    value::{Enumerator, Object, ObjectExt, ObjectRepr, ValueKind},
};
use std::{borrow::Cow, fmt, sync::Arc};

/// The environment of chat templates.
pub(super) fn chat(now: Clock) -> Environment<'static> {
    let mut env = bare();
    env.add_filter("tojson", dump::tojson);
    env.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        },
    );
    env.add_function("strftime_now", move |format: String| {
        dates::strftime(now(), &format)
            .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "unknown date format"))
    });
    env
}

/// Jinja's own environment with the white space rules of chat templates.
pub(super) fn bare() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    // The builder fails for odd delimiters only, and these are the usual ones.
    if let Ok(syntax) = syntax {
        env.set_syntax(syntax);
    }
    env.set_debug(false);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(python::method);
    env.set_formatter(print);
    env.add_filter("string", |v: &Value| python::str(v));
    env.add_filter("trim", |v: &Value, chars: Option<String>| {
        python::strip(&python::str(v), chars.as_deref()).to_owned()
    });
    env.add_test("sequence", |v: &Value| {
        v.is_undefined()
            || matches!(
                v.kind(),
                ValueKind::Seq | ValueKind::String | ValueKind::Map
            )
    });
    env.add_test("iterable", |v: &Value| {
        v.is_undefined()
            || matches!(
                v.kind(),
                ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Iterable
            )
    });
    env
}

/// Prints as Python's `str`.
fn print(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(s) => out.write_str(s),
        None => out.write_str(&python::str(value)),
    };
    written.map_err(Error::from)
}

/// JSON as a template sees it. Its depth is bounded by the reader's.
pub(super) fn value(json: Json<'_>) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(b),
        Json::Int(i) => match i64::try_from(i) {
            Ok(i) => Value::from(i),
            Err(_) => Value::from(i),
        },
        // Beyond what a template computes with; it can still print it.
        Json::BigInt(s) => Value::from_object(BigInt(s.into_owned())),
        Json::Float(f) => Value::from(f),
        Json::Str(s) => Value::from(s),
        Json::Array(items) => Value::from(items.into_iter().map(value).collect::<Vec<_>>()),
        Json::Object(pairs) => map(pairs.into_iter().map(|(k, v)| (k, value(v)))),
    }
}

/// A dictionary in this order.
pub(super) fn map<'a>(pairs: impl Iterator<Item = (Cow<'a, str>, Value)>) -> Value {
    Value::from_object(Dict(pairs.map(|(k, v)| (k.into(), v)).collect()))
}

/// A dictionary with strings for keys.
#[derive(Debug)]
struct Dict(IndexMap<Arc<str>, Value>);

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_str()?).cloned()
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.0.get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_enumerator(|this| Box::new(this.0.keys().map(Value::from)))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
}

/// An integer with more digits than fit anywhere.
#[derive(Debug)]
pub(super) struct BigInt(pub(super) String);

impl Object for BigInt {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
