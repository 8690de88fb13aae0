//! The `forebay-proxy` command. What it prints on standard output is for scripts; logs go to standard error.

use clap::Parser;
use forebay_proxy::{
    app::{App, AppParams, LoadTokenizer, StartError, local_tokenizers},
    cli::{Cli, Command, DecisionsArgs, ServeArgs, decisions},
    config::{Config, EXIT_USAGE},
    server::OpenFiles,
    telemetry::{log, panics::Panics},
};
use std::{io, path::Path, process::ExitCode};
use tokio::{
    runtime::{Builder, Runtime},
    signal::unix::{SignalKind, signal},
};

/// The exit code after an internal failure: `EX_SOFTWARE` of sysexits(3).
const EXIT_SOFTWARE: u8 = 70;

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
    match cli.command {
        Some(Command::Decisions(args)) => print_decisions(&args),
        None => serve(&cli.serve),
    }
}

fn print_decisions(args: &DecisionsArgs) -> ExitCode {
    let runtime = match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(error, 1),
    };
    match runtime.block_on(decisions::run(args, &mut io::stdout().lock())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(decisions::DecisionsError::Print(error))
            if error.kind() == io::ErrorKind::BrokenPipe =>
        {
            ExitCode::SUCCESS
        }
        Err(error) => fail(error, 1),
    }
}

fn serve(args: &ServeArgs) -> ExitCode {
    // clap requires it.
    let Some(file) = args.pool.as_deref() else {
        return fail("--pool is missing", EXIT_USAGE);
    };
    let log = match log::init(&args.log_level, args.log_format) {
        Ok(log) => log,
        Err(error) => return fail(error, EXIT_USAGE),
    };
    let config = match Config::load(file) {
        Ok(config) => config,
        Err(error) => return fail(error, EXIT_USAGE),
    };
    let seed = random();
    let loader = local_tokenizers(config.seed.unwrap_or(seed));
    if args.check {
        return check(file, &config, &loader);
    }
    let panics = Panics::default();
    panics.install();
    let (workers, admin) = match runtimes(args.workers) {
        Ok(runtimes) => runtimes,
        Err(error) => return fail(error, EXIT_SOFTWARE),
    };
    let admin_runtime = admin.handle().clone();
    // A thread of its own, that does nothing else for as long as the process lives.
    std::thread::Builder::new()
        .name("admin".to_owned())
        .spawn(move || admin.block_on(std::future::pending::<()>()))
        .map_or_else(
            |error| fail(error, EXIT_SOFTWARE),
            |_| {
                let params = AppParams {
                    config,
                    file: Some(file.to_owned()),
                    loader,
                    admin_runtime,
                    log,
                    panics,
                    files: OpenFiles::raise(),
                    seed,
                };
                let code = workers.block_on(run(params, args.ready_file.as_deref()));
                // Blocking jobs are not waited for: they work for requests that are gone.
                workers.shutdown_background();
                code
            },
        )
}

/// Checks what a start would check.
fn check(file: &Path, config: &Config, loader: &LoadTokenizer) -> ExitCode {
    let mut code = 0;
    for model in config.models.iter().filter(|m| m.tokenizer.is_some()) {
        if let Err(error) = loader(model) {
            eprintln!("{}: model `{}`: {error}", file.display(), model.name);
            code = EXIT_USAGE;
        }
    }
    if code == 0 {
        println!("{}: ok", file.display());
    }
    ExitCode::from(code)
}

/// One for clients, one for everything else.
fn runtimes(workers: Option<u16>) -> io::Result<(Runtime, Runtime)> {
    let mut builder = Builder::new_multi_thread();
    // Without a number tokio asks the standard library, which knows of cgroups and affinity.
    if let Some(n) = workers {
        builder.worker_threads(n.into());
    }
    let workers = builder.thread_name("proxy").enable_all().build()?;
    let admin = Builder::new_current_thread()
        .thread_name("admin")
        .enable_all()
        .build()?;
    Ok((workers, admin))
}

/// A number that nobody outside can guess: the standard library seeds its hashers from the system's randomness.
fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

async fn run(params: AppParams, ready_file: Option<&Path>) -> ExitCode {
    let (mut terminate, mut interrupt, mut hangup) = match (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
        signal(SignalKind::hangup()),
    ) {
        (Ok(t), Ok(i), Ok(h)) => (t, i, h),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
            return fail(error, EXIT_SOFTWARE);
        }
    };
    let started = tokio::select! {
        started = App::start(params) => started,
        // Nothing is open yet.
        _ = terminate.recv() => return ExitCode::SUCCESS,
        _ = interrupt.recv() => return ExitCode::SUCCESS,
    };
    let mut app = match started {
        Ok(app) => app,
        Err(error @ StartError::Tokenizer(_)) => return fail(error, EXIT_USAGE),
        Err(error) => return fail(error, 1),
    };
    println!("listening on http://{}", app.listen());
    println!("admin on http://{}", app.admin());
    if let Some(file) = ready_file
        && let Err(error) = announce(file, &app)
    {
        return fail(format_args!("{}: {error}", file.display()), 1);
    }
    loop {
        enum Event {
            Stop(&'static str),
            Reload,
        }
        let event = tokio::select! {
            stopped = app.stopped() => {
                return match stopped {
                    Ok(drained) => {
                        tracing::info!(cut = drained.cut, "Stopped");
                        ExitCode::SUCCESS
                    }
                    Err(died) => fail(died, EXIT_SOFTWARE),
                };
            }
            _ = terminate.recv() => Event::Stop("SIGTERM"),
            _ = interrupt.recv() => Event::Stop("SIGINT"),
            _ = hangup.recv() => Event::Reload,
        };
        match event {
            Event::Stop(signal) => {
                tracing::info!(signal, "Stopping");
                app.stop();
            }
            Event::Reload => app.reload(),
        }
    }
}

/// Writes the bound addresses where scripts wait for them: all at once, so that nobody reads half of it.
fn announce(file: &Path, app: &App) -> io::Result<()> {
    let text = serde_json::json!({
        "listen": format!("http://{}", app.listen()),
        "admin": format!("http://{}", app.admin()),
    });
    let mut partial = file.as_os_str().to_owned();
    partial.push(".partial");
    std::fs::write(&partial, format!("{text}\n"))?;
    std::fs::rename(&partial, file)
}

fn fail(error: impl std::fmt::Display, code: u8) -> ExitCode {
    eprintln!("forebay-proxy: {error}");
    ExitCode::from(code)
}
