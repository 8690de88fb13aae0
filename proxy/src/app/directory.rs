//! What is served: pools, their endpoints, and every name that clients may use for them.
//!
//! The pool file and the engines both have a say. [`Directory::configure`] takes the file's part, at the start and at
//! each reload; [`Directory::refresh`] takes the engines' part, a few times a second. Both end in one table of names
//! that is swapped as a whole, so that a request sees either the old world or the new one. Pools, their endpoints and
//! all that was learned of them stay while names come and go.

use super::{
    catalog::{Catalog, Served},
    essential::Essentials,
    place::Placement,
    pools::{ModelEntry, Pools},
    supervise::{Order, supervise},
};
use crate::{
    config::{Config, EndpointConfig},
    http::{Models, ServedName},
};
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};
use tokio::{runtime::Handle, sync::watch, task::JoinHandle, time::Instant};
use tower_ttft::{
    pool::Pool,
    prompt::LocalModel,
    vllm::{Engine, EngineState, EngineStatus},
};

/// How long the first look at the engines may take before the proxy is ready all the same: an engine that does not
/// answer must not keep the others from being used.
const FIRST_ROUND: Duration = Duration::from_secs(2);

/// All that is served. Shared by the tasks of the admin runtime and the pages of the admin server.
pub struct Directory {
    pools: Pools,
    models: Arc<ArcSwap<Models>>,
    catalog: Arc<ArcSwap<Catalog>>,
    essentials: Essentials,
    runtime: Handle,
    started: Instant,
    created: u64,
    state: Mutex<State>,
}

/// Parameters of a [`Directory`].
pub(super) struct DirectoryParams {
    pub(super) pools: Pools,
    pub(super) essentials: Essentials,
    /// Where engines are watched.
    pub(super) runtime: Handle,
    /// When this process started, seconds since the epoch.
    pub(super) created: u64,
}

/// One endpoint, for operators.
pub struct EndpointView {
    /// What the file says.
    pub config: EndpointConfig,
    /// The base model of the pool that it is in.
    pub model: Option<Arc<str>>,
    /// What the watcher says.
    pub engine: Option<EngineStatus>,
    /// What an operator should know.
    pub condition: Option<String>,
    /// Its ranks in the pool.
    pub members: Vec<tower_ttft::pool::EndpointStatus>,
}

struct State {
    config: Arc<Config>,
    /// Declared ones in the file's order, then those that engines brought.
    models: Vec<ModelEntry>,
    endpoints: BTreeMap<Arc<str>, EndpointEntry>,
    /// What the table of names was last made of.
    names: Vec<(Arc<str>, Vec<ServedName>)>,
}

struct EndpointEntry {
    config: EndpointConfig,
    placement: Placement,
    orders: watch::Sender<Order>,
    engine: Option<Engine>,
    task: JoinHandle<()>,
    /// What comes after it at the same address, once it has left.
    next: Option<EndpointConfig>,
    leaving: bool,
}

// === impl Directory ===

impl Directory {
    pub(super) fn new(params: DirectoryParams, config: Arc<Config>) -> Self {
        Self {
            pools: params.pools,
            models: Arc::default(),
            catalog: Arc::default(),
            essentials: params.essentials,
            runtime: params.runtime,
            started: Instant::now(),
            created: params.created,
            state: Mutex::new(State {
                config,
                models: Vec::new(),
                endpoints: BTreeMap::new(),
                names: Vec::new(),
            }),
        }
    }

    /// The table of names that the request path uses.
    pub fn models(&self) -> &Arc<ArcSwap<Models>> {
        &self.models
    }

    /// The answers about models.
    pub fn catalog(&self) -> &Arc<ArcSwap<Catalog>> {
        &self.catalog
    }

    /// The pool of a model.
    pub fn pool(&self, model: &str) -> Option<Pool> {
        let state = self.state.lock();
        let entry = state.models.iter().find(|m| &*m.name == model)?;
        Some(entry.pool.pool().clone())
    }

    /// All pools.
    pub fn pools(&self) -> Vec<Pool> {
        let state = self.state.lock();
        state.models.iter().map(|m| m.pool.pool().clone()).collect()
    }

    /// Where engines are watched that are in no pool.
    pub(super) fn staging(&self) -> &Pool {
        self.pools.staging()
    }

    /// Acts on a configuration, with the tokenizers of its models by name. Endpoints that are gone from it finish what
    /// is open there.
    pub(super) fn configure(
        self: &Arc<Self>,
        config: Arc<Config>,
        mut locals: HashMap<Arc<str>, Arc<dyn LocalModel>>,
    ) {
        let mut state = self.state.lock();
        let state = &mut *state;

        let mut old = std::mem::take(&mut state.models);
        for model in &config.models {
            let local = locals.remove(&model.name);
            match old.iter().position(|m| m.name == model.name) {
                Some(at) => {
                    let mut entry = old.swap_remove(at);
                    self.pools.update(&mut entry, Some(model), local, &config);
                    state.models.push(entry);
                }
                None => {
                    state
                        .models
                        .push(self.pools.create(&model.name, Some(model), local, &config))
                }
            }
        }
        // What engines brought stays while they are there; a model that is no longer declared becomes one of those.
        old.sort_by_key(|m| m.name.clone());
        for mut entry in old {
            self.pools.update(&mut entry, None, None, &config);
            state.models.push(entry);
        }
        state.config = config.clone();

        let wanted: BTreeMap<_, _> = config
            .endpoints
            .iter()
            .map(|e| (e.address.clone(), e))
            .collect();
        for (address, entry) in &mut state.endpoints {
            let wanted = wanted.get(address).copied();
            if wanted
                .is_some_and(|w| w.address == entry.config.address && w.same_engine(&entry.config))
                && !entry.leaving
            {
                // Only the model may have changed: the next refresh moves it.
                if let Some(wanted) = wanted
                    && *wanted != entry.config
                {
                    entry.config = wanted.clone();
                    entry.place(Placement::initial(wanted));
                }
                continue;
            }
            entry.next = wanted.cloned();
            if !entry.leaving {
                tracing::info!(endpoint = %address, "Endpoint leaves");
                entry.leaving = true;
                entry.orders.send_replace(Order::Leave(config.limits.drain));
            }
        }
        for (address, endpoint) in wanted {
            state
                .endpoints
                .entry(address)
                .or_insert_with(|| self.start(endpoint));
        }
        self.publish(state);
    }

    /// Acts on what engines say.
    pub(super) fn refresh(self: &Arc<Self>) {
        let mut state = self.state.lock();
        let state = &mut *state;

        // Those that have left.
        let left: Vec<_> = state
            .endpoints
            .iter()
            .filter(|(_, e)| e.leaving && e.task.is_finished())
            .map(|(address, _)| address.clone())
            .collect();
        for address in left {
            if let Some(entry) = state.endpoints.remove(&address)
                && let Some(next) = entry.next
            {
                state.endpoints.insert(address, self.start(&next));
            }
        }

        let declared: Vec<_> = state.config.models.iter().map(|m| m.name.clone()).collect();
        let now = Instant::now();
        for entry in state.endpoints.values_mut().filter(|e| !e.leaving) {
            let Some(engine) = &entry.engine else {
                continue;
            };
            let served = engine.status(now).models;
            let placement = entry.placement.next(&entry.config, &declared, &served);
            if placement != entry.placement {
                if let Some(condition) = &placement.condition {
                    tracing::warn!(endpoint = %entry.config.address, "Endpoint {condition}");
                }
                if let Some(name) = &placement.pool
                    && !state.models.iter().any(|m| m.name == *name)
                {
                    tracing::info!(model = %name, endpoint = %entry.config.address, "Serving a model that an engine brought");
                    state
                        .models
                        .push(self.pools.create(name, None, None, &state.config));
                }
                entry.place(placement);
            }
        }
        self.publish(state);

        for model in &mut state.models {
            let engines = state
                .endpoints
                .values()
                .filter(|e| e.placement.pool.as_ref() == Some(&model.name));
            let ready = engines.filter_map(|e| {
                let status = e.engine.as_ref()?.status(now);
                let ready = status.state == EngineState::Ready;
                ready.then(|| (e.config.address.clone(), status.incarnation))
            });
            if let Some(verifying) = model.verify(ready.collect()) {
                self.essentials
                    .spawn_finite(&self.runtime, "verify", verifying);
            }
        }
    }

    /// Whether every engine has been asked, or had the time to answer.
    pub fn first_round_done(&self) -> bool {
        let now = Instant::now();
        if now.saturating_duration_since(self.started) >= FIRST_ROUND {
            return true;
        }
        let state = self.state.lock();
        state.endpoints.values().all(|e| {
            let status = e.engine.as_ref().map(|engine| engine.status(now));
            status.is_some_and(|s| s.state != EngineState::Starting)
        })
    }

    /// The configuration in force.
    pub fn config(&self) -> Arc<Config> {
        self.state.lock().config.clone()
    }

    /// All endpoints, in the order of their addresses.
    pub fn endpoints(&self) -> Vec<EndpointView> {
        let now = Instant::now();
        let state = self.state.lock();
        state
            .endpoints
            .values()
            .map(|e| {
                let model = e.placement.pool.clone();
                let pool = model
                    .as_ref()
                    .and_then(|name| state.models.iter().find(|m| m.name == *name));
                let members = pool.map(|m| m.pool.pool().endpoints()).unwrap_or_default();
                EndpointView {
                    config: e.config.clone(),
                    engine: e.engine.as_ref().map(|engine| engine.status(now)),
                    condition: match &e.placement.condition {
                        _ if e.leaving => Some("leaves: what is open there may finish".to_owned()),
                        None if pool.is_some_and(ModelEntry::is_mismatched) => Some(
                            "the local tokenizer of its model gives other tokens than the engine, so prompts are only approximate; correct `tokenizer` in the pool file, or remove it"
                                .to_owned(),
                        ),
                        condition => condition.clone(),
                    },
                    members: members
                        .iter()
                        .filter(|m| m.id().address.as_str() == &*e.config.address)
                        .map(|m| m.status(now))
                        .collect(),
                    model,
                }
            })
            .collect()
    }

    /// Ends all watchers: the process ends, and what is open with it.
    pub(super) fn abandon(&self) {
        for entry in self.state.lock().endpoints.values() {
            entry.task.abort();
        }
    }

    /// An endpoint's engine is watched.
    pub(super) fn watched(&self, address: &str, engine: Engine) {
        if let Some(entry) = self.state.lock().endpoints.get_mut(address) {
            entry.engine = Some(engine);
        }
    }

    fn start(self: &Arc<Self>, config: &EndpointConfig) -> EndpointEntry {
        tracing::info!(endpoint = %config.address, model = config.model.as_deref(), "Endpoint joins");
        let placement = Placement::initial(config);
        let (orders, rx) = watch::channel(Order::Serve(placement.pool.clone()));
        let watching = supervise(self.clone(), config.clone(), self.pools.seed(), rx);
        EndpointEntry {
            task: self
                .essentials
                .spawn_finite(&self.runtime, "engine", watching),
            config: config.clone(),
            placement,
            orders,
            engine: None,
            next: None,
            leaving: false,
        }
    }

    /// Swaps the table of names and the catalog if they changed.
    fn publish(&self, state: &mut State) {
        let now = Instant::now();
        let used: BTreeSet<_> = state
            .endpoints
            .values()
            .filter_map(|e| e.placement.pool.clone())
            .collect();
        state
            .models
            .retain(|m| m.declared || used.contains(&m.name));

        // Declared names first: an engine cannot take a name from them.
        let mut taken: BTreeSet<Arc<str>> = state
            .models
            .iter()
            .flat_map(|m| std::iter::once(&m.name).chain(&m.aliases))
            .cloned()
            .collect();
        let mut names = Vec::new();
        let mut served = Vec::new();
        for entry in &state.models {
            let mut of_pool = vec![Served::named(&entry.name)];
            for alias in &entry.aliases {
                let mut alias = Served::named(alias);
                alias.parent = Some(entry.name.clone());
                of_pool.push(alias);
            }
            let mut adapters = BTreeSet::new();
            for e in state.endpoints.values() {
                if e.placement.pool.as_ref() != Some(&entry.name) {
                    continue;
                }
                let Some(status) = e.engine.as_ref().map(|engine| engine.status(now)) else {
                    continue;
                };
                for model in &status.models {
                    if model.parent.is_some() {
                        adapters.insert(model.id.clone());
                    }
                    if let Some(known) = of_pool.iter_mut().find(|s| s.id == model.id) {
                        known.learn(model);
                    } else if taken.insert(model.id.clone()) {
                        let mut new = Served::named(&model.id);
                        new.learn(model);
                        of_pool.push(new);
                    }
                }
            }
            entry.set_adapters(adapters);
            let len = of_pool.first().and_then(|s| s.max_model_len);
            for s in &mut of_pool {
                s.max_model_len = s.max_model_len.or(len);
            }
            let named = of_pool.iter().map(|s| match entry.aliases.contains(&s.id) {
                true => ServedName::alias(s.id.clone(), entry.name.clone()),
                false => ServedName::own(s.id.clone()),
            });
            names.push((entry.name.clone(), named.collect()));
            served.extend(of_pool);
        }
        let catalog = Catalog::new(&served, self.created);
        if **self.catalog.load() != catalog {
            self.catalog.store(Arc::new(catalog));
        }
        // Pools are compared by name: one that went and came back in one step is another one, but that cannot be, since
        // both steps publish.
        if state.names != names {
            let entries = state
                .models
                .iter()
                .zip(&names)
                .map(|(entry, (_, names))| (entry.pool.clone(), names.clone()));
            match Models::new(entries) {
                Ok(models) => {
                    tracing::info!(names = ?models.served(), "Serving");
                    self.models.store(Arc::new(models));
                    state.names = names;
                }
                // `taken` rules it out; if it happens all the same, what was served stays.
                Err(error) => tracing::error!(%error, "Cannot serve all models"),
            }
        }
    }
}

// === impl EndpointEntry ===

impl EndpointEntry {
    fn place(&mut self, placement: Placement) {
        let order = Order::Serve(placement.pool.clone());
        self.placement = placement;
        self.orders.send_if_modified(|now| {
            let changed = *now != order;
            *now = order;
            changed
        });
    }
}

// === impl EndpointConfig ===

impl EndpointConfig {
    /// Whether both name the same engine in the same way; the model is not part of that.
    fn same_engine(&self, other: &Self) -> bool {
        let plain = |e: &Self| Self {
            model: None,
            ..e.clone()
        };
        plain(self) == plain(other)
    }
}
