//! Metrics of the process, from `/proc` at each scrape. Names are those that Prometheus' own clients use.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};
use std::{
    fmt, fs,
    time::{SystemTime, UNIX_EPOCH},
};

/// Clock ticks per second in `/proc/self/stat`: fixed by Linux' interface to user space (`USER_HZ`).
const TICKS: f64 = 100.0;

/// The process.
#[derive(Debug)]
pub struct Process {
    started: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Numbers {
    cpu_seconds: Option<f64>,
    resident: Option<u64>,
    virtual_memory: Option<u64>,
    threads: Option<u64>,
    open_files: Option<u64>,
    max_files: Option<u64>,
}

// === impl Process ===

impl Process {
    /// This process, started now.
    pub fn new() -> Self {
        let started = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0.0, |d| d.as_secs_f64());
        Self { started }
    }

    /// When it was started, seconds since the epoch.
    pub fn started(&self) -> f64 {
        self.started
    }
}

impl Default for Process {
    fn default() -> Self {
        Self::new()
    }
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let n = Numbers::read();
        // The encoder adds `_total` to counters itself.
        counter(
            &mut encoder,
            "process_cpu_seconds",
            "CPU time of all threads, user and system, seconds",
            n.cpu_seconds,
        )?;
        gauge(
            &mut encoder,
            "process_resident_memory_bytes",
            "Memory in RAM, bytes",
            n.resident,
        )?;
        gauge(
            &mut encoder,
            "process_virtual_memory_bytes",
            "Address space, bytes",
            n.virtual_memory,
        )?;
        gauge(&mut encoder, "process_threads", "Threads", n.threads)?;
        gauge(
            &mut encoder,
            "process_open_fds",
            "Open files and sockets",
            n.open_files,
        )?;
        gauge(
            &mut encoder,
            "process_max_fds",
            "Files and sockets that may be open",
            n.max_files,
        )?;
        let started = ConstGauge::new(self.started);
        let metric = encoder.encode_descriptor(
            "process_start_time_seconds",
            "When the process started, seconds since the epoch",
            None,
            MetricType::Gauge,
        )?;
        started.encode(metric)
    }
}

fn counter(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: Option<f64>,
) -> fmt::Result {
    let Some(value) = value else { return Ok(()) };
    ConstCounter::new(value).encode(encoder.encode_descriptor(
        name,
        help,
        None,
        MetricType::Counter,
    )?)
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: Option<u64>,
) -> fmt::Result {
    let Some(value) = value.and_then(|v| i64::try_from(v).ok()) else {
        return Ok(());
    };
    ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
}

// === impl Numbers ===

impl Numbers {
    fn read() -> Self {
        let text =
            |file: &str| fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
        let mut numbers = Self::parse(&text("stat"), &text("status"), &text("limits"));
        numbers.open_files = fs::read_dir("/proc/self/fd")
            .ok()
            // The directory that is being read is one of them.
            .map(|entries| (entries.count() as u64).saturating_sub(1));
        numbers
    }

    fn parse(stat: &str, status: &str, limits: &str) -> Self {
        // proc_pid_stat(5): the command may hold anything; fields after its closing parenthesis count from 3.
        let stat = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let mut fields = stat.split_ascii_whitespace().skip(14 - 3);
        let mut ticks = || fields.next()?.parse::<f64>().ok();
        let cpu_seconds = ticks()
            .zip(ticks())
            .map(|(user, system)| (user + system) / TICKS);
        let field = |name: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(name))?;
            line.strip_prefix(':')?
                .split_ascii_whitespace()
                .next()?
                .parse::<u64>()
                .ok()
        };
        let max_files = limits
            .lines()
            .find_map(|l| l.strip_prefix("Max open files"))
            .and_then(|l| l.split_ascii_whitespace().next()?.parse().ok());
        Self {
            cpu_seconds,
            resident: field("VmRSS").map(|kib| kib.saturating_mul(1024)),
            virtual_memory: field("VmSize").map(|kib| kib.saturating_mul(1024)),
            threads: field("Threads"),
            open_files: None,
            max_files,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::{encoding::text, registry::Registry};

    #[test]
    fn reads_proc() {
        let n = Numbers::parse(
            "42 (a ) b) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 7 0",
            "Name:\tx\nVmSize:\t  2048 kB\nVmRSS:\t  1024 kB\nThreads:\t7\n",
            "Limit  Soft  Hard Units\nMax open files            1024                 524288               files\n",
        );
        assert_eq!(
            n,
            Numbers {
                cpu_seconds: Some(2.0),
                resident: Some(1 << 20),
                virtual_memory: Some(2 << 20),
                threads: Some(7),
                open_files: None,
                max_files: Some(1024),
            }
        );
        assert_eq!(Numbers::parse("", "", ""), Numbers::default());
    }

    #[test]
    fn is_exported_by_its_usual_names() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Process::new()));
        let mut out = String::new();
        text::encode(&mut out, &registry).unwrap();
        for name in [
            "process_cpu_seconds_total ",
            "process_resident_memory_bytes ",
            "process_threads ",
            "process_open_fds ",
            "process_max_fds ",
            "process_start_time_seconds ",
        ] {
            assert!(out.lines().any(|l| l.starts_with(name)), "{name}: {out}");
        }
    }
}
