//! Calls to the backends of all ranks, against backends that answer as they are told.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::super::backend::*;
use super::fan::Fan;
use PageStatus::{Corrupt, Failed, Missing, Ok as There, Refused};

/// A backend of one rank.
#[derive(Debug, Default)]
struct Fake {
    settings: BackendSettings,
    present: Vec<bool>,
    /// Lengths that can be restored, where they are not those of what is present.
    lengths: Option<Vec<usize>>,
    /// What a call says of its pages.
    says: Vec<PageStatus>,
    /// The call fails; late ones hold their pages.
    fails: Option<bool>,
    panics: bool,
    /// Layers that a load settles.
    settles: Vec<usize>,
    calls: Mutex<Vec<&'static str>>,
    returned: Mutex<Vec<u32>>,
    held: AtomicUsize,
}

impl Fake {
    fn called(&self, what: &'static str) {
        self.calls.lock().unwrap().push(what);
        assert!(!self.panics, "fake on purpose");
    }

    fn calls(&self) -> Vec<&'static str> {
        self.calls.lock().unwrap().clone()
    }

    fn paged(&self, what: &'static str, pages: &[u32], status: &mut [PageStatus]) -> Result<(), BackendError> {
        self.called(what);
        status.copy_from_slice(&self.says[..status.len()]);
        match self.fails {
            None => Ok(()),
            Some(late) => {
                status.fill(Failed);
                self.held.fetch_add(if late { pages.len() } else { 0 }, Ordering::SeqCst);
                Err(BackendError {
                    backend: "fake".into(),
                    kind: if late { ErrorKind::TimedOut } else { ErrorKind::Unavailable },
                    retryable: true,
                    message: "no".into(),
                    pages_in_use: late,
                })
            }
        }
    }
}

impl StorageBackend for Fake {
    fn name(&self) -> &str {
        "fake"
    }
    fn generation(&self) -> u64 {
        0
    }
    fn limits(&self) -> BackendLimits {
        BackendLimits { preferred_batch: 8, concurrency: 2, remove: true, durable: true }
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
        self.called("exists");
        if let Some(lengths) = &self.lengths {
            return Ok(Restorable::from_mask((0..=keys.len()).map(|length| lengths.contains(&length)).collect()));
        }
        let hit = self.present.iter().take_while(|there| **there).count();
        Ok(Restorable::up_to(hit, keys.len()).with_present(self.present.clone()))
    }
    fn batch_get(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        pages: &[u32],
        _: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.paged("get", pages, status)
    }
    fn batch_set(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        pages: &[u32],
        _: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.paged("set", pages, status)
    }
    fn batch_remove(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.paged("remove", &[], status)
    }
    fn lookup(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
        _: u64,
    ) -> Result<Restorable, BackendError> {
        self.batch_exists(options, keys, held, chain)
    }
    fn load_layers(
        &self,
        _: &CallOptions,
        loads: &[LayerLoad<'_>],
        words: &Arc<[AtomicU32]>,
        watch: &mut dyn FnMut(),
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        for &layer in &self.settles {
            words[layer].store(1, Ordering::Release);
            watch();
        }
        let pages: Vec<u32> = loads.iter().flat_map(|load| load.lanes).flat_map(|lane| lane.pages).copied().collect();
        self.paged("load", &pages, status)
    }
    fn offload(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        pages: &[u32],
        _: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.paged("offload", pages, status)
    }
    fn flush(&self, _: &CallOptions) -> Result<(), BackendError> {
        self.called("flush");
        Ok(())
    }
    fn clear(&self, _: &CallOptions) -> Result<(), BackendError> {
        self.called("clear");
        Ok(())
    }
    fn stats(&self) -> Result<BackendStats, BackendError> {
        Ok(BackendStats { pages: 5, bytes_used: 10, bytes_total: 20, failures: 1 })
    }
    fn reclaim(&self, group: PoolGroup) -> Vec<u32> {
        match group {
            PoolGroup::Full => std::mem::take(&mut *self.returned.lock().unwrap()),
            _ => Vec::new(),
        }
    }
    fn quarantined(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }
}

/// Each rank has bytes of its own.
fn fan_of(ranks: Vec<Fake>) -> (Fan<Fake>, Vec<Arc<Fake>>) {
    let writers = ranks.len();
    fan_writing(ranks, writers)
}

fn fan_writing(ranks: Vec<Fake>, writers: usize) -> (Fan<Fake>, Vec<Arc<Fake>>) {
    let ranks: Vec<Arc<Fake>> = ranks.into_iter().map(Arc::new).collect();
    (Fan::new(ranks.clone(), writers), ranks)
}

fn says(says: &[PageStatus]) -> Fake {
    Fake { says: says.to_vec(), ..Fake::default() }
}

fn options() -> CallOptions {
    CallOptions::within(Duration::from_secs(60))
}

const KEYS: [PageKey; 4] = [[0; 32], [1; 32], [2; 32], [3; 32]];
const PAGES: [u32; 4] = [10, 11, 12, 13];
const FULL: PoolGroup = PoolGroup::Full;

fn get(fan: &Fan<Fake>, count: usize) -> (Result<(), BackendError>, Vec<PageStatus>) {
    let mut status = vec![PageStatus::Unset; count];
    let chain = ChainInfo::default();
    let result = fan.get(&options(), FULL, &KEYS[..count], &PAGES[..count], &chain, &mut status);
    (result, status)
}

#[test]
fn l03_a_prefix_counts_as_far_as_every_rank_has_it() {
    let present = |present: [bool; 4]| Fake { present: present.to_vec(), ..Fake::default() };
    let (fan, _) = fan_of(vec![present([true, true, true, false]), present([true, true, false, true])]);
    let found = fan.exists(&options(), &KEYS, &Held::default(), &ChainInfo::default()).unwrap();
    assert_eq!(found.longest(), 2);
    assert!(!found.has_page(2) && !found.has_page(3), "neither has what only one rank has");
}

#[test]
fn l03_lengths_of_which_ranks_have_some_are_cut_to_common_ones() {
    let lengths = |lengths: &[usize]| Fake { lengths: Some(lengths.to_vec()), ..Fake::default() };
    let (fan, _) = fan_of(vec![lengths(&[2, 4]), lengths(&[2])]);
    let found = fan.exists(&options(), &KEYS, &Held::default(), &ChainInfo::default()).unwrap();
    assert_eq!((found.longest(), found.contains(4)), (2, false), "not the least of the greatest");
}

#[test]
fn a_page_came_when_it_came_on_every_rank() {
    let (fan, _) = fan_of(vec![says(&[There, There, Missing, There]), says(&[There, Corrupt, There, Failed])]);
    let (result, status) = get(&fan, 4);
    assert_eq!((result, status), (Ok(()), vec![There, Corrupt, Missing, Failed]));
}

#[test]
fn what_one_rank_refuses_is_not_stored() {
    let (fan, ranks) = fan_of(vec![says(&[There, There]), says(&[There, Refused])]);
    let mut status = [PageStatus::Unset; 2];
    fan.set(&options(), FULL, &KEYS[..2], &PAGES[..2], &ChainInfo::default(), &mut status).unwrap();
    assert_eq!(status, [There, Refused]);
    assert!(ranks.iter().all(|rank| rank.calls() == ["set"]));
}

#[test]
fn m12_of_pages_that_all_ranks_hold_alike_one_rank_is_the_writer_and_all_read() {
    let (fan, ranks) = fan_writing(vec![says(&[There]), says(&[There]), says(&[There])], 1);
    let mut status = [PageStatus::Unset];
    fan.set(&options(), FULL, &KEYS[..1], &PAGES[..1], &ChainInfo::default(), &mut status).unwrap();
    assert_eq!(status, [There], "the others have nothing to do, and succeed");
    fan.remove(&options(), FULL, &KEYS[..1], &mut status).unwrap();
    fan.writers(|rank| rank.clear(&options())).unwrap();
    assert_eq!(get(&fan, 1).0, Ok(()));
    fan.exists(&options(), &KEYS[..1], &Held::default(), &ChainInfo::default()).unwrap();
    assert_eq!(ranks[0].calls(), ["set", "remove", "clear", "get", "exists"]);
    assert!(ranks[1..].iter().all(|rank| rank.calls() == ["get", "exists"]));
    assert_eq!(fan.stats().unwrap().bytes_used, 10, "their bytes are one object");
}

#[test]
fn m12_of_ranks_that_hold_the_same_the_first_one_writes() {
    // Two shares, each on two ranks: 0 and 2 hold the same, 1 and 3.
    let (fan, ranks) = fan_writing((0..4).map(|_| says(&[There, There])).collect(), 2);
    let mut status = [PageStatus::Unset; 2];
    fan.set(&options(), FULL, &KEYS[..2], &PAGES[..2], &ChainInfo::default(), &mut status).unwrap();
    assert_eq!(status, [There; 2]);
    assert_eq!(get(&fan, 2), (Ok(()), vec![There; 2]));
    fan.writers(|rank| rank.clear(&options())).unwrap();
    assert!(ranks[..2].iter().all(|rank| rank.calls() == ["set", "get", "clear"]));
    assert!(ranks[2..].iter().all(|rank| rank.calls() == ["get"]));
    assert_eq!(fan.stats().unwrap().bytes_used, 20, "of what two of them wrote");
    // A page that one writer refuses is not stored; one that a reader misses did not come.
    let (fan, _) = fan_writing(vec![says(&[There]), says(&[Refused]), says(&[There]), says(&[There])], 2);
    let mut status = [PageStatus::Unset];
    fan.set(&options(), FULL, &KEYS[..1], &PAGES[..1], &ChainInfo::default(), &mut status).unwrap();
    assert_eq!(status, [Refused]);
    let (fan, _) = fan_writing(vec![says(&[There]), says(&[There]), says(&[There]), says(&[Missing])], 2);
    assert_eq!(get(&fan, 1), (Ok(()), vec![Missing]));
    assert_eq!((fan.faults(3), fan.faults(0)), ((0, 1), (0, 0)));
}

#[test]
fn a_read_that_fails_on_one_rank_fails_on_all_and_says_where() {
    let failing = Fake { fails: Some(false), ..says(&[There, There]) };
    let (fan, ranks) = fan_of(vec![says(&[There, There]), failing]);
    let (result, status) = get(&fan, 2);
    let error = result.unwrap_err();
    assert_eq!((error.message.as_str(), error.pages_in_use), ("rank 1: no", false));
    assert_eq!(status, [Failed, Failed]);
    assert_eq!(ranks[0].calls(), ["get"]);
}

#[test]
fn a_rank_that_panics_has_failed() {
    let (fan, _) = fan_of(vec![says(&[There]), Fake { panics: true, ..says(&[There]) }]);
    let (result, status) = get(&fan, 1);
    assert!(result.unwrap_err().message.contains("rank 1"));
    assert_eq!(status, [Failed]);
}

#[test]
fn late_pages_are_free_when_the_last_rank_has_given_them_back() {
    let late = || Fake { fails: Some(true), ..says(&[There, There]) };
    let (fan, ranks) = fan_of(vec![late(), says(&[There, There]), late()]);
    let (result, _) = get(&fan, 2);
    assert!(result.unwrap_err().pages_in_use);
    assert_eq!(fan.quarantined(), 2);
    ranks[0].returned.lock().unwrap().extend([10, 11]);
    assert!(fan.reclaim(FULL).is_empty(), "rank 2 has them still");
    ranks[2].returned.lock().unwrap().push(11);
    assert_eq!(fan.reclaim(PoolGroup::Window), [0; 0], "they are of another group");
    assert_eq!(fan.reclaim(FULL), [11]);
    ranks[2].returned.lock().unwrap().push(10);
    assert_eq!(fan.reclaim(FULL), [10]);
    assert!(fan.reclaim(FULL).is_empty());
}

/// A late call may return before it was counted as late.
#[test]
fn pages_that_come_back_early_are_given_back_once() {
    let late = Fake { fails: Some(true), ..says(&[There]) };
    let (fan, ranks) = fan_of(vec![late, says(&[There])]);
    ranks[0].returned.lock().unwrap().push(10);
    assert!(fan.reclaim(FULL).is_empty(), "nobody is known to wait for it");
    assert!(get(&fan, 1).0.unwrap_err().pages_in_use);
    assert_eq!(fan.reclaim(FULL), [10]);
    assert!(fan.reclaim(FULL).is_empty());
}

#[test]
fn all_ranks_are_asked_as_suits_the_one_that_can_do_least() {
    let (fan, ranks) = fan_of(vec![Fake::default(), Fake::default()]);
    assert_eq!(fan.limits(), ranks[0].limits());
    let figures = fan.stats().unwrap();
    assert_eq!((figures.pages, figures.bytes_used, figures.failures), (5, 20, 2));
}

#[test]
fn what_fails_on_one_rank_is_counted_there() {
    let failing = Fake { fails: Some(false), ..says(&[There, There]) };
    let (fan, _) = fan_of(vec![says(&[There, Missing]), failing]);
    get(&fan, 2).0.unwrap_err();
    assert_eq!((fan.faults(0), fan.faults(1)), ((0, 0), (1, 1)), "the second page came on none");
    let (fan, _) = fan_of(vec![says(&[There, Corrupt]), says(&[There, There])]);
    get(&fan, 2).0.unwrap();
    assert_eq!((fan.faults(0), fan.faults(1)), ((0, 1), (0, 0)));
    assert_eq!(fan.faults(7), (0, 0));
}

/// Loads by the linker face.
mod layers {
    use super::*;

    const CHAIN: ChainInfo<'static> = ChainInfo { position: 0, prefix_keys: &[], session_id: "" };

    fn words(count: usize) -> Arc<[AtomicU32]> {
        (0..count).map(|_| AtomicU32::new(0)).collect()
    }

    fn values(words: &[AtomicU32]) -> Vec<u32> {
        words.iter().map(|word| word.load(Ordering::Acquire)).collect()
    }

    /// Loads four pages of three layers; the words at the last look, and what came.
    fn load(fan: &Fan<Fake>, words: &Arc<[AtomicU32]>) -> (Vec<u32>, Result<(), BackendError>, Vec<PageStatus>) {
        let mut status = [PageStatus::Unset; 4];
        let none = LoadLane::default();
        let lanes = [LoadLane { from: 0, pages: &PAGES }, none, none];
        let loads = [LayerLoad { request: 7, start: 0, keys: &KEYS, lanes }];
        let mut last = Vec::new();
        let result = fan.load_layers(&options(), &loads, words, &mut || last = values(words), &mut status);
        (last, result, status.to_vec())
    }

    #[test]
    fn l03_lengths_are_agreed_on_by_the_linker_face_too() {
        let lengths = |lengths: &[usize]| Fake { lengths: Some(lengths.to_vec()), ..Fake::default() };
        let (fan, _) = fan_of(vec![lengths(&[2, 4]), lengths(&[2])]);
        let found = fan.lookup(&options(), &KEYS, &Held::default(), &CHAIN, 7).unwrap();
        assert_eq!((found.longest(), found.contains(4)), (2, false));
    }

    #[test]
    fn a_layer_is_settled_when_it_is_on_every_rank() {
        let settles = |layers: &[usize]| Fake { settles: layers.to_vec(), ..says(&[There; 4]) };
        let (fan, ranks) = fan_of(vec![settles(&[0, 1, 2]), settles(&[0, 2])]);
        let words = words(3);
        let (last, result, status) = load(&fan, &words);
        assert_eq!((result, status), (Ok(()), vec![There; 4]));
        assert_eq!((last, values(&words)), (vec![1, 0, 1], vec![1, 0, 1]), "the second rank has no layer 1");
        assert!(ranks.iter().all(|rank| rank.calls() == ["load"]));
    }

    #[test]
    fn l37_a_load_that_fails_on_one_rank_fails_on_all() {
        let (fan, _) = fan_of(vec![says(&[There; 4]), Fake { fails: Some(true), ..says(&[There; 4]) }]);
        let (_, result, status) = load(&fan, &words(3));
        let error = result.unwrap_err();
        assert_eq!((error.message.as_str(), error.pages_in_use), ("rank 1: no", true));
        assert_eq!(status, [Failed; 4]);
        assert_eq!(fan.quarantined(), 4);
        let (fan, _) = fan_of(vec![says(&[There; 4]), Fake { panics: true, ..says(&[There; 4]) }]);
        assert!(load(&fan, &words(3)).1.unwrap_err().message.contains("rank 1 panicked"));
    }

    #[test]
    fn m12_of_pages_that_all_ranks_hold_alike_one_rank_offloads() {
        for writers in [1, 2, 4] {
            let (fan, ranks) = fan_writing((0..4).map(|_| says(&[There; 4])).collect(), writers);
            let mut status = [PageStatus::Unset; 4];
            fan.offload(&options(), FULL, &KEYS, &PAGES, &CHAIN, &mut status).unwrap();
            assert_eq!(status, [There; 4]);
            let wrote: Vec<bool> = ranks.iter().map(|rank| rank.calls() == ["offload"]).collect();
            assert_eq!(wrote, (0..4).map(|rank| rank < writers).collect::<Vec<_>>());
        }
    }

    #[test]
    fn l16_l07_what_one_rank_does_not_offload_is_not_stored() {
        let (fan, _) = fan_of(vec![says(&[There; 4]), says(&[There, There, Refused, There])]);
        let mut status = [PageStatus::Unset; 4];
        fan.offload(&options(), FULL, &KEYS, &PAGES, &CHAIN, &mut status).unwrap();
        assert_eq!(status, [There, There, Refused, There]);
    }
}
