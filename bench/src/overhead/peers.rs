//! The processes under test, and their ends.

use super::cpu;
use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};
use tokio::{net::TcpStream, time::Instant};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// How long a process may take until it serves.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Engines that answer at once, each a process of its own.
#[derive(Debug)]
pub(super) struct Engines {
    processes: Vec<Process>,
}

/// One way to reach the engines.
#[derive(Debug)]
pub(super) struct Arm {
    name: &'static str,
    addr: SocketAddr,
    process: Option<Process>,
    _files: Option<TempDir>,
}

/// A child process, ended with its handle.
#[derive(Debug)]
struct Process {
    child: Child,
    addr: SocketAddr,
}

#[derive(Debug)]
struct TempDir(PathBuf);

// === impl Engines ===

impl Engines {
    pub(super) async fn start(n: usize) -> Result<Self, Error> {
        let exe = std::env::current_exe()?;
        let mut processes = Vec::new();
        for _ in 0..n {
            let addr = free_addr()?;
            let mut command = Command::new(&exe);
            command.arg("fake-engine").arg(addr.to_string());
            processes.push(Process::start(command, addr).await?);
        }
        Ok(Self { processes })
    }

    fn addrs(&self) -> impl Iterator<Item = SocketAddr> {
        self.processes.iter().map(|p| p.addr)
    }
}

// === impl Arm ===

impl Arm {
    pub(super) fn direct(engines: &Engines) -> Self {
        Self {
            name: "direct",
            addr: engines.processes[0].addr,
            process: None,
            _files: None,
        }
    }

    /// haproxy with one thread, least connections and reused connections to the engines.
    pub(super) async fn haproxy(engines: &Engines) -> Result<Self, Error> {
        let addr = free_addr()?;
        let mut config = format!(
            "global\n  nbthread 1\n  maxconn 2000\n\
             defaults\n  mode http\n  timeout connect 2s\n  timeout client 600s\n  timeout server 600s\n  \
             timeout http-keep-alive 60s\n  option http-keep-alive\n  http-reuse always\n\
             frontend in\n  bind {addr}\n  default_backend engines\n\
             backend engines\n  balance leastconn\n  option httpchk GET /health\n"
        );
        for (i, engine) in engines.addrs().enumerate() {
            config += &format!("  server e{i} {engine} check inter 2s\n");
        }
        let files = TempDir::new("haproxy")?;
        let path = files.0.join("haproxy.cfg");
        std::fs::write(&path, config)?;
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-f").arg(&path);
        let process = Process::start(command, addr).await?;
        Ok(Self {
            name: "haproxy",
            addr,
            process: Some(process),
            _files: Some(files),
        })
    }

    /// The gateway that ships, with or without a local tokenizer.
    pub(super) async fn forebay(
        engines: &Engines,
        tokenizer: Option<&Path>,
    ) -> Result<Self, Error> {
        let exe = std::env::current_exe()?.with_file_name("forebay-proxy");
        if !exe.exists() {
            return Err(format!(
                "{} is missing: cargo build --release -p forebay-proxy",
                exe.display()
            )
            .into());
        }
        let addr = free_addr()?;
        let endpoints: Vec<_> = engines
            .addrs()
            .map(|a| serde_json::json!({"url": format!("http://{a}")}))
            .collect();
        let mut model = serde_json::json!({"name": "tiny"});
        if let Some(dir) = tokenizer {
            model["tokenizer"] = dir.canonicalize()?.display().to_string().into();
        }
        let config = serde_json::json!({
            "listen": addr.to_string(),
            "admin": "127.0.0.1:0",
            "models": [model],
            "endpoints": endpoints,
        });
        let files = TempDir::new("forebay")?;
        let path = files.0.join("pool.yaml");
        std::fs::write(&path, config.to_string())?;
        let mut command = Command::new(exe);
        command
            .arg("--pool")
            .arg(&path)
            .arg("--log-level")
            .arg("warn");
        let process = Process::start(command, addr).await?;
        // Bound is not yet ready: the engines must have joined.
        tokio::time::sleep(Duration::from_secs(3)).await;
        Ok(Self {
            name: if tokenizer.is_some() {
                "forebay, tokenizing"
            } else {
                "forebay, approximate"
            },
            addr,
            process: Some(process),
            _files: Some(files),
        })
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(|p| p.child.id())
    }

    pub(super) fn rss_mib(&self) -> Option<f64> {
        cpu::rss_mib(self.pid()?)
    }
}

// === impl Process ===

impl Process {
    async fn start(mut command: Command, addr: SocketAddr) -> Result<Self, Error> {
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|e| format!("{program}: {e}"))?;
        let mut process = Self { child, addr };
        let limit = Instant::now() + START_LIMIT;
        while TcpStream::connect(addr).await.is_err() {
            if let Some(status) = process.child.try_wait()? {
                return Err(format!("{program} ended with {status}").into());
            }
            if Instant::now() > limit {
                return Err(format!("{program} does not listen on {addr}").into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(process)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// === impl TempDir ===

impl TempDir {
    fn new(name: &str) -> io::Result<Self> {
        let dir = std::env::temp_dir().join(format!(
            "forebay-bench-{}-{name}-{:p}",
            std::process::id(),
            &name
        ));
        std::fs::create_dir_all(&dir)?;
        Ok(Self(dir))
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A port that the kernel says is free; it is bound again at once by the process it is for.
fn free_addr() -> io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}
