//! Writing host pages to storage.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::attached::{Attached, CallFault, CancelSet, Way, result_of};
use super::{Event, Shared};
use crate::cache::stats::{StorageOp, StorageResult};
use crate::cache::tree::{KeyPath, NodeRef};
use crate::plugin::backend::{ChainInfo, PageKey, PageStatus};

/// Host pages of one or more nodes in a row, to be stored. The operation holds the pages.
#[derive(Debug)]
pub(crate) struct StoreJob {
    /// Which job it is.
    pub id: u64,
    /// Nodes in order, and their first page when the job began; nodes split off them since belong to the
    /// job too.
    pub nodes: Vec<(NodeRef, u32)>,
    /// The way from the start of the sequence to the last page.
    pub path: KeyPath,
    /// Pages before the first one of the job.
    pub position: usize,
    /// Host pages.
    pub pages: Vec<u32>,
    /// The attach epoch at the start.
    pub epoch: u32,
    /// Session the pages come from, or empty.
    pub session: String,
    /// Times this was tried before.
    pub attempt: u32,
}

/// What became of a store job.
#[derive(Debug)]
pub(crate) struct StoreReport {
    /// The job.
    pub job: StoreJob,
    /// Pages that at least one backend newly acknowledged.
    pub stored: usize,
    /// Pages that some backend does not have.
    pub unstored: usize,
    /// Whether trying again may help.
    pub retry: bool,
}

/// Counts of one backend's part of a job.
#[derive(Default)]
struct Outcome {
    stored: Vec<bool>,
    unstored: Vec<bool>,
    retry: bool,
}

pub(super) fn run(shared: &Shared, job: StoreJob) {
    let keys = job.path.keys(shared.page_size);
    let backends = shared.registry.current();
    let mut outcome = Outcome {
        stored: vec![false; job.pages.len()],
        unstored: vec![backends.is_empty(); job.pages.len()],
        retry: false,
    };
    if keys.len() == job.position + job.pages.len() {
        for (&page, key) in job.pages.iter().zip(&keys[job.position..]) {
            // SAFETY: the job holds the page, its content is complete, and a page is in one job at a time.
            unsafe { shared.host.seal(page, key) };
        }
        for attached in backends.iter() {
            store(shared, attached, &job, &keys, &mut outcome);
        }
    } else {
        tracing::error!(
            keys = keys.len(),
            position = job.position,
            pages = job.pages.len(),
            "a store job's keys do not fit its pages"
        );
        outcome.unstored.fill(true);
    }
    let stored = outcome.stored.iter().filter(|&&page| page).count();
    let unstored = outcome.unstored.iter().filter(|&&page| page).count();
    let retry = outcome.retry && unstored > 0;
    shared.send(Event::Stored(StoreReport { job, stored, unstored, retry }));
}

/// Writes to one backend what it is not believed to have, a batch at a time.
fn store(shared: &Shared, attached: &Attached, job: &StoreJob, keys: &[PageKey], outcome: &mut Outcome) {
    let own = &keys[job.position..];
    let wanted: Vec<usize> = attached.with_belief(|belief| {
        (0..own.len()).filter(|&i| !belief.is_stored(&own[i]) && !belief.is_lost(&own[i])).collect()
    });
    let batch = attached.limits().preferred_batch.clamp(1, super::BATCH_PAGES);
    for run in runs(&wanted, batch) {
        let first = job.position + run[0];
        let chain = ChainInfo { position: first as u64, prefix_keys: &keys[..first], session_id: &job.session };
        let batch_keys: Vec<PageKey> = run.iter().map(|&i| own[i]).collect();
        let pages: Vec<u32> = run.iter().map(|&i| job.pages[i]).collect();
        let mut status = vec![PageStatus::Unset; run.len()];
        let began = Instant::now();
        let result = attached.call(Way::Write, &CancelSet::default(), |backend, options| {
            backend.batch_set(options, &batch_keys, &pages, &chain, &mut status)
        });
        if matches!(&result, Err(CallFault::Failed(error)) if error.pages_in_use) {
            // The late call still reads the pages: it holds them from here on, beside the job.
            shared.host.retain(&pages);
            attached.hold(&pages, &shared.host);
        }
        settle(shared, attached, run, &batch_keys, &status, &result, began.elapsed(), outcome);
        if matches!(result, Err(CallFault::Skipped)) {
            // The other batches would be skipped too.
            for &i in wanted.iter().filter(|&&i| i > run[run.len() - 1]) {
                outcome.unstored[i] = true;
            }
            return;
        }
    }
}

/// Takes in the results of one batch, page by page.
#[allow(clippy::too_many_arguments)]
fn settle(
    shared: &Shared,
    attached: &Attached,
    run: &[usize],
    keys: &[PageKey],
    status: &[PageStatus],
    result: &Result<(), CallFault>,
    took: Duration,
    outcome: &mut Outcome,
) {
    let mut written = 0;
    for ((&i, key), &status) in run.iter().zip(keys).zip(status) {
        let page = result_of(result, status);
        if !matches!(result, Err(CallFault::Skipped)) {
            attached.pages.add(StorageOp::Set, page, 1);
        }
        if page == StorageResult::Ok {
            attached.with_belief(|belief| belief.stored(key));
            outcome.stored[i] = true;
            written += 1;
        } else {
            attached.with_belief(|belief| belief.gone(key));
            outcome.unstored[i] = true;
            outcome.retry |= match result {
                Err(CallFault::Failed(error)) => error.retryable || page == StorageResult::Late,
                Err(CallFault::Skipped) => true,
                Ok(()) => page != StorageResult::Refused,
            };
        }
    }
    if written > 0 {
        shared.counters.backuped_tokens.fetch_add(written * shared.page_size as u64, Ordering::Relaxed);
        shared.events.storage_written(attached.name(), written, written * shared.host.page_bytes(), took);
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
