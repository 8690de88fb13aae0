//! Less CPU for a group of processes: a cgroup's quota where one can be made, else stopping and continuing it in turn.

use crate::process::group_members;
use anyhow::{Result, ensure};
use rustix::process::{Pid, Signal, kill_process_group};
use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::{task::AbortHandle, time::sleep};

/// Short, so that even a request of some 20 ms feels it: within a long one such a request runs at full speed.
const PERIOD: Duration = Duration::from_millis(20);
const SLICE: Duration = Duration::from_millis(20);

/// Holds a process group to a share of one CPU until it is dropped.
pub struct Throttle {
    group: Pid,
    kind: Kind,
}

enum Kind {
    Cgroup { dir: PathBuf, parent: PathBuf },
    Signals(AbortHandle),
}

// === impl Throttle ===

impl Throttle {
    /// Gives `group` the CPU time of `cpus` CPUs (0.5: half of one). Children that it starts later are in it too, unless
    /// signals have to do the work; then it is a duty cycle: `cpus` of the wall time, however many threads run.
    pub fn new(group: Pid, cpus: f64) -> Result<Self> {
        ensure!(
            cpus > 0.0 && cpus.is_finite(),
            "a share of CPU is over 0, not {cpus}"
        );
        let kind = match cgroup(group, cpus) {
            Some(kind) => kind,
            None => Kind::Signals(tokio::spawn(duty(group, cpus.min(1.0))).abort_handle()),
        };
        Ok(Self { group, kind })
    }

    /// How it is done, for reports.
    pub fn how(&self) -> &'static str {
        match self.kind {
            Kind::Cgroup { .. } => "cgroup quota",
            Kind::Signals(_) => "SIGSTOP and SIGCONT in turn",
        }
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        match &self.kind {
            Kind::Cgroup { dir, parent } => {
                for pid in group_members(self.group) {
                    let _ = enter(parent, pid);
                }
                let _ = fs::remove_dir(dir);
            }
            Kind::Signals(task) => {
                task.abort();
                let _ = kill_process_group(self.group, Signal::CONT);
            }
        }
    }
}

/// A new cgroup below the hierarchy's root, version 1 or 2; none where we may not.
fn cgroup(group: Pid, cpus: f64) -> Option<Kind> {
    let period = PERIOD.as_micros();
    let quota = (cpus * period as f64) as u64;
    let name = format!("forebay-{}", group.as_raw_nonzero());
    let first = [
        ("cpu.cfs_period_us", period.to_string()),
        ("cpu.cfs_quota_us", quota.to_string()),
    ];
    let second = [("cpu.max", format!("{quota} {period}"))];
    let mounts = [
        ("/sys/fs/cgroup/cpu", &first[..]),
        ("/sys/fs/cgroup", &second[..]),
    ];
    for (parent, values) in mounts {
        let parent = PathBuf::from(parent);
        let dir = parent.join(&name);
        if !parent.join("cgroup.procs").exists() || fs::create_dir(&dir).is_err() {
            continue;
        }
        let set = values.iter().all(|(file, value)| {
            dir.join(file).exists() && fs::write(dir.join(file), value).is_ok()
        }) && group_members(group)
            .into_iter()
            .all(|pid| enter(&dir, pid).is_ok());
        if set {
            return Some(Kind::Cgroup { dir, parent });
        }
        for pid in group_members(group) {
            let _ = enter(&parent, pid);
        }
        let _ = fs::remove_dir(&dir);
    }
    None
}

fn enter(dir: &Path, pid: Pid) -> std::io::Result<()> {
    fs::write(dir.join("cgroup.procs"), pid.as_raw_nonzero().to_string())
}

async fn duty(group: Pid, share: f64) {
    loop {
        // It ends with its Throttle, or when nobody is left to be stopped.
        if kill_process_group(group, Signal::STOP).is_err() {
            return;
        }
        sleep(SLICE.mul_f64(1.0 - share)).await;
        if kill_process_group(group, Signal::CONT).is_err() {
            return;
        }
        sleep(SLICE.mul_f64(share)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Spec;
    use tokio::time::Instant;

    #[tokio::test]
    async fn a_busy_process_gets_its_share_and_no_more() {
        let log = std::env::temp_dir().join(format!("forebay-throttle-{}", std::process::id()));
        let process = Spec::new("sh", &log)
            .args(["-c", "while :; do :; done"])
            .spawn()
            .expect("spawn");
        let _throttle = Throttle::new(process.pid(), 0.25).expect("throttle");
        sleep(Duration::from_millis(100)).await;
        let (cpu, start) = (process.cpu(), Instant::now());
        sleep(Duration::from_secs(2)).await;
        let wall = Instant::now().saturating_duration_since(start);
        let share = (process.cpu() - cpu).as_secs_f64() / wall.as_secs_f64();
        let _ = fs::remove_file(&log);
        // A busy machine may give less; the bound from below only shows that it runs at all.
        assert!((0.02..0.4).contains(&share), "{share}");
    }
}
