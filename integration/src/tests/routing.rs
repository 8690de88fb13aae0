//! Where requests go: conversations to their prefix, past a busy holder, and to an engine that was added.

use super::{
    driver::{now, text},
    prediction::ttft,
};
use crate::{
    cache::Cache,
    engine::{BLOCK, Engine, EngineSpec, MODEL, Profile},
    gateway::{Gateway, GatewaySpec},
    http::Request,
    lab::{Lab, Pair, Tier},
    suite::Test,
    tap::Tap,
    test,
};
use anyhow::{Context, Result, ensure};
use futures::{StreamExt, future::try_join_all, stream};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use std::{
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};
use tokio::time::{Instant, sleep};

/// Turns of a conversation.
const TURNS: usize = 8;
/// The turn for which one engine is away.
const RESTART: usize = 4;
/// Of turns 2 to 8, this share must go where most of their prompt is cached.
const FOLLOWED: f64 = 0.95;
/// Conversations that start after an engine was added.
const NEWCOMERS: usize = 60;

/// How a conversation's next turn finds an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    /// Through the gateway under a policy.
    Gateway(&'static str),
    /// To the engine that a hash of the first user message names.
    Hash,
}

/// How often turns 2 to 8 went where most of their prompt was cached.
#[derive(Clone, Copy, Debug, Default)]
struct Followed {
    all: usize,
    right: usize,
    cached: usize,
    prompt: usize,
}

/// The tests.
pub fn tests() -> Vec<Test> {
    vec![
        test!("vllm", added, "an_added_engine_gets_its_share", [A], 400),
        test!(
            "vllm",
            conversations,
            "conversations_go_where_their_prefix_is",
            [A],
            1200
        ),
        test!(
            "vllm",
            controls,
            "random_and_hashed_routing_fail_the_same_test",
            [A],
            1500
        ),
        test!(
            "vllm",
            busy_holder,
            "a_busy_holder_loses_to_an_idle_engine",
            [A],
            200
        ),
    ]
}

async fn conversations(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::A).await?;
    let count = lab.count(12, 40);
    let followed = converse(&lab, &pair, Arm::Gateway("PricedTtft"), count, true).await?;
    ensure!(followed.share() >= FOLLOWED, "{followed}");
    Ok(format!("{count} conversations: {followed}"))
}

/// The same test must be able to fail. A hash only errs for its conversations on the restarted engine, so that its arm
/// needs the restart and is left to the full tier.
async fn controls(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::A).await?;
    let full = lab.tier == Tier::Full;
    let count = lab.count(6, 40);
    let random = converse(&lab, &pair, Arm::Gateway("Random"), count, full).await?;
    ensure!(random.share() < FOLLOWED, "Random passes: {random}");
    if !full {
        return Ok(format!(
            "Random fails as it should: {random}; left out here: the hash (1 arm, full tier)"
        ));
    }
    let hash = converse(&lab, &pair, Arm::Hash, count, true).await?;
    ensure!(hash.share() < FOLLOWED, "the hash passes: {hash}");
    Ok(format!(
        "both fail as they should; Random: {random}; hash of the first message: {hash}"
    ))
}

/// Holds interleaved conversations that share one system prompt of about 2,000 tokens. What is cached where is worked out
/// from the engines' own event streams, recorded apart from the gateway.
async fn converse(
    lab: &Lab,
    pair: &Pair,
    arm: Arm,
    count: usize,
    restart: bool,
) -> Result<Followed> {
    let mut taps = try_join_all(pair.iter().map(|e| Tap::recorder(&lab.paths, e))).await?;
    let routing = match arm {
        Arm::Gateway(routing) => routing,
        Arm::Hash => "PricedTtft",
    };
    let spec = GatewaySpec::new(pair.iter()).policy("routing", routing);
    let gateway = Gateway::started(&lab.paths, &spec).await?;
    let mut rng = StdRng::seed_from_u64(lab.seed ^ routing.len() as u64);
    // Its own system prompt in each arm: what earlier arms cached is worth nothing here.
    let system = format!("{arm:?} {} {}", lab.seed, text(&mut rng, 1_500));
    let mut chats: Vec<Vec<Value>> = (0..count)
        .map(|_| vec![json!({"role": "system", "content": system})])
        .collect();
    let mut followed = Followed::default();
    // One engine is away for a whole turn: whoever goes on with its conversations has them from then on. For the hash it is
    // the engine that most conversations belong to.
    let first: Vec<String> = (0..count).map(|_| text(&mut rng, 60)).collect();
    let away = match arm {
        Arm::Hash if 2 * first.iter().filter(|f| hashed(f) == 1).count() > count => 1,
        _ => 0,
    };
    let home = &pair[1 - away];
    for turn in 1..=TURNS {
        let down = restart && turn == RESTART;
        if down {
            pair[away].kill().await?;
        }
        for (i, chat) in chats.iter_mut().enumerate() {
            let content = if turn == 1 {
                first[i].clone()
            } else {
                text(&mut rng, 60)
            };
            chat.push(json!({"role": "user", "content": content}));
            let body =
                json!({"model": MODEL, "messages": chat, "max_tokens": 12, "temperature": 0});
            let ids = home
                .tokenize(&json!({"model": MODEL, "messages": chat}))
                .await?;
            let mut held = [0; 2];
            for (e, tap) in taps.iter().enumerate().filter(|(e, _)| !down || *e != away) {
                tap.settle(Duration::from_millis(60)).await;
                held[e] = tap.with(|r| Cache::after(&r.batches).cached(&ids, None));
            }
            let id = format!("c{turn}-{i}-{:08x}", rng.random::<u32>());
            let (engine, reply) = match arm {
                Arm::Gateway(_) => through(&gateway, &id, &body).await?,
                Arm::Hash => {
                    let engine = match hashed(&first[i]) {
                        e if down && e == away => home,
                        e => &pair[e],
                    };
                    let reply = Request::post(engine.authority(), "/v1/chat/completions", &body)
                        .json()
                        .await?;
                    (engine.authority().to_owned(), reply)
                }
            };
            let at = pair
                .iter()
                .position(|e| e.authority() == engine)
                .context("an engine of this test")?;
            if turn >= 2 {
                let most = held.iter().copied().max().unwrap_or(0);
                followed.all += 1;
                followed.right += usize::from(held[at] + BLOCK > most);
                let usage = &reply["usage"];
                followed.prompt += ids.len();
                followed.cached += usage["prompt_tokens_details"]["cached_tokens"]
                    .as_u64()
                    .unwrap_or(0) as usize;
            }
            let answer = reply["choices"][0]["message"]["content"]
                .as_str()
                .unwrap_or("")
                .to_owned();
            chat.push(json!({"role": "assistant", "content": answer}));
        }
        if down {
            pair[away].respawn().await?;
            pair[away].ready().await?;
            taps[away] = Tap::recorder(&lab.paths, &pair[away]).await?;
            gateway.ready().await?;
        }
    }
    gateway.check().await?;
    ensure!(followed.cached > 0, "nothing was ever cached");
    Ok(followed)
}

/// The engine that the hash of a text names.
fn hashed(text: &str) -> usize {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    (hasher.finish() % 2) as usize
}

/// Sends a chat through the gateway; the engine's `host:port` and the answer.
async fn through(gateway: &Gateway, id: &str, body: &Value) -> Result<(String, Value)> {
    let reply = Request::post(gateway.authority(), "/v1/chat/completions", body)
        .header("x-request-id", id)
        .json()
        .await?;
    let engine = gateway.decision(id).await?.chosen()?.authority().to_owned();
    Ok((engine, reply))
}

/// The holder of a prefix has eight long prompts to compute, which came past the gateway; the other engine is idle.
async fn busy_holder(lab: Arc<Lab>) -> Result<String> {
    let pair = lab.pair(Profile::A).await?;
    let gateway = Gateway::started(&lab.paths, &GatewaySpec::new(pair.iter())).await?;
    let mut rng = StdRng::seed_from_u64(lab.seed.wrapping_add(11));
    // What prefill costs on each engine is learned first.
    for _ in 0..lab.count(8, 16) {
        let words = rng.random_range(200..2_000);
        ttft(gateway.authority(), "train", &chat(text(&mut rng, words))).await?;
    }
    let prefix = format!("{} {}", now(), text(&mut rng, 900));
    let ask = |tail: &str| chat(format!("{prefix} {tail}"));
    let (holder, _) = through(&gateway, "warm", &unstreamed(&ask("one"))).await?;
    sleep(Duration::from_millis(200)).await;
    let (idle_choice, _) = through(&gateway, "idle", &unstreamed(&ask("two"))).await?;
    ensure!(
        idle_choice == holder,
        "the idle holder {holder} was not chosen, but {idle_choice}"
    );

    let engine = pair
        .iter()
        .find(|e| e.authority() == holder)
        .context("the holder")?;
    let load: Vec<_> = (0..8)
        .map(|_| {
            let body = unstreamed(&chat(format!("{} {}", now(), text(&mut rng, 12_000))));
            let authority = engine.authority().to_owned();
            tokio::spawn(async move {
                Request::post(&authority, "/v1/chat/completions", &body)
                    .json()
                    .await
            })
        })
        .collect();
    let deadline = Instant::now() + Duration::from_secs(20);
    while engine.metric("vllm:num_requests_waiting").await? < 3.0 {
        ensure!(Instant::now() < deadline, "the holder never got busy");
        sleep(Duration::from_millis(50)).await;
    }
    // The gateway hears of it by its next scrape.
    sleep(Duration::from_millis(1_500)).await;
    let measured = ttft(gateway.authority(), "busy", &ask("three")).await?;
    let decision = gateway.decision("busy").await?;
    let chosen = decision.chosen()?;
    let other = decision.at(&holder).context("the holder was a candidate")?;
    let busy = engine.metric("vllm:num_requests_running").await?;
    for task in load {
        task.abort();
    }
    ensure!(
        chosen.authority() != holder,
        "the busy holder was chosen: {}",
        decision.0
    );
    ensure!(
        other.cached() > chosen.cached() && other.ttft() > chosen.ttft(),
        "not for the reason meant: {}",
        decision.0
    );
    ensure!(
        busy > 0.0,
        "the holder was idle again before the answer came"
    );
    gateway.check().await?;
    // Give the engine back idle.
    let deadline = Instant::now() + Duration::from_secs(60);
    while engine.metric("vllm:num_requests_running").await? > 0.0 {
        ensure!(Instant::now() < deadline, "aborted requests go on");
        sleep(Duration::from_millis(200)).await;
    }
    Ok(format!(
        "holder ({:?} cached) predicted {:.2?}, idle engine ({:?} cached) {:.2?}, measured {measured:.2?}",
        other.cached().unwrap_or(0),
        other.ttft().unwrap_or_default(),
        chosen.cached().unwrap_or(0),
        chosen.ttft().unwrap_or_default(),
    ))
}

/// A third engine joins two that have been serving.
async fn added(lab: Arc<Lab>) -> Result<String> {
    let two = lab.pair(Profile::A).await?;
    let third = &Engine::started(&lab.paths, "a3", EngineSpec::new(Profile::A)).await?;
    let gateway = Gateway::started(&lab.paths, &GatewaySpec::new(two.iter())).await?;
    let rng = StdRng::seed_from_u64(lab.seed.wrapping_add(12));
    // Conversations begin every 150 ms, whatever became of those before them, and each is a prompt of its own.
    let arrive = |prefix: &'static str, mut rng: StdRng| {
        let gateway = &gateway;
        stream::iter((0..).map(move |i: usize| {
            let words = rng.random_range(150..500);
            (
                i,
                chat(format!("{prefix} {i} {} {}", now(), text(&mut rng, words))),
            )
        }))
        .then(|next| async {
            sleep(Duration::from_millis(150)).await;
            next
        })
        .map(move |(i, body)| async move {
            let id = format!("{prefix}-{i}");
            ttft(gateway.authority(), &id, &body).await?;
            let decision = gateway.decision(&id).await?;
            anyhow::Ok(decision.chosen()?.authority().to_owned())
        })
        .buffered(4)
    };
    let mut before = std::pin::pin!(arrive("before", rng).take(lab.count(20, 60)));
    while let Some(engine) = before.next().await {
        engine?;
    }
    let engines: [&Engine; 3] = [&two[0], &two[1], third];
    let joined = Instant::now();
    gateway.reconfigure(&GatewaySpec::new(engines)).await?;
    let rng = StdRng::seed_from_u64(lab.seed.wrapping_add(13));
    let mut after = std::pin::pin!(arrive("after", rng));
    let first = loop {
        let engine = after.next().await.context("endless")??;
        let waited = Instant::now().saturating_duration_since(joined);
        if engine == third.authority() {
            break waited;
        }
        ensure!(
            waited <= Duration::from_secs(5),
            "the added engine had no request after {waited:.1?}"
        );
    };
    let mut share = 0;
    for _ in 0..NEWCOMERS {
        let engine = after.next().await.context("endless")??;
        share += usize::from(engine == third.authority());
    }
    gateway.check().await?;
    let percent = share * 100 / NEWCOMERS;
    ensure!(
        (15..=50).contains(&percent),
        "the added engine got {share} of {NEWCOMERS} new conversations"
    );
    Ok(format!(
        "first answer {first:.1?} after it was added, then {share} of {NEWCOMERS} new conversations"
    ))
}

fn chat(text: String) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0, "stream": true})
}

fn unstreamed(body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = json!(false);
    body
}

// === impl Followed ===

impl Followed {
    fn share(&self) -> f64 {
        self.right as f64 / self.all.max(1) as f64
    }
}

impl fmt::Display for Followed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} later turns ({:.1} %) went where most of them is cached; {:.0} % of {} prompt tokens were cached",
            self.right,
            self.all,
            self.share() * 100.0,
            self.cached as f64 / self.prompt.max(1) as f64 * 100.0,
            self.prompt
        )
    }
}
