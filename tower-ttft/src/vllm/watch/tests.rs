use super::*;
use crate::{
    events::EventBatch,
    load::LoadReport,
    vllm::{
        status::EventsState,
        subscribe::Sink,
        testing::{
            FakeEngine,
            http::{FakeHttp, Reply},
            stored,
        },
    },
};
use std::collections::HashMap;
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

/// A pool that only takes notes.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<HashMap<EndpointId, Note>>>);

#[derive(Clone, Debug, Default)]
struct Note {
    info: EndpointInfo,
    ready: bool,
    live: bool,
    cuts: u32,
    clears: u32,
    reports: Vec<LoadReport>,
    batches: Vec<u64>,
}

#[derive(Clone)]
struct Noted {
    id: EndpointId,
    notes: Notes,
}

impl Registry for Notes {
    type Member = Noted;

    fn insert(&self, id: EndpointId, info: EndpointInfo) -> Noted {
        let mut notes = self.0.lock();
        // As the pool does: another incarnation takes the place.
        notes.retain(|other, _| (&other.address, other.rank) != (&id.address, id.rank));
        notes.insert(
            id.clone(),
            Note {
                info,
                ..Note::default()
            },
        );
        Noted {
            id,
            notes: self.clone(),
        }
    }

    fn remove(&self, id: &EndpointId) {
        assert!(self.0.lock().remove(id).is_some(), "{id:?} was not there");
    }
}

impl Noted {
    fn with(&self, change: impl FnOnce(&mut Note)) {
        if let Some(note) = self.notes.0.lock().get_mut(&self.id) {
            change(note);
        }
    }
}

impl Sink for Noted {
    fn apply(&self, batch: &EventBatch) {
        self.with(|note| note.batches.push(batch.seq));
    }

    fn clear(&self) {
        self.with(|note| {
            note.clears += 1;
            note.batches.clear();
        });
    }

    fn set_events_live(&self, live: bool) {
        self.with(|note| note.live = live);
    }
}

impl Member for Noted {
    fn set_ready(&self, ready: bool) {
        self.with(|note| note.ready = ready);
    }

    fn cut(&self) {
        self.with(|note| {
            note.cuts += 1;
            note.ready = false;
        });
    }

    fn set_info(&self, info: EndpointInfo) {
        self.with(|note| note.info = info);
    }

    fn report(&self, report: LoadReport) {
        self.with(|note| note.reports.push(report));
    }
}

/// A watcher of a fake engine.
struct Harness {
    notes: Notes,
    engine: Engine,
    task: JoinHandle<()>,
}

impl Harness {
    fn watch(params: WatchParams) -> Self {
        let notes = Notes::default();
        let (engine, task) = watch_in(params, notes.clone());
        let task = tokio::spawn(async move { match task.await {} });
        Self {
            notes,
            engine,
            task,
        }
    }

    fn status(&self) -> EngineStatus {
        self.engine.status(Instant::now())
    }

    fn notes(&self) -> HashMap<EndpointId, Note> {
        self.notes.0.lock().clone()
    }

    /// The only endpoint there is.
    fn one(&self) -> Option<(EndpointId, Note)> {
        let notes = self.notes();
        assert!(notes.len() <= 1, "{notes:?}");
        notes.into_iter().next()
    }

    fn is_ready(&self) -> bool {
        self.one().is_some_and(|(_, note)| note.ready)
    }

    async fn ready(&self) -> (EndpointId, Note) {
        eventually(|| self.is_ready()).await;
        self.one().unwrap()
    }

    async fn leave(self) -> Notes {
        self.task.abort();
        let _ = self.task.await;
        self.notes
    }
}

/// Fast enough for tests, slow enough for a busy machine.
fn params(http: &FakeHttp) -> WatchParams {
    WatchParams {
        times: WatchTimes {
            interval: Duration::from_millis(100),
            suspicion: Duration::from_millis(30),
            dial: Duration::from_secs(1),
            answer: Duration::from_millis(300),
            discovery: Duration::from_millis(300),
        },
        ..WatchParams::new(http.address())
    }
}

fn metrics(started: &str, running: u32) -> String {
    format!(
        "process_start_time_seconds {started}\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"tiny\"}} {running}.0\n\
         vllm:num_requests_waiting{{engine=\"0\",model_name=\"tiny\"}} 2.0\n\
         vllm:cache_config_info{{block_size=\"32\",num_gpu_blocks=\"100\",engine=\"0\"}} 1.0\n"
    )
}

const MODELS: &str = r#"{"data":[{"id":"tiny","root":"org/tiny","parent":null,"max_model_len":4096},
    {"id":"ad1","root":"ad","parent":"tiny","max_model_len":null}]}"#;

/// A healthy engine without events.
async fn healthy() -> FakeHttp {
    let http = FakeHttp::start().await;
    healthy_at(&http, "1000.5");
    http
}

fn healthy_at(http: &FakeHttp, started: &str) {
    http.ok("/health", "");
    http.ok("/version", r#"{"version":"0.32.0"}"#);
    http.ok("/v1/models", MODELS);
    http.ok("/kv_event_sources", "{}");
    http.ok("/metrics", metrics(started, 3));
}

fn announce(http: &FakeHttp, engine: &FakeEngine) {
    let body = format!(
        r#"{{"0":{{"publisher":"zmq","endpoint":"tcp://*:{}","replay_endpoint":"tcp://*:{}"}}}}"#,
        engine.live.port, engine.replay.port
    );
    http.ok("/kv_event_sources", body);
}

#[track_caller]
fn eventually(mut condition: impl FnMut() -> bool) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let done = timeout(Duration::from_secs(10), async {
            while !condition() {
                sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(done.await.is_ok(), "never came true: {caller}");
    }
}

fn has(conditions: &[String], says: &str) -> bool {
    conditions.iter().any(|condition| condition.contains(says))
}

#[tokio::test]
async fn an_engine_joins_with_all_that_it_says() {
    let http = healthy().await;
    let h = Harness::watch(WatchParams {
        gpu: Some("h100".into()),
        ..params(&http)
    });
    let (id, _) = h.ready().await;
    assert_eq!(id.address.as_str(), http.address());
    assert_eq!((id.rank, id.incarnation.as_str()), (None, "1000.5"));
    eventually(|| h.one().unwrap().1.reports.len() >= 3).await;
    let note = h.one().unwrap().1;
    assert_eq!(note.info.gpu.as_deref(), Some("h100"));
    assert_eq!(
        (note.info.block_size, note.info.blocks, note.info.events),
        (Some(32), Some(100), false)
    );
    assert_eq!((note.reports[0].running, note.reports[0].waiting), (3, 2));
    let status = h.status();
    assert_eq!(status.state, EngineState::Ready);
    assert_eq!(status.version.as_deref(), Some("0.32.0"));
    assert_eq!(status.models[1].parent.as_deref(), Some("tiny"));
    assert!(status.scrape_age.unwrap() < 5.0);
    assert_eq!(status.events[0].state, EventsState::None);
    assert!(
        status.events[0]
            .why
            .as_deref()
            .unwrap()
            .contains("--kv-events-config")
    );
    assert!(status.conditions.is_empty(), "{:?}", status.conditions);
    assert!(
        h.leave().await.0.lock().is_empty(),
        "it leaves the pool with its watcher"
    );
}

#[tokio::test]
async fn an_engine_that_is_still_starting_refuses_and_is_waited_for() {
    let http = healthy().await;
    let port = http.port;
    let params = params(&http);
    http.stop().await;
    let h = Harness::watch(params);
    sleep(Duration::from_millis(300)).await;
    assert!(h.notes().is_empty());
    assert_eq!(h.status().state, EngineState::Starting);
    let http = FakeHttp::start_at(port).await;
    http.reply("/health", Reply::Status(503, vec![]));
    eventually(|| http.asked("/health") > 1).await;
    assert!(h.notes().is_empty(), "not before it is healthy");
    healthy_at(&http, "1");
    h.ready().await;
}

#[tokio::test]
async fn events_are_followed_where_the_engine_says() {
    let http = healthy().await;
    let mut engine = FakeEngine::start().await;
    announce(&http, &engine);
    engine.lose(0, 1.0, &[stored(1, None)]);
    let h = Harness::watch(params(&http));
    eventually(|| {
        h.one()
            .is_some_and(|(_, note)| note.live && note.batches == [0])
    })
    .await;
    assert!(h.one().unwrap().1.info.events);
    sleep(Duration::from_millis(50)).await;
    engine.publish(1, 2.0, &[stored(2, Some(1))]).await;
    eventually(|| h.one().unwrap().1.batches == [0, 1]).await;
    let status = h.status();
    assert!(status.events[0].complete);
    assert_eq!(status.events[0].last_seq, Some(1));
    assert_eq!(
        status.events[0].source.as_deref(),
        Some(&*format!("tcp://127.0.0.1:{}", engine.live.port))
    );
    // The fake's blocks have 4 tokens.
    assert!(
        has(&status.conditions, "blocks of 4 tokens, /metrics says 32"),
        "{:?}",
        status.conditions
    );
}

#[tokio::test]
async fn overrides_win_over_what_the_engine_says() {
    let http = healthy().await;
    http.reply("/kv_event_sources", Reply::Status(404, vec![]));
    let h = Harness::watch(params(&http));
    h.ready().await;
    let why = h.status().events[0].why.clone().unwrap();
    assert!(why.contains("set kvEvents and replay"), "{why}");
    h.leave().await;

    let engine = FakeEngine::start().await;
    engine.lose(0, 1.0, &[]);
    let h = Harness::watch(WatchParams {
        kv_events: Source::Tcp(
            TcpAddress::parse(&format!("tcp://*:{}", engine.live.port)).unwrap(),
        ),
        replay: Source::Tcp(engine.replay.clone()),
        ..params(&http)
    });
    eventually(|| h.one().is_some_and(|(_, note)| note.batches == [0])).await;
    h.leave().await;

    announce(&http, &engine);
    let h = Harness::watch(WatchParams {
        kv_events: Source::None,
        ..params(&http)
    });
    h.ready().await;
    assert!(
        h.status().events[0]
            .why
            .as_deref()
            .unwrap()
            .contains("kvEvents: none")
    );
    assert!(!h.one().unwrap().1.info.events);
}

#[tokio::test]
async fn every_data_parallel_rank_is_an_endpoint() {
    let http = healthy().await;
    let engines = [FakeEngine::start().await, FakeEngine::start().await];
    let sources: Vec<_> = (0..2)
        .map(|r| {
            format!(
                r#""{r}":{{"endpoint":"tcp://*:{}","replay_endpoint":"tcp://*:{}"}}"#,
                engines[r].live.port, engines[r].replay.port
            )
        })
        .collect();
    http.ok("/kv_event_sources", format!("{{{}}}", sources.join(",")));
    http.ok(
        "/metrics",
        "vllm:num_requests_running{engine=\"0\"} 1\nvllm:num_requests_running{engine=\"1\"} 5\n",
    );
    let h = Harness::watch(params(&http));
    eventually(|| {
        h.notes()
            .values()
            .filter(|n| n.ready && n.live && !n.reports.is_empty())
            .count()
            == 2
    })
    .await;
    let mut running: Vec<_> = h
        .notes()
        .iter()
        .map(|(id, n)| (id.rank, n.reports[0].running))
        .collect();
    running.sort();
    assert_eq!(running, [(Some(0), 1), (Some(1), 5)]);
    // A failed scrape does not make them one.
    http.reply("/metrics", Reply::Status(500, vec![]));
    http.reply("/kv_event_sources", Reply::Status(500, vec![]));
    eventually(|| h.status().scrape_error.is_some()).await;
    sleep(Duration::from_millis(500)).await;
    assert_eq!(h.notes().len(), 2);
    assert!(h.notes().values().all(|n| n.ready && n.clears == 0));
}

#[tokio::test]
async fn unusable_metrics_never_stop_inference() {
    for (reply, says) in [
        (Reply::Status(500, vec![]), "status 500"),
        (Reply::Status(404, vec![]), "status 404"),
        (Reply::Status(200, b"<html>".to_vec()), "nothing of vLLM's"),
        (Reply::Huge(20 << 20), "a body of more than 4194304 bytes"),
        (Reply::Hang, "no answer in time"),
    ] {
        let http = healthy().await;
        http.reply("/metrics", reply.clone());
        let h = Harness::watch(params(&http));
        // From the start.
        h.ready().await;
        eventually(|| has(&h.status().conditions, says)).await;
        assert!(
            has(&h.status().conditions, "load is not known"),
            "{reply:?}"
        );
        // They recover, and the endpoint stays the same one.
        http.ok("/metrics", metrics("7.0", 1));
        eventually(|| !h.one().unwrap().1.reports.is_empty()).await;
        let (id, _) = h.one().unwrap();
        eventually(|| h.status().conditions.is_empty()).await;
        // And later.
        http.reply("/metrics", reply.clone());
        eventually(|| has(&h.status().conditions, says)).await;
        let scrapes = http.asked("/metrics");
        eventually(|| http.asked("/metrics") > scrapes + 3).await;
        let (now, note) = h.one().unwrap();
        assert_eq!(now, id);
        assert!(
            note.ready && note.cuts == 0 && note.clears == 0,
            "{reply:?}: {note:?}"
        );
        assert_eq!(note.info.block_size, Some(32));
    }
}

#[tokio::test]
async fn a_slow_engine_is_never_cut() {
    let http = healthy().await;
    let h = Harness::watch(params(&http));
    h.ready().await;
    http.reply("/health", Reply::Hang);
    http.reply("/metrics", Reply::Hang);
    let asked = http.asked("/health");
    eventually(|| http.asked("/health") >= asked + 4).await;
    let note = h.one().unwrap().1;
    assert!(note.ready && note.cuts == 0, "{note:?}");
    assert!(has(&h.status().conditions, "no answer in time"));
}

#[tokio::test]
async fn a_dead_engine_core_takes_no_more_requests() {
    let http = healthy().await;
    let h = Harness::watch(params(&http));
    h.ready().await;
    http.reply("/health", Reply::Status(503, vec![]));
    eventually(|| !h.is_ready()).await;
    assert_eq!(
        (h.status().state, h.one().unwrap().1.cuts),
        (EngineState::Unhealthy, 0)
    );
    http.ok("/health", "");
    h.ready().await;
}

#[tokio::test]
async fn a_port_that_refuses_twice_is_cut_and_comes_back_as_another_process() {
    let http = healthy().await;
    let params = params(&http);
    let port = http.port;
    let h = Harness::watch(params);
    let (before, _) = h.ready().await;
    http.stop().await;
    let died = Instant::now();
    eventually(|| h.one().unwrap().1.cuts == 1).await;
    // At most a pause and a suspicion.
    assert!(Instant::now().saturating_duration_since(died) < Duration::from_secs(1));
    assert_eq!(h.status().state, EngineState::Down);
    sleep(Duration::from_millis(300)).await;
    assert_eq!(h.one().unwrap().1.cuts, 1, "once");
    let http = FakeHttp::start_at(port).await;
    healthy_at(&http, "2000.0");
    let (after, note) = h.ready().await;
    assert_ne!(before, after);
    assert_eq!((after.incarnation.as_str(), note.cuts), ("2000.0", 0));
    assert_eq!(h.status().cuts, 1);
}

#[tokio::test]
async fn a_hanging_scrape_does_not_hide_a_death() {
    let http = healthy().await;
    let mut params = params(&http);
    params.times.answer = Duration::from_secs(60);
    let h = Harness::watch(params);
    h.ready().await;
    http.reply("/health", Reply::Hang);
    let asked = http.asked("/health");
    eventually(|| http.asked("/health") > asked).await;
    // The connection that hangs is not broken by the death.
    http.refuse();
    eventually(|| h.one().unwrap().1.cuts == 1).await;
    assert_eq!(http.open(), 1, "still hanging");
}

#[tokio::test]
async fn one_refusal_is_enough_once_the_event_socket_is_lost() {
    let http = healthy().await;
    let engine = FakeEngine::start().await;
    announce(&http, &engine);
    let mut params = params(&http);
    // So slowly that only the event socket can bring the news.
    params.times.interval = Duration::from_secs(30);
    let h = Harness::watch(params);
    eventually(|| h.one().is_some_and(|(_, note)| note.ready && note.live)).await;
    http.stop().await;
    sleep(Duration::from_millis(200)).await;
    assert_eq!(h.one().unwrap().1.cuts, 0);
    engine.stop().await;
    let lost = Instant::now();
    eventually(|| h.one().unwrap().1.cuts == 1).await;
    assert!(Instant::now().saturating_duration_since(lost) < Duration::from_secs(2));
}

#[tokio::test]
async fn a_lost_event_socket_alone_cuts_nothing() {
    let http = healthy().await;
    let engine = FakeEngine::start().await;
    announce(&http, &engine);
    let h = Harness::watch(params(&http));
    eventually(|| h.one().is_some_and(|(_, note)| note.ready && note.live)).await;
    engine.stop().await;
    eventually(|| !h.one().unwrap().1.live).await;
    sleep(Duration::from_millis(500)).await;
    let note = h.one().unwrap().1;
    assert!(note.ready && note.cuts == 0, "{note:?}");
    assert_eq!(h.status().events[0].state, EventsState::Connecting);
}

#[tokio::test]
async fn a_restart_between_two_probes_is_another_process() {
    let http = healthy().await;
    let h = Harness::watch(params(&http));
    let (before, _) = h.ready().await;
    http.ok("/metrics", metrics("2000.5", 0));
    eventually(|| h.one().is_some_and(|(id, note)| id != before && note.ready)).await;
    assert_eq!(h.one().unwrap().0.incarnation.as_str(), "2000.5");
    assert_eq!(h.status().incarnation.as_ref(), "2000.5");
}

#[tokio::test]
async fn without_a_start_time_a_death_still_makes_another_process() {
    let http = healthy().await;
    http.reply("/metrics", Reply::Status(404, vec![]));
    let (params, port) = (params(&http), http.port);
    let h = Harness::watch(params);
    let (before, _) = h.ready().await;
    http.stop().await;
    eventually(|| h.one().unwrap().1.cuts == 1).await;
    let http = FakeHttp::start_at(port).await;
    http.ok("/health", "");
    let (after, _) = h.ready().await;
    assert_ne!(before, after);
}

#[tokio::test]
async fn resets_count_as_refusals() {
    let http = healthy().await;
    let h = Harness::watch(params(&http));
    h.ready().await;
    http.reply("/health", Reply::Reset);
    eventually(|| h.one().unwrap().1.cuts == 1).await;
}

#[tokio::test]
async fn a_sleeping_engine_is_left_alone() {
    let http = healthy().await;
    let h = Harness::watch(params(&http));
    h.ready().await;
    let asleep =
        metrics("1000.5", 0) + "vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 0.0\n";
    http.ok("/metrics", asleep);
    eventually(|| !h.is_ready()).await;
    assert_eq!(h.one().unwrap().1.clears, 1);
    assert_eq!(h.status().state, EngineState::Asleep);
    http.ok("/metrics", metrics("1000.5", 0));
    h.ready().await;
    assert_eq!(h.one().unwrap().1.clears, 1);
}

#[tokio::test]
async fn adapters_that_come_later_are_seen() {
    let http = healthy().await;
    let h = Harness::watch(params(&http));
    h.ready().await;
    http.ok(
        "/v1/models",
        r#"{"data":[{"id":"tiny"},{"id":"ad2","parent":"tiny"}]}"#,
    );
    eventually(|| h.status().models.iter().any(|model| &*model.id == "ad2")).await;
}

#[tokio::test]
async fn a_thousand_watchers_come_and_go_without_a_trace() {
    let http = healthy().await;
    let engine = FakeEngine::start().await;
    announce(&http, &engine);
    let descriptors = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    let tasks = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    sleep(Duration::from_millis(50)).await;
    let before = (tasks(), http.open(), descriptors());
    for round in 0..1000 {
        let h = Harness::watch(params(&http));
        // Some are left while they connect, some when they are complete.
        if round % 10 == 0 {
            eventually(|| h.one().is_some_and(|(_, note)| note.ready && note.live)).await;
        } else {
            sleep(Duration::from_micros(round * 3)).await;
        }
        assert!(h.leave().await.0.lock().is_empty());
    }
    // Other tests run in this process: only what is ours is exact.
    eventually(|| tasks() <= before.0 + 2 && http.open() == before.1).await;
    eventually(|| descriptors() < before.2 + 100).await;
}

#[tokio::test]
async fn an_engine_serves_in_a_real_pool() {
    use crate::{chain::KeySpace, policy::PolicySpec, pool::PoolParams};
    let http = healthy().await;
    let mut engine = FakeEngine::start().await;
    announce(&http, &engine);
    engine.lose(0, 1.0, &[stored(1, None)]);
    let pool = Pool::new(PoolParams {
        model: "tiny".into(),
        keys: KeySpace::new(7),
        policy: PolicySpec::default(),
        seed: 1,
        index_bytes: 1 << 20,
    });
    let (watched, task) = watch(params(&http), pool.clone());
    let task = tokio::spawn(async move { match task.await {} });
    let seen = || {
        pool.endpoints()
            .first()
            .map(|endpoint| endpoint.status(Instant::now()))
    };
    eventually(|| seen().is_some_and(|s| s.ready && s.events_live && s.seq == Some(0))).await;
    sleep(Duration::from_millis(50)).await;
    engine.publish(1, 2.0, &[stored(2, Some(1))]).await;
    eventually(|| seen().is_some_and(|s| s.seq == Some(1) && s.report_age.is_some())).await;
    assert_eq!(seen().unwrap().incarnation, "1000.5");
    assert_eq!(watched.status(Instant::now()).events[0].last_seq, Some(1));
    task.abort();
    let _ = task.await;
    assert!(pool.endpoints().is_empty());
}
