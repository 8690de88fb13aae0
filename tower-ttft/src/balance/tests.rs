use super::*;
use crate::{
    chain::{ChainKind, KeySpace},
    observe::End,
    peek::{Api, BodyRead},
    policy::PolicySpec,
    pool::{EndpointInfo, PoolParams},
    prompt::Source,
};
use futures::FutureExt;
use http_body_util::{BodyExt, Channel, Full};
use parking_lot::Mutex;
use std::{collections::HashMap, convert::Infallible, time::Duration};
use tokio::{sync::oneshot, time::sleep};

type Reply = Result<Response<Channel<Bytes, Infallible>>, Error>;
type Asked = (Request<Full<Bytes>>, oneshot::Sender<Reply>);

/// Endpoints whose answers the test gives by hand.
#[derive(Clone, Default)]
struct Engines {
    asked: Arc<Mutex<HashMap<String, Vec<Asked>>>>,
}

#[derive(Clone)]
struct Engine {
    engines: Engines,
    name: String,
}

impl NewService<Endpoint> for Engines {
    type Service = Engine;

    fn new_service(&self, endpoint: Endpoint) -> Engine {
        Engine {
            engines: self.clone(),
            name: endpoint.id().to_string(),
        }
    }
}

impl Service<Request<Full<Bytes>>> for Engine {
    type Response = Response<Channel<Bytes, Infallible>>;
    type Error = Error;
    type Future = BoxFuture<'static, Reply>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, req: Request<Full<Bytes>>) -> Self::Future {
        let (tx, rx) = oneshot::channel();
        let mut asked = self.engines.asked.lock();
        asked.entry(self.name.clone()).or_default().push((req, tx));
        Box::pin(async move { rx.await.map_err(Error::from)? })
    }
}

impl Engines {
    fn take(&self, name: &str) -> Option<Asked> {
        let mut asked = self.asked.lock();
        let list = asked.get_mut(name)?;
        (!list.is_empty()).then(|| list.remove(0))
    }
}

fn balance(policy: PolicySpec) -> (Balance<Engines>, Engines) {
    let engines = Engines::default();
    let pool = Pool::new(PoolParams {
        model: "m".into(),
        keys: KeySpace::new(1),
        policy,
        seed: 1,
        index_bytes: 1 << 20,
    });
    (Balance::new(pool, engines.clone()), engines)
}

fn ready(pool: &Pool, name: &str) -> Endpoint {
    let e = pool.insert(EndpointId::new(name), EndpointInfo::default());
    e.set_ready(true);
    e
}

fn request(n: u32) -> Request<Full<Bytes>> {
    let tokens: Vec<u32> = (0..200).map(|t| n * 1000 + t).collect();
    let ks = KeySpace::new(1);
    let mut req = Request::new(Full::new(Bytes::from_static(b"{}")));
    req.headers_mut().insert(
        "x-request-id",
        format!("r{n}").parse().expect("a header value"),
    );
    let ext = req.extensions_mut();
    ext.insert(Prompt {
        chain: ks.tokens(ks.root(ChainKind::Tokens, "m", None, None), &tokens),
        tokens: 200,
        ids: None,
        bytes: 800,
        whole_text: false,
        source: Source::Ids,
    });
    ext.insert(InferenceRequest {
        stream: true,
        body: Bytes::from_static(b"{}"),
        ..InferenceRequest::unread(Api::Chat, BodyRead::Parsed)
    });
    req
}

fn streamed() -> (
    http_body_util::channel::Sender<Bytes, Infallible>,
    Response<Channel<Bytes, Infallible>>,
) {
    let (tx, body) = Channel::new(8);
    let rsp = Response::builder()
        .header("content-type", "text/event-stream")
        .body(body)
        .expect("a response");
    (tx, rsp)
}

const TOKEN: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n";
const DONE: &[u8] = b"data: [DONE]\n\n";

fn in_flight(pool: &Pool) -> (u32, u32) {
    let now = Instant::now();
    pool.endpoints().iter().fold((0, 0), |(b, r), e| {
        let s = e.status(now);
        (b + s.booked, r + s.running)
    })
}

fn cause<E: std::error::Error + 'static>(e: &Error) -> Option<&E> {
    let mut e: Option<&(dyn std::error::Error + 'static)> = Some(&**e);
    while let Some(this) = e {
        if let Some(found) = this.downcast_ref() {
            return Some(found);
        }
        e = this.source();
    }
    None
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_watched_to_its_end() {
    let (mut svc, engines) = balance(PolicySpec::default());
    let pool = svc.pool().clone();
    ready(&pool, "a:1");
    let call = tokio::spawn(svc.call(request(1)));
    sleep(Duration::from_millis(10)).await;
    assert_eq!(in_flight(&pool), (1, 0));
    let (_, reply) = engines.take("a:1").expect("asked");
    let (mut tx, rsp) = streamed();
    assert!(reply.send(Ok(rsp)).is_ok());
    let rsp = call.await.expect("no panic").expect("an answer");
    assert_eq!(rsp.extensions().get(), Some(&EndpointId::new("a:1")));
    let decision: &Arc<Decision> = rsp.extensions().get().expect("a decision");
    assert_eq!(decision.request_id.as_deref(), Some("r1"));
    let mut body = rsp.into_body();
    sleep(Duration::from_millis(490)).await;
    tx.send_data(TOKEN.into()).await.expect("read");
    body.frame().await.expect("a frame").expect("data");
    assert_eq!(in_flight(&pool), (0, 1));
    tx.send_data(DONE.into()).await.expect("read");
    drop(tx);
    while body.frame().await.is_some() {}
    assert_eq!(in_flight(&pool), (0, 0));
    let outcome = pool.decisions().last(1)[0].outcome.expect("ended");
    assert_eq!(outcome.end, End::Complete);
    assert!(outcome.ttft.is_some_and(|t| (0.49..0.51).contains(&t)));
}

/// A client that leaves releases everything at once, before the head, before the first token and after it.
#[tokio::test(start_paused = true)]
async fn leaving_releases_everything() {
    let (mut svc, engines) = balance(PolicySpec::default());
    let pool = svc.pool().clone();
    ready(&pool, "a:1");
    for stage in 0..3 {
        let call = tokio::spawn(svc.call(request(stage)));
        sleep(Duration::from_millis(10)).await;
        let (_, reply) = engines.take("a:1").expect("asked");
        assert_eq!(in_flight(&pool), (1, 0));
        if stage == 0 {
            call.abort();
            sleep(Duration::from_millis(1)).await;
            assert!(reply.is_closed(), "the call upstream is dropped");
        } else {
            let (mut tx, rsp) = streamed();
            assert!(reply.send(Ok(rsp)).is_ok());
            let mut body = call
                .await
                .expect("no panic")
                .expect("an answer")
                .into_body();
            if stage == 2 {
                tx.send_data(TOKEN.into()).await.expect("read");
                body.frame().await.expect("a frame").expect("data");
                assert_eq!(in_flight(&pool), (0, 1));
            }
            drop(body);
        }
        assert_eq!(in_flight(&pool), (0, 0), "stage {stage}");
        let outcome = pool.decisions().last(1)[0].outcome.expect("ended");
        assert_eq!(outcome.end, End::Cancelled);
    }
}

/// E13: with nobody ready a request waits, is seen as demand, and is served when someone comes.
#[tokio::test(start_paused = true)]
async fn waits_for_an_endpoint_to_exist() {
    let (mut svc, engines) = balance(PolicySpec::default());
    let pool = svc.pool().clone();
    let calls: Vec<_> = (0..3).map(|n| tokio::spawn(svc.call(request(n)))).collect();
    sleep(Duration::from_secs(20)).await;
    assert_eq!((pool.queue().len(), pool.queue().bytes()), (3, 6));
    // Who leaves gives up its place.
    calls[1].abort();
    sleep(Duration::from_millis(1)).await;
    assert_eq!(pool.queue().len(), 2);
    ready(&pool, "a:1");
    sleep(Duration::from_millis(1)).await;
    assert!(pool.queue().is_empty());
    let first = engines.take("a:1").expect("asked").0;
    assert_eq!(first.headers()["x-request-id"], "r0", "in order");
    let second = engines.take("a:1").expect("asked").0;
    assert_eq!(second.headers()["x-request-id"], "r2");
    for call in calls {
        call.abort();
    }
    sleep(Duration::from_millis(1)).await;
    assert_eq!(in_flight(&pool), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn the_wait_is_bounded_in_time_and_number() {
    let (mut svc, _) = balance(PolicySpec {
        no_endpoint_wait: Duration::from_secs(30),
        max_queued: 2,
        ..Default::default()
    });
    let pool = svc.pool().clone();
    let start = Instant::now();
    let calls: Vec<_> = (0..2).map(|n| tokio::spawn(svc.call(request(n)))).collect();
    sleep(Duration::from_millis(1)).await;
    let full = svc.call(request(9)).await.err().expect("no place");
    assert_eq!(cause::<QueueError>(&full), Some(&QueueError::Full));
    for call in calls {
        let late = call.await.expect("no panic").err().expect("nobody came");
        assert_eq!(cause::<QueueError>(&late), Some(&QueueError::Deadline));
    }
    let waited = Instant::now()
        .saturating_duration_since(start)
        .as_secs_f64();
    assert!((29.9..30.1).contains(&waited), "{waited}");
    assert!(pool.queue().is_empty());
}

/// A cut ends calls without an answer and streams in the middle, though the engine keeps its connections open.
#[tokio::test(start_paused = true)]
async fn a_cut_ends_calls_and_streams() {
    let (mut svc, engines) = balance(PolicySpec::default());
    let pool = svc.pool().clone();
    let e = ready(&pool, "a:1");
    let waiting = tokio::spawn(svc.call(request(1)));
    sleep(Duration::from_millis(1)).await;
    let _hangs = engines.take("a:1").expect("asked");
    let streaming = tokio::spawn(svc.call(request(2)));
    sleep(Duration::from_millis(1)).await;
    let (mut tx, rsp) = streamed();
    let (_, reply) = engines.take("a:1").expect("asked");
    assert!(reply.send(Ok(rsp)).is_ok());
    let mut body = streaming
        .await
        .expect("no panic")
        .expect("an answer")
        .into_body();
    tx.send_data(TOKEN.into()).await.expect("read");
    body.frame().await.expect("a frame").expect("data");
    assert!(body.frame().now_or_never().is_none());
    e.cut();
    let soon = tokio::time::timeout(Duration::from_secs(1), body.frame()).await;
    let frame = soon.expect("at once").expect("an error");
    let error = frame.expect_err("an error");
    assert_eq!(cause::<Cut>(&error), Some(&Cut));
    assert!(body.frame().await.is_none());
    let error = waiting.await.expect("no panic").err().expect("no answer");
    let at = cause::<EndpointError>(&error).expect("names the endpoint");
    assert_eq!(at.endpoint, EndpointId::new("a:1"));
    assert!(cause::<Cut>(&error).is_some());
    assert_eq!(in_flight(&pool), (0, 0));
    let ends: Vec<End> = pool
        .decisions()
        .last(2)
        .iter()
        .filter_map(|r| r.outcome)
        .map(|o| o.end)
        .collect();
    assert_eq!(ends, [End::Broken, End::Broken]);
    // Being cut is no failure: it may serve again at once.
    e.set_ready(true);
    assert!(!e.status(Instant::now()).breaker_open);
}

/// Failures name the endpoint, so that the next try can exclude it.
#[tokio::test(start_paused = true)]
async fn failures_name_the_endpoint_and_it_can_be_excluded() {
    let (mut svc, engines) = balance(PolicySpec::default());
    let pool = svc.pool().clone();
    ready(&pool, "a:1");
    let call = tokio::spawn(svc.call(request(1)));
    sleep(Duration::from_millis(1)).await;
    let (_, reply) = engines.take("a:1").expect("asked");
    assert!(reply.send(Err("refused".into())).is_ok());
    let error = call.await.expect("no panic").err().expect("no answer");
    let at = cause::<EndpointError>(&error).expect("names it");
    assert_eq!(error.to_string(), "endpoint a:1: refused");
    let mut again = request(1);
    again
        .extensions_mut()
        .insert(Excluded(vec![at.endpoint.clone()]));
    let error = svc.call(again).await.err().expect("nobody else");
    assert_eq!(cause::<NoEndpoint>(&error), Some(&NoEndpoint::AllExcluded));
    let missing = svc
        .call(Request::new(Full::default()))
        .await
        .err()
        .expect("no prompt");
    assert!(missing.to_string().contains("InferenceRequest"));
    assert_eq!(in_flight(&pool), (0, 0));
}

/// An engine that says it is full is left alone for a second, though it holds the prompt.
#[tokio::test(start_paused = true)]
async fn a_full_engine_is_avoided_for_a_second() {
    let (mut svc, engines) = balance(PolicySpec::default());
    let pool = svc.pool().clone();
    ready(&pool, "a:1");
    ready(&pool, "b:1");
    let mut pick = async |status: u16| {
        let call = tokio::spawn(svc.call(request(1)));
        sleep(Duration::from_millis(1)).await;
        let (name, asked) = ["a:1", "b:1"]
            .iter()
            .find_map(|n| Some((*n, engines.take(n)?)))
            .expect("asked");
        let (mut tx, mut rsp) = streamed();
        *rsp.status_mut() = http::StatusCode::from_u16(status).expect("a status");
        assert!(asked.1.send(Ok(rsp)).is_ok());
        let mut body = call
            .await
            .expect("no panic")
            .expect("an answer")
            .into_body();
        if status == 200 {
            tx.send_data(TOKEN.into()).await.expect("read");
            tx.send_data(DONE.into()).await.expect("read");
        }
        drop(tx);
        while body.frame().await.is_some() {}
        name
    };
    let holder = pick(200).await;
    assert_eq!(pick(503).await, holder);
    assert_ne!(pick(200).await, holder);
}

/// Statuses: bad requests and full engines do not open a breaker, broken engines do.
#[tokio::test(start_paused = true)]
async fn only_failures_of_the_engine_count() {
    for (status, read, opens) in [
        (400, true, false),
        (404, true, false),
        (503, true, false),
        (503, false, false),
        (500, true, true),
        (500, false, true),
        (502, true, true),
    ] {
        let (mut svc, engines) = balance(PolicySpec::default());
        let pool = svc.pool().clone();
        let e = ready(&pool, "a:1");
        for n in 0..6 {
            let call = tokio::spawn(svc.call(request(n)));
            sleep(Duration::from_millis(1)).await;
            let (_, reply) = engines.take("a:1").expect("asked");
            let (mut tx, mut rsp) = streamed();
            *rsp.status_mut() = http::StatusCode::from_u16(status).expect("a status");
            rsp.headers_mut()
                .insert("content-type", "application/json".parse().expect("a value"));
            assert!(reply.send(Ok(rsp)).is_ok());
            let mut body = call
                .await
                .expect("no panic")
                .expect("an answer")
                .into_body();
            let error = Bytes::from_static(b"{\"error\":{}}");
            tx.send_data(error).await.expect("read");
            drop(tx);
            // Whoever tries elsewhere does not read it.
            while read && body.frame().await.is_some() {}
        }
        let open = e.status(Instant::now()).breaker_open;
        assert_eq!(open, opens, "{status} {read}");
    }
}
