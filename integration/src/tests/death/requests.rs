//! Requests that are open when an engine dies, and what becomes of them.

use super::super::driver::{now, text};
use crate::{
    engine::MODEL,
    gateway::Gateway,
    http::{Answer, Event, Open, Request},
};
use anyhow::{Context, Result, bail, ensure};
use rand::rngs::StdRng;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

/// Streams that are opened until each API has one at the victim.
const MAX_STREAMS: usize = 24;

/// Words of a prompt that takes seconds, also when the machine is quick.
const LONG_WORDS: usize = 11_000;

/// Those that stream, with the name of the last event of an answer that is whole.
const APIS: [(&str, &str); 4] = [
    ("/v1/chat/completions", "[DONE]"),
    ("/v1/completions", "[DONE]"),
    ("/v1/messages", "message_stop"),
    ("/v1/responses", "response.completed"),
];

/// An answer that has begun.
pub(super) struct Stream {
    pub(super) path: &'static str,
    endpoint: String,
    open: Open,
}

/// A request without an answer yet.
pub(super) struct Early {
    pub(super) id: String,
    stream: bool,
    task: JoinHandle<Result<Answer>>,
}

/// Opens streams of all APIs until each has one at the victim; the others are at the survivor.
pub(super) async fn open_streams(
    gateway: &Gateway,
    victim: &str,
    rng: &mut StdRng,
) -> Result<(Vec<Stream>, Vec<Stream>)> {
    let (mut streams, mut others) = (Vec::<Stream>::new(), Vec::new());
    for n in 0..MAX_STREAMS {
        let missing: Vec<_> = APIS
            .iter()
            .map(|(path, _)| *path)
            .filter(|path| streams.iter().all(|s| s.path != *path))
            .collect();
        let path = missing[n % missing.len()];
        let body = request(path, &rng_text(rng), 500, true);
        let mut open = Request::post(gateway.authority(), path, &body)
            .open()
            .await?;
        ensure!(open.status.is_success(), "{path}: {}", open.status);
        let event = open
            .event()
            .await?
            .with_context(|| format!("{path}: no event"))?;
        ensure!(!is_error(&event), "{path}: {}", event.data);
        let stream = Stream {
            path,
            endpoint: endpoint(&open.headers),
            open,
        };
        match stream.endpoint == victim {
            true => streams.push(stream),
            false => others.push(stream),
        }
        if streams.len() == APIS.len() {
            return Ok((streams, others));
        }
    }
    bail!("of {MAX_STREAMS} streams too few went to {}", victim)
}

/// Sends long prompts, streamed and not, until one of each is at the victim; those at the survivor are taken back.
pub(super) async fn open_early(
    gateway: &Gateway,
    victim: &str,
    rng: &mut StdRng,
) -> Result<Vec<Early>> {
    let mut early: Vec<Early> = Vec::new();
    // They keep the survivor as busy as the victim until both are there.
    let mut others = Vec::new();
    for n in 0..16 {
        let stream = n % 2 == 0;
        if early.iter().any(|e| e.stream == stream) {
            continue;
        }
        let id = format!("early-{}-{n}", now());
        let words = format!("{id} {}", text(rng, LONG_WORDS));
        let body = request("/v1/completions", &words, 4, stream);
        let authority = gateway.authority().to_owned();
        let header = id.clone();
        let task = tokio::spawn(async move {
            Request::post(&authority, "/v1/completions", &body)
                .header("x-request-id", header)
                .send()
                .await
        });
        let chosen = chosen(gateway, &id).await?;
        if chosen == victim {
            early.push(Early { id, stream, task });
        } else {
            others.push(task);
        }
        if early.len() == 2 {
            others.iter().for_each(JoinHandle::abort);
            // Time for the bytes to get there.
            sleep(Duration::from_millis(150)).await;
            ensure!(
                early.iter().all(|e| !e.task.is_finished()),
                "a long prompt was answered too quickly"
            );
            return Ok(early);
        }
    }
    bail!("of 16 long prompts too few went to {}", victim)
}

/// Where a request was sent, once it was.
async fn chosen(gateway: &Gateway, id: &str) -> Result<String> {
    let wait = async {
        loop {
            if let Ok(decision) = gateway.decision(id).await {
                return Ok(decision.chosen()?.authority().to_owned());
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(10), wait)
        .await
        .with_context(|| format!("no decision on {id}"))?
}

fn is_error(event: &Event) -> bool {
    let data: Value = serde_json::from_str(&event.data).unwrap_or_default();
    data["error"].is_object() || data["type"] == "error" || data["type"] == "response.failed"
}

/// The end of a stream whose engine died: an error in the shape of its API, then no proper end. Says when.
pub(super) async fn broken(mut stream: Stream) -> Result<Instant> {
    let mut last: Option<Event> = None;
    loop {
        match stream.open.event().await {
            Ok(Some(event)) => {
                ensure!(
                    event.data != "[DONE]",
                    "[DONE] behind {:?}",
                    last.map(|e| e.data)
                );
                if let Some(before) = last.filter(is_error) {
                    bail!("{} behind the error {}", event.data, before.data);
                }
                last = Some(event);
            }
            Ok(None) => bail!("a clean end behind {:?}", last.map(|e| e.data)),
            Err(_) => break,
        }
    }
    let ended = Instant::now();
    let last = last.context("no event before the end")?;
    let data: Value = serde_json::from_str(&last.data).context("the last event")?;
    let shape = match stream.path {
        "/v1/messages" => data["type"] == "error" && data["error"]["message"].is_string(),
        "/v1/responses" => {
            data["type"] == "response.failed" || data["error"]["message"].is_string()
        }
        _ => data["error"]["message"].is_string(),
    };
    // A core's death is told by vLLM itself, in one shape for all APIs.
    let engines_own = data["error"]["type"] == "InternalServerError";
    ensure!(shape || engines_own, "the last event was {}", last.data);
    Ok(ended)
}

/// A stream at the survivor comes to its proper end.
pub(super) async fn complete(stream: Stream) -> Result<()> {
    let (path, mark) = (stream.path, end_of(stream.path));
    let rest = timeout(Duration::from_secs(180), stream.open.finish())
        .await
        .with_context(|| format!("{path} at {} does not end", stream.endpoint))?;
    ensure!(
        rest.broken.is_none() && rest.text().contains(mark),
        "{path} at the survivor: {:?} {}",
        rest.broken,
        tail(&rest.text())
    );
    Ok(())
}

fn end_of(path: &str) -> &'static str {
    APIS.iter()
        .find(|(p, _)| *p == path)
        .map_or("[DONE]", |(_, end)| end)
}

fn tail(text: &str) -> String {
    let from = text.chars().count().saturating_sub(300);
    text.chars().skip(from).collect()
}

/// A request whose engine died before its first byte: a whole answer of someone else's.
pub(super) async fn elsewhere(request: Early, victim: &str) -> Result<()> {
    let answer = timeout(Duration::from_secs(120), request.task)
        .await
        .context("no answer")???;
    ensure!(
        answer.status == http::StatusCode::OK && answer.broken.is_none(),
        "{} {:?} {}",
        answer.status,
        answer.broken,
        tail(&answer.text())
    );
    ensure!(
        endpoint(&answer.headers) != victim,
        "the dead answered the request"
    );
    if request.stream {
        let done = answer.text().matches("[DONE]").count();
        ensure!(done == 1, "{done} ends: {}", tail(&answer.text()));
    } else {
        answer.json()?;
    }
    Ok(())
}

pub(super) fn rng_text(rng: &mut StdRng) -> String {
    format!("{} {}", now(), text(rng, 12))
}

pub(super) fn request(path: &str, prompt: &str, max_tokens: u32, stream: bool) -> Value {
    let messages = json!([{"role": "user", "content": prompt}]);
    match path {
        "/v1/completions" => {
            json!({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": true})
        }
        "/v1/messages" => {
            json!({"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream})
        }
        "/v1/responses" => {
            json!({"model": MODEL, "input": prompt, "max_output_tokens": max_tokens, "stream": stream})
        }
        _ => {
            json!({"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream, "ignore_eos": true})
        }
    }
}

pub(super) fn endpoint(headers: &http::HeaderMap) -> String {
    headers
        .get("x-forebay-endpoint")
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default()
        .to_owned()
}
