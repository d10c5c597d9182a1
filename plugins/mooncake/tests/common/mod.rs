//! What the tests of the Mooncake plugin share.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

pub mod services;

use std::time::{Duration, Instant};

use kvdock_plugin_api::mock::{
    Instance, MockHost, MockPool, Options, Outcome, Part, PoolSpec, Query, identity, key, table_of,
};
use kvdock_plugin_api::v0_1::PageKey;
use kvdock_plugin_api::{PageStatus, Result};
use kvdock_plugin_mooncake::kvdock_plugin_entry;

pub use services::Calls;

/// One instance and its pool.
pub struct Bench {
    pub host: MockHost,
    pub pool: MockPool,
    pub store: Instance,
}

/// A pool of pages of K, V and a seal, so many bytes together.
pub fn pool(pages: u64, bytes: u64) -> MockPool {
    if bytes < 64 {
        return MockPool::new(PoolSpec::bytes(0, "kv", pages, &[bytes]));
    }
    let half = (bytes - 32) / 2;
    MockPool::new(PoolSpec::bytes(0, "kv", pages, &[half, bytes - 32 - half]).with_seal(32))
}

/// A pool of pages without a seal: what the plugin says of them is all that there is.
pub fn bare(pages: u64, bytes: u64) -> MockPool {
    MockPool::new(PoolSpec::bytes(0, "kv", pages, &[bytes / 2, bytes - bytes / 2]))
}

pub fn keys(numbers: &[u64]) -> Vec<PageKey> {
    numbers.iter().map(|number| key(*number)).collect()
}

pub fn try_attach(config: &str, model: &str, pools: &[&MockPool]) -> (MockHost, Result<Instance>) {
    let host = MockHost::new();
    let store = host.attach(table_of(kvdock_plugin_entry).unwrap(), config, &identity(model), pools);
    (host, store)
}

impl Bench {
    pub fn new(config: &str, pool: MockPool) -> Bench {
        Bench::of_model(config, "model", pool)
    }

    pub fn of_model(config: &str, model: &str, pool: MockPool) -> Bench {
        let (host, store) = try_attach(config, model, &[&pool]);
        Bench { host, pool, store: store.unwrap() }
    }

    pub fn part(&self, numbers: &[u64]) -> Part {
        let pages: Vec<u32> = (0..numbers.len() as u32).collect();
        Part::new(&self.pool, &keys(numbers), &pages)
    }

    /// Stores pages `numbers`, each with the pattern of its number.
    pub fn set(&self, numbers: &[u64]) -> Outcome {
        numbers.iter().enumerate().for_each(|(page, number)| self.pool.fill(page as u32, *number));
        self.store.set(&Options::default(), &[self.part(numbers)])
    }

    /// Reads pages `numbers` into wiped pages.
    pub fn get(&self, numbers: &[u64]) -> Outcome {
        (0..numbers.len()).for_each(|page| self.pool.wipe(page as u32));
        self.store.get(&Options::default(), &[self.part(numbers)])
    }

    /// Whether all pages are there and hold what was stored.
    pub fn has_all(&self, numbers: &[u64]) -> bool {
        self.which(numbers).iter().all(|there| *there)
    }

    /// Which of the pages are there; each that is must hold what was stored.
    pub fn which(&self, numbers: &[u64]) -> Vec<bool> {
        let got = self.get(numbers);
        let ok: Vec<bool> = got.statuses[0].iter().map(|status| *status == PageStatus::Ok).collect();
        for (page, there) in ok.iter().enumerate() {
            assert!(!there || self.pool.holds(page as u32, numbers[page]), "page {} has other bytes", numbers[page]);
        }
        ok
    }

    pub fn remove(&self, numbers: &[u64]) -> Outcome {
        self.store.remove(&Options::default(), &[self.part(numbers)])
    }

    /// The longest prefix of the pages that the store says it has.
    pub fn prefix(&self, numbers: &[u64]) -> usize {
        self.store.exists(&Options::default(), &keys(numbers), &[Query::of(&self.pool)]).unwrap().longest()
    }

    pub fn logs(&self) -> String {
        self.host.logs().iter().map(|line| format!("{}: {}\n", line.target, line.message)).collect()
    }
}

/// Waits until something holds; fails with `what` when it does not come.
pub fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "did not come: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
