//! A batch of loads on its way through the transit pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::run::{LoadRun, Verdict};
use crate::cache::controller::Shared;
use crate::cache::seal::SealFault;
use crate::cache::stats::StorageResult;
use crate::cache::types::MissReason;
use crate::plugin::backend::PageStatus;

/// What has come of a batch.
pub(super) struct Passage<'a> {
    shared: &'a Shared,
    pub runs: &'a [Arc<LoadRun>],
    pub words: Arc<[AtomicU32]>,
    landed: Vec<bool>,
    /// For each run and page the checksums of its components, in order, as far as their layers have landed.
    sums: Vec<Vec<Vec<u32>>>,
    /// Pages that could not be copied to the device.
    uncopied: Vec<Vec<bool>>,
    judged: bool,
}

impl<'a> Passage<'a> {
    /// Nothing has come yet. The seals that the transit pages may still have from earlier are wiped.
    pub fn new(shared: &'a Shared, runs: &'a [Arc<LoadRun>]) -> Self {
        let layers = shared.host.layers();
        let components = shared.host.component_layers().count();
        for page in runs.iter().flat_map(|run| &run.transit) {
            // SAFETY: the load alone holds the page, and no call on it runs yet.
            unsafe { shared.host.wipe_seal(*page) };
        }
        Passage {
            shared,
            runs,
            words: (0..layers).map(|_| AtomicU32::new(0)).collect(),
            landed: vec![false; layers],
            sums: runs.iter().map(|run| vec![vec![0; components]; run.pages()]).collect(),
            uncopied: runs.iter().map(|run| vec![false; run.pages()]).collect(),
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
            for (index, run) in self.runs.iter().enumerate() {
                if (0..run.pages()).all(|page| self.check(index, page).is_ok()) {
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
        let components: Vec<usize> = shared.host.component_layers().collect();
        for (run, sums) in self.runs.iter().zip(&mut self.sums) {
            for (&page, sums) in run.transit.iter().zip(sums) {
                for (component, sum) in sums.iter_mut().enumerate() {
                    if components[component] == layer {
                        // SAFETY: the load holds the transit page, and the plugin touches the layer no more.
                        *sum = unsafe { shared.host.checksum(page, component) };
                    }
                }
            }
        }
        for (run, uncopied) in self.runs.iter().zip(&mut self.uncopied) {
            run.land(layer, |page, slot| {
                // SAFETY: as above. The slot is the load's, and whoever reads it waits for the gate.
                let copied = unsafe { copy_layer_in(shared, run.transit[page], layer, slot) };
                uncopied[page] |= !copied;
            });
        }
    }

    /// Whether a page is what its key says.
    fn check(&self, run: usize, page: usize) -> Result<(), SealFault> {
        let (load, sums) = (&self.runs[run], &self.sums[run][page]);
        let key = load.own_keys().get(page).ok_or(SealFault::Damaged)?;
        // SAFETY: the load holds the page. A seal that is still being written does not verify, and is looked at again.
        unsafe { self.shared.host.verify_sums(load.transit[page], key, sums) }
    }

    /// How a page counts at the end of the call: by its seal if all layers came, else by what was said of it.
    pub fn result(&self, run: usize, page: usize, status: PageStatus, fault: Option<StorageResult>) -> StorageResult {
        if self.landed.iter().all(|&landed| landed) && !self.uncopied[run][page] {
            match self.check(run, page) {
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

/// What the results of a load's pages come to.
pub(super) fn verdict(results: &[StorageResult]) -> Verdict {
    let good = results.iter().take_while(|&&result| result == StorageResult::Ok).count();
    let reason = results.get(good).map(|result| match result {
        StorageResult::Corrupt => MissReason::Corrupt,
        StorageResult::Late => MissReason::BackendSlow,
        StorageResult::Missing => MissReason::Evicted,
        StorageResult::Ok | StorageResult::Refused | StorageResult::Failed => MissReason::BackendFailed,
    });
    Verdict { good, reason }
}

/// Copies a layer of a transit page to the device; false if that failed.
///
/// # Safety
/// The layer of the transit page is complete and nobody writes it; the slot is the caller's, and nobody reads that layer of it yet.
unsafe fn copy_layer_in(shared: &Shared, from: u32, layer: usize, to: u32) -> bool {
    // SAFETY: the transit pages were made for this memory; the rest is the caller's promise.
    match unsafe { shared.device.copy_layer_in(layer, &shared.host, from, to) } {
        Ok(()) => true,
        Err(error) => {
            tracing::error!(%error, page = to, layer, "a layer could not be copied to the device");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_good_up_to_its_first_bad_page() {
        use StorageResult::{Corrupt, Failed, Late, Missing, Ok};
        let of = |results: &[StorageResult]| verdict(results);
        assert_eq!(of(&[Ok, Ok]), Verdict { good: 2, reason: None });
        assert_eq!(of(&[Ok, Missing, Ok]), Verdict { good: 1, reason: Some(MissReason::Evicted) });
        assert_eq!(of(&[Corrupt]), Verdict { good: 0, reason: Some(MissReason::Corrupt) });
        assert_eq!(of(&[Late]).reason, Some(MissReason::BackendSlow));
        assert_eq!(of(&[Failed]).reason, Some(MissReason::BackendFailed));
        assert_eq!(of(&[]), Verdict { good: 0, reason: None });
    }
}
