use super::*;
use crate::{
    peek::Api,
    prompt::{InPlace, Job, Media, RemoteError, RemotePrompt, read::tests::request},
};
use parking_lot::{Condvar, Mutex};
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
    /// Texts longer than this take until [`ByteModel::open`].
    stuck_over: Option<usize>,
    stuck: AtomicUsize,
    gate: (Mutex<bool>, Condvar),
}

impl ByteModel {
    pub(in crate::prompt) fn ids_of(req: &InferenceRequest) -> Vec<u32> {
        req.body.iter().map(|b| u32::from(*b)).collect()
    }

    fn open(&self) {
        *self.gate.0.lock() = true;
        self.gate.1.notify_all();
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
        if self.stuck_over.is_some_and(|most| text.text.len() > most) {
            self.stuck.fetch_add(1, Ordering::SeqCst);
            let mut open = self.gate.0.lock();
            while !*open {
                self.gate.1.wait(&mut open);
            }
        }
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
        !encoder.encode(&none).await.source.is_exact() || encoder.encode(&none).await.tokens > 0
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_requests_do_not_wait_for_long_ones() {
    // Long prompts hold every thread of the pool until the end of this test, and more wait for one.
    let (local, encoder) = encoder(
        ByteModel {
            stuck_over: Some(100_000),
            ..Default::default()
        },
        Arc::new(BlockingPool::new(2, 10)),
    );
    let long: Vec<_> = (0..64)
        .map(|_| {
            let encoder = encoder.clone();
            tokio::spawn(async move { encoder.encode(&chat(400_000)).await.source })
        })
        .collect();
    while local.stuck.load(Ordering::SeqCst) < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let start = Instant::now();
    for _ in 0..50 {
        assert_eq!(encoder.encode(&chat(100)).await.source, Source::Local);
    }
    let took = Instant::now().saturating_duration_since(start);
    assert!(
        took < Duration::from_secs(1),
        "{took:?} for 50 small prompts"
    );
    let mut sources = Vec::new();
    for task in long {
        sources.push(task.await.unwrap());
    }
    local.open();
    let count = |reason| {
        let want = Source::Approximate(reason);
        sources.iter().filter(|s| **s == want).count()
    };
    assert_eq!(count(Reason::Timeout), 12, "two ran and ten waited");
    assert_eq!(count(Reason::Busy), 52);
}
