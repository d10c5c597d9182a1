//! The scheduler in linker mode, over a store in memory whose layers a test lets settle one by one.

use std::sync::atomic::Ordering;

use super::*;
use crate::cache::fake_store::{FakeBackend, Store};
use crate::cache::hash::chain_keys;
use crate::cache::{HostLayout, PrefetchPolicy};
use crate::plugin::backend::{PageKey, Place};

/// A store in memory behind an engine. The fake model has one layer.
struct Linked {
    backend: Arc<FakeBackend>,
    store: Store,
}

impl Linked {
    /// No load goes on while this is on.
    fn hold(&self, on: bool) {
        *self.backend.faults.layers_open.lock() = on.then_some(0);
    }

    /// Loads that have begun.
    fn begun(&self) -> usize {
        self.backend.calls.batches.lock().iter().map(Vec::len).sum()
    }

    /// From this page of the sequence on, what is loaded is wrong.
    fn bad_from(&self, tokens: &[u32], page: usize) {
        self.backend.faults.flip.lock().extend(keys(tokens).split_off(page));
    }
}

fn keys(tokens: &[u32]) -> Vec<PageKey> {
    chain_keys(None, tokens, PAGE)
}

fn start_with(timeout: Duration) -> (Rig, Linked) {
    start_as(timeout, Setup::default())
}

fn start_as(timeout: Duration, setup: Setup) -> (Rig, Linked) {
    let cache = CacheConfig {
        host_pages: 200,
        linked: true,
        host_layout: HostLayout::PageFirstDirect,
        prefetch_policy: PrefetchPolicy::WaitComplete,
        prefetch_threshold: PAGE,
        ..CacheConfig::default()
    };
    let rig = Setup { cache, ..setup }.start();
    let store = Store::default();
    let mut backend = FakeBackend::new("linked", &store, rig.handle.storage().host_pools());
    backend.linker = true;
    backend.settings.timeout = timeout;
    let backend = Arc::new(backend);
    rig.handle.storage().attached(backend.clone(), Place::At(0));
    (rig, Linked { backend, store })
}

fn start() -> (Rig, Linked) {
    start_with(Duration::from_secs(60))
}

impl Rig {
    /// Empties the device, once what is there is stored.
    fn to_storage(&self, linked: &Linked, pages: usize) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while linked.store.lock().len() < pages {
            assert!(Instant::now() < deadline, "{} of {pages} pages are stored", linked.store.lock().len());
            block_on(self.handle.check_integrity()).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.flush();
    }

    fn begun(&self, linked: &Linked, loads: usize) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while linked.begun() < loads {
            assert!(Instant::now() < deadline, "no load has begun");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn transit_used(&self) -> u64 {
        block_on(self.handle.check_integrity()).unwrap();
        self.handle.cache_counters().snapshot().transit_used_tokens
    }

    /// Nothing is left of any load.
    fn assert_all_back(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.transit_used() > 0 {
            assert!(Instant::now() < deadline, "transit pages are held");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.assert_idle();
    }
}

/// 40 tokens and an answer; nine pages can be reused.
fn cold(rig: &Rig, linked: &Linked) -> Completion {
    let cold = rig.run(request("cold", prompt(1, 40), 6));
    assert_eq!(cold.usage.cached_tokens(), 0);
    rig.to_storage(linked, 11);
    cold
}

#[test]
fn l19_a_prompt_comes_from_storage_and_gives_the_same_answer() {
    let (rig, linked) = start();
    let cold = cold(&rig, &linked);
    let computed = rig.log.tokens.load(Ordering::Relaxed);
    let warm = rig.run(request("warm", prompt(1, 40), 6));
    assert_eq!((warm.usage.cached_device, warm.usage.cached_host, warm.usage.cached_storage), (0, 0, 36));
    assert_eq!(warm.token_ids, cold.token_ids);
    assert_eq!(rig.log.tokens.load(Ordering::Relaxed) - computed, 4 + 5, "the rest of the prompt, and the answer");
    rig.assert_all_back();
}

/// The forward has used bad pages; what it computed is thrown away.
#[test]
fn g01_an_answer_computed_on_bad_pages_is_thrown_away() {
    for (bad, came) in [(0, 0), (3, 12), (8, 32)] {
        let (rig, linked) = start();
        let cold = cold(&rig, &linked);
        linked.bad_from(&prompt(1, 40), bad);
        let warm = rig.run(request("warm", prompt(1, 40), 6));
        assert_eq!((&warm.token_ids, warm.usage.cached_storage), (&cold.token_ids, came), "bad from page {bad}");
        linked.backend.faults.flip.lock().clear();
        rig.to_storage(&linked, 11);
        let healed = rig.run(request("healed", prompt(1, 40), 6));
        assert_eq!((&healed.token_ids, healed.usage.cached_storage), (&cold.token_ids, 36));
        rig.assert_all_back();
    }
}

#[test]
fn g01_objects_that_are_gone_loads_that_fail_and_panics_end_in_computing() {
    let (rig, linked) = start();
    let cold = cold(&rig, &linked);
    let faults = &linked.backend.faults;
    for trouble in 0..3 {
        match trouble {
            0 => faults.panic_loads.store(1, Ordering::Release),
            1 => faults.refuse_loads.store(1, Ordering::Release),
            _ => faults.vanish.lock().extend(keys(&prompt(1, 40))),
        }
        let warm = rig.run(request("warm", prompt(1, 40), 6));
        assert_eq!((&warm.token_ids, warm.usage.cached_storage), (&cold.token_ids, 0));
        block_on(rig.handle.check_integrity()).unwrap();
        rig.flush();
    }
    assert_eq!(linked.begun(), 3, "each was met");
    rig.assert_all_back();
}

/// A load that does not come holds up nobody who needs nothing of it.
#[test]
fn g02_others_are_served_while_a_load_hangs() {
    let (rig, linked) = start();
    let cold = cold(&rig, &linked);
    linked.hold(true);
    let late = rig.submit(request("late", prompt(1, 40), 6));
    rig.begun(&linked, 1);
    for salt in 2..5 {
        assert_eq!(rig.run(request(&format!("other-{salt}"), prompt(salt, 30), 6)).token_ids.len(), 6);
    }
    linked.hold(false);
    let late = late.blocking_collect().remove(0);
    assert_eq!((late.token_ids, late.usage.cached_storage), (cold.token_ids, 36));
    rig.assert_all_back();
}

/// G11: a load has an end, and what it did not bring is computed.
#[test]
fn g11_a_load_that_never_comes_ends_at_its_deadline() {
    let (rig, linked) = start_with(Duration::from_millis(100));
    let cold = cold(&rig, &linked);
    linked.hold(true);
    let late = rig.run(request("late", prompt(1, 40), 6));
    assert_eq!((late.token_ids, late.usage.cached_storage), (cold.token_ids, 0));
    linked.hold(false);
    rig.assert_all_back();
}

#[test]
fn l10_a_request_is_aborted_while_its_load_runs() {
    let (rig, linked) = start();
    let cold = cold(&rig, &linked);
    linked.hold(true);
    let aborted = rig.submit(request("aborted", prompt(1, 40), 6));
    let dropped = rig.submit(request("dropped", prompt(1, 40), 6));
    rig.begun(&linked, 1);
    assert!(block_on(rig.handle.abort("aborted")));
    assert!(matches!(aborted.blocking_collect()[0].reason, FinishReason::Abort { kind: AbortKind::Requested, .. }));
    drop(dropped);
    rig.wait_for("both to leave", |s| s.running + s.queued == 0);
    linked.hold(false);
    let warm = rig.run(request("warm", prompt(1, 40), 6));
    assert_eq!(warm.token_ids, cold.token_ids);
    rig.assert_all_back();
}

#[test]
fn l14_a_flush_in_the_middle_of_a_load_changes_no_answer() {
    let (rig, linked) = start();
    let cold = cold(&rig, &linked);
    linked.hold(true);
    let warm = rig.submit(request("warm", prompt(1, 40), 6));
    rig.begun(&linked, 1);
    block_on(rig.handle.flush(Tiers::ALL)).unwrap();
    linked.hold(false);
    let warm = warm.blocking_collect().remove(0);
    assert_eq!((warm.token_ids, warm.usage.cached_storage), (cold.token_ids, 36));
    rig.assert_all_back();
}

/// Requests of the same prompt at the same time load it once: the others wait for the pages in the tree.
#[test]
fn the_same_prompt_is_loaded_once() {
    let (rig, linked) = start();
    let cold = cold(&rig, &linked);
    linked.hold(true);
    let streams: Vec<_> = (0..4).map(|i| rig.submit(request(&format!("same-{i}"), prompt(1, 40), 6))).collect();
    rig.begun(&linked, 1);
    linked.hold(false);
    for stream in streams {
        assert_eq!(stream.blocking_collect().remove(0).token_ids, cold.token_ids);
    }
    assert_eq!(linked.begun(), 1);
    rig.assert_all_back();
}

/// Turn by turn, with the device emptied between: what was computed, prompt and answer, comes from storage.
#[test]
fn l19_turns_of_a_conversation_come_from_storage() {
    let (rig, linked) = start();
    let mut history = prompt(1, 24);
    let mut stored = 0;
    for turn in 0..4 {
        let answer = rig.run(request(&format!("turn-{turn}"), history.clone(), 8));
        let expected = (stored as u32).min((history.len() as u32 - 1) / PAGE as u32) * PAGE as u32;
        assert_eq!(answer.usage.cached_storage, expected, "turn {turn}");
        // The last token of an answer was not computed.
        stored = (history.len() + answer.token_ids.len() - 1) / PAGE;
        rig.to_storage(&linked, stored);
        history.extend(&answer.token_ids);
        history.extend(prompt(50 + turn, 9));
        let alone = Request { cache_salt: Some(format!("alone-{turn}")), ..request("alone", history.clone(), 1) };
        rig.run(alone);
        rig.flush();
    }
    rig.assert_all_back();
}

/// G4: a load begins when storage has answered and there are slots, not when its request gets a place.
#[test]
fn g04_a_load_begins_while_its_request_waits_for_a_place() {
    let (rig, linked) = start_as(Duration::from_secs(60), Setup { running: 1, ..Setup::default() });
    let cold = [1, 2].map(|salt| rig.run(request(&format!("cold-{salt}"), prompt(salt, 40), 6)));
    rig.to_storage(&linked, 22);
    linked.hold(true);
    let streams = [1, 2].map(|salt| rig.submit(request(&format!("warm-{salt}"), prompt(salt, 40), 6)));
    // One place, whose owner's load does not come; the other's has begun all the same.
    rig.begun(&linked, 2);
    linked.hold(false);
    for (stream, cold) in streams.into_iter().zip(&cold) {
        let warm = stream.blocking_collect().remove(0);
        assert_eq!((&warm.token_ids, warm.usage.cached_storage), (&cold.token_ids, 36));
    }
    rig.assert_all_back();
}

/// Slots of a request that waits are anybody's who needs them, and it gets its pages later.
#[test]
fn g04_who_waits_gives_its_slots_to_who_runs() {
    let (rig, linked) = start_as(Duration::from_secs(60), Setup { running: 1, pages: 26, ..Setup::default() });
    let cold = cold(&rig, &linked);
    let alone = rig.run(request("alone", prompt(3, 20), 70));
    rig.to_storage(&linked, 11 + 22);
    linked.hold(true);
    // A part of what it may still generate is set aside for it, and it takes nearly all pages in the end.
    let long = rig.submit(Request { cache_salt: Some("long".to_owned()), ..request("long", prompt(3, 20), 70) });
    let warm = rig.submit(request("warm", prompt(1, 40), 6));
    linked.hold(false);
    assert_eq!(long.blocking_collect().remove(0).token_ids, alone.token_ids);
    assert_eq!(warm.blocking_collect().remove(0).token_ids, cold.token_ids);
    rig.wait_for("all to end", |stats| stats.running + stats.queued == 0);
    assert_eq!(rig.handle.stats().preempted_total, 0, "nobody who runs was sent back");
    rig.assert_all_back();
}

/// A request that holds pages while it waits goes.
#[test]
fn g04_l10_a_request_is_aborted_while_it_waits_and_its_load_runs() {
    let (rig, linked) = start_as(Duration::from_secs(60), Setup { running: 1, ..Setup::default() });
    let cold = [1, 2].map(|salt| rig.run(request(&format!("cold-{salt}"), prompt(salt, 40), 6)));
    rig.to_storage(&linked, 22);
    linked.hold(true);
    let first = rig.submit(request("first", prompt(1, 40), 6));
    let waits = rig.submit(request("waits", prompt(2, 40), 6));
    rig.begun(&linked, 2);
    assert!(block_on(rig.handle.abort("waits")));
    assert!(matches!(waits.blocking_collect()[0].reason, FinishReason::Abort { kind: AbortKind::Requested, .. }));
    block_on(rig.handle.check_integrity()).unwrap();
    linked.hold(false);
    assert_eq!(first.blocking_collect().remove(0).token_ids, cold[0].token_ids);
    rig.assert_all_back();
}
