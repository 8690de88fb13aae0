//! `pool.yaml`: what a stand-alone proxy serves, from where, and how.
//!
//! The file is YAML (JSON is YAML too). Every mistake in it is reported, with its path, its line and a remedy: a key
//! that is silently ignored is worse than one that is refused. Relative paths are relative to the file.

mod decode;
mod node;
mod read;
mod show;
mod units;

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tower_ttft::{policy::PolicySpec, vllm::Source};

/// The exit code for a configuration or a command line that cannot be used: `EX_USAGE` of sysexits(3), as Linkerd's
/// proxy has it.
pub const EXIT_USAGE: u8 = 64;

/// Where clients come in. Loopback: nothing is exposed that the file does not expose.
pub const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);

/// Where operators come in: loopback, on the port that Linkerd's proxy has for it.
pub const DEFAULT_ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4191);

/// How long a connection to an engine may take. Engines are near; a host that drops SYN must not hold a request longer.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long after an engine's `200` a stream without an event is committed all the same, so that load balancers in
/// front, which cut silent connections after a minute, see bytes.
pub const DEFAULT_HEAD_AFTER: Duration = Duration::from_secs(30);

/// Bodies up to this are read before a choice is made. A 1M-token chat is about 4 MiB; images inline are larger.
pub const DEFAULT_PEEK_CAP: u64 = 16 << 20;

/// Bodies over this are refused.
pub const DEFAULT_HARD_CAP: u64 = 256 << 20;

/// Bytes that all requests here may hold together before their answers are committed.
pub const DEFAULT_MEMORY_BUDGET: u64 = 256 << 20;

/// Bytes of each model's prefix index. About 5 million blocks.
pub const DEFAULT_INDEX_MEMORY: u64 = 256 << 20;

/// How long a connection may take from its start, or from the end of its last answer, to the end of the next request's
/// head; so also how long it may be idle. Longer than clients keep idle connections, so that it is they who close them.
pub const DEFAULT_HEADER_TIMEOUT: Duration = Duration::from_secs(75);

/// The largest head of a request: four times what common servers take, for long cookies and tokens.
pub const DEFAULT_HEADER_BYTES: u64 = 64 << 10;

/// How long open requests may go on after a signal to stop. As long as the first token may take: no answer that an
/// engine would still give is thrown away here; whoever wants it shorter sends a second signal.
pub const DEFAULT_DRAIN: Duration = Duration::from_secs(600);

/// How long connections are still accepted after a signal to stop. None: without a load balancer that has to notice
/// first there is nobody to wait for. In Kubernetes a few seconds are right.
pub const DEFAULT_LAME_DUCK: Duration = Duration::ZERO;

/// All that a pool file says, with defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Where clients come in.
    pub listen: SocketAddr,
    /// Where operators come in.
    pub admin: SocketAddr,
    /// Whether `/config`, `/endpoints`, `/decisions` and the log level are for everyone who reaches the admin port,
    /// not only for loopback.
    pub admin_open: bool,
    /// Declared models.
    pub models: Vec<ModelConfig>,
    /// Endpoints, those of models included.
    pub endpoints: Vec<EndpointConfig>,
    /// How requests are routed and how long things may take.
    pub policy: PolicyConfig,
    /// Bounds.
    pub limits: Limits,
    /// The seed of the key space and of random choices; drawn at the start if missing.
    pub seed: Option<u64>,
}

/// A declared model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The name that clients use and engines serve.
    pub name: Arc<str>,
    /// Other names that clients may use. Requests are rewritten to `name`.
    pub aliases: Vec<Arc<str>>,
    /// A directory with `tokenizer.json` and `tokenizer_config.json`; without it the engines are asked.
    pub tokenizer: Option<PathBuf>,
    /// The chat template, if it is not the tokenizer's usual one: vLLM's `--chat-template`.
    pub chat_template: Option<ChatTemplateConfig>,
    /// Values for the template that requests do not set themselves: vLLM's `--default-chat-template-kwargs`.
    pub chat_template_kwargs: serde_json::Map<String, serde_json::Value>,
    /// vLLM's `--exclude-tools-when-tool-choice-none`.
    pub exclude_tools_when_tool_choice_none: bool,
}

/// A chat template that a model's engines were started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatTemplateConfig {
    /// A file that holds its source.
    File(PathBuf),
    /// The name of one of the tokenizer's.
    Named(Arc<str>),
}

/// An endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointConfig {
    /// `host:port` of its HTTP API.
    pub address: Arc<str>,
    /// The declared model that it serves; missing: whatever it says that it serves.
    pub model: Option<Arc<str>>,
    /// Where it publishes KV events.
    pub kv_events: Source,
    /// Where it replays them.
    pub replay: Source,
    /// Its hardware; endpoints with the same label lend each other what was learned.
    pub gpu: Option<Arc<str>>,
}

/// How requests are routed and how long things may take.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyConfig {
    /// The part that the pools act on.
    pub spec: PolicySpec,
    /// To connect to an engine.
    pub connect_timeout: Duration,
    /// From an engine's `200` to the commitment of a silent stream.
    pub head_after: Duration,
    /// Whether answers name their endpoint in `x-forebay-endpoint`.
    pub expose_endpoint: bool,
}

/// Bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bodies up to this are read before a choice is made, bytes.
    pub peek_cap: u64,
    /// Bodies over this are refused, bytes.
    pub hard_cap: u64,
    /// Bytes that requests may hold together.
    pub memory_budget: u64,
    /// Bytes of each model's prefix index.
    pub index_memory: u64,
    /// Client connections; missing: from the limit of open files.
    pub max_connections: Option<u64>,
    /// From a connection's start, or the end of its last answer, to the end of the next request's head.
    pub header_timeout: Duration,
    /// The largest head of a request, bytes.
    pub header_bytes: u64,
    /// How long open requests may go on after a signal to stop.
    pub drain: Duration,
    /// How long connections are still accepted after a signal to stop.
    pub lame_duck: Duration,
}

/// One thing that is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The path of the key, such as `endpoints[1].url`; empty for the document.
    pub path: String,
    /// The line, from 1, where known.
    pub line: Option<u64>,
    /// What is wrong and what to do about it.
    pub message: String,
}

/// A file that cannot be used, and all that is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigError {
    /// The file.
    pub file: PathBuf,
    /// At least one.
    pub problems: Vec<Problem>,
}

// === impl Config ===

impl Config {
    /// Reads a pool file.
    ///
    /// # Errors
    /// Everything that is wrong with it, at once.
    pub fn load(file: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(file).map_err(|error| ConfigError {
            file: file.to_owned(),
            problems: vec![Problem {
                path: String::new(),
                line: None,
                message: format!("cannot be read: {error}"),
            }],
        })?;
        Self::parse(&text, file)
    }

    /// Reads the text of a pool file. `file` is for messages and for relative paths.
    ///
    /// # Errors
    /// Everything that is wrong with it, at once.
    pub fn parse(text: &str, file: &Path) -> Result<Self, ConfigError> {
        read::config(text, file.parent().unwrap_or(Path::new(""))).map_err(|problems| ConfigError {
            file: file.to_owned(),
            problems,
        })
    }

    /// The effective configuration, in the shape of the file.
    pub fn to_json(&self) -> serde_json::Value {
        show::config(self)
    }
}

// === impl ModelConfig ===

impl ModelConfig {
    /// A model of which nothing but its name is said.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self {
            name: name.into(),
            aliases: Vec::new(),
            tokenizer: None,
            chat_template: None,
            chat_template_kwargs: serde_json::Map::new(),
            exclude_tools_when_tool_choice_none: false,
        }
    }

    /// Whether both make the same tokens of the same requests: all is equal but what clients call the model.
    pub fn same_tokens(&self, other: &Self) -> bool {
        let plain = |m: &Self| Self {
            aliases: Vec::new(),
            ..m.clone()
        };
        plain(self) == plain(other)
    }
}

// === impl PolicyConfig ===

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            spec: PolicySpec::default(),
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
            head_after: DEFAULT_HEAD_AFTER,
            expose_endpoint: false,
        }
    }
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            peek_cap: DEFAULT_PEEK_CAP,
            hard_cap: DEFAULT_HARD_CAP,
            memory_budget: DEFAULT_MEMORY_BUDGET,
            index_memory: DEFAULT_INDEX_MEMORY,
            max_connections: None,
            header_timeout: DEFAULT_HEADER_TIMEOUT,
            header_bytes: DEFAULT_HEADER_BYTES,
            drain: DEFAULT_DRAIN,
            lame_duck: DEFAULT_LAME_DUCK,
        }
    }
}

// === impl ConfigError ===

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{}", self.file.display())?;
            if let Some(line) = problem.line {
                write!(f, ":{line}")?;
            }
            f.write_str(": ")?;
            if !problem.path.is_empty() {
                write!(f, "{}: ", problem.path)?;
            }
            f.write_str(&problem.message)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
