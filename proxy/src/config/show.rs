//! The effective configuration in the shape of the file. What it shows can be read back.

use super::{ChatTemplateConfig, Config, EndpointConfig, ModelConfig, read, units};
use serde_json::{Map, Value, json};

pub(super) fn config(c: &Config) -> Value {
    let p = &c.policy;
    let l = &c.limits;
    let routing = read::ROUTING
        .iter()
        .find(|(_, r)| *r == p.spec.routing)
        .map(|(name, _)| *name);
    let mut limits = json!({
        "peekCap": l.peek_cap,
        "hardCap": l.hard_cap,
        "memoryBudget": l.memory_budget,
        "indexMemory": l.index_memory,
        "headerTimeout": units::show(l.header_timeout),
        "headerBytes": l.header_bytes,
        "drain": units::show(l.drain),
        "lameDuck": units::show(l.lame_duck),
    });
    if let Some(n) = l.max_connections {
        limits["maxConnections"] = n.into();
    }
    let mut out = json!({
        "listen": c.listen.to_string(),
        "admin": c.admin.to_string(),
        "adminOpen": c.admin_open,
        "models": c.models.iter().map(model).collect::<Vec<_>>(),
        "endpoints": c.endpoints.iter().map(endpoint).collect::<Vec<_>>(),
        "policy": {
            "routing": routing,
            "lambda": p.spec.lambda,
            "noEndpointWait": units::show(p.spec.no_endpoint_wait),
            "firstTokenTimeout": units::show(p.spec.first_token_timeout),
            "idleTimeout": units::show(p.spec.idle_timeout),
            "connectTimeout": units::show(p.connect_timeout),
            "headAfter": units::show(p.head_after),
            "retries": p.spec.retries,
            "maxQueued": p.spec.max_queued,
            "maxQueuedBytes": p.spec.max_queued_bytes,
            "loadMaxAge": units::show(p.spec.load_max_age),
            "exposeEndpoint": p.expose_endpoint,
        },
        "limits": limits,
    });
    if let Some(seed) = c.seed {
        out["seed"] = seed.into();
    }
    out
}

fn model(m: &ModelConfig) -> Value {
    let mut out = Map::new();
    out.insert("name".into(), json!(m.name));
    if !m.aliases.is_empty() {
        out.insert("aliases".into(), json!(m.aliases));
    }
    if let Some(dir) = &m.tokenizer {
        out.insert("tokenizer".into(), json!(dir));
    }
    match &m.chat_template {
        Some(ChatTemplateConfig::File(file)) => out.insert("chatTemplate".into(), json!(file)),
        Some(ChatTemplateConfig::Named(name)) => out.insert("chatTemplate".into(), json!(name)),
        None => None,
    };
    if !m.chat_template_kwargs.is_empty() {
        out.insert("chatTemplateKwargs".into(), json!(m.chat_template_kwargs));
    }
    if m.exclude_tools_when_tool_choice_none {
        out.insert("excludeToolsWhenToolChoiceNone".into(), json!(true));
    }
    Value::Object(out)
}

fn endpoint(e: &EndpointConfig) -> Value {
    let mut out = Map::new();
    out.insert("url".into(), json!(format!("http://{}", e.address)));
    if let Some(model) = &e.model {
        out.insert("model".into(), json!(model));
    }
    out.insert("kvEvents".into(), json!(e.kv_events.to_string()));
    out.insert("replay".into(), json!(e.replay.to_string()));
    if let Some(gpu) = &e.gpu {
        out.insert("gpu".into(), json!(gpu));
    }
    Value::Object(out)
}
