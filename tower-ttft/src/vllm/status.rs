//! What a watcher knows of its engine, for people.

use super::discover::Model;
use serde::Serialize;
use std::sync::Arc;

/// A snapshot of one engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EngineStatus {
    /// `host:port`.
    pub address: Arc<str>,
    /// What is to be said of it as a whole.
    pub state: EngineState,
    /// Why it is not ready, or what is wrong though it is; one short sentence each.
    pub conditions: Vec<String>,
    /// vLLM's version, if it says one.
    pub version: Option<Arc<str>>,
    /// Which process it is: `process_start_time_seconds`, or what stands for it.
    pub incarnation: Arc<str>,
    /// Served names and adapters.
    pub models: Vec<Model>,
    /// Tokens in a KV block, as `/metrics` says.
    pub block_size: Option<u32>,
    /// Tokens looked up in its prefix cache, and how many were found there, since it started.
    pub prefix_cache: Option<(u64, u64)>,
    /// Seconds since the last good scrape of `/metrics`.
    pub scrape_age: Option<f64>,
    /// Why the last scrape failed, if it did.
    pub scrape_error: Option<String>,
    /// Times it was cut since the watcher began.
    pub cuts: u64,
    /// Its KV events, one entry per data-parallel rank.
    pub events: Vec<EventsStatus>,
}

/// What an engine is doing, seen from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineState {
    /// Not reached yet: engines refuse connections until they are fully started.
    #[default]
    Starting,
    /// It takes requests.
    Ready,
    /// It answers, and says that it cannot.
    Unhealthy,
    /// It sleeps: its weights or its cache are gone.
    Asleep,
    /// It cannot be reached, but nobody has refused either.
    Unreachable,
    /// Its port refuses: the process is gone.
    Down,
}

/// The KV events of one data-parallel rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EventsStatus {
    /// The rank, if the engine has several.
    pub rank: Option<u32>,
    /// The address that is subscribed to.
    pub source: Option<String>,
    /// The address that replays come from.
    pub replay: Option<String>,
    /// Whether they flow.
    pub state: EventsState,
    /// Why they do not, or the last thing that went wrong.
    pub why: Option<String>,
    /// Whether everything that the engine's cache holds is known: the stream was followed from its first batch, or
    /// from a cleared cache, without loss.
    pub complete: bool,
    /// The last batch applied.
    pub last_seq: Option<u64>,
    /// The engine's clock in it, seconds since the epoch.
    pub last_ts: Option<f64>,
    /// The block size that events name, in tokens.
    pub block_size: Option<u32>,
    /// What was counted.
    #[serde(flatten)]
    pub counts: EventCounts,
}

/// Whether KV events flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EventsState {
    /// The engine has none, or they are switched off.
    #[default]
    None,
    /// There is no connection.
    Connecting,
    /// What was missed is being replayed.
    Replaying,
    /// They flow.
    Live,
}

/// Counts since the watcher began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EventCounts {
    /// Connections made.
    pub connects: u64,
    /// Batches applied, replayed ones too.
    pub batches: u64,
    /// Replays asked for.
    pub replays: u64,
    /// Batches applied from replays.
    pub replayed: u64,
    /// Times that batches were missing.
    pub gaps: u64,
    /// Times that a replay did not reach and everything was forgotten.
    pub lost: u64,
    /// New processes met on the stream.
    pub restarts: u64,
    /// Times that the endpoint's holdings were cleared, for any reason.
    pub clears: u64,
    /// Batches that were known already.
    pub duplicates: u64,
    /// Messages of no known shape.
    pub garbage: u64,
    /// Batches that could not be decoded.
    pub malformed: u64,
    /// Events that could not be used.
    pub skipped: u64,
}
