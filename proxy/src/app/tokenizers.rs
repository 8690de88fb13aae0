//! Loads tokenizers, which takes seconds of computation, away from threads that serve.

use crate::config::{ChatTemplateConfig, Config, ModelConfig};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};
use tower_ttft::prompt::{ChatTemplate, LoadError, LocalModel, LocalParams, LocalTokenizer};

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

/// A loader of what models' directories hold. `seed` is of the names of cached segments.
pub fn local_tokenizers(seed: u64) -> LoadTokenizer {
    Arc::new(move |model: &ModelConfig| Ok(Arc::new(load_one(model, seed)?)))
}

/// The errors name the pool file's keys.
fn load_one(model: &ModelConfig, seed: u64) -> Result<LocalTokenizer, tower_ttft::Error> {
    let dir = model.tokenizer.as_deref().unwrap_or(Path::new("."));
    let (chat_template, file) = match &model.chat_template {
        None => (None, None),
        Some(ChatTemplateConfig::Named(name)) => {
            (Some(ChatTemplate::Named(name.as_ref().to_owned())), None)
        }
        Some(ChatTemplateConfig::File(file)) => {
            let source = std::fs::read_to_string(file)
                .map_err(|e| format!("chatTemplate {} cannot be read: {e}", file.display()))?;
            (Some(ChatTemplate::Source(source)), Some(file))
        }
    };
    let params = LocalParams {
        chat_template,
        default_chat_template_kwargs: model.chat_template_kwargs.clone(),
        exclude_tools_when_tool_choice_none: model.exclude_tools_when_tool_choice_none,
        ..LocalParams::new(seed)
    };
    LocalTokenizer::load(dir, params).map_err(|error| match (error, file) {
        (LoadError::Template { error, .. }, Some(file)) => format!(
            "chatTemplate {} does not compile: {error}; correct it, or give the one that the engines have",
            file.display()
        )
        .into(),
        (error @ LoadError::NoTemplate { .. }, _) => format!(
            "chatTemplate is neither a file nor a name that the tokenizer knows: {error}"
        )
        .into(),
        (LoadError::Parameter { error, .. }, _) => format!("chatTemplateKwargs {error}").into(),
        (error, _) => error.into(),
    })
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
    let had =
        |m: &ModelConfig| before.is_some_and(|b| b.models.iter().any(|old| old.same_tokens(m)));
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
