//! Checksums that a device has taken of pages, until their seals are written.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// A page, and one of the named pools.
type Place = (u32, usize);

/// Checksums by page and named pool.
#[derive(Default)]
pub(super) struct Noted {
    sums: Mutex<HashMap<Place, Box<[u32]>>>,
    /// How many there are: none, where no device takes any, so that nobody waits for the lock there.
    count: AtomicUsize,
}

impl Noted {
    pub fn put(&self, pool: usize, page: u32, sums: &[u32]) {
        let mut all = self.sums.lock();
        all.insert((page, pool), sums.into());
        self.count.store(all.len(), Ordering::Release);
    }

    pub fn take(&self, pool: usize, page: u32) -> Option<Box<[u32]>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut all = self.sums.lock();
        let taken = all.remove(&(page, pool));
        self.count.store(all.len(), Ordering::Release);
        taken
    }

    /// Forgets those of a page, which is about to hold something else.
    pub fn forget(&self, page: u32) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut all = self.sums.lock();
        all.retain(|(of, _), _| *of != page);
        self.count.store(all.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_taken_once_and_forgotten_with_their_page() {
        let noted = Noted::default();
        assert_eq!(noted.take(0, 3), None);
        noted.put(0, 3, &[1, 2]);
        noted.put(1, 3, &[5]);
        noted.put(0, 4, &[7]);
        assert_eq!(noted.take(0, 3).as_deref(), Some(&[1, 2][..]));
        assert_eq!(noted.take(0, 3), None);
        noted.forget(3);
        assert_eq!(noted.take(1, 3), None);
        assert_eq!(noted.take(0, 4).as_deref(), Some(&[7][..]));
    }
}
