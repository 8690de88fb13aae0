//! Tasks that the process cannot do without. If one ends, the process ends: a proxy that looks healthy and no longer
//! watches its engines is worse than one that is restarted.

use futures::FutureExt;
use std::panic::AssertUnwindSafe;
use tokio::{runtime::Handle, sync::mpsc, task::JoinHandle};

/// Starts essential tasks. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Essentials(mpsc::Sender<Died>);

/// An essential task that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the task `{task}` ended, and nothing works without it; this is a defect, please report it"
)]
pub struct Died {
    /// What it was for.
    pub task: &'static str,
}

/// A starter of essential tasks, and where their ends are told.
pub(super) fn essentials() -> (Essentials, mpsc::Receiver<Died>) {
    // One end is enough to end the process.
    let (tx, rx) = mpsc::channel(1);
    (Essentials(tx), rx)
}

// === impl Essentials ===

impl Essentials {
    /// Starts a task that must not end, unless it is aborted.
    pub(super) fn spawn<F>(&self, runtime: &Handle, task: &'static str, future: F) -> JoinHandle<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let died = self.0.clone();
        runtime.spawn(async move {
            // Nothing of the future is looked at after a panic.
            let _ = AssertUnwindSafe(future).catch_unwind().await;
            let _ = died.try_send(Died { task });
        })
    }

    /// Starts a task that may end, but not by a panic.
    pub(super) fn spawn_finite<F>(
        &self,
        runtime: &Handle,
        task: &'static str,
        future: F,
    ) -> JoinHandle<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let died = self.0.clone();
        runtime.spawn(async move {
            if AssertUnwindSafe(future).catch_unwind().await.is_err() {
                let _ = died.try_send(Died { task });
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ends_and_panics_are_told_aborts_are_not() {
        let runtime = Handle::current();
        let (essentials, mut died) = essentials();
        essentials
            .spawn_finite(&runtime, "finite", async {})
            .await
            .unwrap();
        let aborted = essentials.spawn(&runtime, "aborted", std::future::pending());
        aborted.abort();
        assert!(aborted.await.unwrap_err().is_cancelled());
        assert!(died.try_recv().is_err());

        essentials.spawn(&runtime, "ended", async {}).await.unwrap();
        assert_eq!(died.recv().await, Some(Died { task: "ended" }));
        essentials
            .spawn_finite(&runtime, "panicked", async { panic!("on purpose") })
            .await
            .unwrap();
        assert_eq!(died.recv().await, Some(Died { task: "panicked" }));
    }
}
