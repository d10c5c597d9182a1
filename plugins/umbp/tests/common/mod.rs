//! What the tests of the UMBP plugin share.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

use std::path::Path;
use std::time::{Duration, Instant};

use kvdock_plugin_api::mock::{
    Instance, MockHost, MockPool, Options, Outcome, Part, PoolSpec, Query, identity, key, table_of,
};
use kvdock_plugin_api::v0_1::PageKey;
use kvdock_plugin_api::{Identity, PageStatus, Result};
use kvdock_plugin_umbp::kvdock_plugin_entry;
use serde_json::{Value, json};

/// One instance and its pool.
pub struct Bench {
    pub host: MockHost,
    pub pool: MockPool,
    pub store: Instance,
}

/// A pool of pages of K, V and a seal, so many bytes together.
pub fn pool(pages: u64, bytes: u64) -> MockPool {
    let half = (bytes - 32) / 2;
    MockPool::new(PoolSpec::bytes(0, "kv", pages, &[half, bytes - 32 - half]).with_seal(32))
}

pub fn keys(numbers: &[u64]) -> Vec<PageKey> {
    numbers.iter().map(|number| key(*number)).collect()
}

/// Settings of a store in a folder: 1 MiB of memory in pages of 4 KiB, and what `more` says.
pub fn settings(dir: &Path, more: Value) -> String {
    let mut config = json!({
        "ssd_storage_dir": dir, "dram_capacity_bytes": 1 << 20, "dram_page_size": 4096,
        "ssd_capacity_bytes": 64 << 20, "ssd_segment_size_bytes": 1 << 20,
        "ssd_durability_mode": "relaxed",
    });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    config.to_string()
}

pub fn try_attach(config: &str, who: &Identity, pools: &[&MockPool]) -> (MockHost, Result<Instance>) {
    let host = MockHost::new();
    let store = host.attach(table_of(kvdock_plugin_entry).unwrap(), config, who, pools);
    (host, store)
}

impl Bench {
    pub fn new(config: &str, pool: MockPool) -> Bench {
        Bench::of(config, &identity("model"), pool)
    }

    pub fn of(config: &str, who: &Identity, pool: MockPool) -> Bench {
        let (host, store) = try_attach(config, who, &[&pool]);
        Bench { host, pool, store: store.unwrap() }
    }

    pub fn part(&self, numbers: &[u64]) -> Part {
        let pages: Vec<u32> = (0..numbers.len() as u32).collect();
        Part::new(&self.pool, &keys(numbers), &pages)
    }

    /// Stores pages `numbers`, each with the pattern of its number.
    pub fn set(&self, numbers: &[u64]) -> Outcome {
        self.set_at(numbers, 0)
    }

    /// As `set`; so many pages of the sequence come before them.
    pub fn set_at(&self, numbers: &[u64], position: u64) -> Outcome {
        numbers.iter().enumerate().for_each(|(page, number)| self.pool.fill(page as u32, *number));
        self.store.set(&Options { position, ..Options::default() }, &[self.part(numbers)])
    }

    /// Stores pages, all of which have to be taken.
    pub fn store(&self, numbers: &[u64]) {
        for part in numbers.chunks(self.pool.spec().pages as usize) {
            let outcome = self.set(part);
            outcome.result.unwrap();
            assert!(outcome.statuses[0].iter().all(|status| *status == PageStatus::Ok), "{:?}", outcome.statuses);
        }
    }

    /// Reads pages `numbers` into wiped pages.
    pub fn get(&self, numbers: &[u64]) -> Outcome {
        (0..numbers.len()).for_each(|page| self.pool.wipe(page as u32));
        self.store.get(&Options::default(), &[self.part(numbers)])
    }

    /// Which of the pages are there; each that is must hold what was stored.
    pub fn which(&self, numbers: &[u64]) -> Vec<bool> {
        let mut all = Vec::new();
        for part in numbers.chunks(self.pool.spec().pages as usize) {
            let got = self.get(part);
            for (page, status) in got.statuses[0].iter().enumerate() {
                let there = *status == PageStatus::Ok;
                assert!(!there || self.pool.holds(page as u32, part[page]), "page {} has other bytes", part[page]);
                all.push(there);
            }
        }
        all
    }

    /// How many of the pages are there.
    pub fn count(&self, numbers: &[u64]) -> usize {
        self.which(numbers).into_iter().filter(|there| *there).count()
    }

    pub fn status(&self, number: u64) -> PageStatus {
        self.get(&[number]).statuses[0][0]
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

pub fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

/// Bytes of the segment files in a folder.
pub fn disk_bytes(dir: &Path) -> u64 {
    segments(dir).iter().map(|path| path.metadata().map_or(0, |metadata| metadata.len())).sum()
}

/// The segment files of a folder.
pub fn segments(dir: &Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "log"))
        .collect();
    found.sort();
    found
}

/// Waits until something holds; fails with `what` when it does not come.
pub fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "did not come: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
