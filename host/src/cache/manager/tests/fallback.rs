//! What one backend fails to deliver comes from the next.

use std::sync::atomic::Ordering;

use super::*;
use crate::cache::types::Tiers;

/// Two stores that hold the pages of `prompt`.
fn filled(prompt: &[u32]) -> (Store, Store) {
    let (first, second) = (Store::default(), Store::default());
    let mut rig = Rig::new(64, config(64));
    rig.attach("first", &first, |_| {});
    rig.attach("second", &second, |_| {});
    rig.run(prompt);
    rig.settle();
    drop(rig);
    (first, second)
}

fn rig(first: &Store, second: &Store) -> (Rig, Arc<FakeBackend>, Arc<FakeBackend>) {
    let rig = Rig::new(64, config(64));
    let a = rig.attach("first", first, |_| {});
    let b = rig.attach("second", second, |_| {});
    (rig, a, b)
}

fn got(backend: &FakeBackend) -> usize {
    backend.calls.get_pages.load(Ordering::Relaxed)
}

#[test]
fn i2039_a_page_that_one_backend_says_it_has_and_lacks_comes_from_the_next() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let (first, second) = filled(&prompt);
    let (mut rig, a, b) = rig(&first, &second);
    a.faults.vanish.lock().insert(keys(&prompt)[6]);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_storage, grant.why.len()), (10 * PAGE, 0));
    assert_eq!((got(&a), got(&b)), (10, 1), "only that page is asked of the second");
    assert_eq!(rig.settle().fallback_tokens, PAGE as u64);
    rig.check();
}

#[test]
fn i2039_a_page_that_is_late_in_one_backend_comes_from_the_next() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let (first, second) = filled(&prompt);
    let mut rig = Rig::new(64, config(64));
    let a = rig.attach("first", &first, |backend| backend.settings.timeout = Duration::from_millis(60));
    let b = rig.attach("second", &second, |_| {});
    a.faults.hang_only.lock().insert(keys(&prompt)[4]);
    a.faults.hang_reads.store(true, Ordering::Release);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_storage, got(&b)), (10 * PAGE, 4), "the batch of the late call comes from the second");
    assert_eq!(rig.settle().host_quarantined_pages, 4, "and into other pages than the late call holds");
    rig.check();
    a.faults.hang_reads.store(false, Ordering::Release);
    assert_eq!(rig.cache.stats().host_quarantined_pages, 0);
    rig.cache.flush(Tiers::ALL);
    assert_eq!(rig.cache.stats().host_used_tokens, 0);
    rig.check();
}

#[test]
fn i27504_a_page_that_is_corrupt_in_one_backend_comes_from_the_next_and_heals() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let (first, second) = filled(&prompt);
    let (mut rig, a, b) = rig(&first, &second);
    let bad = keys(&prompt)[2];
    a.faults.flip.lock().insert(bad);
    assert_eq!(rig.run(&prompt).from_storage, 10 * PAGE);
    let stats = rig.settle();
    assert_eq!((stats.corrupt_pages, stats.healed_pages, got(&b)), (1, 1, 1));
    assert_eq!(a.calls.set_pages.load(Ordering::Relaxed), 1, "the right page is written in the place of the wrong one");
    assert!(first.lock().get(&bad) == second.lock().get(&bad));
    assert_eq!(b.calls.set_pages.load(Ordering::Relaxed), 0);
    rig.cache.flush(Tiers::ALL);
    assert_eq!((rig.run(&prompt).from_storage, got(&b)), (10 * PAGE, 1), "the first has it again");
    rig.settle();
    rig.check();
}

#[test]
fn i17521_a_backend_that_is_down_is_stood_in_for() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let (first, second) = filled(&prompt);
    let (mut rig, a, b) = rig(&first, &second);
    a.faults.fail_exists.store(true, Ordering::Release);
    for n in 0..4 {
        let grant = rig.run(&prompt);
        assert_eq!((grant.from_storage, grant.why.len(), got(&a)), (10 * PAGE, 0, 0));
        assert_eq!(got(&b), 10 * (n + 1));
        rig.cache.flush(Tiers::ALL);
        rig.settle();
    }
    assert_eq!(a.calls.exists.load(Ordering::Relaxed), 3, "after that it rests");
    let report = rig.cache.storage().guards("first").unwrap();
    assert!(report.reads.resting.is_some() && report.reads.skipped > 0, "{report:?}");
    let report = rig.cache.storage().guards("second").unwrap();
    assert_eq!((report.reads.resting, report.reads.failed), (None, 0));
    rig.check();
}

#[test]
fn i39701_a_read_that_says_so_is_made_again_for_the_pages_that_failed_alone() {
    let prompt = tokens(1, 4 * PAGE + 1);
    let (first, second) = filled(&prompt);
    let mut rig = Rig::new(64, config(64));
    let a = rig.attach("first", &first, |backend| backend.settings.retries = 2);
    let b = rig.attach("second", &second, |_| {});
    a.faults.fail_reads.store(2, Ordering::Release);
    assert_eq!(rig.run(&prompt).from_storage, 4 * PAGE);
    assert_eq!((got(&a), got(&b)), (4 + 3 + 2, 0), "each try delivers a page");
    assert_eq!(rig.cache.storage().guards("first").unwrap().reads.retried, 2);
    rig.settle();
    rig.check();
}

/// Each backend is asked once for a page, and then it is a miss.
#[test]
fn a_page_that_nobody_delivers_is_a_miss_for_the_first_reason() {
    let prompt = tokens(1, 8 * PAGE + 1);
    let (first, second) = filled(&prompt);
    let (mut rig, a, b) = rig(&first, &second);
    a.faults.flip.lock().insert(keys(&prompt)[4]);
    b.faults.vanish.lock().insert(keys(&prompt)[4]);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_storage, reasons(&grant)), (4 * PAGE, vec![MissReason::Corrupt]));
    assert_eq!(got(&b), 1);
    rig.settle();
    rig.check();
}

/// Pages alternate between backends, by what each of them has.
#[test]
fn holes_of_one_backend_are_filled_by_another() {
    let prompt = tokens(1, 12 * PAGE + 1);
    let (first, second) = filled(&prompt);
    for (number, key) in keys(&prompt).iter().enumerate() {
        let from = if [2, 3, 7, 11].contains(&number) { &first } else { &second };
        from.lock().remove(key);
    }
    let (mut rig, a, b) = rig(&first, &second);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_storage, got(&a), got(&b)), (12 * PAGE, 8, 4));
    rig.settle();
    assert_eq!((first.lock().len(), second.lock().len()), (8, 4), "nobody is given what the other has");
    rig.check();
}

#[test]
fn a_backend_that_leaves_in_the_middle_of_a_read_is_stood_in_for() {
    let prompt = tokens(1, 8 * PAGE + 1);
    let (first, second) = filled(&prompt);
    let (mut rig, a, b) = rig(&first, &second);
    a.faults.hang_only.lock().insert(keys(&prompt)[4]);
    a.faults.hang_reads.store(true, Ordering::Release);
    let id = rig.request(&prompt, &CacheNamespace::default());
    while a.calls.get.load(Ordering::Relaxed) < 2 {
        std::thread::yield_now();
    }
    assert!(rig.cache.storage().detached("first"));
    a.faults.fail_reads.store(1, Ordering::Release);
    a.faults.hang_reads.store(false, Ordering::Release);
    rig.wait_storage(id);
    let grant = rig.acquire(id, &prompt);
    assert_eq!(grant.from_storage, 8 * PAGE);
    assert!(got(&b) >= 3);
    rig.check_grant(&grant, &prompt, &CacheNamespace::default());
    rig.cache.abort(id, Vec::new());
    rig.settle();
    rig.check();
}

/// A backend that does not answer must not use up the time in which another one could.
#[test]
fn i2039_a_backend_that_hangs_leaves_time_for_the_next() {
    let prompt = tokens(1, 8 * PAGE + 1);
    let (first, second) = filled(&prompt);
    for hang_at in [0, 4] {
        let patient = CacheConfig {
            prefetch_policy: PrefetchPolicy::Timeout,
            prefetch_timeout_base: Duration::from_secs(3),
            ..config(64)
        };
        let mut rig = Rig::new(64, patient);
        let a = rig.attach("first", &first, |_| {});
        rig.attach("second", &second, |_| {});
        // Either the question hangs, or the read of the second half.
        a.faults.hang_only.lock().insert(keys(&prompt)[hang_at]);
        a.faults.hang_reads.store(true, Ordering::Release);
        let grant = rig.run(&prompt);
        assert_eq!((grant.from_storage, grant.why.len()), (8 * PAGE, 0), "hangs at page {hang_at}");
        a.faults.hang_reads.store(false, Ordering::Release);
        rig.settle();
        rig.check();
    }
}
