//! Where things are: the repository, the cache, the binaries under test.

use anyhow::{Context, Result, ensure};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Runs whose logs are kept.
const KEPT_RUNS: usize = 8;

/// Where things are.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The top of the repository.
    pub root: PathBuf,
    /// The Python that has vLLM, pyzmq and the OpenAI client.
    pub python: PathBuf,
    /// The directory of the models and tokenizers.
    pub models: PathBuf,
    /// The gateway's binary.
    pub proxy: PathBuf,
    /// Logs and generated files of this run.
    pub run: PathBuf,
}

// === impl Paths ===

impl Paths {
    /// Finds everything, installing vLLM and the models if the cache lacks them.
    pub fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("the package has a parent directory")?
            .to_owned();
        let venv = script(&root.join("integration/vllm/install"))?;
        let models = script(&root.join("integration/vllm/model"))?;
        let proxy = match env::var_os("FOREBAY_PROXY") {
            Some(path) => path.into(),
            // Cargo puts the binaries of a workspace side by side.
            None => env::current_exe()?.with_file_name("forebay-proxy"),
        };
        ensure!(
            proxy.exists(),
            "{} does not exist: build it (cargo build -p forebay-proxy) or name it in FOREBAY_PROXY",
            proxy.display()
        );
        Ok(Self {
            python: venv.join("bin/python"),
            run: new_run(&models)?,
            root,
            models,
            proxy,
        })
    }

    /// The model that the engines serve.
    pub fn tiny(&self) -> PathBuf {
        self.models.join("tiny")
    }
}

/// Runs one of our scripts that prints a directory.
fn script(path: &Path) -> Result<PathBuf> {
    let output = Command::new(path)
        .stderr(std::process::Stdio::inherit())
        .output()
        .with_context(|| path.display().to_string())?;
    ensure!(
        output.status.success(),
        "{} failed: {}",
        path.display(),
        output.status
    );
    let line = String::from_utf8(output.stdout)?;
    Ok(PathBuf::from(line.trim()))
}

/// A new directory for this run beside the models; the oldest ones that no process uses are removed.
fn new_run(models: &Path) -> Result<PathBuf> {
    let runs = models.with_file_name("runs");
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)?
        .as_secs();
    let run = runs.join(format!("{now}-{}", std::process::id()));
    fs::create_dir_all(&run)?;
    let mut all: Vec<_> = fs::read_dir(&runs)?.flatten().map(|e| e.path()).collect();
    all.sort();
    for old in all.iter().rev().skip(KEPT_RUNS) {
        if !in_use(old) {
            // Another run may be removing it too.
            let _ = fs::remove_dir_all(old);
        }
    }
    Ok(run)
}

/// Whether the process that a run's directory is named after still lives.
fn in_use(run: &Path) -> bool {
    let pid = run.file_name().and_then(|n| n.to_str()?.rsplit_once('-'));
    pid.is_some_and(|(_, pid)| Path::new("/proc").join(pid).exists())
}
