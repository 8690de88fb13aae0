//! `overhead`: what a proxy costs per streamed request, beside haproxy and no proxy at all, in one run.
//!
//! Every arm is a process of its own in front of the same three engines, which answer at once: what is left is the
//! proxy. One keep-alive connection, chat bodies of about 2 KB that differ after a shared system prompt, 16 events each.
//! Rounds rotate the order of the arms. CPU is the difference of `/proc/PID/task/*/schedstat` over the requests less
//! what the same process burnt in an idle window of known length; it survives a noisy box, times do not.

mod client;
mod cpu;
mod engine;
mod peers;

pub use self::engine::serve as serve_engine;
use self::{
    client::Client,
    cpu::CpuClock,
    peers::{Arm, Engines},
};
use crate::report::{Report, Row, quantile};
use std::{path::PathBuf, time::Duration};

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Requests per arm and round.
    pub requests: usize,
    /// Rounds; the order of the arms rotates by one each.
    pub rounds: usize,
    /// A tokenizer directory in Hugging Face layout for the arm that tokenizes; without it that arm is left out.
    pub tokenizer: Option<PathBuf>,
}

/// What one arm measured.
#[derive(Debug, Default)]
struct Sample {
    ttft_us: Vec<f64>,
    total_us: Vec<f64>,
    cpu_us: Vec<f64>,
}

/// Runs the benchmark.
pub async fn run(options: &Options, report: &mut Report) -> Result<(), crate::Error> {
    let engines = Engines::start(3).await?;
    let mut arms = vec![Arm::direct(&engines)];
    match Arm::haproxy(&engines).await {
        Ok(arm) => arms.push(arm),
        Err(error) => report.note(format!("haproxy is left out: {error}")),
    }
    arms.push(Arm::forebay(&engines, None).await?);
    match &options.tokenizer {
        Some(dir) => arms.push(Arm::forebay(&engines, Some(dir)).await?),
        None => {
            report.note("the arm with a local tokenizer is left out: no --tokenizer DIR".into())
        }
    }

    let mut samples: Vec<Sample> = arms.iter().map(|_| Sample::default()).collect();
    let mut serial = 0u64;
    for arm in &arms {
        let mut client = Client::connect(arm.addr()).await?;
        for _ in 0..50 {
            serial += 1;
            client.chat(serial).await?;
        }
    }
    for round in 0..options.rounds {
        for i in 0..arms.len() {
            let at = (i + round) % arms.len();
            let arm = &arms[at];
            let mut client = Client::connect(arm.addr()).await?;
            client.chat(serial).await?;

            let idle = CpuClock::start(arm.pid());
            tokio::time::sleep(Duration::from_millis(500)).await;
            let idle_rate = idle.rate();

            let busy = CpuClock::start(arm.pid());
            for _ in 0..options.requests {
                serial += 1;
                let timing = client.chat(serial).await?;
                samples[at]
                    .ttft_us
                    .push(timing.first_token.as_secs_f64() * 1e6);
                samples[at].total_us.push(timing.total.as_secs_f64() * 1e6);
            }
            let (cpu, wall) = busy.stop();
            let net = (cpu.as_secs_f64() - idle_rate * wall.as_secs_f64()).max(0.0);
            samples[at].cpu_us.push(net * 1e6 / options.requests as f64);
        }
    }

    let direct_ttft = median(&mut samples[0].ttft_us.clone());
    let mut cpu_by_arm = Vec::new();
    for (arm, sample) in arms.iter().zip(&mut samples) {
        report
            .rows
            .push(Row::spread(arm.name(), "TTFT", "us", &mut sample.ttft_us));
        report.rows.push(Row::spread(
            arm.name(),
            "whole answer",
            "us",
            &mut sample.total_us,
        ));
        if arm.pid().is_some() {
            let added = median(&mut sample.ttft_us) - direct_ttft;
            report
                .rows
                .push(Row::point(arm.name(), "added TTFT, median", "us", added));
            cpu_by_arm.push((arm.name().to_string(), median(&mut sample.cpu_us)));
            report.rows.push(Row::spread(
                arm.name(),
                "CPU per request",
                "us",
                &mut sample.cpu_us,
            ));
            if let Some(rss) = arm.rss_mib() {
                report.rows.push(Row::point(arm.name(), "RSS", "MiB", rss));
            }
        }
    }
    // A gate against gross regressions, not a target: a proxy that tokenizes should stay within a few haproxies.
    if let Some((_, haproxy)) = cpu_by_arm.iter().find(|(n, _)| n == "haproxy") {
        for (name, cpu) in cpu_by_arm.iter().filter(|(n, _)| n.starts_with("forebay")) {
            let what = format!("{name}: CPU per request, in haproxies");
            report.at_most(&what, cpu / haproxy, 8.0);
        }
    }
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    quantile(values, 0.5)
}
