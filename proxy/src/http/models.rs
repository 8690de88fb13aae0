//! Which pool serves which model name.

use arc_swap::ArcSwap;
use std::{collections::HashMap, fmt, sync::Arc, time::Duration};
use tower_ttft::{pool::Pool, prompt::Encode};

/// What a pool's owner decides about the path of its requests. Replaced in place: connections stay.
#[derive(Clone, Debug, PartialEq)]
pub struct PathPolicy {
    /// From sending a request to the first byte of its answer's body.
    pub first_token_timeout: Duration,
    /// Between two frames of an answer.
    pub idle_timeout: Duration,
    /// A stream whose engine has said 200 and nothing else for this long is committed.
    pub head_after: Duration,
    /// Between comments on a committed stream that has no event yet.
    pub keep_alive: Duration,
    /// To establish a connection.
    pub connect_timeout: Duration,
    /// How often a request may be tried again elsewhere before its answer is committed.
    pub retries: u32,
    /// Whether responses name their endpoint in `x-forebay-endpoint`.
    pub endpoint_header: bool,
}

/// Parameters of a [`ModelPool`].
pub struct ModelPoolParams {
    /// The base model's name, for logs and metrics.
    pub name: Arc<str>,
    /// The endpoints.
    pub pool: Pool,
    /// How prompts become tokens.
    pub encoder: Arc<dyn Encode>,
    /// What its owner decides.
    pub policy: PathPolicy,
}

/// The endpoints of one model with all that a request needs on its way there. Built once per pool and kept for as long
/// as the pool lives, whatever else changes.
pub struct ModelPool {
    name: Arc<str>,
    pool: Pool,
    encoder: ArcSwap<Arc<dyn Encode>>,
    policy: ArcSwap<PathPolicy>,
}

/// A name that clients may use for a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedName {
    /// The name.
    pub name: Arc<str>,
    /// The name that engines know the model by, if this one is only an alias: the request's `model` becomes this.
    pub rewrite: Option<Arc<str>>,
}

/// Where a name leads.
#[derive(Clone, Debug)]
pub struct ModelTarget {
    /// The endpoints.
    pub pool: Arc<ModelPool>,
    /// What `model` becomes; none if it stays.
    pub rewrite: Option<Arc<str>>,
}

/// The models behind one listener, by every name they are served under.
#[derive(Clone, Default)]
pub struct Models {
    pools: Vec<Arc<ModelPool>>,
    names: HashMap<Arc<str>, ModelTarget>,
    served: Vec<Arc<str>>,
}

/// Two pools claim the same name.
#[derive(Debug, thiserror::Error)]
#[error("the model name {name:?} is served by two pools: {first:?} and {second:?}")]
pub struct DuplicateName {
    /// The name.
    pub name: Arc<str>,
    /// The pool that came first.
    pub first: Arc<str>,
    /// The other one.
    pub second: Arc<str>,
}

// === impl PathPolicy ===

impl Default for PathPolicy {
    fn default() -> Self {
        Self {
            first_token_timeout: Duration::from_secs(600),
            idle_timeout: Duration::from_secs(120),
            head_after: Duration::from_secs(30),
            keep_alive: Duration::from_secs(15),
            connect_timeout: Duration::from_secs(5),
            retries: 1,
            endpoint_header: false,
        }
    }
}

// === impl ServedName ===

impl ServedName {
    /// A name that engines know.
    pub fn own(name: impl Into<Arc<str>>) -> Self {
        Self {
            name: name.into(),
            rewrite: None,
        }
    }

    /// Another name for `of`.
    pub fn alias(name: impl Into<Arc<str>>, of: impl Into<Arc<str>>) -> Self {
        Self {
            name: name.into(),
            rewrite: Some(of.into()),
        }
    }
}

// === impl ModelPool ===

impl ModelPool {
    /// Joins a pool with its encoder and policy.
    pub fn new(params: ModelPoolParams) -> Self {
        Self {
            name: params.name,
            pool: params.pool,
            encoder: ArcSwap::from_pointee(params.encoder),
            policy: ArcSwap::from_pointee(params.policy),
        }
    }

    /// The base model's name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The endpoints.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// How prompts become tokens now.
    pub fn encoder(&self) -> Arc<dyn Encode> {
        Arc::clone(&self.encoder.load())
    }

    /// Replaces the encoder, for instance when a tokenizer was found.
    pub fn set_encoder(&self, encoder: Arc<dyn Encode>) {
        self.encoder.store(Arc::new(encoder));
    }

    /// The policy now.
    pub fn policy(&self) -> Arc<PathPolicy> {
        self.policy.load_full()
    }

    /// Replaces the policy. Requests that are under way keep the one they started with.
    pub fn set_policy(&self, policy: PathPolicy) {
        self.policy.store(Arc::new(policy));
    }
}

impl fmt::Debug for ModelPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelPool")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

// === impl Models ===

impl Models {
    /// A table of pools and the names each is served under: the engines' own (adapters too) and aliases.
    ///
    /// # Errors
    ///
    /// If two pools claim one name.
    pub fn new(
        entries: impl IntoIterator<Item = (Arc<ModelPool>, Vec<ServedName>)>,
    ) -> Result<Self, DuplicateName> {
        let mut models = Self::default();
        for (pool, names) in entries {
            for ServedName { name, rewrite } in names {
                let target = ModelTarget {
                    pool: pool.clone(),
                    rewrite,
                };
                match models.names.insert(name.clone(), target) {
                    Some(first) if !Arc::ptr_eq(&first.pool, &pool) => {
                        return Err(DuplicateName {
                            name,
                            first: first.pool.name().clone(),
                            second: pool.name().clone(),
                        });
                    }
                    Some(_) => {}
                    None => models.served.push(name),
                }
            }
            models.pools.push(pool);
        }
        Ok(models)
    }

    /// Where a name leads.
    pub fn get(&self, name: &str) -> Option<&ModelTarget> {
        self.names.get(name)
    }

    /// The only pool, if there is one only.
    pub fn only(&self) -> Option<&Arc<ModelPool>> {
        match self.pools.as_slice() {
            [pool] => Some(pool),
            _ => None,
        }
    }

    /// The pools in the order they were given.
    pub fn pools(&self) -> &[Arc<ModelPool>] {
        &self.pools
    }

    /// All names, in the order they were given.
    pub fn served(&self) -> &[Arc<str>] {
        &self.served
    }
}

impl fmt::Debug for Models {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.served).finish()
    }
}
