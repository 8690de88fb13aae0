//! Real vLLM engines: one process group each, on ports from the kernel, serving the tiny model.

use crate::{
    http::Request,
    paths::Paths,
    process::{Process, Spec, group_members, title},
};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::{net::TcpListener, time::Duration};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout},
};

/// The name under which engines serve the model.
pub const MODEL: &str = "tiny";

/// Tokens in a KV block: the smallest that vLLM's CPU attention takes.
pub const BLOCK: usize = 32;

/// How long a start may take on a busy machine. An idle one of two cores takes about a minute for two engines.
const START_LIMIT: Duration = Duration::from_secs(420);

/// How much KV cache and context an engine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Profile {
    /// 64 MB (8,192 blocks) and 32k tokens of context: conversations stay cached.
    A,
    /// 8 MB (1,024 blocks) and 16k tokens of context: evictions are daily life.
    B,
}

/// What to start.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// Cache and context.
    pub profile: Profile,
    /// Runs EngineCore as a process of its own, as vLLM does by default. It costs a third of a start more.
    pub separate_core: bool,
    /// Announces KV events.
    pub events: bool,
    /// More arguments for `vllm serve`.
    pub args: Vec<String>,
}

/// The ports of an engine. It keeps them when it restarts.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    /// OpenAI API.
    pub http: u16,
    /// KV events (PUB).
    pub events: u16,
    /// Replay of KV events (ROUTER).
    pub replay: u16,
}

/// A running engine. Dropping it kills its process group.
pub struct Engine {
    name: String,
    spec: EngineSpec,
    paths: Paths,
    ports: Ports,
    authority: String,
    process: Mutex<Process>,
}

// === impl EngineSpec ===

impl EngineSpec {
    /// An engine of a profile, with KV events, all in one process.
    pub fn new(profile: Profile) -> Self {
        Self {
            profile,
            separate_core: false,
            events: true,
            args: Vec::new(),
        }
    }

    /// With EngineCore as a process of its own.
    pub fn separate_core(self) -> Self {
        Self {
            separate_core: true,
            ..self
        }
    }

    /// With one more argument for `vllm serve`.
    pub fn arg(mut self, arg: &str) -> Self {
        self.args.push(arg.into());
        self
    }

    fn spawn(&self, name: &str, ports: Ports, paths: &Paths) -> Result<Process> {
        let (kv_bytes, context) = match self.profile {
            Profile::A => ("64M", "32768"),
            Profile::B => ("8M", "16384"),
        };
        let block = BLOCK.to_string();
        let port = ports.http.to_string();
        // What vLLM finds out about a model class, which takes a process of its own, is kept beside the models.
        let cache = paths.models.join(".vllm").display().to_string();
        let mut spec = Spec::new(&paths.python, paths.run.join(format!("{name}.log")))
            .args(["-m", "vllm.entrypoints.cli.main", "serve"])
            .arg(paths.tiny())
            .args(["--served-model-name", MODEL])
            .args(["--host", "127.0.0.1", "--port", &port])
            .args([
                "--load-format",
                "dummy",
                "--dtype",
                "bfloat16",
                "--enforce-eager",
            ])
            .args([
                "--max-model-len",
                context,
                "--kv-cache-memory-bytes",
                kv_bytes,
            ])
            .args(["--block-size", &block, "--enable-prefix-caching"])
            .args(["--max-num-seqs", "16", "--max-num-batched-tokens", "2048"])
            .args(["--enable-prompt-tokens-details"])
            .args(["--enable-auto-tool-choice", "--tool-call-parser", "hermes"])
            .args(&self.args)
            .envs([
                ("VLLM_CACHE_ROOT", cache.as_str()),
                ("VLLM_SERVER_DEV_MODE", "1"),
                ("HF_HUB_OFFLINE", "1"),
                ("TRANSFORMERS_OFFLINE", "1"),
                ("VLLM_NO_USAGE_STATS", "1"),
                ("DO_NOT_TRACK", "1"),
                ("VLLM_HOST_IP", "127.0.0.1"),
                ("GLOO_SOCKET_IFNAME", "lo"),
                ("CUDA_VISIBLE_DEVICES", ""),
                ("OMP_NUM_THREADS", "1"),
                ("MKL_NUM_THREADS", "1"),
                ("RAYON_NUM_THREADS", "1"),
                ("TOKENIZERS_PARALLELISM", "false"),
                ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
                (
                    "VLLM_ENABLE_V1_MULTIPROCESSING",
                    if self.separate_core { "1" } else { "0" },
                ),
            ]);
        if self.events {
            let config = json!({
                "enable_kv_cache_events": true,
                "publisher": "zmq",
                "endpoint": format!("tcp://*:{}", ports.events),
                "replay_endpoint": format!("tcp://*:{}", ports.replay),
            });
            spec = spec.args(["--kv-events-config", &config.to_string()]);
        }
        spec.spawn().with_context(|| format!("engine {name}"))
    }
}

// === impl Ports ===

impl Ports {
    /// Three ports that are free now.
    pub fn free() -> Result<Self> {
        // Held together, so that they differ.
        let held = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0"));
        let mut ports = [0; 3];
        for (port, listener) in ports.iter_mut().zip(&held) {
            match listener {
                Ok(listener) => *port = listener.local_addr()?.port(),
                Err(error) => bail!("no free port: {error}"),
            }
        }
        let [http, events, replay] = ports;
        Ok(Self {
            http,
            events,
            replay,
        })
    }
}

// === impl Engine ===

impl Engine {
    /// Starts an engine; [`Engine::ready`] waits until it serves.
    pub fn start(paths: &Paths, name: &str, spec: EngineSpec) -> Result<Self> {
        let ports = Ports::free()?;
        Ok(Self {
            name: name.to_owned(),
            process: Mutex::new(spec.spawn(name, ports, paths)?),
            authority: format!("127.0.0.1:{}", ports.http),
            spec,
            paths: paths.clone(),
            ports,
        })
    }

    /// Starts an engine and waits until it serves.
    pub async fn started(paths: &Paths, name: &str, spec: EngineSpec) -> Result<Self> {
        let engine = Self::start(paths, name, spec)?;
        engine.ready().await?;
        Ok(engine)
    }

    /// Its name in logs and reports.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `host:port` of its API.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Its ports.
    pub fn ports(&self) -> Ports {
        self.ports
    }

    /// What was started.
    pub fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    /// Waits until it answers `/version`: vLLM binds its port early but refuses until it can serve.
    pub async fn ready(&self) -> Result<()> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            if let Ok(Ok(version)) = timeout(
                Duration::from_secs(5),
                Request::get(&self.authority, "/version").json(),
            )
            .await
                && version["version"].is_string()
            {
                return Ok(());
            }
            let mut process = self.process.lock().await;
            if let Some(status) = process.exited() {
                bail!(
                    "engine {} exited ({status}):\n{}",
                    self.name,
                    process.tail(25)
                );
            }
            ensure!(
                Instant::now() < deadline,
                "engine {} does not serve after {START_LIMIT:?}:\n{}",
                self.name,
                process.tail(25)
            );
            drop(process);
            sleep(Duration::from_millis(250)).await;
        }
    }

    /// Kills it and starts another one on the same ports; [`Engine::ready`] waits until that serves.
    pub async fn respawn(&self) -> Result<()> {
        let mut process = self.process.lock().await;
        process.kill().await?;
        *process = self.spec.spawn(&self.name, self.ports, &self.paths)?;
        Ok(())
    }

    /// Restarts it in place and waits until it serves again.
    pub async fn restart(&self) -> Result<()> {
        self.respawn().await?;
        self.ready().await
    }

    /// Kills the whole group and waits for its end.
    pub async fn kill(&self) -> Result<()> {
        self.process.lock().await.kill().await
    }

    /// Signals the API server alone.
    pub async fn signal(&self, signal: Signal) -> Result<()> {
        self.process.lock().await.signal(signal)
    }

    /// Signals the whole group.
    pub async fn signal_group(&self, signal: Signal) -> Result<()> {
        self.process.lock().await.signal_group(signal)
    }

    /// Kills EngineCore, which must be a process of its own.
    pub async fn kill_core(&self) -> Result<()> {
        let group = self.pid().await;
        let core = group_members(group)
            .into_iter()
            .find(|pid| title(*pid).contains("EngineCore"))
            .with_context(|| format!("engine {} has no EngineCore process", self.name))?;
        Ok(kill_process(core, Signal::KILL)?)
    }

    /// The API server's process id, which is its group's too.
    pub async fn pid(&self) -> Pid {
        self.process.lock().await.pid()
    }

    /// Whether its API server still runs.
    pub async fn alive(&self) -> bool {
        self.process.lock().await.exited().is_none()
    }

    /// CPU time used by its processes.
    pub async fn cpu(&self) -> Duration {
        self.process.lock().await.cpu()
    }

    /// Empties its prefix cache. vLLM announces this only with its next step.
    pub async fn reset_prefix_cache(&self) -> Result<()> {
        let answer = Request::post(&self.authority, "/reset_prefix_cache", &json!({}))
            .send()
            .await?;
        ensure!(
            answer.status.is_success(),
            "reset_prefix_cache: {}",
            answer.status
        );
        Ok(())
    }

    /// The prompt token ids of a chat or completion request, as this engine sees them.
    pub async fn tokenize(&self, request: &Value) -> Result<Vec<u32>> {
        let answer = Request::post(&self.authority, "/tokenize", request)
            .json()
            .await?;
        serde_json::from_value(answer["tokens"].clone()).context("tokens")
    }

    /// The sum over all series of a metric.
    pub async fn metric(&self, name: &str) -> Result<f64> {
        metric(&self.authority, name, &[]).await
    }
}

/// The sum over the series of a metric whose label text contains all of `labels` (such as `reason="x"`).
pub async fn metric(authority: &str, name: &str, labels: &[&str]) -> Result<f64> {
    let answer = Request::get(authority, "/metrics").send().await?;
    ensure!(answer.status.is_success(), "/metrics: {}", answer.status);
    sum_series(&answer.text(), name, labels).with_context(|| format!("{authority} has no {name}"))
}

/// The sum over the series of a metric on a page, as [`metric`]; none if it has no such series.
pub fn sum_series(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    text.lines()
        .filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let (series, value) = match rest.chars().next()? {
                '{' => rest.rsplit_once('}')?,
                ' ' => ("", rest),
                _ => return None,
            };
            labels
                .iter()
                .all(|l| series.contains(l))
                .then(|| value.split_whitespace().next()?.parse::<f64>().ok())?
        })
        .reduce(|a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_summed_by_name_and_labels() {
        let text =
            "# HELP a x\na{e=\"0\",r=\"x\"} 1\na{e=\"1\",r=\"y\"} 2.5\nab 7\na_total 9\nb 3\n";
        assert_eq!(sum_series(text, "a", &[]), Some(3.5));
        assert_eq!(sum_series(text, "a", &["r=\"y\""]), Some(2.5));
        assert_eq!(sum_series(text, "b", &[]), Some(3.0));
        assert_eq!(sum_series(text, "c", &[]), None);
    }

    #[test]
    fn ports_differ() {
        let p = Ports::free().expect("ports");
        assert!(p.http != p.events && p.events != p.replay && p.http != p.replay);
    }
}
