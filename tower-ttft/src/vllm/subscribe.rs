//! Follows the KV events of one engine: every batch once, in order, or an honest "not known".
//!
//! A SUB connection brings batches as they are published. Whatever may have been missed (by joining late, by a
//! reconnect, by a gap in the sequence) is asked for from the engine's replay socket, which keeps its last batches, and
//! is applied first. Meanwhile the SUB connection is not read: the batches that arrive wait in the engine's own send
//! queue, which is bounded, and an overflow of it is one more gap. If a replay does not reach, what was known is
//! forgotten and the stream goes on from where it is.

use super::{
    decode::{self, Decoded},
    frames::{self, Numbered, Replayed},
    progress::{Applied, Live, Progress, Replay},
    source::TcpAddress,
    status::{EventsState, EventsStatus},
    zmtp::{Limits, Socket, SocketType, ZmtpError},
};
use crate::events::{EventBatch, KvEvent};
use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{convert::Infallible, ops::ControlFlow, sync::Arc, time::Duration};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout_at},
};

/// Where batches go.
pub(crate) trait Sink: Send + Sync + 'static {
    /// Takes the next batch.
    fn apply(&self, batch: &EventBatch);
    /// Forgets what the endpoint holds.
    fn clear(&self);
    /// Says whether what is known is up to date.
    fn set_events_live(&self, live: bool);
}

/// Parameters of a subscription.
#[derive(Clone, Debug)]
pub(crate) struct SubscribeParams {
    /// The engine's PUB socket.
    pub(crate) live: TcpAddress,
    /// Its ROUTER socket for replays, if it has one.
    pub(crate) replay: Option<TcpAddress>,
    /// The rank that batches must be of.
    pub(crate) rank: Option<u32>,
    /// A seed for the jitter between attempts.
    pub(crate) seed: u64,
    pub(crate) times: Times,
    pub(crate) limits: Limits,
}

/// How patient a subscription is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// Before the first attempt to reconnect; doubles.
    pub(crate) backoff: Duration,
    /// Between attempts to reconnect, at most.
    pub(crate) max_backoff: Duration,
    /// A replay without a message for this long has stalled.
    pub(crate) replay_idle: Duration,
    /// A replay may take this long in all.
    pub(crate) replay: Duration,
}

/// A subscription that runs until it is dropped.
pub(crate) struct Subscription<S> {
    params: SubscribeParams,
    sink: S,
    shared: Arc<Shared>,
    progress: Progress,
    rng: StdRng,
}

/// What others may see of a subscription.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) status: Mutex<EventsStatus>,
    /// Told when the connection is lost.
    pub(crate) lost: Notify,
}

/// How a replay ended.
#[derive(Debug)]
enum Drained {
    /// With the end marker.
    End,
    /// The engine is another process than the one whose batches are known.
    Restart,
    /// Batches are missing in it; what came before them is applied.
    Hole,
    /// It failed on the way; what came is applied.
    Failed(String),
}

/// How often a replay is asked for before it counts as lost.
const ATTEMPTS: u32 = 3;
/// Between attempts.
const PAUSE: Duration = Duration::from_millis(50);

// === impl Times ===

impl Default for Times {
    fn default() -> Self {
        Self {
            backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(5),
            replay_idle: Duration::from_secs(2),
            replay: Duration::from_secs(30),
        }
    }
}

// === impl Subscription ===

impl<S: Sink> Subscription<S> {
    pub(crate) fn new(params: SubscribeParams, sink: S, shared: Arc<Shared>) -> Self {
        {
            let mut status = shared.status.lock();
            status.rank = params.rank;
            status.source = Some(params.live.to_string());
            status.replay = params.replay.as_ref().map(ToString::to_string);
            status.state = EventsState::Connecting;
        }
        let rng = StdRng::seed_from_u64(params.seed);
        Self {
            params,
            sink,
            shared,
            progress: Progress::default(),
            rng,
        }
    }

    /// Runs for ever; dropping the future closes every connection.
    pub(crate) async fn run(mut self) -> Infallible {
        let mut backoff = self.params.times.backoff;
        loop {
            let mut joined = false;
            let error = match self.session(&mut joined).await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            {
                let mut status = self.shared.status.lock();
                status.state = EventsState::Connecting;
                status.why = Some(error.to_string());
            }
            if joined {
                backoff = self.params.times.backoff;
                self.sink.set_events_live(false);
                self.shared.lost.notify_one();
            }
            tracing::debug!(source = %self.params.live, %error, "KV events: no connection");
            // Half of it fixed, half of it random, so that the listeners of a restarted engine do not come all at once.
            sleep(backoff.mul_f64(0.5 + 0.5 * self.rng.random::<f64>())).await;
            backoff = (backoff * 2).min(self.params.times.max_backoff);
        }
    }

    /// One connection: `joined` tells whether it ever stood.
    async fn session(&mut self, joined: &mut bool) -> Result<Infallible, ZmtpError> {
        let mut socket = self.connect(&self.params.live, SocketType::Sub).await?;
        socket.subscribe_all().await?;
        *joined = true;
        self.progress.connected();
        self.shared.status.lock().counts.connects += 1;
        // The subscription was sent before the request, so that what is published after the replay is heard.
        let knew = self.progress.last().is_some();
        if !self.catch_up().await && knew {
            // Nothing says what was missed, nor that this is still the same process.
            self.lose("reconnected without a replay");
        }
        self.live();
        loop {
            let message = socket.recv().await?;
            match frames::live(&message) {
                Ok(message) => self.on_live(message).await,
                Err(error) => {
                    let mut status = self.shared.status.lock();
                    status.counts.garbage += 1;
                    status.why = Some(error.to_string());
                }
            }
            // A long queue of messages must not keep the thread for itself.
            tokio::task::coop::consume_budget().await;
        }
    }

    async fn connect(&self, to: &TcpAddress, kind: SocketType) -> Result<Socket, ZmtpError> {
        Socket::connect((&to.host, to.port), kind, self.params.limits).await
    }

    fn live(&mut self) {
        self.sink.set_events_live(true);
        self.shared.status.lock().state = EventsState::Live;
    }

    async fn on_live(&mut self, message: Numbered) {
        let Some(batch) = self.decode(&message) else {
            // The replay has it whole.
            self.fill_gap(message.seq, None).await;
            return;
        };
        match self.progress.live(batch.seq, batch.ts) {
            Live::Apply => self.apply(&batch),
            Live::Drop => self.shared.status.lock().counts.duplicates += 1,
            Live::Gap => self.fill_gap(batch.seq, Some(batch)).await,
            Live::Restart => {
                self.restart();
                self.fill_gap(batch.seq, Some(batch)).await;
            }
        }
    }

    /// Brings what is missing before a live message, then the message.
    async fn fill_gap(&mut self, seq: u64, batch: Option<EventBatch>) {
        if seq != self.progress.next() {
            self.shared.status.lock().counts.gaps += 1;
        }
        self.catch_up().await;
        let next = self.progress.next();
        if seq >= next {
            match batch {
                Some(batch) => {
                    if seq > next {
                        self.lose("batches are missing and no replay has them");
                    }
                    self.apply(&batch);
                }
                None => {
                    self.lose("a batch is unreadable and no replay has it");
                    // Past the unreadable one. Its time is not known, and must not look like another process's.
                    let ts = self.progress.last().map_or(0.0, |last| last.ts);
                    self.progress.applied(Applied { seq, ts });
                }
            }
        }
        self.live();
    }

    /// Asks for a replay of what was missed. False if it did not reach its end.
    async fn catch_up(&mut self) -> bool {
        let Some(replay) = self.params.replay.clone() else {
            return false;
        };
        self.shared.status.lock().state = EventsState::Replaying;
        let mut attempt = 1;
        loop {
            self.shared.status.lock().counts.replays += 1;
            match self.drain(&replay, attempt == ATTEMPTS).await {
                Drained::End => {
                    if self.progress.last().is_none() {
                        // Nothing was ever published.
                        self.shared.status.lock().complete = true;
                    }
                    return true;
                }
                Drained::Restart => self.restart(),
                Drained::Hole => {}
                Drained::Failed(why) => self.shared.status.lock().why = Some(why),
            }
            if attempt == ATTEMPTS {
                return false;
            }
            // No longer up to date, and it may take a while.
            self.sink.set_events_live(false);
            sleep(PAUSE * attempt).await;
            attempt += 1;
        }
    }

    /// Reads one replay to its end. The last attempt takes what there is, after forgetting what came before a hole.
    async fn drain(&mut self, replay: &TcpAddress, last_attempt: bool) -> Drained {
        let started = Instant::now();
        let end = started + self.params.times.replay;
        let from = self.progress.replay_from();
        let known = self.progress.last();
        let socket = async {
            let mut socket = self.connect(replay, SocketType::Dealer).await?;
            socket.send(&frames::replay_request(from)).await?;
            Ok::<_, ZmtpError>(socket)
        };
        let mut socket = match timeout_at(end, socket).await {
            Ok(Ok(socket)) => socket,
            Ok(Err(error)) => return Drained::Failed(format!("replay: {error}")),
            Err(_) => return Drained::Failed("replay: no connection in time".into()),
        };
        let mut witness = false;
        loop {
            let patience = end.min(Instant::now() + self.params.times.replay_idle);
            let message = match timeout_at(patience, socket.recv()).await {
                Ok(Ok(message)) => message,
                Ok(Err(error)) => return Drained::Failed(format!("replay: {error}")),
                Err(_) => return Drained::Failed("replay: stalled before its end".into()),
            };
            match frames::replayed(&message) {
                // An engine that has nothing as new as what is known is another process.
                Ok(Replayed::End) if known.is_some() && !witness => return Drained::Restart,
                Ok(Replayed::End) => return Drained::End,
                Ok(Replayed::Batch(message)) => {
                    witness = true;
                    if let ControlFlow::Break(end) = self.on_replayed(message, last_attempt) {
                        return end;
                    }
                }
                Err(error) => {
                    let mut status = self.shared.status.lock();
                    status.counts.garbage += 1;
                    status.why = Some(error.to_string());
                }
            }
            tokio::task::coop::consume_budget().await;
        }
    }

    fn on_replayed(&mut self, message: Numbered, last_attempt: bool) -> ControlFlow<Drained> {
        let Some(batch) = self.decode(&message) else {
            if !last_attempt {
                return ControlFlow::Break(Drained::Hole);
            }
            // Left out: the next one finds a hole.
            return ControlFlow::Continue(());
        };
        match self.progress.replayed(batch.seq, batch.ts) {
            Replay::Apply => {}
            Replay::Drop => return ControlFlow::Continue(()),
            Replay::Restart => return ControlFlow::Break(Drained::Restart),
            // Batches that fell out of the engine's buffer do not come back by asking again.
            Replay::Hole if self.progress.last().is_none() => {
                self.shared.status.lock().complete = false;
            }
            Replay::Hole if last_attempt => self.lose("batches are missing and no replay has them"),
            Replay::Hole => return ControlFlow::Break(Drained::Hole),
        }
        self.shared.status.lock().counts.replayed += 1;
        self.apply(&batch);
        ControlFlow::Continue(())
    }

    fn decode(&self, message: &Numbered) -> Option<EventBatch> {
        let decoded = decode::decode(message.seq, &message.payload);
        let mut status = self.shared.status.lock();
        match decoded {
            Ok(Decoded { batch, skipped }) => {
                status.counts.skipped += u64::from(skipped);
                Some(batch)
            }
            Err(error) => {
                status.counts.malformed += 1;
                status.why = Some(error.to_string());
                None
            }
        }
    }

    fn apply(&mut self, batch: &EventBatch) {
        self.progress.applied(Applied {
            seq: batch.seq,
            ts: batch.ts,
        });
        let ours = self
            .params
            .rank
            .is_none_or(|rank| batch.rank.is_none_or(|r| r == rank));
        {
            let mut status = self.shared.status.lock();
            status.counts.batches += 1;
            status.last_seq = Some(batch.seq);
            status.last_ts = Some(batch.ts);
            if batch.seq == 0 || batch.events.contains(&KvEvent::Cleared) {
                status.complete = true;
            }
            for event in &batch.events {
                if let KvEvent::Stored(stored) = event
                    && stored.block_size > 0
                {
                    status.block_size = Some(stored.block_size);
                }
            }
            if !ours {
                status.counts.skipped += batch.events.len() as u64;
                status.why = Some("the stream is of another data-parallel rank".into());
            }
        }
        if ours {
            self.sink.apply(batch);
        }
    }

    fn restart(&mut self) {
        self.shared.status.lock().counts.restarts += 1;
        self.clear();
    }

    fn lose(&mut self, why: &str) {
        {
            let mut status = self.shared.status.lock();
            status.counts.lost += 1;
            status.why = Some(why.to_owned());
        }
        tracing::info!(source = %self.params.live, "KV events: {why}; the cache's contents are unknown");
        self.clear();
    }

    fn clear(&mut self) {
        self.progress.forget();
        self.sink.clear();
        let mut status = self.shared.status.lock();
        status.counts.clears += 1;
        status.complete = false;
        status.last_seq = None;
        status.last_ts = None;
    }
}

#[cfg(test)]
mod tests;
