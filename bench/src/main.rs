//! `forebay-bench NAME`: runs one benchmark, prints its table, and writes it as JSON if asked.
use clap::{Parser, Subcommand};
use forebay_bench::{Error, decision, grid, index, overhead, prediction, report::Report, worlds};
use std::{alloc::System, net::SocketAddr, path::PathBuf, process::ExitCode};

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
    /// From a body's bytes to a booked endpoint, stage by stage.
    Decision {
        /// A tokenizer directory in Hugging Face layout.
        #[arg(long, value_name = "DIR", env = "FOREBAY_TOKENIZER")]
        tokenizer: PathBuf,
    },
    /// What the gateway costs per streamed request, beside haproxy.
    Overhead {
        /// A tokenizer directory in Hugging Face layout, for the arm that tokenizes.
        #[arg(long, value_name = "DIR", env = "FOREBAY_TOKENIZER")]
        tokenizer: Option<PathBuf>,
    },
    /// The published experiment in virtual time, with every way of routing.
    Grid {
        /// Trials (3 unless said otherwise; 1 with --quick).
        #[arg(long)]
        seeds: Option<usize>,
        /// Also write plots and tables to this directory.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Runs at once (as many as there are cores).
        #[arg(long)]
        threads: Option<usize>,
    },
    /// What the predictor says beside what comes, and how well it ranks.
    Prediction {
        /// Trials (3 unless said otherwise; 1 with --quick).
        #[arg(long)]
        seeds: Option<usize>,
        /// Runs at once (as many as there are cores).
        #[arg(long)]
        threads: Option<usize>,
    },
    /// Routing where things are otherwise: many proxies, late knowledge, other traffic, hardware and memory.
    Worlds {
        /// Trials (3 unless said otherwise; 1 with --quick).
        #[arg(long)]
        seeds: Option<usize>,
        /// Only worlds whose name contains this.
        #[arg(long)]
        only: Option<String>,
        /// Runs at once (as many as there are cores).
        #[arg(long)]
        threads: Option<usize>,
    },
    /// An engine that answers at once, for `overhead`.
    #[command(hide = true)]
    FakeEngine {
        /// Where it listens.
        addr: SocketAddr,
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
        Bench::Decision { tokenizer } => {
            let mut report = Report::new("decision");
            let options = decision::Options {
                quick: args.quick,
                tokenizer,
            };
            decision::run(&options, &mut report)?;
            report
        }
        Bench::Overhead { tokenizer } => {
            let mut report = Report::new("overhead");
            let options = overhead::Options {
                requests: if args.quick { 100 } else { 400 },
                rounds: if args.quick { 3 } else { 8 },
                tokenizer,
            };
            runtime()?.block_on(overhead::run(&options, &mut report))?;
            report
        }
        Bench::Grid {
            seeds,
            out,
            threads,
        } => {
            let mut report = Report::new("grid");
            let options = grid::Options {
                seeds: trials(seeds, args.quick),
                quick: args.quick,
                out,
                threads: threads.unwrap_or_else(cores),
            };
            grid::run(&options, &mut report)?;
            report
        }
        Bench::Prediction { seeds, threads } => {
            let mut report = Report::new("prediction");
            let options = prediction::Options {
                seeds: trials(seeds, args.quick),
                quick: args.quick,
                threads: threads.unwrap_or_else(cores),
            };
            prediction::run(&options, &mut report)?;
            report
        }
        Bench::Worlds {
            seeds,
            only,
            threads,
        } => {
            let mut report = Report::new("worlds");
            let options = worlds::Options {
                seeds: trials(seeds, args.quick),
                only,
                threads: threads.unwrap_or_else(cores),
            };
            worlds::run(&options, &mut report)?;
            report
        }
        Bench::FakeEngine { addr } => {
            runtime()?.block_on(async {
                overhead::serve_engine(tokio::net::TcpListener::bind(addr).await?).await
            })?;
            return Ok(ExitCode::SUCCESS);
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

fn trials(asked: Option<usize>, quick: bool) -> usize {
    asked.unwrap_or(if quick { 1 } else { 3 }).max(1)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}
