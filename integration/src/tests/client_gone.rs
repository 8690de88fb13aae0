//! Clients that leave, at every stage of a request: the engine's side is closed at once and nothing stays counted.

use super::driver::{now, text};
use crate::{
    blackhole::Blackhole,
    engine::{Engine, MODEL, Ports, Profile, sum_series},
    fake::FakeEngine,
    gateway::{Gateway, GatewaySpec},
    http::Request,
    lab::Lab,
    raw::{HangUp, Raw},
    sockets,
    suite::Test,
    test,
};
use anyhow::{Context, Result, bail, ensure};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use rustix::process::Pid;
use serde_json::json;
use std::{fmt, sync::Arc, time::Duration};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

/// From the client's FIN to the end of all that was held for it here.
const GATEWAY_LIMIT: Duration = Duration::from_millis(250);

/// From the client's FIN to the end of its request in the engine.
const ENGINE_LIMIT: Duration = Duration::from_secs(3);

/// How long a stage may take to come.
const STAGE_LIMIT: Duration = Duration::from_secs(60);

/// Counts of what is under way, all of which go back to 0: at endpoints, waiting for one (requests and bytes), open
/// here, by API.
const GAUGES: [&str; 5] = [
    "forebay_in_flight",
    "forebay_pending_demand",
    "forebay_pending_demand_bytes",
    "forebay_requests_open",
    "forebay_requests_active",
];

/// The tests.
pub fn tests() -> Vec<Test> {
    vec![
        test!("faults", fakes, "clients_that_leave_fakes", [], 120),
        test!("faults", queued, "clients_that_leave_the_queue", [], 60),
        test!(
            "faults",
            backlog,
            "clients_that_leave_a_full_backlog",
            [],
            60
        ),
        test!(
            "faults",
            dropped,
            "clients_that_leave_a_host_that_drops_syn",
            [],
            60
        ),
        test!("faults", engines, "clients_that_leave_engines", [B], 600),
    ]
}

/// How far the request is when its client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The engine works and has not said 200.
    BeforeHead,
    /// The engine has said 200 and nothing else.
    BeforeFirstToken,
    /// Tokens come.
    Streaming,
}

const STAGES: [Stage; 3] = [Stage::BeforeHead, Stage::BeforeFirstToken, Stage::Streaming];

/// How clients hang up, in turn.
const WAYS: [HangUp; 3] = [HangUp::Close, HangUp::Half, HangUp::Reset];

/// An engine, for what it says runs there.
enum Subject<'a> {
    Real(&'a Engine),
    Fake(&'a FakeEngine),
}

/// Times from the client's FIN.
#[derive(Default)]
struct Times(Vec<Duration>);

// === impl Subject ===

impl Subject<'_> {
    fn authority(&self) -> &str {
        match self {
            Self::Real(engine) => engine.authority(),
            Self::Fake(fake) => fake.authority(),
        }
    }

    async fn running(&self) -> Result<f64> {
        match self {
            Self::Real(engine) => Ok(engine.metric("vllm:num_requests_running").await?
                + engine.metric("vllm:num_requests_waiting").await?),
            Self::Fake(fake) => Ok(fake.running() as f64),
        }
    }
}

async fn engines(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::B).await?;
    let gateway = Gateway::started(&lab.paths, &GatewaySpec::new([&pair[0]])).await?;
    table(&lab, &gateway, Subject::Real(&pair[0]), lab.count(10, 50)).await
}

async fn fakes(lab: Arc<Lab>) -> Result<String> {
    let fake = FakeEngine::start()?;
    let gateway = Gateway::started(&lab.paths, &spec(&fake)).await?;
    table(&lab, &gateway, Subject::Fake(&fake), lab.count(10, 50)).await
}

fn spec(fake: &FakeEngine) -> GatewaySpec {
    GatewaySpec::new([]).endpoint(
        json!({"url": format!("http://{}", fake.authority()), "kvEvents": "none", "replay": "none"}),
    )
}

/// Every stage, `count` times each, in all ways of hanging up.
///
/// Seen red: with tickets that do not end when they are dropped, `forebay_in_flight` stayed at 1. With the connection's
/// task not aborted it stayed green: hyper closes a connection whose request and answer are both gone.
async fn table(lab: &Lab, gateway: &Gateway, subject: Subject<'_>, count: usize) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(lab.seed ^ 22);
    let mut report = Vec::new();
    for stage in STAGES {
        let (mut here, mut there) = (Times::default(), Times::default());
        for n in 0..count {
            let how = WAYS[n % WAYS.len()];
            let (a, b) = leave(gateway, &subject, stage, how, &mut rng)
                .await
                .with_context(|| format!("{stage:?}, {how:?}, time {n}"))?;
            here.0.push(a);
            there.0.push(b);
        }
        report.push(format!(
            "{stage:?}: {count} times, closed and released after {here}, ended in the engine after {there}"
        ));
    }
    gateway.check().await?;
    Ok(report.join("; "))
}

/// One client that leaves at a stage. Returns how long the gateway and the engine took to notice.
async fn leave(
    gateway: &Gateway,
    subject: &Subject<'_>,
    stage: Stage,
    how: HangUp,
    rng: &mut StdRng,
) -> Result<(Duration, Duration)> {
    let id = format!("leave-{}", now());
    let words = match stage {
        Stage::BeforeFirstToken => 9_000,
        // Long enough to be told from a probe by its bytes.
        _ => 600,
    };
    let prompt = format!("{id} {}", text(rng, words));
    let max_tokens = 4_000;
    let (path, body) = match (stage, rng.random_bool(0.5)) {
        (Stage::BeforeHead, _) => (
            "/v1/completions",
            json!({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true}),
        ),
        (_, true) => (
            "/v1/completions",
            json!({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "stream": true}),
        ),
        (_, false) => (
            "/v1/chat/completions",
            json!({"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "ignore_eos": true, "stream": true}),
        ),
    };
    let length = body.to_string().len() as u64;
    let pid = gateway.pid().await;
    let mut client = Raw::post(gateway.authority(), path, &id, &body).await?;
    let port = upstream(pid, subject.authority(), length).await?;
    if stage == Stage::Streaming {
        let events = rng.random_range(1..20);
        client.until("data: ", events, STAGE_LIMIT).await?;
    } else {
        sleep(Duration::from_millis(rng.random_range(0..200))).await;
        ensure!(
            client_is_silent(&mut client).await,
            "an answer too early: {:.300}",
            client.text()
        );
    }
    // What is looked at afterwards can be seen at all.
    ensure!(
        open(pid, subject.authority(), port)?,
        "the upstream socket is gone before its client is"
    );
    for gauge in [
        "forebay_in_flight",
        "forebay_requests_open",
        "forebay_requests_active",
    ] {
        let value = gateway.metric(gauge, &[]).await?;
        ensure!(
            value == 1.0,
            "{gauge} is {value} while a request is under way"
        );
    }

    let (left, _half) = client.hang_up(how).await?;
    let released = released(gateway, left, || Ok(!open(pid, subject.authority(), port)?)).await?;
    let ended = loop {
        if subject.running().await? == 0.0 {
            break Instant::now().saturating_duration_since(left);
        }
        ensure!(
            Instant::now() < left + ENGINE_LIMIT,
            "it still runs in the engine after {ENGINE_LIMIT:?}"
        );
        sleep(Duration::from_millis(25)).await;
    };
    Ok((released, ended))
}

/// Whether nothing has come yet.
async fn client_is_silent(client: &mut Raw) -> bool {
    client
        .until("HTTP/1.1", 1, Duration::from_millis(1))
        .await
        .is_err()
}

/// The own port of the gateway's socket that carried a request of `length` bytes: probes are smaller.
async fn upstream(pid: Pid, peer: &str, length: u64) -> Result<u16> {
    let deadline = Instant::now() + STAGE_LIMIT;
    loop {
        let carried = sockets::carried(peer, length)?;
        let ours = sockets::open_to(pid, peer)?;
        if let Some(socket) = ours.iter().find(|s| carried.contains(&s.port)) {
            return Ok(socket.port);
        }
        ensure!(
            Instant::now() < deadline,
            "the request does not get to {peer}"
        );
        sleep(Duration::from_millis(5)).await;
    }
}

fn open(pid: Pid, peer: &str, port: u16) -> Result<bool> {
    Ok(sockets::open_to(pid, peer)?.iter().any(|s| s.port == port))
}

/// Waits until the socket is closed and all gauges are back.
async fn released(
    gateway: &Gateway,
    left: Instant,
    mut closed: impl FnMut() -> Result<bool>,
) -> Result<Duration> {
    loop {
        let looked = Instant::now();
        let closed = closed()?;
        let counted: Vec<_> = gauges(gateway)
            .await?
            .into_iter()
            .filter(|(_, value)| *value != 0.0)
            .map(|(gauge, value)| format!("{gauge} {value}"))
            .collect();
        if closed && counted.is_empty() {
            return Ok(Instant::now().saturating_duration_since(left));
        }
        // What was true at the start of the look counts, not when the pages had been read.
        ensure!(
            looked < left + GATEWAY_LIMIT,
            "{GATEWAY_LIMIT:?} after the client left: upstream {}, {}",
            if closed { "closed" } else { "open" },
            counted.join(", ")
        );
        sleep(Duration::from_millis(5)).await;
    }
}

/// No endpoint is ready: the request waits for one.
///
/// Seen red: with places in the queue that outlive their requests, `forebay_pending_demand` stayed at 1.
async fn queued(lab: Arc<Lab>) -> Result<String> {
    // A port that nobody listens on.
    let nobody = format!("http://127.0.0.1:{}", Ports::free()?.http);
    let spec = GatewaySpec::new([])
        .endpoint(json!({"url": nobody, "kvEvents": "none", "replay": "none"}))
        .policy("noEndpointWait", "30s");
    let gateway = Gateway::listening(&lab.paths, &spec).await?;
    let mut times = Times::default();
    let count = lab.count(10, 50);
    for n in 0..count {
        let id = format!("queue-{}", now());
        let body = json!({"model": MODEL, "prompt": id, "stream": n % 2 == 0});
        let client = Raw::post(gateway.authority(), "/v1/completions", &id, &body).await?;
        until(&gateway, "forebay_pending_demand", 1.0).await?;
        ensure!(gateway.metric("forebay_pending_demand_bytes", &[]).await? > 0.0);
        let (left, _half) = client.hang_up(WAYS[n % WAYS.len()]).await?;
        times.0.push(
            released(&gateway, left, || Ok(true))
                .await
                .with_context(|| format!("time {n}"))?,
        );
    }
    gateway.check().await?;
    Ok(format!("{count} times, released after {times}"))
}

/// The engine's listener is full: the kernel drops SYN.
async fn backlog(lab: Arc<Lab>) -> Result<String> {
    let fake = FakeEngine::with_backlog(1)?;
    let gateway = Gateway::started(&lab.paths, &connecting_spec(&fake)).await?;
    fake.accept(false);
    // Fills the backlog: what is not accepted stays with the kernel. One silence may be a slow machine's.
    let (mut full, mut silences) = (Vec::new(), 0);
    while silences < 3 {
        let connect = TcpStream::connect(fake.authority());
        match timeout(Duration::from_millis(400), connect).await {
            Ok(socket) => {
                full.push(socket?);
                silences = 0;
            }
            Err(_) => silences += 1,
        }
        ensure!(full.len() < 100, "the backlog is never full");
    }
    connecting(&lab, &gateway, fake.authority()).await
}

/// The engine's host drops SYN.
async fn dropped(lab: Arc<Lab>) -> Result<String> {
    let (host, listener) = Blackhole::new()?;
    let fake = FakeEngine::on(listener)?;
    let gateway = Gateway::started(&lab.paths, &connecting_spec(&fake)).await?;
    host.swallow()?;
    connecting(&lab, &gateway, fake.authority()).await
}

fn connecting_spec(fake: &FakeEngine) -> GatewaySpec {
    spec(fake).policy("connectTimeout", "20s")
}

/// Clients that leave while the gateway waits for the engine's host. All come at once, as it is believed to be there
/// for a few seconds only.
async fn connecting(lab: &Lab, gateway: &Gateway, peer: &str) -> Result<String> {
    let count = lab.count(10, 50);
    let pid = gateway.pid().await;
    let mut clients = Vec::new();
    for n in 0..count {
        let id = format!("connect-{}-{n}", now());
        let body = json!({"model": MODEL, "prompt": id, "stream": true});
        clients.push(Raw::post(gateway.authority(), "/v1/completions", &id, &body).await?);
    }
    until(gateway, "forebay_in_flight", count as f64).await?;
    // A probe gives up after a second; what has waited for longer are requests.
    sleep(Duration::from_millis(1_300)).await;
    let waiting = |ports: &[u16]| -> Result<Vec<u16>> {
        Ok(sockets::open_to(pid, peer)?
            .iter()
            .filter(|s| s.connecting && (ports.is_empty() || ports.contains(&s.port)))
            .map(|s| s.port)
            .collect())
    };
    let first = waiting(&[])?;
    sleep(Duration::from_millis(1_300)).await;
    let mut ports = waiting(&first)?;
    ensure!(
        ports.len() == count,
        "{} of {count} requests wait for a connection",
        ports.len()
    );
    let mut times = Times::default();
    for (n, client) in clients.into_iter().enumerate() {
        let (left, _half) = client.hang_up(WAYS[n % WAYS.len()]).await?;
        let expected = count - n - 1;
        loop {
            let looked = Instant::now();
            let now = waiting(&ports)?.len();
            let counted = gateway.metric("forebay_in_flight", &[]).await?;
            if now == expected && counted == expected as f64 {
                times.0.push(Instant::now().saturating_duration_since(left));
                break;
            }
            ensure!(
                looked < left + GATEWAY_LIMIT,
                "{GATEWAY_LIMIT:?} after client {n} left: {now} sockets and {counted} requests instead of {expected}"
            );
            sleep(Duration::from_millis(5)).await;
        }
        if expected > 0 {
            ports = waiting(&ports)?;
        }
    }
    released(gateway, Instant::now(), || Ok(true)).await?;
    gateway.check().await?;
    Ok(format!("{count} times, closed and released after {times}"))
}

/// What all gauges are; 0 for those that have never counted anything.
async fn gauges(gateway: &Gateway) -> Result<Vec<(&'static str, f64)>> {
    let answer = Request::get(gateway.admin_authority(), "/metrics")
        .send()
        .await?;
    ensure!(answer.status.is_success(), "/metrics: {}", answer.status);
    let page = answer.text();
    let value = |gauge| (gauge, sum_series(&page, gauge, &[]).unwrap_or(0.0));
    Ok(GAUGES.into_iter().map(value).collect())
}

/// Waits until a gauge has a value.
async fn until(gateway: &Gateway, gauge: &str, wanted: f64) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut last = None;
    while Instant::now() < deadline {
        last = gateway.metric(gauge, &[]).await.ok();
        if last == Some(wanted) {
            return Ok(());
        }
        sleep(Duration::from_millis(5)).await;
    }
    bail!("{gauge} is {last:?}, not {wanted}")
}

// === impl Times ===

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = self.0.clone();
        all.sort();
        let at = |share: f64| {
            all.get((all.len() as f64 * share) as usize)
                .or(all.last())
                .copied()
                .unwrap_or_default()
        };
        write!(f, "{:.0?} (median), {:.0?} (worst)", at(0.5), at(1.0))
    }
}
