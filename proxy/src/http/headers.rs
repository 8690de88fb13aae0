//! Which headers end at this hop, which pass, and which are ours.
//!
//! RFC 9110 §7.6.1: a proxy takes out the fields that `Connection` names, `Connection` itself and the fields that speak
//! of one connection only, and frames each message itself (RFC 9112 §6). `Forwarded` and its kin pass as they are.

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{
        ACCEPT_ENCODING, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
    },
};

/// The id of a request, the client's own if it is sane.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Why a request was not served; on every error that was made here and not by an engine.
pub const X_DROPPED_REASON: HeaderName = HeaderName::from_static("x-forebay-dropped-reason");
/// The endpoint that answered, if the policy asks for it.
pub const X_ENDPOINT: HeaderName = HeaderName::from_static("x-forebay-endpoint");
/// vLLM's data-parallel rank; a client's own is not passed on.
pub const X_DATA_PARALLEL_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Prefix of the headers by which the parts of Forebay speak with each other.
const CONTROL_PREFIX: &str = "x-forebay-";

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Makes a client's header fields those of a request to an engine.
///
/// `Accept-Encoding` ends here: an encoded answer could not be watched, so none is asked for.
pub fn to_engine(headers: &mut HeaderMap, host: HeaderValue, rank: Option<u32>) {
    strip_hop_by_hop(headers);
    let control: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with(CONTROL_PREFIX))
        .cloned()
        .collect();
    for name in control {
        headers.remove(name);
    }
    headers.remove(EXPECT);
    headers.remove(ACCEPT_ENCODING);
    headers.remove(CONTENT_LENGTH);
    headers.remove(X_DATA_PARALLEL_RANK);
    headers.insert(HOST, host);
    if let Some(rank) = rank {
        headers.insert(X_DATA_PARALLEL_RANK, HeaderValue::from(rank));
    }
}

/// Makes an engine's header fields those of an answer to a client. The length goes too: it is written anew from the
/// body's own size, but for answers without a body (`keep_length`), where it says what a `GET` would bring.
pub fn to_client(headers: &mut HeaderMap, keep_length: bool) {
    strip_hop_by_hop(headers);
    if !keep_length {
        headers.remove(CONTENT_LENGTH);
    }
}

fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in [
        CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
    ] {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn shown(headers: &HeaderMap) -> Vec<String> {
        let mut fields: Vec<_> = headers
            .iter()
            .map(|(n, v)| format!("{n}: {}", v.to_str().expect("text")))
            .collect();
        fields.sort();
        fields
    }

    #[test]
    fn one_hop_is_not_the_next() {
        let mut headers = map(&[
            ("connection", "close, X-Private"),
            ("connection", "keep-alive"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "keep-alive"),
            ("proxy-authorization", "secret"),
            ("te", "trailers"),
            ("trailer", "x-sum"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("x-private", "1"),
            ("expect", "100-continue"),
            ("content-length", "5"),
            ("host", "gateway.example"),
            ("accept-encoding", "gzip, br"),
            ("authorization", "Bearer k"),
            ("forwarded", "for=10.0.0.1"),
            ("x-forwarded-for", "10.0.0.1"),
            ("traceparent", "00-1-2-01"),
        ]);
        to_engine(
            &mut headers,
            HeaderValue::from_static("10.1.1.1:8000"),
            None,
        );
        assert_eq!(
            shown(&headers),
            [
                "authorization: Bearer k",
                "forwarded: for=10.0.0.1",
                "host: 10.1.1.1:8000",
                "traceparent: 00-1-2-01",
                "x-forwarded-for: 10.0.0.1",
            ]
        );
    }

    /// I3: headers by which clients would steer us or the engine.
    #[test]
    fn control_headers_of_clients_end_here() {
        let mut headers = map(&[
            ("x-forebay-endpoint", "169.254.169.254:80"),
            ("x-forebay-anything", "1"),
            ("x-data-parallel-rank", "7"),
        ]);
        to_engine(&mut headers, HeaderValue::from_static("e:1"), Some(1));
        assert_eq!(shown(&headers), ["host: e:1", "x-data-parallel-rank: 1"]);
    }

    #[test]
    fn answers_are_framed_anew() {
        let fields = [
            ("connection", "keep-alive"),
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("content-type", "application/json"),
        ];
        let mut headers = map(&fields);
        to_client(&mut headers, false);
        assert_eq!(shown(&headers), ["content-type: application/json"]);
        let mut headers = map(&fields);
        to_client(&mut headers, true);
        assert_eq!(
            shown(&headers),
            ["content-length: 5", "content-type: application/json"]
        );
    }
}
