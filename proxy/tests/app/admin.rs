//! The pages for operators.

use super::{PORTS, PoolFile, SOON, ask, get, start};
use forebay_proxy::cli::{DecisionsArgs, decisions};
use std::{sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};
use tower_ttft::{
    chain::{Chain, ChainKind},
    endpoint::EndpointId,
    observe::{End, Observer, Usage},
    pool::{EndpointInfo, Excluded, Pick, PickRequest, Pool, Ticket},
    prompt::{Prompt, Reason, Source},
};

fn pick(pool: &Pool, id: &str) -> Ticket {
    let request = PickRequest {
        prompt: Prompt {
            chain: Chain::empty(ChainKind::Bytes),
            tokens: 100,
            ids: None,
            bytes: 400,
            whole_text: false,
            source: Source::Approximate(Reason::NoTokenizer),
        },
        stream: true,
        max_tokens: None,
        request_id: Some(id.into()),
    };
    match pool.pick(&request, &Excluded::default(), Instant::now()) {
        Pick::Dispatch(ticket) => ticket,
        other => panic!("{other:?}"),
    }
}

fn answer(mut ticket: Ticket) {
    let now = Instant::now();
    ticket.sent(now);
    ticket.first_token(now + Duration::from_millis(20));
    ticket.usage(Usage {
        prompt_tokens: 100,
        completion_tokens: 5,
        cached_tokens: Some(64),
    });
    ticket.end(now + Duration::from_millis(50), End::Complete);
}

/// A pool with one endpoint that is ready whatever anybody says.
fn member(pool: &Pool) {
    pool.insert(EndpointId::new("a:1"), EndpointInfo::default())
        .set_ready(true);
}

#[tokio::test]
async fn pages_and_methods() {
    let file = PoolFile::new(&format!("{PORTS}models: [tiny]\n"));
    let app = start(&file).await;
    for page in [
        "/live",
        "/metrics",
        "/config",
        "/endpoints",
        "/decisions",
        "/log-level",
    ] {
        assert_eq!(get(app.admin(), page).await.status, 200, "{page}");
        let post = ask(app.admin(), "POST", page, "").await;
        assert_eq!(post.status, 405, "{page}");
        assert!(post.head.contains("\r\nallow: GET, HEAD"), "{post:?}");
    }
    let missing = get(app.admin(), "/env.json").await;
    assert_eq!(missing.status, 404);
    assert!(missing.body.contains("/decisions"), "{missing:?}");
    assert_eq!(get(app.admin(), "/decisions?n=x").await.status, 400);

    let config = get(app.admin(), "/config").await.json();
    assert_eq!(config["config"]["models"][0]["name"], "tiny");
    assert_eq!(config["reload"]["error"], serde_json::Value::Null);
    let metrics = get(app.admin(), "/metrics").await.body;
    for name in [
        "process_cpu_seconds_total",
        "forebay_client_connections_open",
        "forebay_panics_total",
        "forebay_build_info",
    ] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }

    assert_eq!(
        ask(app.admin(), "PUT", "/log-level", "debug").await.status,
        200
    );
    assert_eq!(get(app.admin(), "/log-level").await.body, "debug\n");
    let wrong = ask(app.admin(), "PUT", "/log-level", "forebay=loud").await;
    assert_eq!(wrong.status, 400);
    assert!(wrong.body.contains("is no log filter"), "{wrong:?}");
    assert_eq!(get(app.admin(), "/log-level").await.body, "debug\n");
}

#[tokio::test]
async fn decisions_are_listed_and_filtered() {
    let file = PoolFile::new(&format!("{PORTS}models: [tiny, big]\n"));
    let app = start(&file).await;
    for (model, id) in [("tiny", "r1"), ("big", "r2"), ("tiny", "r3")] {
        let pool = app.directory().pool(model).unwrap();
        member(&pool);
        answer(pick(&pool, id));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let ids = |answer: super::Answer| -> Vec<String> {
        let records = answer.json();
        let records = records.as_array().unwrap();
        records
            .iter()
            .map(|r| r["decision"]["requestId"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(
        ids(get(app.admin(), "/decisions").await),
        ["r1", "r2", "r3"]
    );
    assert_eq!(ids(get(app.admin(), "/decisions?n=2").await), ["r2", "r3"]);
    assert_eq!(
        ids(get(app.admin(), "/decisions?n=1&model=big").await),
        ["r2"]
    );
    assert_eq!(
        ids(get(app.admin(), "/decisions?request_id=r1").await),
        ["r1"]
    );
    assert_eq!(
        ids(get(app.admin(), "/decisions?request_id=r9").await),
        Vec::<String>::new()
    );
    let one = get(app.admin(), "/decisions?request_id=r1").await.json();
    assert_eq!(one[0]["outcome"]["cached_tokens"], 64);
    assert_eq!(one[0]["decision"]["candidates"][0]["endpoint"], "a:1");
}

#[tokio::test]
async fn decisions_can_be_followed_and_readers_are_bounded() {
    let file = PoolFile::new(&format!("{PORTS}models: [tiny]\n"));
    let app = start(&file).await;
    let pool = app.directory().pool("tiny").unwrap();
    member(&pool);
    answer(pick(&pool, "before"));

    let mut readers = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(app.admin()).await.unwrap();
        stream
            .write_all(b"GET /decisions?follow=1&n=1 HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        let mut seen = String::new();
        read_until(&mut stream, &mut seen, "before").await;
        readers.push((stream, seen));
    }
    let ninth = get(app.admin(), "/decisions?follow=1").await;
    assert_eq!(ninth.status, 503, "{ninth:?}");

    answer(pick(&pool, "after"));
    for (stream, seen) in &mut readers {
        read_until(stream, seen, "\"end\":\"complete\"").await;
        let after = seen.split_once("after").expect("the new decision").1;
        assert!(after.contains("\"outcome\":null"), "{seen}");
    }
    // Readers that leave make room.
    drop(readers);
    let deadline = Instant::now() + SOON;
    loop {
        let mut stream = TcpStream::connect(app.admin()).await.unwrap();
        stream
            .write_all(b"GET /decisions?follow=1 HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.unwrap();
        if &status == b"HTTP/1.1 200" {
            break;
        }
        assert!(Instant::now() < deadline, "no room");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn read_until(stream: &mut TcpStream, seen: &mut String, what: &str) {
    let start = seen.len();
    while !seen[start..].contains(what) {
        let mut buf = [0; 4096];
        let n = timeout(SOON, stream.read(&mut buf))
            .await
            .expect("in time")
            .unwrap();
        assert!(n > 0, "closed: {seen}");
        seen.push_str(std::str::from_utf8(&buf[..n]).unwrap());
    }
}

#[tokio::test]
async fn the_command_prints_them() {
    let file = PoolFile::new(&format!("{PORTS}models: [tiny]\n"));
    let app = start(&file).await;
    let pool = app.directory().pool("tiny").unwrap();
    member(&pool);
    answer(pick(&pool, "r1"));
    let args = |follow: bool| DecisionsArgs {
        admin: format!("http://{}", app.admin()),
        n: 5,
        no_follow: !follow,
        model: Some("tiny".into()),
        json: false,
    };
    let mut out = Vec::new();
    decisions::run(&args(false), &mut out).await.unwrap();
    let text = String::from_utf8(out).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(
        lines[0].contains("r1  tiny  100 tokens") && lines[0].contains("[a:1 "),
        "{text}"
    );
    assert!(
        lines[1].contains("first token 20 ms") && lines[1].contains("cached 64"),
        "{text}"
    );

    // Following goes on until the proxy is gone.
    let shared = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let follow = args(true);
    let mut sink = Sink(shared.clone());
    let task = tokio::spawn(async move { decisions::run(&follow, &mut sink).await });
    crate::support::within(SOON, "the first line", || {
        shared.lock().windows(2).any(|w| w == b"r1")
    })
    .await;
    answer(pick(&pool, "r2"));
    crate::support::within(SOON, "the new line", || {
        shared.lock().windows(2).any(|w| w == b"r2")
    })
    .await;
    drop(app);
    let error = timeout(SOON, task).await.unwrap().unwrap().unwrap_err();
    assert!(error.to_string().contains("has gone"), "{error}");
}

struct Sink(Arc<parking_lot::Mutex<Vec<u8>>>);

impl std::io::Write for Sink {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(buf);
        Ok(buf.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Every metric that is registered stands in the table of the README, and nothing else does.
#[test]
fn the_readme_lists_the_metrics() {
    let readme = include_str!("../../README.md");
    let table = readme.split_once("\n## Metrics\n").expect("a section").1;
    let listed: std::collections::BTreeSet<_> = table
        .split('`')
        .filter(|w| w.starts_with("forebay_"))
        .collect();
    let mut registry = prometheus_client::registry::Registry::default();
    forebay_proxy::app::register_all(&mut registry);
    let mut registered = std::collections::BTreeSet::new();
    let text = format!("{registry:?}");
    for part in text.split("name: \"").skip(1) {
        let name = part.split('"').next().expect("a name");
        if name.starts_with("forebay_") {
            registered.insert(name);
        }
    }
    assert!(registered.len() > 30, "{registered:?}");
    assert_eq!(listed, registered);
}

/// The file that the README shows is one that can be used, but for its ellipsis and its directory.
#[test]
fn the_readme_shows_a_good_pool_file() {
    let readme = include_str!("../../README.md");
    let files: Vec<_> = readme
        .split("```yaml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    assert_eq!(files.len(), 2);
    for text in files {
        let text = text
            .replace("http://…", "http://10.0.0.9:8000")
            .replace("models/tiny", "src");
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("pool.yaml");
        let config =
            forebay_proxy::config::Config::parse(&text, &file).unwrap_or_else(|e| panic!("{e}"));
        // Defaults are what it says they are.
        assert_eq!(
            config.policy,
            forebay_proxy::config::PolicyConfig::default()
        );
        let limits = forebay_proxy::config::Limits {
            max_connections: config.limits.max_connections,
            ..Default::default()
        };
        assert_eq!(config.limits, limits);
    }
}
