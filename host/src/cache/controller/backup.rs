//! Writing host pages to storage.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::attached::{Attached, CallFault, Way};
use super::guard::cancel::CancelSet;
use super::paged::{PagedCall, PagedOutcome};
use super::{Event, Shared, copy_out};
use crate::cache::pool::{DirectPool, HostPool, Moments};
use crate::cache::stats::{StorageOp, StorageResult};
use crate::cache::unified::{Component, KeyPath, PerComponent};
use crate::plugin::backend::{PageKey, PageStatus};

/// Host pages of one component in a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StorePart {
    /// Whose pages.
    pub component: Component,
    /// Pages of the sequence before the first one; for a state, before the page that it stands at the end of.
    pub position: usize,
    /// Host pages; in linker mode transit pages, by way of which the device pages go, as many at a time. None where the backend reads the device
    /// pages itself.
    pub pages: Vec<u32>,
    /// In linker mode the device pages; the job's nodes are locked. Else none.
    pub device: Vec<u32>,
}

impl StorePart {
    /// Whether the pages are on the device, and go by the linker face.
    fn is_linked(&self) -> bool {
        !self.device.is_empty()
    }

    /// How many pages are to be stored.
    pub fn count(&self) -> usize {
        if self.is_linked() { self.device.len() } else { self.pages.len() }
    }
}

/// Host pages, or in linker mode device pages, of one or more nodes in a row, to be stored in one backend. The operation holds the pages.
pub(crate) struct StoreJob {
    /// Which job it is.
    pub id: u64,
    /// The backend.
    pub target: Arc<Attached>,
    /// The backend's bit in the tree when the job began.
    pub bit: u64,
    /// How often its store had been emptied when the job began.
    pub emptied: u32,
    /// The way from the start of the sequence to the last page.
    pub path: KeyPath,
    /// What is stored: pages of all tokens last.
    pub parts: Vec<StorePart>,
    /// Session the pages come from, or empty.
    pub session: String,
    /// Times this was tried before.
    pub attempt: u32,
}

impl StoreJob {
    /// Pages of all tokens that are to be stored.
    pub fn count(&self) -> usize {
        self.parts.iter().filter(|part| part.component == Component::Full).map(StorePart::count).sum()
    }
}

impl std::fmt::Debug for StoreJob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let target = self.target.name();
        f.debug_struct("StoreJob").field("id", &self.id).field("target", &target).finish_non_exhaustive()
    }
}

/// What became of a store job.
#[derive(Debug)]
pub(crate) struct StoreReport {
    /// The job.
    pub job: StoreJob,
    /// Pages of all tokens that the backend newly acknowledged.
    pub stored: usize,
    /// Pages of all tokens that it does not have.
    pub unstored: usize,
    /// It lacks something of the job.
    pub lacking: bool,
    /// Whether trying again may help.
    pub retry: bool,
}

/// Counts of a job.
#[derive(Default)]
struct Outcome {
    stored: PerComponent<usize>,
    unstored: PerComponent<usize>,
    retry: bool,
    /// A late call reads the transit pages.
    late: bool,
}

pub(super) fn run(shared: &Shared, job: StoreJob) {
    let keys = job.path.keys();
    let mut outcome = Outcome::default();
    for part in &job.parts {
        let own = keys.get(part.position..part.position + part.count());
        let (Some(own), Some(host)) = (own, shared.host_of(part.component)) else {
            tracing::error!(keys = keys.len(), ?part, "a store job's keys do not fit its pages");
            outcome.unstored[part.component] += part.count();
            continue;
        };
        // Who finds pages of all tokens is to find what stands beside them: all of an offload is stored, or nothing that is a hit.
        let broken = outcome.late || outcome.unstored != PerComponent::default();
        if part.is_linked() && broken {
            outcome.unstored[part.component] += part.count();
            continue;
        }
        if !part.is_linked() {
            // SAFETY: the job holds the pages, and their content is complete.
            unsafe { seal(host, &part.pages, own) };
        }
        let place = Place { shared, job: &job, part, host, keys: &keys };
        store(&place, &mut outcome);
    }
    let Outcome { stored, unstored, retry, .. } = outcome;
    let lacking = unstored != PerComponent::default();
    let (stored, unstored) = (stored[Component::Full], unstored[Component::Full]);
    shared.send(Event::Stored(StoreReport { job, stored, unstored, lacking, retry: retry && lacking }));
}

/// A part of a job that is being stored.
struct Place<'a> {
    shared: &'a Shared,
    job: &'a StoreJob,
    part: &'a StorePart,
    host: &'a HostPool,
    /// Keys of the sequence from its start.
    keys: &'a [PageKey],
}

/// # Safety
///
/// The caller holds the pages, and their content is complete.
unsafe fn seal(host: &HostPool, pages: &[u32], keys: &[PageKey]) {
    for (&page, key) in pages.iter().zip(keys) {
        // SAFETY: the caller's promise.
        unsafe { host.seal(page, key) };
    }
}

impl Place<'_> {
    /// Brings device pages to transit pages, sealed. False if that failed.
    fn bring_down(&self, device: &[u32], transit: &[u32], keys: &[PageKey]) -> bool {
        let Some((memory, host)) = self.shared.pools(self.part.component) else { return false };
        transit.iter().for_each(|page| host.unseal(*page));
        let pages: Vec<(u32, u32)> = device.iter().copied().zip(transit.iter().copied()).collect();
        // SAFETY: the node is locked, so its device pages stay; the transit pages are the job's alone.
        let copied = unsafe { copy_out(memory, &pages, host) };
        if copied {
            // SAFETY: as above, and they are complete now.
            unsafe { seal(host, transit, keys) };
        }
        copied
    }
}

impl Place<'_> {
    /// Seals device pages where they are, for a backend that reads them there. False if that failed.
    fn seal_there(&self, direct: &DirectPool, device: &[u32], keys: &[PageKey]) -> bool {
        let Some((memory, _)) = self.shared.pools(self.part.component) else { return false };
        // What was told to be computed has been, when this returns.
        let sums = match memory.checksums(device, true, &Moments::default()) {
            Ok(Some(sums)) => sums,
            Ok(None) => return false,
            Err(error) => {
                tracing::error!(%error, pages = device.len(), "pages of the device could not be sealed");
                return false;
            }
        };
        for ((&page, key), sums) in device.iter().zip(keys).zip(&sums) {
            // SAFETY: the node is locked, so its pages stay as they are; they are this key's, whoever stores them.
            unsafe { direct.seal(page, key, sums) };
        }
        true
    }
}

/// Writes what the backend is not believed to have, a batch at a time.
fn store(place: &Place<'_>, outcome: &mut Outcome) {
    let &Place { job, part, host, keys, .. } = place;
    let own = &keys[part.position..part.position + part.count()];
    let target = &job.target;
    let wanted: Vec<usize> = target.with_belief(part.component, |belief| {
        (0..own.len()).filter(|&i| !belief.is_stored(&own[i]) && !belief.is_lost(&own[i])).collect()
    });
    let mut batch = target.batch(Way::Write, host.page_bytes());
    let direct = place.shared.direct_of(target, part.component).filter(|_| part.is_linked());
    if part.is_linked() && direct.is_none() {
        batch = batch.min(part.pages.len()).max(1);
    }
    let mut left = wanted.len();
    for run in runs(&wanted, batch) {
        let operation = CancelSet::default();
        let (first, last) = (run[0], run[run.len() - 1]);
        let pages = match (direct, part.is_linked()) {
            (Some(_), _) => &part.device[first..=last],
            (None, true) => part.pages.get(..run.len()).unwrap_or_default(),
            (None, false) => &part.pages[first..=last],
        };
        let ready = match direct {
            Some(direct) => place.seal_there(direct, pages, &own[first..=last]),
            None => !part.is_linked() || place.bring_down(&part.device[first..=last], pages, &own[first..=last]),
        };
        if !ready {
            outcome.unstored[part.component] += left;
            return;
        }
        let mut status = vec![PageStatus::Unset; run.len()];
        let call = PagedCall {
            op: StorageOp::Set,
            linked: part.is_linked(),
            group: part.component.into(),
            chain: &keys[..part.position + last + 1],
            pages,
            page_bytes: host.page_bytes(),
            session: &job.session,
            operation: &operation,
            within: None,
        };
        let began = Instant::now();
        let result = target.paged(&call, &mut status, |_| true);
        let is_late = !result.in_use.is_empty();
        if is_late {
            // The late call still reads the pages: it holds them from here on, beside the job.
            let late = &pages[result.in_use.clone()];
            match direct {
                Some(direct) => {
                    direct.held().hold(late);
                    target.hold(part.component, late, direct.held().as_ref());
                }
                None => {
                    host.retain(late);
                    target.hold(part.component, late, host);
                }
            }
        }
        settle(place, &own[first..=last], &status, &result, began.elapsed(), outcome);
        left -= run.len();
        if matches!(result.result, Err(CallFault::Skipped)) || (is_late && part.is_linked()) {
            // The other batches would be skipped too, or go by way of pages that the late call reads.
            outcome.unstored[part.component] += left;
            outcome.retry |= is_late;
            outcome.late |= is_late;
            return;
        }
    }
}

/// Takes in the results of one batch, page by page.
fn settle(
    place: &Place<'_>,
    keys: &[PageKey],
    status: &[PageStatus],
    result: &PagedOutcome,
    took: Duration,
    outcome: &mut Outcome,
) {
    let &Place { shared, job, part, host, .. } = place;
    let target = &job.target;
    let mut written = Vec::with_capacity(keys.len());
    for (page, (key, &status)) in keys.iter().zip(status).enumerate() {
        let verdict = result.verdict(page, status);
        if result.was_made() {
            target.figures.add(StorageOp::Set, verdict, 1);
        }
        if verdict == StorageResult::Ok {
            written.push(*key);
            continue;
        }
        target.with_belief(part.component, |belief| belief.gone(key));
        outcome.unstored[part.component] += 1;
        outcome.retry |= match &result.result {
            _ if result.answered => verdict != StorageResult::Refused,
            Err(CallFault::Failed(error)) => error.retryable || verdict == StorageResult::Late,
            Err(_) | Ok(()) => true,
        };
    }
    let pages = written.len() as u64;
    target.acknowledge(part.component, written.into_iter(), job.emptied);
    outcome.stored[part.component] += pages as usize;
    if pages > 0 {
        if part.component == Component::Full {
            shared.counters.backuped_tokens.fetch_add(pages * shared.page_size as u64, Ordering::Relaxed);
        }
        shared.events.storage_written(target.name(), pages, pages * host.page_bytes(), took);
    }
}

/// Cuts ascending indices into runs without gaps, of at most `longest`.
fn runs(indices: &[usize], longest: usize) -> impl Iterator<Item = &[usize]> {
    indices.chunk_by(|a, b| b - a == 1).flat_map(move |run| run.chunks(longest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_no_gaps_and_a_longest_length() {
        let cut: Vec<&[usize]> = runs(&[0, 1, 2, 5, 6, 8], 2).collect();
        assert_eq!(cut, [&[0, 1][..], &[2], &[5, 6], &[8]]);
        assert_eq!(runs(&[], 2).count(), 0);
    }
}
