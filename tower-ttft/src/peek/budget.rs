//! Memory that the bodies of all requests share.

use bytes::Bytes;
use std::{fmt, sync::Arc, time::Duration};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError},
    time,
};

/// A budget in bytes. Clones share it.
#[derive(Clone)]
pub struct Budget {
    free: Arc<Semaphore>,
    total: usize,
}

/// What one request holds of a [`Budget`]; given back on drop.
pub struct Share(Option<OwnedSemaphorePermit>);

/// A buffer and the share that pays for it.
struct Paid {
    buffer: Vec<u8>,
    _share: Share,
}

// === impl Budget ===

impl Budget {
    /// A budget of `bytes`.
    pub fn new(bytes: usize) -> Self {
        let total = bytes.min(Semaphore::MAX_PERMITS);
        Self {
            free: Arc::new(Semaphore::new(total)),
            total,
        }
    }

    /// How many bytes there are in all.
    pub fn total(&self) -> usize {
        self.total
    }

    /// How many bytes nobody holds.
    pub fn free(&self) -> usize {
        self.free.available_permits()
    }

    /// `bytes` of the budget if they are free now.
    pub fn try_share(&self, bytes: usize) -> Option<Share> {
        let n = u32::try_from(bytes).ok()?;
        match self.free.clone().try_acquire_many_owned(n) {
            Ok(permit) => Some(Share(Some(permit))),
            Err(TryAcquireError::NoPermits | TryAcquireError::Closed) => None,
        }
    }

    /// `bytes` of the budget, waited for in turn for at most `wait`. More than there are in all is not waited for.
    pub async fn share(&self, bytes: usize, wait: Duration) -> Option<Share> {
        if bytes > self.total {
            return None;
        }
        // The usual case needs no timer.
        if let Some(share) = self.try_share(bytes) {
            return Some(share);
        }
        let n = u32::try_from(bytes).ok()?;
        let acquired = time::timeout(wait, self.free.clone().acquire_many_owned(n)).await;
        Some(Share(Some(acquired.ok()?.ok()?)))
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget")
            .field("free", &self.free())
            .field("total", &self.total)
            .finish()
    }
}

// === impl Share ===

impl Share {
    /// A share of nothing.
    pub(super) fn none() -> Self {
        Self(None)
    }

    /// How many bytes it is.
    pub fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }

    /// Adds another share of the same budget.
    pub(super) fn add(&mut self, other: Share) {
        match (&mut self.0, other.0) {
            (Some(own), Some(other)) => own.merge(other),
            (own @ None, other) => *own = other,
            (Some(_), None) => {}
        }
    }

    /// Gives back what is over `bytes`.
    pub fn shrink_to(&mut self, bytes: usize) {
        let over = self.bytes().saturating_sub(bytes);
        if let Some(permit) = &mut self.0 {
            drop(permit.split(over));
        }
    }

    /// `buffer` as bytes that hold this share until the last clone or slice of them is gone.
    pub fn pay_for(mut self, mut buffer: Vec<u8>) -> Bytes {
        buffer.shrink_to_fit();
        self.shrink_to(buffer.len());
        Bytes::from_owner(Paid {
            buffer,
            _share: self,
        })
    }
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Share").field(&self.bytes()).finish()
    }
}

// === impl Paid ===

impl AsRef<[u8]> for Paid {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    #[tokio::test(start_paused = true)]
    async fn shares_come_back_with_the_last_slice() {
        let budget = Budget::new(100);
        let share = budget.try_share(60).expect("60 of 100");
        assert!(budget.try_share(41).is_none());
        let bytes = share.pay_for(vec![7; 10]);
        assert_eq!(budget.free(), 90, "what was not needed is given back");
        let slice = bytes.slice(3..4);
        drop(bytes);
        assert_eq!(budget.free(), 90);
        drop(slice);
        assert_eq!(budget.free(), 100);
    }

    #[tokio::test(start_paused = true)]
    async fn waits_in_turn_and_not_for_ever() {
        let budget = Budget::new(100);
        let start = Instant::now();
        assert!(budget.share(101, Duration::from_secs(2)).await.is_none());
        assert_eq!(
            Instant::now(),
            start,
            "more than there is is not waited for"
        );
        let held = budget.try_share(50).expect("50 of 100");
        assert!(budget.share(51, Duration::from_secs(2)).await.is_none());
        assert_eq!(Instant::now() - start, Duration::from_secs(2));
        let waiting = tokio::spawn({
            let budget = budget.clone();
            async move { budget.share(100, Duration::from_secs(2)).await }
        });
        time::sleep(Duration::from_secs(1)).await;
        drop(held);
        let got = waiting.await.expect("no panic").expect("all is free");
        assert_eq!(got.bytes(), 100);
        drop(got);
        assert_eq!(budget.free(), 100);
    }

    #[tokio::test(start_paused = true)]
    async fn shares_grow_and_shrink() {
        let budget = Budget::new(100);
        let mut share = Share::none();
        assert_eq!(share.bytes(), 0);
        share.shrink_to(0);
        share.add(budget.try_share(30).expect("free"));
        share.add(budget.try_share(30).expect("free"));
        share.add(Share::none());
        assert_eq!((share.bytes(), budget.free()), (60, 40));
        share.shrink_to(10);
        assert_eq!((share.bytes(), budget.free()), (10, 90));
        drop(share);
        assert_eq!(budget.free(), 100);
    }
}
