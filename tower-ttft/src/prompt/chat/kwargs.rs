//! The named values a template is rendered with, merged as vLLM merges them.
use crate::prompt::{Reason, json::Json};
use std::borrow::Cow;

/// Parameters of transformers' own function: a request that sets one makes vLLM fail or do something else.
const TAKEN: [&str; 12] = [
    "chat_template",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "self",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
];

/// Named values in no particular order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::prompt) struct Kwargs<'a>(Vec<(Cow<'a, str>, Json<'a>)>);

// === impl Kwargs ===

impl<'a> Kwargs<'a> {
    /// A request's `chat_template_kwargs`.
    pub(in crate::prompt) fn of(value: Option<Json<'a>>) -> Result<Self, Reason> {
        let pairs = match value {
            None => Vec::new(),
            Some(Json::Object(pairs)) => pairs,
            Some(_) => return Err(Reason::Unsupported),
        };
        let taken = |(k, v): &(Cow<'_, str>, Json<'_>)| TAKEN.contains(&&**k) && !v.is_null();
        if pairs.iter().any(taken) {
            return Err(Reason::Unsupported);
        }
        Ok(Self(pairs))
    }

    /// Overrides a value, unless the new one means that it is not set.
    pub(in crate::prompt) fn merge(&mut self, key: impl Into<Cow<'a, str>>, value: Json<'a>) {
        if is_unset(&value) {
            return;
        }
        let key = key.into();
        match self.0.iter_mut().find(|(k, _)| *k == key) {
            Some((_, v)) => *v = value,
            None => self.0.push((key, value)),
        }
    }

    /// These over those defaults.
    pub(in crate::prompt) fn over(self, defaults: &Kwargs<'static>) -> Self {
        let mut all = Kwargs(defaults.0.clone());
        for (key, value) in self.0 {
            all.merge(key, value);
        }
        all
    }

    pub(in crate::prompt) fn get(&self, key: &str) -> Option<&Json<'a>> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    pub(in crate::prompt) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    pub(in crate::prompt) fn is_true(&self, key: &str) -> bool {
        self.get(key).is_some_and(Json::truthy)
    }

    pub(in crate::prompt) fn into_pairs(self) -> Vec<(Cow<'a, str>, Json<'a>)> {
        self.0
    }

    #[cfg(test)]
    pub(in crate::prompt) fn into_owned(self) -> Kwargs<'static> {
        let own = |(k, v): (Cow<'a, str>, Json<'a>)| (Cow::Owned(k.into_owned()), v.into_owned());
        Kwargs(self.0.into_iter().map(own).collect())
    }

    /// What `reasoning_effort` sets: itself, and thinking on or off for templates that must be told.
    pub(super) fn effort(&mut self, effort: Option<Json<'a>>) {
        let Some(effort) = effort else { return };
        if !self.has("enable_thinking") {
            let thinks = effort.as_str() != Some("none");
            self.merge("enable_thinking", Json::Bool(thinks));
        }
        self.merge("reasoning_effort", effort);
    }
}

fn is_unset(value: &Json<'_>) -> bool {
    value.is_null() || value.as_str() == Some("auto")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Kwargs<'_>, Reason> {
        Kwargs::of(Some(Json::parse(text.as_bytes()).unwrap()))
    }

    #[test]
    fn requests_override_defaults_unless_unset() {
        let defaults = of(r#"{"a":1,"b":2,"c":3}"#).unwrap().into_owned();
        let mine = of(r#"{"a":null,"b":"auto","c":false,"d":4}"#).unwrap();
        let all = mine.over(&defaults);
        let get = |k: &str| all.get(k).cloned();
        assert_eq!(get("a"), Some(Json::Int(1)));
        assert_eq!(get("b"), Some(Json::Int(2)));
        assert_eq!(get("c"), Some(Json::Bool(false)));
        assert_eq!(get("d"), Some(Json::Int(4)));
    }

    #[test]
    fn effort_turns_thinking_on_or_off_unless_told_otherwise() {
        for (start, effort, thinks) in [
            ("{}", "none", Json::Bool(false)),
            ("{}", "high", Json::Bool(true)),
            (r#"{"enable_thinking":true}"#, "none", Json::Bool(true)),
        ] {
            let mut k = of(start).unwrap();
            k.effort(Some(Json::str(effort)));
            assert_eq!(k.get("enable_thinking"), Some(&thinks));
            assert_eq!(k.get("reasoning_effort"), Some(&Json::str(effort)));
        }
    }

    #[test]
    fn names_that_are_taken_are_refused() {
        assert!(of(r#"{"chat_template":"x"}"#).is_err());
        assert!(of(r#"{"tokenize":true}"#).is_err());
        assert!(of(r#"{"chat_template":null}"#).is_ok());
        assert!(Kwargs::of(Some(Json::Int(1))).is_err());
    }
}
