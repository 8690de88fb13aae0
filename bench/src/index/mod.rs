//! `index`: what the prefix index costs, in time and memory, on a trace of many engines; and what lookups cost beside
//! a writer.

mod arms;
mod trace;

use self::{
    arms::{Arm, Flat, Smg, Strata, chain, removed, stored},
    trace::{Dice, Shape, Step, Trace},
};
use crate::{
    Error,
    report::{Check, Report, Row, quantile},
};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tokio::time::{Duration, Instant};
use tower_ttft::{
    chain::{Chain, ChainKind},
    events::KvEvent,
    index::{IndexStats, Matches},
};

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// A smaller trace.
    pub quick: bool,
    /// Also run other indexes on it.
    pub peers: bool,
    /// Bytes that the process has allocated now.
    pub allocated: fn() -> usize,
}

/// What one arm measured.
#[derive(Default)]
struct Sample {
    store: Clock,
    remove: Clock,
    find_us: Vec<f64>,
    asked: usize,
    /// Every engine's depth in every tenth lookup, to compare arms.
    depths: Vec<u32>,
}

/// Time spent on blocks. Steps during which the machine plainly did something else are left out: they took more than
/// 50 us and 5 us per block.
#[derive(Default)]
struct Clock {
    seconds: f64,
    blocks: usize,
    left_out: usize,
}

/// A rate of block operations per second for the writer; none is as fast as it can.
type Rate = Option<f64>;

/// Runs the benchmark.
pub fn run(options: &Options, report: &mut Report) -> Result<(), Error> {
    let shape = Shape {
        engines: 32,
        blocks: if options.quick { 10_000 } else { 50_000 },
        requests: if options.quick { 5_000 } else { 20_000 },
        systems: 40,
        stray: 0.2,
    };
    report.versions.push(("kv-index".into(), "2.0.0".into()));
    let trace = Trace::generate(shape, 42);
    report.note(format!(
        "{} engines x {} blocks of 16, {} requests, {} stores, {} removals; times are of the steady state",
        shape.engines,
        shape.blocks,
        shape.requests,
        trace.stored.len(),
        trace.evicted.len()
    ));

    let before = (options.allocated)();
    let mut ours = Strata::new(shape.engines);
    let want = replay(&mut ours, &trace, shape.engines);
    let bytes = (options.allocated)() - before - heap(&want);
    let stats = ours.index.stats();
    let counted = stats.bytes as f64;
    memory(report, "forebay", bytes, stats.pairs, stats.blocks);
    let slots = stats.chunks as f64 * 32.0;
    report.rows.push(Row::point(
        "forebay",
        "chunks filled",
        "%",
        stats.blocks as f64 / slots * 100.0,
    ));
    times(report, "forebay", &want);
    let per_block = bytes as f64 / stats.blocks as f64;
    // What it is, and a little.
    report.at_most("bytes per distinct block", per_block, 28.0);
    let off = (bytes as f64 - counted).abs() / counted * 100.0;
    report.at_most("counted bytes differ from allocated, %", off, 2.0);
    report.note(
        "aims, on an idle core: 25 B per distinct block, store 150 ns, lookup p50 5 us".into(),
    );

    let median = |s: &Sample| quantile(&sorted(&s.find_us), 0.5);
    if options.peers {
        let flat = Flat::new(shape.engines);
        let flat = peer(options, report, flat, &trace, &want, &stats);
        // Absolute times say more of the machine and its neighbours than of the code.
        let lookup = median(&want) / median(&flat);
        report.at_most("lookup p50, of the flat table's", lookup, 0.2);
        let store = want.store.ns() / flat.store.ns();
        report.at_most("store, of the flat table's", store, 1.0);
        let smg = Smg::new(shape.engines);
        peer(options, report, smg, &trace, &want, &stats);
    }

    drop(ours);
    hashing(report);
    for rate in [Some(300_000.0), Some(1_000_000.0), None] {
        let beside = beside_a_writer(report, &trace, shape.engines, rate, options.quick);
        if rate == Some(300_000.0) {
            // Readers do not wait for the writer; what is left is cache lines that it takes away.
            let ratio = beside / median(&want);
            report.at_most("lookup p50 beside 0.3 M blocks/s, of alone", ratio, 3.0);
        }
    }
    wide(report);
    Ok(())
}

// === impl Clock ===

impl Clock {
    fn add(&mut self, seconds: f64, blocks: usize) {
        if seconds > 50e-6 + 5e-6 * blocks as f64 {
            self.left_out += blocks;
        } else {
            self.seconds += seconds;
            self.blocks += blocks;
        }
    }

    /// Nanoseconds per block.
    fn ns(&self) -> f64 {
        self.seconds * 1e9 / self.blocks.max(1) as f64
    }
}

/// Plays a trace.
fn replay<A: Arm>(arm: &mut A, trace: &Trace, engines: usize) -> Sample {
    let mut s = Sample::default();
    let mut asked = 0;
    for (i, step) in trace.steps.iter().enumerate() {
        let steady = i >= trace.steady;
        match *step {
            Step::Ask { from, to } => {
                asked += 1;
                if !steady || asked % 3 != 0 {
                    continue;
                }
                let query = arm.query(&trace.contents[from..to]);
                let start = Instant::now();
                arm.find(&query);
                s.find_us.push(since(start) * 1e6);
                s.asked += to - from;
                if asked % 30 == 0 {
                    s.depths.extend((0..engines).map(|e| arm.depth(e)));
                }
            }
            Step::Store {
                engine,
                parent,
                from,
                to,
            } => {
                let store = arm.prepare(engine, parent, &trace.stored[from..to]);
                let start = Instant::now();
                arm.store(engine, &store);
                if steady {
                    s.store.add(since(start), to - from);
                }
            }
            Step::Evict { engine, from, to } => {
                let start = Instant::now();
                for id in &trace.evicted[from..to] {
                    arm.remove(engine, *id);
                }
                if steady {
                    s.remove.add(since(start), to - from);
                }
            }
        }
    }
    s.find_us.shrink_to_fit();
    s.depths.shrink_to_fit();
    s
}

/// Plays a trace on another index, and compares its answers with ours.
fn peer<A: Arm>(
    options: &Options,
    report: &mut Report,
    mut arm: A,
    trace: &Trace,
    want: &Sample,
    stats: &IndexStats,
) -> Sample {
    let before = (options.allocated)();
    let sample = replay(&mut arm, trace, stats.holders as usize);
    let bytes = (options.allocated)() - before - heap(&sample);
    memory(report, arm.name(), bytes, stats.pairs, stats.blocks);
    times(report, arm.name(), &sample);
    let differ = sample
        .depths
        .iter()
        .zip(&want.depths)
        .filter(|(a, b)| a != b);
    report.checks.push(Check {
        what: format!(
            "depths that differ from {}'s, of {}",
            arm.name(),
            want.depths.len()
        ),
        goal: "0".into(),
        measured: differ.clone().count() as f64,
        holds: differ.count() == 0 && sample.depths.len() == want.depths.len(),
    });
    sample
}

/// Lookups while another thread applies the steady part of the trace at a rate. Returns their median, in microseconds.
fn beside_a_writer(
    report: &mut Report,
    trace: &Trace,
    engines: usize,
    rate: Rate,
    quick: bool,
) -> f64 {
    let arm = Strata::new(engines);
    let (warm, steady) = trace.steps.split_at(trace.steady);
    for event in warm.iter().flat_map(|s| events(trace, s)) {
        arm.index.apply(&arm.holders[event.0], &event.1);
    }
    let chains: Vec<Chain> = steady
        .iter()
        .filter_map(|s| match *s {
            Step::Ask { from, to } => Some(chain(&trace.contents[from..to])),
            _ => None,
        })
        .take(2_000)
        .collect();
    let limit = Duration::from_secs(if quick { 2 } else { 8 });
    let done = AtomicBool::new(false);
    let (ops, took, mut us) = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut matches = Matches::default();
            let mut us = Vec::new();
            for chain in chains.iter().cycle() {
                if done.load(Relaxed) {
                    break;
                }
                let start = Instant::now();
                arm.index.matches(chain, &mut matches);
                us.push(since(start) * 1e6);
                // Some 5,000 requests per second, not a busy loop.
                std::thread::sleep(Duration::from_micros(150));
            }
            us
        });
        let (start, mut ops) = (Instant::now(), 0);
        for (engine, event) in steady.iter().flat_map(|s| events(trace, s)) {
            arm.index.apply(&arm.holders[engine], &event);
            ops += match &event {
                KvEvent::Stored(e) => e.hashes.len(),
                KvEvent::Removed(e) => e.hashes.len(),
                KvEvent::Cleared => 0,
            };
            if let Some(rate) = rate {
                let ahead = ops as f64 / rate - since(start);
                if ahead > 0.001 {
                    std::thread::sleep(Duration::from_secs_f64(ahead));
                }
            }
            if since(start) > limit.as_secs_f64() {
                break;
            }
        }
        let took = since(start);
        done.store(true, Relaxed);
        (ops, took, reader.join().unwrap_or_default())
    });
    us.sort_by(f64::total_cmp);
    let arm = format!("beside {:.2} M blocks/s", ops as f64 / took / 1e6);
    quantiles(report, &arm, &us);
    let lookups = us.len() as f64 / took;
    report
        .rows
        .push(Row::point(&arm, "lookups", "1/s", lookups));
    quantile(&us, 0.5)
}

/// The events of a step.
fn events<'a>(trace: &'a Trace, step: &Step) -> Box<dyn Iterator<Item = (usize, KvEvent)> + 'a> {
    match *step {
        Step::Ask { .. } => Box::new(std::iter::empty()),
        Step::Store {
            engine,
            parent,
            from,
            to,
        } => Box::new(std::iter::once((
            engine,
            stored(parent, &trace.stored[from..to]),
        ))),
        Step::Evict { engine, from, to } => {
            let ids = trace.evicted[from..to].iter();
            Box::new(ids.map(move |id| (engine, removed(*id))))
        }
    }
}

/// The keys of 1,000 atoms: part of every store, and of every request before its lookup.
fn hashing(report: &mut Report) {
    let mut dice = Dice::new(3);
    let tokens: Vec<u32> = (0..16_000).map(|_| dice.below(150_000) as u32).collect();
    let keys = arms::keys();
    let root = keys.root(ChainKind::Tokens, "model", None, None);
    let samples = (0..500).map(|_| {
        let start = Instant::now();
        std::hint::black_box(keys.tokens(root, std::hint::black_box(&tokens)));
        since(start) * 1e6
    });
    let mut us: Vec<f64> = samples.collect();
    report
        .rows
        .push(Row::spread("keys of 1,000 atoms", "time", "us", &mut us));
}

/// A chain of 1,000 blocks over 1,000 endpoints, each of which holds a part of its own.
fn wide(report: &mut Report) {
    let mut dice = Dice::new(7);
    let contents: Vec<u64> = (0..1_000).map(|_| dice.bits()).collect();
    let blocks: Vec<(u64, u64)> = contents.iter().map(|c| (c.rotate_left(9), *c)).collect();
    let arm = Strata::new(1_000);
    for holder in &arm.holders {
        let n = 200 + dice.below(801);
        arm.index.apply(holder, &stored(None, &blocks[..n]));
    }
    let chain = chain(&contents);
    let mut matches = Matches::default();
    let lookups = (0..2_000).map(|_| {
        let start = Instant::now();
        arm.index.matches(&chain, &mut matches);
        since(start) * 1e6
    });
    let us = sorted(&lookups.collect::<Vec<_>>());
    quantiles(report, "1,000 blocks, 1,000 endpoints", &us);
    let bytes = arm.index.stats().bytes as f64 / 1e6;
    report.rows.push(Row::point(
        "1,000 blocks, 1,000 endpoints",
        "memory",
        "MB",
        bytes,
    ));
}

fn times(report: &mut Report, arm: &str, s: &Sample) {
    let mut row = |metric, unit, value| report.rows.push(Row::point(arm, metric, unit, value));
    row("store", "ns per block", s.store.ns());
    row("remove", "ns per block", s.remove.ns());
    let left_out = s.store.left_out + s.remove.left_out;
    let share = left_out as f64 / (left_out + s.store.blocks + s.remove.blocks).max(1) as f64;
    row("blocks left out of times", "%", share * 100.0);
    let blocks = s.asked as f64 / s.find_us.len().max(1) as f64;
    row("blocks per lookup", "", blocks);
    quantiles(report, arm, &sorted(&s.find_us));
}

fn quantiles(report: &mut Report, arm: &str, us: &[f64]) {
    let mean = us.iter().sum::<f64>() / us.len().max(1) as f64;
    report.rows.push(Row::point(arm, "lookup mean", "us", mean));
    for (name, q) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)] {
        let metric = format!("lookup {name}");
        report
            .rows
            .push(Row::point(arm, &metric, "us", quantile(us, q)));
    }
}

fn memory(report: &mut Report, arm: &str, bytes: usize, pairs: u64, blocks: u64) {
    let per = |n: u64| bytes as f64 / n.max(1) as f64;
    report.rows.push(Row::point(
        arm,
        "memory per (block, endpoint)",
        "B",
        per(pairs),
    ));
    report.rows.push(Row::point(
        arm,
        "memory per distinct block",
        "B",
        per(blocks),
    ));
}

/// Heap bytes of a sample, which are not the index's.
fn heap(s: &Sample) -> usize {
    s.find_us.capacity() * size_of::<f64>() + s.depths.capacity() * size_of::<u32>()
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values
}

/// Seconds.
fn since(start: Instant) -> f64 {
    Instant::now()
        .saturating_duration_since(start)
        .as_secs_f64()
}
