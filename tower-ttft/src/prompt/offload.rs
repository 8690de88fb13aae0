//! Work that leaves the thread: rendering and tokenizing of long prompts.
use std::{fmt, sync::Arc};
use tokio::sync::Semaphore;

/// A piece of work.
pub type Job = Box<dyn FnOnce() + Send + 'static>;

/// All places are taken; the job was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the offload pool is full")]
pub struct Full;

/// Runs jobs somewhere.
pub trait Offload: Send + Sync + 'static {
    /// Starts a job, now or later, or drops it.
    ///
    /// # Errors
    /// [`Full`] if there is no place for it.
    fn run(&self, job: Job) -> Result<(), Full>;
}

/// Runs jobs at once on the caller's thread: for tests in virtual time and for programs without a runtime.
#[derive(Clone, Copy, Debug, Default)]
pub struct InPlace;

/// A bounded share of tokio's blocking threads.
#[derive(Clone)]
pub struct BlockingPool {
    workers: Arc<Semaphore>,
    places: Arc<Semaphore>,
}

// === impl InPlace ===

impl Offload for InPlace {
    fn run(&self, job: Job) -> Result<(), Full> {
        job();
        Ok(())
    }
}

// === impl BlockingPool ===

impl BlockingPool {
    /// At most `workers` jobs run at once (at least one) and `waiting` more wait.
    pub fn new(workers: usize, waiting: usize) -> Self {
        let workers = workers.max(1);
        let places = workers.saturating_add(waiting).min(Semaphore::MAX_PERMITS);
        Self {
            workers: Arc::new(Semaphore::new(workers)),
            places: Arc::new(Semaphore::new(places)),
        }
    }
}

impl Offload for BlockingPool {
    /// Must be called within a tokio runtime.
    fn run(&self, job: Job) -> Result<(), Full> {
        let place = self.places.clone().try_acquire_owned().map_err(|_| Full)?;
        let workers = self.workers.clone();
        tokio::spawn(async move {
            // The semaphore is never closed.
            if let Ok(_worker) = workers.acquire().await {
                let _ = tokio::task::spawn_blocking(job).await;
            }
            drop(place);
        });
        Ok(())
    }
}

impl fmt::Debug for BlockingPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockingPool")
            .field("idle_workers", &self.workers.available_permits())
            .field("free_places", &self.places.available_permits())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::{Condvar, Mutex};
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn runs_a_bounded_number_and_drops_what_has_no_place() {
        let pool = BlockingPool::new(2, 1);
        let gate = Arc::new((Mutex::new(false), Condvar::new()));
        let (running, done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let job = || -> Job {
            let (gate, running, done) = (gate.clone(), running.clone(), done.clone());
            Box::new(move || {
                running.fetch_add(1, Ordering::SeqCst);
                let mut open = gate.0.lock();
                while !*open {
                    gate.1.wait(&mut open);
                }
                done.fetch_add(1, Ordering::SeqCst);
            })
        };
        for _ in 0..3 {
            pool.run(job()).unwrap();
        }
        assert_eq!(pool.run(job()), Err(Full));
        while running.load(Ordering::SeqCst) < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(running.load(Ordering::SeqCst), 2, "the third waits");
        *gate.0.lock() = true;
        gate.1.notify_all();
        while done.load(Ordering::SeqCst) < 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // The places come back.
        while pool.places.available_permits() < 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_job_that_panics_gives_its_place_back() {
        let pool = BlockingPool::new(1, 0);
        pool.run(Box::new(|| {
            std::panic::resume_unwind(Box::new("a bad job"))
        }))
        .unwrap();
        while pool.run(Box::new(|| ())).is_err() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
