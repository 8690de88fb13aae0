//! Work in flight at an endpoint.
//!
//! Our own work is exact: a ticket enters when it is booked, moves at its first token and leaves when it ends. Others'
//! work comes from the engine's report: whatever the report counts beyond what was ours at that moment. No timer frees
//! anything; a report that is too old merely does not count.

use smallvec::SmallVec;
use std::{collections::BTreeMap, time::Duration};
use tokio::time::Instant;

/// What an engine reports of itself (vLLM: a scrape of `/metrics`).
#[derive(Clone, Debug, PartialEq)]
pub struct LoadReport {
    /// When the answer arrived.
    pub at: Instant,
    /// Requests in running batches.
    pub running: u32,
    /// Requests waiting for admission.
    pub waiting: u32,
    /// Share of KV blocks in use by live requests, 0 to 1.
    pub kv_usage: f64,
    /// Prompt tokens computed since the engine started, without cached ones (`prompt_tokens_by_source_total{source="local_compute"}`).
    pub prefilled_tokens: Option<u64>,
    /// Seconds spent in prefill by all requests since the engine started, and their number.
    pub prefill_seconds: Option<(f64, u64)>,
    /// Preemptions since the engine started.
    pub preemptions: u64,
}

/// A request before its first token.
#[derive(Clone, Debug)]
pub struct Booked {
    /// Prompt tokens.
    pub tokens: u32,
    /// Of these, held by the endpoint or by a request ahead.
    pub cached: u32,
    /// Whether its first token will be seen.
    pub stream: bool,
    /// When it was booked.
    pub at: Instant,
    /// The TTFT that was predicted, seconds.
    pub expected: f64,
    /// KV tokens that it takes beside those which live requests hold already.
    pub takes: u32,
}

/// Everything in flight at one endpoint.
#[derive(Debug, Default)]
pub struct EndpointLoad {
    next: u64,
    /// Before their first token, in the order of booking.
    booked: BTreeMap<u64, Booked>,
    /// Past their first token: when that was, and the KV tokens that each took.
    running: BTreeMap<u64, (Instant, u32)>,
    /// Sum of the KV tokens above: what this proxy added to the endpoint's live KV.
    fresh: u64,
    report: Option<Seen>,
    /// Prefill seconds, their number and computed tokens, when last a request had its first token.
    prefilled: Option<(f64, u64, u64)>,
    /// Mean seconds from first token to end, of answers that completed.
    decode: Option<f64>,
    /// The last time a first token came, for the progress of what is at the head.
    progress: Option<Instant>,
}

/// The capacity of an endpoint, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// KV tokens.
    pub tokens: Option<u64>,
    /// Sequences that run at once.
    pub sequences: Option<u32>,
}

/// Work before its first token at one endpoint, as (uncached, cached, share left).
pub type Ahead = SmallVec<[(u32, u32, f64); 16]>;

/// What is in flight, at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadView {
    /// Our requests before their first token.
    pub booked: u32,
    /// Our requests past it.
    pub running: u32,
    /// Others' requests that wait, from a report that counts.
    pub others_waiting: u32,
    /// Others' requests that run.
    pub others_running: u32,
    /// The age of the report, if it counts.
    pub report_age: Option<Duration>,
    /// KV tokens in use by live requests, as a share of all, where known.
    pub kv_usage: Option<f64>,
    /// The same with what requests take that wait: above 1 where there is no room for all.
    pub kv_demand: Option<f64>,
}

/// What an engine computed between two reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EnginePrefill {
    /// Seconds that requests spent in prefill.
    pub seconds: f64,
    /// Tokens that were computed.
    pub tokens: u64,
    /// Requests.
    pub requests: u64,
}

/// A report, and what was ours at that moment.
#[derive(Clone, Debug)]
struct Seen {
    report: LoadReport,
    booked: u32,
    running: u32,
    fresh: u64,
    /// KV tokens that those of ours take which waited then.
    waiting: u64,
}

// === impl EndpointLoad ===

impl EndpointLoad {
    /// Adds a request. The number names it in the other calls.
    pub fn book(&mut self, booked: Booked) -> u64 {
        let id = self.next;
        self.next += 1;
        self.fresh += u64::from(booked.takes);
        self.booked.insert(id, booked);
        id
    }

    /// More of a booked request turns out to be computed. It never grows again.
    pub fn shrink(&mut self, id: u64, cached: u32) {
        if let Some(b) = self.booked.get_mut(&id) {
            b.cached = b.cached.max(cached.min(b.tokens.saturating_sub(1)));
        }
    }

    /// A request had its first token.
    pub fn first_token(&mut self, id: u64, now: Instant) {
        if let Some(b) = self.booked.remove(&id) {
            self.running.insert(id, (now, b.takes));
            self.progress = Some(now);
        }
    }

    /// A request ended, at whatever stage.
    pub fn end(&mut self, id: u64, now: Instant, complete: bool) {
        if let Some(b) = self.booked.remove(&id) {
            self.fresh = self.fresh.saturating_sub(u64::from(b.takes));
            self.progress = Some(now);
        } else if let Some((since, took)) = self.running.remove(&id) {
            self.fresh = self.fresh.saturating_sub(u64::from(took));
            if complete {
                let took = now.saturating_duration_since(since).as_secs_f64();
                self.decode = Some(self.decode.map_or(took, |mean| mean + 0.1 * (took - mean)));
            }
        }
    }

    /// Takes a report; says what the engine computed since the last one that did, where reports tell.
    pub fn report(&mut self, report: LoadReport) -> Option<EnginePrefill> {
        let since = self.prefill_of(&report);
        // First come, first served: those that wait are the last.
        let waiting = self.booked.values().rev().take(report.waiting as usize);
        self.report = Some(Seen {
            waiting: waiting.map(|b| u64::from(b.takes)).sum(),
            booked: self.booked.len() as u32,
            running: self.running.len() as u32,
            fresh: self.fresh,
            report,
        });
        since
    }

    /// Seconds count when a request has its first token, tokens perhaps while they are computed: only from one first token to
    /// the next do both speak of the same work.
    fn prefill_of(&mut self, report: &LoadReport) -> Option<EnginePrefill> {
        let (Some((seconds, n)), Some(tokens)) = (report.prefill_seconds, report.prefilled_tokens)
        else {
            self.prefilled = None;
            return None;
        };
        let now = (seconds, n, tokens);
        let Some((seconds0, n0, tokens0)) = self.prefilled else {
            self.prefilled = Some(now);
            return None;
        };
        let (Some(requests), Some(tokens)) = (n.checked_sub(n0), tokens.checked_sub(tokens0))
        else {
            // Another process counts.
            self.prefilled = Some(now);
            return None;
        };
        if requests == 0 {
            return None;
        }
        self.prefilled = Some(now);
        let seconds = seconds - seconds0;
        (seconds > 0.0 && seconds.is_finite() && tokens > 0).then_some(EnginePrefill {
            seconds,
            tokens,
            requests,
        })
    }

    /// Forgets the report: the process that sent it is gone or silent.
    pub fn forget_report(&mut self) {
        self.report = None;
    }

    /// Our requests, before and past their first token.
    pub fn counts(&self) -> (u32, u32) {
        (self.booked.len() as u32, self.running.len() as u32)
    }

    /// What is in flight. A report older than `max_age` does not count.
    pub fn view(&self, now: Instant, max_age: Duration, capacity: Capacity) -> LoadView {
        let mut view = LoadView::default();
        for b in self.booked.values() {
            if b.decodes_by_now(now) {
                view.running += 1;
            } else {
                view.booked += 1;
            }
        }
        view.running += self.running.len() as u32;
        let Some(seen) = &self.report else {
            return view;
        };
        let age = now.saturating_duration_since(seen.report.at);
        if age > max_age {
            return view;
        }
        // What the report counts beyond ours at that moment is others'; what waits and is not ours waits for others.
        let reported = seen.report.running.saturating_add(seen.report.waiting);
        let others = reported.saturating_sub(seen.booked + seen.running);
        view.others_waiting = others.min(seen.report.waiting.saturating_sub(seen.booked));
        view.others_running = others - view.others_waiting;
        view.report_age = Some(age);
        if seen.report.kv_usage.is_finite() {
            let total = capacity.tokens.filter(|t| *t > 0);
            let share = |tokens: f64| total.map_or(0.0, |t| tokens / t as f64);
            let since = self.fresh as f64 - seen.fresh as f64;
            let demand = seen.report.kv_usage + share(since + seen.waiting as f64);
            view.kv_demand = Some(demand.max(0.0));
            view.kv_usage = Some((seen.report.kv_usage + share(since)).clamp(0.0, 1.0));
        }
        view
    }

    /// Our work before its first token. The request at the head has been worked on since the one before it was done;
    /// that progress is estimated from its own prediction and never taken for the end.
    pub fn ahead(&self, now: Instant) -> Ahead {
        let mut head = true;
        self.booked
            .values()
            .filter(|b| !b.decodes_by_now(now))
            .map(|b| {
                let left = if head {
                    let since = self.progress.map_or(b.at, |p| p.max(b.at));
                    let done =
                        now.saturating_duration_since(since).as_secs_f64() / b.expected.max(1e-3);
                    (1.0 - done).clamp(0.1, 1.0)
                } else {
                    1.0
                };
                head = false;
                (b.tokens.saturating_sub(b.cached), b.cached, left)
            })
            .collect()
    }

    /// Tokens that some of our requests before their first token have to compute, and that all of them have to, but for the
    /// request `but`.
    pub fn work(&self, but: u64, some: &[u64]) -> (f64, f64) {
        let mut sums = (0.0, 0.0);
        for (id, b) in self.booked.iter().filter(|(id, _)| **id != but) {
            let tokens = f64::from(b.tokens.saturating_sub(b.cached));
            sums.1 += tokens;
            if some.contains(id) {
                sums.0 += tokens;
            }
        }
        sums
    }

    /// Seconds until a sequence slot and room for `tokens` more KV tokens are free, after those who wait already: that many
    /// running requests must end, evenly over the mean time that one runs.
    pub fn slot_wait(&self, view: &LoadView, tokens: u32, capacity: Capacity) -> f64 {
        let live = view.running + view.others_running;
        let all = live + view.booked + view.others_waiting;
        let mean = self.decode.unwrap_or(1.0);
        let mut wait = 0f64;
        if let Some(max) = capacity.sequences.filter(|m| *m > 0) {
            let must_end = (all + 1).saturating_sub(max);
            if must_end > 0 {
                wait = wait.max(mean * f64::from(must_end) / f64::from(max));
            }
        }
        if let (Some(total), Some(used), Some(demand)) = (
            capacity.tokens.filter(|t| *t > 0),
            view.kv_usage,
            view.kv_demand,
        ) {
            let total = total as f64;
            let missing = demand * total + f64::from(tokens) - total;
            if missing > 0.0 && live > 0 {
                let each = (used * total / f64::from(live)).max(1.0);
                wait = wait.max(mean * (missing / each).ceil() / f64::from(live));
            }
        }
        wait
    }
}

// === impl Booked ===

impl Booked {
    /// An answer that does not stream shows no first token. Once it should long have had one, it is taken to decode:
    /// it stays counted, but no longer as prefill ahead.
    fn decodes_by_now(&self, now: Instant) -> bool {
        !self.stream
            && now.saturating_duration_since(self.at).as_secs_f64() > 1.5 * self.expected.max(0.01)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAX_AGE: Duration = Duration::from_secs(3);

    fn booked(tokens: u32, cached: u32, at: Instant) -> Booked {
        Booked {
            tokens,
            cached,
            stream: true,
            at,
            expected: 1.0,
            takes: tokens.saturating_sub(cached),
        }
    }

    fn report(at: Instant, running: u32, waiting: u32) -> LoadReport {
        LoadReport {
            at,
            running,
            waiting,
            kv_usage: 0.5,
            prefilled_tokens: None,
            prefill_seconds: None,
            preemptions: 0,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn others_are_what_was_not_ours_at_the_report() {
        let now = Instant::now();
        let mut load = EndpointLoad::default();
        let a = load.book(booked(100, 0, now));
        let b = load.book(booked(100, 0, now));
        load.first_token(a, now);
        // Ours: one running, one booked. Seen: three running, four waiting.
        load.report(report(now, 3, 4));
        let view = load.view(now, MAX_AGE, Capacity::default());
        assert_eq!((view.others_waiting, view.others_running), (3, 2));
        // That ours end later changes nothing of theirs.
        load.end(a, now, true);
        load.end(b, now, true);
        let view = load.view(now, MAX_AGE, Capacity::default());
        assert_eq!((view.others_waiting, view.others_running), (3, 2));
        assert_eq!((view.booked, view.running), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_below_ours_is_nobody_else() {
        let now = Instant::now();
        let mut load = EndpointLoad::default();
        for _ in 0..9 {
            load.book(booked(10, 0, now));
        }
        load.report(report(now, 1, 1));
        let view = load.view(now, MAX_AGE, Capacity::default());
        assert_eq!((view.others_waiting, view.others_running), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_report_does_not_count_but_ours_do() {
        let now = Instant::now();
        let mut load = EndpointLoad::default();
        load.report(report(now, 9, 9));
        load.book(booked(10, 0, now));
        let view = load.view(now + MAX_AGE * 2, MAX_AGE, Capacity::default());
        assert_eq!(
            (view.booked, view.others_waiting, view.report_age),
            (1, 0, None)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn the_head_progresses_but_never_ends_by_itself() {
        let now = Instant::now();
        let mut load = EndpointLoad::default();
        load.book(booked(100, 20, now));
        load.book(booked(50, 0, now));
        assert_eq!(load.ahead(now)[..], [(80, 20, 1.0), (50, 0, 1.0)]);
        let half = load.ahead(now + Duration::from_millis(500));
        assert!((half[0].2 - 0.5).abs() < 1e-9 && half[1].2 == 1.0);
        let late = load.ahead(now + Duration::from_secs(3600));
        assert_eq!(late.len(), 2);
        assert!((late[0].2 - 0.1).abs() < 1e-9);
    }

    #[tokio::test(start_paused = true)]
    async fn work_is_told_apart() {
        let now = Instant::now();
        let mut load = EndpointLoad::default();
        let ids = [(100, 20), (50, 0), (30, 10)].map(|(n, c)| load.book(booked(n, c, now)));
        assert_eq!(load.work(ids[2], &[ids[0], ids[2]]), (80.0, 130.0));
        load.first_token(ids[0], now);
        assert_eq!(load.work(ids[2], &[ids[0], ids[2]]), (0.0, 50.0));
    }

    #[tokio::test(start_paused = true)]
    async fn events_shrink_a_booked_request_and_it_never_grows() {
        let now = Instant::now();
        let mut load = EndpointLoad::default();
        let id = load.book(booked(100, 0, now));
        load.shrink(id, 64);
        load.shrink(id, 32);
        assert_eq!(load.ahead(now)[..], [(36, 64, 1.0)]);
        load.shrink(id, 1000);
        assert_eq!(load.ahead(now)[..], [(1, 99, 1.0)]);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_that_do_not_stream_become_decodes_but_stay_counted() {
        let now = Instant::now();
        let mut load = EndpointLoad::default();
        load.book(Booked {
            stream: false,
            ..booked(100, 0, now)
        });
        let later = now + Duration::from_secs(2);
        assert_eq!(load.ahead(now).len(), 1);
        assert!(load.ahead(later).is_empty());
        let view = load.view(later, MAX_AGE, Capacity::default());
        assert_eq!((view.booked, view.running), (0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn full_slots_and_full_kv_cost_time() {
        let now = Instant::now();
        let mut load = EndpointLoad::default();
        let capacity = Capacity {
            tokens: Some(1000),
            sequences: Some(2),
        };
        let wait = |load: &EndpointLoad, tokens| {
            load.slot_wait(&load.view(now, MAX_AGE, capacity), tokens, capacity)
        };
        assert_eq!(wait(&load, 100), 0.0);
        for _ in 0..2 {
            let id = load.book(booked(10, 0, now));
            load.first_token(id, now);
        }
        assert!(wait(&load, 100) > 0.0, "both sequence slots are taken");
        let capacity = Capacity {
            sequences: None,
            ..capacity
        };
        let wait = |load: &EndpointLoad, tokens| {
            load.slot_wait(&load.view(now, MAX_AGE, capacity), tokens, capacity)
        };
        load.report(report(now, 2, 0));
        assert_eq!(wait(&load, 400), 0.0);
        assert!(wait(&load, 600) > 0.0, "half of the cache is in use");
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_room_comes_first() {
        let now = Instant::now();
        let capacity = Capacity {
            tokens: Some(1000),
            sequences: None,
        };
        let mut load = EndpointLoad::default();
        for _ in 0..2 {
            let id = load.book(booked(450, 0, now));
            load.first_token(id, now);
        }
        let wait = |load: &EndpointLoad| {
            let view = load.view(now, MAX_AGE, capacity);
            load.slot_wait(&view, 300, capacity)
        };
        let full = |running, waiting| LoadReport {
            kv_usage: 0.9,
            ..report(now, running, waiting)
        };
        load.report(full(2, 0));
        let alone = wait(&load);
        assert!(alone > 0.0);
        // Three of ours wait for room by the next report.
        for _ in 0..3 {
            load.book(booked(300, 0, now));
        }
        load.report(full(2, 3));
        let view = load.view(now, MAX_AGE, capacity);
        assert_eq!(view.kv_usage, Some(0.9));
        assert!(view.kv_demand.is_some_and(|d| (d - 1.8).abs() < 1e-9));
        assert!(wait(&load) > 2.0 * alone, "{} {alone}", wait(&load));
    }

    #[tokio::test(start_paused = true)]
    async fn reports_tell_what_the_engine_computed() {
        let now = Instant::now();
        let with = |tokens, seconds, n| LoadReport {
            prefilled_tokens: Some(tokens),
            prefill_seconds: Some((seconds, n)),
            ..report(now, 0, 0)
        };
        let mut load = EndpointLoad::default();
        assert_eq!(load.report(with(1000, 1.0, 3)), None);
        assert_eq!(
            load.report(with(5000, 3.0, 5)),
            Some(EnginePrefill {
                seconds: 2.0,
                tokens: 4000,
                requests: 2
            })
        );
        // Tokens of a long prompt, which had no first token yet, are told with it.
        assert_eq!(load.report(with(7000, 3.0, 5)), None);
        assert_eq!(
            load.report(with(9000, 5.0, 6)),
            Some(EnginePrefill {
                seconds: 2.0,
                tokens: 4000,
                requests: 1
            })
        );
        // Counters that went backwards: another process.
        assert_eq!(load.report(with(10, 0.1, 1)), None);
        assert_eq!(load.report(report(now, 0, 0)), None);
    }

    proptest! {
        /// Whatever happens, the counts are those of a literal list and end at zero.
        #[test]
        fn counts_are_exact(ops in prop::collection::vec((0u8..4, 0usize..8, 1u32..5000, 0u32..5000), 0..200)) {
            let rt = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
            rt.block_on(async {
                let now = Instant::now();
                let mut load = EndpointLoad::default();
                let mut live: Vec<(u64, bool, u32)> = Vec::new();
                for (op, which, tokens, cached) in ops {
                    match op {
                        0 => {
                            let b = booked(tokens, cached.min(tokens), now);
                            let computed = tokens - b.cached;
                            live.push((load.book(b), false, computed));
                        }
                        1 => if let Some(t) = live.get_mut(which) {
                            t.1 = true;
                            load.first_token(t.0, now);
                        },
                        2 => if which < live.len() {
                            let t = live.swap_remove(which);
                            load.end(t.0, now, true);
                            load.end(t.0, now, true);
                        },
                        _ => if let Some(t) = live.get(which) {
                            load.shrink(t.0, cached);
                        },
                    }
                    let running = live.iter().filter(|t| t.1).count() as u32;
                    assert_eq!(load.counts(), (live.len() as u32 - running, running));
                    assert_eq!(load.fresh, live.iter().map(|t| u64::from(t.2)).sum::<u64>());
                }
                for t in live {
                    load.end(t.0, now, false);
                }
                assert_eq!(load.counts(), (0, 0));
                assert_eq!(load.fresh, 0);
                assert!(load.ahead(now).is_empty());
            });
        }
    }
}
