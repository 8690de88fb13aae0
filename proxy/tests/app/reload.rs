//! The pool file changes while the proxy runs.

use super::{PORTS, PoolFile, SOON, Step, engine, get, healthy, start, support, until, vllm};
use std::time::Duration;
use tower_ttft::{
    chain::{Chain, ChainKind},
    policy::Routing,
    pool::{Excluded, Pick, PickRequest, Pool},
    prompt::{Prompt, Reason, Source},
};

fn ready(pool: &Pool) -> usize {
    pool.endpoints().iter().filter(|e| e.is_ready()).count()
}

#[tokio::test]
async fn endpoints_join_and_the_policy_changes() {
    let one = engine(&[("tiny", None)]).await;
    let two = engine(&[("tiny", None)]).await;
    let file = PoolFile::new(&format!(
        "{PORTS}models: [tiny]\nendpoints: [http://{}]\n",
        one.address
    ));
    let app = start(&file).await;
    healthy(&app).await;
    let pool = app.directory().pool("tiny").unwrap();
    assert_eq!(pool.policy().routing, Routing::PricedTtft);

    let began = tokio::time::Instant::now();
    file.write(&format!(
        "{PORTS}models: [tiny]\nendpoints: [http://{}, http://{}]\npolicy: {{routing: LeastLoad}}\n",
        one.address, two.address
    ));
    crate::support::within(Duration::from_secs(5), "the new endpoint is ready", || {
        ready(&pool) == 2
    })
    .await;
    assert!(began.elapsed_since() < Duration::from_secs(5));
    assert_eq!(pool.policy().routing, Routing::LeastLoad);
    let metrics = get(app.admin(), "/metrics").await.body;
    assert!(
        metrics.contains("forebay_config_reloads_total{result=\"ok\"} 1"),
        "{metrics}"
    );
    assert!(metrics.contains("forebay_config_stale 0"), "{metrics}");
}

trait Elapsed {
    fn elapsed_since(&self) -> Duration;
}

impl Elapsed for tokio::time::Instant {
    fn elapsed_since(&self) -> Duration {
        tokio::time::Instant::now().saturating_duration_since(*self)
    }
}

#[tokio::test]
async fn a_bad_file_changes_nothing_and_says_so() {
    let one = engine(&[("tiny", None)]).await;
    let good = format!(
        "{PORTS}models: [tiny]\nendpoints: [http://{}]\n",
        one.address
    );
    let file = PoolFile::new(&good);
    let app = start(&file).await;
    healthy(&app).await;

    for bad in [
        "endpoint: []\n",
        "[",
        "models: [{name: tiny, tokenizer: /no/such}]\n",
    ] {
        file.write(bad);
        let config = until(app.admin(), "/config", "the error", |a| {
            !a.json()["reload"]["error"].is_null()
        })
        .await
        .json();
        assert_eq!(config["config"]["models"][0]["name"], "tiny");
        assert_eq!(get(app.listen(), "/health").await.status, 200);
        file.write(&good);
        until(app.admin(), "/config", "the error is gone", |a| {
            a.json()["reload"]["error"].is_null()
        })
        .await;
    }
    std::fs::remove_file(&file.0).unwrap();
    let config = until(app.admin(), "/config", "the loss", |a| {
        !a.json()["reload"]["error"].is_null()
    })
    .await;
    assert!(config.body.contains("cannot be read"), "{config:?}");
    let metrics = get(app.admin(), "/metrics").await.body;
    assert!(
        metrics.contains("forebay_config_reloads_total{result=\"failed\"} 4"),
        "{metrics}"
    );
    assert!(metrics.contains("forebay_config_stale 1"), "{metrics}");
    assert_eq!(get(app.listen(), "/health").await.status, 200);
}

#[tokio::test]
async fn what_needs_a_restart_is_said() {
    let file = PoolFile::new(&format!("{PORTS}models: [tiny]\n"));
    let app = start(&file).await;
    file.write(
        "listen: 127.0.0.1:1\nadmin: 127.0.0.1:0\nmodels: [tiny, more]\nlimits: {drain: 1s}\n",
    );
    let config = until(app.admin(), "/config", "the reload", |a| {
        a.body.contains("more")
    })
    .await
    .json();
    assert_eq!(
        config["reload"]["needsRestart"],
        serde_json::json!(["listen", "limits"])
    );
    until(app.listen(), "/v1/models", "the new model", |a| {
        a.body.contains("more")
    })
    .await;
}

#[tokio::test]
async fn an_endpoint_that_leaves_finishes_what_is_open() {
    let one = engine(&[("tiny", None)]).await;
    let two = engine(&[("tiny", None)]).await;
    let both = format!(
        "{PORTS}models: [tiny]\nendpoints: [http://{}, http://{}]\n",
        one.address, two.address
    );
    let file = PoolFile::new(&both);
    let app = start(&file).await;
    let pool = app.directory().pool("tiny").unwrap();
    crate::support::within(SOON, "both are ready", || ready(&pool) == 2).await;
    let request = PickRequest {
        prompt: Prompt {
            chain: Chain::empty(ChainKind::Bytes),
            tokens: 10,
            ids: None,
            bytes: 40,
            whole_text: false,
            source: Source::Approximate(Reason::NoTokenizer),
        },
        stream: true,
        max_tokens: None,
        request_id: None,
    };
    let Pick::Dispatch(ticket) =
        pool.pick(&request, &Excluded::default(), tokio::time::Instant::now())
    else {
        panic!("no endpoint");
    };
    let leaving = ticket.endpoint().id().address.as_str().to_owned();
    let staying = if leaving == one.address {
        &two.address
    } else {
        &one.address
    };
    file.write(&format!(
        "{PORTS}models: [tiny]\nendpoints: [http://{staying}]\n"
    ));

    crate::support::within(SOON, "no more requests", || ready(&pool) == 1).await;
    let page = get(app.admin(), "/endpoints").await;
    assert!(
        page.body.contains("leaves: what is open there may finish"),
        "{page:?}"
    );
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(pool.endpoints().len(), 2, "what is open is not cut");
    assert_eq!(ready(&pool), 1);
    drop(ticket);
    crate::support::within(SOON, "it is gone", || pool.endpoints().len() == 1).await;

    // And back again.
    file.write(&both);
    crate::support::within(SOON, "both are ready", || ready(&pool) == 2).await;
}

#[tokio::test]
async fn an_endpoint_moves_to_another_model() {
    let one = engine(&[("tiny", None), ("big", None)]).await;
    let text = |model: &str| {
        format!(
            "{PORTS}models: [tiny, big]\nendpoints: [{{url: 'http://{}', model: {model}}}]\n",
            one.address
        )
    };
    let file = PoolFile::new(&text("tiny"));
    let app = start(&file).await;
    let (tiny, big) = (
        app.directory().pool("tiny").unwrap(),
        app.directory().pool("big").unwrap(),
    );
    crate::support::within(SOON, "it serves tiny", || ready(&tiny) == 1).await;
    file.write(&text("big"));
    crate::support::within(SOON, "it serves big", || {
        ready(&big) == 1 && tiny.endpoints().is_empty()
    })
    .await;
}

/// What is open at an endpoint that was taken out goes on, and ends when its engine dies: not when the idle timeout says so.
#[tokio::test]
async fn an_endpoint_that_leaves_is_watched_until_its_last_stream_ended() {
    let one = support::FakeEngine::start(|seen| match seen.target.as_str() {
        "/v1/chat/completions" => vec![
            support::sse_head(),
            support::chunk(support::chat_event("one")),
            support::pause(2_500),
            support::chunk(support::chat_event("two")),
            Step::Hang,
        ],
        _ => vllm(seen, &[("tiny", None)]),
    })
    .await;
    let file = PoolFile::new(&format!(
        "{PORTS}models: [tiny]\nendpoints: [http://{}]\n",
        one.address
    ));
    let app = start(&file).await;
    healthy(&app).await;
    let body = r#"{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
    let mut stream =
        support::RawClient::post(&app.listen().to_string(), "/v1/chat/completions", body).await;
    stream.read_until("one").await;

    file.write(&format!("{PORTS}models: [tiny]\n"));
    until(app.admin(), "/endpoints", "it leaves", |a| {
        a.body.contains("leaves: what is open there may finish")
    })
    .await;
    let pool = app.directory().pool("tiny").unwrap();
    support::within(SOON, "it gets no more requests", || ready(&pool) == 0).await;
    // Its watcher looks at it more than once in this time, and never finds it ready.
    let never_ready = async {
        loop {
            assert_eq!(ready(&pool), 0);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = never_ready => {}
        _ = stream.read_until("two") => {}
    }

    one.refuse();
    let died = tokio::time::Instant::now();
    stream.read_until("\"error\"").await;
    assert!(died.elapsed_since() < Duration::from_secs(3));
    until(app.admin(), "/endpoints", "it has left", |a| {
        !a.body.contains(&one.address)
    })
    .await;
}
