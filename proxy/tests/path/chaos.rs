//! Everything at once, and nothing left over.

use crate::support::*;
use forebay_proxy::http::PathPolicy;
use std::{sync::Arc, time::Duration};
use tokio::task::JoinSet;

const CHAT: &str = r#"{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
const PATH: &str = "/v1/chat/completions";

/// A small generator of numbers that are the same in each run.
fn mixed(number: usize) -> usize {
    let mut x = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 31;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x >> 33) as usize
}

/// F13: clients that leave at random, engines that fail in all ways, time-outs; afterwards nothing is held and a full
/// burst is served.
#[tokio::test]
async fn nothing_leaks() {
    let script = |seen: &Seen| match mixed(seen.number) % 10 {
        0 => vec![Step::Fin],
        1 => vec![Step::Rst],
        2 => vec![sse_head(), Step::Fin],
        3 => vec![sse_head(), chunk(chat_event("a")), Step::Rst],
        4 => error("500 Internal Server Error", DRAINING),
        5 => error("503 Service Unavailable", BUSY),
        6 => vec![sse_head(), chunk(chat_event("a")), Step::Hang],
        7 => vec![
            sse_head(),
            chunk(error_event(ENGINE_CORE)),
            chunk(DONE),
            end(),
        ],
        _ => chat_stream(&["a", "b"]),
    };
    let engines = [
        FakeEngine::start(script).await,
        FakeEngine::start(script).await,
        FakeEngine::start(script).await,
    ];
    let gateway = Setup::tiny(&engines.iter().collect::<Vec<_>>())
        .policy(|p| {
            p.first_token_timeout = Duration::from_millis(100);
            p.idle_timeout = Duration::from_millis(100);
        })
        .start()
        .await;
    let mut clients = JoinSet::new();
    for client in 0..20 {
        let address = gateway.address.clone();
        clients.spawn(async move {
            for turn in 0..40 {
                let number = client * 40 + turn;
                let left = if mixed(number).is_multiple_of(3) {
                    Duration::from_micros((mixed(number + 7) % 20_000) as u64)
                } else {
                    Duration::from_secs(5)
                };
                let http = if number % 2 == 0 {
                    Http::One
                } else {
                    Http::Two
                };
                // Whoever is not done by then leaves.
                let _ = tokio::time::timeout(left, post(http, &address, PATH, CHAT)).await;
            }
        });
    }
    while let Some(client) = clients.join_next().await {
        client.expect("no client panics");
    }
    gateway.idle().await;

    let good = FakeEngine::start(|_| chat_stream(&["good"])).await;
    for endpoint in gateway.endpoints() {
        gateway.pools[0].pool().remove(endpoint.id());
    }
    add(gateway.pools[0].pool(), &good.address);
    gateway.pools[0].set_policy(PathPolicy::default());
    let gateway = Arc::new(gateway);
    let mut burst = JoinSet::new();
    for _ in 0..100 {
        let gateway = gateway.clone();
        burst.spawn(async move { post(Http::One, &gateway.address, PATH, CHAT).await });
    }
    while let Some(answer) = burst.join_next().await {
        let answer = answer.expect("an answer");
        assert!(answer.text().contains("good"), "{}", answer.text());
    }
    gateway.idle().await;
}
