//! What the tests of the file plugin share.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvdock_plugin_api::mock::{
    Instance, MockHost, MockPool, Options, Outcome, Part, PoolSpec, Query, identity, key, table_of,
};
use kvdock_plugin_api::v0_1::PageKey;
use kvdock_plugin_api::{Identity, Result};
use kvdock_plugin_file::kvdock_plugin_entry;

/// Bytes of a page that has a file of its own.
pub const LARGE: u64 = 256 << 10;
/// Bytes that a large page's file has beyond its K and V: seal, zeros, trailer.
pub const BLOCK: u64 = 4096;

/// A directory with one instance on it.
pub struct Bench {
    pub host: MockHost,
    pub dir: PathBuf,
    pub pool: MockPool,
    pub store: Instance,
    pub scratch: Option<tempfile::TempDir>,
}

/// A pool of pages that have a file each: K, V and a seal.
pub fn large_pool(pages: u64) -> MockPool {
    MockPool::new(PoolSpec::bytes(0, "kv", pages, &[LARGE / 2, LARGE / 2]).with_seal(512))
}

/// A pool of pages that share packs.
pub fn small_pool(pages: u64) -> MockPool {
    MockPool::new(PoolSpec::bytes(0, "kv", pages, &[8192, 8192]).with_seal(256))
}

pub fn config(dir: &Path, more: &str) -> String {
    let comma = if more.is_empty() { "" } else { "," };
    format!(r#"{{"dir":{:?},"min_free_bytes":0{comma}{more}}}"#, dir.to_str().unwrap())
}

pub fn attach(host: &MockHost, dir: &Path, more: &str, who: &Identity, pools: &[&MockPool]) -> Result<Instance> {
    let config = if more.starts_with('{') { more.to_owned() } else { config(dir, more) };
    host.attach(table_of(kvdock_plugin_entry)?, &config, who, pools)
}

impl Bench {
    pub fn new(pool: MockPool, more: &str) -> Bench {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("store");
        let bench = Bench::at(&dir, pool, more);
        Bench { scratch: Some(scratch), ..bench }
    }

    pub fn at(dir: &Path, pool: MockPool, more: &str) -> Bench {
        let host = MockHost::new();
        let store = attach(&host, dir, more, &identity("model"), &[&pool]).unwrap();
        Bench { host, dir: dir.to_owned(), pool, store, scratch: None }
    }

    /// Closes the instance and opens another one on the same directory.
    pub fn reopen(self, more: &str) -> Bench {
        self.store.close().unwrap();
        let bench = Bench::at(&self.dir, self.pool, more);
        Bench { scratch: self.scratch, ..bench }
    }

    /// Another instance on the same directory, as another process would have.
    pub fn peer(&self, more: &str) -> Bench {
        Bench::at(&self.dir, MockPool::new(self.pool.spec().clone()), more)
    }

    fn part(&self, numbers: &[u64]) -> Part {
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
        self.get(numbers).all_ok()
            && numbers.iter().enumerate().all(|(page, number)| self.pool.holds(page as u32, *number))
    }

    /// Which of the pages are there; each that is must hold what was stored.
    pub fn which(&self, numbers: &[u64]) -> Vec<bool> {
        let got = self.get(numbers);
        got.result.clone().unwrap();
        let ok = got.statuses[0].iter().map(|status| *status == kvdock_plugin_api::PageStatus::Ok);
        let ok: Vec<bool> = ok.collect();
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

    /// Files below the directory whose name says that they are pages.
    pub fn page_files(&self) -> Vec<PathBuf> {
        files(&self.dir).into_iter().filter(|path| is_page(path)).collect()
    }

    /// The file of a page.
    pub fn file_of(&self, number: u64) -> PathBuf {
        let hex: String = key(number).iter().map(|byte| format!("{byte:02x}")).collect();
        let found =
            self.page_files().into_iter().find(|path| path.file_name().unwrap().to_str().unwrap().starts_with(&hex));
        found.unwrap_or_else(|| panic!("page {number} has no file"))
    }
}

pub fn is_page(path: &Path) -> bool {
    path.file_name().unwrap().to_str().unwrap().split_once('.').is_some_and(|(key, _)| key.len() == 64)
}

pub fn keys(numbers: &[u64]) -> Vec<PageKey> {
    numbers.iter().map(|number| key(*number)).collect()
}

/// All files and odd things below a directory.
pub fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir(dir) else { return found };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() && !is_page(&path) { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}

pub fn leftovers(dir: &Path) -> Vec<PathBuf> {
    files(dir).into_iter().filter(|path| path.extension().is_some_and(|ending| ending == "tmp")).collect()
}

/// Waits until something holds; fails with `what` when it does not come.
pub fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(20), "did not come: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How long tests of chance go on: a factor, 1 by default.
pub fn soak() -> u64 {
    std::env::var("KVDOCK_SOAK").ok().and_then(|text| text.parse().ok()).unwrap_or(1).max(1)
}
