//! Writing host pages to storage.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::attached::{Attached, CallFault, Way};
use super::guard::cancel::CancelSet;
use super::paged::{PagedCall, PagedOutcome};
use super::{Event, Shared};
use crate::cache::stats::{StorageOp, StorageResult};
use crate::cache::unified::KeyPath;
use crate::plugin::backend::{PageKey, PageStatus};

/// Host pages of one or more nodes in a row, to be stored in one backend. The operation holds the pages.
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
    /// Pages before the first one of the job.
    pub position: usize,
    /// Host pages.
    pub pages: Vec<u32>,
    /// Session the pages come from, or empty.
    pub session: String,
    /// Times this was tried before.
    pub attempt: u32,
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
    /// Pages that the backend newly acknowledged.
    pub stored: usize,
    /// Pages that it does not have.
    pub unstored: usize,
    /// Whether trying again may help.
    pub retry: bool,
}

/// Counts of a job.
#[derive(Default)]
struct Outcome {
    stored: usize,
    unstored: usize,
    retry: bool,
}

pub(super) fn run(shared: &Shared, job: StoreJob) {
    let keys = job.path.keys();
    let mut outcome = Outcome::default();
    if keys.len() == job.position + job.pages.len() {
        for (&page, key) in job.pages.iter().zip(&keys[job.position..]) {
            // SAFETY: the job holds the page, and its content is complete.
            unsafe { shared.host.seal(page, key) };
        }
        store(shared, &job, &keys, &mut outcome);
    } else {
        tracing::error!(
            keys = keys.len(),
            position = job.position,
            pages = job.pages.len(),
            "a store job's keys do not fit its pages"
        );
        outcome.unstored = job.pages.len();
    }
    let Outcome { stored, unstored, retry } = outcome;
    shared.send(Event::Stored(StoreReport { job, stored, unstored, retry: retry && unstored > 0 }));
}

/// Writes what the backend is not believed to have, a batch at a time.
fn store(shared: &Shared, job: &StoreJob, keys: &[PageKey], outcome: &mut Outcome) {
    let own = &keys[job.position..];
    let target = &job.target;
    let wanted: Vec<usize> = target.with_belief(|belief| {
        (0..own.len()).filter(|&i| !belief.is_stored(&own[i]) && !belief.is_lost(&own[i])).collect()
    });
    let batch = target.batch(Way::Write, shared.host.page_bytes());
    let mut left = wanted.len();
    for run in runs(&wanted, batch) {
        let operation = CancelSet::default();
        let (first, last) = (run[0], run[run.len() - 1]);
        let pages = &job.pages[first..=last];
        let mut status = vec![PageStatus::Unset; run.len()];
        let call = PagedCall {
            op: StorageOp::Set,
            chain: &keys[..job.position + last + 1],
            pages,
            page_bytes: shared.host.page_bytes(),
            session: &job.session,
            operation: &operation,
            within: None,
        };
        let began = Instant::now();
        let result = target.paged(&call, &mut status, |_| true);
        if !result.in_use.is_empty() {
            // The late call still reads the pages: it holds them from here on, beside the job.
            let late = &pages[result.in_use.clone()];
            shared.host.retain(late);
            target.hold(late, &shared.host);
        }
        settle(shared, job, &own[first..=last], &status, &result, began.elapsed(), outcome);
        left -= run.len();
        if matches!(result.result, Err(CallFault::Skipped)) {
            // The other batches would be skipped too.
            outcome.unstored += left;
            return;
        }
    }
}

/// Takes in the results of one batch, page by page.
fn settle(
    shared: &Shared,
    job: &StoreJob,
    keys: &[PageKey],
    status: &[PageStatus],
    result: &PagedOutcome,
    took: Duration,
    outcome: &mut Outcome,
) {
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
        target.with_belief(|belief| belief.gone(key));
        outcome.unstored += 1;
        outcome.retry |= match &result.result {
            _ if result.answered => verdict != StorageResult::Refused,
            Err(CallFault::Failed(error)) => error.retryable || verdict == StorageResult::Late,
            Err(_) | Ok(()) => true,
        };
    }
    let pages = written.len() as u64;
    target.acknowledge(written.into_iter(), job.emptied);
    outcome.stored += pages as usize;
    if pages > 0 {
        shared.counters.backuped_tokens.fetch_add(pages * shared.page_size as u64, Ordering::Relaxed);
        shared.events.storage_written(target.name(), pages, pages * shared.host.page_bytes(), took);
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
