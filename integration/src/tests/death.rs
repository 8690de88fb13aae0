//! Engines that die while requests are open: killed, killed in the core, or told to stop, which leaves their streams
//! hanging. One table for real engines and for fakes.
//!
//! One death serves both stages at once: streams that had begun, and requests whose first byte had not come.

use super::driver::{now, text};
use crate::{
    engine::Profile,
    fake::FakeEngine,
    gateway::{Gateway, GatewaySpec},
    http::Request,
    lab::Lab,
    suite::Test,
    test,
};
use anyhow::{Context, Result, bail, ensure};
use rand::{SeedableRng, rngs::StdRng};
use requests::{
    broken, complete, elsewhere, endpoint, open_early, open_streams, request, rng_text,
};
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};
use subject::{Death, Subject};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

mod requests;
mod subject;

/// From the refusal of the port to the end of the last stream that hung there.
const HANG_LIMIT: Duration = Duration::from_secs(3);

/// From the refusal of the port to the last request that was sent there.
const PICK_LIMIT: Duration = Duration::from_secs(2);

/// From the death to the refusal: vLLM's API server outlives its core by 0.7 s on an idle machine.
const REFUSE_LIMIT: Duration = Duration::from_secs(20);

/// The tests.
pub fn tests() -> Vec<Test> {
    vec![
        test!("faults", fakes, "fake_engines_that_die", [], 120),
        test!("faults", engines, "engines_that_die", [B], 900),
    ]
}

/// The order on real engines is by what is left of them: each death is followed by a restart.
const DEATHS: [Death; 3] = [Death::Server, Death::Term, Death::Core];

/// What was seen of one death.
struct Seen {
    refused_after: Duration,
    ended_after: Duration,
    streams: usize,
    early: usize,
    others: usize,
    back_after: Duration,
}

async fn engines(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::B).await?;
    let gateway = spec(GatewaySpec::new(pair.iter()));
    let gateway = Gateway::started(&lab.paths, &gateway).await?;
    let subjects = [Subject::Real(pair.clone(), 0), Subject::Real(pair, 1)];
    table(&lab, &gateway, &subjects, true).await
}

async fn fakes(lab: Arc<Lab>) -> Result<String> {
    let fakes = [
        Arc::new(FakeEngine::start()?),
        Arc::new(FakeEngine::start()?),
    ];
    let mut gateway = spec(GatewaySpec::new([]));
    for fake in &fakes {
        gateway = gateway.endpoint(
            json!({"url": format!("http://{}", fake.authority()), "kvEvents": "none", "replay": "none", "gpu": "cpu"}),
        );
    }
    let gateway = Gateway::started(&lab.paths, &gateway).await?;
    let subjects = fakes.map(Subject::Fake);
    table(&lab, &gateway, &subjects, false).await
}

/// Both engines get requests, whatever is learned of their speed: this is about death, not about the best choice.
fn spec(gateway: GatewaySpec) -> GatewaySpec {
    gateway
        .policy("exposeEndpoint", true)
        .policy("routing", "LeastLoad")
}

/// Every death, the victims in turn.
async fn table(
    lab: &Lab,
    gateway: &Gateway,
    subjects: &[Subject; 2],
    residency: bool,
) -> Result<String> {
    let mut rng = StdRng::seed_from_u64(lab.seed ^ 21);
    let mut report = Vec::new();
    for round in 0..lab.count(1, 2) {
        for (i, death) in DEATHS.into_iter().enumerate() {
            let victim = &subjects[(round + i) % 2];
            let seen = die(gateway, victim, death, residency, &mut rng)
                .await
                .with_context(|| format!("{death:?} at {}", victim.authority()))?;
            report.push(format!(
                "{death:?}: refuses after {:.2?}, {} streams ended {:.2?} after that, {} requests before their first byte were answered elsewhere, {} others whole, back {:.1?} after its restart",
                seen.refused_after, seen.streams, seen.ended_after, seen.early, seen.others, seen.back_after
            ));
        }
    }
    gateway.check().await?;
    Ok(report.join("; "))
}

/// One death and one return.
///
/// Seen red on fakes: with no retries, a request before its first byte got 502; without the cut of what is open at a dead
/// engine, the streams of SIGTERM still hung 9 s after the port refused. With readiness left on after a death it stayed
/// green: refused connections open the breaker, which keeps requests away as well.
async fn die(
    gateway: &Gateway,
    victim: &Subject,
    death: Death,
    residency: bool,
    rng: &mut StdRng,
) -> Result<Seen> {
    let known = warm(gateway, victim, rng).await?;
    let before = rank(gateway, victim.authority()).await?;
    if residency {
        ensure!(
            held(&before) > 0,
            "the victim should hold something: {before}"
        );
        let (cached, _) = believed(gateway, victim.authority(), &known).await?;
        ensure!(
            cached > 0,
            "nothing is thought to be cached before the death"
        );
    }
    let (streams, others) = open_streams(gateway, victim.authority(), rng).await?;
    let early = open_early(gateway, victim.authority(), rng).await?;

    let died = Instant::now();
    victim.die(death).await?;
    let ends: Vec<_> = streams
        .into_iter()
        .map(|stream| {
            let what = format!("{} at the victim", stream.path);
            (what, tokio::spawn(broken(stream)))
        })
        .collect();
    let whole: Vec<_> = others
        .into_iter()
        .map(|stream| tokio::spawn(complete(stream)))
        .collect();
    let refused = refusal(victim.authority()).await?;
    let traffic = tokio::spawn(traffic(gateway.authority().to_owned(), rng_text(rng)));

    let mut last = died;
    let count = ends.len();
    for (what, end) in ends {
        let ended = timeout(HANG_LIMIT * 3, end)
            .await
            .with_context(|| format!("{what} still hangs"))??
            .context(what.clone())?;
        ensure!(
            ended <= refused + HANG_LIMIT,
            "{what} ended {:?} after the port refused",
            ended.saturating_duration_since(refused)
        );
        last = last.max(ended);
    }
    tokio::time::sleep_until(refused + PICK_LIMIT).await;
    let picks = picks(&rank(gateway, victim.authority()).await?)?;
    let sent = traffic.await??;
    ensure!(sent > 10, "only {sent} requests were sent meanwhile");
    let after = self::picks(&rank(gateway, victim.authority()).await?)?;
    ensure!(
        picks == after,
        "{} requests were sent to the victim over {PICK_LIMIT:?} after its death",
        after - picks
    );
    let answered = early.len();
    for request in early {
        let id = request.id.clone();
        elsewhere(request, victim.authority())
            .await
            .with_context(|| format!("request {id}, before its first byte"))?;
    }
    let unharmed = whole.len();
    for task in whole {
        task.await??;
    }
    idle(gateway).await?;

    victim.restart().await?;
    let restarted = Instant::now();
    gateway.ready().await?;
    let back_after = Instant::now().saturating_duration_since(restarted);
    let now = rank(gateway, victim.authority()).await?;
    ensure!(
        now["incarnation"] != before["incarnation"],
        "the same incarnation after a restart: {now}"
    );
    ensure!(held(&now) == 0, "not empty after a restart: {now}");
    returns(gateway, victim, &known, residency).await?;
    Ok(Seen {
        refused_after: refused.saturating_duration_since(died),
        ended_after: last.saturating_duration_since(refused),
        streams: count,
        early: answered,
        others: unharmed,
        back_after,
    })
}

/// Sends prompts until one has been answered by the victim; returns it.
async fn warm(gateway: &Gateway, victim: &Subject, rng: &mut StdRng) -> Result<Value> {
    for _ in 0..40 {
        let words = format!("{} {}", now(), text(rng, 120));
        let body = request("/v1/completions", &words, 4, false);
        let answer = Request::post(gateway.authority(), "/v1/completions", &body)
            .send()
            .await?;
        answer.json()?;
        if endpoint(&answer.headers) == victim.authority() {
            // Events are on their way.
            sleep(Duration::from_millis(300)).await;
            return Ok(body);
        }
    }
    bail!("none of 40 requests went to {}", victim.authority())
}

/// When the port refused.
async fn refusal(authority: &str) -> Result<Instant> {
    let wait = async {
        loop {
            match TcpStream::connect(authority).await {
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                    return Instant::now();
                }
                _ => sleep(Duration::from_millis(20)).await,
            }
        }
    };
    timeout(REFUSE_LIMIT, wait)
        .await
        .context("the port does not refuse")
}

/// Short requests, one every 150 ms, until well after nobody should be sent to the dead; each must be answered.
async fn traffic(authority: String, words: String) -> Result<usize> {
    let until = Instant::now() + PICK_LIMIT * 2;
    let mut sent = Vec::new();
    while Instant::now() < until {
        let body = request(
            "/v1/completions",
            &format!("{} {words}", sent.len()),
            1,
            false,
        );
        let authority = authority.clone();
        sent.push(tokio::spawn(async move {
            let request = Request::post(&authority, "/v1/completions", &body);
            request.send().await?.json()
        }));
        sleep(Duration::from_millis(150)).await;
    }
    let count = sent.len();
    for (n, answer) in sent.into_iter().enumerate() {
        let answer = timeout(Duration::from_secs(60), answer).await;
        answer
            .context("no answer")
            .and_then(|joined| joined?)
            .with_context(|| format!("request {n} after the death"))?;
    }
    Ok(count)
}

/// The restarted engine gets requests again, and nobody thinks that it knows what its former self knew.
async fn returns(
    gateway: &Gateway,
    victim: &Subject,
    known: &Value,
    residency: bool,
) -> Result<()> {
    let (cached, mut went) = believed(gateway, victim.authority(), known).await?;
    ensure!(
        !residency || cached == 0,
        "{cached} tokens are thought to be cached"
    );
    for n in 0..40 {
        if went == victim.authority() {
            return Ok(());
        }
        let body = request("/v1/completions", &format!("{n} {}", now()), 1, false);
        let answer = Request::post(gateway.authority(), "/v1/completions", &body)
            .send()
            .await?;
        answer.json()?;
        went = endpoint(&answer.headers);
    }
    bail!("none of 40 requests went to the restarted engine")
}

/// Sends a request; says how many of its tokens the engine at `authority` was thought to have cached, and who answered.
async fn believed(gateway: &Gateway, authority: &str, body: &Value) -> Result<(u64, String)> {
    let id = format!("believed-{}", now());
    let answer = Request::post(gateway.authority(), "/v1/completions", body)
        .header("x-request-id", &id)
        .send()
        .await?;
    answer.json()?;
    let decision = gateway.decision(&id).await?;
    let cached = decision
        .at(authority)
        .and_then(|candidate| candidate.cached())
        .with_context(|| format!("{authority} is no candidate"))?;
    Ok((cached, endpoint(&answer.headers)))
}

/// What the gateway knows of an endpoint.
async fn rank(gateway: &Gateway, authority: &str) -> Result<Value> {
    let page = gateway.admin("/endpoints").await?;
    page.as_array()
        .into_iter()
        .flatten()
        .flat_map(|e| e["ranks"].as_array().into_iter().flatten())
        .find(|r| r["endpoint"] == authority)
        .cloned()
        .with_context(|| format!("{authority} is not in {page}"))
}

fn held(rank: &Value) -> u64 {
    rank["blocksHeld"].as_u64().unwrap_or(u64::MAX)
}

fn picks(rank: &Value) -> Result<u64> {
    rank["picks"].as_u64().context("picks")
}

/// All counts are back at 0.
async fn idle(gateway: &Gateway) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let open = gateway.metric("forebay_in_flight", &[]).await?
            + gateway.metric("forebay_requests_open", &[]).await?;
        if open == 0.0 {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{open} requests are still counted after all have ended"
        );
        sleep(Duration::from_millis(20)).await;
    }
}
