//! The only way in which a body is ever changed.

use bytes::Bytes;
use std::ops::Range;

/// `body` with the value at `value` replaced by `json`, every other byte as it was. None if `value` does not lie in
/// `body`. The ranges of fields behind the value no longer hold: read the new body again where they are needed.
pub fn splice(body: &[u8], value: Range<usize>, json: &[u8]) -> Option<Bytes> {
    let before = body.get(..value.start)?;
    let after = body.get(value.end..)?;
    // An inverted range would repeat bytes.
    body.get(value)?;
    let mut spliced = Vec::with_capacity(before.len() + json.len() + after.len());
    for part in [before, json, after] {
        spliced.extend_from_slice(part);
    }
    Some(spliced.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peek::{Api, read};
    use http::HeaderMap;
    use proptest::prelude::*;

    #[test]
    fn one_value_and_nothing_else() {
        let body = Bytes::from_static(
            br#"{ "model" : "a" , "seed": 12345678901234567890123, "model":"org\/b" ,"z":{"b":1,"a":2} }"#,
        );
        let req = read(Api::Chat, &HeaderMap::new(), body.clone());
        let model = req.range("model").expect("model is there");
        let spliced = splice(&body, model, br#""other""#).expect("the range is the body's");
        assert_eq!(
            &spliced[..],
            br#"{ "model" : "a" , "seed": 12345678901234567890123, "model":"other" ,"z":{"b":1,"a":2} }"#
        );
        let again = read(Api::Chat, &HeaderMap::new(), spliced);
        assert_eq!(again.model.as_deref(), Some("other"));
    }

    #[test]
    #[allow(clippy::reversed_empty_ranges)]
    fn ranges_beyond_the_body_are_refused() {
        for range in [0..4, 4..5, 2..1, usize::MAX - 1..usize::MAX, 3..0] {
            assert_eq!(splice(b"abc", range, b"x"), None);
        }
        assert_eq!(splice(b"abc", 3..3, b"x").as_deref(), Some(&b"abcx"[..]));
    }

    proptest! {
        #[test]
        fn what_is_around_stays(before in prop::collection::vec(any::<u8>(), 0..40), value in prop::collection::vec(any::<u8>(), 0..40), after in prop::collection::vec(any::<u8>(), 0..40), new in prop::collection::vec(any::<u8>(), 0..40)) {
            let body = [&before[..], &value, &after].concat();
            let spliced = splice(&body, before.len()..before.len() + value.len(), &new);
            prop_assert_eq!(spliced.as_deref(), Some(&[&before[..], &new, &after].concat()[..]));
        }
    }
}
