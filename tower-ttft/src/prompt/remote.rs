//! Asking an engine for the tokens of a prompt, within limits.
use super::{Source, breaker::Breaker};
use crate::peek::{Api, InferenceRequest};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tokio::{sync::Semaphore, time::Instant};

/// How long an engine is not asked again for what it said it cannot do.
const NEGATIVE_FOR: Duration = Duration::from_secs(60);

/// Questions to engines under way at once, for one model.
const CONCURRENT: usize = 8;

/// An engine that tokenizes for us: its render endpoint or its `/tokenize`.
pub trait RemoteTokenizer: Send + Sync + 'static {
    /// The tokens of a request's prompts. The caller bounds the time and drops the future when it ran out.
    fn tokenize<'a>(
        &'a self,
        req: &'a InferenceRequest,
    ) -> BoxFuture<'a, Result<RemotePrompt, RemoteError>>;
}

/// What an engine says a request's prompts are.
#[derive(Clone, PartialEq, Eq)]
pub struct RemotePrompt {
    /// The ids of each prompt of the request, in its order; at least one.
    pub prompts: Vec<Vec<u32>>,
    /// [`Source::Render`] or [`Source::Tokenize`].
    pub source: Source,
}

/// Why an engine did not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RemoteError {
    /// It has no endpoint for this API; it is not asked again for a while.
    #[error("the engine has no endpoint that tokenizes this API")]
    Unsupported,
    /// It refused this request (a 4xx): nobody else will know better, and it is no failure of the engine.
    #[error("the engine refused to tokenize the request")]
    Refused,
    /// It cannot be reached, answered with an error or with something else than tokens.
    #[error("the engine failed to tokenize the request")]
    Failed,
    /// There is no engine to ask.
    #[error("no engine can be asked")]
    NoEngine,
}

/// Why there is no answer within the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missed {
    /// Nobody to ask: none, or none that can.
    Nobody,
    /// Asked in vain, or lately too often in vain.
    Failed,
    /// The time ran out.
    Timeout,
    /// Too many questions are under way.
    Busy,
}

/// A remote tokenizer with a time limit, a breaker of its own (apart from the engine's for requests), a bound on
/// concurrent questions and a memory for what it cannot do.
pub(super) struct Bounded {
    inner: Arc<dyn RemoteTokenizer>,
    timeout: Duration,
    breaker: Mutex<Breaker>,
    permits: Semaphore,
    cannot: Mutex<HashMap<Api, Instant>>,
}

// === impl RemotePrompt ===

impl std::fmt::Debug for RemotePrompt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemotePrompt")
            .field(
                "tokens",
                &self.prompts.iter().map(Vec::len).collect::<Vec<_>>(),
            )
            .field("source", &self.source)
            .finish()
    }
}

// === impl Bounded ===

impl Bounded {
    pub(super) fn new(inner: Arc<dyn RemoteTokenizer>, timeout: Duration) -> Self {
        Self {
            inner,
            timeout,
            breaker: Mutex::new(Breaker::default()),
            permits: Semaphore::new(CONCURRENT),
            cannot: Mutex::new(HashMap::new()),
        }
    }

    pub(super) async fn tokenize(&self, req: &InferenceRequest) -> Result<RemotePrompt, Missed> {
        let now = Instant::now();
        if self
            .cannot
            .lock()
            .get(&req.api)
            .is_some_and(|until| now < *until)
        {
            return Err(Missed::Nobody);
        }
        let _permit = self.permits.try_acquire().map_err(|_| Missed::Busy)?;
        let Some(mut attempt) = Breaker::attempt(&self.breaker, now) else {
            return Err(Missed::Failed);
        };
        match tokio::time::timeout(self.timeout, self.inner.tokenize(req)).await {
            Ok(Ok(prompt)) if !prompt.prompts.is_empty() => {
                attempt.succeeded();
                Ok(prompt)
            }
            Ok(Err(RemoteError::Unsupported)) => {
                attempt.neither();
                // As many entries as there are APIs.
                self.cannot
                    .lock()
                    .insert(req.api, Instant::now() + NEGATIVE_FOR);
                Err(Missed::Nobody)
            }
            Ok(Err(RemoteError::NoEngine)) => {
                attempt.neither();
                Err(Missed::Nobody)
            }
            Ok(Err(RemoteError::Refused)) => {
                attempt.succeeded();
                Err(Missed::Failed)
            }
            Ok(Ok(_) | Err(RemoteError::Failed)) => {
                attempt.failed(Instant::now());
                Err(Missed::Failed)
            }
            Err(_) => {
                attempt.failed(Instant::now());
                Err(Missed::Timeout)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::read::tests::request;
    use std::sync::atomic::{AtomicUsize, Ordering};

    struct Fake {
        asked: AtomicUsize,
        takes: Mutex<Duration>,
        says: Mutex<Result<(), RemoteError>>,
    }

    impl RemoteTokenizer for Fake {
        fn tokenize<'a>(
            &'a self,
            _: &'a InferenceRequest,
        ) -> BoxFuture<'a, Result<RemotePrompt, RemoteError>> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            let (takes, says) = (*self.takes.lock(), *self.says.lock());
            Box::pin(async move {
                tokio::time::sleep(takes).await;
                says.map(|()| RemotePrompt {
                    prompts: vec![vec![1, 2, 3]],
                    source: Source::Tokenize,
                })
            })
        }
    }

    fn setup(takes: Duration, says: Result<(), RemoteError>) -> (Arc<Fake>, Bounded) {
        let fake = Arc::new(Fake {
            asked: AtomicUsize::new(0),
            takes: Mutex::new(takes),
            says: Mutex::new(says),
        });
        (fake.clone(), Bounded::new(fake, Duration::from_millis(250)))
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_engine_costs_its_limit_and_soon_nothing() {
        let (fake, bounded) = setup(Duration::from_secs(5), Ok(()));
        let req = request(Api::Chat, "{}");
        for _ in 0..3 {
            let start = Instant::now();
            assert_eq!(bounded.tokenize(&req).await, Err(Missed::Timeout));
            assert_eq!(start.elapsed_ms(), 250);
        }
        let start = Instant::now();
        for _ in 0..100 {
            assert_eq!(bounded.tokenize(&req).await, Err(Missed::Failed));
        }
        assert_eq!(start.elapsed_ms(), 0, "the breaker is open");
        assert_eq!(fake.asked.load(Ordering::SeqCst), 3);

        // It recovers with one probe.
        *fake.takes.lock() = Duration::from_millis(1);
        tokio::time::sleep(Duration::from_secs(31)).await;
        assert!(bounded.tokenize(&req).await.is_ok());
        assert!(bounded.tokenize(&req).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_it_cannot_do_is_not_asked_again_for_a_while() {
        let (fake, bounded) = setup(Duration::ZERO, Err(RemoteError::Unsupported));
        let responses = request(Api::Responses, "{}");
        for _ in 0..10 {
            assert_eq!(bounded.tokenize(&responses).await, Err(Missed::Nobody));
        }
        assert_eq!(fake.asked.load(Ordering::SeqCst), 1);
        *fake.says.lock() = Ok(());
        assert!(bounded.tokenize(&request(Api::Chat, "{}")).await.is_ok());
        tokio::time::sleep(NEGATIVE_FOR).await;
        assert!(bounded.tokenize(&responses).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_are_no_failures_and_questions_are_bounded() {
        let (fake, bounded) = setup(Duration::ZERO, Err(RemoteError::Refused));
        let req = request(Api::Chat, "{}");
        for _ in 0..20 {
            assert_eq!(bounded.tokenize(&req).await, Err(Missed::Failed));
        }
        assert_eq!(fake.asked.load(Ordering::SeqCst), 20);

        *fake.takes.lock() = Duration::from_millis(100);
        *fake.says.lock() = Ok(());
        let many = (0..CONCURRENT + 5).map(|_| bounded.tokenize(&req));
        let results = futures::future::join_all(many).await;
        let busy = results.iter().filter(|r| **r == Err(Missed::Busy)).count();
        assert_eq!(busy, 5);
    }

    trait ElapsedMs {
        fn elapsed_ms(&self) -> u128;
    }
    impl ElapsedMs for Instant {
        fn elapsed_ms(&self) -> u128 {
            Instant::now().saturating_duration_since(*self).as_millis()
        }
    }
}
