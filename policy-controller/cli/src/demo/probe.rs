//! What the gateway has seen before the load begins. A gateway that has been up for a while knows what its pods take for
//! a request whatever is in it; one that starts with the load would have to learn it from requests of one kind only.

use super::{
    DemoError, client,
    words::{self, MODEL},
};
use bytes::Bytes;
use serde_json::json;
use std::{net::SocketAddr, time::Duration};
use tokio::time::timeout;

/// Tokens of short prompts.
const SHORT: usize = 64;
/// Tokens of long ones: a little more than twenty blocks, so that little is computed when they are cached.
const LONG: usize = 20 * 784 + 64;
/// Prompts of each length, as many as there are pods.
const PROMPTS: u64 = 3;
/// How often each is sent.
const ROUNDS: usize = 6;
/// All of them.
pub(super) const PROBES: usize = ROUNDS * 2 * PROMPTS as usize;
/// Tokens of their answers.
const OUTPUT: u32 = 2;
/// For all of them. They take about two seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sends a few prompts again and again.
pub(super) async fn probe(gateway: SocketAddr, seed: u64) -> Result<(), DemoError> {
    let all = async {
        for _ in 0..ROUNDS {
            for tokens in [LONG, SHORT] {
                let asks = (0..PROMPTS).map(|n| {
                    let text = words::words(seed ^ (tokens as u64) << 32 ^ n, tokens);
                    client::ask(gateway, "demo-probe", body(text), |_| {})
                });
                futures::future::try_join_all(asks).await?;
            }
        }
        Ok(())
    };
    match timeout(PATIENCE, all).await {
        Ok(probed) => probed.map_err(DemoError::Probe),
        Err(_) => Err(DemoError::NotReady),
    }
}

fn body(text: String) -> Bytes {
    let body = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "stream": true,
        "stream_options": {"include_usage": true},
        "max_completion_tokens": OUTPUT,
        "ignore_eos": true,
    });
    Bytes::from(body.to_string())
}
