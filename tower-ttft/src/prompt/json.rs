//! JSON as Python's `json.loads` reads it: engines read the request with that, and what a template prints of it
//! depends on it. Integers keep all their digits, floats are exact, `NaN` and `Infinity` are numbers, the last of
//! duplicate keys counts at the place of the first. Unlike Python, a lone surrogate is an error: no engine can
//! tokenize one.

use std::{borrow::Cow, collections::HashMap};

/// Arrays and objects inside each other, at most. Python gives up somewhat later; nobody's prompt is that deep.
const MAX_DEPTH: usize = 200;

/// From how many keys on duplicates are looked for with a map.
const MANY_KEYS: usize = 16;

/// A JSON value that borrows from its text where it can.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json<'a> {
    Null,
    Bool(bool),
    Int(i128),
    /// An integer with more digits than fit in `i128`, as written.
    BigInt(Cow<'a, str>),
    Float(f64),
    Str(Cow<'a, str>),
    Array(Vec<Json<'a>>),
    Object(Vec<(Cow<'a, str>, Json<'a>)>),
}

/// Why a text is no JSON. Says where, never what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JsonError {
    #[error("no valid JSON at byte {0}")]
    Syntax(usize),
    #[error("arrays and objects are nested deeper than {MAX_DEPTH}")]
    TooDeep,
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

// === impl Json ===

impl<'a> Json<'a> {
    /// Reads a whole text.
    pub(crate) fn parse(text: &'a [u8]) -> Result<Self, JsonError> {
        let text = std::str::from_utf8(text).map_err(|e| JsonError::Syntax(e.valid_up_to()))?;
        let mut r = Reader { text, at: 0 };
        let value = r.value(0)?;
        r.space();
        if r.at < r.text.len() {
            return Err(r.fail());
        }
        Ok(value)
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Json<'a>> {
        match self {
            Self::Object(pairs) => pairs.iter().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    pub(crate) fn as_array(&self) -> Option<&[Json<'a>]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    /// A token id: a number from 0 to `u32::MAX`.
    pub(crate) fn as_token(&self) -> Option<u32> {
        match self {
            Self::Int(i) => u32::try_from(*i).ok(),
            _ => None,
        }
    }
}

// === impl Reader ===

impl<'a> Reader<'a> {
    fn fail(&self) -> JsonError {
        JsonError::Syntax(self.at)
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or("")
    }

    fn word(&mut self, word: &str, value: Json<'a>) -> Result<Json<'a>, JsonError> {
        if self.rest().starts_with(word) {
            self.at += word.len();
            Ok(value)
        } else {
            Err(self.fail())
        }
    }

    fn value(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        if depth > MAX_DEPTH {
            return Err(JsonError::TooDeep);
        }
        self.space();
        match self.peek().ok_or(self.fail())? {
            b'"' => Ok(Json::Str(self.string()?)),
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b't' => self.word("true", Json::Bool(true)),
            b'f' => self.word("false", Json::Bool(false)),
            b'n' => self.word("null", Json::Null),
            b'N' => self.word("NaN", Json::Float(f64::NAN)),
            b'I' => self.word("Infinity", Json::Float(f64::INFINITY)),
            b'-' if self.rest().starts_with("-I") => {
                self.word("-Infinity", Json::Float(f64::NEG_INFINITY))
            }
            _ => self.number(),
        }
    }

    fn array(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        self.at += 1;
        let mut items = Vec::new();
        self.space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Json::Array(items));
        }
        loop {
            items.push(self.value(depth + 1)?);
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    return Ok(Json::Array(items));
                }
                _ => return Err(self.fail()),
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json<'a>, JsonError> {
        self.at += 1;
        let mut pairs: Vec<(Cow<'a, str>, Json<'a>)> = Vec::new();
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Json::Object(pairs));
        }
        loop {
            self.space();
            if self.peek() != Some(b'"') {
                return Err(self.fail());
            }
            let key = self.string()?;
            self.space();
            if self.peek() != Some(b':') {
                return Err(self.fail());
            }
            self.at += 1;
            pairs.push((key, self.value(depth + 1)?));
            self.space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(Json::Object(without_duplicates(pairs)));
                }
                _ => return Err(self.fail()),
            }
        }
    }

    fn number(&mut self) -> Result<Json<'a>, JsonError> {
        let start = self.at;
        let digits = |r: &mut Self| {
            let from = r.at;
            while matches!(r.peek(), Some(b'0'..=b'9')) {
                r.at += 1;
            }
            r.at - from
        };
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        let zero = self.peek() == Some(b'0');
        match digits(self) {
            0 => return Err(self.fail()),
            1 => {}
            _ if zero => return Err(self.fail()),
            _ => {}
        }
        let mut float = false;
        if self.peek() == Some(b'.') {
            float = true;
            self.at += 1;
            if digits(self) == 0 {
                return Err(self.fail());
            }
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            float = true;
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            if digits(self) == 0 {
                return Err(self.fail());
            }
        }
        let text = self.text.get(start..self.at).unwrap_or("");
        if float {
            // Rust reads decimal floats exactly and takes what is too large for infinity, as Python does.
            return text.parse().map(Json::Float).map_err(|_| self.fail());
        }
        Ok(match text.parse() {
            Ok(int) => Json::Int(int),
            Err(_) => Json::BigInt(text.into()),
        })
    }

    /// The string that begins at the quote here.
    fn string(&mut self) -> Result<Cow<'a, str>, JsonError> {
        self.at += 1;
        let mut owned: Option<String> = None;
        loop {
            let rest = self.rest();
            let stop = memchr::memchr2(b'"', b'\\', rest.as_bytes())
                .ok_or(JsonError::Syntax(self.text.len()))?;
            let run = rest.get(..stop).unwrap_or("");
            if let Some(bad) = run.bytes().position(|b| b < 0x20) {
                return Err(JsonError::Syntax(self.at + bad));
            }
            self.at += stop + 1;
            if rest.as_bytes().get(stop) == Some(&b'"') {
                return Ok(match owned {
                    None => Cow::Borrowed(run),
                    Some(mut s) => {
                        s.push_str(run);
                        Cow::Owned(s)
                    }
                });
            }
            let s = owned.get_or_insert_with(String::new);
            s.push_str(run);
            let c = self.escape()?;
            s.push(c);
        }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let b = self.peek().ok_or(self.fail())?;
        self.at += 1;
        Ok(match b {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let high = self.hex4()?;
                match high {
                    0xd800..=0xdbff => {
                        if !self.rest().starts_with("\\u") {
                            return Err(self.fail());
                        }
                        self.at += 2;
                        let low = self.hex4()?;
                        if !(0xdc00..=0xdfff).contains(&low) {
                            return Err(self.fail());
                        }
                        let c = 0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00);
                        char::from_u32(c).ok_or(self.fail())?
                    }
                    _ => char::from_u32(high).ok_or(self.fail())?,
                }
            }
            _ => return Err(self.fail()),
        })
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let digits = self.text.get(self.at..self.at + 4).ok_or(self.fail())?;
        if !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(self.fail());
        }
        self.at += 4;
        u32::from_str_radix(digits, 16).map_err(|_| self.fail())
    }
}

fn without_duplicates<'a>(pairs: Vec<(Cow<'a, str>, Json<'a>)>) -> Vec<(Cow<'a, str>, Json<'a>)> {
    let mut out: Vec<(Cow<'a, str>, Json<'a>)> = Vec::with_capacity(pairs.len());
    if pairs.len() < MANY_KEYS {
        for (key, value) in pairs {
            match out.iter_mut().find(|(k, _)| *k == key) {
                Some((_, v)) => *v = value,
                None => out.push((key, value)),
            }
        }
        return out;
    }
    let mut places: HashMap<Cow<'a, str>, usize> = HashMap::with_capacity(pairs.len());
    for (key, value) in pairs {
        match places.get(&key).and_then(|i| out.get_mut(*i)) {
            Some((_, v)) => *v = value,
            None => {
                places.insert(key.clone(), out.len());
                out.push((key, value));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<Json<'_>, JsonError> {
        Json::parse(text.as_bytes())
    }

    #[test]
    fn numbers_keep_what_python_keeps() {
        assert_eq!(parse("1"), Ok(Json::Int(1)));
        assert_eq!(parse("-0"), Ok(Json::Int(0)));
        assert_eq!(parse("1.0"), Ok(Json::Float(1.0)));
        assert_eq!(parse("1E5"), Ok(Json::Float(1e5)));
        assert_eq!(parse("1e999"), Ok(Json::Float(f64::INFINITY)));
        assert_eq!(
            parse("123456789012345678901234567890"),
            Ok(Json::Int(123456789012345678901234567890))
        );
        let long = "9".repeat(50);
        assert_eq!(parse(&long), Ok(Json::BigInt(long.as_str().into())));
        assert!(matches!(parse("NaN"), Ok(Json::Float(f)) if f.is_nan()));
        assert_eq!(parse("-Infinity"), Ok(Json::Float(f64::NEG_INFINITY)));
        for bad in ["01", "-", "1.", ".5", "1e", "+1", "--1", "-Inf"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn strings_unescape_and_refuse_what_cannot_be_text() {
        assert_eq!(
            parse(r#""a\n\u00e9\ud83d\ude00\/""#),
            Ok(Json::Str("a\né😀/".into()))
        );
        assert!(matches!(
            parse(r#""plain""#),
            Ok(Json::Str(Cow::Borrowed("plain")))
        ));
        for bad in [
            r#""\ud800""#,
            r#""\udc00""#,
            r#""\ud800\u0041""#,
            "\"a\nb\"",
            r#""\x""#,
            r#""\u12"#,
            "\"a",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_last_duplicate_counts_at_the_place_of_the_first() {
        let few = parse(r#"{"a":1,"b":2,"a":3}"#).unwrap();
        assert_eq!(
            few,
            Json::Object(vec![("a".into(), Json::Int(3)), ("b".into(), Json::Int(2))])
        );
        let many: String = (0..40).map(|i| format!("\"k{}\":{i},", i % 30)).collect();
        let text = format!("{{{}\"z\":0}}", many);
        let many = parse(&text).unwrap();
        let Json::Object(pairs) = &many else {
            unreachable!()
        };
        assert_eq!(pairs.len(), 31);
        assert_eq!(pairs[0], ("k0".into(), Json::Int(30)));
        assert_eq!(pairs[10], ("k10".into(), Json::Int(10)));
    }

    #[test]
    fn depth_is_bounded() {
        let ok = format!("{}{}", "[".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH));
        assert!(parse(&ok).is_ok());
        let deep = "[".repeat(1_000_000);
        assert_eq!(parse(&deep), Err(JsonError::TooDeep));
    }

    proptest! {
        #[test]
        fn any_text_gives_a_value_or_an_error(text in "\\PC{0,40}", bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = parse(&text);
            let _ = Json::parse(&bytes);
        }

        #[test]
        fn strings_survive_serde(s in any::<String>()) {
            let text = serde_json::to_string(&s).unwrap();
            prop_assert_eq!(parse(&text), Ok(Json::Str(s.as_str().into())));
        }
    }
}
