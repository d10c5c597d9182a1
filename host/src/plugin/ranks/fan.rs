//! Calls that go to the backends of all ranks at once, and what their answers are together.
//!
//! A page of a model that is spread over ranks is as many parts as there are ranks, each in its rank's host pool and stored by its rank's
//! backend. It can be restored as far as all ranks can, it came if it came on all of them, and it failed if it failed on one. Where ranks hold
//! the same bytes, they are one object, which the first of these ranks writes and every one reads.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::super::backend::{
    BackendError, BackendLimits, BackendStats, CallOptions, ChainInfo, ErrorKind, Held as PagesHeld, PageKey,
    PageStatus, PoolGroup, Restorable, StorageBackend,
};
use super::crew::Crew;

/// The backends of all ranks, in order of the ranks.
#[derive(Debug)]
pub struct Fan<B> {
    ranks: Vec<Arc<B>>,
    /// So many ranks, the first ones, write. The others hold what these do, rank r what rank r modulo `writers` holds.
    writers: usize,
    held: Mutex<HashMap<Page, Held>>,
    free: Mutex<Vec<Page>>,
    /// By rank.
    faults: Vec<Faults>,
    pub(super) crew: Crew,
}

/// What failed on one rank, and so on all.
#[derive(Debug, Default)]
struct Faults {
    calls: AtomicU64,
    pages: AtomicU64,
}

/// What one rank answered to a call with a status for each page.
pub(super) type OfPages = (Result<(), BackendError>, Vec<PageStatus>);

/// A page of a group.
pub(super) type Page = (PoolGroup, u32);

/// A page in late calls.
#[derive(Debug, Default, Clone, Copy)]
struct Held {
    /// Calls of single ranks that have it, less those that have given it back; below 0 where they did so before that was counted.
    ranks: i64,
    /// Calls that are told as late. Each of them gives the page back once.
    calls: usize,
}

impl<B: StorageBackend> Fan<B> {
    /// The backends `ranks`, of which there is at least one. The first `writers` of them write, the others hold what these do.
    pub fn new(ranks: Vec<Arc<B>>, writers: usize) -> Self {
        let faults = ranks.iter().map(|_| Faults::default()).collect();
        let writers = writers.clamp(1, ranks.len().max(1));
        Fan { ranks, writers, held: Mutex::default(), free: Mutex::default(), faults, crew: Crew::default() }
    }

    /// Calls that failed on a rank, and pages that did not come or go there while they did on another one.
    pub fn faults(&self, rank: usize) -> (u64, u64) {
        let of = |faults: &Faults| (faults.calls.load(Ordering::Relaxed), faults.pages.load(Ordering::Relaxed));
        self.faults.get(rank).map_or((0, 0), of)
    }

    /// Counts a call that failed on a rank, and says where it was.
    fn failed(&self, error: BackendError, rank: usize) -> BackendError {
        if let Some(faults) = self.faults.get(rank) {
            faults.calls.fetch_add(1, Ordering::Relaxed);
        }
        BackendError { message: format!("rank {rank}: {}", error.message), ..error }
    }

    /// The backends.
    pub fn ranks(&self) -> &[Arc<B>] {
        &self.ranks
    }

    /// What suits all of them.
    pub fn limits(&self) -> BackendLimits {
        let limits = self.ranks.iter().map(|rank| rank.limits());
        limits
            .reduce(|all, rank| BackendLimits {
                preferred_batch: all.preferred_batch.min(rank.preferred_batch),
                concurrency: all.concurrency.min(rank.concurrency),
                remove: all.remove && rank.remove,
                durable: all.durable && rank.durable,
            })
            .unwrap_or(BackendLimits { preferred_batch: 1, concurrency: 1, remove: false, durable: false })
    }

    /// `call` of the first `count` ranks at the same time, in order of the ranks. One that panics has failed.
    fn each<R: Send>(
        &self,
        count: usize,
        call: impl Fn(usize, &B) -> Result<R, BackendError> + Sync,
    ) -> Vec<Result<R, BackendError>> {
        let Some((first, others)) = self.ranks[..count.min(self.ranks.len())].split_first() else { return Vec::new() };
        let call = |number: usize, rank: &B| {
            catch_unwind(AssertUnwindSafe(|| call(number, rank))).unwrap_or_else(|_| Err(panicked(rank, number)))
        };
        let answers: Vec<Mutex<Option<Result<R, BackendError>>>> = others.iter().map(|_| Mutex::new(None)).collect();
        let beside = |index: usize| {
            if let (Some(rank), Some(answer)) = (others.get(index), answers.get(index)) {
                let answered = call(index + 1, rank);
                *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answered);
            }
        };
        let first = self.crew.beside(others.len(), &beside, |_| call(0, first));
        let others = answers.into_iter().zip(others.iter().enumerate()).map(|(answer, (index, rank))| {
            let answer = answer.into_inner().unwrap_or_else(PoisonError::into_inner);
            answer.unwrap_or_else(|| Err(panicked(rank.as_ref(), index + 1)))
        });
        std::iter::once(first).chain(others).collect()
    }

    /// The lengths that all ranks can restore.
    pub fn exists(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &PagesHeld,
        chain: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError> {
        let answers = self.each(self.ranks.len(), |_, rank| rank.batch_exists(options, keys, held, chain));
        self.agreed(answers, keys.len())
    }

    /// As [`Fan::exists`], by the linker face.
    pub fn lookup(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &PagesHeld,
        chain: &ChainInfo<'_>,
        request: u64,
    ) -> Result<Restorable, BackendError> {
        let answers = self.each(self.ranks.len(), |_, rank| rank.lookup(options, keys, held, chain, request));
        self.agreed(answers, keys.len())
    }

    fn agreed(&self, answers: Vec<Result<Restorable, BackendError>>, pages: usize) -> Result<Restorable, BackendError> {
        let counted = |(rank, answer): (usize, Result<_, _>)| answer.map_err(|error| self.failed(error, rank));
        let answers: Vec<_> = answers.into_iter().enumerate().map(counted).collect();
        let mut all: Option<Restorable> = None;
        for answer in answers {
            let answer = answer?;
            all = Some(match all {
                Some(all) => all.intersect(&answer),
                None => answer,
            });
        }
        Ok(all.unwrap_or_else(|| Restorable::none(pages)))
    }

    /// Reads every rank's part of the pages.
    pub fn get(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        let read = |rank: &B, status: &mut [PageStatus]| rank.batch_get(options, group, keys, pages, chain, status);
        self.paged(group, pages, status, self.ranks.len(), read)
    }

    /// Stores every rank's part of the pages; of ranks that hold the same, the first one's.
    pub fn set(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        let write = |rank: &B, status: &mut [PageStatus]| rank.batch_set(options, group, keys, pages, chain, status);
        self.paged(group, pages, status, self.writers, write)
    }

    /// As [`Fan::set`], by the linker face.
    pub fn offload(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        let write = |rank: &B, status: &mut [PageStatus]| rank.offload(options, group, keys, pages, chain, status);
        self.paged(group, pages, status, self.writers, write)
    }

    /// Removes every rank's part of the pages.
    pub fn remove(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        let remove = |rank: &B, status: &mut [PageStatus]| rank.batch_remove(options, group, keys, status);
        self.paged(group, &[], status, self.writers, remove)
    }

    /// A call with a status for each page, of the first `callers` ranks. The others have nothing to do and succeed.
    fn paged(
        &self,
        group: PoolGroup,
        pages: &[u32],
        status: &mut [PageStatus],
        callers: usize,
        call: impl Fn(&B, &mut [PageStatus]) -> Result<(), BackendError> + Sync,
    ) -> Result<(), BackendError> {
        let used: Vec<Page> = pages.iter().map(|&page| (group, page)).collect();
        let blank = status.to_vec();
        let answers = self.each(callers, |_, rank| {
            let mut status = blank.clone();
            let result = call(rank, &mut status);
            Ok((result, status))
        });
        self.together(&used, status, answers)
    }

    /// What the answers of all ranks are for each page and in all.
    pub(super) fn together(
        &self,
        pages: &[Page],
        status: &mut [PageStatus],
        answers: Vec<Result<OfPages, BackendError>>,
    ) -> Result<(), BackendError> {
        let split = |answer: Result<OfPages, BackendError>| {
            answer.unwrap_or_else(|error| (Err(error), vec![PageStatus::Failed; status.len()]))
        };
        let answers: Vec<OfPages> = answers.into_iter().map(split).collect();
        for (page, status) in status.iter_mut().enumerate() {
            let of = |answer: &OfPages| answer.1.get(page).copied().unwrap_or(PageStatus::Failed);
            *status = answers.iter().map(of).fold(PageStatus::Ok, worse);
            if *status != PageStatus::Ok && answers.iter().any(|answer| of(answer) == PageStatus::Ok) {
                let lacking = answers.iter().zip(&self.faults).filter(|(answer, _)| of(answer) != PageStatus::Ok);
                for (_, faults) in lacking {
                    faults.pages.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        let numbered = answers.into_iter().enumerate();
        let mut results: Vec<Result<(), BackendError>> =
            numbered.map(|(rank, (result, _))| result.map_err(|error| self.failed(error, rank))).collect();
        let late = results.iter().filter(|result| in_use(result)).count();
        self.take_late(pages, late);
        // Of several, the one that says that pages are still in use must be told.
        results.sort_by_key(|result| match result {
            Err(error) => 1 - i32::from(error.pages_in_use),
            Ok(()) => 2,
        });
        results.into_iter().next().unwrap_or(Ok(()))
    }

    /// `call` of every rank that writes, the first failure being that of all.
    pub fn writers(&self, call: impl Fn(&B) -> Result<(), BackendError> + Sync) -> Result<(), BackendError> {
        let answers = self.each(self.writers, |_, rank| call(rank));
        answers.into_iter().enumerate().try_for_each(|(rank, answer)| answer.map_err(|error| self.failed(error, rank)))
    }

    /// Figures of the stores: pages of the first rank, bytes and failures of all that write.
    pub fn stats(&self) -> Result<BackendStats, BackendError> {
        let mut all: Option<BackendStats> = None;
        for (number, rank) in self.ranks.iter().take(self.writers).enumerate() {
            let rank = rank.stats().map_err(|error| self.failed(error, number))?;
            all = Some(all.map_or(rank, |all| BackendStats {
                pages: all.pages,
                bytes_used: all.bytes_used + rank.bytes_used,
                bytes_total: all.bytes_total + rank.bytes_total,
                failures: all.failures + rank.failures,
            }));
        }
        Ok(all.unwrap_or_default())
    }

    /// Counts a call in which `late` ranks still use `pages`.
    fn take_late(&self, pages: &[Page], late: usize) {
        if late == 0 {
            return;
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for &page in pages {
            let entry = held.entry(page).or_default();
            entry.ranks += late as i64;
            entry.calls += 1;
            self.settle(&mut held, page);
        }
    }

    /// Frees a page that no rank has any more.
    fn settle(&self, held: &mut HashMap<Page, Held>, page: Page) {
        if let Some(entry) = held.get(&page).copied().filter(|entry| entry.ranks == 0) {
            held.remove(&page);
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.extend(std::iter::repeat_n(page, entry.calls));
        }
    }

    /// Pages of a group in late calls that have returned on all ranks.
    pub fn reclaim(&self, group: PoolGroup) -> Vec<u32> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for rank in &self.ranks {
            for page in rank.reclaim(group) {
                held.entry((group, page)).or_default().ranks -= 1;
                self.settle(&mut held, (group, page));
            }
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let (back, others) = std::mem::take(&mut *free).into_iter().partition(|(of, _)| *of == group);
        *free = others;
        let back: Vec<Page> = back;
        back.into_iter().map(|(_, page)| page).collect()
    }

    /// Pages that late calls still hold, on the rank that holds most.
    pub fn quarantined(&self) -> usize {
        self.ranks.iter().map(|rank| rank.quarantined()).max().unwrap_or(0)
    }
}

fn in_use(result: &Result<(), BackendError>) -> bool {
    matches!(result, Err(error) if error.pages_in_use)
}

/// What a page is that is one thing on one rank and another on another.
fn worse(a: PageStatus, b: PageStatus) -> PageStatus {
    let badness = |status: PageStatus| match status {
        PageStatus::Ok => 0,
        PageStatus::Missing => 1,
        PageStatus::Refused => 2,
        // Another try may bring these.
        PageStatus::Unset => 3,
        PageStatus::Failed => 4,
        PageStatus::Corrupt => 5,
    };
    if badness(b) > badness(a) { b } else { a }
}

pub(super) fn panicked<B: StorageBackend>(backend: &B, rank: usize) -> BackendError {
    BackendError {
        backend: backend.name().to_owned(),
        kind: ErrorKind::Internal,
        retryable: false,
        message: format!("the call of rank {rank} panicked"),
        pages_in_use: false,
    }
}
