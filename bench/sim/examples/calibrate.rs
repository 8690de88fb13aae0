//! The closed loop of the published experiment, with the simplest routers, beside what an independent simulator gave.
//!
//! `calibrate [--seeds N] [--only NAME]`
use forebay_sim::{Arrival, Dice, KvChange, Output, Pod, PodSpec, Prompt};
use std::{collections::HashMap, sync::Arc, time::SystemTime};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Arm {
    Random,
    RoundRobin,
    Least,
    Static,
    Ttft,
    Bound,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Workload {
    Shared,
    Multiturn,
}

/// Clients, and what the independent simulator gave: goodput per minute, attainment in percent where it is known.
type Row = (Workload, Arm, [(f64, Option<f64>); 5]);

const CLIENTS: [usize; 5] = [4, 8, 16, 24, 32];
const PODS: usize = 3;
const WARMUP: f64 = 60.0;
const WINDOW: f64 = 180.0;
const COOLDOWN: f64 = 60.0;
/// A client's longest pause between an answer and its next request, seconds. Without any, all clients stay in step for
/// the whole run, and a router that counts moves every conversation at every turn, or none.
const PAUSE: f64 = 0.02;

const fn known(goodput: [f64; 5], attained: [f64; 5]) -> [(f64, Option<f64>); 5] {
    let mut row = [(0.0, None); 5];
    let mut i = 0;
    while i < 5 {
        row[i] = (goodput[i], Some(attained[i]));
        i += 1;
    }
    row
}

const fn bound(goodput: [f64; 5]) -> [(f64, Option<f64>); 5] {
    let mut row = [(0.0, None); 5];
    let mut i = 0;
    while i < 5 {
        row[i] = (goodput[i], None);
        i += 1;
    }
    row
}

const TABLE: &[Row] = &[
    (
        Workload::Shared,
        Arm::Random,
        known(
            [8.4, 13.6, 15.8, 15.3, 12.6],
            [73.0, 74.0, 60.0, 52.0, 39.0],
        ),
    ),
    (
        Workload::Shared,
        Arm::RoundRobin,
        known(
            [13.3, 20.4, 23.3, 21.0, 15.8],
            [100.0, 94.0, 80.0, 63.0, 46.0],
        ),
    ),
    (
        Workload::Shared,
        Arm::Least,
        known(
            [13.0, 17.7, 22.2, 21.7, 16.8],
            [92.0, 80.0, 73.0, 64.0, 50.0],
        ),
    ),
    (
        Workload::Shared,
        Arm::Static,
        known(
            [14.4, 28.7, 54.9, 75.8, 92.0],
            [94.0, 94.0, 95.0, 96.0, 94.0],
        ),
    ),
    (
        Workload::Shared,
        Arm::Ttft,
        known(
            [17.6, 34.0, 61.3, 82.7, 88.3],
            [100.0, 100.0, 100.0, 99.0, 99.0],
        ),
    ),
    (
        Workload::Shared,
        Arm::Bound,
        bound([17.7, 34.3, 61.4, 83.5, 97.3]),
    ),
    (
        Workload::Multiturn,
        Arm::Random,
        known(
            [16.0, 25.1, 28.4, 18.6, 16.8],
            [82.0, 77.0, 64.0, 44.0, 37.0],
        ),
    ),
    (
        Workload::Multiturn,
        Arm::RoundRobin,
        known(
            [19.3, 31.7, 41.9, 28.3, 23.5],
            [91.0, 90.0, 80.0, 59.0, 49.0],
        ),
    ),
    (
        Workload::Multiturn,
        Arm::Least,
        known(
            [20.0, 33.3, 57.4, 85.0, 62.0],
            [89.0, 88.0, 89.0, 90.0, 79.0],
        ),
    ),
    (
        Workload::Multiturn,
        Arm::Static,
        known(
            [25.0, 44.6, 70.4, 98.2, 107.9],
            [100.0, 100.0, 99.0, 96.0, 97.0],
        ),
    ),
    (
        Workload::Multiturn,
        Arm::Ttft,
        known(
            [25.3, 44.6, 70.5, 97.2, 106.9],
            [100.0, 100.0, 99.0, 95.0, 96.0],
        ),
    ),
    (
        Workload::Multiturn,
        Arm::Bound,
        bound([25.6, 46.9, 74.0, 93.9, 120.6]),
    ),
];

/// A client: in a conversation for `Multiturn`.
struct Client {
    history: Vec<u32>,
    turn: u32,
    conversation: usize,
}

struct Flight {
    client: usize,
    pod: usize,
    started: f64,
    ttft: f64,
}

struct Outcome {
    good: usize,
    measured: usize,
}

struct World {
    workload: Workload,
    arm: Arm,
    pods: Vec<Pod>,
    in_flight: [usize; PODS],
    clients: Vec<Client>,
    flights: HashMap<u64, Flight>,
    done: Vec<Flight>,
    prefixes: Vec<Arc<[u32]>>,
    content: Dice,
    routes: Dice,
    turn: usize,
    conversations: usize,
    next: u64,
}

// === impl World ===

impl World {
    fn new(spec: &Arc<PodSpec>, workload: Workload, arm: Arm, clients: usize, seed: u64) -> Self {
        let mut content = Dice::new(seed);
        let prefixes = match workload {
            Workload::Shared => (0..24).map(|_| text(&mut content, 16_000).into()).collect(),
            Workload::Multiturn => Vec::new(),
        };
        let pod = |i| match arm {
            Arm::Bound => Pod::boundless(spec.clone(), i),
            _ => Pod::new(spec.clone(), i),
        };
        Self {
            workload,
            arm,
            pods: (0..PODS as u64).map(pod).collect(),
            in_flight: [0; PODS],
            clients: (0..clients)
                .map(|_| Client {
                    history: Vec::new(),
                    turn: 0,
                    conversation: 0,
                })
                .collect(),
            flights: HashMap::new(),
            done: Vec::new(),
            prefixes,
            content,
            routes: Dice::new(seed ^ 0xABCD),
            turn: 0,
            conversations: 0,
            next: 0,
        }
    }

    fn run(mut self, slo: f64) -> Outcome {
        let end = WARMUP + WINDOW + COOLDOWN;
        let mut asking: Vec<(f64, usize)> = Vec::new();
        for client in 0..self.clients.len() {
            self.ask(client, 0.0);
        }
        let mut out = Vec::new();
        loop {
            let times = self.pods.iter().filter_map(Pod::next_event);
            let next = times
                .chain(asking.iter().map(|(at, _)| *at))
                .min_by(f64::total_cmp);
            let Some(now) = next.filter(|t| *t < end) else {
                break;
            };
            for pod in &mut self.pods {
                pod.advance(now, &mut out);
            }
            while let Some(i) = asking.iter().position(|(at, _)| *at <= now) {
                let (_, client) = asking.remove(i);
                self.ask(client, now);
            }
            for output in std::mem::take(&mut out) {
                match output {
                    Output::FirstToken { id, at } => {
                        if let Some(f) = self.flights.get_mut(&id) {
                            f.ttft = at - f.started;
                        }
                    }
                    Output::Done { id, at, .. } => {
                        let Some(flight) = self.flights.remove(&id) else {
                            continue;
                        };
                        self.in_flight[flight.pod] -= 1;
                        let client = flight.client;
                        self.done.push(flight);
                        asking.push((at + self.routes.share() * PAUSE, client));
                    }
                    Output::Kv { batch, .. } if self.arm == Arm::Bound => {
                        for change in batch {
                            if let KvChange::Stored(stored) = change {
                                for pod in &mut self.pods {
                                    pod.learn(&stored.hashes);
                                }
                            }
                        }
                    }
                    _ => {}
                }
            }
        }
        self.done.extend(self.flights.into_values());
        let measured = self
            .done
            .iter()
            .filter(|f| (WARMUP..WARMUP + WINDOW).contains(&f.started));
        let (good, all) = measured.fold((0, 0), |(good, all), f| {
            (good + usize::from(f.ttft <= slo), all + 1)
        });
        Outcome {
            good,
            measured: all,
        }
    }

    /// A client's next request.
    fn ask(&mut self, client: usize, now: f64) {
        let (ids, output, key) = match self.workload {
            Workload::Shared => {
                let which = self.content.below(self.prefixes.len());
                let mut ids = self.prefixes[which].to_vec();
                ids.extend(text(&mut self.content, 256));
                (ids, 256, which)
            }
            Workload::Multiturn => {
                let c = &mut self.clients[client];
                if c.turn == 8 {
                    c.turn = 0;
                    c.history.clear();
                }
                if c.turn == 0 {
                    c.conversation = self.conversations;
                    self.conversations += 1;
                    c.history = text(&mut self.content, 8000);
                } else {
                    c.history.extend(text(&mut self.content, 200 + 400));
                }
                c.turn += 1;
                (c.history.clone(), 200, c.conversation)
            }
        };
        let bytes = ids.len() as u32 * 5;
        let prompt = Arc::new(Prompt::new(ids, bytes));
        let pod = self.route(&prompt, output, key, now);
        let id = self.next;
        self.next += 1;
        self.in_flight[pod] += 1;
        self.flights.insert(
            id,
            Flight {
                client,
                pod,
                started: now,
                ttft: f64::INFINITY,
            },
        );
        self.pods[pod].submit(now, Arrival { id, prompt, output });
    }

    fn route(&mut self, prompt: &Arc<Prompt>, output: u32, key: usize, now: f64) -> usize {
        match self.arm {
            Arm::Random => self.routes.below(PODS),
            Arm::RoundRobin => {
                self.turn += 1;
                self.turn % PODS
            }
            Arm::Static => key % PODS,
            Arm::Least => {
                let costs = self.in_flight.map(|n| n as f64);
                self.cheapest(&costs)
            }
            Arm::Ttft | Arm::Bound => {
                let costs: Vec<f64> = self
                    .pods
                    .iter()
                    .map(|p| p.ttft(now, prompt, output))
                    .collect();
                self.cheapest(&costs)
            }
        }
    }

    /// The cheapest; ties at random.
    fn cheapest(&mut self, costs: &[f64]) -> usize {
        let best = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let ties: Vec<usize> = (0..costs.len()).filter(|i| costs[*i] <= best).collect();
        ties[self.routes.below(ties.len())]
    }
}

fn text(dice: &mut Dice, tokens: usize) -> Vec<u32> {
    (0..tokens).map(|_| dice.bits() as u32 >> 12).collect()
}

fn mean(xs: &[f64]) -> f64 {
    xs.iter().sum::<f64>() / xs.len() as f64
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let at = args.iter().position(|a| a == name)?;
        args.get(at + 1).cloned()
    };
    let seeds: u64 = value("--seeds").map_or(24, |s| s.parse().expect("--seeds takes a number"));
    let only = value("--only");
    let spec = Arc::new(PodSpec::kind("l40s").expect("a built-in kind"));
    let (mut off, mut runs) = (0, 0u64);
    let start = SystemTime::now();
    println!(
        "goodput per minute (attainment %), beside the independent simulator's; * = off by more than 10 % and 3 (5) per minute"
    );
    for (workload, arm, row) in TABLE {
        let name = format!("{workload:?} {arm:?}");
        if only.as_ref().is_some_and(|o| !name.contains(o.as_str())) {
            continue;
        }
        let (slo, slack): (f64, f64) = match workload {
            Workload::Shared => (8.0, 3.0),
            Workload::Multiturn => (4.0, 5.0),
        };
        print!("{name:22}");
        for (clients, (goodput, attained)) in CLIENTS.iter().zip(row) {
            let (mut goods, mut shares) = (Vec::new(), Vec::new());
            for seed in 0..seeds {
                let world = World::new(&spec, *workload, *arm, *clients, 1000 + seed * 100);
                let outcome = world.run(slo);
                goods.push(outcome.good as f64 / WINDOW * 60.0);
                shares.push(outcome.good as f64 / outcome.measured as f64 * 100.0);
                runs += 1;
            }
            let got = mean(&goods);
            let wrong = (got - goodput).abs() > slack.max(goodput * 0.1);
            off += u32::from(wrong);
            let attained = attained.map_or(String::new(), |a| format!(" ({a:.0})"));
            print!(
                " | {got:5.1} ({:3.0}) / {goodput:5.1}{attained:6}{}",
                mean(&shares),
                if wrong { "*" } else { " " },
            );
        }
        println!();
    }
    let seconds = start.elapsed().map_or(0.0, |d| d.as_secs_f64());
    println!(
        "{off} cells off; {runs} runs, {:.3} s each",
        seconds / runs as f64
    );
    if off > 0 {
        std::process::exit(1);
    }
}
