//! The tokenizer of the simulated model.

use super::DemoError;
use forebay_sim::tokenizer;
use std::{env, fs, process, sync::Arc};
use tower_ttft::prompt::{LocalModel, LocalParams, LocalTokenizer};

/// Loads the tokenizer that comes with the simulator. It is read from files, which are there for that moment only.
pub(super) fn load(seed: u64) -> Result<Arc<dyn LocalModel>, DemoError> {
    let name = format!("forebay-demo-{}-{:x}", process::id(), random());
    let dir = env::temp_dir().join(name);
    let files = |source| DemoError::Files {
        dir: dir.clone(),
        source,
    };
    fs::create_dir(&dir).map_err(files)?;
    let loaded = tokenizer::install(&dir)
        .map_err(files)
        .and_then(|()| LocalTokenizer::load(&dir, LocalParams::new(seed)).map_err(DemoError::from));
    // What stays behind is no error of the demo.
    let _ = fs::remove_dir_all(&dir);
    Ok(Arc::new(loaded?))
}

/// A number that nobody outside can guess: the standard library seeds its hashers from the system's randomness.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(process::id())
}
