//! Compares a local tokenizer with the engines that it speaks for, before its tokens are believed for long: another
//! vocabulary or another template would make every prefix key wrong, without anybody noticing.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::time;
use tower_ttft::{
    pool::Pool,
    prompt::{Encoder, Verdict},
    vllm::EngineTokenizer,
};

/// How long an engine may take for a probe. It is busy with requests, which come first.
const PATIENCE: Duration = Duration::from_secs(5);

/// Between tries, while no engine answers.
const AGAIN: Duration = Duration::from_secs(10);

/// Tries for one set of engines.
const TRIES: usize = 6;

/// What a tokenizer was compared with.
#[derive(Debug, Default)]
pub(super) struct Verified {
    /// Address and incarnation.
    engines: BTreeSet<(Arc<str>, Arc<str>)>,
    running: Arc<AtomicBool>,
}

// === impl Verified ===

impl Verified {
    /// A comparison, if one is due and none is under way. `engines` are those that are ready.
    pub(super) fn next(
        &mut self,
        engines: BTreeSet<(Arc<str>, Arc<str>)>,
        encoder: &Encoder,
        pool: &Pool,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        if engines.is_subset(&self.engines) || self.running.swap(true, Ordering::AcqRel) {
            return None;
        }
        self.engines = engines;
        let running = Running(self.running.clone());
        let (encoder, remote) = (encoder.clone(), EngineTokenizer::new(pool.clone()));
        Some(async move {
            let _running = running;
            let probes = Encoder::probes(encoder.model());
            for _ in 0..TRIES {
                match encoder.verify(&probes, &remote, PATIENCE).await {
                    Verdict::Same(probes) => {
                        tracing::info!(model = %encoder.model(), probes, "Local tokenizer agrees with the engine");
                        return;
                    }
                    // The encoder has said so, and is approximate from now on.
                    Verdict::Different { .. } => return,
                    Verdict::Unknown => time::sleep(AGAIN).await,
                }
            }
            tracing::warn!(model = %encoder.model(), "Local tokenizer could not be compared with an engine's");
        })
    }
}

/// Ends with its comparison, however that ends.
struct Running(Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}
