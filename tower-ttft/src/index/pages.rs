//! Arrays that grow while others read them: pages are added, never moved and never taken away.
use std::sync::OnceLock;

/// An array of pages of `N` elements behind two levels of directory.
pub(super) struct Pages<T, const N: usize> {
    top: Box<[OnceLock<Directory<T>>]>,
}

type Directory<T> = Box<[OnceLock<Box<[T]>>]>;

/// Directories, and pages in each.
const TOP: usize = 64;
const FAN: usize = 1024;

impl<T, const N: usize> Pages<T, N> {
    pub(super) fn new() -> Self {
        Self {
            top: (0..TOP).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Heap bytes of an array without pages.
    pub(super) const BASE_BYTES: usize = TOP * size_of::<OnceLock<Directory<T>>>();

    /// Heap bytes of a page.
    pub(super) const PAGE_BYTES: usize = N * size_of::<T>();

    #[inline]
    pub(super) fn get(&self, i: usize) -> Option<&T> {
        self.page(i / N)?.get(i % N)
    }

    /// `len` elements that lie in one page.
    #[inline]
    pub(super) fn slice(&self, i: usize, len: usize) -> Option<&[T]> {
        self.page(i / N)?.get(i % N..i % N + len)
    }

    #[inline]
    fn page(&self, p: usize) -> Option<&[T]> {
        Some(self.top.get(p / FAN)?.get()?.get(p % FAN)?.get()?)
    }

    /// Makes the page of an element exist. Returns the bytes that it took, or nothing if the array can grow no further.
    pub(super) fn ensure(&self, i: usize, mut make: impl FnMut() -> T) -> Option<usize> {
        let mut bytes = 0;
        let p = i / N;
        let directory = self.top.get(p / FAN)?.get_or_init(|| {
            bytes += FAN * size_of::<OnceLock<Box<[T]>>>();
            (0..FAN).map(|_| OnceLock::new()).collect()
        });
        directory.get(p % FAN)?.get_or_init(|| {
            bytes += Self::PAGE_BYTES;
            (0..N).map(|_| make()).collect()
        });
        Some(bytes)
    }
}
