//! Requests that end early, backends that come and go, and calls that make no sense.

use std::sync::atomic::Ordering;

use super::*;
use crate::cache::types::{CacheError, Tiers};

#[test]
fn an_abort_in_every_phase_leaves_nothing_behind() {
    let store = Store::default();
    let prompt = tokens(1, 10 * PAGE + 1);
    let shared = CacheNamespace::default();
    {
        let (mut rig, _) = Rig::with_storage(64, config(64), &store);
        rig.run(&prompt);
        rig.settle();
    }
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    // While storage is asked.
    backend.faults.hang_reads.store(true, Ordering::Release);
    let id = rig.request(&prompt, &shared);
    rig.cache.abort(id, Vec::new());
    backend.faults.hang_reads.store(false, Ordering::Release);
    rig.settle();
    rig.check();
    // While pages are loaded.
    let id = rig.request(&prompt, &shared);
    rig.wait_storage(id);
    let loading = matches!(rig.cache.acquire(id, &prompt), Ok(Acquire::Loading));
    rig.cache.abort(id, Vec::new());
    rig.check();
    assert!(loading);
    // With pages of its own.
    let id = rig.request(&tokens(2, 6 * PAGE), &shared);
    rig.wait_storage(id);
    let mut pages = rig.acquire(id, &tokens(2, 6 * PAGE)).pages;
    rig.extend(&mut pages, &tokens(2, 6 * PAGE), &shared);
    rig.cache.abort(id, pages);
    rig.settle();
    rig.check();
    rig.cache.flush(Tiers::ALL);
    let stats = rig.settle();
    assert_eq!((stats.device_used_tokens, stats.host_used_tokens, stats.tree_nodes, stats.misuses), (0, 0, 0, 0));
}

#[test]
fn an_aborted_request_does_not_stop_the_fetch_that_another_waits_for() {
    let store = Store::default();
    let prompt = tokens(1, 10 * PAGE + 1);
    let shared = CacheNamespace::default();
    {
        let (mut rig, _) = Rig::with_storage(64, config(64), &store);
        rig.run(&prompt);
        rig.settle();
    }
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let (first, second) = (rig.request(&prompt, &shared), rig.request(&prompt, &shared));
    rig.cache.abort(first, Vec::new());
    backend.faults.hang_reads.store(false, Ordering::Release);
    rig.wait_storage(second);
    assert_eq!(rig.acquire(second, &prompt).from_storage, 10 * PAGE);
    rig.cache.abort(second, Vec::new());
    rig.settle();
    rig.check();
}

#[test]
fn a_preempted_request_gets_its_pages_back() {
    let mut rig = Rig::new(64, config(64));
    let all = tokens(1, 12 * PAGE + 1);
    let shared = CacheNamespace::default();
    let id = rig.request(&all[..8 * PAGE], &shared);
    let mut pages = rig.acquire(id, &all[..8 * PAGE]).pages;
    rig.extend(&mut pages, &all[..10 * PAGE + 2], &shared);
    rig.cache.preempt(id, &all[..10 * PAGE + 2], pages);
    rig.settle();
    rig.check();
    assert_eq!(rig.cache.stats().device_used_tokens, 10 * PAGE as u64, "the partial page was freed");
    let grant = rig.acquire(id, &all[..10 * PAGE + 2]);
    assert_eq!(grant.from_device, 10 * PAGE);
    rig.check_grant(&grant, &all, &shared);
    rig.complete(id, &grant, &all, &shared);
    rig.settle();
    rig.check();
}

/// Pages that were on the host before the backend came are stored, under keys that start at the start.
#[test]
fn a_backend_attached_late_gets_what_the_host_holds() {
    let store = Store::default();
    let mut rig = Rig::new(64, config(64));
    let first = tokens(1, 8 * PAGE + 1);
    let second = [&first[..5 * PAGE], &tokens(2, 4 * PAGE + 1)].concat();
    rig.run(&first);
    rig.run(&second);
    rig.settle();
    rig.attach("fake", &store, |_| {});
    rig.settle();
    assert_eq!(store.lock().len(), 12);
    rig.check();
    drop(rig);
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    assert_eq!(rig.run(&second).from_storage, 9 * PAGE);
    rig.settle();
    rig.check();
}

/// Detach with reads and writes in flight: the requests go on, no lock and no page stays.
#[test]
fn i38483_a_detach_under_load_releases_everything() {
    let store = Store::default();
    let prompt = tokens(1, 10 * PAGE + 1);
    {
        let (mut rig, _) = Rig::with_storage(64, config(64), &store);
        rig.run(&prompt);
        rig.settle();
    }
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.hang_writes.store(true, Ordering::Release);
    rig.run(&tokens(2, 6 * PAGE + 1));
    backend.faults.hang_reads.store(true, Ordering::Release);
    let id = rig.request(&prompt, &CacheNamespace::default());
    while backend.calls.exists.load(Ordering::Relaxed) < 2 || backend.calls.set.load(Ordering::Relaxed) == 0 {
        rig.cache.tick();
    }
    let handle = rig.cache.storage();
    assert!(handle.detached("fake"));
    assert!(!handle.detached("fake"));
    assert!(handle.names().is_empty());
    assert!(!handle.quiesced("fake", Duration::from_millis(20)), "a write still runs");
    rig.wait_storage(id);
    let grant = rig.acquire(id, &prompt);
    assert_eq!(grant.tokens, 0);
    rig.check_grant(&grant, &prompt, &CacheNamespace::default());
    rig.complete(id, &grant, &prompt, &CacheNamespace::default());
    rig.check();
    backend.faults.hang_reads.store(false, Ordering::Release);
    backend.faults.hang_writes.store(false, Ordering::Release);
    assert!(handle.quiesced("fake", LONG));
    rig.settle();
    let flushed = rig.cache.flush(Tiers::ALL);
    assert_eq!((flushed.device_kept, flushed.host_kept), (0, 0));
    rig.check();
    assert_eq!(reasons(&rig.run(&tokens(3, 4 * PAGE + 1))), [MissReason::StorageOff]);
}

/// A replaced backend's pages count for the old one; the new one gets its own.
#[test]
fn a_replaced_backend_is_filled_anew() {
    let (old, new) = (Store::default(), Store::default());
    let (mut rig, _) = Rig::with_storage(64, config(64), &old);
    let prompt = tokens(1, 6 * PAGE + 1);
    rig.run(&prompt);
    rig.settle();
    rig.attach("fake", &new, |_| {});
    assert_eq!(rig.cache.storage().names(), ["fake"]);
    rig.settle();
    assert_eq!((old.lock().len(), new.lock().len()), (6, 6));
    rig.check();
}

/// With two backends each page goes to both, and comes from the first that has it; also behind a page that comes from the second.
#[test]
fn several_backends_are_asked_in_order_and_all_written() {
    let (first, second) = (Store::default(), Store::default());
    let prompt = tokens(1, 8 * PAGE + 1);
    {
        let mut rig = Rig::new(64, config(64));
        rig.attach("first", &first, |_| {});
        rig.attach("second", &second, |_| {});
        rig.run(&prompt);
        rig.settle();
    }
    assert_eq!((first.lock().len(), second.lock().len()), (8, 8));
    first.lock().remove(&keys(&prompt)[5]);
    let mut rig = Rig::new(64, config(64));
    let a = rig.attach("first", &first, |_| {});
    let b = rig.attach("second", &second, |_| {});
    assert_eq!(rig.run(&prompt).from_storage, 8 * PAGE);
    assert_eq!(a.calls.get_pages.load(Ordering::Relaxed), 7);
    assert_eq!(b.calls.get_pages.load(Ordering::Relaxed), 1);
    rig.settle();
    rig.check();
}

#[test]
fn an_emptied_store_is_filled_again() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    rig.run(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    store.lock().clear();
    rig.cache.storage().emptied("fake");
    rig.settle();
    assert_eq!(store.lock().len(), 6);
    rig.check();
}

#[test]
fn calls_that_make_no_sense_are_refused_and_change_nothing() {
    let mut rig = Rig::new(16, config(16));
    let prompt = tokens(1, 4 * PAGE + 1);
    assert!(matches!(rig.cache.acquire(77, &prompt), Err(CacheError::UnknownRequest(77))));
    let id = rig.request(&prompt, &CacheNamespace::default());
    assert!(matches!(rig.cache.commit(id, &prompt, &mut [], &mut []), Err(CacheError::NotGranted(_))));
    rig.acquire(id, &prompt);
    assert!(matches!(rig.cache.acquire(id, &prompt), Err(CacheError::AlreadyGranted(_))));
    let short = rig.cache.commit(id, &prompt, &mut [0], &mut []);
    assert!(matches!(short, Err(CacheError::PageTable { needed: 4, found: 1, .. })), "{short:?}");
    let foreign = rig.cache.commit(id, &prompt, &mut [3, 4, 5, 6], &mut []);
    assert!(matches!(foreign, Err(CacheError::ForeignPage { .. })), "{foreign:?}");
    rig.cache.free_pages(&[3, 900]);
    assert_eq!(rig.cache.stats().misuses, 7 - 1);
    rig.check();
    rig.cache.abort(id, Vec::new());
    rig.cache.abort(id, Vec::new());
    assert_eq!(rig.cache.poll(id), Prefetch::Ready);
    rig.check();
}

#[test]
fn a_cache_without_host_tier_works_on_the_device_alone() {
    let mut rig = Rig::new(16, config(0));
    assert!(rig.cache.storage().host_pools().is_empty());
    for n in 1..6 {
        rig.run(&tokens(n, 10 * PAGE + 1));
        rig.check();
    }
    assert_eq!(rig.run(&tokens(5, 10 * PAGE + 1)).from_device, 10 * PAGE);
    assert_eq!(rig.cache.drain_backups(Instant::now()), Default::default());
}

/// The cache's threads end with it.
#[test]
fn i36882_no_thread_outlives_the_cache() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    rig.run(&tokens(1, 6 * PAGE + 1));
    let shared = Arc::downgrade(&rig.cache.lower.as_ref().unwrap().shared);
    drop(rig);
    assert!(shared.upgrade().is_none(), "a thread still holds what the workers share");
}
