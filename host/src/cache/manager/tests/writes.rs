//! Down the tiers: when pages are copied and stored.

use std::sync::atomic::Ordering;

use super::*;
use crate::cache::config::WritePolicy;
use crate::cache::types::Tiers;

fn with_policy(policy: WritePolicy, host_pages: u32) -> CacheConfig {
    CacheConfig { write_policy: policy, ..config(host_pages) }
}

/// Nothing but the waker and `tick`: no request runs while the pages go down.
#[test]
fn i20560_write_through_makes_progress_when_idle() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    rig.run(&tokens(1, 6 * PAGE + 1));
    let limit = Instant::now() + LONG;
    while store.lock().len() < 6 {
        assert!(Instant::now() < limit);
        rig.sleep(limit);
        rig.cache.tick();
    }
    rig.settle();
    rig.check();
}

#[test]
fn write_through_selective_backs_up_at_the_second_use() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(64, with_policy(WritePolicy::WriteThroughSelective, 64), &store);
    let prompt = tokens(1, 6 * PAGE + 1);
    rig.run(&prompt);
    rig.settle();
    assert_eq!(backend.calls.set.load(Ordering::Relaxed), 0);
    assert_eq!(rig.run(&prompt).from_device, 6 * PAGE);
    rig.settle();
    assert_eq!(store.lock().len(), 6);
    rig.check();
}

#[test]
fn write_back_copies_what_leaves_the_device() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(16, with_policy(WritePolicy::WriteBack, 64), &store);
    let prompt = tokens(1, 10 * PAGE + 1);
    rig.run(&prompt);
    assert_eq!(rig.settle().host_used_tokens, 0);
    rig.run(&tokens(2, 14 * PAGE));
    let stats = rig.settle();
    assert!(stats.host_backup_tokens >= 8 * PAGE as u64 && stats.dropped_unbacked_tokens == 0, "{stats:?}");
    assert_eq!(store.lock().len() as u64 * PAGE as u64, stats.host_backup_tokens);
    let grant = rig.run(&prompt);
    assert_eq!(grant.tokens, 10 * PAGE);
    assert!(grant.from_host >= 8 * PAGE);
    rig.check();
}

#[test]
fn draining_writes_everything_that_write_back_kept() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(64, with_policy(WritePolicy::WriteBack, 64), &store);
    rig.run(&tokens(1, 10 * PAGE + 1));
    let drained = rig.cache.drain_backups(Instant::now() + LONG);
    assert_eq!((drained.stored, drained.left), (10, 0));
    assert_eq!(store.lock().len(), 10);
    assert_eq!(backend.calls.flush.load(Ordering::Relaxed), 1);
    rig.check();
}

#[test]
fn draining_ends_at_its_deadline_and_says_what_is_left() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.hang_writes.store(true, Ordering::Release);
    rig.run(&tokens(1, 5 * PAGE + 1));
    let began = Instant::now();
    let drained = rig.cache.drain_backups(began + Duration::from_millis(100));
    assert_eq!((drained.stored, drained.left), (0, 5));
    assert!(began.elapsed() < Duration::from_secs(2));
    backend.faults.hang_writes.store(false, Ordering::Release);
    let drained = rig.cache.drain_backups(Instant::now() + LONG);
    assert_eq!((drained.stored, drained.left), (5, 0));
    rig.check();
}

/// A node is split while its pages are being written: every page ends up under its own key.
#[test]
fn i27072_a_node_split_during_its_backup_is_stored_right() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.hang_writes.store(true, Ordering::Release);
    let first = tokens(1, 10 * PAGE + 1);
    rig.run(&first);
    while backend.calls.set.load(Ordering::Relaxed) == 0 {
        rig.cache.tick();
    }
    let second = [&first[..3 * PAGE], &tokens(2, 4 * PAGE + 1)].concat();
    assert_eq!(rig.run(&second).tokens, 3 * PAGE);
    rig.check();
    backend.faults.hang_writes.store(false, Ordering::Release);
    rig.settle();
    rig.check();
    let mut expected = keys(&first);
    expected.extend_from_slice(&keys(&second)[3..]);
    let store_keys = store.lock();
    assert_eq!(store_keys.len(), expected.len());
    assert!(expected.iter().all(|key| store_keys.contains_key(key)));
    drop(store_keys);
    drop(rig);
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    assert_eq!(rig.run(&first).from_storage, 10 * PAGE);
    assert_eq!(rig.run(&second).tokens, 7 * PAGE);
}

/// Whole pages are stored whatever chunk they were computed in, also where a chunk ended.
#[test]
fn i30850_pages_at_a_chunk_boundary_are_stored() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    let prompt = tokens(1, 9 * PAGE + 3);
    let shared = CacheNamespace::default();
    let id = rig.request(&prompt, &shared);
    rig.wait_storage(id);
    let mut pages = rig.acquire(id, &prompt).pages;
    for end in [PAGE + 1, 3 * PAGE, 5 * PAGE + 2, 9 * PAGE + 3] {
        rig.extend(&mut pages, &prompt[..end], &shared);
        rig.cache.commit(id, &prompt[..end], &mut pages, &mut []).unwrap();
    }
    rig.cache.finish(id, &prompt, pages);
    rig.settle();
    assert_eq!(store.lock().len(), 9);
    rig.check();
}

/// The tail that filled no page is stored once it does.
#[test]
fn i17018_a_tail_is_stored_when_its_page_completes() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    rig.run(&tokens(1, 3 * PAGE + 2));
    rig.settle();
    assert_eq!(store.lock().len(), 3);
    rig.run(&tokens(1, 4 * PAGE));
    rig.settle();
    assert_eq!(store.lock().len(), 4);
    rig.check();
}

/// A host pool smaller than the device pool is a buffer on the way to storage.
#[test]
fn a_small_host_pool_passes_everything_on() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(128, config(8), &store);
    for n in 1..=6 {
        rig.run(&tokens(n, 6 * PAGE + 1));
        rig.settle();
        rig.check();
    }
    assert_eq!(store.lock().len(), 36);
    assert_eq!(rig.run(&tokens(1, 6 * PAGE + 1)).from_device, 6 * PAGE, "the device keeps its copies");
}

/// More pages than the host has room for are counted, and nothing waits for them.
#[test]
fn backups_without_room_are_dropped_and_counted() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(4), &store);
    rig.run(&tokens(1, 6 * PAGE + 1));
    let stats = rig.settle();
    assert_eq!(stats.dropped_host_pressure_tokens, 6 * PAGE as u64);
    assert!(store.lock().is_empty());
    rig.check();
}

#[test]
fn the_session_of_a_request_reaches_the_store() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    let prompt = tokens(1, 4 * PAGE + 1);
    let hints = ReuseHints { session_id: Some("talk-7".to_owned()), ..ReuseHints::default() };
    rig.cache.begin(1, &prompt, &CacheNamespace::default(), &hints);
    rig.wait_storage(1);
    let grant = rig.acquire(1, &prompt);
    rig.complete(1, &grant, &prompt, &CacheNamespace::default());
    rig.settle();
    assert!(backend.calls.sessions.lock().contains("talk-7"));
    rig.cache.flush(Tiers::ALL);
    rig.check();
}

/// Stores that place or expire pages by prefix get the whole chain with every call.
#[test]
fn i9045_prefix_keys_go_with_every_call() {
    let store = Store::default();
    let prompt = tokens(1, 10 * PAGE + 1);
    let chain = keys(&prompt);
    for _ in 0..2 {
        let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
        rig.run(&prompt);
        rig.settle();
        let calls = backend.calls.chains.lock();
        assert!(calls.len() >= 3, "a question, and reads or writes of at most four pages");
        assert!(calls.iter().all(|keys| chain.starts_with(keys)), "each is the chain from its start");
        drop(calls);
    }
}
