//! What is shown: three pods behind the gateway, three of the same kind behind random choice, all on loopback.

use super::{DemoError, board::Arm, service::Service, tokenizer, words::MODEL};
use forebay_proxy::{
    app::{App, AppParams, LoadTokenizer, StartError},
    config::{Config, EndpointConfig, Limits, ModelConfig, PolicyConfig},
    server::OpenFiles,
    telemetry::{log::LogHandle, panics::Panics},
};
use forebay_sim::{
    PodSpec,
    server::{Publisher, Server, ServerParams, Sources, open},
};
use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    net::TcpListener,
    runtime::{Builder, Handle},
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_ttft::{
    pool::{DecisionRecord, Pool},
    prompt::LocalModel,
    vllm::Source,
};

/// Pods of each arm, as in the published run.
const PODS: u64 = 3;
/// Their kind.
pub(super) const KIND: &str = "l40s";
/// Generated tokens per event of a stream after the first, so that hundreds of streams cost little.
const TOKENS_PER_EVENT: u32 = 16;
/// Tokens of an answer where a request does not say.
const DEFAULT_OUTPUT: u32 = 64;
/// How long the gateway may take to find its pods.
const READY: Duration = Duration::from_secs(20);
/// How long open requests may go on at the end.
const DRAIN: Duration = Duration::from_secs(1);

/// Parameters of a [`Stage`].
pub(super) struct StageParams {
    /// How many times faster than the real ones the pods are.
    pub(super) speed: f64,
    /// Of all random choices.
    pub(super) seed: u64,
    /// The gateway's port; 0: a free one.
    pub(super) port: u16,
    /// Changes what is logged.
    pub(super) log: LogHandle,
}

/// Everything that serves. It ends when this is dropped.
pub(super) struct Stage {
    app: App,
    service: Service,
    /// The gateway's pods, in order.
    pods: Vec<SocketAddr>,
    _serving: JoinSet<()>,
}

// === impl Stage ===

impl Stage {
    /// Starts everything and waits until the gateway knows its pods.
    pub(super) async fn start(params: StageParams) -> Result<Self, DemoError> {
        let StageParams {
            speed,
            seed,
            port,
            log,
        } = params;
        let pods = tokenizer::load(seed)?;
        let gateway = tokenizer::load(seed)?;
        let mut serving = JoinSet::new();
        let mut start = async |first: u64| {
            let mut addresses = Vec::new();
            for n in first..first + PODS {
                addresses.push(pod(&mut serving, pods.clone(), speed, seed ^ n).await?);
            }
            Ok::<_, DemoError>(addresses)
        };
        let (ours, theirs) = (start(0).await?, start(PODS).await?);
        let service = Service::start(theirs, seed)
            .await
            .map_err(DemoError::Listen)?;
        let loader: LoadTokenizer = Arc::new(move |_: &ModelConfig| Ok(gateway.clone()));
        let app = App::start(AppParams {
            config: config(port, &ours, seed),
            file: None,
            loader,
            admin_runtime: admin_runtime().map_err(DemoError::Threads)?,
            log,
            panics: Panics::default(),
            files: OpenFiles::raise(),
            seed,
        });
        let app = app.await.map_err(|error| match error {
            StartError::Bind(source) if port != 0 => DemoError::Port { port, source },
            error => DemoError::Gateway(error),
        })?;
        let stage = Self {
            app,
            service,
            pods: ours,
            _serving: serving,
        };
        let ready = async {
            while stage.ready() < PODS as usize {
                sleep(Duration::from_millis(10)).await;
            }
        };
        match timeout(READY, ready).await {
            Ok(()) => Ok(stage),
            Err(_) => Err(DemoError::NotReady),
        }
    }

    /// Where an arm's clients connect to.
    pub(super) fn address(&self, arm: Arm) -> SocketAddr {
        match arm {
            Arm::Forebay => self.app.listen(),
            Arm::Service => self.service.address(),
        }
    }

    /// The admin server of the gateway.
    pub(super) fn admin(&self) -> SocketAddr {
        self.app.admin()
    }

    /// The gateway's last decisions.
    pub(super) fn decisions(&self) -> Vec<DecisionRecord> {
        let pool = self.pool();
        pool.map_or_else(Vec::new, |pool| pool.decisions().last(usize::MAX))
    }

    /// The number of a pod of the gateway, from 1.
    pub(super) fn pod(&self, address: &str) -> Option<usize> {
        let at = self.pods.iter().position(|p| p.to_string() == address)?;
        Some(at + 1)
    }

    /// Stops in order.
    pub(super) async fn stop(mut self) -> Result<(), DemoError> {
        self.app.stop();
        let stopped = timeout(2 * DRAIN, self.app.stopped()).await;
        match stopped {
            Ok(Err(died)) => Err(DemoError::Gateway(died.into())),
            // Late or in time: everything ends with us.
            _ => Ok(()),
        }
    }

    fn pool(&self) -> Option<Pool> {
        self.app.directory().pool(MODEL)
    }

    /// Pods that take requests, of which the gateway knows what they hold.
    fn ready(&self) -> usize {
        let endpoints = self.app.directory().endpoints();
        let all = endpoints.iter().flat_map(|e| &e.members);
        all.filter(|m| m.ready && m.events_live).count()
    }
}

/// A pod that serves on a port of its own; its address.
async fn pod(
    serving: &mut JoinSet<()>,
    tokenizer: Arc<dyn LocalModel>,
    speed: f64,
    seed: u64,
) -> Result<SocketAddr, DemoError> {
    let host = Ipv4Addr::LOCALHOST;
    let publisher = Publisher::new("kv-events");
    let sockets = open(&publisher, &host.to_string())
        .await
        .map_err(DemoError::Listen)?;
    let listener = TcpListener::bind((host, 0))
        .await
        .map_err(DemoError::Listen)?;
    let address = listener.local_addr().map_err(DemoError::Listen)?;
    let spec = Arc::new(PodSpec::kind(KIND)?);
    let server = Server::new(ServerParams {
        seed,
        scale: speed,
        tokens_per_event: TOKENS_PER_EVENT,
        default_output: DEFAULT_OUTPUT,
        render: true,
        events: Some(Box::new(publisher)),
        sources: Some(Sources {
            live: format!("tcp://{}", sockets.live),
            replay: Some(format!("tcp://{}", sockets.replay)),
            topic: "kv-events".to_owned(),
        }),
        ..ServerParams::new(spec, MODEL, tokenizer, epoch())
    });
    serving.spawn(async move {
        // A listener of ours fails only when files run out; the requests that then fail are counted.
        let _ = server.listen(listener).await;
    });
    Ok(address)
}

fn epoch() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs_f64()
}

/// The gateway's configuration: all defaults, but for where things are.
fn config(port: u16, pods: &[SocketAddr], seed: u64) -> Config {
    let model: Arc<str> = MODEL.into();
    let endpoint = |address: &SocketAddr| EndpointConfig {
        address: address.to_string().into(),
        model: Some(model.clone()),
        kv_events: Source::Auto,
        replay: Source::Auto,
        gpu: Some(KIND.into()),
    };
    Config {
        listen: (Ipv4Addr::LOCALHOST, port).into(),
        admin: (Ipv4Addr::LOCALHOST, 0).into(),
        admin_open: false,
        models: vec![ModelConfig {
            name: model.clone(),
            aliases: Vec::new(),
            // The loader knows where it is.
            tokenizer: Some(PathBuf::new()),
            chat_template: None,
            chat_template_kwargs: serde_json::Map::new(),
            exclude_tools_when_tool_choice_none: false,
        }],
        endpoints: pods.iter().map(endpoint).collect(),
        policy: PolicyConfig::default(),
        limits: Limits {
            drain: DRAIN,
            ..Limits::default()
        },
        seed: Some(seed),
    }
}

/// A thread of its own for the gateway's side work, as the proxy has it. It lives as long as the process.
fn admin_runtime() -> io::Result<Handle> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    thread::Builder::new()
        .name("admin".to_owned())
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(handle)
}
