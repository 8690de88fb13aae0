//! Token counts in the words of each API.

use super::Usage;
use crate::peek::json;

/// What one `usage` object says; an API may spread it over several events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UsageParts {
    prompt: Option<u64>,
    completion: Option<u64>,
    cached: Option<u64>,
    /// Prompt tokens that the Messages API counts apart from `input_tokens`.
    apart: Option<u64>,
}

// === impl UsageParts ===

impl UsageParts {
    /// Reads a `usage` object; none if it is null, no object, or says nothing known.
    ///
    /// * chat, completions, embeddings: `prompt_tokens`, `completion_tokens`, `prompt_tokens_details.cached_tokens`;
    /// * responses: `input_tokens`, `output_tokens`, `input_tokens_details.cached_tokens`;
    /// * messages: the whole prompt is `input_tokens` + `cache_read_input_tokens` + `cache_creation_input_tokens`.
    pub fn read(raw: &[u8]) -> Option<Self> {
        let mut parts = Self::default();
        let (mut read, mut created) = (None, None);
        for field in json::fields(raw).ok()? {
            let value = raw.get(field.value)?;
            match &*field.key {
                "prompt_tokens" | "input_tokens" => parts.prompt = count(value),
                "completion_tokens" | "output_tokens" => parts.completion = count(value),
                "cache_read_input_tokens" => read = count(value),
                "cache_creation_input_tokens" => created = count(value),
                "prompt_tokens_details" | "input_tokens_details" => {
                    parts.cached = json::member(value, "cached_tokens").and_then(count);
                }
                _ => {}
            }
        }
        if read.is_some() || created.is_some() {
            parts.cached = parts.cached.or(read);
            parts.apart = Some(read.unwrap_or(0).saturating_add(created.unwrap_or(0)));
        }
        (parts != Self::default()).then_some(parts)
    }

    /// Takes over what `newer` says and keeps what it does not.
    pub fn update(&mut self, newer: Self) {
        self.prompt = newer.prompt.or(self.prompt);
        self.completion = newer.completion.or(self.completion);
        self.cached = newer.cached.or(self.cached);
        self.apart = newer.apart.or(self.apart);
    }

    /// The counts; what was never said is 0.
    pub fn usage(&self) -> Usage {
        let fit = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let prompt = self
            .prompt
            .unwrap_or(0)
            .saturating_add(self.apart.unwrap_or(0));
        Usage {
            prompt_tokens: fit(prompt),
            completion_tokens: fit(self.completion.unwrap_or(0)),
            cached_tokens: self.cached.map(fit),
        }
    }
}

/// A count as engines print it.
fn count(raw: &[u8]) -> Option<u64> {
    std::str::from_utf8(raw).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(raw: &str) -> Option<Usage> {
        UsageParts::read(raw.as_bytes()).map(|parts| parts.usage())
    }

    fn counts(prompt_tokens: u32, completion_tokens: u32, cached_tokens: Option<u32>) -> Usage {
        Usage {
            prompt_tokens,
            completion_tokens,
            cached_tokens,
        }
    }

    #[test]
    fn each_api() {
        for (raw, expected) in [
            (
                r#"{"prompt_tokens":13,"total_tokens":16,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8,"created_cache_tokens":0}}"#,
                counts(13, 3, Some(8)),
            ),
            (
                r#"{"prompt_tokens":13,"total_tokens":14,"completion_tokens":1,"completion_tokens_details":null}"#,
                counts(13, 1, None),
            ),
            (
                r#"{"prompt_tokens":5,"total_tokens":5,"completion_tokens":0,"prompt_tokens_details":null}"#,
                counts(5, 0, None),
            ),
            (
                r#"{"input_tokens":7,"input_tokens_details":{"cached_tokens":0},"output_tokens":3,"total_tokens":10}"#,
                counts(7, 3, Some(0)),
            ),
            (
                r#"{"input_tokens":13,"output_tokens":0}"#,
                counts(13, 0, None),
            ),
            (
                r#"{"input_tokens":5,"output_tokens":3,"cache_creation_input_tokens":10,"cache_read_input_tokens":64}"#,
                counts(79, 3, Some(64)),
            ),
            (
                r#"{"prompt_tokens":99999999999999999999,"completion_tokens":4294967296}"#,
                counts(0, u32::MAX, None),
            ),
        ] {
            assert_eq!(usage(raw), Some(expected), "{raw}");
        }
        for raw in ["null", "{}", "[]", "3", r#"{"prompt_tokens":null}"#, "{"] {
            assert_eq!(usage(raw), None, "{raw}");
        }
    }

    #[test]
    fn later_parts_keep_what_they_do_not_say() {
        let mut parts = UsageParts::default();
        for raw in [
            r#"{"input_tokens":13,"output_tokens":0,"cache_read_input_tokens":32}"#,
            r#"{"output_tokens":5}"#,
        ] {
            parts.update(UsageParts::read(raw.as_bytes()).expect("says something"));
        }
        assert_eq!(parts.usage(), counts(45, 5, Some(32)));
    }
}
