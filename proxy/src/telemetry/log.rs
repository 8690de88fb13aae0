//! Logs, with a level that can be changed while the process runs.
//!
//! Whatever the filter says, the HTTP libraries never log above `debug`: their traces hold header values and frames,
//! and so prompts and keys.

use std::{io::IsTerminal, sync::Arc};
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::{
    EnvFilter, Layer,
    filter::filter_fn,
    layer::SubscriberExt,
    registry::LookupSpan,
    reload,
    util::{SubscriberInitExt, TryInitError},
};

/// What is logged unless somebody says otherwise.
pub const DEFAULT_FILTER: &str = "warn,forebay_proxy=info,tower_ttft=info";

/// Libraries whose traces hold what is in requests.
const TALKATIVE: &[&str] = &["h2", "hyper", "hyper_util"];

/// The longest filter that is taken from outside, bytes.
const MAX_FILTER: usize = 4096;

/// How lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Plain,
    /// One JSON object a line.
    Json,
}

/// Changes what is logged.
#[derive(Clone)]
pub struct LogHandle {
    reload: Arc<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>,
    now: Arc<parking_lot::Mutex<String>>,
}

/// A filter that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{filter}` is no log filter: {why}; write a level (error, warn, info, debug, trace) or `target=level` pairs with commas between them"
)]
pub struct FilterError {
    filter: String,
    why: String,
}

/// Starts logging to standard error. Standard output is for what scripts read.
///
/// # Errors
/// If the filter cannot be used, or logs go somewhere already.
pub fn init(filter: &str, format: Format) -> Result<LogHandle, tower_ttft::Error> {
    let (layer, handle) = with_reload(parse(filter)?);
    let output = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let output = match format {
        Format::Plain => output.with_ansi(std::io::stderr().is_terminal()).boxed(),
        Format::Json => output.json().with_current_span(false).boxed(),
    };
    let started: Result<(), TryInitError> = tracing_subscriber::registry()
        .with(output.with_filter(layer))
        .try_init();
    started?;
    handle.remember(filter);
    Ok(handle)
}

fn with_reload<S>(
    filter: EnvFilter,
) -> (
    impl tracing_subscriber::layer::Filter<S> + 'static,
    LogHandle,
)
where
    S: Subscriber + for<'a> LookupSpan<'a> + 'static,
{
    use tracing_subscriber::filter::FilterExt;
    let (filter, handle) = reload::Layer::<EnvFilter, S>::new(filter);
    let log = LogHandle {
        reload: Arc::new(move |filter| handle.reload(filter).map_err(|e| e.to_string())),
        now: Arc::default(),
    };
    (FilterExt::<S>::and(filter, filter_fn(is_discreet)), log)
}

/// Whether something may be logged at all.
fn is_discreet(metadata: &Metadata<'_>) -> bool {
    let of = metadata.target().split("::").next().unwrap_or_default();
    *metadata.level() <= Level::DEBUG || !TALKATIVE.contains(&of)
}

fn parse(filter: &str) -> Result<EnvFilter, FilterError> {
    let error = |why: String| FilterError {
        filter: filter.chars().take(100).collect(),
        why,
    };
    if filter.len() > MAX_FILTER {
        return Err(error(format!("longer than {MAX_FILTER} bytes")));
    }
    if filter.trim().is_empty() {
        return Err(error("it is empty".into()));
    }
    EnvFilter::builder()
        .with_regex(false)
        .parse(filter)
        .map_err(|e| error(e.to_string()))
}

// === impl LogHandle ===

impl LogHandle {
    /// A handle that changes nothing but says what it was told: for tests and for embedding.
    pub fn detached() -> Self {
        let handle = Self {
            reload: Arc::new(|_| Ok(())),
            now: Arc::default(),
        };
        handle.remember(DEFAULT_FILTER);
        handle
    }

    /// What is logged now.
    pub fn filter(&self) -> String {
        self.now.lock().clone()
    }

    /// Changes what is logged.
    ///
    /// # Errors
    /// If the filter cannot be used: then nothing changes.
    pub fn set(&self, filter: &str) -> Result<(), FilterError> {
        let filter = filter.trim();
        let parsed = parse(filter)?;
        (self.reload)(parsed).map_err(|why| FilterError {
            filter: filter.to_owned(),
            why,
        })?;
        self.remember(filter);
        Ok(())
    }

    fn remember(&self, filter: &str) {
        *self.now.lock() = filter.to_owned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Clone, Default)]
    struct Lines(Arc<parking_lot::Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(buf);
            Ok(buf.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Lines {
        fn take(&self) -> String {
            String::from_utf8(std::mem::take(&mut *self.0.lock())).unwrap()
        }
    }

    #[test]
    fn levels_change_and_traces_of_requests_stay_out() {
        let lines = Lines::default();
        let writer = lines.clone();
        let (filter, handle) = with_reload(parse(DEFAULT_FILTER).unwrap());
        let subscriber = tracing_subscriber::registry().with(
            tracing_subscriber::fmt::layer()
                .with_writer(move || writer.clone())
                .with_filter(filter),
        );
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(target: "forebay_proxy::app", "seen");
            tracing::info!(target: "other", "unseen");
            let out = lines.take();
            assert!(out.contains("seen") && !out.contains("unseen"), "{out}");

            handle.set("trace").unwrap();
            assert_eq!(handle.filter(), "trace");
            tracing::trace!(target: "other", "seen");
            tracing::debug!(target: "h2::codec", "frame");
            tracing::trace!(target: "h2::codec", "secret");
            tracing::trace!(target: "hyper::proto", "secret");
            let out = lines.take();
            assert!(out.contains("seen") && out.contains("frame"), "{out}");
            assert!(!out.contains("secret"), "{out}");

            assert!(handle.set("forebay=loud").is_err());
            assert!(handle.set(" ").is_err());
            assert!(handle.set(&"x".repeat(10_000)).is_err());
            assert_eq!(handle.filter(), "trace");
        });
    }
}
