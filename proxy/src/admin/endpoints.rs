//! `/endpoints`: what is known of each endpoint, and what to do about it.

use crate::{
    app::{Directory, EndpointView},
    config::EndpointConfig,
};
use serde_json::{Value, json};
use tower_ttft::{
    chain::ATOM_TOKENS,
    pool::{AuditState, EndpointStatus},
    vllm::{EngineState, EngineStatus},
};

/// Prompt tokens of the example that `idleTtft1k` is about.
const EXAMPLE_TOKENS: f64 = 1000.0;

pub(super) fn page(directory: &Directory) -> Value {
    directory.endpoints().iter().map(endpoint).collect()
}

fn endpoint(view: &EndpointView) -> Value {
    let members: Vec<_> = view
        .members
        .iter()
        .map(|m| {
            let mut value = json!(m);
            // The part of a cold 1,000-token prompt that is this endpoint's own: its prefill.
            value["idlePrefill1k"] = json!(m.seconds_per_token * EXAMPLE_TOKENS);
            value
        })
        .collect();
    json!({
        "url": format!("http://{}", view.config.address),
        "model": view.model,
        "ready": view.members.iter().any(|m| m.ready),
        "kvEvents": view.config.kv_events.to_string(),
        "replay": view.config.replay.to_string(),
        "gpu": view.config.gpu,
        "conditions": conditions(view),
        "ranks": members,
        "engine": view.engine,
    })
}

/// What an operator should know, each with a remedy where there is one.
fn conditions(view: &EndpointView) -> Vec<String> {
    let mut out: Vec<String> = view.condition.iter().cloned().collect();
    let Some(engine) = &view.engine else {
        out.push("has not been asked yet".to_owned());
        return out;
    };
    out.extend(engine.conditions.iter().cloned());
    out.extend(state(&view.config, engine));
    for events in &engine.events {
        if let Some(why) = &events.why {
            let rank = events
                .rank
                .map(|r| format!(" of rank {r}"))
                .unwrap_or_default();
            out.push(format!(
                "KV events{rank}: {why}; without them residency is guessed from our own routing"
            ));
        }
        if let Some(size) = events
            .block_size
            .filter(|s| !(*s as usize).is_multiple_of(ATOM_TOKENS))
        {
            out.push(format!(
                "blocks of {size} tokens are no multiple of {ATOM_TOKENS}: residency is guessed from our own routing; start the engine with a `--block-size` that is one"
            ));
        }
    }
    let silent = |m: &EndpointStatus| m.audit == AuditState::Off && m.audited.answers > 0;
    if view.members.iter().any(silent) {
        out.push(
            "answers do not say how many prompt tokens were cached, so what we believe cannot be checked; start the engine with `--enable-prompt-tokens-details`"
                .to_owned(),
        );
    }
    if view.members.iter().any(|m| m.breaker_open) {
        out.push("failed several requests in a row: gets none for a moment".to_owned());
    }
    out
}

fn state(config: &EndpointConfig, engine: &EngineStatus) -> Option<String> {
    let host = config
        .address
        .rsplit_once(':')
        .map_or(&*config.address, |(host, _)| host);
    let text = match engine.state {
        EngineState::Ready => return None,
        EngineState::Starting => {
            "has not been reached yet: engines refuse connections until their model is loaded"
        }
        EngineState::Unhealthy => "answers that it is not healthy",
        EngineState::Asleep => "is asleep: wake it with `/wake_up`",
        EngineState::Unreachable => {
            "cannot be reached: no route, no such name, or packets are dropped"
        }
        EngineState::Down => "refuses connections: its process is gone",
    };
    // Kubernetes gives pods VLLM_PORT=tcp://… when a Service is named so, and vLLM takes that for its own setting.
    let trap = host == "vllm" || host.starts_with("vllm.");
    let hint = match engine.state {
        EngineState::Starting | EngineState::Down if trap => {
            "; if it never starts: a Service named `vllm` makes Kubernetes set VLLM_PORT in its pods, which vLLM cannot read; rename the Service or set `enableServiceLinks: false`"
        }
        _ => "",
    };
    Some(format!("{text}{hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower_ttft::vllm::{EventsStatus, Source};

    fn view(address: &str, engine: EngineStatus) -> EndpointView {
        EndpointView {
            config: EndpointConfig {
                address: address.into(),
                model: None,
                kv_events: Source::Auto,
                replay: Source::Auto,
                gpu: None,
            },
            model: None,
            engine: Some(engine),
            condition: None,
            members: Vec::new(),
        }
    }

    #[test]
    fn conditions_come_with_remedies() {
        let events = EventsStatus {
            why: Some("the engine publishes none".into()),
            block_size: Some(24),
            ..Default::default()
        };
        let texts = conditions(&view(
            "vllm.default:8000",
            EngineStatus {
                state: EngineState::Down,
                events: vec![events],
                ..Default::default()
            },
        ));
        for (i, part) in ["VLLM_PORT", "residency is guessed", "blocks of 24 tokens"]
            .iter()
            .enumerate()
        {
            assert!(texts[i].contains(part), "{texts:?}");
        }
        let fine = EngineStatus {
            state: EngineState::Ready,
            ..Default::default()
        };
        assert_eq!(conditions(&view("vllm:8000", fine)), Vec::<String>::new());
    }

    #[test]
    fn is_json_with_what_operators_look_for() {
        let value = endpoint(&view("a:1", EngineStatus::default()));
        assert_eq!(value["url"], "http://a:1");
        assert_eq!(value["ready"], false);
        assert_eq!(value["engine"]["state"], "starting");
        assert!(
            value["conditions"][0]
                .as_str()
                .unwrap()
                .starts_with("has not been reached")
        );
    }
}
