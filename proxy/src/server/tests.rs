use super::{
    drain::{self, Drain},
    *,
};
use bytes::Bytes;
use futures::FutureExt;
use http::StatusCode;
use http_body_util::{BodyExt, Channel, Empty, Full, combinators::BoxBody};
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::{Notify, mpsc},
    task::JoinHandle,
};

type TestBody = BoxBody<Bytes, Infallible>;

/// Answers `/now` at once; elsewhere sends a head, and a body that ends when told to.
#[derive(Clone, Default)]
struct Script {
    finish: Arc<Notify>,
    started: Arc<AtomicUsize>,
}

struct Running {
    addr: SocketAddr,
    drain: Drain,
    metrics: ServerMetrics,
    script: Script,
    task: JoinHandle<Drained>,
}

async fn start(change: impl FnOnce(&mut ServerParams)) -> Running {
    let mut params = ServerParams {
        max_connections: 100,
        max_requests: 100,
        header_timeout: Duration::from_secs(30),
        header_bytes: 16 << 10,
        drain: Duration::from_secs(30),
    };
    change(&mut params);
    let (drain, draining) = drain::channel();
    let metrics = ServerMetrics::default();
    let script = Script::default();
    let listener = bind("test", ([127, 0, 0, 1], 0).into()).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let server = Server::new(params, metrics.clone(), draining);
    let task = tokio::spawn(server.serve(listener, script.service()));
    Running {
        addr,
        drain,
        metrics,
        script,
        task,
    }
}

impl Script {
    fn service(
        &self,
    ) -> impl tower_service::Service<
        Request<Incoming>,
        Response = Response<TestBody>,
        Error = Infallible,
        Future: Send,
    > + Clone
    + Send
    + 'static {
        let script = self.clone();
        tower::service_fn(move |request: Request<Incoming>| {
            let script = script.clone();
            async move {
                if request.uri().path() == "/now" {
                    return Ok(Response::new(Full::new(Bytes::from_static(b"now")).boxed()));
                }
                script.started.fetch_add(1, Ordering::SeqCst);
                let (mut tx, body) = Channel::<Bytes, Infallible>::new(1);
                tokio::spawn(async move {
                    let _ = tx.send_data(Bytes::from_static(b"first,")).await;
                    script.finish.notified().await;
                    let _ = tx.send_data(Bytes::from_static(b"last")).await;
                });
                Ok(Response::new(body.boxed()))
            }
        })
    }
}

/// Sends one request on a new connection and reads until the server closes it.
async fn raw(addr: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut out = String::new();
    let read = stream.read_to_string(&mut out);
    let _ = time::timeout(Duration::from_secs(10), read)
        .await
        .expect("the server closes");
    out
}

/// Opens a stream at `/slow` and waits for its first piece.
async fn open_stream(addr: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream
        .write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let mut seen = Vec::new();
    while !seen.ends_with(b"first,\r\n") {
        let mut buf = [0; 256];
        let n = time::timeout(Duration::from_secs(10), stream.read(&mut buf))
            .await
            .unwrap()
            .unwrap();
        assert!(n > 0, "closed early");
        seen.extend_from_slice(&buf[..n]);
    }
    stream
}

async fn eventually(what: &str, limit: Duration, check: impl Fn() -> bool) {
    let deadline = time::Instant::now() + limit;
    while !check() {
        assert!(
            time::Instant::now() < deadline,
            "not within {limit:?}: {what}"
        );
        time::sleep(Duration::from_millis(2)).await;
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn speaks_http1_and_http2() {
    let server = start(|_| {}).await;
    let answer = raw(
        server.addr,
        "GET /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    )
    .await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.ends_with("now"), "{answer}");

    let (mut send, conn) = h2(server.addr).await;
    let conn = tokio::spawn(conn);
    let response = send
        .send_request(
            Request::get("http://x/now")
                .body(Empty::<Bytes>::new())
                .unwrap(),
        )
        .await
        .unwrap();
    assert_eq!(response.version(), http::Version::HTTP_2);
    assert_eq!(
        response.into_body().collect().await.unwrap().to_bytes(),
        "now"
    );
    drop(send);
    let _ = conn.await;
    let gone = || server.metrics.open_connections() == 0 && server.metrics.open_requests() == 0;
    eventually("gauges back", SECOND, gone).await;
    assert_eq!(server.metrics.connections(Accepted::http1), 1);
    assert_eq!(server.metrics.connections(Accepted::http2), 1);
    assert_eq!(server.metrics.connections(Accepted::closed), 0);
}

async fn h2(
    addr: SocketAddr,
) -> (
    hyper::client::conn::http2::SendRequest<Empty<Bytes>>,
    impl Future<Output = hyper::Result<()>>,
) {
    let io = TokioIo::new(TcpStream::connect(addr).await.unwrap());
    hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
        .await
        .unwrap()
}

#[tokio::test]
async fn too_many_connections_are_told_so() {
    let server = start(|p| p.max_connections = 1).await;
    let open = open_stream(server.addr).await;
    let answer = raw(server.addr, "GET /now HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(answer.contains("\r\nretry-after: 1\r\n"), "{answer}");
    assert!(answer.contains("too many connections"), "{answer}");
    assert_eq!(server.metrics.connections(Accepted::shed), 1);
    drop(open);
    eventually("room again", SECOND, || {
        server.metrics.open_connections() == 0
    })
    .await;
    let answer = raw(
        server.addr,
        "GET /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    )
    .await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn far_too_many_connections_are_closed() {
    let server = start(|p| p.max_connections = 1).await;
    let _open = open_stream(server.addr).await;
    let mut silent = Vec::new();
    for _ in 0..SHEDDING + 5 {
        silent.push(TcpStream::connect(server.addr).await.unwrap());
    }
    let dropped = || server.metrics.connections(Accepted::dropped) == 5;
    eventually("the rest is closed", SECOND, dropped).await;
}

#[tokio::test]
async fn too_many_requests_are_told_so() {
    let server = start(|p| p.max_requests = 1).await;
    let (mut send, conn) = h2(server.addr).await;
    tokio::spawn(conn);
    let get = |path: &str| {
        Request::get(format!("http://x{path}"))
            .body(Empty::new())
            .unwrap()
    };
    let first = send.send_request(get("/slow")).await.unwrap();
    let second = send.send_request(get("/now")).await.unwrap();
    assert_eq!(second.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(second.headers()["retry-after"], "1");
    let body = second.into_body().collect().await.unwrap().to_bytes();
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body["error"]["code"], 503);
    // The place is free again at the end of the body.
    server.script.finish.notify_one();
    first.into_body().collect().await.unwrap();
    eventually("a place", SECOND, || server.metrics.open_requests() == 0).await;
    assert_eq!(
        send.send_request(get("/now")).await.unwrap().status(),
        StatusCode::OK
    );
}

#[tokio::test]
async fn a_client_that_leaves_or_half_closes_frees_everything() {
    let server = start(|_| {}).await;
    let gone = || server.metrics.open_connections() == 0 && server.metrics.open_requests() == 0;
    for half in [false, true] {
        let mut stream = open_stream(server.addr).await;
        assert_eq!(server.metrics.open_requests(), 1);
        if half {
            stream.shutdown().await.unwrap();
        } else {
            drop(stream);
        }
        eventually("gauges back", Duration::from_millis(250), gone).await;
    }
}

#[tokio::test]
async fn silence_is_bounded() {
    let server = start(|p| p.header_timeout = Duration::from_millis(100)).await;
    assert_eq!(raw(server.addr, "").await, "");
    assert_eq!(server.metrics.connections(Accepted::silent), 1);
    // A head that never ends.
    let answer = raw(server.addr, "GET /now HTTP/1.1\r\nhost: x\r\n").await;
    assert!(!answer.contains("200"), "{answer}");
    eventually("gauges back", SECOND, || {
        server.metrics.open_connections() == 0
    })
    .await;
}

#[tokio::test]
async fn large_heads_are_refused() {
    let server = start(|p| p.header_bytes = 8192).await;
    let head = format!(
        "GET /now HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n",
        "y".repeat(9000)
    );
    let answer = raw(server.addr, &head).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
}

#[tokio::test]
async fn draining_finishes_what_is_open_and_refuses_the_rest() {
    let server = start(|_| {}).await;
    let mut open = open_stream(server.addr).await;
    let mut idle = TcpStream::connect(server.addr).await.unwrap();
    idle.write_all(b"GET /now HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let mut buf = [0; 1024];
    assert!(idle.read(&mut buf).await.unwrap() > 0);

    server.drain.advance(Phase::Draining);
    // Idle connections are closed, and new ones refused.
    let closed = time::timeout(SECOND, idle.read(&mut buf)).await.unwrap();
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    let refused = || {
        TcpStream::connect(server.addr)
            .now_or_never()
            .is_none_or(|r| r.is_err())
    };
    eventually("refused", SECOND, refused).await;
    let error = TcpStream::connect(server.addr).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    assert!(!server.task.is_finished());

    server.script.finish.notify_one();
    let mut rest = String::new();
    time::timeout(SECOND, open.read_to_string(&mut rest))
        .await
        .unwrap()
        .unwrap();
    assert!(
        rest.contains("last") && rest.ends_with("0\r\n\r\n"),
        "{rest:?}"
    );
    assert_eq!(
        time::timeout(SECOND, server.task).await.unwrap().unwrap(),
        Drained { cut: 0 }
    );
}

#[tokio::test]
async fn a_lame_duck_still_serves_and_says_goodbye() {
    let server = start(|_| {}).await;
    server.drain.advance(Phase::LameDuck);
    // Without `connection: close` from the client, the server closes all the same.
    let answer = raw(server.addr, "GET /now HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
}

#[tokio::test]
async fn http2_gets_goaway() {
    let server = start(|_| {}).await;
    let (mut send, conn) = h2(server.addr).await;
    let (tx, mut ended) = mpsc::channel(1);
    tokio::spawn(async move {
        let _ = tx.send(conn.await).await;
    });
    let get = |path: &str| {
        Request::get(format!("http://x{path}"))
            .body(Empty::new())
            .unwrap()
    };
    let open = send.send_request(get("/slow")).await.unwrap();
    server.drain.advance(Phase::Draining);
    time::sleep(Duration::from_millis(50)).await;
    assert!(send.send_request(get("/now")).await.is_err());
    server.script.finish.notify_one();
    assert_eq!(
        open.into_body().collect().await.unwrap().to_bytes(),
        "first,last"
    );
    time::timeout(SECOND, ended.recv())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(server.task.await.unwrap(), Drained { cut: 0 });
}

#[tokio::test]
async fn the_drain_limit_and_a_second_signal_cut() {
    for by_limit in [true, false] {
        let limit = if by_limit {
            Duration::from_millis(100)
        } else {
            Duration::from_secs(30)
        };
        let server = start(|p| p.drain = limit).await;
        let mut open = open_stream(server.addr).await;
        server.drain.advance(Phase::Draining);
        if !by_limit {
            time::sleep(Duration::from_millis(50)).await;
            assert!(!server.task.is_finished());
            server.drain.advance(Phase::Now);
        }
        assert_eq!(
            time::timeout(SECOND, server.task).await.unwrap().unwrap(),
            Drained { cut: 1 }
        );
        // The client can tell that its answer is not whole.
        let mut rest = String::new();
        let _ = open.read_to_string(&mut rest).await;
        assert!(!rest.ends_with("0\r\n\r\n"), "{rest:?}");
    }
}
