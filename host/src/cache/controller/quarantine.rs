//! Pages in the hands of calls that are late.

use parking_lot::Mutex;

use crate::cache::pool::Holders;

/// Pages that late calls of one backend hold: of a host pool, or of the device.
#[derive(Debug, Default)]
pub(super) struct Quarantine(Mutex<Pages>);

#[derive(Debug, Default)]
struct Pages {
    /// Pages that calls still hold, once a call.
    held: Vec<u32>,
    /// Pages of calls that returned before their lateness was taken note of.
    early: Vec<u32>,
}

impl Quarantine {
    /// Takes note that a late call still holds `pages`. It is one of their holders in the pool.
    pub fn hold(&self, pages: &[u32], pool: &dyn Holders) {
        let mut known = self.0.lock();
        for &page in pages {
            match known.early.iter().position(|&early| early == page) {
                Some(at) => {
                    known.early.swap_remove(at);
                    pool.let_go(&[page]);
                }
                None => known.held.push(page),
            }
        }
    }

    /// Gives back the pages of late calls that have returned, which `reclaim` tells. Says how many are still held.
    pub fn collect(&self, pool: &dyn Holders, reclaim: impl FnOnce() -> Vec<u32>) -> usize {
        let mut known = self.0.lock();
        if known.held.is_empty() {
            return 0;
        }
        for page in reclaim() {
            match known.held.iter().position(|&held| held == page) {
                Some(at) => {
                    known.held.swap_remove(at);
                    pool.let_go(&[page]);
                }
                None => known.early.push(page),
            }
        }
        known.held.len()
    }

    /// Pages that calls still hold, once a call.
    pub fn held(&self) -> Vec<u32> {
        self.0.lock().held.clone()
    }

    /// Whether no call holds a page.
    pub fn is_empty(&self) -> bool {
        self.0.lock().held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use kvdock_kernels::{KvDtype, KvSpec};

    use super::*;
    use crate::cache::layout::HostLayout;
    use crate::cache::pool::{HostPool, HostShape};
    use crate::plugin::backend::PoolGroup;

    /// Calls return when they like: also between being given up and being taken note of.
    #[test]
    fn i31296_pages_come_back_once_whatever_the_order() {
        let spec = KvSpec {
            layers: 1,
            kv_heads: 1,
            head_dim_k: 8,
            head_dim_v: 8,
            page_tokens: 4,
            pages: 1,
            dtype: KvDtype::F16,
        };
        let host =
            HostPool::new(&HostShape::of_heads(&spec), PoolGroup::Full, 4, HostLayout::PageFirst, &[[0; 32]]).unwrap();
        let pages = host.alloc(3).unwrap();
        let quarantine = Quarantine::default();
        quarantine.hold(&pages[..2], &host);
        assert_eq!(quarantine.collect(&host, || vec![pages[1], pages[2]]), 1, "one is still held");
        assert_eq!(host.free_count(), 2, "the page nobody is known to hold yet is not free");
        quarantine.hold(&pages[2..], &host);
        assert_eq!((host.free_count(), quarantine.held()), (3, vec![pages[0]]));
        assert_eq!((quarantine.collect(&host, || vec![pages[0]]), host.free_count()), (0, 4));
        assert!(quarantine.is_empty());
    }
}
