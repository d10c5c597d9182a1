//! Distributions of what happens in the cache.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::cache::CacheEvents;
use crate::engine::{Histogram, HistogramSnapshot};

const DURATIONS: &[f64] = &[0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0];
/// SGLang's buckets.
const PAGES: &[f64] = &[1.0, 5.0, 10.0, 50.0, 100.0];
/// SGLang's buckets, in GB/s.
const BANDWIDTH: &[f64] = &[0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0];

/// Most backends with distributions of their own; names come from the config and the admin key.
const MAX_BACKENDS: usize = 64;

/// Collects distributions; hand it to the cache as its listener.
pub struct CacheObserver {
    pub(super) eviction: Histogram,
    pub(super) load_back: Histogram,
    pub(super) backup: Histogram,
    storage: Mutex<BTreeMap<String, Arc<StorageDistributions>>>,
}

/// Distributions of one backend.
pub(super) struct StorageDistributions {
    pub read_pages: Histogram,
    pub read_bandwidth: Histogram,
    pub write_pages: Histogram,
    pub write_bandwidth: Histogram,
}

impl Default for CacheObserver {
    fn default() -> Self {
        Self {
            eviction: Histogram::new(DURATIONS),
            load_back: Histogram::new(DURATIONS),
            backup: Histogram::new(DURATIONS),
            storage: Mutex::new(BTreeMap::new()),
        }
    }
}

impl CacheObserver {
    fn backend(&self, name: &str) -> Option<Arc<StorageDistributions>> {
        let mut storage = self.storage.lock();
        if let Some(known) = storage.get(name) {
            return Some(known.clone());
        }
        if storage.len() >= MAX_BACKENDS {
            return None;
        }
        let new = Arc::new(StorageDistributions {
            read_pages: Histogram::new(PAGES),
            read_bandwidth: Histogram::new(BANDWIDTH),
            write_pages: Histogram::new(PAGES),
            write_bandwidth: Histogram::new(BANDWIDTH),
        });
        storage.insert(name.to_owned(), new.clone());
        Some(new)
    }

    /// One distribution of every backend.
    pub(super) fn storage(
        &self,
        pick: impl Fn(&StorageDistributions) -> &Histogram,
    ) -> Vec<(String, HistogramSnapshot)> {
        let storage = self.storage.lock();
        storage.iter().map(|(name, distributions)| (name.clone(), pick(distributions).snapshot())).collect()
    }
}

fn gigabytes_a_second(bytes: u64, took: Duration) -> Option<f64> {
    (!took.is_zero()).then(|| bytes as f64 / 1e9 / took.as_secs_f64())
}

impl CacheEvents for CacheObserver {
    fn evicted(&self, _tokens: u64, took: Duration) {
        self.eviction.observe(took.as_secs_f64());
    }

    fn loaded_back(&self, _tokens: u64, _bytes: u64, took: Duration) {
        self.load_back.observe(took.as_secs_f64());
    }

    fn backed_up(&self, _tokens: u64, _bytes: u64, took: Duration) {
        self.backup.observe(took.as_secs_f64());
    }

    fn storage_read(&self, backend: &str, pages: u64, bytes: u64, took: Duration) {
        if let Some(backend) = self.backend(backend) {
            backend.read_pages.observe(pages as f64);
            if let Some(rate) = gigabytes_a_second(bytes, took) {
                backend.read_bandwidth.observe(rate);
            }
        }
    }

    fn storage_written(&self, backend: &str, pages: u64, bytes: u64, took: Duration) {
        if let Some(backend) = self.backend(backend) {
            backend.write_pages.observe(pages as f64);
            if let Some(rate) = gigabytes_a_second(bytes, took) {
                backend.write_bandwidth.observe(rate);
            }
        }
    }
}
