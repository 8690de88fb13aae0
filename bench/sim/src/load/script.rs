//! The client: what it sends next, given what has ended.

use super::{
    Arrivals, Pattern, Windows, Workload,
    text::{Chat, Writer},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{
    cmp::Ordering,
    collections::{BinaryHeap, HashMap, VecDeque},
};

/// The longest that a client of a closed loop takes from one answer to the next request, and to its first one: it
/// writes 88 kB of JSON between the two. Without it streams would run in step, which no real ones do.
const BETWEEN: f64 = 0.1;

/// Sends the requests of one run.
#[derive(Debug)]
pub struct Script {
    writer: Writer,
    workload: Workload,
    end: f64,
    /// Requests sent so far.
    sent: u64,
    /// Prompts and conversations begun so far.
    begun: u64,
    /// Chats in flight, by request.
    open: HashMap<u64, (u32, Chat)>,
    clock: Clock,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Sent {
    /// Counts up from 0 in the order of sending.
    pub id: u64,
    /// What is asked.
    pub chat: Chat,
    /// Tokens of the answer.
    pub output: u32,
}

#[derive(Debug)]
enum Clock {
    Open {
        arrivals: Arrivals,
        next: f64,
        /// Whose turn it is.
        worker: u32,
        /// Of each worker, conversations whose last turn has ended.
        ready: Vec<VecDeque<Chat>>,
    },
    Closed {
        /// What starts as soon as its client is ready.
        due: BinaryHeap<Next>,
        rng: StdRng,
    },
}

/// The next request of a stream: the next turn of its conversation, or a new one.
#[derive(Debug)]
struct Next {
    at: f64,
    stream: u32,
    chat: Option<Chat>,
}

// === impl Script ===

impl Script {
    /// The requests of one seed.
    pub fn new(workload: Workload, pattern: Pattern, windows: Windows, seed: u64) -> Self {
        let clock = match pattern {
            Pattern::Open { rate, gaps } => {
                let mut arrivals = Arrivals::new(rate, gaps, seed ^ 0x6172_7269_7665);
                let workers = gaps.workers();
                Clock::Open {
                    next: arrivals.next().unwrap_or(f64::INFINITY),
                    arrivals,
                    worker: 0,
                    ready: (0..workers).map(|_| VecDeque::new()).collect(),
                }
            }
            Pattern::Closed { streams } => {
                let mut rng = StdRng::seed_from_u64(seed ^ 0x636c_6f73_6564);
                let first = |stream| Next {
                    at: rng.random_range(0.0..BETWEEN),
                    stream,
                    chat: None,
                };
                Clock::Closed {
                    due: (0..streams).map(first).collect(),
                    rng,
                }
            }
        };
        Self {
            writer: Writer::new(workload, seed),
            workload,
            end: windows.end(),
            sent: 0,
            begun: 0,
            open: HashMap::new(),
            clock,
        }
    }

    /// When the next request is due, if that is known and before the end.
    pub fn due(&self) -> Option<f64> {
        let at = match &self.clock {
            Clock::Open { next, .. } => *next,
            Clock::Closed { due, .. } => due.peek()?.at,
        };
        (at < self.end).then_some(at)
    }

    /// The request that is due.
    pub fn send(&mut self) -> Option<Sent> {
        self.due()?;
        let (owner, chat) = match &mut self.clock {
            Clock::Open {
                arrivals,
                next,
                worker,
                ready,
            } => {
                let owner = *worker;
                *worker = (*worker + 1) % (ready.len().max(1) as u32);
                *next = arrivals.next().unwrap_or(f64::INFINITY);
                (
                    owner,
                    ready.get_mut(owner as usize).and_then(VecDeque::pop_front),
                )
            }
            Clock::Closed { due, .. } => {
                let next = due.pop()?;
                (next.stream, next.chat)
            }
        };
        let chat = chat.unwrap_or_else(|| {
            self.begun += 1;
            self.writer.first(self.begun - 1)
        });
        let sent = Sent {
            id: self.sent,
            chat,
            output: self.workload.output(),
        };
        self.sent += 1;
        self.open.insert(sent.id, (owner, sent.chat.clone()));
        Some(sent)
    }

    /// An answer ended. After a failure the rest of its conversation is given up.
    pub fn ended(&mut self, id: u64, at: f64, well: bool) {
        let Some((owner, chat)) = self.open.remove(&id) else {
            return;
        };
        let next = well.then(|| self.writer.next(&chat)).flatten();
        match &mut self.clock {
            Clock::Open { ready, .. } => {
                if let (Some(next), Some(ready)) = (next, ready.get_mut(owner as usize)) {
                    ready.push_back(next);
                }
            }
            Clock::Closed { due, rng } => due.push(Next {
                at: at + rng.random_range(0.0..BETWEEN),
                stream: owner,
                chat: next,
            }),
        }
    }
}

// === impl Next ===

/// The earliest is the greatest, since heaps give those first.
impl Ord for Next {
    fn cmp(&self, other: &Self) -> Ordering {
        let at = other.at.total_cmp(&self.at);
        at.then(other.stream.cmp(&self.stream))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Next {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Next {}

#[cfg(test)]
mod tests {
    use super::super::Gaps;
    use super::*;

    /// Sends everything; each answer takes `took` seconds. (time, conversation, turn) of each request.
    fn run(workload: Workload, pattern: Pattern, took: f64) -> Vec<(f64, u64, u32)> {
        let mut script = Script::new(workload, pattern, Windows::CAPACITY, 3);
        let mut open: VecDeque<(f64, u64)> = VecDeque::new();
        let mut all = Vec::new();
        loop {
            let due = script.due();
            match (due, open.front().copied()) {
                (None, None) => return all,
                (due, Some((at, id))) if due.is_none_or(|due| at <= due) => {
                    open.pop_front();
                    script.ended(id, at, true);
                }
                (Some(at), _) => {
                    let sent = script.send().expect("it is due");
                    all.push((at, sent.chat.number, sent.chat.turn));
                    open.push_back((at + took, sent.id));
                }
                (None, Some(_)) => unreachable!("covered above"),
            }
        }
    }

    #[test]
    fn a_closed_loop_keeps_its_streams_busy() {
        let all = run(Workload::Shared, Pattern::Closed { streams: 4 }, 10.0);
        assert!(all[..4].iter().all(|r| r.0 < BETWEEN));
        // 300 s of runs of 10 s on each of 4 streams, with little between.
        assert_eq!(all.len(), 4 * 30);
        assert!(all.windows(2).all(|w| w[1].1 == w[0].1 + 1));
    }

    #[test]
    fn a_stream_keeps_its_conversation() {
        let all = run(Workload::Multiturn, Pattern::Closed { streams: 2 }, 10.0);
        let first: Vec<u32> = all.iter().filter(|r| r.1 == 0).map(|r| r.2).collect();
        assert_eq!(first, [0, 1, 2, 3, 4, 5, 6, 7]);
        let begun: Vec<f64> = all.iter().filter(|r| r.2 == 0).map(|r| r.0).collect();
        for (at, expected) in begun.iter().zip([0.0, 0.0, 80.0, 80.0]) {
            assert!((at - expected).abs() < 8.0 * BETWEEN, "{begun:?}");
        }
    }

    #[test]
    fn slow_answers_do_not_delay_an_open_loop() {
        let pattern = Pattern::Open {
            rate: 0.2,
            gaps: Gaps::Poisson,
        };
        let quick = run(Workload::Control, pattern, 1.0);
        let slow = run(Workload::Control, pattern, 100.0);
        assert_eq!(quick, slow);
        assert!((40..80).contains(&quick.len()), "{}", quick.len());
    }

    #[test]
    fn open_conversations_go_on_at_their_workers_arrivals() {
        let pattern = |gaps| Pattern::Open { rate: 0.5, gaps };
        // One worker: the next arrival belongs to the conversation that has just ended.
        let one = run(Workload::Multiturn, pattern(Gaps::Poisson), 0.1);
        assert_eq!(
            one[..3].iter().map(|r| (r.1, r.2)).collect::<Vec<_>>(),
            [(0, 0), (0, 1), (0, 2)]
        );
        // Ten: ten conversations in step.
        let ten = run(Workload::Multiturn, pattern(Gaps::Tens), 0.1);
        assert!(ten[..10].iter().all(|r| r.2 == 0));
        assert!(ten[10..20].iter().all(|r| r.2 == 1));
    }

    #[test]
    fn a_failure_ends_its_conversation() {
        let mut script = Script::new(
            Workload::Multiturn,
            Pattern::Closed { streams: 1 },
            Windows::CAPACITY,
            1,
        );
        let first = script.send().expect("due at once");
        script.ended(first.id, 5.0, false);
        let next = script.send().expect("the stream goes on");
        assert_eq!((next.chat.number, next.chat.turn), (1, 0));
        assert!(script.due().is_none(), "one at a time");
    }
}
