//! The gateway under test: `forebay-proxy --pool FILE` with a generated file.

use crate::{
    engine::{Engine, MODEL, metric},
    http::Request,
    paths::Paths,
    process::{Process, Spec},
    tap::Tap,
};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal};
use serde_json::{Map, Value, json};
use std::{
    fs,
    path::PathBuf,
    sync::atomic::{AtomicU32, AtomicUsize, Ordering},
    time::Duration,
};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout},
};

const START_LIMIT: Duration = Duration::from_secs(30);
const READY_LIMIT: Duration = Duration::from_secs(30);

/// Gateways are numbered, for their files.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// What goes into the pool file.
#[derive(Clone, Debug)]
pub struct GatewaySpec {
    endpoints: Vec<Value>,
    policy: Map<String, Value>,
    limits: Map<String, Value>,
    tokenizer: bool,
    log: String,
}

/// A running gateway. Dropping it kills it.
pub struct Gateway {
    listen: String,
    admin: String,
    endpoints: AtomicUsize,
    paths: Paths,
    pool: PathBuf,
    process: Mutex<Process>,
}

// === impl GatewaySpec ===

impl GatewaySpec {
    /// A gateway in front of engines, with defaults but for the gateway's ports, which come from the kernel.
    pub fn new<'a>(engines: impl IntoIterator<Item = &'a Engine>) -> Self {
        Self {
            endpoints: engines
                .into_iter()
                .map(|e| {
                    json!({"url": format!("http://{}", e.authority()), "kvEvents": "auto", "replay": "auto", "gpu": "cpu"})
                })
                .collect(),
            policy: Map::new(),
            limits: Map::new(),
            tokenizer: true,
            log: "info".into(),
        }
    }

    /// One more endpoint, whatever it is.
    pub fn endpoint(mut self, endpoint: Value) -> Self {
        self.endpoints.push(endpoint);
        self
    }

    /// Listens to the events of endpoint `i` through a relay.
    pub fn through(mut self, i: usize, tap: &Tap) -> Self {
        if let Some(endpoint) = self.endpoints.get_mut(i) {
            endpoint["kvEvents"] = json!(tap.events());
            endpoint["replay"] = json!(tap.replay());
        }
        self
    }

    /// Listens to no events: residency is guessed.
    pub fn without_events(mut self) -> Self {
        for endpoint in &mut self.endpoints {
            endpoint["kvEvents"] = json!("none");
            endpoint["replay"] = json!("none");
        }
        self
    }

    /// Without a local tokenizer: the engines are asked.
    pub fn without_tokenizer(mut self) -> Self {
        self.tokenizer = false;
        self
    }

    /// Sets a key of `policy`.
    pub fn policy(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.policy.insert(key.into(), value.into());
        self
    }

    /// Sets a key of `limits`.
    pub fn limit(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.limits.insert(key.into(), value.into());
        self
    }

    /// The pool file.
    pub fn to_json(&self, paths: &Paths) -> Value {
        let mut model = json!({"name": MODEL});
        if self.tokenizer {
            model["tokenizer"] = json!(paths.tiny());
        }
        let mut pool = json!({
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "models": [model],
            "endpoints": self.endpoints,
        });
        for (key, section) in [("policy", &self.policy), ("limits", &self.limits)] {
            if !section.is_empty() {
                pool[key] = section.clone().into();
            }
        }
        pool
    }
}

// === impl Gateway ===

impl Gateway {
    /// Starts a gateway and waits until it listens and every endpoint in it is ready.
    pub async fn started(paths: &Paths, spec: &GatewaySpec) -> Result<Self> {
        let gateway = Self::listening(paths, spec).await?;
        gateway.ready().await?;
        Ok(gateway)
    }

    /// Starts a gateway and waits until it listens.
    pub async fn listening(paths: &Paths, spec: &GatewaySpec) -> Result<Self> {
        let n = STARTED.fetch_add(1, Ordering::Relaxed);
        let file = |suffix: &str| paths.run.join(format!("gateway-{n}.{suffix}"));
        let (pool, ready): (PathBuf, PathBuf) = (file("yaml"), file("ready"));
        // JSON is YAML.
        fs::write(&pool, serde_json::to_string_pretty(&spec.to_json(paths))?)?;
        let mut process = Spec::new(&paths.proxy, file("log"))
            .arg("--pool")
            .arg(&pool)
            .arg("--ready-file")
            .arg(&ready)
            .envs([("RUST_BACKTRACE", "1"), ("FOREBAY_LOG", spec.log.as_str())])
            .spawn()?;
        let deadline = Instant::now() + START_LIMIT;
        let addresses: Value = loop {
            // It may be read half written.
            if let Some(addresses) = fs::read(&ready)
                .ok()
                .and_then(|text| serde_json::from_slice(&text).ok())
            {
                break addresses;
            }
            if let Some(status) = process.exited() {
                bail!("the gateway exited ({status}):\n{}", process.tail(25));
            }
            ensure!(
                Instant::now() < deadline,
                "the gateway does not start:\n{}",
                process.tail(25)
            );
            sleep(Duration::from_millis(20)).await;
        };
        let address = |key: &str| -> Result<String> {
            let text = addresses[key]
                .as_str()
                .with_context(|| format!("the ready file has no {key}"))?;
            Ok(text.trim_start_matches("http://").to_owned())
        };
        Ok(Self {
            listen: address("listen")?,
            admin: address("admin")?,
            endpoints: spec.endpoints.len().into(),
            paths: paths.clone(),
            pool,
            process: Mutex::new(process),
        })
    }

    /// Writes another pool file and has the gateway read it again.
    pub async fn reconfigure(&self, spec: &GatewaySpec) -> Result<()> {
        let mut pool = spec.to_json(&self.paths);
        // The listeners stay where they are.
        pool["listen"] = json!(self.listen);
        pool["admin"] = json!(self.admin);
        let next = self.pool.with_extension("next");
        fs::write(&next, serde_json::to_string_pretty(&pool)?)?;
        fs::rename(&next, &self.pool)?;
        self.endpoints
            .store(spec.endpoints.len(), Ordering::Relaxed);
        self.signal(Signal::HUP).await
    }

    /// Waits until all endpoints are ready.
    pub async fn ready(&self) -> Result<()> {
        self.until_ready(self.endpoints.load(Ordering::Relaxed))
            .await
    }

    /// Waits until exactly `count` endpoints are ready and their events, where expected, flow.
    pub async fn until_ready(&self, count: usize) -> Result<()> {
        let mut last = Value::Null;
        let wait = async {
            loop {
                if let Ok(endpoints) = self.admin("/endpoints").await {
                    let ready = list(&endpoints).iter().filter(|e| settled(e)).count();
                    last = endpoints;
                    if ready == count {
                        return;
                    }
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        if timeout(READY_LIMIT, wait).await.is_err() {
            bail!("{count} endpoints were to be ready: {last:#}");
        }
        Ok(())
    }

    /// `host:port` for clients.
    pub fn authority(&self) -> &str {
        &self.listen
    }

    /// `host:port` for operators.
    pub fn admin_authority(&self) -> &str {
        &self.admin
    }

    /// What OpenAI clients call `base_url`.
    pub fn base_url(&self) -> String {
        format!("http://{}/v1", self.listen)
    }

    /// A page of the admin server that is JSON.
    pub async fn admin(&self, path: &str) -> Result<Value> {
        Request::get(&self.admin, path).json().await
    }

    /// What it knows of the endpoint at `authority`: its first rank.
    pub async fn endpoint(&self, authority: &str) -> Result<Value> {
        let url = format!("http://{authority}");
        let endpoints = self.admin("/endpoints").await?;
        let one = list(&endpoints)
            .iter()
            .find(|e| e["url"] == url.as_str())
            .with_context(|| format!("no endpoint {url}: {endpoints}"))?;
        Ok(one["ranks"][0].clone())
    }

    /// The last `n` decisions, oldest first.
    pub async fn decisions(&self, n: usize) -> Result<Vec<Decision>> {
        let answer = self.admin(&format!("/decisions?n={n}")).await?;
        Ok(list(&answer).iter().cloned().map(Decision).collect())
    }

    /// The last decision of a request: there are several if it was sent again elsewhere.
    pub async fn decision(&self, request_id: &str) -> Result<Decision> {
        let answer = self
            .admin(&format!("/decisions?request_id={request_id}"))
            .await?;
        list(&answer)
            .last()
            .cloned()
            .map(Decision)
            .with_context(|| format!("no decision for request {request_id}"))
    }

    /// The sum over the series of a metric whose label text contains all of `labels`.
    pub async fn metric(&self, name: &str, labels: &[&str]) -> Result<f64> {
        metric(&self.admin, name, labels).await
    }

    /// Signals it.
    pub async fn signal(&self, signal: Signal) -> Result<()> {
        self.process.lock().await.signal(signal)
    }

    /// Its process id.
    pub async fn pid(&self) -> Pid {
        self.process.lock().await.pid()
    }

    /// CPU time that it has used.
    pub async fn cpu(&self) -> Duration {
        self.process.lock().await.cpu()
    }

    /// Whether it still runs and has not panicked.
    pub async fn check(&self) -> Result<()> {
        let mut process = self.process.lock().await;
        if let Some(status) = process.exited() {
            bail!("the gateway exited ({status}):\n{}", process.tail(25));
        }
        let log = fs::read_to_string(process.log()).unwrap_or_default();
        if let Some(line) = log.lines().find(|l| l.contains("panicked at")) {
            bail!("the gateway panicked: {line}");
        }
        Ok(())
    }
}

/// Whether an endpoint is ready and its events, where expected, flow.
fn settled(endpoint: &Value) -> bool {
    let flow = |rank: &Value| rank["ready"] == true && rank["events"] == rank["eventsLive"];
    endpoint["ready"] == true && list(&endpoint["ranks"]).iter().all(flow)
}

/// A record of `/decisions`: the decision and its outcome.
#[derive(Clone, Debug)]
pub struct Decision(pub Value);

/// One candidate of a decision.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a>(pub &'a Value);

// === impl Decision ===

impl Decision {
    /// Counts up.
    pub fn id(&self) -> u64 {
        self.0["decision"]["id"].as_u64().unwrap_or(0)
    }

    /// Which knowledge it rests on.
    pub fn rung(&self) -> &str {
        self.0["decision"]["rung"].as_str().unwrap_or("")
    }

    /// Prompt tokens.
    pub fn tokens(&self) -> Option<u64> {
        self.0["decision"]["tokens"].as_u64()
    }

    /// All that were scored.
    pub fn candidates(&self) -> Vec<Candidate<'_>> {
        list(&self.0["decision"]["candidates"])
            .iter()
            .map(Candidate)
            .collect()
    }

    /// The one that was chosen.
    pub fn chosen(&self) -> Result<Candidate<'_>> {
        let index = self.0["decision"]["chosen"].as_u64().context("chosen")?;
        self.0["decision"]["candidates"]
            .get(index as usize)
            .map(Candidate)
            .context("the chosen candidate")
    }

    /// The candidate at an address.
    pub fn at(&self, authority: &str) -> Option<Candidate<'_>> {
        self.candidates()
            .into_iter()
            .find(|c| c.authority() == authority)
    }
}

// === impl Candidate ===

impl<'a> Candidate<'a> {
    /// `host:port`.
    pub fn authority(&self) -> &'a str {
        self.0["endpoint"].as_str().unwrap_or("")
    }

    /// Tokens it was thought to have cached.
    pub fn cached(&self) -> Option<u64> {
        self.0["cached"].as_u64()
    }

    /// How many of these KV events had announced; the others rest on own dispatches.
    pub fn announced(&self) -> Option<u64> {
        self.0["announced"].as_u64()
    }

    /// The number of the last batch that had been applied.
    pub fn seq(&self) -> Option<u64> {
        self.0["seq"].as_u64()
    }

    /// Predicted TTFT.
    pub fn ttft(&self) -> Option<Duration> {
        self.0["ttft"].as_f64().map(Duration::from_secs_f64)
    }
}

/// The items of an array; none of anything else.
fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}
