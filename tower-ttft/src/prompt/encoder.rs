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
        if let Some(prompts) = read::ids(req) {
            return Ok(self.of_ids(prompts, 0, roots, Source::Ids));
        }
        match (&inner.params.local, &inner.remote) {
            (Some(_), _) if self.is_mismatched() => Err(Reason::Mismatch),
            (Some(local), _) => self.local(local, req, roots).await,
            (None, Some(remote)) => match remote.tokenize(req).await {
                Ok(prompt) => {
                    let text = u32::try_from(read::bytes(req).text).unwrap_or(u32::MAX);
                    Ok(self.of_ids(prompt.prompts, text, roots, prompt.source))
                }
                Err(Missed::Nobody) => Err(Reason::NoTokenizer),
                Err(Missed::Failed) => Err(Reason::Remote),
                Err(Missed::Timeout) => Err(Reason::Timeout),
                Err(Missed::Busy) => Err(Reason::Busy),
            },
            (None, None) => Err(Reason::NoTokenizer),
        }
    }

    fn of_ids(&self, prompts: Vec<Vec<u32>>, bytes: u32, roots: Roots, source: Source) -> Prompt {
        let total: usize = prompts.iter().map(Vec::len).sum();
        let first: Arc<[u32]> = prompts.into_iter().next().unwrap_or_default().into();
        Prompt {
            chain: self.inner.params.keys.tokens(roots.tokens, &first),
            tokens: u32::try_from(total).unwrap_or(u32::MAX),
            ids: Some(first),
            bytes,
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
        if req.body.len() > inline.saturating_mul(2) {
            let (this, local, req) = (self.clone(), local.clone(), req.clone());
            return self
                .away(move || this.finish(&*local, &local.render(&req)?, roots))
                .await;
        }
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
                    approximate::prompt(req, reason, &p.keys, roots.bytes, &self.inner.ratio)
                }
            };
            self.inner.metrics.count(prompt.source);
            prompt
        })
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
pub(super) mod tests {
    use super::*;
    use crate::{
        peek::Api,
        prompt::{InPlace, Job, Media, RemoteError, RemotePrompt, read::tests::request},
    };
    use parking_lot::Mutex;
    use std::sync::atomic::AtomicUsize;
    use tokio::time::Instant;

    /// Takes every byte of a request's body for a token.
    #[derive(Default)]
    pub(in crate::prompt) struct ByteModel {
        cached: AtomicBool,
        panics: bool,
        refuses: Option<Reason>,
        media: Option<Media>,
        truncate: Option<u32>,
        tokenized: AtomicUsize,
    }

    impl ByteModel {
        pub(in crate::prompt) fn ids_of(req: &InferenceRequest) -> Vec<u32> {
            req.body.iter().map(|b| u32::from(*b)).collect()
        }
    }

    impl LocalModel for ByteModel {
        fn render(&self, req: &InferenceRequest) -> Result<Rendered, Reason> {
            assert!(!self.panics, "a bug of a template engine");
            if let Some(reason) = self.refuses {
                return Err(reason);
            }
            let mut text = Text::new(String::from_utf8_lossy(&req.body), false);
            text.after_media = self.media.clone();
            Ok(Rendered {
                texts: vec![text],
                truncate: self.truncate,
            })
        }

        fn uncached(&self, text: &Text) -> usize {
            if self.cached.load(Ordering::Relaxed) {
                0
            } else {
                text.text.len()
            }
        }

        fn tokenize(&self, text: &Text) -> Result<Vec<u32>, Reason> {
            self.tokenized.fetch_add(1, Ordering::Relaxed);
            Ok(text.text.bytes().map(u32::from).collect())
        }
    }

    fn encoder(local: ByteModel, offload: Arc<dyn Offload>) -> (Arc<ByteModel>, Encoder) {
        let local = Arc::new(local);
        let mut params = EncoderParams::new("base", KeySpace::new(1));
        params.local = Some(local.clone());
        params.offload = offload;
        params.adapters = Arc::new(|name| {
            (name == "ad1").then(|| Adapter {
                base: "base".into(),
                lora: Some("ad1".into()),
            })
        });
        (local, Encoder::new(params))
    }

    /// Counts jobs and keeps, runs or refuses them.
    #[derive(Default)]
    struct Elsewhere {
        jobs: AtomicUsize,
        kept: Mutex<Vec<Job>>,
        full: bool,
        keep: bool,
    }

    impl Offload for Elsewhere {
        fn run(&self, job: Job) -> Result<(), Full> {
            if self.full {
                return Err(Full);
            }
            self.jobs.fetch_add(1, Ordering::SeqCst);
            if self.keep {
                self.kept.lock().push(job);
            } else {
                job();
            }
            Ok(())
        }
    }

    fn chat(bytes: usize) -> InferenceRequest {
        request(
            Api::Chat,
            &format!(
                r#"{{"messages":[{{"role":"user","content":"{}"}}]}}"#,
                "x".repeat(bytes)
            ),
        )
    }

    #[tokio::test]
    async fn chains_differ_by_adapter_and_salt_and_not_by_alias() {
        let (_, encoder) = encoder(ByteModel::default(), Arc::new(InPlace));
        let mut first = Vec::new();
        for extra in [
            r#""model":"base""#,
            r#""model":"ad1""#,
            r#""model":"base","cache_salt":"s""#,
            r#""model":"ad1","cache_salt":"s""#,
        ] {
            let body = format!(r#"{{"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],{extra}}}"#);
            first.push(
                encoder
                    .encode(&request(Api::Completions, &body))
                    .await
                    .chain
                    .keys()[0],
            );
        }
        let alias = r#"{"prompt":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"model":"alias"}"#;
        let alias = encoder.encode(&request(Api::Completions, alias)).await;
        assert_eq!(alias.chain.keys()[0], first[0]);
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), 4);
    }

    #[tokio::test]
    async fn several_prompts_give_the_first_chain_and_the_sum_of_tokens() {
        let (_, encoder) = encoder(ByteModel::default(), Arc::new(InPlace));
        let req = request(Api::Completions, r#"{"prompt":[[1,2,3],[4,5]]}"#);
        let prompt = encoder.encode(&req).await;
        assert_eq!(prompt.tokens, 5);
        assert_eq!(prompt.ids.as_deref(), Some(&[1, 2, 3][..]));
        assert_eq!(prompt.source, Source::Ids);
        let none = request(Api::Completions, r#"{"prompt":[]}"#);
        assert!(
            !encoder.encode(&none).await.source.is_exact()
                || encoder.encode(&none).await.tokens > 0
        );
    }

    #[tokio::test]
    async fn long_uncached_text_leaves_the_thread_and_cached_text_stays() {
        let pool = Arc::new(Elsewhere::default());
        let (local, encoder) = encoder(ByteModel::default(), pool.clone());
        assert_eq!(encoder.encode(&chat(1_000)).await.source, Source::Local);
        assert_eq!(pool.jobs.load(Ordering::SeqCst), 0);
        assert_eq!(encoder.encode(&chat(200_000)).await.source, Source::Local);
        assert_eq!(pool.jobs.load(Ordering::SeqCst), 1);
        assert_eq!(encoder.encode(&chat(400_000)).await.source, Source::Local);
        assert_eq!(pool.jobs.load(Ordering::SeqCst), 2);
        local.cached.store(true, Ordering::Relaxed);
        assert_eq!(encoder.encode(&chat(200_000)).await.source, Source::Local);
        assert_eq!(pool.jobs.load(Ordering::SeqCst), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn over_the_budget_or_the_places_bytes_stand_for_tokens() {
        let full = Arc::new(Elsewhere {
            full: true,
            ..Default::default()
        });
        let (_, encoder_full) = encoder(ByteModel::default(), full);
        let prompt = encoder_full.encode(&chat(200_000)).await;
        assert_eq!(prompt.source, Source::Approximate(Reason::Busy));
        assert_eq!(prompt.chain.kind(), ChainKind::Bytes);
        assert!(prompt.tokens > 10_000 && !prompt.chain.keys().is_empty());
        assert_eq!(encoder_full.encode(&chat(10)).await.source, Source::Local);

        let stuck = Arc::new(Elsewhere {
            keep: true,
            ..Default::default()
        });
        let (local, encoder) = encoder(ByteModel::default(), stuck.clone());
        let start = Instant::now();
        let prompt = encoder.encode(&chat(200_000)).await;
        assert_eq!(prompt.source, Source::Approximate(Reason::Timeout));
        let waited = Instant::now().saturating_duration_since(start);
        assert!((200..=202).contains(&waited.as_millis()), "{waited:?}");
        // The job that comes too late does nothing.
        let before = local.tokenized.load(Ordering::Relaxed);
        for job in stuck.kept.lock().drain(..) {
            job();
        }
        assert_eq!(local.tokenized.load(Ordering::Relaxed), before);
    }

    #[tokio::test]
    async fn every_fallback_is_counted_by_its_reason() {
        let families = PromptFamilies::default();
        let build = |local: Option<ByteModel>| {
            let mut params = EncoderParams::new("base", KeySpace::new(1));
            params.families = families.clone();
            params.local = local.map(|l| Arc::new(l) as _);
            Encoder::new(params)
        };
        let model: Arc<str> = "base".into();
        let mut unread = chat(10);
        unread.read = BodyRead::TooLarge;
        let refusing = |reason| {
            Some(ByteModel {
                refuses: Some(reason),
                ..Default::default()
            })
        };
        for (encoder, req, reason) in [
            (build(None), chat(10), Reason::NoTokenizer),
            (build(None), unread, Reason::Unread),
            (
                build(refusing(Reason::Template)),
                chat(10),
                Reason::Template,
            ),
            (
                build(refusing(Reason::Unsupported)),
                chat(10),
                Reason::Unsupported,
            ),
            (
                build(Some(ByteModel {
                    truncate: Some(3),
                    ..Default::default()
                })),
                chat(10),
                Reason::Unsupported,
            ),
        ] {
            let before = families.count(&model, Source::Approximate(reason));
            assert_eq!(
                encoder.encode(&req).await.source,
                Source::Approximate(reason)
            );
            assert_eq!(
                families.count(&model, Source::Approximate(reason)),
                before + 1
            );
        }
        let fits = ByteModel {
            truncate: Some(1_000),
            ..Default::default()
        };
        assert_eq!(
            build(Some(fits)).encode(&chat(10)).await.source,
            Source::Local
        );
    }

    #[tokio::test]
    async fn a_panicking_tokenizer_costs_only_its_prompt() {
        let (_, encoder) = encoder(
            ByteModel {
                panics: true,
                ..Default::default()
            },
            Arc::new(InPlace),
        );
        for bytes in [10, 400_000] {
            let prompt = encoder.encode(&chat(bytes)).await;
            assert_eq!(prompt.source, Source::Approximate(Reason::Unsupported));
        }
    }

    #[tokio::test]
    async fn with_media_the_chain_ends_before_it() {
        let media = Some(Media {
            parts: 1,
            text_bytes: 4_000,
        });
        let (_, encoder) = encoder(
            ByteModel {
                media,
                ..Default::default()
            },
            Arc::new(InPlace),
        );
        let req = chat(100);
        let prompt = encoder.encode(&req).await;
        assert_eq!(prompt.source, Source::Approximate(Reason::Unsupported));
        assert_eq!(prompt.chain.kind(), ChainKind::Tokens);
        assert_eq!(
            prompt.chain.keys().len(),
            (req.body.len() - EDGE_TOKENS) / 16
        );
        assert!(prompt.ids.is_none());
        assert!(prompt.tokens > 1_000);
    }

    struct Engine(Result<Vec<u32>, RemoteError>);

    impl RemoteTokenizer for Engine {
        fn tokenize<'a>(
            &'a self,
            _: &'a InferenceRequest,
        ) -> BoxFuture<'a, Result<RemotePrompt, RemoteError>> {
            Box::pin(async {
                self.0.clone().map(|ids| RemotePrompt {
                    prompts: vec![ids],
                    source: Source::Render,
                })
            })
        }
    }

    #[tokio::test]
    async fn without_a_local_tokenizer_the_engine_is_asked() {
        let with = |says| {
            let mut params = EncoderParams::new("base", KeySpace::new(1));
            params.remote = Some(Arc::new(Engine(says)));
            Encoder::new(params)
        };
        let prompt = with(Ok((0..40).collect())).encode(&chat(10)).await;
        assert_eq!(
            (prompt.source, prompt.tokens, prompt.chain.keys().len()),
            (Source::Render, 40, 2)
        );
        for (says, reason) in [
            (RemoteError::Failed, Reason::Remote),
            (RemoteError::Unsupported, Reason::NoTokenizer),
            (RemoteError::NoEngine, Reason::NoTokenizer),
        ] {
            let prompt = with(Err(says)).encode(&chat(10)).await;
            assert_eq!(prompt.source, Source::Approximate(reason));
        }
    }

    #[tokio::test]
    async fn debug_output_says_nothing_of_the_prompt() {
        let (_, encoder) = encoder(ByteModel::default(), Arc::new(InPlace));
        let req = request(Api::Completions, r#"{"prompt":[777777,888888]}"#);
        let prompt = encoder.encode(&req).await;
        let text = format!("{prompt:?} {encoder:?} {:?}", Text::new("secret", true));
        for hidden in ["777777", "888888", "secret"] {
            assert!(!text.contains(hidden), "{text}");
        }
    }
}
