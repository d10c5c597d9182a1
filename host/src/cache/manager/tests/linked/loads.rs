//! From the question what storage has to the verdict.

use super::*;
use crate::cache::types::Miss;

#[test]
fn l01_what_is_computed_is_offloaded_at_once_and_there_is_no_host_tier() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    let prompt = tokens(1, 10 * PAGE + 1);
    let (grant, settled) = rig.run_linked(&prompt);
    assert_eq!((grant.tokens, settled), (0, None));
    let stats = rig.settle();
    assert_eq!(store.lock().len(), 10);
    assert_eq!(backend.calls.offload_pages.load(Ordering::Relaxed), 10);
    assert_eq!((stats.host_total_tokens, stats.host_used_tokens, stats.host_backup_tokens), (0, 0, 0));
    assert_eq!((stats.backuped_tokens, stats.transit_total_tokens), (10 * PAGE as u64, 32 * PAGE as u64));
    rig.assert_quiet();
}

#[test]
fn l19_what_one_offloads_another_loads_and_then_has_on_the_device() {
    let prompt = tokens(1, 10 * PAGE + 3);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    let (grant, settled) = rig.run_linked(&prompt);
    assert_eq!((grant.from_device, grant.from_host, grant.from_storage), (0, 0, 10 * PAGE));
    assert_eq!(settled, Some(Settled { tokens: 10 * PAGE, came: 10 * PAGE, state: None, reason: None }));
    assert!(grant.why.is_empty(), "{:?}", grant.why);
    let (again, none) = rig.run_linked(&prompt);
    assert_eq!((again.from_device, none), (10 * PAGE, None));
    assert_eq!(backend.calls.load_pages.load(Ordering::Relaxed), 10);
    rig.assert_quiet();
}

/// A prompt of whole pages: its last token is computed, so its last page is not loaded.
#[test]
fn l19_a_prompt_of_whole_pages_comes_but_for_its_last_page() {
    let prompt = tokens(1, 10 * PAGE);
    let store = stored(&prompt);
    let (mut rig, _) = Rig::with_linker(64, linked(32), &store);
    let (grant, settled) = rig.run_linked(&prompt);
    assert_eq!((grant.from_storage, settled.map(|settled| settled.came)), (9 * PAGE, Some(9 * PAGE)));
    rig.assert_quiet();
}

#[test]
fn l20_what_was_loaded_is_not_offered_again() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    let longer = [&prompt[..10 * PAGE], &tokens(2, 3 * PAGE + 1)].concat();
    rig.run_linked(&longer);
    rig.settle();
    assert_eq!(backend.calls.offload_pages.load(Ordering::Relaxed), 3, "only what was computed");
    assert_eq!(store.lock().len(), 13);
    rig.assert_quiet();
}

#[test]
fn l31_a_prompt_of_one_page_is_not_asked_for() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_linker(64, CacheConfig { prefetch_threshold: 1, ..linked(32) }, &store);
    let prompt = tokens(1, PAGE);
    rig.run_linked(&prompt);
    rig.cache.flush(Tiers::ALL);
    let (grant, _) = rig.run_linked(&prompt);
    assert_eq!((grant.tokens, backend.calls.lookups.load(Ordering::Relaxed)), (0, 0));
    rig.assert_quiet();
}

/// G8: only what is not on the device.
#[test]
fn g08_pages_on_the_device_are_neither_asked_for_nor_loaded() {
    let prompt = tokens(1, 12 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    rig.run_linked(&prompt[..4 * PAGE + 1]);
    let before = backend.calls.load_pages.load(Ordering::Relaxed);
    let (grant, settled) = rig.run_linked(&prompt);
    assert_eq!((grant.from_device, grant.from_storage), (4 * PAGE, 8 * PAGE));
    assert_eq!(settled.map(|settled| settled.came), Some(8 * PAGE));
    assert_eq!(backend.calls.load_pages.load(Ordering::Relaxed) - before, 8);
    let asked = backend.calls.chains.lock().clone();
    assert!(asked.iter().all(|chain| keys(&prompt).starts_with(chain)), "chains begin at the start of the sequence");
    rig.assert_quiet();
}

/// G3: the answer stays with the request.
#[test]
fn g03_storage_is_asked_once_however_often_a_request_is_looked_at() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    for _ in 0..20 {
        assert_eq!(rig.cache.poll(id), Prefetch::Ready);
        let grant = rig.acquire(id, &prompt);
        assert_eq!(grant.from_storage, 10 * PAGE);
        // There was no room for what was to follow, say.
        rig.cache.preempt(id, &[], grant.pages);
    }
    assert_eq!(backend.calls.lookups.load(Ordering::Relaxed), 1);
    assert_eq!(backend.calls.loads.load(Ordering::Relaxed), 0, "a load that never started asks for nothing");
    rig.cache.abort(id, Vec::new());
    rig.assert_quiet();
}

/// What the answer stands on may leave the device while the request waits.
#[test]
fn g03_the_question_is_asked_anew_when_the_device_has_less() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    rig.run_linked(&prompt[..5 * PAGE + 1]);
    let before = backend.calls.lookups.load(Ordering::Relaxed);
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    rig.settle();
    rig.cache.flush(Tiers::ALL);
    rig.wait_storage(id);
    let grant = rig.acquire(id, &prompt);
    assert_eq!((grant.from_device, grant.from_storage), (0, 10 * PAGE));
    assert_eq!(backend.calls.lookups.load(Ordering::Relaxed) - before, 2);
    rig.cache.abort(id, grant.pages);
    rig.assert_quiet();
}

/// Loads of one turn start as one batch; each has its own verdict.
#[test]
fn l37_one_bad_load_of_a_batch_leaves_the_others_alone() {
    let (one, two) = (tokens(1, 6 * PAGE + 1), tokens(2, 6 * PAGE + 1));
    let store = stored(&one);
    store.lock().extend(stored(&two).lock().drain());
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    backend.faults.vanish.lock().insert(keys(&one)[2]);
    let ids = [&one, &two].map(|prompt| rig.request(prompt, &CacheNamespace::default()));
    ids.iter().for_each(|&id| rig.wait_storage(id));
    let grants = [(ids[0], &one), (ids[1], &two)].map(|(id, prompt)| rig.acquire(id, prompt));
    rig.cache.start_loads();
    let came = [(0, &one), (1, &two)].map(|(i, prompt)| {
        let mut pages = grants[i].pages.clone();
        let settled = rig.settled(ids[i], &grants[i], prompt, &mut pages);
        rig.cache.abort(ids[i], pages);
        (settled.came, settled.reason)
    });
    assert_eq!(came, [(2 * PAGE, Some(MissReason::Evicted)), (6 * PAGE, None)]);
    assert_eq!(*backend.calls.batches.lock(), [ids.to_vec()]);
    rig.assert_quiet();
}

/// The gates open one by one, and a closed one says so without an error.
#[test]
fn l39_each_layer_has_a_gate_and_waiting_never_fails() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    *backend.faults.layers_open.lock() = Some(1);
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    let grant = rig.acquire(id, &prompt);
    rig.cache.start_loads();
    let arriving = grant.arriving.clone().unwrap();
    assert_eq!(arriving.wait(0, Instant::now() + LONG), Gate::Open);
    assert_eq!(arriving.wait(1, Instant::now()), Gate::Closed);
    assert!(!arriving.is_over());
    let mut pages = grant.pages.clone();
    let mut tables = PageTables::from(pages.clone());
    assert_eq!(rig.cache.settle_load(id, &prompt, &mut tables), Ok(None), "no verdict before the last layer");
    // What still comes is not taken into the tree, whatever is said of it.
    rig.cache.commit(id, &prompt, &mut pages, &mut []).unwrap();
    rig.check();
    *backend.faults.layers_open.lock() = None;
    assert_eq!(arriving.wait(1, Instant::now() + LONG), Gate::Open);
    assert_eq!(rig.settled(id, &grant, &prompt, &mut pages).came, 6 * PAGE);
    rig.cache.finish(id, &prompt[..6 * PAGE], pages);
    rig.assert_quiet();
}

#[test]
fn l38_a_layer_that_a_load_does_not_know_and_a_load_that_is_over_hold_nobody_up() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, _) = Rig::with_linker(64, linked(32), &store);
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    let grant = rig.acquire(id, &prompt);
    let arriving = grant.arriving.unwrap();
    assert_eq!(arriving.wait(99, Instant::now()), Gate::Open);
    rig.cache.abort(id, grant.pages);
    assert_eq!(arriving.wait(0, Instant::now() + LONG), Gate::Over);
    rig.assert_quiet();
}

/// The reference ends the requests of a batch in which a layer failed. Here the tail is computed.
#[test]
fn g01_a_layer_that_was_not_filled_is_found_by_the_seal() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    for layer in 0..2 {
        let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
        *backend.faults.skip_layer.lock() = Some(layer);
        let (_, settled) = rig.run_linked(&prompt);
        assert_eq!(settled.map(|settled| settled.came), Some(0), "layer {layer}");
        rig.settle();
        assert_eq!(store.lock().len(), 6, "what was removed as corrupt is stored again");
        rig.assert_quiet();
    }
}

#[test]
fn g01_an_object_that_is_gone_and_a_short_answer_cost_the_tail_alone() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    backend.faults.vanish.lock().insert(keys(&prompt)[6]);
    let (_, settled) = rig.run_linked(&prompt);
    let reason = Some(MissReason::Evicted);
    assert_eq!(settled, Some(Settled { tokens: 6 * PAGE, came: 6 * PAGE, state: None, reason }));
    assert_eq!(rig.run_linked(&prompt).0.from_device, 10 * PAGE);
    rig.assert_quiet();
    drop(rig);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    *backend.faults.short_after.lock() = Some(3);
    let (_, settled) = rig.run_linked(&prompt);
    assert_eq!(settled.map(|s| (s.came, s.reason)), Some((3 * PAGE, Some(MissReason::BackendFailed))));
    rig.assert_quiet();
}

#[test]
fn g15_a_page_with_wrong_bytes_is_no_hit_and_heals() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    let bad = keys(&prompt)[4];
    backend.faults.flip.lock().insert(bad);
    let (_, settled) = rig.run_linked(&prompt);
    assert_eq!(settled.map(|s| (s.came, s.reason)), Some((4 * PAGE, Some(MissReason::Corrupt))));
    let stats = rig.settle();
    assert_eq!((stats.corrupt_pages, stats.healed_pages), (1, 1));
    assert!(store.lock().contains_key(&bad), "the computed page was written in its place");
    rig.assert_quiet();
}

#[test]
fn l34_a_refused_load_and_one_that_panics_give_their_slots_back() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    backend.faults.refuse_loads.store(1, Ordering::Release);
    assert_eq!(rig.run_linked(&prompt).1.map(|settled| settled.came), Some(0));
    rig.settle();
    rig.cache.flush(Tiers::ALL);
    backend.faults.panic_loads.store(1, Ordering::Release);
    assert_eq!(rig.run_linked(&prompt).1.map(|settled| settled.came), Some(0));
    rig.settle();
    rig.cache.flush(Tiers::ALL);
    rig.assert_quiet();
}

/// G2, G11: a store that hangs holds transit pages. The request's slots are its own at once.
#[test]
fn g11_a_load_that_hangs_holds_no_device_slot() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    let mut rig = Rig::new(16, linked(32));
    let backend = rig.attach("fake", &store, |backend| {
        backend.linker = true;
        backend.settings.timeout = Duration::from_millis(30);
    });
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let grant = rig.acquire(id, &prompt);
    rig.cache.start_loads();
    let mut pages = grant.pages.clone();
    let settled = rig.settled(id, &grant, &prompt, &mut pages);
    assert_eq!((settled.came, settled.reason), (0, Some(MissReason::BackendSlow)));
    rig.cache.finish(id, &[], pages);
    rig.settle();
    assert_eq!(rig.cache.alloc_pages(16).map(|pages| rig.cache.free_pages(&pages)), Some(()));
    let stats = rig.cache.stats();
    assert_eq!((stats.host_quarantined_pages, stats.transit_used_tokens), (6, 6 * PAGE as u64));
    rig.check();
    backend.faults.hang_reads.store(false, Ordering::Release);
    rig.assert_quiet();
}

#[test]
fn l10_a_queued_load_does_not_begin_when_its_request_goes() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    let grant = rig.acquire(id, &prompt);
    rig.cache.abort(id, grant.pages);
    rig.cache.start_loads();
    rig.assert_quiet();
    assert_eq!(backend.calls.loads.load(Ordering::Relaxed), 0);
}

/// Its slots may be another's at once: nothing is written into them any more.
#[test]
fn l10_a_load_that_has_begun_writes_into_no_slot_of_a_request_that_went() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(8, linked(32), &store);
    *backend.faults.layers_open.lock() = Some(1);
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    let grant = rig.acquire(id, &prompt);
    rig.cache.start_loads();
    let arriving = grant.arriving.clone().unwrap();
    assert_eq!(arriving.wait(0, Instant::now() + LONG), Gate::Open);
    rig.cache.abort(id, grant.pages);
    let other = tokens(2, 8 * PAGE);
    let mut pages = Vec::new();
    rig.extend(&mut pages, &other, &CacheNamespace::default());
    *backend.faults.layers_open.lock() = None;
    rig.settle();
    for (i, &page) in pages.iter().enumerate() {
        assert!(rig.read(page) == content(&other[..(i + 1) * PAGE], &CacheNamespace::default()), "page {i}");
    }
    rig.cache.free_pages(&pages);
    rig.assert_quiet();
}

#[test]
fn l33_where_the_device_has_no_room_nothing_is_held() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, _) = Rig::with_linker(8, linked(32), &store);
    let others = rig.cache.alloc_pages(4).unwrap();
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    assert!(matches!(rig.cache.acquire(id, &prompt).unwrap(), Acquire::NoSpace));
    rig.check();
    assert_eq!(rig.cache.stats().transit_used_tokens, 0);
    rig.cache.free_pages(&others);
    assert_eq!(rig.acquire(id, &prompt).from_storage, 6 * PAGE);
    rig.cache.abort(id, Vec::new());
    // The test gave no pages back: they were the grant's.
    let stats = rig.cache.stats();
    assert_eq!(stats.device_used_tokens, 6 * PAGE as u64);
}

/// A hit that is longer than all transit pages comes so far.
#[test]
fn l40_a_hit_longer_than_the_transit_pages_is_loaded_so_far_and_the_rest_computed() {
    let prompt = tokens(1, 20 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, _) = Rig::with_linker(64, linked(8), &store);
    let (grant, settled) = rig.run_linked(&prompt);
    assert_eq!(grant.from_storage, 8 * PAGE);
    assert_eq!(settled.map(|s| (s.came, s.reason)), Some((8 * PAGE, None)));
    assert_eq!(grant.why, [Miss { start: 8 * PAGE, end: 20 * PAGE, reason: MissReason::HostFull }]);
    rig.assert_quiet();
}

#[test]
fn g14_a_lookup_that_fails_or_hangs_ends_in_computing() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    backend.faults.fail_exists.store(true, Ordering::Release);
    let (grant, _) = rig.run_linked(&prompt);
    assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::BackendFailed]));
    rig.assert_quiet();
    drop(rig);
    let config = CacheConfig {
        prefetch_policy: PrefetchPolicy::Timeout,
        prefetch_timeout_base: Duration::from_millis(20),
        ..linked(32)
    };
    let (mut rig, backend) = Rig::with_linker(64, config, &store);
    backend.faults.hang_reads.store(true, Ordering::Release);
    let (grant, _) = rig.run_linked(&prompt);
    assert_eq!((grant.tokens, reasons(&grant)), (0, vec![MissReason::BackendSlow]));
    backend.faults.hang_reads.store(false, Ordering::Release);
    rig.assert_quiet();
}

/// A flush in the middle takes what nobody holds, and not what comes.
#[test]
fn l14_a_flush_while_a_load_runs_leaves_it_alone() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    *backend.faults.layers_open.lock() = Some(1);
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    let grant = rig.acquire(id, &prompt);
    rig.cache.start_loads();
    rig.cache.flush(Tiers::ALL);
    rig.check();
    *backend.faults.layers_open.lock() = None;
    let mut pages = grant.pages.clone();
    assert_eq!(rig.settled(id, &grant, &prompt, &mut pages).came, 6 * PAGE);
    rig.cache.finish(id, &prompt[..6 * PAGE], pages);
    rig.assert_quiet();
}

#[test]
fn l04_without_a_backend_or_a_hit_nothing_is_loaded() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let mut rig = Rig::new(64, linked(32));
    assert_eq!(reasons(&rig.run_linked(&prompt).0), [MissReason::StorageOff]);
    rig.cache.flush(Tiers::ALL);
    let backend = rig.attach("fake", &Store::default(), |backend| backend.linker = true);
    let (grant, settled) = rig.run_linked(&prompt);
    assert_eq!((grant.tokens, settled, backend.calls.lookups.load(Ordering::Relaxed)), (0, None, 1));
    rig.assert_quiet();
}

/// The backend of the longest hit is loaded from.
#[test]
fn several_backends_are_asked_and_the_longest_hit_is_loaded() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let (near, far) = (stored(&prompt[..4 * PAGE + 1]), stored(&prompt));
    let mut rig = Rig::new(64, linked(32));
    let near = rig.attach("near", &near, |backend| backend.linker = true);
    let far = rig.attach("far", &far, |backend| backend.linker = true);
    let (grant, settled) = rig.run_linked(&prompt);
    assert_eq!((grant.from_storage, settled.map(|s| s.came)), (10 * PAGE, Some(10 * PAGE)));
    let loads = [&near, &far].map(|backend| backend.calls.loads.load(Ordering::Relaxed));
    assert_eq!(loads, [0, 1]);
    rig.settle();
    assert_eq!(near.store.lock().len(), 10, "the one that lacks them is offered them");
    rig.assert_quiet();
}

/// Between the answer and the grant the backend left, or its store was emptied.
#[test]
fn a_backend_that_left_or_was_emptied_since_is_not_loaded_from() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = stored(&prompt);
    let (mut rig, backend) = Rig::with_linker(64, linked(32), &store);
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    rig.cache.storage().emptied("fake");
    assert_eq!(rig.acquire(id, &prompt).tokens, 0);
    rig.cache.abort(id, Vec::new());
    let id = rig.request(&prompt, &CacheNamespace::default());
    rig.wait_storage(id);
    assert!(rig.cache.storage().detached("fake"));
    assert_eq!(rig.acquire(id, &prompt).tokens, 0);
    rig.cache.abort(id, Vec::new());
    assert_eq!(backend.calls.loads.load(Ordering::Relaxed), 0);
    rig.assert_quiet();
}
