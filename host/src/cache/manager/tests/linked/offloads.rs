//! What is computed goes to storage: once, whole, and bounded.

use super::*;
use crate::cache::config::WritePolicy;
use crate::cache::unified::{Component, NodeId, Source};

/// A rig whose store takes nothing before `hang_writes` is taken back.
fn held_up(transit: u32) -> (Rig, Arc<FakeBackend>, Store) {
    let store = Store::default();
    let (rig, backend) = Rig::with_linker(64, linked(transit), &store);
    backend.faults.hang_writes.store(true, Ordering::Release);
    (rig, backend, store)
}

impl Rig {
    fn nodes(&self) -> Vec<NodeId> {
        self.cache.tree.nodes().collect()
    }

    fn locks(&self) -> u32 {
        self.nodes().iter().map(|&node| self.cache.tree.holders(Component::Full, node).unwrap().0).sum()
    }

    fn stored_nodes(&self) -> usize {
        self.nodes().iter().filter(|&&node| self.cache.tree.info(node).unwrap().stored != 0).count()
    }

    fn wait_for_write(&mut self, backend: &FakeBackend) {
        let limit = Instant::now() + LONG;
        while backend.calls.offloads.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < limit, "nothing is offloaded");
            self.cache.tick();
            self.sleep(Instant::now() + Duration::from_millis(2));
        }
    }
}

#[test]
fn l05_a_node_is_locked_until_its_offload_is_over() {
    let (mut rig, backend, _) = held_up(32);
    rig.run_linked(&tokens(1, 6 * PAGE + 1));
    rig.wait_for_write(&backend);
    assert!(rig.locks() > 0);
    let kept = rig.cache.flush(Tiers::ALL).device_kept;
    assert_eq!(kept, 6, "what is being read stays");
    rig.check();
    backend.faults.hang_writes.store(false, Ordering::Release);
    rig.settle();
    assert_eq!((rig.locks(), rig.stored_nodes()), (0, rig.nodes().len()));
    rig.assert_quiet();
}

#[test]
fn l06_a_failed_offload_is_unlocked_and_tried_again() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_linker(64, CacheConfig { backup_retries: 1, ..linked(32) }, &store);
    backend.faults.fail_writes.store(1, Ordering::Release);
    rig.run_linked(&tokens(1, 6 * PAGE + 1));
    let stats = rig.settle();
    assert_eq!((store.lock().len(), stats.backup_retries), (6, 1));
    assert_eq!(rig.locks(), 0);
    rig.assert_quiet();
}

#[test]
fn l07_a_refused_offload_and_one_that_panics_leave_no_lock() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_linker(64, CacheConfig { backup_retries: 0, ..linked(32) }, &store);
    backend.faults.refuse.store(true, Ordering::Release);
    rig.run_linked(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    assert_eq!((store.lock().len(), rig.locks(), rig.stored_nodes()), (0, 0, 0));
    backend.faults.refuse.store(false, Ordering::Release);
    backend.faults.panic_writes.store(1, Ordering::Release);
    rig.run_linked(&tokens(2, 6 * PAGE + 1));
    rig.settle();
    assert_eq!((rig.locks(), rig.stored_nodes()), (0, 0));
    rig.assert_quiet();
}

#[test]
fn l08_what_is_stored_or_on_its_way_is_not_offered_again() {
    let (mut rig, backend, store) = held_up(32);
    let prompt = tokens(1, 6 * PAGE + 1);
    rig.run_linked(&prompt);
    rig.wait_for_write(&backend);
    rig.run_linked(&prompt);
    backend.faults.hang_writes.store(false, Ordering::Release);
    rig.settle();
    rig.run_linked(&prompt);
    rig.settle();
    assert_eq!((store.lock().len(), backend.calls.offload_pages.load(Ordering::Relaxed)), (6, 6));
    rig.assert_quiet();
}

/// Two prompts that part in the middle of a node that is being offloaded.
fn split_while_pending(rig: &mut Rig, backend: &FakeBackend) -> (Vec<u32>, Vec<u32>) {
    let first = tokens(1, 6 * PAGE + 1);
    let second = [&first[..3 * PAGE], &tokens(2, 2 * PAGE + 1)].concat();
    rig.run_linked(&first);
    rig.wait_for_write(backend);
    let before = rig.nodes().len();
    rig.run_linked(&second);
    assert!(rig.nodes().len() > before, "the node was cut");
    rig.check();
    (first, second)
}

#[test]
fn l11_l27_both_parts_of_a_node_cut_while_it_is_offloaded_are_stored_in_the_end() {
    let (mut rig, backend, store) = held_up(32);
    split_while_pending(&mut rig, &backend);
    backend.faults.hang_writes.store(false, Ordering::Release);
    rig.settle();
    assert_eq!((rig.stored_nodes(), rig.locks(), store.lock().len()), (rig.nodes().len(), 0, 8));
    rig.assert_quiet();
}

#[test]
fn l12_l13_after_a_failure_both_parts_are_free_and_are_offered_again_under_the_same_keys() {
    let (mut rig, backend, store) = held_up(32);
    let (first, _) = split_while_pending(&mut rig, &backend);
    backend.faults.refuse.store(true, Ordering::Release);
    backend.faults.hang_writes.store(false, Ordering::Release);
    rig.settle();
    assert_eq!((rig.locks(), store.lock().len()), (0, 0));
    rig.check();
    backend.faults.refuse.store(false, Ordering::Release);
    // A new backend in its place is offered all there is.
    rig.attach("fake", &store, |backend| backend.linker = true);
    rig.settle();
    assert!(keys(&first).iter().take(6).all(|key| store.lock().contains_key(key)));
    assert_eq!(store.lock().len(), 8);
    rig.assert_quiet();
}

#[test]
fn l26_an_offload_that_runs_can_not_be_begun_again() {
    let (mut rig, backend, _) = held_up(32);
    rig.run_linked(&tokens(1, 6 * PAGE + 1));
    rig.wait_for_write(&backend);
    let bit = rig.cache.writes.views[0].bit;
    for node in rig.nodes() {
        assert!(rig.cache.tree.begin_store(node, bit, Source::Device).unwrap().is_none());
    }
    rig.check();
    backend.faults.hang_writes.store(false, Ordering::Release);
    rig.assert_quiet();
}

#[test]
fn l30_a_failed_offload_takes_back_nothing_that_is_known() {
    let store = Store::default();
    let (mut rig, backend) = Rig::with_linker(64, CacheConfig { backup_retries: 0, ..linked(32) }, &store);
    rig.run_linked(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    let before = rig.stored_nodes();
    backend.faults.refuse.store(true, Ordering::Release);
    let longer = [&tokens(1, 6 * PAGE)[..], &tokens(2, 2 * PAGE + 1)].concat();
    rig.run_linked(&longer);
    rig.settle();
    assert_eq!((rig.stored_nodes(), store.lock().len()), (before, 6));
    rig.assert_quiet();
}

/// G9: what is on its way to a slow store is bounded, and the rest of the device stays free to be evicted.
#[test]
fn g09_offloads_hold_half_of_the_transit_pages_at_most() {
    let (mut rig, backend, store) = held_up(8);
    for prompt in 1..6 {
        rig.run_linked(&tokens(prompt, 4 * PAGE + 1));
    }
    rig.wait_for_write(&backend);
    let stats = rig.cache.stats();
    assert!(stats.transit_used_tokens <= 4 * PAGE as u64, "{stats:?}");
    assert!(rig.cache.flush(Tiers::ALL).device_kept <= 4);
    rig.check();
    backend.faults.hang_writes.store(false, Ordering::Release);
    rig.settle();
    assert!(!store.lock().is_empty());
    rig.assert_quiet();
}

/// A prompt of many times the transit pages goes by way of them, a part at a time.
#[test]
fn g09_a_node_longer_than_the_transit_pages_is_offloaded_in_parts() {
    let store = Store::default();
    let (mut rig, _) = Rig::with_linker(64, linked(4), &store);
    rig.run_linked(&tokens(1, 30 * PAGE + 1));
    rig.settle();
    assert_eq!(store.lock().len(), 30);
    rig.assert_quiet();
}

/// G18: a write that was lost is made again when a backend comes, without a request.
#[test]
fn g18_a_backend_that_comes_later_or_was_emptied_is_offered_what_is_on_the_device() {
    let (store, later) = (Store::default(), Store::default());
    let (mut rig, _) = Rig::with_linker(64, linked(32), &store);
    rig.run_linked(&tokens(1, 6 * PAGE + 1));
    rig.settle();
    rig.attach("later", &later, |backend| backend.linker = true);
    rig.settle();
    assert_eq!(later.lock().len(), 6);
    later.lock().clear();
    rig.cache.storage().emptied("later");
    rig.settle();
    assert_eq!((store.lock().len(), later.lock().len()), (6, 6));
    rig.assert_quiet();
}

#[test]
fn write_through_selective_offloads_from_the_second_use_on() {
    let store = Store::default();
    let config = CacheConfig { write_policy: WritePolicy::WriteThroughSelective, ..linked(32) };
    let (mut rig, _) = Rig::with_linker(64, config, &store);
    let prompt = tokens(1, 6 * PAGE + 1);
    rig.run_linked(&prompt);
    rig.settle();
    assert_eq!(store.lock().len(), 0);
    rig.run_linked(&prompt);
    rig.settle();
    assert_eq!(store.lock().len(), 6);
    rig.assert_quiet();
}

#[test]
fn an_offload_that_is_late_keeps_its_transit_pages_and_no_device_page() {
    let store = Store::default();
    let mut rig = Rig::new(64, CacheConfig { backup_retries: 0, ..linked(32) });
    let backend = rig.attach("fake", &store, |backend| {
        backend.linker = true;
        backend.settings.timeout = Duration::from_millis(30);
    });
    backend.faults.hang_writes.store(true, Ordering::Release);
    rig.run_linked(&tokens(1, 3 * PAGE + 1));
    rig.settle();
    assert_eq!((rig.locks(), rig.cache.stats().host_quarantined_pages), (0, 3));
    assert_eq!(rig.cache.flush(Tiers::ALL).device_kept, 0);
    backend.faults.hang_writes.store(false, Ordering::Release);
    rig.assert_quiet();
}

/// The end of a server: what waits is written, at most until a moment.
#[test]
fn l15_the_end_waits_for_offloads_and_no_longer() {
    let (mut rig, backend, store) = held_up(32);
    rig.run_linked(&tokens(1, 6 * PAGE + 1));
    let drained = rig.cache.drain_backups(Instant::now() + Duration::from_millis(30));
    assert_eq!(drained.stored, 0);
    assert!(drained.left > 0);
    backend.faults.hang_writes.store(false, Ordering::Release);
    let drained = rig.cache.drain_backups(Instant::now() + LONG);
    assert_eq!((drained.stored, drained.left, store.lock().len()), (6, 0, 6));
    rig.assert_quiet();
}
