//! `forebay-bench NAME`: runs one benchmark, prints its table, and writes it as JSON if asked.
use clap::{Parser, Subcommand};
use forebay_bench::{Error, index, report::Report};
use std::{alloc::System, path::PathBuf, process::ExitCode};

/// Counts what is allocated, so that memory is measured and not estimated.
#[global_allocator]
static ALLOCATOR: cap::Cap<System> = cap::Cap::new(System, usize::MAX);

#[derive(Parser)]
#[command(name = "forebay-bench", version, about = "Runs one benchmark")]
struct Args {
    #[command(subcommand)]
    bench: Bench,
    /// A short run: figures are rough.
    #[arg(long, global = true)]
    quick: bool,
    /// Also write the report to this file, as JSON.
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Bench {
    /// The prefix index: time and memory per block, lookups alone and beside a writer.
    Index {
        /// Leave out the comparison arms.
        #[arg(long)]
        only: bool,
    },
}

fn main() -> Result<ExitCode, Error> {
    let args = Args::parse();
    let report = match args.bench {
        Bench::Index { only } => {
            let mut report = Report::new("index");
            let options = index::Options {
                quick: args.quick,
                peers: !only,
                allocated: || ALLOCATOR.allocated(),
            };
            index::run(&options, &mut report)?;
            report
        }
    };
    print!("{report}");
    if let Some(path) = args.json {
        std::fs::write(path, serde_json::to_string_pretty(&report)?)?;
    }
    Ok(if report.holds() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
