//! Child processes that never outlive us: each leads its own group, which is killed on drop and, should we be killed
//! ourselves, by the kernel.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::{
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};
use tokio::{
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

/// A child and its process group.
pub struct Process {
    child: Child,
    group: Pid,
    log: PathBuf,
}

/// What to start.
pub struct Spec {
    command: Command,
    log: PathBuf,
}

// === impl Spec ===

impl Spec {
    /// `program`, whose standard error (and output, unless piped) goes to the file `log`.
    pub fn new(program: impl AsRef<OsStr>, log: impl Into<PathBuf>) -> Self {
        // setpriv replaces itself with the program, which keeps the process id.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .stdin(Stdio::null());
        Self {
            command,
            log: log.into(),
        }
    }

    /// One more argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// More arguments.
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.command.args(args);
        self
    }

    /// Environment variables beside the inherited ones.
    pub fn envs<'a>(mut self, envs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        self.command.envs(envs);
        self
    }

    /// Starts it.
    pub fn spawn(self) -> Result<Process> {
        Ok(self.start(false)?.0)
    }

    /// Starts it with pipes to its standard input and output.
    pub fn spawn_piped(self) -> Result<(Process, ChildStdin, ChildStdout)> {
        match self.start(true)? {
            (process, Some((stdin, stdout))) => Ok((process, stdin, stdout)),
            _ => bail!("no pipes"),
        }
    }

    fn start(mut self, piped: bool) -> Result<(Process, Option<(ChildStdin, ChildStdout)>)> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        if piped {
            self.command.stdin(Stdio::piped()).stdout(Stdio::piped());
        } else {
            self.command.stdout(log.try_clone()?);
        }
        let mut child = self
            .command
            .stderr(log)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("setpriv (package util-linux)")?;
        let group = child
            .id()
            .and_then(|id| Pid::from_raw(id as i32))
            .context("the child has no process id")?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        Ok((
            Process {
                child,
                group,
                log: self.log,
            },
            pipes,
        ))
    }
}

// === impl Process ===

impl Process {
    /// The id of the process and of its group.
    pub fn pid(&self) -> Pid {
        self.group
    }

    /// Where its output goes.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Sends a signal to the process alone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(self.group, signal)?)
    }

    /// Sends a signal to the whole group.
    pub fn signal_group(&self, signal: Signal) -> Result<()> {
        Ok(kill_process_group(self.group, signal)?)
    }

    /// Kills the group and waits until the leader is gone.
    pub async fn kill(&mut self) -> Result<()> {
        let _ = kill_process_group(self.group, Signal::KILL);
        self.wait(Duration::from_secs(10)).await?;
        Ok(())
    }

    /// Waits for the process to exit.
    pub async fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        Ok(timeout(limit, self.child.wait())
            .await
            .context("it does not exit")??)
    }

    /// Whether it has exited.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// The last lines of its log.
    pub fn tail(&self, lines: usize) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let all: Vec<_> = text.lines().collect();
        all.get(all.len().saturating_sub(lines)..)
            .unwrap_or_default()
            .join("\n")
    }

    /// CPU time that the processes of its group have used, those that have ended and been waited for included.
    pub fn cpu(&self) -> Duration {
        // Clock ticks of /proc/PID/stat are 1/100 s on every Linux that this runs on.
        let ticks: u64 = group_members(self.group)
            .into_iter()
            .filter_map(stat_fields)
            .map(|stat| {
                stat.get(11..15)
                    .map_or(0, |f| f.iter().filter_map(|v| v.parse::<u64>().ok()).sum())
            })
            .sum();
        Duration::from_millis(ticks * 10)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A leader that was waited for may have given its id to someone else; its group has not while members live.
        if self.exited().is_none() || !group_members(self.group).is_empty() {
            let _ = kill_process_group(self.group, Signal::KILL);
        }
    }
}

/// The processes of a group.
pub fn group_members(group: Pid) -> Vec<Pid> {
    let wanted = group.as_raw_nonzero().to_string();
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok().and_then(Pid::from_raw))
        .filter(|pid| stat_fields(*pid).and_then(|f| f.get(2).cloned()) == Some(wanted.clone()))
        .collect()
}

/// The fields of `/proc/PID/stat` behind the command: state, parent, group…
fn stat_fields(pid: Pid) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    Some(rest.split_whitespace().map(str::to_owned).collect())
}

/// The title of a process: what `ps` shows.
pub fn title(pid: Pid) -> String {
    let raw = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    String::from_utf8_lossy(&raw).replace('\0', " ")
}
