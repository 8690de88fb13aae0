//! Many runs in virtual time on a few threads.

use crate::Error;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Does all jobs on so many threads, each within a runtime whose clock is paused; the results in the order of the jobs.
pub fn all<J: Sync, R: Send>(
    jobs: &[J],
    threads: usize,
    work: impl Fn(&J) -> R + Sync,
) -> Result<Vec<R>, Error> {
    let next = AtomicUsize::new(0);
    let worker = || -> Result<Vec<(usize, R)>, std::io::Error> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()?;
        let _entered = runtime.enter();
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            match jobs.get(i) {
                Some(job) => done.push((i, work(job))),
                None => return Ok(done),
            }
        }
    };
    let mut results: Vec<(usize, R)> = Vec::with_capacity(jobs.len());
    std::thread::scope(|scope| -> Result<(), Error> {
        let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(worker)).collect();
        for thread in threads {
            match thread.join() {
                Ok(done) => results.extend(done?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(())
    })?;
    results.sort_by_key(|(i, _)| *i);
    Ok(results.into_iter().map(|(_, r)| r).collect())
}

#[cfg(test)]
mod tests {
    #[test]
    fn results_keep_the_order_of_the_jobs() {
        let jobs: Vec<u64> = (0..100).collect();
        let squares = super::all(&jobs, 3, |j| j * j).expect("runtimes start");
        assert!(
            squares
                .iter()
                .enumerate()
                .all(|(i, s)| *s == (i * i) as u64)
        );
    }
}
