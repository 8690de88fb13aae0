//! The command line.

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Forebay sends each request for a language model to the engine where its answer starts soonest.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What there is to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// See it work: the gateway before three simulated vLLM pods, beside random routing before three others
    Demo(DemoArgs),
}

/// How to show it.
#[derive(Clone, Debug, Args)]
pub(crate) struct DemoArgs {
    /// Seconds of load, half of it for each of the two workloads
    #[arg(long, default_value_t = 56, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=3600))]
    pub(crate) seconds: u32,
    /// Fixes prompts, their order, arrival times and the random choices
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) seed: u64,
    /// How many times faster than a real L40S the pods work, and requests come
    #[arg(long, default_value_t = 15, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=30))]
    pub(crate) speed: u32,
    /// What goes to standard output: text, or one JSON document
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: Output,
    /// Keep the gateway up for your own requests until Ctrl-C
    #[arg(long)]
    pub(crate) serve: bool,
    /// Send no load: only serve
    #[arg(long, requires = "serve")]
    pub(crate) no_load: bool,
    /// The gateway's port on 127.0.0.1; 0: a free one
    #[arg(long, default_value_t = 0, value_name = "PORT")]
    pub(crate) port: u16,
    /// Show the gateway's log on standard error: a level, or target=level pairs with commas between them
    #[arg(long, env = "FOREBAY_LOG", value_name = "FILTER")]
    pub(crate) log_level: Option<String>,
}

/// What goes to standard output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Tables for people.
    #[default]
    Text,
    /// One JSON document.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn demo(args: &[&str]) -> Result<DemoArgs, clap::Error> {
        let all = ["forebay", "demo"].iter().chain(args);
        Cli::try_parse_from(all).map(|cli| match cli.command {
            Command::Demo(args) => args,
        })
    }

    #[test]
    fn is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn defaults_take_about_a_minute() {
        let args = demo(&[]).unwrap();
        assert!((50..=60).contains(&args.seconds));
        assert_eq!((args.output, args.serve), (Output::Text, false));
        assert_eq!(demo(&["-o", "json"]).unwrap().output, Output::Json);
    }

    #[test]
    fn refuses_what_makes_no_sense_and_says_why() {
        for (bad, says) in [
            (&["--seconds", "1"][..], "2..=3600"),
            (&["--speed", "0"], "1..=30"),
            (&["--no-load"], "--serve"),
            (&["-o", "yaml"], "text, json"),
            (&["--sed", "1"], "--seed"),
        ] {
            let error = demo(bad).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
