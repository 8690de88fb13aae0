//! The memory bound of an index, and sums over its domains.
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Bytes in use, and how many there may be.
#[derive(Debug)]
pub(super) struct Budget {
    used: AtomicUsize,
    max: usize,
    pub(super) blocks: Sum,
    pub(super) chunks: Sum,
}

/// A sum of what several owners have.
#[derive(Debug, Default)]
pub(super) struct Sum(AtomicU64);

/// What one owner has reported of its bytes to the budget.
#[derive(Debug, Default)]
pub(super) struct Reported(usize);

/// Heap bytes of a vector.
pub(super) fn vec_bytes<T>(v: &Vec<T>) -> usize {
    v.capacity() * size_of::<T>()
}

/// Heap bytes of a standard hash map: buckets are a power of two, seven eighths of them usable, one control byte each
/// and a group of 16 behind them.
pub(super) fn map_bytes<K, V, S>(m: &std::collections::HashMap<K, V, S>) -> usize {
    match m.capacity() {
        0 => 0,
        n => (n * 8 / 7).next_power_of_two() * (size_of::<(K, V)>() + 1) + 16,
    }
}

// === impl Budget ===

impl Budget {
    pub(super) fn new(max: usize) -> Self {
        Self {
            used: AtomicUsize::new(0),
            max,
            blocks: Sum::default(),
            chunks: Sum::default(),
        }
    }

    pub(super) fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Whether that much more fits.
    pub(super) fn has(&self, more: usize) -> bool {
        self.used().saturating_add(more) <= self.max
    }
}

// === impl Sum ===

impl Sum {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// An owner who had `before` now has `now`.
    pub(super) fn update(&self, before: u64, now: u64) {
        self.0.fetch_add(now.wrapping_sub(before), Relaxed);
    }
}

// === impl Reported ===

impl Reported {
    /// Brings the budget up to what the owner takes now.
    pub(super) fn update(&mut self, budget: &Budget, now: usize) {
        if now >= self.0 {
            budget.used.fetch_add(now - self.0, Relaxed);
        } else {
            budget.used.fetch_sub(self.0 - now, Relaxed);
        }
        self.0 = now;
    }
}
