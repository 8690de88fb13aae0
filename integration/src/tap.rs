//! What an engine really announced, recorded by `kv_tap.py` beside the code under test, and a relay between engine and
//! gateway that drops, delays and truncates batches.

use crate::{
    engine::Engine,
    paths::Paths,
    process::{Process, Spec},
};
use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, json};
use std::{sync::Arc, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{ChildStdin, ChildStdout},
    sync::{Mutex as AsyncMutex, Notify},
    time::timeout,
};

const STEP_LIMIT: Duration = Duration::from_secs(15);

/// A recorder of one engine's KV events; as a relay it stands between engine and gateway.
pub struct Tap {
    shared: Arc<Shared>,
    stdin: AsyncMutex<(ChildStdin, u64)>,
    events: Option<String>,
    replay: Option<String>,
    _process: Process,
}

/// One recorded batch.
#[derive(Clone, Debug, Deserialize)]
pub struct Batch {
    /// Its sequence number.
    pub seq: u64,
    /// The engine's clock when it was published, seconds since the epoch.
    pub ts: f64,
    /// When the tap had it, seconds since the epoch.
    pub recv: f64,
    /// What it says.
    pub events: Vec<Announced>,
    /// `live` or `replay`.
    pub via: String,
    /// What the relay did: `pass`, `drop`, `truncate`, `delay`; none without a relay.
    pub fate: Option<String>,
}

/// One recorded event.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Announced {
    /// Blocks became reusable.
    Stored {
        /// Their ids.
        stored: Vec<Value>,
        /// The block before the first.
        parent: Option<Value>,
        /// All their tokens.
        tokens: Vec<u32>,
        /// Per block, what else entered its hash.
        extra: Option<Vec<Value>>,
    },
    /// One copy of each is gone.
    Removed {
        /// Their ids.
        removed: Vec<Value>,
    },
    /// All is gone.
    Cleared {
        /// Always true.
        cleared: bool,
    },
}

/// How the relay answers those who ask for a replay.
#[derive(Clone, Copy, Debug)]
pub enum Replay {
    /// As the engine does.
    Pass,
    /// Not at all.
    Refuse,
    /// It stops after so many messages.
    Stall(u32),
}

/// What has come out of the tap so far.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// The batches of the engine's present process, in order.
    pub batches: Vec<Batch>,
    /// The batches of its former processes.
    pub former: Vec<Vec<Batch>>,
    /// Subscriptions to the relay so far.
    pub subscriptions: u32,
    /// Replays asked of the relay: from which sequence number, and whether it answered.
    pub asked: Vec<(u64, bool)>,
    acknowledged: u64,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    record: Mutex<Record>,
    changed: Notify,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Ready {
        events: Option<String>,
        replay: Option<String>,
    },
    Subscribed(bool),
    Batch(Batch),
    Restart(IgnoredAny),
    Ack(u64),
    #[serde(untagged)]
    Asked {
        asked: u64,
        answered: bool,
    },
}

// === impl Tap ===

impl Tap {
    /// Records what `engine` announces; what its replay still has of earlier batches included.
    pub async fn recorder(paths: &Paths, engine: &Engine) -> Result<Self> {
        Self::start(paths, engine, false).await
    }

    /// Records and relays: the gateway is to listen to [`Tap::events`] and [`Tap::replay`].
    pub async fn relay(paths: &Paths, engine: &Engine) -> Result<Self> {
        Self::start(paths, engine, true).await
    }

    async fn start(paths: &Paths, engine: &Engine, relay: bool) -> Result<Self> {
        let ports = engine.ports();
        let log = paths.run.join(format!("tap-{}.log", engine.name()));
        let (process, stdin, stdout) = Spec::new(&paths.python, log)
            .arg(paths.root.join("integration/vllm/kv_tap.py"))
            .args(["--events", &ports.events.to_string()])
            .args(["--replay", &ports.replay.to_string()])
            .args(relay.then_some("--relay"))
            .spawn_piped()?;
        let mut lines = BufReader::new(stdout);
        let mut line = String::new();
        timeout(STEP_LIMIT, lines.read_line(&mut line))
            .await
            .context("the tap does not start")??;
        let Line::Ready { events, replay } = serde_json::from_str(&line)
            .with_context(|| format!("the tap says {line:?}:\n{}", process.tail(10)))?
        else {
            anyhow::bail!("the tap says {line:?}");
        };
        let shared = Arc::<Shared>::default();
        tokio::spawn(read(lines, shared.clone()));
        Ok(Self {
            shared,
            stdin: AsyncMutex::new((stdin, 0)),
            events,
            replay,
            _process: process,
        })
    }

    /// The address of the relay's events.
    pub fn events(&self) -> Option<&str> {
        self.events.as_deref()
    }

    /// The address of the relay's replay.
    pub fn replay(&self) -> Option<&str> {
        self.replay.as_deref()
    }

    /// All that was recorded so far.
    pub fn record(&self) -> Record {
        self.shared.record.lock().clone()
    }

    /// Looks at the record without copying it.
    pub fn with<R>(&self, look: impl FnOnce(&Record) -> R) -> R {
        look(&self.shared.record.lock())
    }

    /// The number of the last batch; none before the first.
    pub fn last_seq(&self) -> Option<u64> {
        self.with(|r| r.batches.last().map(|b| b.seq))
    }

    /// Waits until the record is as wanted.
    pub async fn until(&self, what: &str, mut wanted: impl FnMut(&Record) -> bool) -> Result<()> {
        timeout(STEP_LIMIT, async {
            loop {
                let changed = self.shared.changed.notified();
                {
                    let record = self.shared.record.lock();
                    if wanted(&record) {
                        return Ok(());
                    }
                    ensure!(!record.ended, "the tap ended");
                }
                changed.await;
            }
        })
        .await
        .with_context(|| format!("waited in vain for the tap: {what}"))?
    }

    /// Waits until nothing has been announced for `quiet`.
    pub async fn settle(&self, quiet: Duration) {
        while timeout(quiet, self.shared.changed.notified()).await.is_ok() {}
    }

    /// Drops the next `count` batches; 0: lets all pass again.
    pub async fn drop_next(&self, count: u32) -> Result<()> {
        self.command(json!({"next": "drop", "count": count})).await
    }

    /// Cuts the next `count` batches in half.
    pub async fn truncate_next(&self, count: u32) -> Result<()> {
        self.command(json!({"next": "truncate", "count": count}))
            .await
    }

    /// From now on every batch leaves this much later.
    pub async fn delay(&self, by: Duration) -> Result<()> {
        self.command(json!({"delay": by.as_secs_f64()})).await
    }

    /// How to answer those who ask for a replay.
    pub async fn answer_replay(&self, how: Replay) -> Result<()> {
        self.command(match how {
            Replay::Pass => json!({"replay": "pass"}),
            Replay::Refuse => json!({"replay": "refuse"}),
            Replay::Stall(after) => json!({"replay": "stall", "after": after}),
        })
        .await
    }

    async fn command(&self, mut command: Value) -> Result<()> {
        let mut stdin = self.stdin.lock().await;
        stdin.1 += 1;
        let id = stdin.1;
        command["id"] = id.into();
        stdin.0.write_all(format!("{command}\n").as_bytes()).await?;
        stdin.0.flush().await?;
        self.until("a command", |r| r.acknowledged >= id).await
    }
}

// === impl Record ===

impl Record {
    /// How many batches were recorded, those of former processes included.
    pub fn all(&self) -> usize {
        self.batches.len() + self.former.iter().map(Vec::len).sum::<usize>()
    }
}

async fn read(lines: BufReader<ChildStdout>, shared: Arc<Shared>) {
    let mut lines = lines.lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let mut record = shared.record.lock();
        match serde_json::from_str(&line) {
            Ok(Line::Batch(batch)) => record.batches.push(batch),
            Ok(Line::Restart(_)) => {
                let former = std::mem::take(&mut record.batches);
                record.former.push(former);
            }
            Ok(Line::Subscribed(true)) => record.subscriptions += 1,
            Ok(Line::Asked { asked, answered }) => record.asked.push((asked, answered)),
            Ok(Line::Ack(id)) => record.acknowledged = id,
            Ok(Line::Subscribed(false) | Line::Ready { .. }) => {}
            Err(_) => break,
        }
        drop(record);
        shared.changed.notify_waiters();
    }
    shared.record.lock().ended = true;
    shared.changed.notify_waiters();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_tap_are_read() {
        let line = r#"{"batch": {"seq": 1, "ts": 2.0, "recv": 2.5, "events": [{"stored": [7], "parent": null, "tokens": [1], "extra": null}, {"removed": [7]}, {"cleared": true}], "via": "live", "fate": null}}"#;
        let Ok(Line::Batch(batch)) = serde_json::from_str(line) else {
            panic!("a batch");
        };
        assert!(matches!(
            batch.events[..],
            [
                Announced::Stored { .. },
                Announced::Removed { .. },
                Announced::Cleared { .. }
            ]
        ));
        assert!(matches!(
            serde_json::from_str(r#"{"asked": 3, "answered": true}"#),
            Ok(Line::Asked {
                asked: 3,
                answered: true
            })
        ));
        assert!(matches!(
            serde_json::from_str(r#"{"ready": {"events": null, "replay": null}}"#),
            Ok(Line::Ready { .. })
        ));
    }
}
