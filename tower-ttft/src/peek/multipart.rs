//! Small text fields of a `multipart/form-data` body (RFC 7578), as the audio APIs send them.

use http::{HeaderMap, header};
use memchr::memmem;

/// A form's part headers are not looked at beyond this many bytes.
const MAX_PART_HEADERS: usize = 4 * 1024;

/// A field's value is not taken for one of the small text fields beyond this many bytes.
const MAX_VALUE: usize = 1024;

/// The delimiter of a multipart form, from `Content-Type`; none for any other body.
pub(super) fn boundary(headers: &HeaderMap) -> Option<Vec<u8>> {
    let value = headers.get(header::CONTENT_TYPE)?.as_bytes();
    let (kind, params) = split_once(value, b';')?;
    if !kind
        .trim_ascii()
        .eq_ignore_ascii_case(b"multipart/form-data")
    {
        return None;
    }
    let boundary = param(params, b"boundary")?;
    (!boundary.is_empty()).then(|| [b"--", boundary].concat())
}

/// The fields of `body` that are called one of `names`, in their order, as far as the body is there: a part that its
/// end is missing of is left out.
pub(super) fn fields<'n, 'b>(
    body: &'b [u8],
    delimiter: &[u8],
    names: &[&'n str],
) -> Vec<(&'n str, &'b [u8])> {
    let mut found = Vec::new();
    // A delimiter stands at the beginning of a line, which tells it from its look-alike inside a value.
    let line = [b"\r\n", delimiter].concat();
    let finder = memmem::Finder::new(&line);
    let mut start = if body.starts_with(delimiter) {
        delimiter.len()
    } else if let Some(at) = finder.find(body) {
        at + line.len()
    } else {
        return found;
    };
    while let Some(rest) = body.get(start..) {
        let Some(end) = finder.find(rest) else {
            break;
        };
        if let Some(field) = rest.get(..end).and_then(|part| field(part, names)) {
            found.push(field);
        }
        start += end + line.len();
    }
    found
}

/// `part` is what lies between two delimiters: a line end, headers, an empty line, the value.
fn field<'n, 'b>(part: &'b [u8], names: &[&'n str]) -> Option<(&'n str, &'b [u8])> {
    let part = part.strip_prefix(b"\r\n")?;
    let head = part.get(..part.len().min(MAX_PART_HEADERS))?;
    let end = memmem::find(head, b"\r\n\r\n")?;
    let value = part.get(end + 4..)?;
    if value.len() > MAX_VALUE {
        return None;
    }
    let disposition = head.get(..end)?.split(|b| *b == b'\n').find_map(|line| {
        let (name, value) = split_once(line, b':')?;
        name.trim_ascii()
            .eq_ignore_ascii_case(b"content-disposition")
            .then_some(value)
    })?;
    let (_, params) = split_once(disposition, b';')?;
    let name = param(params, b"name")?;
    let name = names.iter().find(|n| n.as_bytes() == name)?;
    Some((name, value))
}

/// A parameter of a header value, its quotes taken off.
fn param<'a>(mut params: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    while !params.is_empty() {
        let (param, rest) = params
            .split_at_checked(end_of_param(params))
            .unwrap_or((params, &[]));
        params = rest.get(1..).unwrap_or_default();
        let Some((key, value)) = split_once(param, b'=') else {
            continue;
        };
        if key.trim_ascii().eq_ignore_ascii_case(name) {
            let value = value.trim_ascii();
            let unquoted = value
                .strip_prefix(b"\"")
                .and_then(|v| v.strip_suffix(b"\""));
            return Some(unquoted.unwrap_or(value));
        }
    }
    None
}

/// Where the first parameter ends: a file name in quotes may hold semicolons.
fn end_of_param(params: &[u8]) -> usize {
    let (mut quoted, mut escaped) = (false, false);
    for (at, b) in params.iter().enumerate() {
        match b {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b';' if !quoted => return at,
            _ => {}
        }
    }
    params.len()
}

fn split_once(bytes: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let i = memchr::memchr(at, bytes)?;
    Some((bytes.get(..i)?, bytes.get(i + 1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    const FORM: &[u8] = b"--xyz\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--xyz\r\ncontent-disposition: form-data; filename=\"a; name=model; b\\\".wav\"; name=\"file\"\r\nContent-Type: audio/wav\r\n\r\n\x00\xff--xyz\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nevil\r\n--xyz\r\nContent-Disposition: form-data; name=stream\r\n\r\ntrue\r\n--xyz--\r\n";

    fn headers(content_type: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static(content_type))])
    }

    #[test]
    fn boundaries() {
        for (content_type, delimiter) in [
            ("multipart/form-data; boundary=xyz", Some("--xyz")),
            (
                "Multipart/Form-Data;charset=utf-8;Boundary=\"x;z\"",
                Some("--x;z"),
            ),
            ("multipart/form-data; boundary=", None),
            ("multipart/form-data", None),
            ("application/json; boundary=xyz", None),
            ("", None),
        ] {
            let found = boundary(&headers(content_type));
            assert_eq!(
                found.as_deref(),
                delimiter.map(str::as_bytes),
                "{content_type}"
            );
        }
    }

    #[test]
    fn only_real_fields_count() {
        assert_eq!(
            fields(FORM, b"--xyz", &["model", "stream"]),
            [("model", &b"whisper"[..]), ("stream", b"true")]
        );
    }

    #[test]
    fn a_prefix_gives_the_fields_that_are_whole() {
        for end in 0..FORM.len() {
            let found = fields(&FORM[..end], b"--xyz", &["model", "stream"]);
            assert!(found.len() <= 2);
            for (name, value) in found {
                assert!([("model", &b"whisper"[..]), ("stream", b"true")].contains(&(name, value)));
            }
        }
    }

    #[test]
    fn long_values_are_no_small_fields() {
        let value = vec![b'x'; MAX_VALUE + 1];
        let form = [
            b"--b\r\nContent-Disposition: form-data; name=model\r\n\r\n",
            &value[..],
            b"\r\n--b--",
        ]
        .concat();
        assert!(fields(&form, b"--b", &["model"]).is_empty());
    }
}
