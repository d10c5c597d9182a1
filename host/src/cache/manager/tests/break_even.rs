//! Storage is never slower than computing.

use std::sync::atomic::Ordering;

use super::*;
use crate::cache::config::{BreakEvenMode, PolicyUpdate};
use crate::cache::types::Tiers;

fn filled(prompt: &[u32]) -> Store {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    rig.run(prompt);
    rig.settle();
    store
}

fn auto() -> CacheConfig {
    CacheConfig { break_even: BreakEvenMode::Auto, ..config(64) }
}

fn again(rig: &mut Rig, prompt: &[u32]) -> Grant {
    rig.cache.flush(Tiers::ALL);
    let grant = rig.run(prompt);
    rig.settle();
    grant
}

#[test]
fn what_computes_faster_than_it_loads_is_computed_once_both_are_known() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let (mut rig, backend) = Rig::with_storage(64, auto(), &store);
    let calls = |backend: &FakeBackend| {
        let calls = &backend.calls;
        (calls.exists.load(Ordering::Relaxed), calls.get_pages.load(Ordering::Relaxed))
    };
    assert_eq!(again(&mut rig, &prompt).from_storage, 10 * PAGE, "prefill is not measured");
    assert!(rig.cache.storage().guards("fake").unwrap().break_even.is_none());
    // A thousand million tokens a second.
    rig.cache.prefilled(1_000_000, 0, Duration::from_millis(1));
    let report = rig.cache.storage().guards("fake").unwrap().break_even.unwrap();
    assert_eq!(report.tokens, None, "{report:?}");
    let before = calls(&backend);
    for _ in 0..15 {
        let grant = again(&mut rig, &prompt);
        assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::NotWorthIt]));
    }
    assert_eq!(calls(&backend), before, "it is not even asked");
    assert_eq!(rig.cache.stats().unfulfilled_not_worth_tokens, 15 * 10 * PAGE as u64);
    let grant = again(&mut rig, &prompt);
    assert_eq!(
        (grant.from_storage, reasons(&grant)),
        (2 * PAGE, vec![MissReason::NotWorthIt]),
        "a few pages, to measure"
    );
    assert_eq!(rig.cache.stats().break_even_explored, 1);
    rig.check();
}

#[test]
fn what_loads_faster_is_loaded() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let (mut rig, _) = Rig::with_storage(64, auto(), &store);
    // A token in ten seconds.
    rig.cache.prefilled(16, 0, Duration::from_secs(160));
    for _ in 0..20 {
        assert_eq!(again(&mut rig, &prompt).from_storage, 10 * PAGE);
    }
    let report = rig.cache.storage().guards("fake").unwrap().break_even.unwrap();
    assert!(report.tokens.is_some_and(|tokens| tokens < 10), "{report:?}");
    assert_eq!(rig.cache.stats().unfulfilled_not_worth_tokens, 0);
    rig.check();
}

#[test]
fn it_is_off_unless_asked_for_and_may_change_at_run_time() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    rig.cache.prefilled(1_000_000, 0, Duration::from_millis(1));
    for _ in 0..3 {
        assert_eq!(again(&mut rig, &prompt).from_storage, 10 * PAGE);
    }
    let handle = rig.cache.storage();
    handle.update_policies(PolicyUpdate { break_even: Some(BreakEvenMode::Auto), ..PolicyUpdate::default() });
    assert_eq!(reasons(&again(&mut rig, &prompt)), [MissReason::NotWorthIt]);
    handle.update_policies(PolicyUpdate { break_even: Some(BreakEvenMode::Off), ..PolicyUpdate::default() });
    assert_eq!(again(&mut rig, &prompt).from_storage, 10 * PAGE);
}

/// The slow part of a hit is left to computing, the fast one is loaded; a backend that became faster is found out.
#[test]
fn a_backend_that_became_faster_is_noticed() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let (mut rig, backend) = Rig::with_storage(64, auto(), &store);
    *backend.faults.delay.lock() = Duration::from_millis(600);
    assert_eq!(again(&mut rig, &prompt).from_storage, 10 * PAGE);
    // A hundred tokens a second: the prompt takes 0.4 s.
    rig.cache.prefilled(1000, 0, Duration::from_secs(10));
    assert_eq!(reasons(&again(&mut rig, &prompt)), [MissReason::NotWorthIt]);
    *backend.faults.delay.lock() = Duration::ZERO;
    let noticed = (0..16 * 60).any(|_| again(&mut rig, &prompt).from_storage == 10 * PAGE);
    assert!(noticed, "{:?}", rig.cache.storage().guards("fake"));
    assert!(rig.cache.stats().break_even_explored > 0);
    rig.check();
}

#[test]
fn the_tail_of_a_slow_backend_is_computed_and_the_head_of_a_fast_one_loaded() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let (fast, slow) = (filled(&prompt), filled(&prompt));
    keys(&prompt)[6..].iter().for_each(|key| drop(fast.lock().remove(key)));
    let mut rig = Rig::new(64, auto());
    rig.attach("fast", &fast, |_| {});
    let b = rig.attach("slow", &slow, |_| {});
    *b.faults.delay.lock() = Duration::from_millis(600);
    assert_eq!(again(&mut rig, &prompt).from_storage, 10 * PAGE);
    // 16 tokens in 0.5 s against 0.6 s and more, 24 in 0.8 s against next to nothing.
    rig.cache.prefilled(300, 0, Duration::from_secs(10));
    let grant = again(&mut rig, &prompt);
    assert_eq!((grant.from_storage, reasons(&grant)), (6 * PAGE, vec![MissReason::NotWorthIt]));
    rig.check();
}

#[test]
fn i23309_no_wait_is_longer_than_computing_takes() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    for policy in [PrefetchPolicy::WaitComplete, PrefetchPolicy::Timeout] {
        let patient = CacheConfig { prefetch_policy: policy, prefetch_timeout_base: LONG, ..auto() };
        let (mut rig, backend) = Rig::with_storage(64, patient, &store);
        backend.faults.hang_reads.store(true, Ordering::Release);
        // A thousand tokens a second: 40 ms.
        rig.cache.prefilled(1000, 0, Duration::from_secs(1));
        let id = rig.request(&prompt, &CacheNamespace::default());
        let Prefetch::Waiting { until } = rig.cache.poll(id) else { panic!("it does not wait") };
        assert!(until <= Instant::now() + Duration::from_millis(41), "{policy}");
        rig.wait_storage(id);
        let grant = rig.acquire(id, &prompt);
        assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::BackendSlow]));
        rig.cache.abort(id, Vec::new());
        backend.faults.hang_reads.store(false, Ordering::Release);
        rig.settle();
        rig.check();
    }
}

#[test]
fn reads_that_never_end_in_time_make_no_backend_fast() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&prompt);
    let mut rig = Rig::new(64, CacheConfig { prefetch_timeout_base: LONG, ..auto() });
    let backend = rig.attach("fake", &store, |backend| backend.settings.timeout = Duration::from_millis(60));
    // A page in 7 ms. Reads of those in front come, the others not within 60 ms: all ten would be worth it, what came is not.
    rig.cache.prefilled(40_000, 0, Duration::from_secs(70));
    backend.faults.hang_only.lock().extend(&keys(&prompt)[1..]);
    backend.faults.hang_reads.store(true, Ordering::Release);
    assert_eq!(reasons(&again(&mut rig, &prompt)), [MissReason::BackendSlow]);
    backend.faults.hang_reads.store(false, Ordering::Release);
    rig.settle();
    assert_eq!(
        reasons(&again(&mut rig, &prompt)),
        [MissReason::NotWorthIt],
        "{:?}",
        rig.cache.storage().guards("fake")
    );
    rig.check();
}
