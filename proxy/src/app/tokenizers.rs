//! Loads tokenizers, which takes seconds of computation, away from threads that serve.

use crate::config::{Config, ModelConfig};
use std::{collections::HashMap, path::PathBuf, sync::Arc};
use tower_ttft::prompt::LocalModel;

/// Loads what a directory holds. Runs on a blocking thread.
pub type LoadTokenizer =
    Arc<dyn Fn(&ModelConfig) -> Result<Arc<dyn LocalModel>, tower_ttft::Error> + Send + Sync>;

/// A tokenizer that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("model `{model}`: tokenizer {}: {source}", dir.display())]
pub struct TokenizerError {
    /// The model.
    pub model: Arc<str>,
    /// The directory.
    pub dir: PathBuf,
    /// What is wrong with it.
    #[source]
    pub source: tower_ttft::Error,
}

/// Loads the tokenizers of a configuration that the one before it did not have, all at once.
///
/// # Errors
/// The first that cannot be used.
pub(super) async fn load(
    loader: &LoadTokenizer,
    config: &Config,
    before: Option<&Config>,
) -> Result<HashMap<Arc<str>, Arc<dyn LocalModel>>, TokenizerError> {
    let had = |m: &ModelConfig| {
        before.is_some_and(|b| {
            b.models
                .iter()
                .any(|old| old.name == m.name && old.tokenizer == m.tokenizer)
        })
    };
    let jobs: Vec<_> = config
        .models
        .iter()
        .filter(|m| !had(m))
        .filter_map(|m| Some((m.clone(), m.tokenizer.clone()?)))
        .map(|(model, dir)| {
            let loader = loader.clone();
            let name = model.name.clone();
            (
                name,
                dir,
                tokio::task::spawn_blocking(move || loader(&model)),
            )
        })
        .collect();
    let mut loaded = HashMap::new();
    for (model, dir, job) in jobs {
        let result = match job.await {
            Ok(result) => result,
            Err(_) => Err("loading it panicked".into()),
        };
        match result {
            Ok(local) => {
                tracing::info!(%model, dir = %dir.display(), "Tokenizer loaded");
                loaded.insert(model, local);
            }
            Err(source) => return Err(TokenizerError { model, dir, source }),
        }
    }
    Ok(loaded)
}
