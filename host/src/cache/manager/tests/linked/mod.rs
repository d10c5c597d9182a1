//! Linker mode: a cache over a real device pool, and a backend in memory with the linker face. The tests are named after the cases of
//! `tests/CASES_LINKER.md`.

mod loads;
mod offloads;
mod pools;

use std::sync::atomic::Ordering;

use super::*;
use crate::cache::layout::HostLayout;
use crate::cache::linker::Gate;
use crate::cache::manager::Settled;
use crate::cache::types::{PageTables, Tiers};

/// Linker mode with so many transit pages.
fn linked(transit: u32) -> CacheConfig {
    CacheConfig { linked: true, host_layout: HostLayout::PageFirstDirect, ..config(transit) }
}

impl Rig {
    /// With a backend that has the linker face over `store`.
    fn with_linker(device_pages: usize, config: CacheConfig, store: &Store) -> (Self, Arc<FakeBackend>) {
        let rig = Rig::new(device_pages, config);
        let backend = rig.attach("fake", store, |backend| backend.linker = true);
        (rig, backend)
    }

    /// Waits for the verdict of a load that was started.
    fn settled(&mut self, id: RequestId, grant: &Grant, tokens: &[u32], pages: &mut Vec<u32>) -> Settled {
        let arriving = grant.arriving.as_ref().expect("pages that come");
        arriving.wait_verdict(Instant::now() + LONG).expect("a verdict");
        let mut tables = PageTables::from(std::mem::take(pages));
        let settled = self.cache.settle_load(id, tokens, &mut tables).unwrap().expect("it is over");
        *pages = tables.pages;
        assert_eq!(settled.tokens, arriving.start() * PAGE + settled.came);
        settled
    }

    /// Runs a request as the engine does, and checks every byte that it could have computed on. Gives its grant, and what came of its load.
    fn run_linked(&mut self, tokens: &[u32]) -> (Grant, Option<Settled>) {
        let namespace = CacheNamespace::default();
        let id = self.request(tokens, &namespace);
        self.wait_storage(id);
        let grant = self.acquire(id, tokens);
        self.cache.start_loads();
        let mut pages = grant.pages.clone();
        let settled = grant.arriving.is_some().then(|| self.settled(id, &grant, tokens, &mut pages));
        let right = settled.map_or(grant.tokens, |settled| settled.tokens);
        for (i, &page) in pages.iter().enumerate().take(right / PAGE) {
            let expected = content(&tokens[..(i + 1) * PAGE], &namespace);
            assert!(self.read(page) == expected, "page {i} of the prefix has wrong bytes");
        }
        assert_eq!(pages.len(), right / PAGE, "what did not come is out of the table");
        self.extend(&mut pages, tokens, &namespace);
        self.cache.commit(id, tokens, &mut pages, &mut []).unwrap();
        self.cache.finish(id, tokens, pages);
        (grant, settled)
    }

    /// Nothing is held: no slot but the tree's, no transit page, no lock.
    fn assert_quiet(&mut self) {
        self.settle();
        self.check();
        let stats = self.cache.stats();
        assert_eq!(stats.transit_used_tokens, 0, "transit pages are held");
        assert_eq!(stats.misuses, 0);
        self.cache.flush(Tiers::ALL);
        self.check();
        let stats = self.cache.stats();
        assert_eq!(stats.device_used_tokens, 0, "device pages are held");
    }
}

/// A store that holds the pages of `prompt`.
fn stored(prompt: &[u32]) -> Store {
    let store = Store::default();
    let (mut rig, _) = Rig::with_linker(64, linked(32), &store);
    rig.run_linked(prompt);
    rig.settle();
    assert_eq!(store.lock().len(), prompt.len() / PAGE);
    store
}
