//! `forebay demo`: the gateway at work on any machine. Three simulated pods behind the real gateway, three others behind
//! random choice, the published experiment's load on both at once, over real sockets and some times faster than real.

mod board;
mod client;
mod clock;
mod explain;
mod figures;
mod play;
mod report;
mod service;
mod show;
mod stage;
mod tokenizer;
mod words;

use self::{
    board::{Arm, Board},
    clock::Clock,
    explain::Explained,
    play::Play,
    report::{Outcome, Report, Serving},
    show::Progress,
    stage::{KIND, Stage, StageParams},
    words::MODEL,
};
use crate::{
    EXIT_USAGE,
    args::{DemoArgs, Output},
    term::{Line, Look, Screen, Tone, wrap},
};
use forebay_proxy::{
    app::StartError,
    telemetry::log::{self, Format, LogHandle},
};
use forebay_sim::{SpecError, load::Workload};
use std::{
    collections::BTreeMap,
    future::pending,
    io::{self, Write},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval},
};
use tower_ttft::{pool::DecisionRecord, prompt::LoadError};

/// What is sent, one after the other.
const WORKLOADS: [Workload; 2] = [Workload::Shared, Workload::Multiturn];
/// Between two drawings of the display.
const DRAW: Duration = Duration::from_millis(200);
/// Between two plain lines where nothing can be drawn.
const SAY: Duration = Duration::from_secs(7);

/// Why there is nothing to see.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DemoError {
    /// The port is taken, or not for us.
    #[error("port {port}: {source}; give another with --port, or none for a free one")]
    Port {
        /// Which.
        port: u16,
        /// Why.
        source: io::Error,
    },
    /// No socket can be opened.
    #[error(
        "cannot listen on 127.0.0.1: {0}; does this machine have a loopback interface, and files to spare (ulimit -n)?"
    )]
    Listen(#[source] io::Error),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}; does this user have processes to spare (ulimit -u)?")]
    Threads(#[source] io::Error),
    /// A directory cannot be written to.
    #[error("{}: {source}; set TMPDIR to a directory that can be written to", dir.display())]
    Files {
        /// Which.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The gateway does not start.
    #[error("the gateway: {0}")]
    Gateway(#[source] StartError),
    /// The gateway does not find its pods.
    #[error(
        "the gateway did not find its pods in time; is this machine very busy? FOREBAY_LOG=info shows what it does"
    )]
    NotReady,
    /// The tokenizer is broken.
    #[error("the pods' tokenizer: {0}; this is a defect, please report it")]
    Tokenizer(#[from] LoadError),
    /// The pods are broken.
    #[error("{0}; this is a defect, please report it")]
    Spec(#[from] SpecError),
    /// The log filter is wrong.
    #[error("{0}")]
    Log(tower_ttft::Error),
    /// The result cannot be printed.
    #[error("cannot print: {0}")]
    Print(#[from] io::Error),
    /// A part of the demo died.
    #[error("the load stopped unexpectedly; this is a defect, please report it")]
    Died,
}

// === impl DemoError ===

impl DemoError {
    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Log(_) => EXIT_USAGE,
            _ => 1,
        }
    }
}

/// Shows it.
pub(crate) async fn run(args: &DemoArgs) -> Result<(), DemoError> {
    let log = match &args.log_level {
        Some(filter) => log::init(filter, Format::Plain).map_err(DemoError::Log)?,
        None => LogHandle::detached(),
    };
    let speed = f64::from(args.speed);
    let stage = Stage::start(StageParams {
        speed,
        seed: args.seed,
        port: args.port,
        log,
    });
    let stage = stage.await?;
    let (mut workloads, mut decision) = (Vec::new(), None);
    if !args.no_load {
        let mut screen = Screen::new(io::stderr(), Look::stderr);
        let text = format!(
            "3 simulated pods behind forebay, 3 behind random choice; {} s of load, {} times faster than real",
            args.seconds, args.speed
        );
        for line in wrap(&text, screen.look().width) {
            screen.say(&Line::new(Tone::Faint, line));
        }
        let half = Duration::from_secs(args.seconds.into()) / 2;
        for (i, workload) in WORKLOADS.into_iter().enumerate() {
            let rest = half * (WORKLOADS.len() - 1 - i) as u32;
            let play = Play::new(workload, speed * half.as_secs_f64(), args.seed);
            let clock = Clock::start(speed);
            let board = perform(&stage, play, clock, rest, &mut screen).await?;
            let records = decisions(&stage, &play);
            workloads.push(Outcome::of(&play, &board, rungs(&records)));
            if decision.is_none() {
                decision = explain(&stage, &play, &records, clock, &board);
            }
        }
        screen.clear();
    }
    let serving = args.serve.then(|| Serving {
        base_url: format!("http://{}/v1", stage.address(Arm::Forebay)),
        model: MODEL,
        admin: format!("http://{}", stage.admin()),
    });
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        seed: args.seed,
        speed: args.speed,
        seconds: if args.no_load { 0 } else { args.seconds },
        pod: KIND,
        workloads,
        decision,
        serving,
    };
    print(&report, args.output)?;
    if args.serve {
        // Until a signal ends everything.
        pending::<()>().await;
    }
    stage.stop().await
}

/// Sends one workload to both arms at once and shows how it goes. `rest` is what comes after it.
async fn perform(
    stage: &Stage,
    play: Play,
    clock: Clock,
    rest: Duration,
    screen: &mut Screen<impl Write, impl Fn() -> Look>,
) -> Result<Arc<Board>, DemoError> {
    let board = Arc::new(Board::default());
    let mut arms = JoinSet::new();
    for arm in Arm::ALL {
        let (board, server) = (board.clone(), stage.address(arm));
        arms.spawn(async move { play.run(arm, server, clock, &board).await });
    }
    let mut tick = interval(DRAW);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut said = Instant::now();
    loop {
        tokio::select! {
            biased;
            ended = arms.join_next() => match ended {
                Some(Ok(())) => {}
                Some(Err(_)) => return Err(DemoError::Died),
                None => break,
            },
            _ = tick.tick() => {}
        }
        let (now, end) = (Instant::now(), clock.when(play.windows.end()));
        let progress = Progress {
            play: &play,
            share: (clock.now() / play.windows.end()).min(1.0),
            left: end.saturating_duration_since(now) + rest,
        };
        let look = screen.look();
        if look.live {
            screen.draw(progress.lines(&board, look.width));
        } else if now.saturating_duration_since(said) >= SAY || arms.is_empty() {
            said = now;
            screen.say(&progress.plain(&board));
        }
    }
    Ok(board)
}

/// The gateway's decisions on the requests of a run.
fn decisions(stage: &Stage, play: &Play) -> Vec<DecisionRecord> {
    let mut records = stage.decisions();
    records.retain(|r| {
        let id = r.decision.request_id.as_deref();
        id.is_some_and(|id| play.number(id).is_some())
    });
    records
}

fn rungs(records: &[DecisionRecord]) -> BTreeMap<&'static str, usize> {
    let mut rungs = BTreeMap::new();
    for r in records {
        *rungs.entry(r.decision.rung.name()).or_default() += 1;
    }
    rungs
}

fn explain(
    stage: &Stage,
    play: &Play,
    records: &[DecisionRecord],
    clock: Clock,
    board: &Board,
) -> Option<Explained> {
    let mut explained = Explained::pick(records, clock, |address| stage.pod(address))?;
    let samples = board.samples(Arm::Forebay);
    let sample = play.number(&explained.request).and_then(|n| samples.get(n));
    explained.ttft_client = sample.and_then(|s| s.ttft);
    Some(explained)
}

fn print(report: &Report, output: Output) -> Result<(), DemoError> {
    let look = Look::stdout();
    let text = match output {
        Output::Json => serde_json::to_string_pretty(report).map_err(io::Error::other)? + "\n",
        Output::Text => {
            let lines = report.lines(look.width);
            lines.iter().map(|l| l.render(look.color) + "\n").collect()
        }
    };
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => Ok(printed?),
    }
}
