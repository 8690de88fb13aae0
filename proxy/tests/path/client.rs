//! HTTP/1.1 to engines.

use crate::support::*;
use bytes::Bytes;
use forebay_proxy::http::client::{
    BoxIo, Client, ClientError, ClientMetricFamilies, ClientParams, Connect, ConnectError,
    EngineBody, Resend, SentAt, Timeouts,
};
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::time::Instant;
use tower::{Service, ServiceExt};
use tower_ttft::endpoint::EndpointId;

/// A body that can be sent again, or cannot.
#[derive(Clone)]
struct TestBody(Full<Bytes>, bool);

impl Resend for TestBody {
    fn resend(&self) -> Option<Self> {
        self.1.then(|| self.clone())
    }
}

impl Body for TestBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.0.size_hint()
    }
}

struct Harness {
    client: Client<TestBody>,
    metrics: ClientMetricFamilies,
}

impl Harness {
    fn new() -> Self {
        let metrics = ClientMetricFamilies::default();
        Self {
            client: Client::new(ClientParams {
                metrics: metrics.clone(),
                ..ClientParams::default()
            }),
            metrics,
        }
    }

    async fn send(
        &self,
        address: &str,
        request: Request<TestBody>,
    ) -> Result<Response<EngineBody<TestBody>>, tower_ttft::Error> {
        let mut service = self.client.endpoint(&EndpointId::new(address));
        service.ready().await?.call(request).await
    }

    async fn get(&self, address: &str) -> Result<Bytes, tower_ttft::Error> {
        let response = self.send(address, post("{}")).await?;
        Ok(response.into_body().collect().await?.to_bytes())
    }
}

fn post(body: &'static str) -> Request<TestBody> {
    Request::post("http://gateway.example/v1/completions?x=1")
        .body(TestBody(Full::from(body), true))
        .expect("a request")
}

/// Engines in memory: each answers every request on its connections with its own address.
#[derive(Debug)]
struct InMemory;

impl Connect for InMemory {
    fn connect(&self, address: &str) -> BoxFuture<'static, io::Result<BoxIo>> {
        let address = address.to_owned();
        Box::pin(async move {
            if address == "nobody:1" {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let (here, there) = tokio::io::duplex(1024);
            tokio::spawn(async move {
                let answer = hyper::service::service_fn(move |_| {
                    let body = Full::new(Bytes::from(address.clone()));
                    async move { Ok::<_, Infallible>(Response::new(body)) }
                });
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(hyper_util::rt::TokioIo::new(there), answer)
                    .await;
            });
            Ok(Box::new(here) as BoxIo)
        })
    }
}

#[tokio::test]
async fn connections_are_made_as_told() {
    let metrics = ClientMetricFamilies::default();
    let harness = Harness {
        client: Client::new(ClientParams {
            connect: Arc::new(InMemory),
            metrics: metrics.clone(),
            ..ClientParams::default()
        }),
        metrics,
    };
    assert_eq!(harness.get("one:1").await.unwrap(), "one:1");
    assert_eq!(harness.get("two:1").await.unwrap(), "two:1");
    let error = harness.get("nobody:1").await.unwrap_err();
    assert!(
        matches!(
            error.downcast_ref(),
            Some(ClientError::Connect(ConnectError::Io(_)))
        ),
        "{error}"
    );
    use forebay_proxy::http::client::Connected;
    assert_eq!(harness.metrics.connects(Connected::ok), 2);
    assert_eq!(harness.metrics.connects(Connected::refused), 1);
}

#[tokio::test]
async fn requests_arrive_as_they_are() {
    let engine = FakeEngine::start(|_| json("200 OK", "{}")).await;
    let harness = Harness::new();
    let mut request = post("{\"a\": 1}");
    request
        .headers_mut()
        .insert("expect", "100-continue".parse().unwrap());
    request
        .headers_mut()
        .insert("x-request-id", "r-1".parse().unwrap());
    let response = harness.send(&engine.address, request).await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.extensions().get::<SentAt>().is_some());
    assert_eq!(
        response.into_body().collect().await.unwrap().to_bytes(),
        "{}"
    );
    let seen = &engine.seen()[0];
    assert_eq!(seen.target, "/v1/completions?x=1");
    assert_eq!(seen.body, b"{\"a\": 1}");
    assert_eq!(seen.headers["content-length"], "8");
    assert_eq!(seen.headers["host"], engine.address);
    assert_eq!(seen.headers["x-request-id"], "r-1");
    assert!(!seen.headers.contains_key("expect"));
}

#[tokio::test]
async fn ranks_are_named() {
    let engine = FakeEngine::start(|_| json("200 OK", "{}")).await;
    let id = EndpointId {
        rank: Some(3),
        ..EndpointId::new(engine.address.as_str())
    };
    let mut request = post("{}");
    request
        .headers_mut()
        .insert("x-data-parallel-rank", "0".parse().unwrap());
    let harness = Harness::new();
    harness
        .client
        .endpoint(&id)
        .ready()
        .await
        .unwrap()
        .call(request)
        .await
        .unwrap();
    assert_eq!(engine.seen()[0].headers["x-data-parallel-rank"], "3");
}

#[tokio::test]
async fn connections_are_used_again() {
    let engine = FakeEngine::start(|_| json("200 OK", "{}")).await;
    let harness = Harness::new();
    for _ in 0..20 {
        harness.get(&engine.address).await.unwrap();
    }
    assert_eq!(engine.seen().len(), 20);
    assert_eq!(engine.connections(), 1);
}

#[tokio::test]
async fn streams_give_their_connection_back() {
    let engine = FakeEngine::start(|_| chat_stream(&["a", "b"])).await;
    let harness = Harness::new();
    for _ in 0..5 {
        harness.get(&engine.address).await.unwrap();
    }
    assert_eq!(engine.connections(), 1);
}

#[tokio::test]
async fn connection_close_is_heeded() {
    let engine = FakeEngine::start(|_| {
        vec![
            head("200 OK", &["content-length: 2", "connection: close"]),
            Step::Write("{}".into()),
            pause(200),
        ]
    })
    .await;
    let harness = Harness::new();
    for _ in 0..2 {
        harness.get(&engine.address).await.unwrap();
    }
    assert_eq!(engine.connections(), 2);
    assert_eq!(harness.metrics.resent(), 0);
}

/// A11: idle connections are closed before the engine does it.
#[tokio::test]
async fn idle_connections_are_closed() {
    let engine = FakeEngine::start(|_| json("200 OK", "{}")).await;
    let client = Client::new(ClientParams {
        idle_timeout: Duration::from_millis(100),
        ..ClientParams::default()
    });
    let harness = Harness {
        client,
        metrics: ClientMetricFamilies::default(),
    };
    harness.get(&engine.address).await.unwrap();
    assert_eq!(engine.open(), 1);
    within(
        Duration::from_millis(500),
        "the idle connection closes",
        || engine.open() == 0,
    )
    .await;
    harness.get(&engine.address).await.unwrap();
    assert_eq!(engine.connections(), 2);
}

/// A11: an engine that closes just as its connection is used again costs nothing.
#[tokio::test]
async fn dead_reused_connections_cost_a_resend() {
    for last in [Step::Fin, Step::Rst] {
        // Reads the second request of each connection and closes without a word.
        let engine = FakeEngine::start(move |seen| match seen.number {
            1 => vec![last.clone()],
            _ => json("200 OK", "{}"),
        })
        .await;
        let harness = Harness::new();
        harness.get(&engine.address).await.unwrap();
        assert_eq!(harness.get(&engine.address).await.unwrap(), "{}");
        let seen = engine.seen();
        assert_eq!(
            seen.iter().map(|s| s.connection).collect::<Vec<_>>(),
            [0, 0, 1]
        );
        assert_eq!(seen[1].body, seen[2].body);
        assert_eq!(harness.metrics.resent(), 1);
    }
}

#[tokio::test]
async fn no_resend_without_a_second_body() {
    let engine = FakeEngine::start(|seen| match seen.number {
        1 => vec![Step::Rst],
        _ => json("200 OK", "{}"),
    })
    .await;
    let harness = Harness::new();
    harness.get(&engine.address).await.unwrap();
    let request = post("{}").map(|b| TestBody(b.0, false));
    let error = harness
        .send(&engine.address, request)
        .await
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(error.downcast_ref(), Some(ClientError::Send(_))),
        "{error}"
    );
    assert_eq!(engine.seen().len(), 2);
}

#[tokio::test]
async fn no_resend_once_an_answer_began() {
    let engine = FakeEngine::start(|seen| match seen.number {
        1 => vec![Step::Write("HTTP/1.1 20".into()), Step::Fin],
        _ => json("200 OK", "{}"),
    })
    .await;
    let harness = Harness::new();
    harness.get(&engine.address).await.unwrap();
    let error = harness.get(&engine.address).await.unwrap_err();
    assert!(
        matches!(error.downcast_ref(), Some(ClientError::Send(_))),
        "{error}"
    );
    assert_eq!(engine.seen().len(), 2);
}

#[tokio::test]
async fn no_resend_on_fresh_connections() {
    let engine = FakeEngine::start(|_| vec![Step::Fin]).await;
    let harness = Harness::new();
    let error = harness.get(&engine.address).await.unwrap_err();
    assert!(
        matches!(error.downcast_ref(), Some(ClientError::Send(_))),
        "{error}"
    );
    assert_eq!(engine.seen().len(), 1);
    assert_eq!(harness.metrics.resent(), 0);
}

#[tokio::test]
async fn refused() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let error = Harness::new().get(&address).await.unwrap_err();
    assert!(
        matches!(
            error.downcast_ref(),
            Some(ClientError::Connect(ConnectError::Io(_)))
        ),
        "{error}"
    );
}

#[tokio::test]
async fn silent_engines_time_out() {
    let engine = FakeEngine::start(|_| vec![Step::Hang]).await;
    let harness = Harness::new();
    let mut request = post("{}");
    request.extensions_mut().insert(Timeouts {
        head: Duration::from_millis(50),
        ..Timeouts::default()
    });
    let error = harness
        .send(&engine.address, request)
        .await
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(error.downcast_ref(), Some(ClientError::HeadTimeout(_))),
        "{error}"
    );
    engine.closed(0).await;
}

/// A1, A2, A3: whoever drops an answer, at whatever stage, has hung up on the engine.
#[tokio::test]
async fn dropping_closes_at_once() {
    let engine = FakeEngine::start(|seen| match seen.number {
        0 => vec![Step::Hang],
        1 => vec![sse_head(), Step::Hang],
        _ => vec![sse_head(), chunk(chat_event("a")), Step::Hang],
    })
    .await;
    let harness = Harness::new();

    let before_head = tokio::time::timeout(
        Duration::from_millis(50),
        harness.send(&engine.address, post("{}")),
    )
    .await;
    assert!(before_head.is_err());
    let left = Instant::now();
    assert!(engine.closed(0).await < left + Duration::from_millis(250));

    let before_first_byte = harness.send(&engine.address, post("{}")).await.unwrap();
    let left = Instant::now();
    drop(before_first_byte);
    assert!(engine.closed(1).await < left + Duration::from_millis(250));

    let mut streaming = harness.send(&engine.address, post("{}")).await.unwrap();
    streaming.body_mut().frame().await.unwrap().unwrap();
    let left = Instant::now();
    drop(streaming);
    assert!(engine.closed(2).await < left + Duration::from_millis(250));
    assert_eq!(engine.open(), 0);
}

/// A9: an answer that breaks off is an error, never an end.
#[tokio::test]
async fn broken_answers_are_errors() {
    let long = || head("200 OK", &["content-length: 1000"]);
    for steps in [
        vec![sse_head(), chunk("x"), Step::Fin],
        vec![sse_head(), chunk("x"), pause(20), Step::Rst],
        vec![sse_head(), Step::Write("ff\r\nx".into()), Step::Fin],
        vec![long(), Step::Write("x".into()), Step::Fin],
    ] {
        let engine = FakeEngine::start(move |_| steps.clone()).await;
        let response = Harness::new()
            .send(&engine.address, post("{}"))
            .await
            .unwrap();
        response.into_body().collect().await.unwrap_err();
    }
}
