//! Pages of side pools that storage has lost or changed: what needs them is computed again, and the answer is the same.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

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
        let at = pool.base as u64 + piece.offset + u64::from(page) * piece.stride;
        // SAFETY: the page lies in the mapping, which lives as long as the process, and the call that fills it runs.
        unsafe { *(at as *mut u8) ^= 0x40 };
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
        let Some(place) = place else { return Ok(answer) };
        self.met.fetch_add(1, Ordering::SeqCst);
        let lengths = (0..=keys.len()).map(|length| length == 0).collect();
        let mut changed = Restorable::from_mask(lengths);
        for group in PoolGroup::ALL {
            let there = |page: usize| answer.names(group, page) && (group, page) != (self.group, place);
            changed = changed.with_present_of(group, (0..keys.len()).map(there).collect());
        }
        Ok(changed)
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
                Fault::Unknown => return Ok(()),
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
struct Case {
    family: &'static str,
    group: PoolGroup,
    page: usize,
    fault: Fault,
    most: usize,
}

fn faults_are_computed_around(cases: &[Case]) {
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
            let setup = Setup { folder: Some(storage.path()), ..Setup::default() };
            let rig = family.start(setup);
            rig.run("fill", &prompt, NEW, None).came_from(Tier::Nowhere, 0);
            rig.stop();
            let met = Arc::new(AtomicUsize::new(0));
            let counted = met.clone();
            let rig = family.start_over(setup, move |inner, pools| {
                Arc::new(Faulty { inner, pools, group, page: place, fault, met: counted.clone() })
            });
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

fn case(family: &'static str, group: PoolGroup, page: usize, fault: Fault, most: usize) -> Case {
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
