//! The `forebay` command. What it prints on standard output is its result; progress and errors go to standard error.

mod args;
mod demo;
mod signals;
mod term;

use args::{Cli, Command};
use clap::Parser;
use forebay_proxy::config::EXIT_USAGE;
use std::process::ExitCode;
use tokio::runtime::Builder;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are errors to clap, and none to anybody else.
            let code = if error.use_stderr() { EXIT_USAGE } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let runtime = match Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format_args!("cannot start threads: {error}"), 1),
    };
    let Command::Demo(args) = cli.command;
    let code = runtime.block_on(async {
        tokio::select! {
            biased;
            code = signals::stopped() => ExitCode::from(code),
            ran = demo::run(&args) => match ran {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => fail(&error, error.code()),
            },
        }
    });
    // Whatever is still open belongs to nobody any more.
    runtime.shutdown_background();
    code
}

fn fail(error: &dyn std::fmt::Display, code: u8) -> ExitCode {
    eprintln!("forebay: {error}");
    ExitCode::from(code)
}
