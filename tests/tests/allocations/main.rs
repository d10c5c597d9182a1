//! A `batch_get` of 128 pages makes no allocation on the host's side: not on the thread of the caller, and not on the instance's own.
//!
//! The allocator of this program counts. A plugin is a library with an allocator of its own, so what it does is not counted. There is one
//! test in this program, because the count is of all threads.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

#[path = "../abi/host_0_2.rs"]
#[allow(dead_code, reason = "the tests of the versions use all of it")]
mod host_0_2;
#[path = "../abi/pool.rs"]
#[allow(dead_code, reason = "the tests of the versions use all of it")]
mod pool;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use kvdock::cache::Guarded;
use kvdock::plugin::AbiVersions;
use kvdock::plugin::backend::{CallOptions, ChainInfo, PageKey, PageStatus, PoolGroup};
use kvdock_tests::frozen;

use crate::pool::Host;

/// The system's allocator, with a count of what is asked of it while it counts.
struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn note() {
    if COUNTS.load(Ordering::Relaxed) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of all threads while `body` runs.
fn allocations(body: impl FnOnce()) -> usize {
    COUNT.store(0, Ordering::SeqCst);
    COUNTS.store(true, Ordering::SeqCst);
    body();
    COUNTS.store(false, Ordering::SeqCst);
    COUNT.load(Ordering::SeqCst)
}

const PAGES: usize = 128;
/// Pages of the sequence before those that are read: their keys go along.
const BEFORE: usize = 32;
/// Each thread of the instance has buffers of its own, which grow in its first calls.
const WARM_UP: usize = 16;

#[test]
fn a_get_of_128_pages_makes_no_allocation_on_the_hosts_side() {
    assert!(allocations(|| drop(std::hint::black_box(vec![1u8; 64]))) > 0, "the allocator counts");
    let folder = tempfile::tempdir().unwrap();
    frozen::c_plugin("0.1", folder.path());
    through_all_layers(AbiVersions::BUILT_IN, folder.path());
    // The same plugin behind an adapter to a newer version.
    through_all_layers(host_0_2::KNOWS_BOTH, folder.path());
}

fn through_all_layers(abi: AbiVersions, folder: &Path) {
    let host = Host::attach(abi, folder, "frozen-c").unwrap();
    let backend = host.backend();
    let keys: Vec<PageKey> = (0..BEFORE + PAGES).map(|number| [number as u8; 32]).collect();
    let (prefix_keys, own) = keys.split_at(BEFORE);
    let chain = ChainInfo { position: BEFORE as u64, prefix_keys, session_id: "a session" };
    let pages: Vec<u32> = (0..PAGES as u32).collect();
    let mut status = vec![PageStatus::Unset; PAGES];
    let options = CallOptions::within(Duration::from_secs(60));
    backend.batch_set(&options, PoolGroup::Full, own, &pages, &chain, &mut status).unwrap();
    assert_eq!(status, [PageStatus::Ok; PAGES]);

    let mut get = || {
        status.fill(PageStatus::Unset);
        backend.batch_get(&options, PoolGroup::Full, own, &pages, &chain, &mut status).unwrap();
        assert!(status.iter().all(|status| *status == PageStatus::Ok));
    };
    (0..WARM_UP).for_each(|_| get());
    assert_eq!(allocations(|| (0..20).for_each(|_| get())), 0, "through the instance, {abi}");

    let guarded = Guarded::new(backend.clone(), pool::PAGE_BYTES as u64);
    let mut status = vec![PageStatus::Unset; PAGES];
    let mut get = || {
        guarded.batch_get(&keys, &pages, "a session", &mut status).unwrap();
        assert!(status.iter().all(|status| *status == PageStatus::Ok));
    };
    (0..WARM_UP).for_each(|_| get());
    assert_eq!(allocations(|| (0..20).for_each(|_| get())), 0, "through the guards of the cache, {abi}");
    drop((guarded, backend));
    host.end();
}
