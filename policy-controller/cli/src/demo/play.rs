//! Sends the published load to one arm, as fast as its pods are.

use super::{
    board::{Arm, Board},
    client,
    clock::Clock,
    words,
};
use forebay_sim::load::{Gaps, Pattern, Script, Windows, Workload};
use futures::{StreamExt, stream::FuturesUnordered};
use std::net::SocketAddr;
use tokio::time::sleep_until;

/// One run of one workload. Times are pod seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Play {
    /// What prompts are like.
    pub(super) workload: Workload,
    /// Its phases.
    pub(super) windows: Windows,
    /// Of prompts and arrivals.
    pub(super) seed: u64,
}

// === impl Play ===

impl Play {
    /// A run of so many pod seconds, with phases as long in proportion as those of the published latency runs.
    pub(super) fn new(workload: Workload, seconds: f64, seed: u64) -> Self {
        let published = Windows::LATENCY;
        let part = |of: f64| seconds * of / published.end();
        Self {
            workload,
            windows: Windows {
                warmup: part(published.warmup),
                measure: part(published.measure),
                cooldown: part(published.cooldown),
            },
            seed,
        }
    }

    /// Requests per second: the rate that fits the published latencies best.
    pub(super) fn rate(&self) -> f64 {
        self.workload.rate(Gaps::Poisson)
    }

    /// The name of a request of this run, by which the gateway's decision is found again.
    pub(super) fn name(&self, id: u64) -> String {
        format!("demo-{}-{id}", self.workload.name())
    }

    /// The number of a request with such a name.
    pub(super) fn number(&self, name: &str) -> Option<usize> {
        let rest = name.strip_prefix("demo-")?;
        rest.strip_prefix(self.workload.name())?
            .strip_prefix('-')?
            .parse()
            .ok()
    }

    /// Sends everything until the end, when what is still open is cancelled.
    pub(super) async fn run(&self, arm: Arm, server: SocketAddr, clock: Clock, board: &Board) {
        let pattern = Pattern::Open {
            rate: self.rate(),
            gaps: Gaps::Poisson,
        };
        let mut script = Script::new(self.workload, pattern, self.windows, self.seed);
        let mut open = FuturesUnordered::new();
        let end = self.windows.end();
        loop {
            let due = script.due().unwrap_or(end);
            tokio::select! {
                biased;
                Some((id, asked)) = open.next(), if !open.is_empty() => {
                    let well = match asked {
                        Ok(usage) => {
                            board.note(arm, id, |s| s.usage = Some(usage));
                            true
                        }
                        Err(error) => {
                            let error: client::AskError = error;
                            board.note(arm, id, |s| s.failed = Some(error.to_string()));
                            false
                        }
                    };
                    script.ended(id, clock.now(), well);
                }
                () = sleep_until(clock.when(due.min(end))) => {
                    if clock.now() >= end {
                        return;
                    }
                    let Some(sent) = script.send() else { continue };
                    board.sent(arm, clock.now());
                    let (id, name) = (sent.id, self.name(sent.id));
                    open.push(async move {
                        let body = words::body(&sent);
                        let first = |seconds| {
                            board.note(arm, id, |s| s.ttft = Some(clock.scaled(seconds)));
                        };
                        (id, client::ask(server, &name, body, first).await)
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_keep_their_proportions() {
        let play = Play::new(Workload::Shared, 690.0, 1);
        let w = play.windows;
        assert_eq!((w.warmup, w.measure, w.cooldown), (120.0, 480.0, 90.0));
        assert_eq!(play.name(7), "demo-shared-7");
        assert_eq!(play.number("demo-shared-7"), Some(7));
        assert_eq!(play.number("demo-multiturn-7"), None);
    }

    #[tokio::test]
    async fn failures_are_counted_and_the_run_ends_in_time() {
        let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
        let board = Board::default();
        let clock = Clock::start(100.0);
        let play = Play::new(Workload::Shared, 60.0, 3);
        play.run(Arm::Service, nobody, clock, &board).await;
        let samples = board.samples(Arm::Service);
        assert!((3..40).contains(&samples.len()), "{}", samples.len());
        assert!(samples[0].failed.as_ref().unwrap().contains("connection"));
        assert!((60.0..120.0).contains(&clock.now()), "{}", clock.now());
        assert!(board.samples(Arm::Forebay).is_empty());
    }
}
