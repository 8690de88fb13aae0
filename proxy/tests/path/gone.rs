//! Clients that leave, at every stage: the engine learns it at once and nothing stays behind.

use crate::support::*;
use forebay_proxy::http::record::Outcome;
use std::time::Duration;
use tokio::time::Instant;
use tower_ttft::peek::Api;

const CHAT: &str = r#"{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
const PATH: &str = "/v1/chat/completions";

/// What counts as at once.
const AT_ONCE: Duration = Duration::from_millis(250);

fn cancelled(gateway: &Gateway, status: u16) -> u64 {
    gateway
        .metrics
        .settle
        .requests(Api::Chat, "tiny", status, Outcome::cancelled)
}

/// A2: before the head of an answer. Again and again, so that a leak adds up.
#[tokio::test]
async fn before_the_head() {
    let engine = FakeEngine::start(|_| vec![Step::Hang]).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    for number in 0..50 {
        let client = RawClient::post(&gateway.address, PATH, CHAT).await;
        engine.asked(number + 1).await;
        let left = client.leave();
        let closed = engine.closed(number).await;
        assert!(closed.saturating_duration_since(left) < AT_ONCE);
    }
    gateway.idle().await;
    assert_eq!(cancelled(&gateway, 0), 50);
}

/// A3: behind the head and before the first token.
#[tokio::test]
async fn before_the_first_token() {
    let engine = FakeEngine::start(|_| vec![sse_head(), Step::Hang]).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    for number in 0..20 {
        let client = RawClient::post(&gateway.address, PATH, CHAT).await;
        engine.asked(number + 1).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        let left = client.leave();
        let closed = engine.closed(number).await;
        assert!(closed.saturating_duration_since(left) < AT_ONCE);
    }
    gateway.idle().await;
    assert_eq!(cancelled(&gateway, 0), 20);
}

/// A14, A3: the same once the head was committed.
#[tokio::test]
async fn within_a_silent_stream() {
    let engine = FakeEngine::start(|_| vec![sse_head(), Step::Hang]).await;
    let gateway = Setup::tiny(&[&engine])
        .policy(|p| p.head_after = Duration::from_millis(20))
        .start()
        .await;
    let mut client = RawClient::post(&gateway.address, PATH, CHAT).await;
    client.read_until(": still waiting").await;
    let left = client.leave();
    assert!(engine.closed(0).await.saturating_duration_since(left) < AT_ONCE);
    gateway.idle().await;
    assert_eq!(cancelled(&gateway, 200), 1);
}

/// A1: within the stream, while tokens flow and while they do not.
#[tokio::test]
async fn within_the_stream() {
    let engine = FakeEngine::start(|seen| {
        let mut steps = vec![sse_head(), chunk(chat_event("a"))];
        if seen.number % 2 == 0 {
            for _ in 0..1000 {
                steps.extend([pause(5), chunk(chat_event("b"))]);
            }
        }
        steps.push(Step::Hang);
        steps
    })
    .await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    for number in 0..20 {
        let mut client = RawClient::post(&gateway.address, PATH, CHAT).await;
        client.read_until("\"a\"").await;
        let left = client.leave();
        let closed = engine.closed(number).await;
        assert!(closed.saturating_duration_since(left) < AT_ONCE);
    }
    gateway.idle().await;
    assert_eq!(cancelled(&gateway, 200), 20);
}

/// A1: an answer that does not stream, before and within its body.
#[tokio::test]
async fn within_a_whole_answer() {
    let engine = FakeEngine::start(|_| {
        vec![
            head(
                "200 OK",
                &["content-type: application/json", "content-length: 100"],
            ),
            Step::Write("{\"half\":".into()),
            Step::Hang,
        ]
    })
    .await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    let mut client = RawClient::post(&gateway.address, PATH, r#"{"model":"tiny"}"#).await;
    client.read_until("half").await;
    let left = client.leave();
    assert!(engine.closed(0).await.saturating_duration_since(left) < AT_ONCE);
    gateway.idle().await;
    assert_eq!(cancelled(&gateway, 200), 1);
}

/// F11: while it waits for an endpoint.
#[tokio::test]
async fn queued() {
    let mut setup = Setup::addresses(vec![]);
    setup.no_endpoint_wait = Duration::from_secs(60);
    let gateway = setup.start().await;
    let mut clients = Vec::new();
    for _ in 0..10 {
        clients.push(RawClient::post(&gateway.address, PATH, CHAT).await);
    }
    let queue = gateway.pools[0].pool().queue().clone();
    within(Duration::from_secs(2), "all wait", || queue.len() == 10).await;
    assert!(queue.bytes() > 0);
    drop(clients);
    within(AT_ONCE, "nobody waits", || queue.is_empty()).await;
    gateway.idle().await;
    assert_eq!(cancelled(&gateway, 0), 10);
}

/// While a connection is being made: a listener whose backlog is full drops SYN as a dead host does.
#[tokio::test]
async fn connecting() {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    socket.bind(&any.into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    // Fills the backlog; what is over it stays in SYN-SENT.
    let mut fill = Vec::new();
    for _ in 0..4 {
        let filler =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        filler.set_nonblocking(true).unwrap();
        let _ = filler.connect(&address.into());
        fill.push(filler);
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    let probe = tokio::time::timeout(
        Duration::from_millis(200),
        tokio::net::TcpStream::connect(address),
    );
    assert!(probe.await.is_err(), "the backlog is not full");

    let gateway = Setup::addresses(vec![address.to_string()]).start().await;
    let clients: Vec<RawClient> = {
        let mut clients = Vec::new();
        for _ in 0..5 {
            clients.push(RawClient::post(&gateway.address, PATH, CHAT).await);
        }
        clients
    };
    within(Duration::from_secs(2), "all connect", || {
        gateway.metrics.settle.active(Api::Chat) == 5
    })
    .await;
    tokio::time::sleep(Duration::from_millis(30)).await;
    let before = syn_sent(address.port());
    assert!(before >= 5, "{before}");
    drop(clients);
    within(AT_ONCE, "the connections are given up", || {
        syn_sent(address.port()) <= before - 5
    })
    .await;
    gateway.idle().await;
    assert_eq!(cancelled(&gateway, 0), 5);
}

/// A3: a client that closes its sending side only is taken to be gone.
#[tokio::test]
async fn half_closed_is_gone() {
    let engine = FakeEngine::start(|_| vec![sse_head(), chunk(chat_event("a")), Step::Hang]).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    let mut client = RawClient::post(&gateway.address, PATH, CHAT).await;
    client.read_until("\"a\"").await;
    client.half_close().await;
    let left = Instant::now();
    assert!(engine.closed(0).await.saturating_duration_since(left) < AT_ONCE);
    gateway.idle().await;
}

/// A client that leaves while it still sends its body.
#[tokio::test]
async fn within_the_upload() {
    let engine = FakeEngine::start(|_| json("200 OK", "{}")).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    let head =
        format!("POST {PATH} HTTP/1.1\r\nhost: g\r\ncontent-length: 100000\r\n\r\n{{\"model\":");
    let client = RawClient::write(&gateway.address, head.as_bytes()).await;
    within(Duration::from_secs(2), "it is read", || {
        gateway.metrics.settle.active(Api::Chat) == 1
    })
    .await;
    client.leave();
    gateway.idle().await;
    assert_eq!(engine.seen().len(), 0);
}

/// A client that has read the end is not cancelled, however it leaves.
#[tokio::test]
async fn behind_the_end() {
    let engine = FakeEngine::start(|_| chat_stream(&["a"])).await;
    let gateway = Setup::tiny(&[&engine]).start().await;
    for _ in 0..20 {
        let mut client = RawClient::post(&gateway.address, PATH, CHAT).await;
        client.read_until("0\r\n\r\n").await;
        client.leave();
    }
    gateway.idle().await;
    assert_eq!(cancelled(&gateway, 200), 0);
    assert_eq!(engine.connections(), 1);
}

/// Sockets that wait for the answer to their SYN at this port, from the kernel's own table.
fn syn_sent(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/net/tcp").expect("a Linux kernel");
    let port = format!(":{port:04X}");
    table
        .lines()
        .skip(1)
        .filter(|line| {
            let mut fields = line.split_whitespace().skip(2);
            fields.next().is_some_and(|remote| remote.ends_with(&port))
                && fields.next() == Some("02")
        })
        .count()
}
