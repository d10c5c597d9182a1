//! What is reused, from which tier, and what is not.

use super::*;
use crate::cache::types::{Miss, Tiers};

#[test]
fn a_prompt_of_whole_pages_hits_all_but_the_one_with_the_last_token() {
    let mut rig = Rig::new(64, config(64));
    let prompt = tokens(1, 8 * PAGE);
    let cold = rig.run(&prompt);
    assert_eq!((cold.tokens, reasons(&cold)), (0, vec![MissReason::StorageOff]));
    let again = rig.run(&prompt);
    assert_eq!((again.from_device, again.why.len()), (7 * PAGE, 0));
    let longer = tokens(1, 8 * PAGE + 1);
    assert_eq!(rig.run(&longer).from_device, 8 * PAGE, "one token more frees the last page");
    let shorter = &prompt[..3 * PAGE + 2];
    assert_eq!(rig.run(shorter).from_device, 3 * PAGE, "a partial page is never shared");
    rig.check();
}

#[test]
fn every_tier_gives_the_same_bytes() {
    let store = Store::default();
    let prompt = tokens(1, 10 * PAGE + 1);
    {
        let (mut rig, _) = Rig::with_storage(64, config(64), &store);
        rig.run(&prompt);
        rig.settle();
        assert_eq!(rig.run(&prompt).from_device, 10 * PAGE);
        let flushed = rig.cache.flush(Tiers::DEVICE);
        assert_eq!((flushed.device_freed, flushed.device_kept), (10, 0));
        let host = rig.run(&prompt);
        assert_eq!((host.from_host, host.tokens), (10 * PAGE, 10 * PAGE));
        rig.check();
    }
    // A new process.
    let (mut rig, backend) = Rig::with_storage(64, config(64), &store);
    let stored = rig.run(&prompt);
    assert_eq!((stored.from_storage, stored.tokens), (10 * PAGE, 10 * PAGE));
    assert_eq!(backend.calls.get_pages.load(std::sync::atomic::Ordering::Relaxed), 10);
    let mixed = [&prompt[..5 * PAGE], &tokens(2, 3 * PAGE)].concat();
    assert_eq!(rig.run(&mixed).from_device, 5 * PAGE);
    rig.settle();
    rig.check();
    let stats = rig.cache.stats();
    assert_eq!((stats.granted_storage_tokens, stats.granted_device_tokens), (10 * PAGE as u64, 5 * PAGE as u64));
}

#[test]
fn the_end_of_a_prefix_may_come_from_three_tiers() {
    let store = Store::default();
    let prompt = tokens(1, 12 * PAGE + 1);
    {
        let (mut rig, _) = Rig::with_storage(64, config(64), &store);
        rig.run(&prompt);
        rig.settle();
    }
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    rig.run(&prompt[..8 * PAGE + 1]);
    rig.cache.flush(Tiers::DEVICE);
    // Device: two pages; host: six more; storage: the last four.
    rig.run(&prompt[..2 * PAGE + 1]);
    let grant = rig.run(&prompt);
    assert_eq!((grant.from_device, grant.from_host, grant.from_storage), (2 * PAGE, 6 * PAGE, 4 * PAGE));
    rig.check();
}

/// Keys are anchored at the start of the sequence.
#[test]
fn a_prompt_equal_to_anothers_tail_never_hits_it() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    let prompt = tokens(1, 12 * PAGE + 1);
    rig.run(&prompt);
    rig.settle();
    let tail = &prompt[4 * PAGE..];
    let grant = rig.run(tail);
    assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::NotStored]));
    rig.check();
}

/// The salt separates tenants in the tree, on the host and in storage.
#[test]
fn i26747_cache_salt_separates_storage_keys() {
    let store = Store::default();
    let prompt = tokens(1, 6 * PAGE + 1);
    {
        let (mut rig, _) = Rig::with_storage(64, config(64), &store);
        rig.run_in(&prompt, &salt("tenant-a"));
        let grant = rig.run_in(&prompt, &salt("tenant-b"));
        assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::NamespaceDiffers]));
        assert_eq!(rig.run(&prompt).tokens, 0);
        assert_eq!(rig.run_in(&prompt, &salt("")).tokens, 6 * PAGE, "an empty salt is none");
        rig.settle();
        rig.check();
    }
    assert_eq!(store.lock().len(), 3 * 6);
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    let stranger = rig.run_in(&prompt, &salt("tenant-c"));
    assert_eq!(stranger.tokens, 0);
    assert_eq!(rig.run_in(&prompt, &salt("tenant-a")).from_storage, 6 * PAGE);
    rig.check();
}

#[test]
fn i24638_adapters_do_not_share_with_salts() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_storage(64, config(64), &store);
    let prompt = tokens(1, 6 * PAGE + 1);
    let adapter = CacheNamespace::new(Some("x".to_owned()), None);
    rig.run_in(&prompt, &adapter);
    assert_eq!(rig.run_in(&prompt, &salt("x")).tokens, 0);
    assert_eq!(rig.run_in(&prompt, &adapter).tokens, 6 * PAGE);
    rig.check();
}

#[test]
fn concurrent_requests_of_one_prefix_load_it_once() {
    let store = Store::default();
    let prompt = tokens(1, 12 * PAGE + 1);
    {
        let (mut rig, _) = Rig::with_storage(64, config(64), &store);
        rig.run(&prompt);
        rig.settle();
    }
    let (mut rig, backend) = Rig::with_storage(128, config(64), &store);
    *backend.faults.delay.lock() = Duration::from_millis(20);
    let shared = CacheNamespace::default();
    let short = prompt[..6 * PAGE + 1].to_vec();
    let other = [&prompt[..6 * PAGE], &tokens(7, 4 * PAGE)[..]].concat();
    let prompts = [&short, &prompt, &prompt, &other];
    let ids: Vec<RequestId> = prompts.iter().map(|prompt| rig.request(prompt, &shared)).collect();
    let mut stored = Vec::new();
    for (&id, prompt) in ids.iter().zip(prompts) {
        rig.wait_storage(id);
        let grant = rig.acquire(id, prompt);
        rig.check_grant(&grant, prompt, &shared);
        stored.push(grant.tokens);
        rig.complete(id, &grant, prompt, &shared);
    }
    assert_eq!(stored, [6 * PAGE, 12 * PAGE, 12 * PAGE, 6 * PAGE]);
    let read = backend.calls.get_pages.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(read, 12, "each page is read once");
    let stats = rig.settle();
    assert!(stats.prefetch_shared >= 3, "{stats:?}");
    rig.check();
}

#[test]
fn who_comes_while_a_prefix_comes_in_waits_for_the_rest_of_it() {
    use std::sync::atomic::Ordering;
    let store = Store::default();
    let prompt = tokens(1, 12 * PAGE + 1);
    {
        let (mut rig, _) = Rig::with_storage(64, config(64), &store);
        rig.run(&prompt);
        rig.settle();
    }
    // What is left is less than a fetch of its own would be made for.
    let (mut rig, backend) = Rig::with_storage(128, CacheConfig { prefetch_threshold: 6 * PAGE, ..config(64) }, &store);
    backend.faults.hang_only.lock().insert(keys(&prompt)[8]);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let shared = CacheNamespace::default();
    let first = rig.request(&prompt, &shared);
    let second = 1000;
    let limit = Instant::now() + LONG;
    loop {
        let admission = rig.cache.begin(second, &prompt, &shared, &ReuseHints::default());
        assert!(admission.prefetching, "{admission:?}");
        if admission.host_tokens == 8 * PAGE {
            break;
        }
        assert!(Instant::now() < limit, "the first pages do not come");
        std::thread::sleep(Duration::from_millis(1));
    }
    backend.faults.hang_reads.store(false, Ordering::Release);
    for id in [first, second] {
        rig.wait_storage(id);
        let grant = rig.acquire(id, &prompt);
        rig.check_grant(&grant, &prompt, &shared);
        assert_eq!(grant.tokens, 12 * PAGE);
        rig.complete(id, &grant, &prompt, &shared);
    }
    assert_eq!(backend.calls.get_pages.load(Ordering::Relaxed), 12, "each page is read once");
    rig.settle();
    rig.check();
}

#[test]
fn what_is_under_the_threshold_is_not_asked_for() {
    let store = Store::default();
    let prompt = tokens(1, 8 * PAGE + 1);
    {
        let (mut rig, _) = Rig::with_storage(64, config(64), &store);
        rig.run(&prompt[..3 * PAGE + 1]);
        rig.settle();
    }
    let cautious = CacheConfig { prefetch_threshold: 4 * PAGE, ..config(64) };
    let (mut rig, backend) = Rig::with_storage(64, cautious, &store);
    let grant = rig.run(&prompt[..3 * PAGE + 1]);
    assert_eq!(reasons(&grant), [MissReason::TooShort]);
    assert_eq!(backend.calls.exists.load(std::sync::atomic::Ordering::Relaxed), 0);
    // Long enough to ask, but storage has too little.
    let grant = rig.run(&prompt[3 * PAGE..]);
    assert_eq!(reasons(&grant), [MissReason::NotStored]);
    rig.settle();
    rig.cache.flush(Tiers::ALL);
    let grant = rig.run(&prompt);
    assert_eq!(grant.tokens, 0);
    assert_eq!(
        grant.why,
        [
            Miss { start: 0, end: 3 * PAGE, reason: MissReason::TooShort },
            Miss { start: 3 * PAGE, end: 8 * PAGE, reason: MissReason::NotStored },
        ]
    );
    assert_eq!(rig.cache.stats().unfulfilled_below_threshold_tokens, 3 * PAGE as u64);
    rig.check();
}

#[test]
fn evicted_prefixes_are_named() {
    let mut rig = Rig::new(16, CacheConfig { host_pages: 0, ..config(0) });
    let first = tokens(1, 8 * PAGE + 1);
    rig.run(&first);
    rig.run(&tokens(2, 12 * PAGE + 1));
    let grant = rig.run(&first);
    assert!(grant.tokens < 8 * PAGE);
    assert_eq!(reasons(&grant), [MissReason::Evicted]);
    rig.check();
}

#[test]
fn a_reuse_limit_leaves_the_rest_to_be_computed() {
    let mut rig = Rig::new(64, config(64));
    let prompt = tokens(1, 8 * PAGE + 1);
    rig.run(&prompt);
    let hints = ReuseHints { reuse_limit: Some(3 * PAGE + 2), ..ReuseHints::default() };
    rig.cache.begin(900, &prompt, &CacheNamespace::default(), &hints);
    let grant = rig.acquire(900, &prompt);
    assert_eq!((grant.tokens, grant.why.len()), (3 * PAGE, 0));
    rig.complete(900, &grant, &prompt, &CacheNamespace::default());
    rig.check();
}

/// Two requests compute the same pages side by side: the tree keeps one copy, both go on with it.
#[test]
fn pages_computed_twice_are_kept_once() {
    let mut rig = Rig::new(64, config(64));
    let prompt = tokens(1, 6 * PAGE + 2);
    let shared = CacheNamespace::default();
    let (a, b) = (rig.request(&prompt, &shared), rig.request(&prompt, &shared));
    let (grant_a, grant_b) = (rig.acquire(a, &prompt), rig.acquire(b, &prompt));
    let (mut pages_a, mut pages_b) = (grant_a.pages.clone(), grant_b.pages.clone());
    rig.extend(&mut pages_a, &prompt, &shared);
    rig.extend(&mut pages_b, &prompt, &shared);
    rig.cache.commit(a, &prompt, &mut pages_a, &mut []).unwrap();
    // The second commits in two chunks, of which the first ends inside the first's node.
    rig.cache.commit(b, &prompt[..4 * PAGE], &mut pages_b, &mut []).unwrap();
    assert_eq!(pages_a[..4], pages_b[..4]);
    rig.check();
    rig.cache.commit(b, &prompt, &mut pages_b, &mut []).unwrap();
    assert_eq!(pages_a[..6], pages_b[..6]);
    assert_ne!(pages_a[6], pages_b[6], "the partial pages stay apart");
    rig.check();
    rig.cache.finish(a, &prompt, pages_a);
    rig.cache.finish(b, &prompt, pages_b);
    rig.settle();
    rig.check();
    assert_eq!(rig.cache.stats().device_used_tokens, 6 * PAGE as u64);
}

/// A sequence that grows a page at a time ends up as few nodes, and its pages are all found.
#[test]
fn decoding_page_by_page_is_found_again_as_one_prefix() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_storage(128, config(128), &store);
    let all = tokens(1, 40 * PAGE + 1);
    let shared = CacheNamespace::default();
    let id = rig.request(&all[..PAGE], &shared);
    rig.wait_storage(id);
    let grant = rig.acquire(id, &all[..PAGE]);
    let mut pages = grant.pages.clone();
    for end in (PAGE..all.len()).step_by(2) {
        rig.extend(&mut pages, &all[..end], &shared);
        // The page under way goes on being written.
        rig.write(pages[(end - 1) / PAGE], &content(&all[..end], &shared));
        rig.cache.commit(id, &all[..end], &mut pages, &mut []).unwrap();
    }
    rig.extend(&mut pages, &all, &shared);
    rig.cache.finish(id, &all, pages);
    rig.settle();
    rig.check();
    assert!(rig.cache.stats().tree_nodes <= 4, "{:?}", rig.cache.stats().tree_nodes);
    let sets = backend.calls.set.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(backend.calls.set_pages.load(std::sync::atomic::Ordering::Relaxed), 40, "{sets} calls");
    assert_eq!(rig.run(&all).from_device, 40 * PAGE);
    drop(rig);
    let (mut rig, _) = Rig::with_storage(128, config(128), &store);
    assert_eq!(rig.run(&all).from_storage, 40 * PAGE);
}
