//! What request models do with JSON: take fields out, put them in order.
use crate::prompt::json::Json;
use std::borrow::Cow;

impl<'a> Json<'a> {
    /// A string that owns or borrows its text.
    pub(crate) fn str(s: impl Into<Cow<'a, str>>) -> Self {
        Self::Str(s.into())
    }

    /// An object of pairs in this order.
    pub(crate) fn object<const N: usize>(pairs: [(&'static str, Json<'a>); N]) -> Self {
        Self::Object(pairs.into_iter().map(|(k, v)| (k.into(), v)).collect())
    }

    /// Like [`Json::get`], but a null counts as absent.
    pub(crate) fn some(&self, key: &str) -> Option<&Json<'a>> {
        self.get(key).filter(|v| !v.is_null())
    }

    pub(crate) fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(s) => Some(s),
            _ => None,
        }
    }

    /// The string of a field.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.get(key)?.as_str()
    }

    /// Removes a field; none if it is missing or null.
    pub(crate) fn take(&mut self, key: &str) -> Option<Json<'a>> {
        match self {
            Self::Object(pairs) => {
                let at = pairs.iter().position(|(k, _)| k == key)?;
                let (_, value) = pairs.remove(at);
                (!value.is_null()).then_some(value)
            }
            _ => None,
        }
    }

    /// Sets a field of an object, where it is or at the end.
    pub(crate) fn set(&mut self, key: &'static str, value: Json<'a>) {
        if let Self::Object(pairs) = self {
            match pairs.iter_mut().find(|(k, _)| k == key) {
                Some((_, v)) => *v = value,
                None => pairs.push((key.into(), value)),
            }
        }
    }

    /// Whether Python takes it for true.
    pub(crate) fn truthy(&self) -> bool {
        match self {
            Self::Null => false,
            Self::Bool(b) => *b,
            Self::Int(i) => *i != 0,
            Self::BigInt(_) => true,
            Self::Float(f) => *f != 0.0,
            Self::Str(s) => !s.is_empty(),
            Self::Array(a) => !a.is_empty(),
            Self::Object(o) => !o.is_empty(),
        }
    }

    /// The same object with the named fields first and in that order, as pydantic writes a typed dictionary.
    pub(crate) fn reordered(self, first: &[&str]) -> Self {
        match self {
            Self::Object(mut pairs) => {
                pairs
                    .sort_by_key(|(k, _)| first.iter().position(|f| f == k).unwrap_or(first.len()));
                Self::Object(pairs)
            }
            other => other,
        }
    }

    /// The same value without borrowed text.
    pub(crate) fn into_owned(self) -> Json<'static> {
        match self {
            Self::Null => Json::Null,
            Self::Bool(b) => Json::Bool(b),
            Self::Int(i) => Json::Int(i),
            Self::BigInt(s) => Json::BigInt(s.into_owned().into()),
            Self::Float(f) => Json::Float(f),
            Self::Str(s) => Json::Str(s.into_owned().into()),
            Self::Array(items) => Json::Array(items.into_iter().map(Json::into_owned).collect()),
            Self::Object(pairs) => Json::Object(
                pairs
                    .into_iter()
                    .map(|(k, v)| (Cow::Owned(k.into_owned()), v.into_owned()))
                    .collect(),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_out_and_in_order() {
        let mut v = Json::parse(br#"{"z":1,"b":2,"a":3,"n":null}"#).unwrap();
        assert_eq!(v.take("n"), None);
        assert_eq!(v.take("b"), Some(Json::Int(2)));
        assert_eq!(v.take("b"), None);
        v.set("z", Json::Int(9));
        v.set("y", Json::Bool(true));
        let v = v.reordered(&["a", "y"]).into_owned();
        let keys: Vec<_> = match &v {
            Json::Object(pairs) => pairs.iter().map(|(k, _)| &**k).collect(),
            _ => vec![],
        };
        assert_eq!(keys, ["a", "y", "z"]);
        assert_eq!(v.some("z"), Some(&Json::Int(9)));
    }
}
