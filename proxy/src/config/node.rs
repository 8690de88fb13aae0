//! A YAML document as a tree that knows its lines, so that every complaint can name one.

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;
use std::fmt;

/// A node and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Node {
    /// Counts from 1; 0 where the parser does not know.
    pub(super) line: u64,
    pub(super) value: Value,
}

/// What a node is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<(Key, Node)>),
}

/// The key of a mapping's entry.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Key {
    pub(super) line: u64,
    pub(super) name: String,
}

struct ValueVisitor;

// === impl Node ===

impl Node {
    /// Reads a document. The parser's own budget bounds depth, aliases and size.
    pub(super) fn parse(text: &str) -> Result<Self, serde_saphyr::Error> {
        serde_saphyr::from_str(text)
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::<Value>::deserialize(deserializer)?;
        Ok(Self {
            line: spanned.referenced.line(),
            value: spanned.value,
        })
    }
}

// === impl Value ===

impl Value {
    /// What a person would call it.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Bool(_) => "a truth value",
            Self::Int(_) | Self::Float(_) => "a number",
            Self::Text(_) => "a text",
            Self::List(_) => "a list",
            Self::Map(_) => "a mapping",
        }
    }

    /// The same in JSON. The depth is bounded by the parser's budget.
    pub(super) fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Null => serde_json::Value::Null,
            Self::Bool(b) => (*b).into(),
            Self::Text(text) => text.as_str().into(),
            // Larger ones are floats to the parser, and what is no finite number is an error to it.
            Self::Int(n) => match (i64::try_from(*n), u64::try_from(*n)) {
                (Ok(n), _) => n.into(),
                (_, Ok(n)) => n.into(),
                _ => (*n as f64).into(),
            },
            Self::Float(n) => (*n).into(),
            Self::List(items) => items.iter().map(|node| node.value.to_json()).collect(),
            Self::Map(entries) => entries
                .iter()
                .map(|(key, node)| (key.name.clone(), node.value.to_json()))
                .collect(),
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

// === impl ValueVisitor ===

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        Value::deserialize(deserializer)
    }

    fn visit_bool<E: de::Error>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E: de::Error>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Int(v.into()))
    }

    fn visit_u64<E: de::Error>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Int(v.into()))
    }

    fn visit_i128<E: de::Error>(self, v: i128) -> Result<Value, E> {
        Ok(Value::Int(v))
    }

    fn visit_f64<E: de::Error>(self, v: f64) -> Result<Value, E> {
        Ok(Value::Float(v))
    }

    fn visit_str<E: de::Error>(self, v: &str) -> Result<Value, E> {
        Ok(Value::Text(v.to_owned()))
    }

    fn visit_string<E: de::Error>(self, v: String) -> Result<Value, E> {
        Ok(Value::Text(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(node) = seq.next_element()? {
            list.push(node);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let key = Key {
                line: key.referenced.line(),
                name: key.value,
            };
            entries.push((key, map.next_value()?));
        }
        Ok(Value::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_its_lines() {
        let node = Node::parse("a: 1\nb:\n  - c: x\n    d: 2.5\n  - true\n  -\n").unwrap();
        let Value::Map(top) = &node.value else {
            panic!("{node:?}")
        };
        assert_eq!(top[0].0.line, 1);
        assert_eq!(top[0].1.value, Value::Int(1));
        assert_eq!((top[1].0.line, top[1].0.name.as_str()), (2, "b"));
        let Value::List(list) = &top[1].1.value else {
            panic!("{node:?}")
        };
        assert_eq!(list[0].line, 3);
        let Value::Map(inner) = &list[0].value else {
            panic!("{node:?}")
        };
        assert_eq!(inner[1].0.line, 4);
        assert_eq!(inner[1].1.value, Value::Float(2.5));
        assert_eq!(list[1].value, Value::Bool(true));
        assert_eq!(list[2].value, Value::Null);
    }

    #[test]
    fn reads_json() {
        let node = Node::parse("{\"a\": {\"b\": [1, \"x\", null]}}").unwrap();
        assert_eq!(node.value.kind(), "a mapping");
    }

    #[test]
    fn bombs_and_duplicates_are_errors() {
        let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
        for i in 1..12 {
            let p = i - 1;
            bomb.push_str(&format!(
                "a{i}: &a{i} [*a{p},*a{p},*a{p},*a{p},*a{p},*a{p},*a{p},*a{p},*a{p},*a{p}]\n"
            ));
        }
        assert!(Node::parse(&bomb).is_err());
        assert!(Node::parse(&"[".repeat(100_000)).is_err());
        assert!(Node::parse("a: 1\na: 2\n").is_err());
    }
}
