//! Reads what routing needs out of vLLM's `/metrics`.
//!
//! The text format is Prometheus' (<https://prometheus.io/docs/instrumenting/exposition_formats/>); vLLM sends some
//! 50 to 80 KB of it, of which a dozen series matter. So lines are looked at one by one, names that nobody asked for are
//! passed over without parsing the rest, and whatever cannot be read is as good as absent. Every engine of a
//! data-parallel server has series of its own, labelled `engine`; those are summed unless one rank is asked for.

use crate::load::LoadReport;
use std::collections::BTreeSet;
use tokio::time::Instant;

/// What one scrape said.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Scrape {
    series: Vec<Series>,
    /// `process_start_time_seconds`, as written: it names the process. Servers with several API processes have none.
    pub(crate) process_start: Option<String>,
}

/// One sample that matters.
#[derive(Clone, Debug, PartialEq)]
struct Series {
    what: What,
    /// The label `engine`, where it is a number.
    engine: Option<u32>,
    value: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Running,
    Waiting,
    KvUsage,
    LocalCompute,
    PrefillSeconds,
    PrefillCount,
    Preemptions,
    PrefixQueries,
    PrefixHits,
    Awake,
    BlockSize,
    Blocks,
}

/// Cache sizes of one engine (`vllm:cache_config_info`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheConfig {
    /// Tokens in a block.
    pub(crate) block_size: Option<u32>,
    /// Blocks in all.
    pub(crate) blocks: Option<u64>,
}

/// More samples than this are no engine's; the rest is left out.
const MAX_SERIES: usize = 4096;

// === impl Scrape ===

impl Scrape {
    /// Reads a scrape. `None` if no line of it is one of vLLM's: then it says nothing, which is not the same as an idle engine.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let mut scrape = Self::default();
        for line in text.split(|b| *b == b'\n') {
            if scrape.series.len() >= MAX_SERIES {
                break;
            }
            if let Ok(line) = std::str::from_utf8(line) {
                scrape.line(line.trim());
            }
        }
        let load = |s: &Series| matches!(s.what, What::Running | What::Waiting);
        scrape.series.iter().any(load).then_some(scrape)
    }

    fn line(&mut self, line: &str) -> Option<()> {
        // Comments (`# HELP`) have no name of interest.
        let end = line.find(['{', ' ', '\t'])?;
        let (name, rest) = line.split_at(end);
        if name == "process_start_time_seconds" {
            let value = rest.split_whitespace().next()?;
            value.parse::<f64>().ok().filter(|v| v.is_finite())?;
            self.process_start = Some(value.to_owned());
            return Some(());
        }
        let name = name.strip_prefix("vllm:")?;
        let what = match name {
            "num_requests_running" => What::Running,
            "num_requests_waiting" => What::Waiting,
            "kv_cache_usage_perc" => What::KvUsage,
            "prompt_tokens_by_source_total" => What::LocalCompute,
            "request_prefill_time_seconds_sum" => What::PrefillSeconds,
            "request_prefill_time_seconds_count" => What::PrefillCount,
            "num_preemptions_total" => What::Preemptions,
            "prefix_cache_queries_total" => What::PrefixQueries,
            "prefix_cache_hits_total" => What::PrefixHits,
            "engine_sleep_state" => What::Awake,
            "cache_config_info" => What::BlockSize,
            _ => return None,
        };
        let mut labels = Labels::new(rest);
        let (mut engine, mut source, mut sleep) = (None, None, None);
        let (mut block_size, mut blocks) = (None, None);
        for (key, value) in labels.by_ref() {
            match key {
                "engine" => engine = value.parse().ok(),
                "source" => source = Some(value),
                "sleep_state" => sleep = Some(value),
                "block_size" => block_size = value.parse::<u32>().ok().filter(|n| *n > 0),
                "num_gpu_blocks" => blocks = value.parse::<u64>().ok().filter(|n| *n > 0),
                _ => {}
            }
        }
        let value = labels
            .rest()?
            .split_whitespace()
            .next()?
            .parse::<f64>()
            .ok()?;
        if !value.is_finite() {
            return None;
        }
        match what {
            What::LocalCompute if source != Some("local_compute") => return None,
            What::Awake if sleep != Some("awake") => return None,
            What::BlockSize => {
                // Infos carry their values in labels.
                self.push(What::BlockSize, engine, block_size.map(f64::from));
                self.push(What::Blocks, engine, blocks.map(|n| n as f64));
            }
            what => self.push(what, engine, Some(value)),
        }
        Some(())
    }

    fn push(&mut self, what: What, engine: Option<u32>, value: Option<f64>) {
        if let Some(value) = value {
            self.series.push(Series {
                what,
                engine,
                value,
            });
        }
    }

    /// The ranks that have series of their own, in order.
    pub(crate) fn ranks(&self) -> Vec<u32> {
        let ranks: BTreeSet<u32> = self.series.iter().filter_map(|s| s.engine).collect();
        ranks.into_iter().collect()
    }

    /// The load of one rank, or of all together.
    pub(crate) fn report(&self, rank: Option<u32>, at: Instant) -> LoadReport {
        let count = |what| self.sum(what, rank).map_or(0, |n| n.max(0.0) as u64);
        let prefill = self
            .sum(What::PrefillSeconds, rank)
            .zip(self.sum(What::PrefillCount, rank));
        LoadReport {
            at,
            running: u32::try_from(count(What::Running)).unwrap_or(u32::MAX),
            waiting: u32::try_from(count(What::Waiting)).unwrap_or(u32::MAX),
            kv_usage: self
                .mean(What::KvUsage, rank)
                .unwrap_or(0.0)
                .clamp(0.0, 1.0),
            prefilled_tokens: self
                .sum(What::LocalCompute, rank)
                .map(|n| n.max(0.0) as u64),
            prefill_seconds: prefill.map(|(seconds, n)| (seconds.max(0.0), n.max(0.0) as u64)),
            preemptions: count(What::Preemptions),
        }
    }

    /// The cache of one rank; of several, blocks add up.
    pub(crate) fn cache(&self, rank: Option<u32>) -> CacheConfig {
        CacheConfig {
            block_size: self.of(What::BlockSize, rank).next().map(|n| n as u32),
            blocks: self.sum(What::Blocks, rank).map(|n| n as u64),
        }
    }

    /// Tokens looked up in the prefix cache and found there, by all ranks, since the engine started.
    pub(crate) fn prefix_cache(&self) -> Option<(u64, u64)> {
        let queries = self.sum(What::PrefixQueries, None)?;
        let hits = self.sum(What::PrefixHits, None)?;
        Some((queries.max(0.0) as u64, hits.max(0.0) as u64))
    }

    /// Whether the engine sleeps (`/sleep`), which no request survives.
    pub(crate) fn asleep(&self, rank: Option<u32>) -> bool {
        self.of(What::Awake, rank).any(|awake| awake == 0.0)
    }

    fn of(&self, what: What, rank: Option<u32>) -> impl Iterator<Item = f64> {
        self.series
            .iter()
            .filter(move |s| s.what == what && rank.is_none_or(|rank| s.engine == Some(rank)))
            .map(|s| s.value)
    }

    fn sum(&self, what: What, rank: Option<u32>) -> Option<f64> {
        self.of(what, rank)
            .fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
    }

    fn mean(&self, what: What, rank: Option<u32>) -> Option<f64> {
        let sum = self.sum(what, rank)?;
        Some(sum / self.of(what, rank).count().max(1) as f64)
    }
}

/// The labels of a sample: `{a="x",b="y"} value`. Values are given as written, escapes and all.
struct Labels<'a> {
    rest: &'a str,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Inside,
    Done,
    Broken,
}

// === impl Labels ===

impl<'a> Labels<'a> {
    fn new(text: &'a str) -> Self {
        match text.strip_prefix('{') {
            Some(rest) => Self {
                rest,
                state: State::Inside,
            },
            None => Self {
                rest: text,
                state: State::Done,
            },
        }
    }

    /// What follows the labels, if they could be read.
    fn rest(&self) -> Option<&'a str> {
        (self.state == State::Done).then_some(self.rest)
    }

    fn label(&mut self) -> Option<(&'a str, &'a str)> {
        let (key, after) = self.rest.split_once('=')?;
        let quoted = after.trim_start().strip_prefix('"')?;
        let mut escaped = false;
        let end = quoted.bytes().position(|b| {
            let end = b == b'"' && !escaped;
            escaped = b == b'\\' && !escaped;
            end
        })?;
        let (value, after) = quoted.split_at_checked(end)?;
        self.rest = after.get(1..)?.trim_start();
        self.rest = self
            .rest
            .strip_prefix(',')
            .unwrap_or(self.rest)
            .trim_start();
        Some((key.trim(), value))
    }
}

impl<'a> Iterator for Labels<'a> {
    type Item = (&'a str, &'a str);

    fn next(&mut self) -> Option<Self::Item> {
        if self.state != State::Inside {
            return None;
        }
        if let Some(rest) = self.rest.strip_prefix('}') {
            self.rest = rest;
            self.state = State::Done;
            return None;
        }
        let label = self.label();
        if label.is_none() {
            self.state = State::Broken;
        }
        label
    }
}

#[cfg(test)]
mod tests;
