//! CPU time of another process.

use std::{fs, time::Duration};
use tokio::time::Instant;

/// Measures the CPU time of a process from one moment on.
#[derive(Debug)]
pub(super) struct CpuClock {
    pid: Option<u32>,
    cpu: Duration,
    at: Instant,
}

// === impl CpuClock ===

impl CpuClock {
    pub(super) fn start(pid: Option<u32>) -> Self {
        Self {
            pid,
            cpu: pid.map(cpu_of).unwrap_or_default(),
            at: Instant::now(),
        }
    }

    /// CPU time and wall time since the start.
    pub(super) fn stop(&self) -> (Duration, Duration) {
        let cpu = self
            .pid
            .map(cpu_of)
            .unwrap_or_default()
            .saturating_sub(self.cpu);
        (cpu, Instant::now().saturating_duration_since(self.at))
    }

    /// CPU seconds per second since the start.
    pub(super) fn rate(&self) -> f64 {
        let (cpu, wall) = self.stop();
        cpu.as_secs_f64() / wall.as_secs_f64().max(1e-9)
    }
}

/// Time on a CPU of all live threads of a process. The first field of `schedstat` is in nanoseconds.
fn cpu_of(pid: u32) -> Duration {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return Duration::ZERO;
    };
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("schedstat")).ok())
        .filter_map(|text| text.split_whitespace().next()?.parse().ok())
        .map(Duration::from_nanos)
        .sum()
}

/// Resident memory of a process in MiB.
pub(super) fn rss_mib(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|l| l.starts_with("VmRSS:"))?;
    let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_cpu_grows_with_work() {
        let clock = CpuClock::start(Some(std::process::id()));
        let mut x = 1u64;
        while clock.stop().0 < Duration::from_millis(5) {
            for i in 0..100_000u64 {
                x = std::hint::black_box(x.wrapping_mul(31).wrapping_add(i));
            }
            assert!(
                clock.stop().1 < Duration::from_secs(20),
                "schedstat stands still"
            );
        }
    }
}
