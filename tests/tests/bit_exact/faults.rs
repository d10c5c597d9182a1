//! Pages of side pools that storage has lost or changed: what needs them is computed again, and the answer is the same.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvdock::plugin::backend::*;

use super::families::Family;
use super::rig::{Setup, Tier};

/// What is wrong with a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The store says that it has it, and does not deliver it.
    Missing,
    /// The store says that it does not have it.
    Unknown,
    /// Its bytes in this pool are not those that were stored.
    Changed(&'static str),
    /// In linker mode: a load ends with an error at this layer; neither it nor those after it come.
    FailsAt(usize),
    /// In linker mode: a load says of this page and those after it nothing, and they do not come.
    Short,
    /// In linker mode: a load brings nothing, and says so late.
    Hangs,
    /// In linker mode: a load does not go on while `hold` is set.
    Waits,
}

/// A store with something wrong in one page of a group.
pub struct Faulty {
    pub inner: Arc<dyn StorageBackend>,
    pub pools: Vec<HostPoolDescription>,
    pub group: PoolGroup,
    /// The page's place in its sequence.
    pub page: usize,
    pub fault: Fault,
    /// How often the fault was met.
    pub met: Arc<AtomicUsize>,
    /// Whether a load that waits goes on waiting.
    pub hold: Arc<AtomicBool>,
}

/// A fault to be put between cache and store.
#[derive(Clone)]
pub struct Ordered {
    pub group: PoolGroup,
    pub page: usize,
    pub fault: Fault,
    pub met: Arc<AtomicUsize>,
    pub hold: Arc<AtomicBool>,
}

impl Ordered {
    pub fn new(group: PoolGroup, page: usize, fault: Fault) -> Self {
        Ordered { group, page, fault, met: Arc::default(), hold: Arc::default() }
    }

    /// The store with the fault.
    pub fn over(&self, inner: Arc<dyn StorageBackend>, pools: Vec<HostPoolDescription>) -> Arc<dyn StorageBackend> {
        let Ordered { group, page, fault, met, hold } = self.clone();
        Arc::new(Faulty { inner, pools, group, page, fault, met, hold })
    }

    /// Waits until the fault was met.
    pub fn wait_met(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.met.load(Ordering::SeqCst) == 0 {
            assert!(Instant::now() < deadline, "{:?} was never met", self.fault);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Faulty {
    /// The index of the page among `keys`.
    fn place(&self, keys: &[PageKey], chain: &ChainInfo<'_>) -> Option<usize> {
        self.page.checked_sub(chain.position as usize).filter(|&place| place < keys.len())
    }

    /// Changes a byte of page `page` in the pool called `name`.
    fn change(&self, name: &str, page: u32) {
        let pool = self.pools.iter().find(|pool| pool.name == name).expect("a pool of this name");
        let piece = pool.segments[0];
        let base = match piece.region {
            0 => pool.base as u64,
            // This process reaches the memory of the GPU that there is here.
            region => pool.device[region as usize - 1].base,
        };
        let at = base + piece.offset + u64::from(page) * piece.stride;
        // SAFETY: the page lies in memory that lives as long as the pools, and the call that fills it runs.
        unsafe { *(at as *mut u8) ^= 0x40 };
    }

    /// Changes a page in whatever pool of the group has bytes.
    fn spoil(&self, page: u32) {
        let pool = self.pools.iter().find(|pool| pool.group == self.group && !pool.segments.is_empty());
        self.change(&pool.expect("a pool with bytes").name, page);
    }

    fn error(&self, kind: ErrorKind) -> BackendError {
        let (backend, message) = (self.name().to_owned(), "on order".to_owned());
        BackendError { backend, kind, retryable: false, message, pages_in_use: false }
    }

    /// Does to a load that has come what is ordered. Says how many layers are told of.
    fn spoil_load(&self, loads: &[LayerLoad<'_>], status: &mut [PageStatus]) -> usize {
        let mut at = 0;
        for load in loads {
            for group in PoolGroup::ALL {
                let lane = load.lanes[group as usize];
                let place = self.page.checked_sub(lane.from).filter(|&place| place < lane.pages.len());
                if let Some(place) = place.filter(|_| group == self.group) {
                    match self.fault {
                        Fault::Missing => {
                            self.spoil(lane.pages[place]);
                            status[at + place] = PageStatus::Missing;
                        }
                        Fault::Changed(pool) => self.change(pool, lane.pages[place]),
                        Fault::Short => {
                            lane.pages[place..].iter().for_each(|&page| self.spoil(page));
                            status[at + place..at + lane.pages.len()].fill(PageStatus::Unset);
                        }
                        Fault::Unknown | Fault::FailsAt(_) | Fault::Hangs | Fault::Waits => continue,
                    }
                    self.met.fetch_add(1, Ordering::SeqCst);
                }
                at += lane.pages.len();
            }
        }
        match self.fault {
            Fault::FailsAt(layer) => {
                self.met.fetch_add(1, Ordering::SeqCst);
                layer
            }
            _ => usize::MAX,
        }
    }

    fn forget(&self, answer: Restorable, place: usize, keys: &[PageKey]) -> Restorable {
        self.met.fetch_add(1, Ordering::SeqCst);
        let lengths = (0..=keys.len()).map(|length| length == 0).collect();
        let mut changed = Restorable::from_mask(lengths);
        for group in PoolGroup::ALL {
            let there = |page: usize| answer.names(group, page) && (group, page) != (self.group, place);
            changed = changed.with_present_of(group, (0..keys.len()).map(there).collect());
        }
        changed
    }
}

impl StorageBackend for Faulty {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn generation(&self) -> u64 {
        self.inner.generation()
    }
    fn limits(&self) -> BackendLimits {
        self.inner.limits()
    }
    fn settings(&self) -> &BackendSettings {
        self.inner.settings()
    }
    fn batch_exists(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError> {
        let answer = self.inner.batch_exists(options, keys, held, chain)?;
        let place = self.place(keys, chain).filter(|_| self.fault == Fault::Unknown);
        Ok(match place {
            Some(place) => self.forget(answer, place, keys),
            None => answer,
        })
    }
    fn has_linker(&self) -> bool {
        self.inner.has_linker()
    }
    fn is_direct(&self) -> bool {
        self.inner.is_direct()
    }
    /// Unknown is a page in whose place nothing can be restored any more.
    fn lookup(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
        request: u64,
    ) -> Result<Restorable, BackendError> {
        let answer = self.inner.lookup(options, keys, held, chain, request)?;
        let Some(place) = self.place(keys, chain).filter(|_| self.fault == Fault::Unknown) else { return Ok(answer) };
        self.met.fetch_add(1, Ordering::SeqCst);
        let reach = self.pools.iter().filter(|pool| pool.group == self.group).map(|pool| match pool.hit {
            PoolHit::AllPages => usize::MAX,
            PoolHit::TrailingPages(pages) => pages as usize,
        });
        let reach = reach.max().expect("a pool of the group");
        let lengths = (0..=keys.len()).map(|length| {
            let stands_on_it = length > place && length - place <= reach;
            answer.contains(length) && !stands_on_it
        });
        Ok(Restorable::from_mask(lengths.collect()))
    }
    fn load_layers(
        &self,
        options: &CallOptions,
        loads: &[LayerLoad<'_>],
        words: &Arc<[AtomicU32]>,
        watch: &mut dyn FnMut(),
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        if self.fault == Fault::Hangs || self.fault == Fault::Waits {
            self.met.fetch_add(1, Ordering::SeqCst);
            let until = Instant::now() + Duration::from_millis(200);
            while self.fault == Fault::Hangs || self.hold.load(Ordering::SeqCst) {
                if options.is_cancelled() || (self.fault == Fault::Hangs && Instant::now() >= until) {
                    return Err(self.error(ErrorKind::TimedOut));
                }
                watch();
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let behind: Arc<[AtomicU32]> = words.iter().map(|_| AtomicU32::new(0)).collect();
        self.inner.load_layers(options, loads, &behind, &mut || {}, status)?;
        let told = self.spoil_load(loads, status);
        for (layer, word) in words.iter().enumerate().take(told) {
            word.store(behind[layer].load(Ordering::Acquire), Ordering::Release);
            watch();
        }
        if told < words.len() { Err(self.error(ErrorKind::Unavailable)) } else { Ok(()) }
    }
    fn offload(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.inner.offload(options, group, keys, pages, chain, status)
    }
    fn batch_get(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.inner.batch_get(options, group, keys, pages, chain, status)?;
        if let Some(place) = self.place(keys, chain).filter(|_| group == self.group) {
            match self.fault {
                Fault::Missing => status[place] = PageStatus::Missing,
                Fault::Changed(pool) => self.change(pool, pages[place]),
                Fault::Unknown | Fault::FailsAt(_) | Fault::Short | Fault::Hangs | Fault::Waits => return Ok(()),
            }
            self.met.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    }
    fn batch_set(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.inner.batch_set(options, group, keys, pages, chain, status)
    }
    fn batch_remove(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.inner.batch_remove(options, group, keys, status)
    }
    fn flush(&self, options: &CallOptions) -> Result<(), BackendError> {
        self.inner.flush(options)
    }
    fn clear(&self, options: &CallOptions) -> Result<(), BackendError> {
        self.inner.clear(options)
    }
    fn stats(&self) -> Result<BackendStats, BackendError> {
        self.inner.stats()
    }
    fn reclaim(&self, group: PoolGroup) -> Vec<u32> {
        self.inner.reclaim(group)
    }
    fn quarantined(&self) -> usize {
        self.inner.quarantined()
    }
}

const PAGES: usize = 5;
const NEW: u32 = 3;

/// A fault in page `page` of a group leaves at most `most` pages that come from storage.
pub struct Case {
    family: &'static str,
    group: PoolGroup,
    page: usize,
    fault: Fault,
    most: usize,
}

fn faults_are_computed_around(cases: &[Case]) {
    faults_in(Setup::default(), cases);
}

/// Runs cases with engines of this kind.
pub fn faults_in(kind: Setup<'_>, cases: &[Case]) {
    let mut names = HashSet::new();
    for family in cases.iter().map(|case| case.family).filter(|&family| names.insert(family)) {
        let (family, of) = (Family::new(family), cases.iter().filter(|case| case.family == family));
        let page = family.page();
        let prompt = family.ids("fault", PAGES * page + 2);
        let reference = {
            let rig = family.start(Setup::default());
            let cold = rig.run("cold", &prompt, NEW, None);
            rig.stop();
            cold.rows
        };
        for &Case { family: name, group, page: place, fault, most } in of {
            let what = format!("{name}, {} page {place}: {fault:?}", group.as_str());
            let storage = tempfile::tempdir().unwrap();
            let setup = Setup { folder: Some(storage.path()), ..kind };
            let rig = family.start(setup);
            rig.run("fill", &prompt, NEW, None).came_from(Tier::Nowhere, 0);
            rig.stop();
            let ordered = Ordered::new(group, place, fault);
            let met = ordered.met.clone();
            let rig = family.start_over(setup, move |inner, pools| ordered.over(inner, pools));
            let run = rig.run("stored", &prompt, NEW, None);
            reference.must_equal(&run.rows, &what);
            assert!(met.load(Ordering::SeqCst) > 0, "{what}: nobody met it");
            assert!(run.cached() <= (most * page) as u32, "{what}: {} tokens from storage", run.cached());
            rig.check_integrity();
            // What was computed is there for the next one.
            let again = rig.run("again", &prompt, NEW, None);
            again.came_from(Tier::Device, (PAGES * page) as u32);
            reference.must_equal(&again.rows, &what);
            rig.check_integrity();
            rig.stop();
        }
    }
}

pub fn case(family: &'static str, group: PoolGroup, page: usize, fault: Fault, most: usize) -> Case {
    Case { family, group, page, fault, most }
}

#[test]
fn a_page_of_an_indexer_that_changed_is_computed() {
    use PoolGroup::Full;
    faults_are_computed_around(&[
        case("glm_dsa", Full, 3, Fault::Changed("indexer"), 3),
        case("glm_dsa", Full, 3, Fault::Changed("kv"), 3),
        case("glm_dsa", Full, 0, Fault::Missing, 0),
        case("glm_dsa", Full, 2, Fault::Unknown, 2),
    ]);
}

#[test]
fn windows_and_rings_that_are_lost_or_changed_are_computed() {
    use PoolGroup::{Full, Window};
    faults_are_computed_around(&[
        case("dsv4", Full, 2, Fault::Changed("deepseek_v4_c4"), 2),
        case("dsv4", Window, PAGES - 1, Fault::Changed("swa"), PAGES - 1),
        case("dsv4", Window, PAGES - 1, Fault::Changed("deepseek_v4_c4_state"), PAGES - 1),
        case("dsv4", Window, PAGES - 1, Fault::Unknown, PAGES - 1),
        case("gpt_oss", Window, PAGES - 2, Fault::Changed("swa"), PAGES - 2),
        case("gpt_oss", Window, PAGES - 1, Fault::Missing, PAGES - 1),
        case("gpt_oss", Window, PAGES - 1, Fault::Unknown, PAGES - 1),
        case("gpt_oss", Full, 1, Fault::Missing, 1),
    ]);
}

#[test]
fn states_that_are_lost_or_changed_are_computed() {
    use PoolGroup::{Full, State};
    faults_are_computed_around(&[
        case("qwen3_next", State, PAGES - 1, Fault::Changed("mamba"), 0),
        case("qwen3_next", State, PAGES - 1, Fault::Missing, 0),
        case("qwen3_next", State, PAGES - 1, Fault::Unknown, 0),
        case("qwen3_next", Full, 1, Fault::Changed("kv"), 0),
    ]);
}
