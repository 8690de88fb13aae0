use super::*;
use crate::vllm::{
    status::EventCounts,
    testing::{FakeEngine, Shape, stored},
};
use std::{collections::HashMap, future::Future};
use tokio::{task::JoinHandle, time::timeout};

/// A literal model of what an endpoint holds, and a diary.
#[derive(Clone, Default)]
struct Model(Arc<Mutex<Held>>);

#[derive(Default)]
struct Held {
    copies: HashMap<u64, u32>,
    seqs: Vec<u64>,
    clears: u32,
    live: bool,
}

impl Sink for Model {
    fn apply(&self, batch: &EventBatch) {
        let mut held = self.0.lock();
        held.seqs.push(batch.seq);
        for event in &batch.events {
            match event {
                KvEvent::Stored(s) => s
                    .hashes
                    .iter()
                    .for_each(|h| *held.copies.entry(*h).or_default() += 1),
                KvEvent::Removed(r) => r.hashes.iter().for_each(|h| {
                    held.copies.remove(h);
                }),
                KvEvent::Cleared => held.copies.clear(),
            }
        }
    }

    fn clear(&self) {
        let mut held = self.0.lock();
        held.copies.clear();
        held.seqs.clear();
        held.clears += 1;
    }

    fn set_events_live(&self, live: bool) {
        self.0.lock().live = live;
    }
}

struct Harness {
    engine: FakeEngine,
    model: Model,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Harness {
    async fn new(prepare: impl FnOnce(&FakeEngine)) -> Self {
        Self::with_replay(true, prepare).await
    }

    async fn with_replay(replay: bool, prepare: impl FnOnce(&FakeEngine)) -> Self {
        let engine = FakeEngine::start().await;
        prepare(&engine);
        let model = Model::default();
        let shared = Arc::new(Shared::default());
        let params = SubscribeParams {
            live: engine.live.clone(),
            replay: replay.then(|| engine.replay.clone()),
            rank: None,
            seed: 1,
            times: Times {
                backoff: Duration::from_millis(10),
                max_backoff: Duration::from_millis(50),
                replay_idle: Duration::from_millis(200),
                replay: Duration::from_secs(2),
            },
            limits: Limits::default(),
        };
        let subscription = Subscription::new(params, model.clone(), shared.clone());
        let task = tokio::spawn(async move { match subscription.run().await {} });
        let harness = Self {
            engine,
            model,
            shared,
            task,
        };
        harness.live().await;
        harness
    }

    /// Until the stream is live and the publisher knows of the subscription.
    async fn live(&self) {
        eventually(|| self.status().state == EventsState::Live && self.model.0.lock().live).await;
        sleep(Duration::from_millis(50)).await;
    }

    /// One block per batch, its hash and time told by the sequence.
    async fn publish(&mut self, seqs: impl IntoIterator<Item = u64>) {
        for seq in seqs {
            self.engine.publish(seq, at(seq), &[block(seq)]).await;
        }
    }

    async fn applied(&self, expected: &[u64]) {
        eventually(|| self.model.0.lock().seqs == expected).await;
    }

    fn status(&self) -> EventsStatus {
        self.shared.status.lock().clone()
    }

    fn counts(&self) -> EventCounts {
        self.status().counts
    }

    fn clears(&self) -> u32 {
        self.model.0.lock().clears
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn block(seq: u64) -> KvEvent {
    stored(1000 + seq, seq.checked_sub(1).map(|p| 1000 + p))
}

fn at(seq: u64) -> f64 {
    1000.0 + seq as f64
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

fn seqs(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

#[tokio::test]
async fn follows_a_stream_from_its_beginning() {
    let mut h = Harness::new(|_| {}).await;
    assert!(
        h.status().complete,
        "nothing was published yet, and that is known"
    );
    h.publish(0..5).await;
    h.applied(&seqs(0..5)).await;
    let status = h.status();
    assert!(status.complete);
    assert_eq!((status.last_seq, status.last_ts), (Some(4), Some(at(4))));
    assert_eq!(status.block_size, Some(4));
    assert_eq!((status.counts.gaps, h.clears()), (0, 0));
    assert_eq!(h.engine.asked(), [0]);
}

#[tokio::test]
async fn joins_late_and_reads_either_shape_of_replay_and_junk() {
    for shape in [Shape::Three, Shape::Four, Shape::NoDelimiter] {
        let mut h = Harness::new(|engine| {
            for seq in 0..2000 {
                engine.lose(seq, at(seq), &[block(seq)]);
            }
            engine.set(|fake| {
                fake.shape = shape;
                fake.garbage = true;
            });
        })
        .await;
        h.applied(&seqs(0..2000)).await;
        assert!(h.status().complete);
        h.publish(2000..2003).await;
        h.applied(&seqs(0..2003)).await;
        assert_eq!(
            (h.counts().garbage, h.counts().replayed, h.clears()),
            (2, 2000, 0),
            "{shape:?}"
        );
    }
}

#[tokio::test]
async fn a_replay_that_starts_late_is_partial_until_the_cache_is_cleared() {
    let mut h = Harness::new(|engine| {
        for seq in 7..10 {
            engine.lose(seq, at(seq), &[block(seq)]);
        }
    })
    .await;
    h.applied(&seqs(7..10)).await;
    assert!(!h.status().complete);
    assert_eq!(h.clears(), 0, "nothing was known that could be wrong");
    h.engine
        .publish(10, at(10), &[KvEvent::Cleared, block(10)])
        .await;
    h.applied(&seqs(7..11)).await;
    assert!(h.status().complete);
    assert_eq!(h.model.0.lock().copies, HashMap::from([(1010, 1)]));
}

#[tokio::test]
async fn a_gap_is_replayed_before_the_batch_that_showed_it() {
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..3).await;
    for seq in 3..6 {
        h.engine.lose(seq, at(seq), &[block(seq)]);
    }
    h.publish(6..8).await;
    h.applied(&seqs(0..8)).await;
    let counts = h.counts();
    assert_eq!((counts.gaps, counts.lost, h.clears()), (1, 0, 0));
    // From the last known batch, as a witness.
    assert_eq!(h.engine.asked(), [0, 2]);
    assert!(h.status().complete);
    assert!(
        h.model.0.lock().copies.values().all(|n| *n == 1),
        "each batch once"
    );
}

#[tokio::test]
async fn a_replay_that_overlaps_the_live_stream_counts_nothing_twice() {
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..3).await;
    h.applied(&seqs(0..3)).await;
    h.engine.lose(3, at(3), &[block(3)]);
    // These come by the replay for the gap and then again live.
    h.publish(4..40).await;
    h.applied(&seqs(0..40)).await;
    eventually(|| h.counts().duplicates > 0 || h.counts().batches == 40).await;
    assert!(h.model.0.lock().copies.values().all(|n| *n == 1));
    assert_eq!((h.counts().restarts, h.clears()), (0, 0));
}

#[tokio::test]
async fn a_stalled_replay_is_asked_for_again_from_where_it_stopped() {
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..2).await;
    h.applied(&seqs(0..2)).await;
    for seq in 2..100 {
        h.engine.lose(seq, at(seq), &[block(seq)]);
    }
    h.engine.set(|fake| fake.stall_after = Some(50));
    h.publish(100..102).await;
    h.applied(&seqs(0..102)).await;
    assert_eq!(h.engine.asked(), [0, 1, 50]);
    assert!(h.model.0.lock().copies.values().all(|n| *n == 1));
    assert_eq!((h.counts().lost, h.clears()), (0, 0));
    h.live().await;
}

#[tokio::test]
async fn a_replay_with_a_hole_is_asked_for_again() {
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..2).await;
    h.applied(&seqs(0..2)).await;
    for seq in 2..9 {
        h.engine.lose(seq, at(seq), &[block(seq)]);
    }
    h.engine.set(|fake| fake.omit_once.extend([5]));
    h.publish(9..10).await;
    h.applied(&seqs(0..10)).await;
    assert_eq!(h.engine.asked(), [0, 1, 4]);
    assert_eq!(h.clears(), 0);
}

#[tokio::test]
async fn what_no_replay_has_is_lost_and_the_stream_goes_on() {
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..3).await;
    h.applied(&seqs(0..3)).await;
    h.engine.lose(3, at(3), &[block(3)]);
    h.engine.lose(4, at(4), &[block(4)]);
    h.engine.set(|fake| fake.omit.extend([3]));
    h.publish(5..7).await;
    // Everything before the hole is forgotten.
    h.applied(&seqs(4..7)).await;
    assert_eq!((h.counts().lost, h.clears()), (1, 1));
    assert!(!h.status().complete);
    h.live().await;
    assert_eq!(h.model.0.lock().copies.len(), 3);
}

#[tokio::test]
async fn a_mute_replay_socket_costs_time_but_not_the_stream() {
    let mut h = Harness::new(|engine| engine.set(|fake| fake.mute = true)).await;
    h.publish(0..2).await;
    h.applied(&seqs(0..2)).await;
    h.engine.lose(2, at(2), &[block(2)]);
    h.publish(3..5).await;
    h.applied(&seqs(3..5)).await;
    assert_eq!((h.counts().lost, h.clears()), (1, 1));
    assert!(h.status().why.unwrap().contains("no replay has them"));
}

#[tokio::test]
async fn without_a_replay_socket_a_gap_clears() {
    let mut h = Harness::with_replay(false, |_| {}).await;
    h.publish(0..2).await;
    h.applied(&seqs(0..2)).await;
    assert!(h.status().complete);
    h.publish(3..5).await;
    h.applied(&seqs(3..5)).await;
    assert_eq!(h.clears(), 1);
    assert!(!h.status().complete);
}

#[tokio::test]
async fn a_truncated_batch_is_fetched_again_whole() {
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..2).await;
    let whole = h.engine.lose(2, at(2), &[block(2)]);
    h.engine
        .send(&[b"kv@fake", &2u64.to_be_bytes(), &whole[..whole.len() / 2]])
        .await;
    h.applied(&seqs(0..3)).await;
    // Not even the shape of a batch: counted, and the connection stays.
    h.engine.send(&[b"one"]).await;
    h.engine.send(&[b"kv@fake", b"short", b"x"]).await;
    h.publish(3..4).await;
    h.applied(&seqs(0..4)).await;
    let counts = h.counts();
    assert_eq!(
        (
            counts.malformed,
            counts.garbage,
            counts.connects,
            h.clears()
        ),
        (1, 2, 1, 0)
    );
}

#[tokio::test]
async fn a_batch_that_is_unreadable_everywhere_clears_once() {
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..2).await;
    h.applied(&seqs(0..2)).await;
    h.engine.set(|fake| fake.buffer.push((2, b"junk".to_vec())));
    h.engine
        .send(&[b"kv@fake", &2u64.to_be_bytes(), b"junk"])
        .await;
    eventually(|| h.clears() == 1).await;
    h.publish(3..6).await;
    h.applied(&seqs(3..6)).await;
    assert_eq!((h.counts().lost, h.clears()), (1, 1));
}

#[tokio::test]
async fn a_restarted_engine_is_noticed_before_it_publishes_anything() {
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..5).await;
    h.applied(&seqs(0..5)).await;
    h.engine = h.engine_taken().await.restart().await;
    eventually(|| h.clears() == 1).await;
    h.live().await;
    assert!(h.status().complete, "an empty cache is known completely");
    assert_eq!(h.counts().restarts, 1);
    for seq in 0..3 {
        h.engine
            .publish(seq, 5000.0 + seq as f64, &[block(50 + seq)])
            .await;
    }
    h.applied(&seqs(0..3)).await;
    assert_eq!(h.model.0.lock().copies.len(), 3);
}

#[tokio::test]
async fn a_restarted_engine_that_has_overtaken_the_old_one_is_noticed_too() {
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..5).await;
    h.applied(&seqs(0..5)).await;
    let engine = h.engine_taken().await;
    let (live, replay) = (engine.live.port, engine.replay.port);
    engine.stop().await;
    eventually(|| h.status().state == EventsState::Connecting).await;
    h.engine = FakeEngine::start_at(live, replay).await;
    for seq in 0..20 {
        h.engine.lose(seq, 5000.0 + seq as f64, &[block(500 + seq)]);
    }
    h.applied(&seqs(0..20)).await;
    assert_eq!(h.clears(), 1);
    assert!(
        h.model.0.lock().copies.keys().all(|hash| *hash >= 1500),
        "nothing of the old process"
    );
}

#[tokio::test]
async fn a_reconnect_to_the_same_process_keeps_what_is_known() {
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..5).await;
    h.applied(&seqs(0..5)).await;
    let engine = h.engine_taken().await;
    let (live, replay) = (engine.live.port, engine.replay.port);
    engine.stop().await;
    eventually(|| !h.model.0.lock().live).await;
    h.engine = FakeEngine::start_at(live, replay).await;
    for seq in 0..9 {
        h.engine.lose(seq, at(seq), &[block(seq)]);
    }
    h.applied(&seqs(0..9)).await;
    assert_eq!((h.counts().restarts, h.clears()), (0, 0));
    assert!(h.status().complete);
}

#[tokio::test]
async fn a_sequence_that_goes_back_on_a_standing_connection_is_a_restart() {
    // As through a relay that hides the engine's restart.
    let mut h = Harness::new(|_| {}).await;
    h.publish(0..5).await;
    h.applied(&seqs(0..5)).await;
    h.engine.set(|fake| fake.buffer.clear());
    for seq in 0..2 {
        h.engine
            .publish(seq, 5000.0 + seq as f64, &[block(50 + seq)])
            .await;
    }
    h.applied(&seqs(0..2)).await;
    assert_eq!(
        (h.counts().restarts, h.counts().connects, h.clears()),
        (1, 1, 1)
    );
    assert!(h.status().complete);
}

#[tokio::test]
async fn a_lost_connection_is_told() {
    let mut h = Harness::new(|_| {}).await;
    let lost = h.shared.clone();
    let told = tokio::spawn(async move { lost.lost.notified().await });
    h.engine_taken().await.stop().await;
    timeout(Duration::from_secs(5), told)
        .await
        .unwrap()
        .unwrap();
    assert!(!h.model.0.lock().live);
}

#[tokio::test]
async fn a_stream_of_another_rank_is_not_believed() {
    let engine = FakeEngine::start().await;
    let model = Model::default();
    let shared = Arc::new(Shared::default());
    engine.lose(0, 1.0, &[block(0)]);
    let params = SubscribeParams {
        live: engine.live.clone(),
        replay: Some(engine.replay.clone()),
        rank: Some(3),
        seed: 1,
        times: Times::default(),
        limits: Limits::default(),
    };
    let subscription = Subscription::new(params, model.clone(), shared.clone());
    let task = tokio::spawn(async move { match subscription.run().await {} });
    eventually(|| shared.status.lock().counts.skipped == 1).await;
    assert!(model.0.lock().copies.is_empty());
    task.abort();
}

impl Harness {
    /// Takes the engine out, leaving another one that nobody listens to.
    async fn engine_taken(&mut self) -> FakeEngine {
        let idle = FakeEngine::start().await;
        std::mem::replace(&mut self.engine, idle)
    }
}
