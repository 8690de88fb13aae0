//! `forebay-integration test SUITE…` and `forebay-integration try`; `integration/run` and `integration/try` build and
//! call it.

use anyhow::{Result, bail};
use clap::{Parser, Subcommand};
use forebay_integration::{
    lab::{Lab, Tier},
    paths::Paths,
    suite, tests,
};
use serde_json::json;
use std::{path::PathBuf, process::ExitCode, sync::Arc};

mod try_it;

#[derive(Parser)]
#[command(about = "Tests of Forebay against real vLLM and real clients")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the tests of some suites (all by default).
    Test {
        /// Suites.
        suites: Vec<String>,
        /// Full counts and the long tests.
        #[arg(long)]
        full: bool,
        /// Only tests whose name contains this.
        #[arg(long)]
        only: Option<String>,
        /// The seed of all random input, to repeat a run.
        #[arg(long)]
        seed: Option<u64>,
        /// Writes the outcomes as JSON.
        #[arg(long)]
        summary: Option<PathBuf>,
    },
    /// Lists the tests.
    List,
    /// Starts two engines and a gateway to play with.
    Try,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<ExitCode> {
    match args.command {
        Command::List => {
            for test in tests::all() {
                println!("{}::{}", test.suite, test.name);
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Try => {
            try_it::run(Paths::find()?).await?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Test {
            suites,
            full,
            only,
            seed,
            summary,
        } => {
            let all = tests::all();
            if let Some(unknown) = suites.iter().find(|s| all.iter().all(|t| t.suite != *s)) {
                bail!("there is no suite {unknown}");
            }
            let chosen: Vec<_> = all
                .iter()
                .filter(|t| suites.is_empty() || suites.iter().any(|s| s == t.suite))
                .filter(|t| only.as_ref().is_none_or(|only| t.name.contains(only)))
                .copied()
                .collect();
            let tier = if full { Tier::Full } else { Tier::Fast };
            let seed = seed.unwrap_or_else(|| u64::from(tests::driver::now().to_bits() as u32));
            let paths = Paths::find()?;
            println!("seed {seed}; logs in {}", paths.run.display());
            let lab = Arc::new(Lab::new(paths, tier, seed));
            let outcomes = tokio::select! {
                outcomes = suite::run(lab, &chosen) => outcomes,
                _ = tokio::signal::ctrl_c() => bail!("interrupted"),
            };
            let failed = outcomes.iter().filter(|o| !o.passed).count();
            println!("{} passed, {failed} failed", outcomes.len() - failed);
            if let Some(file) = summary {
                let document = json!({"seed": seed, "tests": outcomes});
                std::fs::write(file, serde_json::to_string_pretty(&document)?)?;
            }
            if outcomes.is_empty() {
                bail!("no test has such a name");
            }
            Ok(if failed == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
    }
}
