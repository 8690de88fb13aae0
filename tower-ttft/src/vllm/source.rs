//! Where an engine's events and replays are.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, sync::Arc};

/// Where to find a stream: as the engine says, nowhere, or at a given address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Source {
    /// As the engine says (`/kv_event_sources`, vLLM 0.31 and later).
    #[default]
    Auto,
    /// Not used.
    None,
    /// At this address, whatever the engine says. Data-parallel rank r is r ports further, as vLLM does it.
    Tcp(TcpAddress),
}

/// `tcp://host:port`, as ZMQ writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpAddress {
    /// A name or an IP address, without brackets; `*` means every address of the engine's host.
    pub host: Arc<str>,
    /// The port.
    pub port: u16,
}

/// Why a text is no source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no event source; write auto, none or tcp://host:port")]
pub struct ParseSourceError(String);

// === impl Source ===

impl FromStr for Source {
    type Err = ParseSourceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            _ => TcpAddress::parse(text)
                .map(Self::Tcp)
                .ok_or_else(|| ParseSourceError(text.chars().take(200).collect())),
        }
    }
}

impl TryFrom<String> for Source {
    type Error = ParseSourceError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Source> for String {
    fn from(source: Source) -> Self {
        source.to_string()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

// === impl TcpAddress ===

impl TcpAddress {
    /// Reads `tcp://host:port`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
        let host = match host.strip_prefix('[') {
            Some(host) => host.strip_suffix(']')?,
            None if host.contains(':') => return None,
            None => host,
        };
        let port = port.parse().ok().filter(|port| *port != 0)?;
        if host.is_empty() || host.contains(['/', '[', ']', ' ']) {
            return None;
        }
        Some(Self {
            host: host.into(),
            port,
        })
    }

    /// What to dial: an address that is bound everywhere is reached where the engine is.
    pub(crate) fn at(&self, engine_host: &str) -> Self {
        match &*self.host {
            "*" | "0.0.0.0" | "::" => Self {
                host: engine_host.into(),
                port: self.port,
            },
            _ => self.clone(),
        }
    }

    /// The same stream of another data-parallel rank.
    pub(crate) fn of_rank(&self, rank: u32) -> Option<Self> {
        let port = u16::try_from(rank)
            .ok()
            .and_then(|rank| self.port.checked_add(rank))?;
        Some(Self {
            host: self.host.clone(),
            port,
        })
    }
}

impl fmt::Display for TcpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "tcp://[{}]:{}", self.host, self.port),
            false => write!(f, "tcp://{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_every_form() {
        for text in [
            "auto",
            "none",
            "tcp://*:5557",
            "tcp://10.0.0.1:1",
            "tcp://[::1]:65535",
            "tcp://engine-0.ns:80",
        ] {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "Auto",
            "tcp://",
            "tcp://h",
            "tcp://h:0",
            "tcp://h:65536",
            "tcp://::1:5",
            "h:5557",
            "ipc:///x",
            "tcp://a/b:1",
        ] {
            let error = text.parse::<Source>().unwrap_err().to_string();
            assert!(
                error.contains("write auto, none or tcp://host:port"),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn a_wildcard_is_where_the_engine_is() {
        for (text, expected) in [
            ("tcp://*:5557", "tcp://10.1.2.3:5557"),
            ("tcp://0.0.0.0:5557", "tcp://10.1.2.3:5557"),
            ("tcp://[::]:5557", "tcp://10.1.2.3:5557"),
            ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ] {
            assert_eq!(
                TcpAddress::parse(text).unwrap().at("10.1.2.3").to_string(),
                expected
            );
        }
    }

    #[test]
    fn ranks_are_ports_apart() {
        let base = TcpAddress::parse("tcp://h:65534").unwrap();
        assert_eq!(base.of_rank(1).unwrap().port, 65_535);
        assert_eq!(base.of_rank(2), None);
        assert_eq!(base.of_rank(70_000), None);
    }
}
