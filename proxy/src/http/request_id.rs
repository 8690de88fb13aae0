//! Every request has an id: the client's own if it is sane, else a new one. The engine gets it as `X-Request-Id` (vLLM
//! names the answer after it), the client as a response header, the log and decision records as a field.

use super::headers::X_REQUEST_ID;
use http::{HeaderMap, HeaderValue};
use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::sync::Arc;

/// Longest id that is taken from a client, in bytes.
const MAX_LEN: usize = 128;

/// Gives ids to requests.
pub struct RequestIds {
    rng: Mutex<StdRng>,
}

// === impl RequestIds ===

impl RequestIds {
    /// New ids come from this seed.
    pub fn new(seed: u64) -> Self {
        Self {
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
        }
    }

    /// The id of a request with these header fields, which then say so.
    pub fn assign(&self, headers: &mut HeaderMap) -> Arc<str> {
        if let Some(id) = sane(headers) {
            return id;
        }
        let id = {
            let mut rng = self.rng.lock();
            format!("{:016x}{:016x}", rng.next_u64(), rng.next_u64())
        };
        if let Ok(value) = HeaderValue::from_str(&id) {
            headers.insert(X_REQUEST_ID, value);
        }
        id.into()
    }
}

/// A client's id, if there is one only, of a bounded length and of characters that no log or URL chokes on.
fn sane(headers: &HeaderMap) -> Option<Arc<str>> {
    let mut values = headers.get_all(X_REQUEST_ID).iter();
    let value = values.next()?;
    if values.next().is_some() || value.is_empty() || value.len() > MAX_LEN {
        return None;
    }
    let id = value.to_str().ok()?;
    id.bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_.:+/=@".contains(&b))
        .then(|| id.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assigned(ids: &[&str]) -> (Arc<str>, HeaderMap) {
        let mut headers = HeaderMap::new();
        for id in ids {
            headers.append(X_REQUEST_ID, id.parse().expect("a header value"));
        }
        (RequestIds::new(1).assign(&mut headers), headers)
    }

    #[test]
    fn sane_ids_are_kept() {
        for id in ["a", "req-01.b_c:d+e/f=@", &"x".repeat(128)] {
            let (got, headers) = assigned(&[id]);
            assert_eq!(&*got, id);
            assert_eq!(headers[X_REQUEST_ID], id);
        }
    }

    #[test]
    fn others_are_replaced() {
        for ids in [
            &[][..],
            &[""],
            &["a b"],
            &["a\tb"],
            &["{\"x\":1}"],
            &["a", "b"],
            &[&"x".repeat(129)],
        ] {
            let (got, headers) = assigned(ids);
            assert_eq!(got.len(), 32, "{ids:?}");
            assert!(got.bytes().all(|b| b.is_ascii_hexdigit()));
            let all: Vec<_> = headers.get_all(X_REQUEST_ID).iter().collect();
            assert_eq!(all, [&*got]);
        }
    }

    #[test]
    fn ids_differ() {
        let ids = RequestIds::new(7);
        let first = ids.assign(&mut HeaderMap::new());
        assert_ne!(first, ids.assign(&mut HeaderMap::new()));
        assert_eq!(first, RequestIds::new(7).assign(&mut HeaderMap::new()));
    }
}
