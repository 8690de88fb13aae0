use super::*;
use tower_ttft::policy::Routing;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("dir/pool.yaml"))
}

/// The only complaint about `text`.
#[track_caller]
fn complaint(text: &str) -> String {
    let error = parse(text).expect_err(text);
    assert_eq!(error.problems.len(), 1, "{error}");
    error.to_string()
}

const MINIMAL: &str = "endpoints: [{url: 'http://127.0.0.1:8000'}]\n";

#[test]
fn the_least_that_works() {
    let config = parse(MINIMAL).unwrap();
    assert_eq!(config.listen, DEFAULT_LISTEN);
    assert_eq!(config.policy, PolicyConfig::default());
    assert_eq!(config.limits, Limits::default());
    assert_eq!(
        config.endpoints,
        [EndpointConfig {
            address: "127.0.0.1:8000".into(),
            model: None,
            kv_events: Source::Auto,
            replay: Source::Auto,
            gpu: None,
        }]
    );
    assert_eq!(parse("endpoints: [http://127.0.0.1:8000]").unwrap(), config);
}

const FULL: &str = r#"
listen: "0.0.0.0:8080"
admin: "127.0.0.1:0"
adminOpen: true
models:
  - name: tiny
    aliases: [small, gpt-4o]
    tokenizer: src
    chatTemplate: Cargo.toml
    chatTemplateKwargs: {enable_thinking: false, depth: {list: [1, 2.5, x, null]}}
    excludeToolsWhenToolChoiceNone: true
    endpoints:
      - http://10.0.0.1:8000
  - {name: named, tokenizer: src, chatTemplate: tool_use}
  - big
endpoints:
  - url: http://10.0.0.2:8000/
    model: big
    kvEvents: tcp://10.0.0.2:5557
    replay: none
    gpu: h100
  - {url: "http://[::1]:9000", kvEvents: auto, replay: auto}
policy:
  routing: P2c
  lambda: 1.5
  noEndpointWait: 5s
  firstTokenTimeout: 10m
  idleTimeout: 90s
  connectTimeout: 500ms
  headAfter: 15s
  retries: 2
  maxQueued: 10
  maxQueuedBytes: 1MiB
  loadMaxAge: 2s
  exposeEndpoint: true
limits:
  peekCap: 1MiB
  hardCap: 4MiB
  memoryBudget: 64MiB
  indexMemory: 128MiB
  maxConnections: 100
  headerTimeout: 5s
  headerBytes: 16KiB
  drain: 30s
  lameDuck: 1s
seed: 7
"#;

fn full() -> Config {
    // Relative to this crate, where `src` is a directory.
    Config::parse(
        FULL,
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("pool.yaml"),
    )
    .unwrap()
}

#[test]
fn all_that_can_be_said() {
    let c = full();
    assert!(c.admin_open);
    assert_eq!(c.models.len(), 3);
    assert_eq!(c.models[0].aliases, ["small".into(), "gpt-4o".into()]);
    assert_eq!(
        c.models[0].tokenizer.as_deref(),
        Some(&*Path::new(env!("CARGO_MANIFEST_DIR")).join("src"))
    );
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    assert_eq!(
        c.models[0].chat_template,
        Some(ChatTemplateConfig::File(file))
    );
    assert_eq!(
        serde_json::Value::Object(c.models[0].chat_template_kwargs.clone()),
        serde_json::json!({"enable_thinking": false, "depth": {"list": [1, 2.5, "x", null]}})
    );
    assert!(c.models[0].exclude_tools_when_tool_choice_none);
    assert_eq!(
        c.models[1].chat_template,
        Some(ChatTemplateConfig::Named("tool_use".into()))
    );
    assert_eq!(c.models[2], ModelConfig::new("big"));
    assert_eq!(c.endpoints.len(), 3);
    assert_eq!(c.endpoints[0].model.as_deref(), Some("tiny"));
    assert_eq!(&*c.endpoints[1].address, "10.0.0.2:8000");
    assert_eq!(
        c.endpoints[1].kv_events,
        "tcp://10.0.0.2:5557".parse().unwrap()
    );
    assert_eq!(c.endpoints[1].replay, Source::None);
    assert_eq!(&*c.endpoints[2].address, "[::1]:9000");
    assert_eq!(c.policy.spec.routing, Routing::P2c);
    assert_eq!(c.policy.spec.lambda, 1.5);
    assert_eq!(c.policy.spec.first_token_timeout, Duration::from_secs(600));
    assert_eq!(c.policy.connect_timeout, Duration::from_millis(500));
    assert_eq!(c.limits.peek_cap, 1 << 20);
    assert_eq!(c.limits.max_connections, Some(100));
    assert_eq!(c.seed, Some(7));
}

#[test]
fn what_is_shown_reads_back() {
    for config in [full(), parse(MINIMAL).unwrap()] {
        let shown = config.to_json().to_string();
        assert_eq!(
            Config::parse(&shown, Path::new("/pool.json")).unwrap(),
            config,
            "{shown}"
        );
    }
}

#[test]
fn mistakes_are_named_with_a_remedy() {
    for (text, expected) in [
        ("", "dir/pool.yaml"),
        (
            "endpoint: []\nendpoints: []",
            "pool.yaml:1: endpoint: unknown key; did you mean `endpoints`?",
        ),
        (
            "endpoints:\n- {ur1: 'http://a:1', url: 'http://a:1'}",
            "pool.yaml:2: endpoints[0].ur1: unknown key; did you mean `url`?",
        ),
        (
            "endpoints: [{url: 'http://a:1', lambda: 2}]",
            "endpoints[0].lambda: unknown key; it belongs in `policy`",
        ),
        (
            "endpoints: [http://a:1]\npolicy:\n  peekcap: 2",
            "pool.yaml:3: policy.peekcap: unknown key; did you mean `peekCap` in `limits`?",
        ),
        (
            "endpoints: [http://a:1]\nzzzzzz: 2",
            "zzzzzz: unknown key; the top of the file takes `listen`, `admin`",
        ),
        (
            "listen: 127.0.0.1:1",
            "endpoints: missing key `endpoints`; name at least one",
        ),
        (
            "endpoints: [{gpu: x}]",
            "endpoints[0].url: missing key `url`; write where",
        ),
        (
            "models: [{aliases: [x]}]",
            "models[0].name: missing key `name`",
        ),
        (
            "endpoints:\n",
            "endpoints: has no value; give it one or remove the key",
        ),
        ("endpoints: 3", "endpoints: expected a list, found a number"),
        ("- a", "expected a mapping with the keys `listen`"),
        (
            "endpoints: [a:1]",
            "`a:1` has no scheme; write `http://a:1`",
        ),
        (
            "endpoints: ['https://a:1']",
            "https to engines is not supported yet",
        ),
        (
            "endpoints: ['http://a:1/v1']",
            "must end after the port: write `http://a:1`",
        ),
        ("endpoints: ['http://']", "is no URL"),
        ("endpoints: ['http://a:99999']", "the port must be"),
        (
            "endpoints: [http://a:1, http://a:1]",
            "endpoints[1]: the address `a:1` is already taken by endpoints[0]",
        ),
        (
            "models: [tiny]\nendpoints: [{url: 'http://a:1', model: tinny}]",
            "endpoints[0].model: no model `tinny` is declared; did you mean `tiny`?",
        ),
        (
            "models: [a, {name: b, aliases: [a]}]",
            "models[1]: the name `a` is already taken by models[0]",
        ),
        (
            "models: [{name: a, tokenizer: no-such-dir}]",
            "models[0].tokenizer: directory `dir/no-such-dir`",
        ),
        (
            "models:\n- name: a\n  chatTemplate: x",
            "pool.yaml:3: models[0].chatTemplate: needs `tokenizer`",
        ),
        (
            "models: [{name: a, chatTemplateKwargs: {x: 1}}]",
            "models[0].chatTemplateKwargs: needs `tokenizer`",
        ),
        (
            "models: [{name: a, excludeToolsWhenToolChoiceNone: true}]",
            "models[0].excludeToolsWhenToolChoiceNone: needs `tokenizer`",
        ),
        (
            "models: [{name: a, tokenizer: /, chatTemplate: t.jinja}]",
            "models[0].chatTemplate: file `dir/t.jinja`: No such file",
        ),
        (
            "models: [{name: a, tokenizer: /, chatTemplate: /.}]",
            "models[0].chatTemplate: `/.` is no file",
        ),
        (
            "models: [{name: a, tokenizer: /, chatTemplate: '{{ messages }}'}]",
            "is the text of a template; write it to a file",
        ),
        (
            "models: [{name: a, tokenizer: /, chatTemplateKwargs: [x]}]",
            "models[0].chatTemplateKwargs: expected a mapping, found a list",
        ),
        (
            "models: [{name: a, tokenizer: /, chatTemplatKwargs: {}}]",
            "did you mean `chatTemplateKwargs`?",
        ),
        (
            "models: [{name: 7}]",
            "models[0].name: expected a text (put quotes around it), found a number",
        ),
        (
            "endpoints: [{url: 'http://a:1', kvEvents: atuo}]",
            "`atuo` is no address of events; did you mean `auto`?",
        ),
        (
            "endpoints: []
policy: {lambda: 101}",
            "policy.lambda: must be a number from 0 to 100",
        ),
        (
            "endpoints: [{url: 'http://a:1', kvEvents: none, replay: 'tcp://a:2'}]",
            "endpoints[0].replay: needs KV events",
        ),
        (
            "listen: ':8080'\nendpoints: []",
            "pool.yaml:1: listen: `:8080` is no address to listen on; write `0.0.0.0:8080`",
        ),
        (
            "listen: localhost:80\nendpoints: []",
            "write `127.0.0.1:80`",
        ),
        (
            "listen: 127.0.0.1:99\nadmin: 127.0.0.1:99\nendpoints: []",
            "admin: must differ from `listen`",
        ),
        (
            "endpoints: []\npolicy: {routing: pricedtfft}",
            "policy.routing: `pricedtfft` is not known; did you mean `PricedTtft`?",
        ),
        (
            "endpoints: []\npolicy: {idleTimeout: 30}",
            "policy.idleTimeout: a duration needs a unit; write `30s`",
        ),
        (
            "endpoints: []\npolicy: {idleTimeout: 30 parsecs}",
            "`30 parsecs` is no duration; write a number and a unit",
        ),
        (
            "endpoints: []\npolicy: {idleTimeout: 0s}",
            "policy.idleTimeout: must be longer than 0s",
        ),
        (
            "endpoints: []\npolicy: {lambda: -1}",
            "policy.lambda: must be a finite number of at least 0",
        ),
        (
            "endpoints: []\npolicy: {lambda: .inf}",
            "pool.yaml:2: is no valid YAML: non-finite float",
        ),
        (
            "endpoints: []\npolicy: {retries: 99}",
            "policy.retries: must be a whole number from 0 to 8",
        ),
        (
            "endpoints: []\nlimits: {peekCap: many}",
            "limits.peekCap: must be a size",
        ),
        (
            "endpoints: []\nlimits: {hardCap: 1MiB}",
            "limits.peekCap: must not be over `hardCap`",
        ),
        (
            "endpoints: []\nlimits: {headerBytes: 1}",
            "limits.headerBytes: must be from 8KiB to 1MiB",
        ),
        ("endpoints: []\nseed: -1", "seed: must be a whole number"),
        (
            "endpoints: []\nadminOpen: maybe",
            "adminOpen: expected true or false",
        ),
        ("endpoints: [\n", "is no valid YAML"),
        ("endpoints: []\nendpoints: []", "is no valid YAML"),
    ] {
        let message = complaint(text);
        assert!(message.contains(expected), "{text:?}: {message}");
    }
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let error =
        parse("lissen: x\nendpoints: [{ur: 1}, 'ftp:']\npolicy: {lambda: x, idleTimeout: 5}")
            .unwrap_err();
    let paths: Vec<_> = error.problems.iter().map(|p| p.path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "lissen",
            "endpoints[0].ur",
            "endpoints[0].url",
            "endpoints[1]",
            "policy.lambda",
            "policy.idleTimeout"
        ],
        "{error}"
    );
    assert!(error.problems.iter().all(|p| p.line.is_some()), "{error}");
}

#[test]
fn every_key_is_missed_when_one_letter_is_wrong() {
    // Whatever key of the full example loses a letter: an error that names it, never silence.
    let shown = full().to_json();
    let mut tried = 0;
    let sections = [
        shown.clone(),
        shown["models"][0].clone(),
        shown["endpoints"][0].clone(),
        shown["policy"].clone(),
        shown["limits"].clone(),
    ];
    for key in sections.iter().flat_map(|s| s.as_object().unwrap().keys()) {
        let cut = &key[..key.len() - 1];
        let text = shown
            .to_string()
            .replacen(&format!("\"{key}\":"), &format!("\"{cut}\":"), 1);
        let error = Config::parse(&text, Path::new("/pool.json")).expect_err(&text);
        assert!(
            error.to_string().contains(&format!("`{key}`")),
            "{key}: {error}"
        );
        tried += 1;
    }
    assert!(tried > 30, "{tried}");
}

#[test]
fn secrets_in_urls_are_not_repeated() {
    let message = complaint("endpoints: ['http://me:hunter2@a:1']");
    assert!(message.contains("must not hold"), "{message}");
    assert!(!message.contains("hunter2"), "{message}");
}

#[test]
fn a_missing_file_is_named() {
    let error = Config::load(Path::new("/no/such/pool.yaml")).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("/no/such/pool.yaml: cannot be read: "),
        "{error}"
    );
}
