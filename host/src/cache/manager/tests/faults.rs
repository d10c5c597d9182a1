//! What storage may do wrong. No request fails or gets wrong bytes because of it.

use std::sync::atomic::Ordering;

use super::*;
use crate::cache::types::{Miss, Tiers};

/// A store that holds the pages of `prompt`.
fn filled(prompt: &[u32]) -> Store {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    rig.run(prompt);
    rig.settle();
    store
}

/// Pages before the first that does not come are kept; the rest is computed.
#[test]
fn i31679_the_leading_good_pages_count() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.vanish.lock().insert(keys(&prompt)[6]);
    let grant = rig.run(&prompt);
    assert_eq!(grant.from_storage, 6 * PAGE);
    assert_eq!(grant.why, [Miss { start: 6 * PAGE, end: 10 * PAGE, reason: MissReason::Evicted }]);
    rig.settle();
    assert_eq!(rig.pages(StorageOp::Get, StorageResult::Missing), 1);
    assert_eq!(rig.run(&prompt).from_device, 10 * PAGE);
    rig.check();
}

/// A call that answers for fewer pages than it was asked for has failed for the others.
#[test]
fn a_short_answer_is_a_failure_of_the_pages_not_answered() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    *backend.faults.short_after.lock() = Some(3);
    let grant = rig.run(&prompt);
    assert_eq!(grant.from_storage, 3 * PAGE);
    assert_eq!(reasons(&grant), [MissReason::BackendFailed]);
    rig.settle();
    rig.check();
}

/// A page with a flipped byte is found by its seal, never used, removed and written anew.
#[test]
fn i27504_a_corrupt_page_is_found_and_heals() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    let bad = keys(&prompt)[2];
    backend.faults.flip.lock().insert(bad);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_storage, reasons(&grant)), (2 * PAGE, vec![MissReason::Corrupt]));
    let stats = rig.settle();
    assert_eq!((stats.corrupt_pages, stats.healed_pages), (1, 1));
    assert_eq!(rig.pages(StorageOp::Get, StorageResult::Corrupt), 1);
    assert!(store.lock().contains_key(&bad), "the computed page was written in its place");
    rig.check();
    drop(rig);
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    assert_eq!(rig.run(&prompt).from_storage, 10 * PAGE);
}

/// Objects that another engine stored have no seal. Whoever names pages as it does believes them.
#[test]
fn pages_of_a_foreign_key_scheme_are_taken_as_they_are() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    // What lies where the seal would be is no seal of this worker.
    let other = CacheConfig { identity: [7; 32], ..config(64) };
    let mut rig = Rig::new(64, other);
    rig.attach("fake", &store, |backend| backend.settings.sealed = false);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_storage, reasons(&grant)), (10 * PAGE, vec![]));
    assert_eq!(rig.settle().corrupt_pages, 0);
    rig.check();
}

/// Nor is what was computed on top of them: a wrong page makes all after it wrong.
#[test]
fn pages_that_nothing_proves_were_sealed_and_stored_elsewhere() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let (foreign, own) = (filled(&prompt), Store::default());
    let mut rig = Rig::new(64, CacheConfig { identity: [7; 32], ..config(64) });
    let promoting = |backend: &mut FakeBackend| backend.settings.promote = true;
    rig.attach("own", &own, promoting);
    rig.attach("foreign", &foreign, |backend| backend.settings.sealed = false);
    let longer = tokens(1, 14 * PAGE + 1);
    assert_eq!(rig.run(&longer).from_storage, 10 * PAGE);
    rig.settle();
    assert!(own.lock().is_empty(), "{} pages", own.lock().len());
    assert_eq!(foreign.lock().len(), 14, "whoever names pages that way gets the rest");
    rig.attach("later", &own, promoting);
    rig.run(&longer);
    rig.settle();
    assert!(own.lock().is_empty());
    rig.run(&tokens(2, 3 * PAGE + 1));
    rig.settle();
    assert_eq!(own.lock().len(), 3, "what was computed from the start is proven");
    rig.check();
}

#[test]
fn a_corrupt_page_that_cannot_be_removed_is_treated_as_missing() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let mut rig = Rig::new(64, config(64));
    let backend = rig.attach("fake", &store, |backend| backend.remove = false);
    backend.faults.flip.lock().insert(keys(&prompt)[5]);
    rig.run(&prompt);
    rig.settle();
    let before = backend.calls.get_pages.load(Ordering::Relaxed);
    rig.cache.flush(Tiers::ALL);
    let grant = rig.run(&prompt);
    assert_eq!(grant.from_storage, 5 * PAGE);
    let read = backend.calls.get_pages.load(Ordering::Relaxed) - before;
    assert_eq!(read, 5, "the bad page is not read again");
    rig.settle();
    rig.check();
}

/// A store that is full may fail to remove a page that it has dropped by itself; the page is written anew all the same.
#[test]
fn a_corrupt_page_whose_removal_failed_once_is_stored_again() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    let bad = keys(&prompt)[2];
    backend.faults.flip.lock().insert(bad);
    backend.faults.fail_removes.store(1, Ordering::Release);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_storage, reasons(&grant)), (2 * PAGE, vec![MissReason::Corrupt]));
    let stats = rig.settle();
    assert_eq!((stats.corrupt_pages, stats.healed_pages), (1, 0));
    assert!(store.lock().contains_key(&bad), "the computed page was written in its place");
    rig.cache.flush(Tiers::ALL);
    assert_eq!(rig.run(&prompt).from_storage, 10 * PAGE, "an acknowledged write ends the doubt");
    rig.check();
}

/// The identity comes from content (weights, dtype, layout, numerics), not from a name: pages of another
/// model, of other weights or of another dtype never pass, even under the same key.
#[test]
fn i33268_i24758_i26792_pages_of_another_identity_are_no_hit() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let other = CacheConfig { identity: [7; 32], ..config(64) };
    let (mut rig, _) = Rig::with_storage(64, other, &store);
    let grant = rig.run(&prompt);
    assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::Corrupt]));
    rig.settle();
    rig.check();
}

/// A read past its deadline gives the request up, and its pages are nobody's until it returns.
#[test]
fn i31296_pages_of_a_late_read_are_not_used_again_before_it_returns() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let mut rig = Rig::new(64, config(16));
    let backend = rig.attach("fake", &store, |backend| backend.settings.timeout = Duration::from_millis(60));
    // The question is answered and the first batch comes; the second one hangs.
    backend.faults.hang_only.lock().insert(keys(&prompt)[4]);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_storage, reasons(&grant)), (4 * PAGE, vec![MissReason::BackendSlow]));
    assert_eq!(rig.settle().host_quarantined_pages, 4);
    assert_eq!(rig.pages(StorageOp::Get, StorageResult::Late), 4);
    rig.check();
    let flushed = rig.cache.flush(Tiers::ALL);
    assert_eq!(flushed.host_kept, 4, "the late call's pages stay out of circulation");
    rig.run(&tokens(2, 12 * PAGE + 1));
    rig.settle();
    rig.check();
    backend.faults.hang_reads.store(false, Ordering::Release);
    assert_eq!(rig.cache.stats().host_quarantined_pages, 0);
    rig.cache.flush(Tiers::ALL);
    rig.check();
    assert_eq!(rig.cache.stats().host_used_tokens, 0);
}

/// A late write keeps reading its source pages; they may leave the tree, but not be filled anew.
#[test]
fn pages_of_a_late_write_are_not_used_again_before_it_returns() {
    let store = Store::default();
    let mut rig = Rig::new(64, CacheConfig { backup_retries: 0, ..config(16) });
    let backend = rig.attach("fake", &store, |backend| backend.settings.timeout = Duration::from_millis(30));
    backend.faults.hang_writes.store(true, Ordering::Release);
    rig.run(&tokens(1, 4 * PAGE + 1));
    assert_eq!(rig.settle().host_quarantined_pages, 4);
    assert_eq!(rig.pages(StorageOp::Set, StorageResult::Late), 4);
    rig.check();
    let flushed = rig.cache.flush(Tiers::ALL);
    assert_eq!((flushed.device_kept, flushed.host_kept), (0, 4));
    rig.check();
    backend.faults.hang_writes.store(false, Ordering::Release);
    assert_eq!(rig.cache.stats().host_used_tokens, 0);
    rig.check();
}

/// One slow operation does not hold up the others.
#[test]
fn i31797_a_slow_read_does_not_block_the_next() {
    let (slow, fast) = (tokens(1, 8 * PAGE + 1), tokens(2, 8 * PAGE + 1));
    let store = Store::default();
    {
        let (mut rig, _) = Rig::with_storage(64, config(64), &store);
        rig.run(&slow);
        rig.run(&fast);
        rig.settle();
    }
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.hang_only.lock().insert(keys(&slow)[0]);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let stuck = rig.request(&slow, &CacheNamespace::default());
    while backend.calls.exists.load(Ordering::Relaxed) == 0 {
        std::thread::yield_now();
    }
    assert_eq!(rig.run(&fast).from_storage, 8 * PAGE);
    assert!(matches!(rig.cache.poll(stuck), Prefetch::Waiting { .. }));
    backend.faults.hang_reads.store(false, Ordering::Release);
    rig.wait_storage(stuck);
    assert_eq!(rig.acquire(stuck, &slow).from_storage, 8 * PAGE);
    rig.cache.abort(stuck, Vec::new());
    rig.settle();
    rig.check();
}

#[test]
fn i38428_a_panic_in_a_write_leaves_the_writers_running() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.panic_writes.store(1, Ordering::Release);
    rig.run(&tokens(1, 4 * PAGE + 1));
    rig.settle();
    assert_eq!(rig.pages(StorageOp::Set, StorageResult::Failed), 4);
    rig.run(&tokens(2, 4 * PAGE + 1));
    rig.settle();
    assert_eq!(store.lock().len(), 4);
    rig.check();
}

/// Results count page by page, and what failed is tried again a bounded number of times.
#[test]
fn i39701_failed_pages_are_tried_again_and_the_others_stand() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.fail_pages.store(2, Ordering::Release);
    rig.run(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    assert_eq!(store.lock().len(), 6);
    assert_eq!(backend.calls.set_pages.load(Ordering::Relaxed), 8, "only the two failed pages go again");
    let stats = rig.cache.stats();
    assert_eq!((stats.backup_dropped_tokens, stats.backuped_tokens), (0, 6 * PAGE as u64));
    rig.check();
}

#[test]
fn a_write_that_keeps_failing_is_given_up_and_counted() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(64, CacheConfig { backup_retries: 1, ..config(64) }, &store);
    backend.faults.fail_pages.store(usize::MAX, Ordering::Release);
    rig.run(&tokens(1, 3 * PAGE + 1));
    let stats = rig.settle();
    assert_eq!((stats.backup_retries, stats.backup_dropped_tokens), (1, 3 * PAGE as u64));
    rig.check();
}

/// The host believes a page stored only when the write was acknowledged.
#[test]
fn i38316_a_failed_write_is_not_believed() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(64, CacheConfig { backup_retries: 0, ..config(64) }, &store);
    backend.faults.refuse.store(true, Ordering::Release);
    let prompt = tokens(1, 6 * PAGE + 1);
    rig.run(&prompt);
    rig.settle();
    assert_eq!(rig.pages(StorageOp::Set, StorageResult::Refused), 6);
    assert!(store.lock().is_empty());
    backend.faults.refuse.store(false, Ordering::Release);
    // Gone from the other tiers and computed again, it is written.
    rig.cache.flush(Tiers::ALL);
    rig.run(&prompt);
    rig.settle();
    assert_eq!(store.lock().len(), 6);
    rig.check();
}

/// A page acknowledged before is not written again, however often it is computed.
#[test]
fn i39845_a_stored_page_is_written_once() {
    let store = Store::default();
    let cautious = CacheConfig { prefetch_threshold: 1000, ..config(64) };
    let (mut rig, backend) = Rig::with_storage(64, cautious, &store);
    for _ in 0..3 {
        assert_eq!(rig.run(&tokens(1, 6 * PAGE + 1)).tokens, 0);
        rig.settle();
        rig.cache.flush(Tiers::ALL);
    }
    assert_eq!(backend.calls.set_pages.load(Ordering::Relaxed), 6);
    rig.check();
}

/// What the store dropped by itself is written again once the host has noticed.
#[test]
fn a_page_the_store_lost_is_stored_again() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    let prompt = tokens(1, 8 * PAGE + 1);
    rig.run(&prompt);
    rig.settle();
    store.lock().clear();
    rig.cache.flush(Tiers::ALL);
    let grant = rig.run(&prompt);
    assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::Evicted]));
    rig.settle();
    assert_eq!(store.lock().len(), 8);
    rig.check();
}

#[test]
fn i16614_a_backend_that_fails_every_call_is_left_alone() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.fail_exists.store(true, Ordering::Release);
    for n in 1..=3 {
        let grant = rig.run(&tokens(n, 4 * PAGE + 1));
        assert_eq!(reasons(&grant), [MissReason::BackendFailed]);
    }
    let asked = backend.calls.exists.load(Ordering::Relaxed);
    let grant = rig.run(&tokens(9, 4 * PAGE + 1));
    assert_eq!(reasons(&grant), [MissReason::BackendFailed]);
    assert_eq!(backend.calls.exists.load(Ordering::Relaxed), asked, "not asked again so soon");
    rig.settle();
    assert_eq!(store.lock().len(), 16, "writes are another matter and go on");
    rig.check();
}
