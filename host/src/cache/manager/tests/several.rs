//! Several backends, each written by its own policy.

use std::sync::atomic::Ordering;

use super::*;
use crate::cache::config::WritePolicy;
use crate::cache::types::Tiers;

fn with_policy(policy: WritePolicy, host_pages: u32) -> CacheConfig {
    CacheConfig { write_policy: policy, ..config(host_pages) }
}

fn attach(rig: &Rig, name: &str, policy: WritePolicy) -> (Store, Arc<FakeBackend>) {
    let store = Store::default();
    let backend = rig.attach(name, &store, |backend| backend.settings.write_policy = Some(policy.to_string()));
    (store, backend)
}

fn set(backend: &FakeBackend) -> usize {
    backend.calls.set_pages.load(Ordering::Relaxed)
}

#[test]
fn each_backend_is_written_by_its_own_policy() {
    let mut rig = Rig::new(16, with_policy(WritePolicy::WriteBack, 64));
    let (through, _) = attach(&rig, "through", WritePolicy::WriteThrough);
    let (selective, _) = attach(&rig, "selective", WritePolicy::WriteThroughSelective);
    let (back, _) = attach(&rig, "back", WritePolicy::WriteBack);
    let stored = || [&through, &selective, &back].map(|store| store.lock().len());
    let prompt = tokens(1, 6 * PAGE + 1);
    rig.run(&prompt);
    rig.settle();
    assert_eq!(stored(), [6, 0, 0], "at once");
    rig.run(&prompt);
    rig.settle();
    assert_eq!(stored(), [6, 6, 0], "at the second use");
    rig.run(&tokens(2, 15 * PAGE + 1));
    rig.settle();
    assert_eq!((stored()[0], stored()[1]), (21, 6));
    assert!(stored()[2] >= 5, "what left the device: {:?}", stored());
    rig.check();
}

#[test]
fn host_copies_follow_the_most_eager_policy() {
    let mut rig = Rig::new(64, with_policy(WritePolicy::WriteBack, 64));
    let prompt = tokens(1, 6 * PAGE + 1);
    rig.run(&prompt);
    assert_eq!(rig.settle().host_used_tokens, 0, "the cache's own");
    attach(&rig, "through", WritePolicy::WriteThrough);
    rig.run(&tokens(2, 6 * PAGE + 1));
    assert_eq!(rig.settle().host_used_tokens, 6 * PAGE as u64);
    rig.check();
}

/// What was used once and leaves the device is none of the selective policy's business, but of write-back's.
#[test]
fn a_backend_with_write_back_gets_what_leaves_the_device_under_any_policy_of_the_cache() {
    let mut rig = Rig::new(16, with_policy(WritePolicy::WriteThroughSelective, 64));
    let (back, _) = attach(&rig, "back", WritePolicy::WriteBack);
    rig.run(&tokens(1, 10 * PAGE + 1));
    rig.settle();
    assert!(back.lock().is_empty());
    rig.run(&tokens(2, 14 * PAGE));
    let stats = rig.settle();
    assert!(back.lock().len() >= 8 && stats.dropped_unbacked_tokens == 0, "{stats:?}");
    rig.check();
}

#[test]
fn draining_writes_what_each_backend_would_ever_get() {
    let mut rig = Rig::new(64, with_policy(WritePolicy::WriteThrough, 64));
    let (through, a) = attach(&rig, "through", WritePolicy::WriteThrough);
    let (selective, _) = attach(&rig, "selective", WritePolicy::WriteThroughSelective);
    let (back, b) = attach(&rig, "back", WritePolicy::WriteBack);
    rig.run(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    assert_eq!(back.lock().len(), 0);
    let drained = rig.cache.drain_backups(Instant::now() + LONG);
    assert_eq!((drained.stored, drained.left), (6, 0));
    assert_eq!((through.lock().len(), selective.lock().len(), back.lock().len()), (6, 0, 6));
    let flushes = [&a, &b].map(|backend| backend.calls.flush.load(Ordering::Relaxed));
    assert_eq!(flushes, [1, 1]);
    rig.check();
}

#[test]
fn what_comes_from_a_backend_further_down_is_promoted_once() {
    let (fast, slow) = (Store::default(), Store::default());
    let prompt = tokens(1, 8 * PAGE + 1);
    {
        let mut rig = Rig::new(64, config(64));
        rig.attach("slow", &slow, |_| {});
        rig.run(&prompt);
        rig.settle();
    }
    for promote in [false, true] {
        let mut rig = Rig::new(64, config(64));
        let a = rig.attach("fast", &fast, |backend| {
            backend.settings.promote = promote;
            // Promotion is no matter of the write policy.
            backend.settings.write_policy = Some("write_back".to_owned());
        });
        let b = rig.attach("slow", &slow, |_| {});
        for n in 0..3 {
            assert_eq!(rig.run(&prompt).from_storage, 8 * PAGE);
            rig.settle();
            let expected = if promote { 8 } else { 0 };
            assert_eq!((fast.lock().len(), set(&a), set(&b)), (expected, expected, 0), "round {n}");
            let from_slow = b.calls.get_pages.load(Ordering::Relaxed);
            assert_eq!(from_slow, if promote { 8 } else { 8 * (n + 1) }, "afterwards it comes from the first");
            rig.cache.flush(Tiers::ALL);
        }
        let promoted = if promote { 8 * PAGE as u64 } else { 0 };
        assert_eq!(rig.cache.stats().promoted_tokens, promoted);
        rig.check();
    }
}

#[test]
fn i39845_a_backend_that_comes_later_is_offered_what_the_host_holds_and_the_others_nothing() {
    let mut rig = Rig::new(64, config(64));
    let (_, a) = attach(&rig, "first", WritePolicy::WriteThrough);
    rig.run(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    let (second, b) = attach(&rig, "second", WritePolicy::WriteThrough);
    let (third, c) = attach(&rig, "third", WritePolicy::WriteThroughSelective);
    rig.settle();
    assert_eq!((set(&a), set(&b), set(&c)), (6, 6, 0));
    rig.run(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    assert_eq!((set(&a), set(&b), set(&c)), (6, 6, 6));
    assert_eq!((second.lock().len(), third.lock().len()), (6, 6));
    rig.check();
}

#[test]
fn i39701_only_the_backend_that_failed_is_tried_again() {
    let mut rig = Rig::new(64, config(64));
    let (first, a) = attach(&rig, "first", WritePolicy::WriteThrough);
    let (second, b) = attach(&rig, "second", WritePolicy::WriteThrough);
    a.faults.fail_pages.store(2, Ordering::Release);
    rig.run(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    assert_eq!((first.lock().len(), second.lock().len()), (6, 6));
    assert_eq!((set(&a), set(&b)), (8, 6));
    rig.check();
}

#[test]
fn i38316_a_page_is_believed_stored_where_it_was_acknowledged_alone() {
    let mut rig = Rig::new(64, CacheConfig { backup_retries: 0, ..config(64) });
    let (first, a) = attach(&rig, "first", WritePolicy::WriteThrough);
    let (second, b) = attach(&rig, "second", WritePolicy::WriteThrough);
    a.faults.refuse.store(true, Ordering::Release);
    let prompt = tokens(1, 6 * PAGE + 1);
    rig.run(&prompt);
    rig.settle();
    assert_eq!((first.lock().len(), second.lock().len()), (0, 6));
    a.faults.refuse.store(false, Ordering::Release);
    second.lock().clear();
    b.faults.fail_exists.store(true, Ordering::Release);
    rig.cache.flush(Tiers::ALL);
    rig.run(&prompt);
    rig.settle();
    assert_eq!((first.lock().len(), set(&b)), (6, 6), "the second one acknowledged them before");
    rig.check();
}

#[test]
fn i31797_writes_to_a_backend_that_hangs_hold_up_no_other() {
    let mut rig = Rig::new(64, config(64));
    let (first, a) = attach(&rig, "first", WritePolicy::WriteThrough);
    let (second, _) = attach(&rig, "second", WritePolicy::WriteThrough);
    let (third, c) = attach(&rig, "third", WritePolicy::WriteThrough);
    a.faults.hang_writes.store(true, Ordering::Release);
    c.faults.hang_writes.store(true, Ordering::Release);
    for n in 1..=4 {
        rig.run(&tokens(n, 6 * PAGE + 1));
    }
    let limit = Instant::now() + LONG;
    while second.lock().len() < 24 {
        assert!(Instant::now() < limit, "{} pages", second.lock().len());
        rig.sleep(Instant::now() + Duration::from_millis(5));
        rig.cache.tick();
    }
    rig.check();
    assert!(first.lock().is_empty() && third.lock().is_empty(), "they hang still");
    a.faults.hang_writes.store(false, Ordering::Release);
    c.faults.hang_writes.store(false, Ordering::Release);
    rig.settle();
    assert_eq!((first.lock().len(), third.lock().len()), (24, 24));
    rig.check();
}

#[test]
fn late_writes_of_two_backends_hold_a_page_twice() {
    let mut rig = Rig::new(64, CacheConfig { backup_retries: 0, ..config(16) });
    let stores = [Store::default(), Store::default()];
    let backends: Vec<_> = ["first", "second"]
        .iter()
        .zip(&stores)
        .map(|(name, store)| rig.attach(name, store, |backend| backend.settings.timeout = Duration::from_millis(30)))
        .collect();
    backends.iter().for_each(|backend| backend.faults.hang_writes.store(true, Ordering::Release));
    rig.run(&tokens(1, 4 * PAGE + 1));
    assert_eq!(rig.settle().host_quarantined_pages, 8);
    rig.check();
    rig.cache.flush(Tiers::ALL);
    assert_eq!(rig.cache.stats().host_used_tokens, 4 * PAGE as u64);
    backends[0].faults.hang_writes.store(false, Ordering::Release);
    assert_eq!(rig.cache.stats().host_quarantined_pages, 4);
    assert_eq!(rig.cache.stats().host_used_tokens, 4 * PAGE as u64, "the other call still reads them");
    rig.check();
    rig.cache.storage().detached("second");
    backends[1].faults.hang_writes.store(false, Ordering::Release);
    assert_eq!(rig.cache.stats().host_quarantined_pages, 0);
    assert_eq!(rig.cache.stats().host_used_tokens, 0);
    rig.check();
}

#[test]
fn an_emptied_store_is_filled_again_and_the_others_are_left_alone() {
    let mut rig = Rig::new(64, config(64));
    let (first, a) = attach(&rig, "first", WritePolicy::WriteThrough);
    let (_, b) = attach(&rig, "second", WritePolicy::WriteThrough);
    rig.run(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    first.lock().clear();
    rig.cache.storage().emptied("first");
    rig.settle();
    assert_eq!((first.lock().len(), set(&a), set(&b)), (6, 12, 6));
    rig.check();
}

/// A store is emptied while a write is under way: what that acknowledges may be gone.
#[test]
fn what_is_acknowledged_across_an_emptying_is_not_believed() {
    let mut rig = Rig::new(64, config(64));
    let (first, a) = attach(&rig, "first", WritePolicy::WriteThrough);
    a.faults.hang_writes.store(true, Ordering::Release);
    rig.run(&tokens(1, 4 * PAGE + 1));
    while a.calls.set.load(Ordering::Relaxed) == 0 {
        rig.cache.tick();
    }
    rig.cache.storage().emptied("first");
    a.faults.hang_writes.store(false, Ordering::Release);
    rig.settle();
    assert_eq!((first.lock().len(), set(&a)), (4, 8), "they are written again");
    rig.check();
}

#[test]
fn what_was_known_of_a_backend_goes_with_it() {
    let mut rig = Rig::new(64, config(64));
    let (old, _) = attach(&rig, "first", WritePolicy::WriteThrough);
    let (_, b) = attach(&rig, "second", WritePolicy::WriteThrough);
    rig.run(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    for round in 1..=70 {
        let (new, a) = attach(&rig, "first", WritePolicy::WriteThrough);
        assert_eq!(rig.cache.storage().names(), ["first", "second"]);
        rig.settle();
        assert_eq!((new.lock().len(), set(&a), set(&b)), (6, 6, 6), "round {round}");
        rig.check();
    }
    assert_eq!(old.lock().len(), 6);
}
