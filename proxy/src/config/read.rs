//! The keys of a pool file and what they must hold.

use super::{
    ChatTemplateConfig, Config, DEFAULT_ADMIN, DEFAULT_LISTEN, EndpointConfig, Limits, ModelConfig,
    PolicyConfig, Problem,
    decode::{At, Decoder, Section, nearest},
    node::{Node, Value},
};
use std::{collections::BTreeMap, path::Path, sync::Arc};
use tower_ttft::{
    policy::{PolicySpec, Routing},
    vllm::Source,
};

const TOP: Section = Section {
    name: "the top of the file",
    keys: &[
        "listen",
        "admin",
        "adminOpen",
        "models",
        "endpoints",
        "policy",
        "limits",
        "seed",
    ],
};
const MODEL: Section = Section {
    name: "an entry of `models`",
    keys: &[
        "name",
        "aliases",
        "tokenizer",
        "chatTemplate",
        "chatTemplateKwargs",
        "excludeToolsWhenToolChoiceNone",
        "endpoints",
    ],
};
const ENDPOINT: Section = Section {
    name: "an entry of `endpoints`",
    keys: &["url", "model", "kvEvents", "replay", "gpu"],
};
const POLICY: Section = Section {
    name: "`policy`",
    keys: &[
        "routing",
        "lambda",
        "noEndpointWait",
        "firstTokenTimeout",
        "idleTimeout",
        "connectTimeout",
        "headAfter",
        "retries",
        "maxQueued",
        "maxQueuedBytes",
        "loadMaxAge",
        "exposeEndpoint",
    ],
};
const LIMITS: Section = Section {
    name: "`limits`",
    keys: &[
        "peekCap",
        "hardCap",
        "memoryBudget",
        "indexMemory",
        "maxConnections",
        "headerTimeout",
        "headerBytes",
        "drain",
        "lameDuck",
    ],
};
const ALL: &[&Section] = &[&TOP, &MODEL, &ENDPOINT, &POLICY, &LIMITS];

/// The kinds of routing by the names that files use.
pub(super) const ROUTING: &[(&str, Routing)] = &[
    ("PricedTtft", Routing::PricedTtft),
    ("Ttft", Routing::Ttft),
    ("LMetric", Routing::LMetric),
    ("P2c", Routing::P2c),
    ("LeastLoad", Routing::LeastLoad),
    ("Random", Routing::Random),
];

/// Tries of a request at other endpoints are bounded: each one costs a prefill.
const MAX_RETRIES: u64 = 8;

pub(super) fn config(text: &str, base: &Path) -> Result<Config, Vec<Problem>> {
    let node = Node::parse(text).map_err(|error| {
        vec![Problem {
            path: String::new(),
            line: error.location().map(|l| l.line()).filter(|l| *l > 0),
            message: format!(
                "is no valid YAML: {}",
                first_line(&error.without_snippet().to_string())
            ),
        }]
    })?;
    let mut d = Decoder::default();
    let config = top(&mut d, &node, base);
    match (config, d.finish()) {
        (Some(config), problems) if problems.is_empty() => Ok(config),
        (_, problems) => Err(problems),
    }
}

fn top(d: &mut Decoder, node: &Node, base: &Path) -> Option<Config> {
    let at = At {
        node,
        path: String::new(),
    };
    if node.value == Value::Null {
        d.complain(&at, "is empty; name at least one endpoint, such as `endpoints: [{url: http://127.0.0.1:8000}]`");
        return None;
    }
    let f = d.map(&at, &TOP, ALL)?;
    let listen = d.socket(f.get("listen"), DEFAULT_LISTEN);
    let admin = d.socket(f.get("admin"), DEFAULT_ADMIN);
    if listen == admin && listen.port() != 0 {
        d.problem("admin", line(&f.get("admin")), "must differ from `listen`");
    }
    let admin_open = d.bool(f.get("adminOpen"), false);

    let mut models = Vec::new();
    let mut endpoints = Vec::new();
    if let Some(at) = f.get("models") {
        for at in d.items(&at) {
            if let Some(m) = model(d, &at, base, &mut endpoints) {
                models.push((at, m));
            }
        }
    } else if !f.has("models") {
        d.required(
            &f,
            "endpoints",
            "name at least one, such as `endpoints: [{url: http://127.0.0.1:8000}]`, or a model in `models`",
        );
    }
    if let Some(at) = f.get("endpoints") {
        for at in d.items(&at) {
            if let Some(e) = endpoint(d, &at, None) {
                endpoints.push((at, e));
            }
        }
    }
    names(d, &models);
    addresses(d, &models, &endpoints);

    let policy = match f.get("policy") {
        Some(at) => policy(d, &at),
        None => PolicyConfig::default(),
    };
    let limits = match f.get("limits") {
        Some(at) => limits(d, &at),
        None => Limits::default(),
    };
    let seed = f.get("seed").map(|at| d.count(Some(at), 0, 0..=u64::MAX));
    Some(Config {
        listen,
        admin,
        admin_open,
        models: models.into_iter().map(|(_, m)| m).collect(),
        endpoints: endpoints.into_iter().map(|(_, e)| e).collect(),
        policy,
        limits,
        seed,
    })
}

fn model<'a>(
    d: &mut Decoder,
    at: &At<'a>,
    base: &Path,
    endpoints: &mut Vec<(At<'a>, EndpointConfig)>,
) -> Option<ModelConfig> {
    // `models: [tiny]` says all that a model must say.
    if let Value::Text(name) = &at.node.value
        && !name.is_empty()
    {
        return Some(ModelConfig::new(name.as_str()));
    }
    let f = d.map(at, &MODEL, ALL)?;
    let name: Option<Arc<str>> = d
        .required(&f, "name", "write the name that the engines serve it under")
        .and_then(|at| d.text(&at).map(Into::into));
    let aliases = match f.get("aliases") {
        Some(at) => d
            .items(&at)
            .iter()
            .filter_map(|at| d.text(at).map(Into::into))
            .collect(),
        None => Vec::new(),
    };
    let tokenizer = f.get("tokenizer").and_then(|at| {
        let dir = base.join(d.text(&at)?);
        // What is in it is for the tokenizer's loader to judge; that it is there can be said at once.
        match std::fs::metadata(&dir) {
            Ok(m) if m.is_dir() => {}
            Ok(_) => d.complain(
                &at,
                format_args!(
                    "`{}` is a file; name the directory that holds tokenizer.json",
                    dir.display()
                ),
            ),
            Err(error) => d.complain(
                &at,
                format_args!(
                    "directory `{}`: {error}; relative paths start at the pool file's directory",
                    dir.display()
                ),
            ),
        }
        Some(dir)
    });
    if !f.has("tokenizer") {
        for key in [
            "chatTemplate",
            "chatTemplateKwargs",
            "excludeToolsWhenToolChoiceNone",
        ] {
            if let Some(at) = f.get(key) {
                d.complain(
                    &at,
                    "needs `tokenizer`, the directory of the model's tokenizer: without one the engines are asked, who render as they were started; add it or remove this key",
                );
            }
        }
    }
    let chat_template = f
        .get("chatTemplate")
        .and_then(|at| chat_template(d, &at, base));
    let chat_template_kwargs = f
        .get("chatTemplateKwargs")
        .map(|at| d.object(&at))
        .unwrap_or_default();
    let exclude_tools_when_tool_choice_none =
        d.bool(f.get("excludeToolsWhenToolChoiceNone"), false);
    if let Some(at) = f.get("endpoints") {
        for at in d.items(&at) {
            if let Some(e) = endpoint(d, &at, name.as_ref()) {
                endpoints.push((at, e));
            }
        }
    }
    Some(ModelConfig {
        name: name?,
        aliases,
        tokenizer,
        chat_template,
        chat_template_kwargs,
        exclude_tools_when_tool_choice_none,
    })
}

/// A file if there is one, else a name, which the tokenizer's loader knows or not.
fn chat_template(d: &mut Decoder, at: &At<'_>, base: &Path) -> Option<ChatTemplateConfig> {
    let text = d.text(at)?;
    if text.contains("{%") || text.contains("{{") {
        d.complain(
            at,
            "is the text of a template; write it to a file and name that",
        );
        return None;
    }
    let file = base.join(text);
    match std::fs::metadata(&file) {
        Ok(m) if m.is_file() => Some(ChatTemplateConfig::File(file)),
        // A directory may happen to be called as a template is.
        _ if !text.contains(['/', '.']) => Some(ChatTemplateConfig::Named(text.into())),
        Ok(_) => {
            d.complain(
                at,
                format_args!(
                    "`{}` is no file; name one that holds a chat template",
                    file.display()
                ),
            );
            None
        }
        Err(error) => {
            d.complain(
                at,
                format_args!(
                    "file `{}`: {error}; relative paths start at the pool file's directory",
                    file.display()
                ),
            );
            None
        }
    }
}

fn endpoint(d: &mut Decoder, at: &At<'_>, of: Option<&Arc<str>>) -> Option<EndpointConfig> {
    if let Value::Text(_) = &at.node.value {
        return Some(EndpointConfig {
            address: url(d, at)?,
            model: of.cloned(),
            kv_events: Source::Auto,
            replay: Source::Auto,
            gpu: None,
        });
    }
    let f = d.map(at, &ENDPOINT, ALL)?;
    let address = d
        .required(
            &f,
            "url",
            "write where the engine listens, such as `url: http://127.0.0.1:8000`",
        )
        .and_then(|at| url(d, &at));
    let model: Option<Arc<str>> = f.get("model").and_then(|at| d.text(&at).map(Into::into));
    if let (Some(of), Some(model)) = (of, &model)
        && of != model
    {
        let at = f.get("model").unwrap_or_else(|| at.clone());
        d.complain(&at, format_args!("this endpoint stands under the model `{of}`; remove the key or move the entry to the top-level `endpoints`"));
    }
    let kv_events = zmq(d, f.get("kvEvents"));
    let replay = zmq(d, f.get("replay"));
    if kv_events == Source::None && matches!(replay, Source::Tcp(_)) {
        d.problem(
            &format!("{}.replay", at.path),
            line(&f.get("replay")),
            "needs KV events, which `kvEvents: none` turns off",
        );
    }
    let gpu = f.get("gpu").and_then(|at| d.text(&at).map(Into::into));
    Some(EndpointConfig {
        address: address?,
        model: of.cloned().or(model),
        kv_events,
        replay,
        gpu,
    })
}

/// `host:port` of an engine's URL. Engines are spoken to in plain HTTP at their root.
fn url(d: &mut Decoder, at: &At<'_>) -> Option<Arc<str>> {
    let text = d.text(at)?;
    let parsed = text.parse::<http::Uri>().ok().and_then(|uri| {
        let authority = uri.authority()?.clone();
        Some((uri, authority))
    });
    let Some((uri, authority)) = parsed else {
        d.complain(
            at,
            format_args!("`{text}` is no URL; write `http://HOST:PORT`"),
        );
        return None;
    };
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => {
            d.complain(
                at,
                "https to engines is not supported yet; write `http://HOST:PORT`",
            );
            return None;
        }
        _ => {
            d.complain(
                at,
                format_args!("`{text}` has no scheme; write `http://{text}`"),
            );
            return None;
        }
    }
    if authority.as_str().contains('@') {
        // Not repeated in the message: it may be a secret.
        d.complain(at, "must not hold a user name or a password");
        return None;
    }
    if authority.host().is_empty() || authority.as_str().ends_with(':') {
        d.complain(
            at,
            format_args!("`{text}` is no URL; write `http://HOST:PORT`"),
        );
        return None;
    }
    if !matches!(uri.path_and_query().map(|p| p.as_str()), None | Some("/")) {
        d.complain(
            at,
            format_args!(
                "must end after the port: write `http://{authority}` (requests keep their own path)"
            ),
        );
        return None;
    }
    // What follows the host, which may be an IPv6 address in brackets.
    let rest = authority
        .as_str()
        .get(authority.host().len()..)
        .unwrap_or("");
    match rest.strip_prefix(':') {
        None if rest.is_empty() => Some(format!("{authority}:80").into()),
        Some(port) if port.parse::<u16>().is_ok_and(|p| p > 0) => Some(authority.as_str().into()),
        _ => {
            d.complain(at, "the port must be a number from 1 to 65535");
            None
        }
    }
}

fn zmq(d: &mut Decoder, at: Option<At<'_>>) -> Source {
    let Some(at) = at else {
        return Source::Auto;
    };
    let Some(text) = d.text(&at) else {
        return Source::Auto;
    };
    match text.parse() {
        Ok(source) => source,
        Err(_) => {
            let hint = match nearest(text, &["auto", "none"]) {
                Some(word) => format!("did you mean `{word}`?"),
                None => "write `auto`, `none` or `tcp://HOST:PORT`".to_owned(),
            };
            d.complain(
                &at,
                format_args!("`{text}` is no address of events; {hint}"),
            );
            Source::Auto
        }
    }
}

fn policy(d: &mut Decoder, at: &At<'_>) -> PolicyConfig {
    let p = PolicyConfig::default();
    let Some(f) = d.map(at, &POLICY, ALL) else {
        return p;
    };
    let spec = p.spec;
    PolicyConfig {
        spec: PolicySpec {
            routing: d.choice(f.get("routing"), spec.routing, ROUTING),
            lambda: lambda(d, f.get("lambda"), spec.lambda),
            no_endpoint_wait: d.duration(f.get("noEndpointWait"), spec.no_endpoint_wait),
            first_token_timeout: positive(d, f.get("firstTokenTimeout"), spec.first_token_timeout),
            idle_timeout: positive(d, f.get("idleTimeout"), spec.idle_timeout),
            retries: d.count(f.get("retries"), spec.retries.into(), 0..=MAX_RETRIES) as u32,
            max_queued: d.count(f.get("maxQueued"), spec.max_queued as u64, 0..=1_000_000) as usize,
            max_queued_bytes: d.size(f.get("maxQueuedBytes"), spec.max_queued_bytes as u64)
                as usize,
            load_max_age: positive(d, f.get("loadMaxAge"), spec.load_max_age),
        },
        connect_timeout: positive(d, f.get("connectTimeout"), p.connect_timeout),
        head_after: positive(d, f.get("headAfter"), p.head_after),
        expose_endpoint: d.bool(f.get("exposeEndpoint"), p.expose_endpoint),
    }
}

/// λ: over 100 nothing but the own prefill would count.
fn lambda(d: &mut Decoder, at: Option<At<'_>>, default: f64) -> f64 {
    let value = d.number(at.clone(), default);
    match at {
        Some(at) if value > 100.0 => {
            d.complain(&at, "must be a number from 0 to 100");
            default
        }
        _ => value,
    }
}

fn limits(d: &mut Decoder, at: &At<'_>) -> Limits {
    let l = Limits::default();
    let Some(f) = d.map(at, &LIMITS, ALL) else {
        return l;
    };
    let limits = Limits {
        peek_cap: d.size(f.get("peekCap"), l.peek_cap),
        hard_cap: d.size(f.get("hardCap"), l.hard_cap),
        memory_budget: d.size(f.get("memoryBudget"), l.memory_budget),
        index_memory: d.size(f.get("indexMemory"), l.index_memory),
        max_connections: f
            .get("maxConnections")
            .map(|at| d.count(Some(at), 1, 1..=10_000_000)),
        header_timeout: positive(d, f.get("headerTimeout"), l.header_timeout),
        header_bytes: d.size(f.get("headerBytes"), l.header_bytes),
        drain: d.duration(f.get("drain"), l.drain),
        lame_duck: d.duration(f.get("lameDuck"), l.lame_duck),
    };
    if limits.peek_cap > limits.hard_cap {
        d.problem(
            "limits.peekCap",
            line(&f.get("peekCap")),
            format_args!("must not be over `hardCap` ({} bytes)", limits.hard_cap),
        );
    }
    if limits.peek_cap > limits.memory_budget {
        d.problem(
            "limits.memoryBudget",
            line(&f.get("memoryBudget")),
            format_args!(
                "must hold at least one body of `peekCap` ({} bytes)",
                limits.peek_cap
            ),
        );
    }
    // hyper refuses to start with less than its own read buffer.
    if limits.header_bytes < 8192 || limits.header_bytes > 1 << 20 {
        d.problem(
            "limits.headerBytes",
            line(&f.get("headerBytes")),
            "must be from 8KiB to 1MiB",
        );
    }
    limits
}

fn positive(
    d: &mut Decoder,
    at: Option<At<'_>>,
    default: std::time::Duration,
) -> std::time::Duration {
    let value = d.duration(at.clone(), default);
    match at {
        Some(at) if value.is_zero() => {
            d.complain(&at, "must be longer than 0s");
            default
        }
        _ => value,
    }
}

/// Names and aliases must tell models apart.
fn names(d: &mut Decoder, models: &[(At<'_>, ModelConfig)]) {
    let mut seen = BTreeMap::new();
    for (at, model) in models {
        for name in std::iter::once(&model.name).chain(&model.aliases) {
            if let Some(first) = seen.insert(name.clone(), at.path.clone()) {
                d.complain(
                    at,
                    format_args!("the name `{name}` is already taken by {first}"),
                );
            }
        }
    }
}

/// Endpoints must name declared models, and no address may stand twice.
fn addresses(
    d: &mut Decoder,
    models: &[(At<'_>, ModelConfig)],
    endpoints: &[(At<'_>, EndpointConfig)],
) {
    let names: Vec<&str> = models.iter().map(|(_, m)| &*m.name).collect();
    let mut seen = BTreeMap::new();
    for (at, e) in endpoints {
        if let Some(first) = seen.insert(e.address.clone(), at.path.clone()) {
            d.complain(
                at,
                format_args!("the address `{}` is already taken by {first}", e.address),
            );
        }
        if let Some(model) = &e.model
            && !names.contains(&&**model)
        {
            let hint = match nearest(model, &names) {
                Some(name) => format!("did you mean `{name}`?"),
                None => "add it to `models`, or remove the key: then the endpoint serves what its engine says".to_owned(),
            };
            d.problem(
                &format!("{}.model", at.path),
                at.node.line,
                format_args!("no model `{model}` is declared; {hint}"),
            );
        }
    }
}

fn line(at: &Option<At<'_>>) -> u64 {
    at.as_ref().map_or(0, |at| at.node.line)
}

/// The parser's message without the place that it repeats.
fn first_line(text: &str) -> &str {
    let line = text.lines().next().unwrap_or(text);
    let line = line.strip_prefix("error: ").unwrap_or(line);
    match line.split_once(": ") {
        Some((place, message)) if place.starts_with("line ") => message,
        _ => line,
    }
}
