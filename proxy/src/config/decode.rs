//! From a tree to typed values, collecting every complaint instead of stopping at the first.

use super::{
    Problem,
    node::{Node, Value},
    units,
};
use std::{collections::BTreeMap, fmt::Display, net::SocketAddr, str::FromStr, time::Duration};

/// Collects problems while values are read.
#[derive(Default)]
pub(super) struct Decoder {
    problems: Vec<Problem>,
}

/// A value and its place.
#[derive(Clone)]
pub(super) struct At<'a> {
    pub(super) node: &'a Node,
    pub(super) path: String,
}

/// The entries of one mapping.
pub(super) struct Fields<'a> {
    path: String,
    line: u64,
    entries: BTreeMap<&'a str, &'a Node>,
    /// Keys without a value: already complained of.
    empty: Vec<&'a str>,
}

/// A kind of mapping: what it is called in complaints and the keys it takes.
pub(super) struct Section {
    pub(super) name: &'static str,
    pub(super) keys: &'static [&'static str],
}

// === impl Decoder ===

impl Decoder {
    pub(super) fn finish(self) -> Vec<Problem> {
        self.problems
    }

    pub(super) fn problem(&mut self, path: &str, line: u64, message: impl Display) {
        self.problems.push(Problem {
            path: path.to_owned(),
            line: (line > 0).then_some(line),
            message: message.to_string(),
        });
    }

    pub(super) fn complain(&mut self, at: &At<'_>, message: impl Display) {
        self.problem(&at.path, at.node.line, message);
    }

    fn expected(&mut self, at: &At<'_>, what: &str) {
        let kind = at.node.value.kind();
        self.complain(at, format_args!("expected {what}, found {kind}"));
    }

    /// Reads a mapping; keys that `section` does not have are complained of with the nearest one that exists.
    pub(super) fn map<'a>(
        &mut self,
        at: &At<'a>,
        section: &Section,
        others: &[&Section],
    ) -> Option<Fields<'a>> {
        let Value::Map(map) = &at.node.value else {
            self.expected(
                at,
                &format!("a mapping with the keys {}", list(section.keys)),
            );
            return None;
        };
        let mut entries = BTreeMap::new();
        let mut empty = Vec::new();
        for (key, node) in map {
            let path = join(&at.path, &key.name);
            if !section.keys.contains(&key.name.as_str()) {
                let hint = unknown(&key.name, section, others);
                self.problem(&path, key.line, format_args!("unknown key; {hint}"));
            } else if node.value == Value::Null {
                self.problem(
                    &path,
                    key.line,
                    "has no value; give it one or remove the key",
                );
                empty.push(key.name.as_str());
            } else {
                entries.insert(key.name.as_str(), node);
            }
        }
        Some(Fields {
            path: at.path.clone(),
            line: at.node.line,
            entries,
            empty,
        })
    }

    /// A key that must be there.
    pub(super) fn required<'a>(
        &mut self,
        fields: &Fields<'a>,
        key: &str,
        remedy: &str,
    ) -> Option<At<'a>> {
        let at = fields.get(key);
        if !fields.has(key) {
            let path = join(&fields.path, key);
            self.problem(
                &path,
                fields.line,
                format_args!("missing key `{key}`; {remedy}"),
            );
        }
        at
    }

    pub(super) fn items<'a>(&mut self, at: &At<'a>) -> Vec<At<'a>> {
        let Value::List(items) = &at.node.value else {
            self.expected(at, "a list");
            return Vec::new();
        };
        items
            .iter()
            .enumerate()
            .map(|(i, node)| At {
                node,
                path: format!("{}[{i}]", at.path),
            })
            .collect()
    }

    pub(super) fn text<'a>(&mut self, at: &At<'a>) -> Option<&'a str> {
        match &at.node.value {
            Value::Text(text) if !text.is_empty() => Some(text),
            Value::Text(_) => {
                self.complain(at, "must not be empty");
                None
            }
            Value::Int(_) | Value::Float(_) | Value::Bool(_) => {
                self.expected(at, "a text (put quotes around it)");
                None
            }
            _ => {
                self.expected(at, "a text");
                None
            }
        }
    }

    pub(super) fn bool(&mut self, at: Option<At<'_>>, default: bool) -> bool {
        match at {
            None => default,
            Some(at) => match at.node.value {
                Value::Bool(b) => b,
                _ => {
                    self.expected(&at, "true or false");
                    default
                }
            },
        }
    }

    /// A mapping whose keys are not ours, as JSON.
    pub(super) fn object(&mut self, at: &At<'_>) -> serde_json::Map<String, serde_json::Value> {
        match at.node.value.to_json() {
            serde_json::Value::Object(map) => map,
            _ => {
                self.expected(at, "a mapping");
                serde_json::Map::new()
            }
        }
    }

    pub(super) fn duration(&mut self, at: Option<At<'_>>, default: Duration) -> Duration {
        let Some(at) = at else { return default };
        match &at.node.value {
            Value::Text(text) => match units::duration(text) {
                Some(d) => return d,
                None => self.complain(
                    &at,
                    format_args!(
                        "`{text}` is no duration; write a number and a unit: 250ms, 30s, 10m, 1h"
                    ),
                ),
            },
            Value::Int(n) => self.complain(
                &at,
                format_args!(
                    "a duration needs a unit; write `{n}s` for seconds or `{n}ms` for milliseconds"
                ),
            ),
            _ => self.expected(&at, "a duration such as 30s"),
        }
        default
    }

    /// A size in bytes of at least 1.
    pub(super) fn size(&mut self, at: Option<At<'_>>, default: u64) -> u64 {
        let Some(at) = at else { return default };
        let size = match &at.node.value {
            Value::Int(n) => u64::try_from(*n).ok(),
            Value::Text(text) => units::size(text),
            _ => None,
        };
        match size {
            Some(n) if n > 0 => n,
            _ => {
                self.complain(
                    &at,
                    "must be a size over 0: bytes, or with a unit such as 64KiB, 16MiB, 1GiB",
                );
                default
            }
        }
    }

    pub(super) fn count(
        &mut self,
        at: Option<At<'_>>,
        default: u64,
        range: std::ops::RangeInclusive<u64>,
    ) -> u64 {
        let Some(at) = at else { return default };
        match at.node.value {
            Value::Int(n) => match u64::try_from(n) {
                Ok(n) if range.contains(&n) => return n,
                _ => self.complain(
                    &at,
                    format_args!(
                        "must be a whole number from {} to {}",
                        range.start(),
                        range.end()
                    ),
                ),
            },
            _ => self.expected(&at, "a whole number"),
        }
        default
    }

    /// A finite number of at least 0.
    pub(super) fn number(&mut self, at: Option<At<'_>>, default: f64) -> f64 {
        let Some(at) = at else { return default };
        let n = match at.node.value {
            Value::Int(n) => n as f64,
            Value::Float(n) => n,
            _ => {
                self.expected(&at, "a number");
                return default;
            }
        };
        if n.is_finite() && n >= 0.0 {
            return n;
        }
        self.complain(&at, "must be a finite number of at least 0");
        default
    }

    pub(super) fn socket(&mut self, at: Option<At<'_>>, default: SocketAddr) -> SocketAddr {
        let Some(at) = at else { return default };
        let Some(text) = self.text(&at) else {
            return default;
        };
        if let Ok(addr) = SocketAddr::from_str(text) {
            return addr;
        }
        let hint = match text.rsplit_once(':') {
            Some(("localhost", port)) if port.parse::<u16>().is_ok() => {
                format!("write `127.0.0.1:{port}`")
            }
            Some(("" | "*", port)) if port.parse::<u16>().is_ok() => format!(
                "write `0.0.0.0:{port}` for all IPv4 interfaces, `'[::]:{port}'` for all, or `127.0.0.1:{port}` for this machine only"
            ),
            _ => "write an IP address and a port, such as `127.0.0.1:8080` (port 0: a free one)"
                .to_owned(),
        };
        self.complain(
            &at,
            format_args!("`{text}` is no address to listen on; {hint}"),
        );
        default
    }

    /// One of a closed set of words.
    pub(super) fn choice<T: Copy>(
        &mut self,
        at: Option<At<'_>>,
        default: T,
        choices: &[(&'static str, T)],
    ) -> T {
        let Some(at) = at else { return default };
        let Some(text) = self.text(&at) else {
            return default;
        };
        if let Some((_, value)) = choices.iter().find(|(name, _)| *name == text) {
            return *value;
        }
        let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
        let hint = match nearest(text, &names) {
            Some(name) => format!("did you mean `{name}`? (one of {})", list(&names)),
            None => format!("choose one of {}", list(&names)),
        };
        self.complain(&at, format_args!("`{text}` is not known; {hint}"));
        default
    }
}

// === impl Fields ===

impl<'a> Fields<'a> {
    /// Whether the key is there, with a value or without.
    pub(super) fn has(&self, key: &str) -> bool {
        self.entries.contains_key(key) || self.empty.contains(&key)
    }

    pub(super) fn get(&self, key: &str) -> Option<At<'a>> {
        self.entries.get(key).map(|node| At {
            node,
            path: join(&self.path, key),
        })
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() {
        key.to_owned()
    } else {
        format!("{path}.{key}")
    }
}

fn list(names: &[&str]) -> String {
    let quoted: Vec<_> = names.iter().map(|n| format!("`{n}`")).collect();
    quoted.join(", ")
}

/// What to say of a key that a section does not have.
fn unknown(key: &str, section: &Section, others: &[&Section]) -> String {
    if let Some(name) = nearest(key, section.keys) {
        return format!("did you mean `{name}`?");
    }
    if let Some(other) = others.iter().find(|s| s.keys.contains(&key)) {
        return format!("it belongs in {}", other.name);
    }
    if let Some((other, name)) = others
        .iter()
        .find_map(|s| nearest(key, s.keys).map(|name| (s, name)))
    {
        return format!("did you mean `{name}` in {}?", other.name);
    }
    format!("{} takes {}", section.name, list(section.keys))
}

/// The name that is meant, if one is near enough: equal but for case and punctuation, or a third of its letters off.
pub(super) fn nearest<'a>(word: &str, names: &[&'a str]) -> Option<&'a str> {
    let plain = |s: &str| {
        s.chars()
            .filter(|c| c.is_alphanumeric())
            .map(|c| c.to_ascii_lowercase())
            .collect::<String>()
    };
    let word = plain(word);
    names
        .iter()
        .map(|name| {
            let name_plain = plain(name);
            (
                strsim::damerau_levenshtein(&word, &name_plain),
                name_plain.len(),
                *name,
            )
        })
        .filter(|(distance, len, _)| *distance <= (len / 3).max(1))
        .min_by_key(|(distance, _, _)| *distance)
        .map(|(_, _, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_names() {
        let names = ["url", "kvEvents", "replay", "gpu"];
        for (word, name) in [
            ("ur1", Some("url")),
            ("kv_events", Some("kvEvents")),
            ("kvevent", Some("kvEvents")),
            ("rpelay", Some("replay")),
            ("GPU", Some("gpu")),
            ("tokenizer", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, &names), name, "{word}");
        }
    }
}
