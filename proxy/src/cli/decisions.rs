//! `forebay-proxy decisions`: follows a proxy's `/decisions` and prints a line for each decision and one for what came
//! of it.

use super::DecisionsArgs;
use http::{Request, Uri, header};
use http_body_util::{BodyExt, Empty, combinators::BoxBody};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::{fmt::Write as _, io::Write, time::Duration};
use tokio::{net::TcpStream, time};

/// To connect and to be answered.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A following proxy sends at least an empty line every second.
const SILENCE: Duration = Duration::from_secs(10);

/// The longest record that is taken: 1,000 candidates are about 500 KiB.
const MAX_LINE: usize = 4 << 20;

/// Why nothing (more) is printed.
#[derive(Debug, thiserror::Error)]
pub enum DecisionsError {
    /// The address is none.
    #[error(
        "`{0}` is no address of an admin server; write http://HOST:PORT, as the proxy prints it when it starts"
    )]
    Address(String),
    /// It cannot be asked.
    #[error("{address}: {source}")]
    Ask {
        /// Whom.
        address: String,
        /// Why not.
        #[source]
        source: tower_ttft::Error,
    },
    /// It refuses.
    #[error("{address} answers {status}: {text}")]
    Refused {
        /// Who.
        address: String,
        /// The status.
        status: http::StatusCode,
        /// What it says.
        text: String,
    },
    /// Its answer ended.
    #[error("the proxy at {0} has gone")]
    Gone(String),
    /// Nothing can be printed.
    #[error("cannot print: {0}")]
    Print(#[from] std::io::Error),
}

/// Prints decisions until the proxy goes, or all at once with `--no-follow`.
///
/// # Errors
/// If the proxy cannot be asked, refuses or goes.
pub async fn run(args: &DecisionsArgs, out: &mut impl Write) -> Result<(), DecisionsError> {
    let address =
        address(&args.admin).ok_or_else(|| DecisionsError::Address(args.admin.clone()))?;
    let mut path = format!(
        "/decisions?n={}&follow={}",
        args.n,
        u8::from(!args.no_follow)
    );
    if let Some(model) = &args.model {
        let _ = write!(path, "&model={}", escape(model));
    }
    let ask = |source: tower_ttft::Error| DecisionsError::Ask {
        address: address.clone(),
        source,
    };
    let answer = time::timeout(TIMEOUT, get(&address, &path))
        .await
        .map_err(|_| ask("no answer in time".into()))?
        .map_err(ask)?;
    let (parts, mut body) = answer.into_parts();
    if parts.status != http::StatusCode::OK {
        let text = body
            .collect()
            .await
            .map(|b| b.to_bytes())
            .unwrap_or_default();
        return Err(DecisionsError::Refused {
            address,
            status: parts.status,
            text: String::from_utf8_lossy(&text).trim().to_owned(),
        });
    }
    if args.no_follow {
        let body = body.collect().await.map_err(ask)?.to_bytes();
        let records: Vec<Value> = serde_json::from_slice(&body).map_err(|e| ask(e.into()))?;
        for record in &records {
            // A record that has its outcome is both lines.
            if !record["outcome"].is_null() && !args.json {
                let mut decision = record.clone();
                decision["outcome"] = Value::Null;
                print(&decision, false, out)?;
            }
            print(record, args.json, out)?;
        }
        return Ok(());
    }
    let mut pending = Vec::new();
    loop {
        let frame = match time::timeout(SILENCE, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            _ => return Err(DecisionsError::Gone(address)),
        };
        let Ok(data) = frame.into_data() else {
            continue;
        };
        pending.extend_from_slice(&data);
        while let Some(end) = pending.iter().position(|b| *b == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            if let Ok(record) = serde_json::from_slice(&line) {
                print(&record, args.json, out)?;
            }
        }
        if pending.len() > MAX_LINE {
            return Err(ask("a record without an end".into()));
        }
    }
}

fn print(record: &Value, json: bool, out: &mut impl Write) -> Result<(), DecisionsError> {
    if json {
        writeln!(out, "{record}")?;
    } else if let Some(line) = line(record) {
        writeln!(out, "{line}")?;
    }
    Ok(out.flush()?)
}

async fn get(
    address: &str,
    path: &str,
) -> Result<http::Response<BoxBody<Bytes, tower_ttft::Error>>, tower_ttft::Error> {
    let stream = TcpStream::connect(address).await?;
    let (mut send, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // Ends with the answer, or with us.
    tokio::spawn(connection);
    let request = Request::get(path)
        .header(header::HOST, address)
        .body(Empty::<Bytes>::new())?;
    let response = send.send_request(request).await?;
    Ok(response.map(|b| b.map_err(Into::into).boxed()))
}

/// `host:port` of a URL.
fn address(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    let authority = uri.authority()?;
    let plain = matches!(uri.scheme_str(), None | Some("http"));
    (plain && authority.port_u16().is_some() && !authority.as_str().contains('@'))
        .then(|| authority.to_string())
}

fn escape(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, b| {
        if b.is_ascii_alphanumeric() || b"-_.~".contains(&b) {
            out.push(char::from(b));
        } else {
            let _ = write!(out, "%{b:02X}");
        }
        out
    })
}

/// A record as one line for people: the decision, or what came of it.
pub(crate) fn line(record: &Value) -> Option<String> {
    if let Some(missed) = record.get("missed") {
        return Some(format!(
            "({missed} records were too fast for this terminal)"
        ));
    }
    let decision = record.get("decision")?;
    let unix = decision["unix"].as_f64()?;
    let id = decision["requestId"].as_str().unwrap_or("-");
    let tokens = decision["tokens"].as_u64()?;
    let candidates = decision["candidates"].as_array()?;
    let chosen = decision["chosen"].as_u64()? as usize;
    let mut out = String::new();
    match &record["outcome"] {
        Value::Null => {
            let model = decision["model"].as_str().unwrap_or("-");
            let rung = decision["rung"].as_str().unwrap_or("-");
            let _ = write!(
                out,
                "{}  {id}  {model}  {tokens} tokens  {rung}",
                clock(unix)
            );
            for (i, c) in candidates.iter().enumerate() {
                let cached = c["cached"].as_u64().unwrap_or(0);
                let _ = write!(
                    out,
                    "  {}{} {cached} cached + {} new {}{}",
                    if i == chosen { "[" } else { "" },
                    c["endpoint"].as_str().unwrap_or("-"),
                    tokens.saturating_sub(cached),
                    ms(&c["ttft"]),
                    if i == chosen { "]" } else { "" },
                );
            }
        }
        outcome => {
            let c = candidates.get(chosen)?;
            let end = outcome["end"].as_str().unwrap_or("-");
            let at = unix + outcome["duration"].as_f64().unwrap_or(0.0);
            let _ = write!(
                out,
                "{}  {id}    -> {} {end}",
                clock(at),
                c["endpoint"].as_str().unwrap_or("-")
            );
            if !outcome["ttft"].is_null() {
                let _ = write!(
                    out,
                    "  first token {} (predicted {})",
                    ms(&outcome["ttft"]),
                    ms(&c["ttft"])
                );
            }
            if let Some(cached) = outcome["cached_tokens"].as_u64() {
                let _ = write!(out, "  cached {cached} (believed {})", c["cached"]);
            }
            if let Some(n) = outcome["completion_tokens"].as_u64() {
                let _ = write!(out, "  {n} tokens out");
            }
        }
    }
    Some(out)
}

fn ms(seconds: &Value) -> String {
    match seconds.as_f64() {
        Some(s) => format!("{:.0} ms", s * 1000.0),
        None => "-".to_owned(),
    }
}

/// The time of day in UTC.
fn clock(unix: f64) -> String {
    let millis = (unix.max(0.0) * 1000.0) as u64;
    let (s, ms) = (millis / 1000, millis % 1000);
    format!(
        "{:02}:{:02}:{:02}.{ms:03}",
        s / 3600 % 24,
        s / 60 % 60,
        s % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn decision() -> Value {
        json!({
            "id": 1, "requestId": "r1", "model": "tiny", "unix": 86_399.5, "rung": "exact", "tokens": 1234, "chosen": 0,
            "candidates": [
                {"endpoint": "a:1", "cached": 1024, "ttft": 0.045},
                {"endpoint": "b:1", "cached": 0, "ttft": 0.2304},
            ],
        })
    }

    #[test]
    fn a_line_for_the_decision_and_one_for_the_outcome() {
        assert_eq!(
            line(&json!({"decision": decision(), "outcome": null})).unwrap(),
            "23:59:59.500  r1  tiny  1234 tokens  exact  [a:1 1024 cached + 210 new 45 ms]  b:1 0 cached + 1234 new 230 ms"
        );
        let outcome = json!({"ttft": 0.048, "duration": 1.25, "prompt_tokens": 1234, "cached_tokens": 1024, "completion_tokens": 56, "end": "complete"});
        assert_eq!(
            line(&json!({"decision": decision(), "outcome": outcome})).unwrap(),
            "00:00:00.750  r1    -> a:1 complete  first token 48 ms (predicted 45 ms)  cached 1024 (believed 1024)  56 tokens out"
        );
        assert!(line(&json!({"missed": 3})).unwrap().contains('3'));
        assert_eq!(line(&json!({})), None);
    }

    #[test]
    fn addresses() {
        for (url, expected) in [
            ("http://127.0.0.1:4191", Some("127.0.0.1:4191")),
            ("127.0.0.1:4191", Some("127.0.0.1:4191")),
            ("http://[::1]:1/", Some("[::1]:1")),
            ("https://a:1", None),
            ("http://a", None),
            ("http://u:p@a:1", None),
            ("", None),
        ] {
            assert_eq!(address(url).as_deref(), expected, "{url}");
        }
        assert_eq!(escape("org/a b"), "org%2Fa%20b");
    }
}
