//! The scheduler in linker mode, over a store in memory whose layers a test lets settle one by one.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use super::*;
use crate::cache::{HostLayout, PrefetchPolicy};
use crate::plugin::backend::{
    BackendError, BackendLimits, BackendSettings, BackendStats, CallOptions, ChainInfo, ErrorKind, Held,
    HostPoolDescription, LayerLoad, PageKey, PageStatus, Place, PoolGroup, Restorable, StorageBackend,
};

/// A store with the linker face. The fake model has one layer.
struct Linked {
    pool: HostPoolDescription,
    pages: Mutex<HashMap<PageKey, Vec<u8>>>,
    settings: BackendSettings,
    /// No load goes on while this is set.
    hold: AtomicBool,
    /// Loads that have begun.
    begun: AtomicUsize,
    /// From this page of a load on, its bytes are wrong.
    bad_from: AtomicUsize,
    /// What fails, panics or says that nothing is there.
    trouble: Mutex<Trouble>,
}

#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    None,
    Gone,
    Fails,
    Panics,
}

impl Linked {
    fn pieces(&self, page: u32) -> Vec<(*mut u8, usize)> {
        let piece = |segment: &crate::plugin::backend::HostPoolSegment| {
            let offset = segment.offset + u64::from(page) * segment.stride;
            ((self.pool.base + offset as usize) as *mut u8, segment.len as usize)
        };
        self.pool.segments.iter().map(piece).collect()
    }
}

impl StorageBackend for Linked {
    fn name(&self) -> &str {
        "linked"
    }
    fn generation(&self) -> u64 {
        1
    }
    fn limits(&self) -> BackendLimits {
        BackendLimits { preferred_batch: 32, concurrency: 4, remove: true, durable: false }
    }
    fn settings(&self) -> &BackendSettings {
        &self.settings
    }
    fn batch_exists(
        &self,
        _: &CallOptions,
        keys: &[PageKey],
        _: &Held,
        _: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError> {
        let pages = self.pages.lock();
        Ok(Restorable::up_to(keys.iter().take_while(|key| pages.contains_key(*key)).count(), keys.len()))
    }
    fn batch_get(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        _: &[u32],
        _: &ChainInfo<'_>,
        _: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        panic!("linker mode reads layer by layer");
    }
    fn batch_set(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        _: &[u32],
        _: &ChainInfo<'_>,
        _: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        panic!("linker mode offloads");
    }
    fn batch_remove(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        keys: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        keys.iter().for_each(|key| drop(self.pages.lock().remove(key)));
        status.fill(PageStatus::Ok);
        Ok(())
    }
    fn has_linker(&self) -> bool {
        true
    }
    fn lookup(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        chain: &ChainInfo<'_>,
        _: u64,
    ) -> Result<Restorable, BackendError> {
        self.batch_exists(options, keys, &Held::default(), chain)
    }
    fn load_layers(
        &self,
        options: &CallOptions,
        loads: &[LayerLoad<'_>],
        words: &Arc<[AtomicU32]>,
        watch: &mut dyn FnMut(),
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.begun.fetch_add(loads.len(), Ordering::SeqCst);
        let error = |kind| BackendError {
            backend: "linked".to_owned(),
            kind,
            retryable: false,
            message: "on order".to_owned(),
            pages_in_use: false,
        };
        while self.hold.load(Ordering::SeqCst) {
            if options.is_cancelled() || Instant::now() >= options.deadline {
                return Err(error(ErrorKind::TimedOut));
            }
            watch();
            std::thread::sleep(Duration::from_millis(1));
        }
        let trouble = *self.trouble.lock();
        assert!(trouble != Trouble::Panics, "a panic on order");
        if trouble == Trouble::Fails {
            return Err(error(ErrorKind::Unavailable));
        }
        let bad_from = self.bad_from.load(Ordering::SeqCst);
        let mut at = 0;
        for load in loads {
            for (index, (key, &page)) in load.keys.iter().zip(load.pages).enumerate() {
                let found = self.pages.lock().get(key).filter(|_| trouble != Trouble::Gone).cloned();
                status[at] = PageStatus::Missing;
                if let Some(mut bytes) = found {
                    bytes[0] ^= u8::from(index >= bad_from);
                    let mut rest = bytes.as_slice();
                    for (place, len) in self.pieces(page) {
                        // SAFETY: the pool lies where it says; the page is this load's.
                        unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), place, len) };
                        rest = &rest[len..];
                    }
                    status[at] = PageStatus::Ok;
                }
                at += 1;
            }
        }
        words.iter().for_each(|word| word.store(1, Ordering::Release));
        watch();
        Ok(())
    }
    fn offload(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        _: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        for (key, &page) in keys.iter().zip(pages) {
            let mut bytes = Vec::new();
            for (place, len) in self.pieces(page) {
                // SAFETY: the pool lies where it says, and the page is not written meanwhile.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(place, len) });
            }
            self.pages.lock().insert(*key, bytes);
        }
        status.fill(PageStatus::Ok);
        Ok(())
    }
    fn flush(&self, _: &CallOptions) -> Result<(), BackendError> {
        Ok(())
    }
    fn clear(&self, _: &CallOptions) -> Result<(), BackendError> {
        self.pages.lock().clear();
        Ok(())
    }
    fn stats(&self) -> Result<BackendStats, BackendError> {
        Ok(BackendStats::default())
    }
    fn reclaim(&self, _: PoolGroup) -> Vec<u32> {
        Vec::new()
    }
    fn quarantined(&self) -> usize {
        0
    }
}

fn start_with(timeout: Duration) -> (Rig, Arc<Linked>) {
    let cache = CacheConfig {
        host_pages: 200,
        linked: true,
        host_layout: HostLayout::PageFirstDirect,
        prefetch_policy: PrefetchPolicy::WaitComplete,
        prefetch_threshold: PAGE,
        ..CacheConfig::default()
    };
    let rig = Setup { cache, ..Setup::default() }.start();
    let linked = Arc::new(Linked {
        pool: rig.handle.storage().host_pools().remove(0),
        pages: Mutex::default(),
        settings: BackendSettings { timeout, ..BackendSettings::default() },
        hold: AtomicBool::new(false),
        begun: AtomicUsize::new(0),
        bad_from: AtomicUsize::new(usize::MAX),
        trouble: Mutex::new(Trouble::None),
    });
    rig.handle.storage().attached(linked.clone(), Place::At(0));
    (rig, linked)
}

fn start() -> (Rig, Arc<Linked>) {
    start_with(Duration::from_secs(60))
}

impl Rig {
    /// Empties the device, once what is there is stored.
    fn to_storage(&self, linked: &Linked, pages: usize) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while linked.pages.lock().len() < pages {
            assert!(Instant::now() < deadline, "{} of {pages} pages are stored", linked.pages.lock().len());
            block_on(self.handle.check_integrity()).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        self.flush();
    }

    fn begun(&self, linked: &Linked, loads: usize) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while linked.begun.load(Ordering::SeqCst) < loads {
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
        linked.bad_from.store(bad, Ordering::SeqCst);
        let warm = rig.run(request("warm", prompt(1, 40), 6));
        assert_eq!((&warm.token_ids, warm.usage.cached_storage), (&cold.token_ids, came), "bad from page {bad}");
        linked.bad_from.store(usize::MAX, Ordering::SeqCst);
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
    for trouble in [Trouble::Gone, Trouble::Fails, Trouble::Panics] {
        *linked.trouble.lock() = trouble;
        let warm = rig.run(request("warm", prompt(1, 40), 6));
        assert_eq!((&warm.token_ids, warm.usage.cached_storage), (&cold.token_ids, 0));
        block_on(rig.handle.check_integrity()).unwrap();
        rig.flush();
    }
    rig.assert_all_back();
}

/// A load that does not come holds up nobody who needs nothing of it.
#[test]
fn g02_others_are_served_while_a_load_hangs() {
    let (rig, linked) = start();
    let cold = cold(&rig, &linked);
    linked.hold.store(true, Ordering::SeqCst);
    let late = rig.submit(request("late", prompt(1, 40), 6));
    rig.begun(&linked, 1);
    for salt in 2..5 {
        assert_eq!(rig.run(request(&format!("other-{salt}"), prompt(salt, 30), 6)).token_ids.len(), 6);
    }
    assert!(linked.hold.swap(false, Ordering::SeqCst));
    let late = late.blocking_collect().remove(0);
    assert_eq!((late.token_ids, late.usage.cached_storage), (cold.token_ids, 36));
    rig.assert_all_back();
}

/// G11: a load has an end, and what it did not bring is computed.
#[test]
fn g11_a_load_that_never_comes_ends_at_its_deadline() {
    let (rig, linked) = start_with(Duration::from_millis(100));
    let cold = cold(&rig, &linked);
    linked.hold.store(true, Ordering::SeqCst);
    let late = rig.run(request("late", prompt(1, 40), 6));
    assert_eq!((late.token_ids, late.usage.cached_storage), (cold.token_ids, 0));
    linked.hold.store(false, Ordering::SeqCst);
    rig.assert_all_back();
}

#[test]
fn l10_a_request_is_aborted_while_its_load_runs() {
    let (rig, linked) = start();
    let cold = cold(&rig, &linked);
    linked.hold.store(true, Ordering::SeqCst);
    let aborted = rig.submit(request("aborted", prompt(1, 40), 6));
    let dropped = rig.submit(request("dropped", prompt(1, 40), 6));
    rig.begun(&linked, 1);
    assert!(block_on(rig.handle.abort("aborted")));
    assert!(matches!(aborted.blocking_collect()[0].reason, FinishReason::Abort { kind: AbortKind::Requested, .. }));
    drop(dropped);
    rig.wait_for("both to leave", |s| s.running + s.queued == 0);
    linked.hold.store(false, Ordering::SeqCst);
    let warm = rig.run(request("warm", prompt(1, 40), 6));
    assert_eq!(warm.token_ids, cold.token_ids);
    rig.assert_all_back();
}

#[test]
fn l14_a_flush_in_the_middle_of_a_load_changes_no_answer() {
    let (rig, linked) = start();
    let cold = cold(&rig, &linked);
    linked.hold.store(true, Ordering::SeqCst);
    let warm = rig.submit(request("warm", prompt(1, 40), 6));
    rig.begun(&linked, 1);
    block_on(rig.handle.flush(Tiers::ALL)).unwrap();
    linked.hold.store(false, Ordering::SeqCst);
    let warm = warm.blocking_collect().remove(0);
    assert_eq!((warm.token_ids, warm.usage.cached_storage), (cold.token_ids, 36));
    rig.assert_all_back();
}

/// Requests of the same prompt at the same time load it once: the others wait for the pages in the tree.
#[test]
fn the_same_prompt_is_loaded_once() {
    let (rig, linked) = start();
    let cold = cold(&rig, &linked);
    linked.hold.store(true, Ordering::SeqCst);
    let streams: Vec<_> = (0..4).map(|i| rig.submit(request(&format!("same-{i}"), prompt(1, 40), 6))).collect();
    rig.begun(&linked, 1);
    linked.hold.store(false, Ordering::SeqCst);
    for stream in streams {
        assert_eq!(stream.blocking_collect().remove(0).token_ids, cold.token_ids);
    }
    assert_eq!(linked.begun.load(Ordering::SeqCst), 1);
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
