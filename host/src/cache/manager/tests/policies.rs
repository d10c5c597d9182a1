//! How long requests wait, and who has to leave.

use std::sync::atomic::Ordering;

use super::*;
use crate::cache::config::{EvictionPolicy, PolicyUpdate};
use crate::cache::types::Tiers;

fn filled(prompts: &[&[u32]]) -> Store {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(128, config(128), &store);
    for prompt in prompts {
        rig.run(prompt);
    }
    rig.settle();
    store
}

#[test]
fn best_effort_never_waits() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&[&prompt]);
    let hasty = CacheConfig { prefetch_policy: PrefetchPolicy::BestEffort, ..config(64) };
    let (mut rig, backend) = Rig::with_storage(64, hasty, &store);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let id = rig.request(&prompt, &CacheNamespace::default());
    assert_eq!(rig.cache.poll(id), Prefetch::Ready);
    let grant = rig.acquire(id, &prompt);
    assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::BackendSlow]));
    rig.complete(id, &grant, &prompt, &CacheNamespace::default());
    backend.faults.hang_reads.store(false, Ordering::Release);
    rig.settle();
    rig.check();
}

#[test]
fn the_timeout_policy_waits_as_long_as_the_prompt_is_worth() {
    let prompt = tokens(1, 16 * PAGE + 1);
    let store = filled(&[&prompt]);
    let patient = CacheConfig {
        prefetch_policy: PrefetchPolicy::Timeout,
        prefetch_timeout_base: Duration::from_millis(40),
        // 64 tokens are missing: a sixteenth of this.
        prefetch_timeout_per_ki_token: Duration::from_millis(640),
        ..config(64)
    };
    let (mut rig, backend) = Rig::with_storage(64, patient, &store);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let id = rig.request(&prompt, &CacheNamespace::default());
    std::thread::sleep(Duration::from_millis(30));
    let looked = Instant::now();
    let Prefetch::Waiting { until } = rig.cache.poll(id) else { panic!("it does not wait") };
    let allowed = until - looked;
    assert!(allowed >= Duration::from_millis(79) && allowed < Duration::from_millis(200), "{allowed:?}");
    rig.wait_storage(id);
    assert!(Instant::now() >= until);
    let grant = rig.acquire(id, &prompt);
    assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::BackendSlow]));
    rig.cache.abort(id, Vec::new());
    backend.faults.hang_reads.store(false, Ordering::Release);
    rig.settle();
    rig.check();
}

/// Pages that came in before the time was over are kept.
#[test]
fn a_cut_keeps_what_has_come() {
    let prompt = tokens(1, 16 * PAGE + 1);
    let store = filled(&[&prompt]);
    let patient = CacheConfig {
        prefetch_policy: PrefetchPolicy::Timeout,
        prefetch_timeout_base: Duration::from_millis(400),
        ..config(64)
    };
    let (mut rig, backend) = Rig::with_storage(64, patient, &store);
    // Batches have four pages; the third one hangs.
    backend.faults.hang_only.lock().insert(keys(&prompt)[8]);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_storage, reasons(&grant)), (8 * PAGE, vec![MissReason::BackendSlow]));
    backend.faults.hang_reads.store(false, Ordering::Release);
    let stats = rig.settle();
    assert_eq!(stats.unfulfilled_deadline_tokens, 8 * PAGE as u64);
    rig.check();
}

/// Waiting for everything ends with the backend's own deadline.
#[test]
fn wait_complete_is_bounded() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(&[&prompt]);
    let mut rig = Rig::new(64, config(64));
    let backend = rig.attach("fake", &store, |backend| backend.settings.timeout = Duration::from_millis(50));
    backend.faults.hang_reads.store(true, Ordering::Release);
    let began = Instant::now();
    let grant = rig.run(&prompt);
    assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::BackendSlow]));
    assert!(began.elapsed() < Duration::from_secs(5));
    backend.faults.hang_reads.store(false, Ordering::Release);
    rig.settle();
    rig.check();
}

/// Host pages are taken for what storage has, not for what is asked.
#[test]
fn i31398_host_pages_are_taken_for_the_hit_alone() {
    let prompt = tokens(1, 60 * PAGE + 1);
    let store = filled(&[&prompt[..4 * PAGE + 1]]);
    let (mut rig, backend) = Rig::with_storage(128, config(8), &store);
    backend.faults.hang_only.lock().insert(keys(&prompt)[0]);
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    assert_eq!(rig.acquire(id, &prompt).from_storage, 4 * PAGE);
    assert_eq!(rig.cache.stats().host_used_tokens, 4 * PAGE as u64);
    rig.cache.abort(id, Vec::new());
    rig.settle();
    rig.check();
}

#[test]
fn a_hit_larger_than_the_host_pool_is_fetched_in_part() {
    let prompt = tokens(1, 20 * PAGE + 1);
    let store = filled(&[&prompt]);
    let (mut rig, _) = Rig::with_storage(128, config(8), &store);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_storage, reasons(&grant)), (8 * PAGE, vec![MissReason::HostFull]));
    assert_eq!(rig.settle().unfulfilled_host_capacity_tokens, 12 * PAGE as u64);
    rig.check();
}

/// Prefetches make room by evicting, and the number of those that run is bounded by the host pool.
#[test]
fn running_prefetches_are_bounded_and_give_their_share_back() {
    let prompts: Vec<Vec<u32>> = (1..=4).map(|n| tokens(n, 8 * PAGE + 1)).collect();
    let slices: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let store = filled(&slices);
    let (mut rig, backend) = Rig::with_storage(128, config(24), &store);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let ids: Vec<RequestId> = prompts.iter().map(|p| rig.request(p, &CacheNamespace::default())).collect();
    // Half of 24 pages: two fetches of 8 pass the gate, of which the second one fills it.
    assert_eq!(rig.cache.stats().prefetches_running, 2);
    assert_eq!(rig.cache.stats().prefetch_rate_limited, 2);
    assert_eq!(rig.cache.poll(ids[2]), Prefetch::Ready);
    let grant = rig.acquire(ids[2], &prompts[2]);
    assert_eq!(reasons(&grant), [MissReason::HostFull]);
    for &id in &ids {
        rig.cache.abort(id, Vec::new());
    }
    backend.faults.hang_reads.store(false, Ordering::Release);
    assert_eq!(rig.settle().prefetches_running, 0);
    rig.check();
    for prompt in &prompts {
        assert_eq!(rig.run(prompt).from_storage, 8 * PAGE, "evicting makes room");
    }
    rig.settle();
    rig.check();
}

/// An abort in the middle of a fetch leaves no entry and no share of the limit behind.
#[test]
fn i30053_i9927_i37103_an_abort_gives_its_share_of_the_limit_back() {
    let prompt = tokens(1, 8 * PAGE + 1);
    let store = filled(&[&prompt]);
    let (mut rig, backend) = Rig::with_storage(64, config(16), &store);
    for _ in 0..10 {
        backend.faults.hang_reads.store(true, Ordering::Release);
        let id = rig.request(&prompt, &CacheNamespace::default());
        assert!(matches!(rig.cache.poll(id), Prefetch::Waiting { .. }), "the limit was not reached");
        rig.cache.abort(id, Vec::new());
        backend.faults.hang_reads.store(false, Ordering::Release);
        assert_eq!(rig.settle().prefetches_running, 0);
        rig.check();
    }
    assert_eq!(rig.run(&prompt).from_storage, 8 * PAGE);
    assert_eq!(rig.cache.stats().prefetch_rate_limited, 0);
}

/// The end of a fetch wakes the scheduler; nobody has to look again and again.
#[test]
fn i32724_the_end_of_a_fetch_is_an_event() {
    let prompt = tokens(1, 8 * PAGE + 1);
    let store = filled(&[&prompt]);
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.cache.tick();
    while rig.woken.try_recv().is_ok() {}
    let release = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        backend.faults.hang_reads.store(false, Ordering::Release);
    });
    let mut looks = 0;
    while let Prefetch::Waiting { until } = rig.cache.poll(id) {
        looks += 1;
        assert!(rig.woken.recv_deadline(until).is_ok(), "slept to the deadline of the policy");
    }
    release.join().unwrap();
    assert!(looks <= 4, "one look for each step of the fetch, not {looks}");
    assert_eq!(rig.acquire(id, &prompt).from_storage, 8 * PAGE);
}

#[test]
fn policies_change_while_running() {
    let prompt = tokens(1, 8 * PAGE + 1);
    let store = filled(&[&prompt]);
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let handle = rig.cache.storage();
    handle
        .update_policies(PolicyUpdate { prefetch_policy: Some(PrefetchPolicy::BestEffort), ..PolicyUpdate::default() });
    let id = rig.request(&prompt, &CacheNamespace::default());
    assert_eq!(rig.cache.poll(id), Prefetch::Ready, "best effort does not wait");
    rig.cache.abort(id, Vec::new());
    backend.faults.hang_reads.store(false, Ordering::Release);
    handle.update_policies(PolicyUpdate { prefetch_threshold: Some(9 * PAGE), ..PolicyUpdate::default() });
    assert_eq!(reasons(&rig.run(&prompt)), [MissReason::TooShort]);
}

#[test]
fn lru_keeps_the_last_used_and_lfu_the_most_used() {
    for (policy, kept) in [(EvictionPolicy::Lru, 2), (EvictionPolicy::Lfu, 1)] {
        let mut rig = Rig::new(24, CacheConfig { eviction: policy, ..config(0) });
        let often = tokens(1, 8 * PAGE + 1);
        let late = tokens(2, 8 * PAGE + 1);
        for _ in 0..4 {
            rig.run(&often);
        }
        rig.run(&late);
        // 16 of 24 pages are cached; 12 more need 4 of them.
        rig.run(&tokens(3, 12 * PAGE));
        let lookup = |rig: &mut Rig, prompt: &[u32]| {
            let id = rig.request(prompt, &CacheNamespace::default());
            let tokens = rig.acquire(id, prompt).tokens;
            rig.cache.abort(id, Vec::new());
            tokens / PAGE
        };
        let found = (lookup(&mut rig, &often), lookup(&mut rig, &late));
        assert_eq!(found, if kept == 1 { (8, 4) } else { (4, 8) }, "{policy}: the tail of the other one left");
        rig.check();
    }
}

/// What a request of a higher priority inserted stays, however long ago that was; what came first leaves first; what was used again stays.
#[test]
fn priority_fifo_and_slru_decide_who_leaves() {
    for (policy, left) in [(EvictionPolicy::Priority, 2), (EvictionPolicy::Fifo, 1), (EvictionPolicy::Slru, 3)] {
        let mut rig = Rig::new(28, CacheConfig { eviction: policy, ..config(0) });
        let prompts: Vec<Vec<u32>> = (1..=3).map(|n| tokens(n, 8 * PAGE + 1)).collect();
        let run = |rig: &mut Rig, prompt: &[u32], priority: i32| {
            let id = rig.next;
            rig.next += 1;
            rig.cache.begin(id, prompt, &CacheNamespace::default(), &ReuseHints { priority, ..ReuseHints::default() });
            let grant = rig.acquire(id, prompt);
            rig.complete(id, &grant, prompt, &CacheNamespace::default());
        };
        for (prompt, priority) in prompts.iter().zip([7, 1, 4]) {
            run(&mut rig, prompt, priority);
        }
        run(&mut rig, &prompts[1], 2);
        run(&mut rig, &prompts[0], 0);
        // 24 of 28 pages are cached; 8 more need 4 of them.
        run(&mut rig, &tokens(9, 8 * PAGE), 9);
        let found: Vec<usize> = prompts
            .iter()
            .map(|prompt| {
                let id = rig.request(prompt, &CacheNamespace::default());
                let tokens = rig.acquire(id, prompt).tokens;
                rig.cache.abort(id, Vec::new());
                tokens / PAGE
            })
            .collect();
        let expected: Vec<usize> = (1..=3).map(|n| if n == left { 4 } else { 8 }).collect();
        assert_eq!(found, expected, "{policy}");
        rig.check();
    }
}

/// Locked pages stay; what is left when they are all locked is none.
#[test]
fn running_requests_keep_their_pages() {
    let mut rig = Rig::new(16, config(16));
    let prompt = tokens(1, 10 * PAGE + 1);
    rig.run(&prompt);
    rig.settle();
    let id = rig.request(&prompt, &CacheNamespace::default());
    let grant = rig.acquire(id, &prompt);
    assert_eq!(rig.cache.available_pages(), 6);
    assert_eq!(rig.cache.alloc_pages(7), None);
    let flushed = rig.cache.flush(Tiers::ALL);
    assert_eq!((flushed.device_freed, flushed.device_kept), (0, 10));
    rig.check_grant(&grant, &prompt, &CacheNamespace::default());
    rig.complete(id, &grant, &prompt, &CacheNamespace::default());
    let flushed = rig.cache.flush(Tiers::ALL);
    assert_eq!((flushed.device_kept, flushed.host_kept), (0, 0));
    rig.check();
}

/// A load that does not fit waits for those who hold pages, and takes what fits when nobody does.
#[test]
fn a_load_waits_for_room_or_takes_what_fits() {
    let long = tokens(1, 12 * PAGE + 1);
    let store = filled(&[&long]);
    let (mut rig, _) = Rig::with_storage(16, config(32), &store);
    let shared = CacheNamespace::default();
    let other = tokens(2, 8 * PAGE + 1);
    let runner = rig.request(&other, &shared);
    rig.wait_storage(runner);
    let grant = rig.acquire(runner, &other);
    let mut pages = grant.pages;
    rig.extend(&mut pages, &other, &shared);
    let waiting = rig.request(&long, &shared);
    rig.wait_storage(waiting);
    assert!(matches!(rig.cache.acquire(waiting, &long), Ok(Acquire::NoSpace)));
    rig.check();
    rig.cache.finish(runner, &other, pages);
    let grant = rig.acquire(waiting, &long);
    assert_eq!(grant.from_storage, 12 * PAGE);
    rig.check_grant(&grant, &long, &shared);
    rig.cache.abort(waiting, Vec::new());
    rig.settle();
    rig.check();
    drop(rig);
    let (mut rig, _) = Rig::with_storage(8, config(32), &store);
    let id = rig.request(&long, &shared);
    rig.wait_storage(id);
    let grant = rig.acquire(id, &long);
    assert_eq!(grant.tokens, 8 * PAGE, "as much as the device holds");
    rig.check_grant(&grant, &long, &shared);
    rig.cache.abort(id, Vec::new());
    rig.settle();
    rig.check();
}
