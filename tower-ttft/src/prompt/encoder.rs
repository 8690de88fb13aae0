//! From a request of one model to its prompt, by the best way there is.
use super::{
    Encode, LocalModel, Offload, Prompt, PromptFamilies, Reason, RemoteTokenizer, Rendered, Source,
    Text, approximate,
    approximate::Ratio,
    metrics::PromptMetrics,
    offload::{BlockingPool, Full},
    read,
    remote::{Bounded, Missed},
};
use crate::{
    chain::{Chain, ChainKind, KeySpace, Root},
    peek::{BodyRead, InferenceRequest},
};
use futures::future::BoxFuture;
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::sync::oneshot;

/// Tokens before a media part that are not believed: what follows them may have joined with them.
const EDGE_TOKENS: usize = 8;

/// What a served model name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// The base model's name, as the pool calls it.
    pub base: Arc<str>,
    /// The adapter's name, as KV events call it.
    pub lora: Option<Arc<str>>,
}

/// Parameters of an [`Encoder`].
#[derive(Clone)]
pub struct EncoderParams {
    /// The base model's name, as the pool calls it.
    pub model: Arc<str>,
    /// The installation's key space.
    pub keys: KeySpace,
    /// What a requested model name stands for; none for the base model under any of its names.
    pub adapters: Arc<dyn Fn(&str) -> Option<Adapter> + Send + Sync>,
    /// The local tokenizer and template.
    pub local: Option<Arc<dyn LocalModel>>,
    /// An engine that is asked if there is no local tokenizer.
    pub remote: Option<Arc<dyn RemoteTokenizer>>,
    /// Where long work runs.
    pub offload: Arc<dyn Offload>,
    /// Where prompts are counted.
    pub families: PromptFamilies,
    /// How long a request waits for tokens from an engine.
    pub remote_timeout: Duration,
    /// How long a request waits for long work.
    pub local_timeout: Duration,
    /// Bytes of text that are tokenized on the caller's thread; more goes to `offload`. Twice as much is parsed and
    /// rendered there.
    pub inline_bytes: usize,
}

/// Turns the requests of one base model into prompts. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub struct Encoder {
    inner: Arc<Inner>,
}

struct Inner {
    params: EncoderParams,
    remote: Option<Bounded>,
    metrics: PromptMetrics,
    ratio: Ratio,
    mismatch: AtomicBool,
}

/// The two roots that a request's chain can have.
#[derive(Clone, Copy)]
struct Roots {
    tokens: Root,
    bytes: Root,
}

// === impl EncoderParams ===

impl EncoderParams {
    /// Parameters of a model without tokenizer and engine, with the defaults for the rest: 250 ms for engines, 200 ms
    /// for long work, 128 KiB tokenized in place, and as many threads for long work as half the cores.
    pub fn new(model: impl Into<Arc<str>>, keys: KeySpace) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self {
            model: model.into(),
            keys,
            adapters: Arc::new(|_| None),
            local: None,
            remote: None,
            offload: Arc::new(BlockingPool::new(cores / 2, 32)),
            families: PromptFamilies::default(),
            remote_timeout: Duration::from_millis(250),
            local_timeout: Duration::from_millis(200),
            inline_bytes: 128 * 1024,
        }
    }
}

impl fmt::Debug for EncoderParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncoderParams")
            .field("model", &self.model)
            .field("local", &self.local.is_some())
            .field("remote", &self.remote.is_some())
            .field("remote_timeout", &self.remote_timeout)
            .field("local_timeout", &self.local_timeout)
            .field("inline_bytes", &self.inline_bytes)
            .finish_non_exhaustive()
    }
}

// === impl Encoder ===

impl Encoder {
    /// An encoder for the requests of one base model.
    pub fn new(params: EncoderParams) -> Self {
        Self {
            inner: Arc::new(Inner {
                remote: params
                    .remote
                    .clone()
                    .map(|remote| Bounded::new(remote, params.remote_timeout)),
                metrics: params.families.of(params.model.clone()),
                ratio: Ratio::default(),
                mismatch: AtomicBool::new(false),
                params,
            }),
        }
    }

    /// The base model's name.
    pub fn model(&self) -> &Arc<str> {
        &self.inner.params.model
    }

    /// An engine counted `tokens` in a prompt of `bytes` of text: approximate prompts of this model get better.
    pub fn learn(&self, bytes: u32, tokens: u32) {
        self.inner.ratio.learn(bytes, tokens);
    }

    /// Bytes of text per token, as far as it was learned.
    pub fn bytes_per_token(&self) -> f64 {
        self.inner.ratio.get()
    }

    /// Whether self-verification found other tokens than the engine's, so that all prompts are approximate.
    pub fn is_mismatched(&self) -> bool {
        self.inner.mismatch.load(Ordering::Relaxed)
    }

    pub(super) fn set_mismatched(&self, mismatched: bool) {
        self.inner.mismatch.store(mismatched, Ordering::Relaxed);
    }

    /// The local ids of a request's prompts, whatever verification said; for verification itself.
    pub(super) fn local_ids(&self, req: &InferenceRequest) -> Option<Vec<Vec<u32>>> {
        let local = self.inner.params.local.as_ref()?;
        let rendered = local.render(req).ok()?;
        rendered
            .texts
            .iter()
            .map(|t| local.tokenize(t).ok())
            .collect()
    }

    async fn exact(&self, req: &InferenceRequest, roots: Roots) -> Result<Prompt, Reason> {
        let inner = &*self.inner;
        if req.read != BodyRead::Parsed {
            return Err(Reason::Unread);
        }
        if req.body.len() <= self.read_inline() {
            if let Some(prompts) = read::ids(req) {
                return Ok(self.of_ids(prompts, roots, Source::Ids));
            }
            if let Some(local) = &inner.params.local {
                self.trusted()?;
                return self.local(local, req, roots).await;
            }
        } else {
            let (this, req) = (self.clone(), req.clone());
            match self.away(move || this.long(&req, roots)).await {
                // Nothing at hand knows: an engine may.
                Err(Reason::NoTokenizer) => {}
                known => return known,
            }
        }
        let remote = inner.remote.as_ref().ok_or(Reason::NoTokenizer)?;
        match remote.tokenize(req).await {
            Ok(prompt) => {
                let read = read::bytes(req, self.read_inline());
                Ok(Prompt {
                    bytes: u32::try_from(read.text).unwrap_or(u32::MAX),
                    whole_text: read.is_whole(),
                    ..self.of_ids(prompt.prompts, roots, prompt.source)
                })
            }
            Err(Missed::Nobody) => Err(Reason::NoTokenizer),
            Err(Missed::Failed) => Err(Reason::Remote),
            Err(Missed::Timeout) => Err(Reason::Timeout),
            Err(Missed::Busy) => Err(Reason::Busy),
        }
    }

    /// Bytes of a body that are read and rendered on the caller's thread.
    fn read_inline(&self) -> usize {
        self.inner.params.inline_bytes.saturating_mul(2)
    }

    fn trusted(&self) -> Result<(), Reason> {
        match self.is_mismatched() {
            true => Err(Reason::Mismatch),
            false => Ok(()),
        }
    }

    /// All of it for a long body, away from the caller's thread.
    fn long(&self, req: &InferenceRequest, roots: Roots) -> Result<Prompt, Reason> {
        if let Some(prompts) = read::ids(req) {
            return Ok(self.of_ids(prompts, roots, Source::Ids));
        }
        let local = self
            .inner
            .params
            .local
            .as_ref()
            .ok_or(Reason::NoTokenizer)?;
        self.trusted()?;
        self.finish(&**local, &local.render(req)?, roots)
    }

    fn of_ids(&self, prompts: Vec<Vec<u32>>, roots: Roots, source: Source) -> Prompt {
        let total: usize = prompts.iter().map(Vec::len).sum();
        let first: Arc<[u32]> = prompts.into_iter().next().unwrap_or_default().into();
        Prompt {
            chain: self.inner.params.keys.tokens(roots.tokens, &first),
            tokens: u32::try_from(total).unwrap_or(u32::MAX),
            ids: Some(first),
            bytes: 0,
            whole_text: false,
            source,
        }
    }

    async fn local(
        &self,
        local: &Arc<dyn LocalModel>,
        req: &InferenceRequest,
        roots: Roots,
    ) -> Result<Prompt, Reason> {
        let inline = self.inner.params.inline_bytes;
        let rendered = guarded(|| local.render(req))?;
        let sum = |of: &dyn Fn(&Text) -> usize| rendered.texts.iter().map(of).sum::<usize>();
        // Most prompts are shorter than that: what is cached of them need not be known before.
        if sum(&|t| t.text.len()) <= inline || sum(&|t| local.uncached(t)) <= inline {
            return guarded(|| self.finish(&**local, &rendered, roots));
        }
        let (this, local) = (self.clone(), local.clone());
        self.away(move || this.finish(&*local, &rendered, roots))
            .await
    }

    /// Runs long work elsewhere, within the time budget.
    async fn away(
        &self,
        work: impl FnOnce() -> Result<Prompt, Reason> + Send + 'static,
    ) -> Result<Prompt, Reason> {
        let (tx, rx) = oneshot::channel();
        let late = self.inner.metrics.late();
        let job = Box::new(move || {
            // Nobody waits for what has not even begun in time.
            if tx.is_closed() || tx.send(guarded(work)).is_err() {
                late.inc();
            }
        });
        self.inner
            .params
            .offload
            .run(job)
            .map_err(|Full| Reason::Busy)?;
        match tokio::time::timeout(self.inner.params.local_timeout, rx).await {
            Ok(Ok(result)) => result,
            Ok(Err(_dropped)) => Err(Reason::Busy),
            Err(_) => Err(Reason::Timeout),
        }
    }

    fn finish(&self, local: &dyn LocalModel, r: &Rendered, roots: Roots) -> Result<Prompt, Reason> {
        let keys = &self.inner.params.keys;
        let mut total = 0usize;
        let mut bytes = 0usize;
        let mut first: Option<(Chain, Arc<[u32]>)> = None;
        let mut media = false;
        for text in &r.texts {
            let mut ids = local.tokenize(text)?;
            if r.truncate.is_some_and(|most| ids.len() > most as usize) {
                return Err(Reason::Unsupported);
            }
            bytes = bytes.saturating_add(text.text.len());
            if let Some(after) = &text.after_media {
                media = true;
                bytes = bytes.saturating_add(after.text_bytes);
                let hidden = self.inner.ratio.tokens(after.text_bytes, after.parts);
                total = total.saturating_add(hidden as usize);
                ids.truncate(ids.len().saturating_sub(EDGE_TOKENS));
            }
            total = total.saturating_add(ids.len());
            if first.is_none() {
                first = Some((keys.tokens(roots.tokens, &ids), ids.into()));
            }
        }
        let (chain, ids) = first.ok_or(Reason::Unsupported)?;
        if media && chain.keys().is_empty() {
            return Err(Reason::Unsupported);
        }
        Ok(Prompt {
            chain,
            tokens: u32::try_from(total).unwrap_or(u32::MAX),
            ids: (!media).then_some(ids),
            bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
            whole_text: !media,
            source: if media {
                Source::Approximate(Reason::Unsupported)
            } else {
                Source::Local
            },
        })
    }

    fn roots(&self, req: &InferenceRequest) -> Roots {
        let p = &self.inner.params;
        let adapter = req.model.as_deref().and_then(|name| (p.adapters)(name));
        let (base, lora) = match &adapter {
            Some(a) => (&a.base, a.lora.as_deref()),
            None => (&p.model, None),
        };
        let of = |kind| p.keys.root(kind, base, lora, req.cache_salt.as_deref());
        Roots {
            tokens: of(ChainKind::Tokens),
            bytes: of(ChainKind::Bytes),
        }
    }
}

impl Encode for Encoder {
    fn encode<'a>(&'a self, req: &'a InferenceRequest) -> BoxFuture<'a, Prompt> {
        Box::pin(async move {
            let roots = self.roots(req);
            let prompt = match self.exact(req, roots).await {
                Ok(prompt) => prompt,
                Err(reason) => {
                    let p = &self.inner.params;
                    approximate::prompt(
                        req,
                        reason,
                        &p.keys,
                        roots.bytes,
                        &self.inner.ratio,
                        self.read_inline(),
                    )
                }
            };
            self.inner.metrics.count(prompt.source);
            prompt
        })
    }

    fn learn(&self, bytes: u32, tokens: u32) {
        Encoder::learn(self, bytes, tokens);
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder")
            .field("params", &self.inner.params)
            .field("mismatched", &self.is_mismatched())
            .finish()
    }
}

/// Keeps a panic of a tokenizer or a template from ending the connection that brought the request.
fn guarded<T>(work: impl FnOnce() -> Result<T, Reason>) -> Result<T, Reason> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        tracing::error!("the local tokenizer panicked; the prompt is approximate");
        Err(Reason::Unsupported)
    })
}

#[cfg(test)]
pub(super) mod tests;
