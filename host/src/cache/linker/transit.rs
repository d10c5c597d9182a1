//! A batch of loads on its way through the transit pages, or straight to the device.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use smallvec::SmallVec;

use super::run::{LoadRun, Verdict};
use crate::cache::controller::Shared;
use crate::cache::pool::{DirectPool, HostPool, Transfers};
use crate::cache::seal::SealFault;
use crate::cache::stats::StorageResult;
use crate::cache::unified::{Component, PerComponent};
use crate::plugin::backend::PageStatus;

/// A page's place: its run, its component, and where it is among the pages of that.
pub(super) type Position = (usize, Component, usize);

/// What has come of a batch.
pub(super) struct Passage<'a> {
    shared: &'a Shared,
    pub runs: &'a [Arc<LoadRun>],
    /// The device's pages of each component that the backend fills itself.
    direct: PerComponent<Option<&'a DirectPool>>,
    pub words: Arc<[AtomicU32]>,
    landed: Vec<bool>,
    /// For each run and page of a component the checksums of its parts, in order, as far as their layers have landed.
    sums: Vec<PerComponent<Vec<Vec<u32>>>>,
    /// Whether the device takes the checksums, of what it has got, when all layers are there.
    by_device: PerComponent<bool>,
    /// Pages that could not be copied to the device, or looked at there.
    uncopied: Vec<PerComponent<Vec<bool>>>,
    judged: bool,
}

impl<'a> Passage<'a> {
    /// Nothing has come yet. The seals that the transit pages may still have from earlier are wiped.
    pub fn new(shared: &'a Shared, runs: &'a [Arc<LoadRun>]) -> Self {
        let layers = shared.layers();
        let attached = runs.first().map(|run| &run.origin.attached);
        let direct = Component::ALL.map(|component| shared.direct_of(attached?, component));
        let direct = PerComponent(direct);
        for (component, host) in shared.hosts() {
            for &page in runs.iter().flat_map(|run| run.span.moved_by(component, direct[component].is_some())) {
                // SAFETY: the load alone holds the page, and no call on it runs yet.
                unsafe {
                    match direct[component] {
                        Some(direct) => direct.wipe_seal(page),
                        None => host.wipe_seal(page),
                    }
                }
            }
        }
        let parts = |component: Component| shared.host_of(component).map_or(0, |host| host.component_layers().count());
        let sums_of = |run: &LoadRun| {
            let of = |component: Component| vec![vec![0; parts(component)]; run.span.device[component].len()];
            PerComponent(Component::ALL.map(of))
        };
        let by_device =
            |component: Component| shared.pools(component).is_some_and(|(device, _)| device.takes_checksums());
        let none_of = |run: &LoadRun| PerComponent(run.span.device.0.each_ref().map(|slots| vec![false; slots.len()]));
        Passage {
            shared,
            runs,
            direct,
            words: (0..layers).map(|_| AtomicU32::new(0)).collect(),
            landed: vec![false; layers],
            sums: runs.iter().map(|run| sums_of(run)).collect(),
            by_device: PerComponent(Component::ALL.map(by_device)),
            uncopied: runs.iter().map(|run| none_of(run)).collect(),
            judged: false,
        }
    }

    /// Takes in the layers that are settled. When all are, and all pages are right, the verdict need not wait for the end of the call.
    pub fn look(&mut self) {
        for layer in 0..self.landed.len() {
            if !self.landed[layer] && self.words[layer].load(Ordering::Acquire) == 1 {
                self.land(layer);
            }
        }
        if !self.judged && self.landed.iter().all(|&landed| landed) {
            self.judged = true;
            self.sum_on_device();
            for (index, run) in self.runs.iter().enumerate() {
                let whole = |component: Component| {
                    let mut pages = 0..run.span.device[component].len();
                    pages.all(|page| self.check((index, component, page)).is_ok())
                        && !self.uncopied[index][component].contains(&true)
                };
                if Component::ALL.into_iter().all(whole) {
                    run.end(Verdict { good: run.pages(), reason: None });
                }
            }
        }
    }

    fn land(&mut self, layer: usize) {
        self.landed[layer] = true;
        let shared = self.shared;
        // Checksums come first: bytes that were not all there when they were taken are no hit, so what is copied after them is what they
        // stand for.
        for (component, host) in shared.hosts().into_iter().filter(|(component, _)| !self.by_device[*component]) {
            let parts: Vec<usize> = host.component_layers().collect();
            for (run, sums) in self.runs.iter().zip(&mut self.sums) {
                // SAFETY: the load holds the transit pages, and the plugin touches the layer no more.
                unsafe {
                    sum_up(host, &run.span.transit[component], &mut sums[component], |part| parts[part] == layer)
                };
            }
        }
        let of = |component| shared.pools(component).map_or(1, |(device, _)| device.pages_at_once());
        let at_once = PerComponent(Component::ALL.map(of));
        let direct = &self.direct;
        for (run, uncopied) in self.runs.iter().zip(&mut self.uncopied) {
            run.land(layer, &at_once, |component, pages| {
                if direct[component].is_some() {
                    // They are where they belong.
                    return Transfers::new();
                }
                // SAFETY: as above, and the load holds the transit pages until its copies have come.
                let begun = unsafe { begin_layer_in(shared, run, component, pages.clone(), layer) };
                begun.unwrap_or_else(|| {
                    uncopied[component][pages].fill(true);
                    Transfers::new()
                })
            });
        }
    }

    /// Takes the checksums of all that has come, of the components whose device does so.
    fn sum_on_device(&mut self) {
        let shared = self.shared;
        for component in Component::ALL.into_iter().filter(|&component| self.by_device[component]) {
            let Some((device, host)) = shared.pools(component) else { continue };
            for ((run, sums), uncopied) in self.runs.iter().zip(&mut self.sums).zip(&mut self.uncopied) {
                let slots = &run.span.device[component];
                if slots.is_empty() {
                    continue;
                }
                if self.direct[component].is_some() {
                    // Nobody gets the slots before the call has returned, whoever wants them back.
                    match device.checksums(slots, true, &run.moments[component]) {
                        Ok(Some(taken)) => sums[component] = taken,
                        Ok(None) => uncopied[component].fill(true),
                        Err(error) => {
                            tracing::error!(%error, "what a backend wrote to the device could not be verified");
                            uncopied[component].fill(true);
                        }
                    }
                    continue;
                }
                let taken = run.arrive().and_then(|()| {
                    let take = || device.checksums(slots, host.is_by_heads(), &run.moments[component]);
                    run.read_slots(take).unwrap_or(Ok(None))
                });
                match taken {
                    Ok(Some(taken)) => sums[component] = taken,
                    // SAFETY: the load holds the transit pages, and all layers have been settled.
                    _ => unsafe { sum_up(host, &run.span.transit[component], &mut sums[component], |_| true) },
                }
            }
        }
    }

    /// Whether a page, the one at this place of its run and component, is what its key says.
    fn check(&self, (run, component, page): Position) -> Result<(), SealFault> {
        let (span, sums) = (&self.runs[run].span, &self.sums[run][component][page]);
        let key = span.keys_of(component).get(page).ok_or(SealFault::Damaged)?;
        if let Some(direct) = self.direct[component] {
            // SAFETY: as below.
            return unsafe { direct.verify(span.device[component][page], key, sums) };
        }
        let host = self.shared.host_of(component).ok_or(SealFault::Damaged)?;
        // SAFETY: the load holds the page. A seal that is still being written does not verify, and is looked at again.
        unsafe { host.verify_sums(span.transit[component][page], key, sums) }
    }

    /// How a page counts at the end of the call: by its seal if all layers came, else by what was said of it.
    pub fn result(&self, at: Position, status: PageStatus, fault: Option<StorageResult>) -> StorageResult {
        let (run, component, page) = at;
        if self.landed.iter().all(|&landed| landed) && !self.uncopied[run][component][page] {
            match self.check(at) {
                Ok(()) => return StorageResult::Ok,
                Err(error) if status == PageStatus::Ok => {
                    let backend = self.runs[run].origin.attached.name();
                    tracing::warn!(backend, %error, "a page from storage is not what it should be");
                    return StorageResult::Corrupt;
                }
                Err(_) => {}
            }
        }
        match status {
            PageStatus::Missing => StorageResult::Missing,
            PageStatus::Corrupt => StorageResult::Corrupt,
            PageStatus::Refused => StorageResult::Refused,
            PageStatus::Ok | PageStatus::Failed | PageStatus::Unset => fault.unwrap_or(StorageResult::Failed),
        }
    }
}

/// Takes the checksums of transit pages, of the parts that are `wanted`.
///
/// # Safety
/// The caller holds the pages, and nobody writes these parts of them.
unsafe fn sum_up(host: &HostPool, pages: &[u32], sums: &mut [Vec<u32>], wanted: impl Fn(usize) -> bool) {
    for (&page, sums) in pages.iter().zip(sums) {
        for (part, sum) in sums.iter_mut().enumerate().filter(|(part, _)| wanted(*part)) {
            // SAFETY: the caller's promise.
            *sum = unsafe { host.checksum(page, part) };
        }
    }
}

/// Starts to copy a layer of transit pages of a load to their slots; none if that failed.
///
/// # Safety
/// The layer of the transit pages is complete, and nobody writes it before the copies have come; the slots are the load's, and whoever reads that
/// layer of them waits for its gate and for its copies.
unsafe fn begin_layer_in(
    shared: &Shared,
    run: &LoadRun,
    component: Component,
    pages: Range<usize>,
    layer: usize,
) -> Option<Transfers> {
    let (device, host) = shared.pools(component)?;
    let (slots, transit) = (&run.span.device[component], &run.span.transit[component]);
    let pairs: SmallVec<[(u32, u32); 8]> = pages.map(|page| (slots[page], transit[page])).collect();
    // SAFETY: the transit pages were made for this memory, and what was computed since the load's moments does not know its slots; the rest is the
    // caller's promise.
    match unsafe { device.begin_layer_in(&run.moments[component], layer, &pairs, host) } {
        Ok(transfers) => Some(transfers),
        Err(error) => {
            tracing::error!(%error, pages = pairs.len(), layer, "a layer could not be copied to the device");
            None
        }
    }
}
