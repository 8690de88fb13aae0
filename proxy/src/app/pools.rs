//! How a model gets its pool, its encoder and its policy.

use super::verify::Verified;
use crate::{
    config::{Config, ModelConfig, PolicyConfig},
    http::{ModelPool, ModelPoolParams, PathPolicy},
};
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::{collections::BTreeSet, path::PathBuf, sync::Arc};
use tower_ttft::{
    chain::KeySpace,
    pool::{Pool, PoolMetricFamilies, PoolParams},
    prompt::{Adapter, Encoder, EncoderParams, LocalModel, Offload, PromptFamilies},
    vllm::EngineTokenizer,
};

/// The index of the pool where engines stand that are in no pool: nobody asks it anything.
const STAGING_BYTES: usize = 1 << 20;

/// Makes pools.
pub(super) struct Pools {
    keys: KeySpace,
    rng: Mutex<StdRng>,
    families: PoolMetricFamilies,
    prompts: PromptFamilies,
    offload: Arc<dyn Offload>,
    staging: Pool,
}

/// Parameters of [`Pools`].
pub(super) struct PoolsParams {
    pub(super) seed: u64,
    pub(super) families: PoolMetricFamilies,
    pub(super) prompts: PromptFamilies,
    /// Where long prompts are tokenized.
    pub(super) offload: Arc<dyn Offload>,
}

/// A model and its pool.
pub(super) struct ModelEntry {
    pub(super) name: Arc<str>,
    pub(super) declared: bool,
    pub(super) aliases: Vec<Arc<str>>,
    pub(super) pool: Arc<ModelPool>,
    tokenizer: Option<PathBuf>,
    local: Option<Arc<dyn LocalModel>>,
    adapters: Arc<ArcSwap<BTreeSet<Arc<str>>>>,
    encoder: Encoder,
    verified: Verified,
}

// === impl Pools ===

impl Pools {
    pub(super) fn new(params: PoolsParams) -> Self {
        let keys = KeySpace::new(params.seed);
        Self {
            keys,
            rng: Mutex::new(StdRng::seed_from_u64(params.seed)),
            families: params.families,
            prompts: params.prompts,
            offload: params.offload,
            // Its metrics are not registered.
            staging: Pool::new(PoolParams {
                model: "".into(),
                keys,
                policy: Default::default(),
                seed: params.seed,
                index_bytes: STAGING_BYTES,
            }),
        }
    }

    pub(super) fn staging(&self) -> &Pool {
        &self.staging
    }

    /// A seed for something new.
    pub(super) fn seed(&self) -> u64 {
        self.rng.lock().next_u64()
    }

    /// A model's pool, empty. `declared` is what the file says of it.
    pub(super) fn create(
        &self,
        name: &Arc<str>,
        declared: Option<&ModelConfig>,
        local: Option<Arc<dyn LocalModel>>,
        config: &Config,
    ) -> ModelEntry {
        let params = PoolParams {
            model: name.clone(),
            keys: self.keys,
            policy: config.policy.spec.clone(),
            seed: self.seed(),
            index_bytes: usize::try_from(config.limits.index_memory).unwrap_or(usize::MAX),
        };
        let pool = Pool::with_metrics(params, &self.families);
        let adapters = Arc::default();
        let encoder = self.encoder(&pool, &local, &adapters);
        ModelEntry {
            name: name.clone(),
            declared: declared.is_some(),
            aliases: declared.map(|m| m.aliases.clone()).unwrap_or_default(),
            pool: Arc::new(ModelPool::new(ModelPoolParams {
                name: name.clone(),
                pool,
                encoder: Arc::new(encoder.clone()),
                policy: path_policy(&config.policy),
            })),
            tokenizer: declared.and_then(|m| m.tokenizer.clone()),
            local,
            adapters,
            encoder,
            verified: Verified::default(),
        }
    }

    /// Acts on what the file says now. Without a new `local`, a tokenizer that was loaded stays.
    pub(super) fn update(
        &self,
        entry: &mut ModelEntry,
        declared: Option<&ModelConfig>,
        local: Option<Arc<dyn LocalModel>>,
        config: &Config,
    ) {
        entry.declared = declared.is_some();
        entry.aliases = declared.map(|m| m.aliases.clone()).unwrap_or_default();
        let tokenizer = declared.and_then(|m| m.tokenizer.clone());
        if local.is_some() || (tokenizer.is_none() && entry.local.is_some()) {
            entry.local = local;
            entry.encoder = self.encoder(entry.pool.pool(), &entry.local, &entry.adapters);
            entry.pool.set_encoder(Arc::new(entry.encoder.clone()));
            entry.verified = Verified::default();
        }
        entry.tokenizer = tokenizer;
        if entry.pool.pool().policy() != config.policy.spec {
            entry.pool.pool().set_policy(config.policy.spec.clone());
        }
        let policy = path_policy(&config.policy);
        if *entry.pool.policy() != policy {
            entry.pool.set_policy(policy);
        }
    }

    fn encoder(
        &self,
        pool: &Pool,
        local: &Option<Arc<dyn LocalModel>>,
        adapters: &Arc<ArcSwap<BTreeSet<Arc<str>>>>,
    ) -> Encoder {
        let mut params = EncoderParams::new(pool.model().clone(), self.keys);
        params.local.clone_from(local);
        // Asked only where there is no local one.
        params.remote = Some(Arc::new(EngineTokenizer::new(pool.clone())));
        params.offload = self.offload.clone();
        params.families = self.prompts.clone();
        let (base, adapters) = (pool.model().clone(), adapters.clone());
        params.adapters = Arc::new(move |requested| {
            let lora = adapters.load().get(requested)?.clone();
            Some(Adapter {
                base: base.clone(),
                lora: Some(lora),
            })
        });
        Encoder::new(params)
    }
}

// === impl ModelEntry ===

impl ModelEntry {
    /// Compares the local tokenizer with an engine's whenever there is a process that it was not compared with.
    pub(super) fn verify(
        &mut self,
        engines: BTreeSet<(Arc<str>, Arc<str>)>,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        self.local.as_ref()?;
        self.verified.next(engines, &self.encoder, self.pool.pool())
    }

    /// Whether the local tokenizer gives other tokens than an engine.
    pub(super) fn is_mismatched(&self) -> bool {
        self.encoder.is_mismatched()
    }

    /// The adapters that engines of this pool serve.
    pub(super) fn set_adapters(&self, adapters: BTreeSet<Arc<str>>) {
        if **self.adapters.load() != adapters {
            self.adapters.store(Arc::new(adapters));
        }
    }
}

fn path_policy(policy: &PolicyConfig) -> PathPolicy {
    PathPolicy {
        first_token_timeout: policy.spec.first_token_timeout,
        idle_timeout: policy.spec.idle_timeout,
        head_after: policy.head_after,
        connect_timeout: policy.connect_timeout,
        retries: policy.spec.retries,
        endpoint_header: policy.expose_endpoint,
        ..PathPolicy::default()
    }
}
