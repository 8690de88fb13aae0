//! Two engines and a gateway to play with, and what the gateway decides, live.

use anyhow::Result;
use forebay_integration::{
    engine::{Engine, EngineSpec, MODEL, Profile},
    gateway::{Decision, Gateway, GatewaySpec},
    paths::Paths,
};
use std::time::Duration;
use tokio::time::sleep;

const POLL: Duration = Duration::from_millis(250);
const AT_ONCE: usize = 100;

/// Runs until Ctrl-C; then everything that was started is stopped.
pub(crate) async fn run(paths: Paths) -> Result<()> {
    tokio::select! {
        result = serve(&paths) => result,
        _ = tokio::signal::ctrl_c() => {
            println!("\nstopping the gateway and the engines");
            Ok(())
        }
    }
}

async fn serve(paths: &Paths) -> Result<()> {
    println!(
        "starting two vLLM engines on the CPU (about a minute; logs in {})",
        paths.run.display()
    );
    let engine = |name| Engine::start(paths, name, EngineSpec::new(Profile::A));
    let engines = [engine("engine-1")?, engine("engine-2")?];
    tokio::try_join!(engines[0].ready(), engines[1].ready())?;
    let gateway = Gateway::started(paths, &GatewaySpec::new(&engines)).await?;
    println!(
        "
base_url: {base}     (any OpenAI client; model {MODEL}; no API key needed)
admin:    http://{admin}   (/endpoints, /decisions, /metrics)
engines:  {one}, {two}

Try it, from another terminal:

  curl -N {base}/chat/completions -H 'content-type: application/json' \\
    -d '{{\"model\": \"{MODEL}\", \"stream\": true, \"max_tokens\": 32, \"messages\": [{{\"role\": \"user\", \"content\": \"Hello\"}}]}}'

The model's weights are random, so it talks nonsense; routing is real. Decisions follow; Ctrl-C ends it.
",
        base = gateway.base_url(),
        admin = gateway.admin_authority(),
        one = engines[0].authority(),
        two = engines[1].authority(),
    );
    let mut seen = None;
    loop {
        for decision in gateway.decisions(AT_ONCE).await? {
            if seen.is_none_or(|seen| decision.id() > seen) {
                seen = Some(decision.id());
                println!("{}", line(&decision));
            }
        }
        gateway.check().await?;
        sleep(POLL).await;
    }
}

/// One decision on one line: the chosen endpoint first.
fn line(decision: &Decision) -> String {
    let chosen = decision.chosen().map(|c| c.authority().to_owned());
    let chosen = chosen.unwrap_or_default();
    let candidates: Vec<_> = decision
        .candidates()
        .iter()
        .map(|c| {
            format!(
                "{}{} cached {} ttft {:.0} ms",
                if c.authority() == chosen { "→ " } else { "" },
                c.authority(),
                c.cached().unwrap_or(0),
                c.ttft().unwrap_or_default().as_secs_f64() * 1e3,
            )
        })
        .collect();
    format!(
        "#{} {} tokens, {}: {}",
        decision.id(),
        decision.tokens().unwrap_or(0),
        decision.rung(),
        candidates.join(" | ")
    )
}
