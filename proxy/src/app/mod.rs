//! The proxy put together: listeners, pools, watchers, the admin server, and how all of it stops.
//!
//! The clients' side runs on the caller's runtime. Watching engines, the admin server and the pool file run on another
//! one with a thread of its own, so that neither a scrape nor a flood of KV events can stall a token.

mod catalog;
mod directory;
mod essential;
mod place;
mod pools;
mod reload;
mod supervise;
mod tokenizers;
mod verify;

pub(crate) use self::catalog::decode;
pub use self::{
    catalog::{Answers, Catalog},
    directory::{Directory, EndpointView},
    essential::Died,
    reload::{ReloadMetrics, ReloadStatus},
    tokenizers::{LoadTokenizer, TokenizerError, local_tokenizers},
};

use self::{
    directory::DirectoryParams,
    essential::{Essentials, essentials},
    pools::{Pools, PoolsParams},
    reload::Reloader,
};
use crate::{
    admin::{Admin, AdminParams, Readiness},
    config::Config,
    http::{
        Limits, Stack, StackParams, client::Tcp, retry::BudgetParams, stack::HttpMetricFamilies,
    },
    server::{
        self, Drained, OpenFiles, Server, ServerMetrics, ServerParams,
        drain::{self, Drain, Phase},
    },
    telemetry::{log::LogHandle, panics::Panics, process::Process},
};
use parking_lot::Mutex;
use prometheus_client::{metrics::info::Info, registry::Registry};
use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use tokio::{
    net::TcpListener,
    runtime::Handle,
    sync::{Notify, mpsc},
    task::JoinHandle,
    time,
};
use tower_ttft::{
    pool::PoolMetricFamilies,
    prompt::{BlockingPool, PromptFamilies},
};

/// How often what engines say is acted on.
const REFRESH: Duration = Duration::from_millis(250);

/// Jobs of tokenizing that may wait for a thread. More than that, and the wait is longer than an approximation is worth.
const TOKENIZING_QUEUE: usize = 64;

/// Parameters of an [`App`].
pub struct AppParams {
    /// What the pool file says.
    pub config: Config,
    /// The pool file, to be followed.
    pub file: Option<PathBuf>,
    /// How tokenizers are loaded.
    pub loader: LoadTokenizer,
    /// Where engines are watched and operators are answered.
    pub admin_runtime: Handle,
    /// Changes what is logged.
    pub log: LogHandle,
    /// Counts panics.
    pub panics: Panics,
    /// Open files that this process may have.
    pub files: OpenFiles,
    /// The seed of everything that the configuration gives no seed for.
    pub seed: u64,
}

/// A running proxy.
pub struct App {
    listen: SocketAddr,
    admin: SocketAddr,
    drain: Drain,
    lame_duck: Duration,
    reload: Arc<Notify>,
    directory: Arc<Directory>,
    metrics: ServerMetrics,
    server: JoinHandle<Drained>,
    died: mpsc::Receiver<Died>,
    /// Ends the tasks that are not the clients' side.
    tasks: Vec<JoinHandle<()>>,
}

/// Why a proxy cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address cannot be bound.
    #[error(transparent)]
    Bind(#[from] io::Error),
    /// A tokenizer cannot be used.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// An essential task ended at once.
    #[error(transparent)]
    Died(#[from] Died),
}

// === impl App ===

impl App {
    /// Starts a proxy on the current runtime.
    ///
    /// # Errors
    /// If an address cannot be bound or a tokenizer cannot be used.
    pub async fn start(params: AppParams) -> Result<Self, StartError> {
        let AppParams {
            config,
            file,
            loader,
            admin_runtime,
            log,
            panics,
            files,
            seed,
        } = params;
        let config = Arc::new(config);
        let seed = config.seed.unwrap_or(seed);
        let (drain, draining) = drain::channel();
        let (essentials, died) = essentials();
        let readiness = Readiness::new(draining.clone());
        let process = Process::new();

        let metrics = Metrics::default();
        let pools = Pools::new(PoolsParams {
            seed,
            families: metrics.pools.clone(),
            prompts: metrics.prompts.clone(),
            offload: Arc::new(BlockingPool::new(tokenizing_threads(), TOKENIZING_QUEUE)),
        });
        let directory = Arc::new(Directory::new(
            DirectoryParams {
                pools,
                essentials: essentials.clone(),
                runtime: admin_runtime.clone(),
                created: process.started() as u64,
            },
            config.clone(),
        ));

        let status = Arc::new(Mutex::new(ReloadStatus {
            file: file.clone(),
            loaded: reload::unix(),
            ..Default::default()
        }));
        let stack = Stack::build(StackParams {
            models: directory.models().clone(),
            local: Arc::new(Answers::new(
                directory.catalog().clone(),
                directory.models().clone(),
                draining.clone(),
            )),
            limits: Limits {
                peek_cap: usize::try_from(config.limits.peek_cap).unwrap_or(usize::MAX),
                hard_cap: config.limits.hard_cap,
                memory: usize::try_from(config.limits.memory_budget).unwrap_or(usize::MAX),
            },
            retries: BudgetParams::default(),
            connect: Arc::new(Tcp),
            seed,
            metrics: metrics.http.clone(),
        });
        let mut registry = Registry::default();
        metrics.register(&mut registry, process, &panics);

        // First the operators' side: it answers while tokenizers load.
        let admin_listener = bind_on(&admin_runtime, "admin", config.admin).await?;
        let admin = admin_listener.local_addr()?;
        let pages = Admin::new(AdminParams {
            registry: Arc::new(registry),
            directory: directory.clone(),
            readiness: readiness.clone(),
            reload: status.clone(),
            log,
        });
        let mut tasks = Tasks::new(&essentials, &admin_runtime);
        tasks.spawn("admin", pages.serve(admin_listener));

        let locals = tokenizers::load(&loader, &config, None).await?;
        directory.configure(config.clone(), locals);
        tasks.spawn("directory", refresh(directory.clone(), readiness.clone()));
        let reload = Arc::new(Notify::new());
        if let Some(file) = file {
            let reloader = Reloader {
                file,
                directory: directory.clone(),
                loader,
                status,
                metrics: metrics.reload.clone(),
                now: reload.clone(),
                started: config.clone(),
            };
            tasks.spawn("pool file", reloader.run());
        }

        let listener = server::bind("listen", config.listen).await?;
        let listen = listener.local_addr()?;
        readiness.listening();
        let max_connections = match config.limits.max_connections {
            Some(n) => usize::try_from(n).unwrap_or(usize::MAX),
            None => files.connections(),
        };
        if max_connections > files.connections() {
            tracing::warn!(
                max_connections,
                open_files = files.limit,
                "More connections are configured than the limit of open files allows"
            );
        }
        let server = Server::new(
            ServerParams {
                max_connections,
                max_requests: max_connections,
                header_timeout: config.limits.header_timeout,
                header_bytes: u32::try_from(config.limits.header_bytes).unwrap_or(u32::MAX),
                drain: config.limits.drain,
            },
            metrics.server.clone(),
            draining,
        );
        let server = tokio::spawn(server.serve(listener, stack));
        tracing::info!(%listen, %admin, max_connections, open_files = files.limit, "Forebay proxy started");
        Ok(Self {
            listen,
            admin,
            drain,
            lame_duck: config.limits.lame_duck,
            reload,
            directory,
            metrics: metrics.server,
            server,
            died,
            tasks: std::mem::take(&mut tasks.handles),
        })
    }

    /// Where clients come in.
    pub fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// Where operators come in.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// What is served.
    pub fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// What is counted of the clients' side.
    pub fn metrics(&self) -> &ServerMetrics {
        &self.metrics
    }

    /// Looks at the pool file now.
    pub fn reload(&self) {
        self.reload.notify_one();
    }

    /// Begins to stop, or, the second time, stops now.
    pub fn stop(&self) {
        if self.drain.phase() > Phase::Running {
            self.drain.advance(Phase::Now);
            return;
        }
        self.drain.advance(Phase::LameDuck);
        let (drain, lame_duck) = (self.drain.clone(), self.lame_duck);
        // Ends by itself; the phase only goes forward.
        tokio::spawn(async move {
            time::sleep(lame_duck).await;
            drain.advance(Phase::Draining);
        });
    }

    /// Resolves when the proxy has stopped.
    ///
    /// # Errors
    /// If an essential task ended.
    pub async fn stopped(&mut self) -> Result<Drained, Died> {
        tokio::select! {
            biased;
            // The sender lives in the directory as long as we do.
            Some(died) = self.died.recv() => Err(died),
            drained = &mut self.server => drained.map_err(|_| Died { task: "clients" }),
        }
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.server.abort();
        for task in &self.tasks {
            task.abort();
        }
        self.directory.abandon();
    }
}

/// Registers everything that a proxy counts, as each proxy does for itself: for checks of names.
pub fn register_all(registry: &mut Registry) {
    Metrics::default().register(registry, Process::new(), &Panics::default());
}

/// Tasks of the admin runtime.
struct Tasks<'a> {
    essentials: &'a Essentials,
    runtime: &'a Handle,
    handles: Vec<JoinHandle<()>>,
}

impl<'a> Tasks<'a> {
    fn new(essentials: &'a Essentials, runtime: &'a Handle) -> Self {
        Self {
            essentials,
            runtime,
            handles: Vec::new(),
        }
    }

    fn spawn(&mut self, task: &'static str, future: impl Future<Output = ()> + Send + 'static) {
        self.handles
            .push(self.essentials.spawn(self.runtime, task, future));
    }
}

impl Drop for Tasks<'_> {
    fn drop(&mut self) {
        // Only what was not handed on: a start that failed leaves nothing behind.
        for task in &self.handles {
            task.abort();
        }
    }
}

/// Everything that is counted.
#[derive(Clone, Default)]
struct Metrics {
    server: ServerMetrics,
    http: HttpMetricFamilies,
    pools: PoolMetricFamilies,
    prompts: PromptFamilies,
    reload: ReloadMetrics,
}

// === impl Metrics ===

impl Metrics {
    fn register(&self, registry: &mut Registry, process: Process, panics: &Panics) {
        registry.register(
            "forebay_build",
            "What this is",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        self.server.register(registry);
        self.http.register(registry);
        self.pools.register(registry);
        self.prompts.register(registry);
        self.reload.register(registry);
        panics.register(registry);
        registry.register_collector(Box::new(process));
    }
}

async fn refresh(directory: Arc<Directory>, readiness: Readiness) {
    loop {
        time::sleep(REFRESH).await;
        directory.refresh();
        if directory.first_round_done() {
            readiness.discovered();
        }
    }
}

/// Binds on another runtime, whose driver the listener then belongs to.
async fn bind_on(
    runtime: &Handle,
    what: &'static str,
    addr: SocketAddr,
) -> io::Result<TcpListener> {
    runtime
        .spawn(server::bind(what, addr))
        .await
        .map_err(io::Error::other)?
}

/// Threads that tokenize long prompts: half of the cores, the other half serves.
fn tokenizing_threads() -> usize {
    std::thread::available_parallelism()
        .map_or(1, |n| n.get() / 2)
        .max(1)
}
