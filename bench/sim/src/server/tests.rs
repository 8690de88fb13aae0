use super::*;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::{collections::BTreeSet, path::Path};
use tokio::{net::TcpListener, time::sleep};
use tower_ttft::prompt::{LocalParams, LocalTokenizer};
use zeromq::{Socket as _, SocketRecv as _, SocketSend as _};

type Client = SendRequest<Full<Bytes>>;

fn params() -> ServerParams {
    let spec = PodSpec::kind("l40s").expect("a built-in kind");
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tokenizer");
    let tokenizer = LocalTokenizer::load(&dir, LocalParams::new(1)).expect("the tokenizer");
    ServerParams::new(Arc::new(spec), "tiny", Arc::new(tokenizer), 1_796_098_104.0)
}

/// A client with a connection of its own, in memory.
async fn connect(server: &Server) -> Client {
    let (here, there) = tokio::io::duplex(1 << 20);
    let server = server.clone();
    tokio::spawn(async move { server.serve(there).await });
    let (client, connection) = http1::handshake(TokioIo::new(here)).await.expect("HTTP");
    tokio::spawn(connection);
    client
}

fn post(path: &str, body: &Value) -> ::http::Request<Full<Bytes>> {
    ::http::Request::post(path)
        .header("content-type", "application/json")
        .body(Full::new(body.to_string().into()))
        .expect("a request")
}

async fn ask(client: &mut Client, path: &str, body: &Value) -> (u16, String) {
    let answer = client
        .send_request(post(path, body))
        .await
        .expect("an answer");
    let status = answer.status().as_u16();
    let body = answer
        .into_body()
        .collect()
        .await
        .expect("a body")
        .to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

async fn get(client: &mut Client, path: &str) -> (u16, String) {
    let request = ::http::Request::get(path).body(Full::default());
    let answer = client.send_request(request.expect("a request")).await;
    let answer = answer.expect("an answer");
    let status = answer.status().as_u16();
    let body = answer
        .into_body()
        .collect()
        .await
        .expect("a body")
        .to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

fn chat(text: &str, more: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": text}]});
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    body
}

/// The events of a stream.
fn events(text: &str) -> Vec<Value> {
    text.split_terminator("\n\n")
        .map(|event| event.strip_prefix("data: ").expect("data"))
        .map(|data| match data {
            "[DONE]" => json!("[DONE]"),
            data => serde_json::from_str(data).expect("JSON"),
        })
        .collect()
}

/// A value with its numbers and most texts left out: what must be the same in any engine.
fn shape(value: &Value) -> Value {
    const WORDS: [&str; 8] = [
        "assistant",
        "length",
        "chat.completion",
        "chat.completion.chunk",
        "text_completion",
        "tiny",
        "[DONE]",
        "",
    ];
    match value {
        Value::Number(_) => json!(0),
        Value::String(s) if WORDS.contains(&s.as_str()) => value.clone(),
        Value::String(_) => json!("text"),
        Value::Array(values) => values.iter().map(shape).collect(),
        Value::Object(map) => map.iter().map(|(k, v)| (k.clone(), shape(v))).collect(),
        other => other.clone(),
    }
}

/// As text, so that the order of the keys counts.
fn shapes(values: &[Value]) -> Vec<String> {
    values.iter().map(|v| shape(v).to_string()).collect()
}

#[tokio::test(start_paused = true)]
async fn streams_have_the_shape_of_vllms() {
    let server = Server::new(params());
    let mut client = connect(&server).await;
    let stream = json!({"max_tokens": 3, "stream": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let (status, text) = ask(&mut client, "/v1/chat/completions", &chat("Say hi", stream)).await;
    assert_eq!(status, 200);
    let captured = events(include_str!("../../testdata/chat-stream.txt"));
    assert_eq!(shapes(&events(&text)), shapes(&captured));

    let body = json!({"model": "tiny", "prompt": "Say hi", "max_tokens": 3, "stream": true,
        "stream_options": {"include_usage": true}});
    let (_, text) = ask(&mut client, "/v1/completions", &body).await;
    let captured = events(include_str!("../../testdata/completions-stream.txt"));
    assert_eq!(shapes(&events(&text)), shapes(&captured));
}

#[tokio::test(start_paused = true)]
async fn whole_answers_have_the_shape_of_vllms() {
    let server = Server::new(params());
    let mut client = connect(&server).await;
    let one = json!({"max_tokens": 1});
    let (status, text) = ask(&mut client, "/v1/chat/completions", &chat("Say hi", one)).await;
    assert_eq!(status, 200);
    let captured = serde_json::from_str(include_str!("../../testdata/chat.json"));
    let got: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        shape(&got).to_string(),
        shape(&captured.expect("JSON")).to_string()
    );
}

#[tokio::test(start_paused = true)]
async fn the_first_token_comes_when_the_pod_says() {
    let server = Server::new(params());
    let text = crate::Words::new(3).text(16_000);
    for cached in [0, 15_680] {
        let mut client = connect(&server).await;
        let body = chat(
            &text,
            json!({"max_tokens": 40, "stream": true,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true}}),
        );
        let (_, tokens) = ask(&mut client, "/tokenize", &body).await;
        let tokens: Value = serde_json::from_str(&tokens).expect("JSON");
        // Eight tokens of the template around the text.
        assert_eq!(tokens["count"], 16_008);
        let ids = tokens["tokens"].as_array().expect("ids").iter();
        let ids: Vec<u32> = ids.map(|id| id.as_u64().expect("an id") as u32).collect();
        let (now, pod) = server.pod();
        let expected = pod.ttft(now, &Arc::new(Prompt::new(ids, 0)), 40);
        let start = Instant::now();
        let answer = client
            .send_request(post("/v1/chat/completions", &body))
            .await;
        let mut body = answer.expect("an answer").into_body();
        let began = Instant::now()
            .saturating_duration_since(start)
            .as_secs_f64();
        assert!(began < 0.01, "the head came after {began} s");
        let mut all = String::new();
        let mut first = None;
        while let Some(frame) = body.frame().await {
            let data = frame.expect("a frame").into_data().expect("data");
            let now = Instant::now()
                .saturating_duration_since(start)
                .as_secs_f64();
            first.get_or_insert(now);
            all.push_str(&String::from_utf8_lossy(&data));
        }
        let first = first.expect("a token");
        assert!(
            (first - expected).abs() < 0.003,
            "{first} s, expected {expected} s"
        );
        let events = events(&all);
        let usage = &events[events.len() - 2]["usage"];
        assert_eq!(usage["completion_tokens"], 40);
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], cached);
    }
}

#[tokio::test(start_paused = true)]
async fn answers_are_texts_of_as_many_tokens() {
    let server = Server::new(ServerParams {
        tokens_per_event: 16,
        ..params()
    });
    let mut client = connect(&server).await;
    let body = chat("Hi", json!({"max_tokens": 50, "stream": true}));
    let (_, text) = ask(&mut client, "/v1/chat/completions", &body).await;
    let events = events(&text);
    // The role, the first token, three of sixteen, the last one, and the end.
    assert_eq!(events.len(), 1 + 1 + 3 + 1 + 1);
    let text: String = events
        .iter()
        .filter_map(|e| e["choices"][0]["delta"]["content"].as_str())
        .collect();
    let body = json!({"prompt": text});
    let (_, tokens) = ask(&mut client, "/tokenize", &body).await;
    let tokens: Value = serde_json::from_str(&tokens).expect("JSON");
    assert_eq!(tokens["count"], 50);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_frees_the_pod() {
    for stream in [true, false] {
        let server = Server::new(params());
        let mut client = connect(&server).await;
        let body = chat("Hi", json!({"max_tokens": 5_000, "stream": stream}));
        let answer = client.send_request(post("/v1/chat/completions", &body));
        let answer = tokio::spawn(answer);
        sleep(Duration::from_secs(3)).await;
        assert_eq!(server.load().running, 1);
        answer.abort();
        drop(answer);
        drop(client);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(server.load().running, 0, "stream: {stream}");
        assert!(server.load().generated_tokens < 100);
    }
}

#[tokio::test(start_paused = true)]
async fn what_vllm_refuses_is_refused_alike() {
    let server = Server::new(params());
    let mut client = connect(&server).await;
    let cases = [
        (
            chat("x", json!({"model": "nope"})),
            404,
            json!({"error": {"message": "The model `nope` does not exist. Valid aliases: tiny.", "type": "NotFoundError", "param": "model", "code": 404}}),
        ),
        (
            chat("x", json!({"max_tokens": 0})),
            400,
            json!({"error": {"message": "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "type": "BadRequestError", "param": "max_tokens", "code": 400}}),
        ),
        (
            chat("x", json!({"stream_options": {}})),
            400,
            json!({"error": {"message": "Stream options can only be defined when `stream=True`. (parameter=stream_options)", "type": "BadRequestError", "param": "stream_options", "code": 400}}),
        ),
    ];
    for (body, status, error) in cases {
        let (got, text) = ask(&mut client, "/v1/chat/completions", &body).await;
        assert_eq!((got, text), (status, error.to_string()));
    }
    let long = json!({"prompt": vec![5; 140_000], "max_tokens": 1});
    let (status, text) = ask(&mut client, "/v1/completions", &long).await;
    assert_eq!(status, 400);
    assert!(
        text.contains("maximum context length is 131072 tokens"),
        "{text}"
    );
    let (status, text) = ask(
        &mut client,
        "/v1/chat/completions/render",
        &chat("x", json!({})),
    )
    .await;
    assert_eq!((status, text.as_str()), (404, r#"{"detail":"Not Found"}"#));
    // No model, and an empty one, are the default.
    for model in [json!(null), json!("")] {
        let body = chat("x", json!({"model": model, "max_tokens": 1}));
        assert_eq!(ask(&mut client, "/v1/chat/completions", &body).await.0, 200);
    }
}

#[tokio::test(start_paused = true)]
async fn rendering_gives_the_ids_that_are_computed() {
    let server = Server::new(ServerParams {
        render: true,
        ..params()
    });
    let mut client = connect(&server).await;
    let body = chat("the apple", json!({}));
    let (_, rendered) = ask(&mut client, "/v1/chat/completions/render", &body).await;
    let (_, tokens) = ask(&mut client, "/tokenize", &body).await;
    let rendered: Value = serde_json::from_str(&rendered).expect("JSON");
    let tokens: Value = serde_json::from_str(&tokens).expect("JSON");
    assert_eq!(rendered["token_ids"], tokens["tokens"]);
}

/// The names and labels of samples.
fn series(text: &str) -> BTreeSet<String> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.rsplit_once(' ').expect("a value").0)
        .map(|name| match name.split_once("cache_config_info") {
            Some(_) => "vllm:cache_config_info".to_owned(),
            None => {
                let (name, labels) = name.split_once('{').unwrap_or((name, "}"));
                let mut labels: Vec<_> = labels.trim_end_matches('}').split(',').collect();
                labels.sort_unstable();
                format!("{name} {labels:?}")
            }
        })
        .collect()
}

#[tokio::test(start_paused = true)]
async fn metrics_are_series_that_vllm_has() {
    let server = Server::new(params());
    let mut client = connect(&server).await;
    let text = crate::Words::new(1).text(2_000);
    for _ in 0..2 {
        let body = chat(&text, json!({"max_tokens": 3}));
        assert_eq!(ask(&mut client, "/v1/chat/completions", &body).await.0, 200);
    }
    let (_, text) = get(&mut client, "/metrics").await;
    let captured = series(include_str!("../../testdata/metrics.txt"));
    let unknown: Vec<_> = series(&text).difference(&captured).cloned().collect();
    assert_eq!(unknown, Vec::<String>::new());
    let value = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        let value = line.and_then(|line| line.rsplit_once(' '));
        value.map(|(_, v)| v.parse::<f64>().expect("a number"))
    };
    assert_eq!(
        value("vllm:prefix_cache_queries_total"),
        Some(2.0 * 2_008.0)
    );
    assert_eq!(value("vllm:prefix_cache_hits_total"), Some(1_568.0));
    assert_eq!(value("vllm:generation_tokens_total"), Some(6.0));
    assert_eq!(value("vllm:time_to_first_token_seconds_count"), Some(2.0));
    assert_eq!(value("process_start_time_seconds"), Some(1_796_098_104.0));
    assert!(text.contains("block_size=\"784\"") && text.contains("num_gpu_blocks=\"262\""));
    assert_eq!(get(&mut client, "/health").await, (200, String::new()));
}

async fn zmq(kind: &mut impl zeromq::Socket, address: std::net::SocketAddr) {
    kind.connect(&format!("tcp://{address}"))
        .await
        .expect("ZMQ");
}

#[tokio::test]
async fn events_and_their_replay_reach_zmq_clients() {
    let publisher = Publisher::new("kv@sim");
    let sockets = open(&publisher, "127.0.0.1").await.expect("sockets");
    let server = Server::new(ServerParams {
        scale: 200.0,
        events: Some(Box::new(publisher)),
        sources: Some(Sources {
            live: format!("tcp://{}", sockets.live),
            replay: Some(format!("tcp://{}", sockets.replay)),
            topic: "kv@sim".into(),
        }),
        ..params()
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let serving = server.clone();
    tokio::spawn(async move { serving.listen(listener).await });
    let tcp = tokio::net::TcpStream::connect(address).await.expect("TCP");
    let (mut client, connection) = http1::handshake(TokioIo::new(tcp)).await.expect("HTTP");
    tokio::spawn(connection);
    let (_, sources) = get(&mut client, "/kv_event_sources").await;
    assert!(
        sources.contains(&format!("tcp://{}", sockets.live)),
        "{sources}"
    );

    let mut sub = zeromq::SubSocket::new();
    zmq(&mut sub, sockets.live).await;
    sub.subscribe("kv@").await.expect("a subscription");
    // A publisher does not know of a subscription before it arrives.
    sleep(Duration::from_millis(200)).await;
    let text = crate::Words::new(1).text(4_000);
    let body = chat(&text, json!({"max_tokens": 2}));
    assert_eq!(ask(&mut client, "/v1/chat/completions", &body).await.0, 200);
    let mut batches = Vec::new();
    // Five blocks in chunks of two.
    for seq in 0..3u64 {
        let batch = tokio::time::timeout(Duration::from_secs(5), sub.recv()).await;
        let frames = batch.expect("in time").expect("a batch").into_vec();
        assert_eq!(frames.len(), 3);
        assert_eq!(&frames[0][..], b"kv@sim");
        assert_eq!(frames[1][..], seq.to_be_bytes());
        batches.push(frames[2].clone());
    }
    let mut dealer = zeromq::DealerSocket::new();
    zmq(&mut dealer, sockets.replay).await;
    let from = vec![Bytes::new(), Bytes::copy_from_slice(&1u64.to_be_bytes())];
    let request = zeromq::ZmqMessage::try_from(from).expect("a message");
    dealer.send(request).await.expect("sent");
    for expected in [Some(1usize), Some(2), None] {
        let batch = tokio::time::timeout(Duration::from_secs(5), dealer.recv()).await;
        let frames = batch.expect("in time").expect("a batch").into_vec();
        assert_eq!(frames.len(), 4);
        assert!(frames[0].is_empty());
        match expected {
            Some(n) => {
                assert_eq!(frames[2][..], (n as u64).to_be_bytes());
                assert_eq!(frames[3], batches[n]);
            }
            None => assert_eq!(frames[2][..], [0xFF; 8]),
        }
    }
}
