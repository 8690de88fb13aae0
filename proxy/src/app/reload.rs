//! Follows the pool file. Endpoints, models, aliases, tokenizers, policies and `adminOpen` change in place; the rest
//! needs a restart and says so. A file that cannot be used changes nothing: the last good one stays, and the logs,
//! `/config` and a metric say so.

use super::{
    directory::Directory,
    tokenizers::{self, LoadTokenizer},
};
use crate::config::Config;
use parking_lot::Mutex;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use serde::Serialize;
use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{sync::Notify, time};

/// How often the file is looked at. It is small, and reading it misses no change, however it was written or linked.
const LOOK: Duration = Duration::from_secs(1);

/// What became of the file, for `/config`.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReloadStatus {
    /// The file.
    pub file: Option<PathBuf>,
    /// When the configuration in force was taken, seconds since the epoch.
    pub loaded: u64,
    /// Why the file as it is now is not in force.
    pub error: Option<String>,
    /// Keys that differ from what is in force and need a restart.
    pub needs_restart: Vec<&'static str>,
}

/// Counts reloads.
#[derive(Clone, Debug, Default)]
pub struct ReloadMetrics {
    reloads: Family<ResultLabels, Counter>,
    stale: Gauge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "label values are lower case")]
enum Outcome {
    ok,
    failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    result: Outcome,
}

/// Follows one file.
pub(super) struct Reloader {
    pub(super) file: PathBuf,
    pub(super) directory: Arc<Directory>,
    pub(super) loader: LoadTokenizer,
    pub(super) status: Arc<Mutex<ReloadStatus>>,
    pub(super) metrics: ReloadMetrics,
    /// Look now.
    pub(super) now: Arc<Notify>,
    /// The configuration that listeners and bounds were made from.
    pub(super) started: Arc<Config>,
}

// === impl ReloadMetrics ===

impl ReloadMetrics {
    /// Makes them visible.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "forebay_config_reloads",
            "Times that the pool file changed, by whether it could be used",
            self.reloads.clone(),
        );
        registry.register(
            "forebay_config_stale",
            "1 while the pool file cannot be used or needs a restart",
            self.stale.clone(),
        );
    }

    fn count(&self, result: Outcome) {
        self.reloads.get_or_create(&ResultLabels { result }).inc();
    }
}

// === impl Reloader ===

impl Reloader {
    pub(super) async fn run(self) {
        let mut seen = None;
        loop {
            let text = self.read().await;
            if seen.as_ref() != Some(&text) {
                // It may have changed since it was read for the start.
                if seen.is_some() || !self.is_started(&text) {
                    self.apply(&text).await;
                }
                seen = Some(text);
            }
            tokio::select! {
                () = time::sleep(LOOK) => {}
                () = self.now.notified() => {}
            }
        }
    }

    /// Whether a text says what the process was started with.
    fn is_started(&self, text: &Result<String, String>) -> bool {
        let config = text.as_ref().map(|text| Config::parse(text, &self.file));
        matches!(config, Ok(Ok(config)) if config == *self.started)
    }

    /// The file's text, or why there is none.
    async fn read(&self) -> Result<String, String> {
        let file = self.file.clone();
        let read = tokio::task::spawn_blocking(move || std::fs::read_to_string(file));
        match read.await {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(error)) => Err(format!("{}: cannot be read: {error}", self.file.display())),
            Err(_) => Err(format!("{}: cannot be read", self.file.display())),
        }
    }

    async fn apply(&self, text: &Result<String, String>) {
        let config = match text {
            Ok(text) => Config::parse(text, &self.file).map_err(|e| e.to_string()),
            Err(error) => Err(error.clone()),
        };
        let config = match config {
            Ok(config) => config,
            Err(error) => return self.refuse(error),
        };
        let before = self.directory.config();
        let locals = match tokenizers::load(&self.loader, &config, Some(&before)).await {
            Ok(locals) => locals,
            Err(error) => return self.refuse(error.to_string()),
        };
        let needs_restart = needs_restart(&self.started, &config);
        self.directory.configure(Arc::new(config), locals);
        tracing::info!(file = %self.file.display(), "Pool file reloaded");
        if !needs_restart.is_empty() {
            tracing::warn!(keys = ?needs_restart, "Changed keys that need a restart");
        }
        self.metrics.count(Outcome::ok);
        self.metrics.stale.set(i64::from(!needs_restart.is_empty()));
        let mut status = self.status.lock();
        status.loaded = unix();
        status.error = None;
        status.needs_restart = needs_restart;
    }

    fn refuse(&self, error: String) {
        tracing::error!(error, "Pool file cannot be used; what was in force stays");
        self.metrics.count(Outcome::failed);
        self.metrics.stale.set(1);
        self.status.lock().error = Some(error);
    }
}

/// Keys that are acted on at the start only.
fn needs_restart(started: &Config, now: &Config) -> Vec<&'static str> {
    let mut keys = Vec::new();
    if started.listen != now.listen {
        keys.push("listen");
    }
    if started.admin != now.admin {
        keys.push("admin");
    }
    if started.limits != now.limits {
        keys.push("limits");
    }
    if started.seed != now.seed {
        keys.push("seed");
    }
    keys
}

/// Seconds since the epoch.
pub(super) fn unix() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}
