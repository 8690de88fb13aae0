//! What an engine says of itself when asked: version, models, event sources.

use super::source::TcpAddress;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, sync::Arc};

/// A served name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// The name that requests use.
    pub id: Arc<str>,
    /// Where the engine loaded it from: a directory or an `org/name`.
    pub root: Option<Arc<str>>,
    /// The base model's name if this is a LoRA adapter.
    pub parent: Option<Arc<str>>,
    /// Context length in tokens; vLLM gives none for adapters.
    pub max_model_len: Option<u32>,
}

/// The event sockets of one data-parallel rank, as the engine has bound them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventSource {
    pub(crate) rank: u32,
    pub(crate) live: TcpAddress,
    pub(crate) replay: Option<TcpAddress>,
}

/// Why an answer cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiscoverError {
    #[error("{path}: {source}")]
    Json {
        path: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error("/kv_event_sources: rank {rank}: `{endpoint}` is not of the form tcp://host:port")]
    Address { rank: u32, endpoint: String },
}

/// More names than this are left out.
const MAX_MODELS: usize = 1000;
/// More data-parallel ranks than this are left out.
const MAX_RANKS: usize = 256;

#[derive(Deserialize)]
struct Version {
    version: Arc<str>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Announced {
    #[serde(default)]
    enable_kv_cache_events: Option<bool>,
    #[serde(default)]
    publisher: Option<String>,
    #[serde(default)]
    endpoint: Option<String>,
    #[serde(default)]
    replay_endpoint: Option<String>,
}

/// Reads `/version`.
pub(crate) fn version(body: &[u8]) -> Result<Arc<str>, DiscoverError> {
    let Version { version } = json("/version", body)?;
    Ok(version.chars().take(100).collect::<String>().into())
}

/// Reads `/v1/models`.
pub(crate) fn models(body: &[u8]) -> Result<Vec<Model>, DiscoverError> {
    let Models { mut data } = json("/v1/models", body)?;
    data.truncate(MAX_MODELS);
    Ok(data)
}

/// Reads `/kv_event_sources`: one entry per rank, in order; none if the engine publishes nothing over ZMQ.
pub(crate) fn event_sources(body: &[u8]) -> Result<Vec<EventSource>, DiscoverError> {
    let announced: BTreeMap<u32, Announced> = json("/kv_event_sources", body)?;
    let mut sources = Vec::new();
    for (rank, announced) in announced.into_iter().take(MAX_RANKS) {
        if announced.enable_kv_cache_events == Some(false)
            || announced
                .publisher
                .is_some_and(|publisher| publisher != "zmq")
        {
            continue;
        }
        let Some(endpoint) = announced.endpoint else {
            continue;
        };
        let parse = |endpoint: &str| {
            TcpAddress::parse(endpoint).ok_or_else(|| DiscoverError::Address {
                rank,
                endpoint: endpoint.chars().take(200).collect(),
            })
        };
        sources.push(EventSource {
            rank,
            live: parse(&endpoint)?,
            replay: announced
                .replay_endpoint
                .as_deref()
                .map(parse)
                .transpose()?,
        });
    }
    Ok(sources)
}

fn json<'a, T: Deserialize<'a>>(path: &'static str, body: &'a [u8]) -> Result<T, DiscoverError> {
    serde_json::from_slice(body).map_err(|source| DiscoverError::Json { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_vllm_answers() {
        assert_eq!(&*version(br#"{"version":"0.32.0"}"#).unwrap(), "0.32.0");

        let plain = models(include_bytes!("../../testdata/vllm/models.json")).unwrap();
        let base = Model {
            id: "tiny".into(),
            root: Some("tiny-qwen3".into()),
            parent: None,
            max_model_len: Some(32_768),
        };
        assert_eq!(plain, [base]);

        let lora = models(include_bytes!("../../testdata/vllm/models-lora.json")).unwrap();
        let [base, adapter] = &lora[..] else {
            panic!("{lora:?}");
        };
        assert_eq!(
            (base.parent.as_deref(), base.max_model_len),
            (None, Some(4096))
        );
        assert_eq!(
            (
                &*adapter.id,
                adapter.parent.as_deref(),
                adapter.max_model_len
            ),
            ("ad1", Some("tiny"), None)
        );

        let sources =
            event_sources(include_bytes!("../../testdata/vllm/kv_event_sources.json")).unwrap();
        let source = EventSource {
            rank: 0,
            live: TcpAddress::parse("tcp://*:23421").unwrap(),
            replay: TcpAddress::parse("tcp://*:23431"),
        };
        assert_eq!(sources, [source]);
    }

    #[test]
    fn ranks_come_in_numerical_order() {
        let body = br#"{"10":{"endpoint":"tcp://*:11"},"2":{"endpoint":"tcp://*:3","replay_endpoint":null}}"#;
        let ranks: Vec<_> = event_sources(body)
            .unwrap()
            .iter()
            .map(|s| s.rank)
            .collect();
        assert_eq!(ranks, [2, 10]);
    }

    #[test]
    fn an_engine_without_events_has_no_sources() {
        for body in [
            &b"{}"[..],
            br#"{"0":{"enable_kv_cache_events":false,"endpoint":"tcp://*:1"}}"#,
            br#"{"0":{"publisher":"null","endpoint":"tcp://*:1"}}"#,
            br#"{"0":{}}"#,
        ] {
            assert_eq!(event_sources(body).unwrap(), []);
        }
    }

    #[test]
    fn says_what_is_wrong() {
        for (error, says) in [
            (event_sources(b"[]").unwrap_err(), "/kv_event_sources"),
            (
                event_sources(br#"{"0":{"endpoint":"ipc:///x"}}"#).unwrap_err(),
                "`ipc:///x` is not of the form",
            ),
            (
                models(br#"{"data":[{}]}"#).unwrap_err(),
                "missing field `id`",
            ),
            (version(b"<html>").unwrap_err(), "/version"),
        ] {
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
