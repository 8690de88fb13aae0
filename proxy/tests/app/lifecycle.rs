//! How the proxy starts and stops.

use super::{PORTS, PoolFile, ask, engine, get, healthy, no_tokenizers, start, try_start, until};
use crate::support;
use forebay_proxy::server::Drained;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

#[tokio::test]
async fn is_ready_after_the_first_round_and_not_when_it_stops() {
    let one = engine(&[("tiny", None)]).await;
    let file = PoolFile::new(&format!(
        "{PORTS}endpoints: [http://{}]\nlimits: {{lameDuck: 60s}}\n",
        one.address
    ));
    let mut app = start(&file).await;
    assert_eq!(get(app.admin(), "/live").await.status, 200);
    let ready = until(app.admin(), "/ready", "ready", |a| a.status == 200).await;
    assert_eq!(ready.body, "ready\n");
    healthy(&app).await;

    app.stop();
    let ready = get(app.admin(), "/ready").await;
    assert_eq!((ready.status, ready.body.as_str()), (503, "stopping\n"));
    assert_eq!(get(app.listen(), "/health").await.status, 503);
    assert_eq!(get(app.admin(), "/live").await.status, 200);
    // A lame duck still serves, and says that the connection ends.
    let models = get(app.listen(), "/v1/models").await;
    assert_eq!(models.status, 200);
    // The second time is now.
    app.stop();
    let stopped = tokio::time::timeout(super::SOON, app.stopped())
        .await
        .expect("stops");
    assert_eq!(stopped, Ok(Drained { cut: 0 }));
}

#[tokio::test]
async fn an_engine_that_does_not_answer_does_not_keep_the_proxy_from_being_ready() {
    let file = PoolFile::new(&format!(
        "{PORTS}models: [tiny]\nendpoints: [{{url: 'http://192.0.2.1:9', model: tiny}}]\n"
    ));
    let app = start(&file).await;
    until(app.admin(), "/ready", "ready", |a| a.status == 200).await;
    assert_eq!(get(app.listen(), "/health").await.status, 503);
}

#[tokio::test]
async fn what_is_open_finishes_before_the_process_ends() {
    let one = support::FakeEngine::start(|seen| match seen.target.as_str() {
        "/v1/chat/completions" => {
            let mut steps = vec![
                support::sse_head(),
                support::chunk(support::chat_event("one")),
            ];
            steps.push(support::pause(700));
            steps.push(support::chunk(support::chat_event("two")));
            steps.push(support::chunk(support::DONE));
            steps.push(support::end());
            steps
        }
        _ => super::vllm(seen, &[("tiny", None)]),
    })
    .await;
    let file = PoolFile::new(&format!("{PORTS}endpoints: [http://{}]\n", one.address));
    let mut app = start(&file).await;
    healthy(&app).await;
    let mut stream = TcpStream::connect(app.listen()).await.unwrap();
    let body = r#"{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let n = stream.read(&mut answer).await.unwrap();
    assert!(String::from_utf8_lossy(&answer[..n]).starts_with("HTTP/1.1 200"));

    app.stop();
    let refused = || async { TcpStream::connect(app.listen()).await.is_err() };
    let deadline = tokio::time::Instant::now() + super::SOON;
    while !refused().await {
        assert!(
            tokio::time::Instant::now() < deadline,
            "new connections are refused"
        );
    }
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.unwrap();
    let rest = String::from_utf8_lossy(&rest);
    assert!(
        rest.contains("two") && rest.contains("[DONE]") && rest.ends_with("0\r\n\r\n"),
        "{rest}"
    );
    assert_eq!(app.stopped().await, Ok(Drained { cut: 0 }));
}

#[tokio::test]
async fn a_tokenizer_that_cannot_be_used_is_no_start() {
    let file = PoolFile::new(&format!("{PORTS}models: [{{name: tiny, tokenizer: .}}]\n"));
    let Err(error) = try_start(&file, no_tokenizers()).await else {
        panic!("it starts");
    };
    let error = error.to_string();
    assert!(
        error.contains("model `tiny`: tokenizer ") && error.contains("none in this test"),
        "{error}"
    );
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = taken.local_addr().unwrap();
    let file = PoolFile::new(&format!(
        "listen: {addr}\nadmin: 127.0.0.1:0\nmodels: [tiny]\n"
    ));
    let Err(error) = try_start(&file, no_tokenizers()).await else {
        panic!("it starts");
    };
    assert!(
        error
            .to_string()
            .contains(&format!("cannot listen on {addr} (listen): ")),
        "{error}"
    );
}

#[tokio::test]
async fn requests_reach_the_engine_and_are_counted() {
    let one = engine(&[("tiny", None)]).await;
    let file = PoolFile::new(&format!("{PORTS}endpoints: [http://{}]\n", one.address));
    let app = start(&file).await;
    healthy(&app).await;
    let body = r#"{"model":"tiny","messages":[{"role":"user","content":"a canary sings"}]}"#;
    let answer = ask(app.listen(), "POST", "/v1/chat/completions", body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.body.contains("hello"), "{answer:?}");
    for page in ["/metrics", "/decisions", "/endpoints", "/config"] {
        let answer = get(app.admin(), page).await;
        assert_eq!(answer.status, 200, "{page}");
        assert!(!answer.body.contains("canary"), "{page}: {answer:?}");
    }
    let decisions = get(app.admin(), "/decisions").await.json();
    assert_eq!(decisions.as_array().unwrap().len(), 1, "{decisions}");
    assert_eq!(decisions[0]["outcome"]["end"], "complete", "{decisions}");
}
