//! The command line.

pub mod decisions;

use crate::telemetry::log::{DEFAULT_FILTER, Format};
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// The data plane of Forebay: sends each request for a language model to the engine where its answer starts soonest.
#[derive(Debug, Parser)]
#[command(
    name = "forebay-proxy",
    version,
    args_conflicts_with_subcommands = true,
    arg_required_else_help = true
)]
pub struct Cli {
    /// What else to do than to serve.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Serving.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// What else there is to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print why requests go where they go, as they come
    Decisions(DecisionsArgs),
}

/// How to serve.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The pool file: models, endpoints, policy (YAML or JSON)
    #[arg(long, value_name = "FILE", required = true)]
    pub pool: Option<PathBuf>,
    /// Check the pool file, its tokenizers too, and exit
    #[arg(long)]
    pub check: bool,
    /// What is logged: a level, or target=level pairs with commas between them
    #[arg(long, env = "FOREBAY_LOG", default_value = DEFAULT_FILTER, value_name = "FILTER")]
    pub log_level: String,
    /// How lines of the log look
    #[arg(long, value_enum, default_value_t)]
    pub log_format: Format,
    /// Threads that serve clients; by default as many as there are cores, or as the cgroup allows
    #[arg(long, env = "FOREBAY_WORKERS", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
    /// Write the bound addresses to this file, as JSON, once clients are listened to
    #[arg(long, value_name = "FILE")]
    pub ready_file: Option<PathBuf>,
}

/// Whose decisions to print.
#[derive(Debug, Args)]
pub struct DecisionsArgs {
    /// The proxy's admin address, such as http://127.0.0.1:4191
    #[arg(value_name = "ADMIN_URL")]
    pub admin: String,
    /// Print the last N first
    #[arg(short, default_value_t = 0, value_name = "N")]
    pub n: u16,
    /// Do not wait for more
    #[arg(long)]
    pub no_follow: bool,
    /// Only those of this model
    #[arg(long)]
    pub model: Option<String>,
    /// Print the records as JSON, one a line
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serves_or_prints_decisions() {
        let cli =
            Cli::try_parse_from(["forebay-proxy", "--pool", "p.yaml", "--workers", "2"]).unwrap();
        assert!(cli.command.is_none());
        assert_eq!(cli.serve.workers, Some(2));
        let cli = Cli::try_parse_from([
            "forebay-proxy",
            "decisions",
            "http://127.0.0.1:4191",
            "-n",
            "5",
        ])
        .unwrap();
        assert!(matches!(cli.command, Some(Command::Decisions(a)) if a.n == 5 && !a.no_follow));
        for bad in [
            &["forebay-proxy", "--check"][..],
            &["forebay-proxy", "--pool", "p", "--workers", "0"],
        ] {
            assert!(Cli::try_parse_from(bad).is_err(), "{bad:?}");
        }
    }
}
