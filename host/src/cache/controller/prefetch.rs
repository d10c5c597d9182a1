//! Fetching pages from storage into host pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::attached::{Attached, CallFault, CancelSet, Way, fault_result, result_of};
use super::{Event, Shared};
use crate::cache::hash::chain_keys;
use crate::cache::stats::{StorageOp, StorageResult};
use crate::cache::tree::KeyPath;
use crate::cache::types::MissReason;
use crate::plugin::backend::{ChainInfo, PageKey, PageStatus};

/// Fewest pages worth a call of their own where one call could ask for more.
const SHARED_BATCH: usize = 32;

/// How long a page is treated as missing after the store failed to deliver it.
const SHUN_FAILED: Duration = Duration::from_secs(5);

/// How long a corrupt page is treated as missing after the store failed to remove it. It may still be written meanwhile.
const SHUN_UNREMOVED: Duration = Duration::from_secs(10);

/// One fetch: the pages of a prompt after what device and host have. Belongs to no request; several may
/// wait for it.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// Which fetch it is.
    pub id: u64,
    /// The way to the last page that the tree had.
    pub path: KeyPath,
    /// The prompt up to the end of the span.
    pub tokens: Arc<[u32]>,
    /// Pages before the span.
    pub start: usize,
    /// Pages in the span.
    pub span: usize,
    /// Fewest pages worth a transfer.
    pub threshold: usize,
    /// The attach epoch at the start.
    pub epoch: u32,
    /// Session of the first request that waits for it, or empty.
    pub session: String,
    /// Stops it.
    pub cancel: CancelSet,
    /// Position in the span of the first page that will not come.
    first_bad: AtomicUsize,
    batches_left: AtomicUsize,
    started: AtomicBool,
    /// What is known so far.
    pub state: Mutex<FetchState>,
}

/// Progress of a fetch.
#[derive(Debug, Default)]
pub(crate) struct FetchState {
    /// Keys of the prefix and of the span.
    pub keys: Vec<PageKey>,
    /// Which backend delivers which pages of the span, in order.
    plan: Vec<(usize, Arc<AttachedPart>)>,
    /// Pages of the span that storage says it has; none before it answered.
    pub hit: Option<usize>,
    /// Host pages of the hit, until the tree or a late call takes them.
    pub pages: Vec<Option<u32>>,
    /// Pages that came in whole and right.
    good: Vec<bool>,
    /// Pages handed to the tree.
    pub taken: usize,
    /// Why pages that storage has did not come.
    pub fault: Option<MissReason>,
}

/// A backend and the end of its part of the plan.
pub(crate) struct AttachedPart(Arc<Attached>);

impl std::fmt::Debug for AttachedPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.name())
    }
}

/// Pages of a fetch that one call asks for.
#[derive(Debug)]
pub(crate) struct Batch {
    fetch: Arc<Fetch>,
    backend: Arc<AttachedPart>,
    from: usize,
    to: usize,
}

impl Fetch {
    /// A fetch that has not begun.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        id: u64,
        path: KeyPath,
        tokens: Arc<[u32]>,
        span: usize,
        threshold: usize,
        epoch: u32,
        session: String,
    ) -> Arc<Self> {
        Arc::new(Fetch {
            id,
            start: path.pages,
            path,
            tokens,
            span,
            threshold,
            epoch,
            session,
            cancel: CancelSet::default(),
            first_bad: AtomicUsize::new(usize::MAX),
            batches_left: AtomicUsize::new(0),
            started: AtomicBool::new(false),
            state: Mutex::default(),
        })
    }

    /// Pages that came in, follow the ones taken before, and are all right. They are the caller's now.
    pub fn take_ready(&self) -> (usize, Vec<u32>) {
        let mut state = self.state.lock();
        let from = state.taken;
        let ready = state.good[from..].iter().take_while(|&&good| good).count();
        let pages: Vec<u32> = state.pages[from..from + ready].iter_mut().filter_map(Option::take).collect();
        state.taken += ready;
        (from, pages)
    }

    /// Pages that the fetch still holds. They are the caller's now; only for a fetch that is done.
    pub fn take_rest(&self) -> Vec<u32> {
        self.state.lock().pages.iter_mut().filter_map(Option::take).collect()
    }

    fn fail(&self, at: usize, reason: MissReason) {
        if self.first_bad.fetch_min(at, Ordering::AcqRel) > at {
            self.state.lock().fault = Some(reason);
        }
    }
}

fn finish(shared: &Shared, fetch: &Fetch) {
    shared.send(Event::FetchDone(fetch.id));
}

/// First step: keys, and what storage has of them.
pub(super) fn query(shared: &Shared, fetch: Arc<Fetch>) {
    if fetch.cancel.is_cancelled() {
        return finish(shared, &fetch);
    }
    let mut keys = fetch.path.keys(shared.page_size);
    let prior = keys.last().copied().or(fetch.path.seed);
    let from = fetch.start * shared.page_size;
    let rest = fetch.tokens.get(from..).unwrap_or(&[]);
    keys.extend(chain_keys(prior, rest, shared.page_size));
    let mut covered = 0;
    let mut plan = Vec::new();
    let mut fault = None;
    for attached in shared.registry.current().iter() {
        match exists(attached, &fetch, &keys) {
            Ok(hit) if hit > covered => {
                covered = hit;
                plan.push((hit, Arc::new(AttachedPart(Arc::clone(attached)))));
            }
            Ok(_) => {}
            Err(reason) => fault = Some(reason),
        }
        if covered >= fetch.span {
            break;
        }
    }
    shared.counters.storage_hit_tokens.fetch_add((covered * shared.page_size) as u64, Ordering::Relaxed);
    let enough = covered >= fetch.threshold.max(1);
    {
        let mut state = fetch.state.lock();
        state.keys = keys;
        state.hit = Some(covered);
        state.fault = fault;
        if covered > 0 && !enough {
            state.fault = Some(MissReason::TooShort);
            let tokens = (covered * shared.page_size) as u64;
            shared.counters.unfulfilled_below_threshold_tokens.fetch_add(tokens, Ordering::Relaxed);
        }
        state.plan = plan;
    }
    if !enough || fetch.cancel.is_cancelled() {
        return finish(shared, &fetch);
    }
    let room = {
        let mut state = fetch.state.lock();
        shared.host.alloc(covered).map(|pages| state.give_room(pages)).is_some()
    };
    if room {
        transfer(shared, &fetch);
    } else {
        shared.send(Event::FetchNeedsRoom { id: fetch.id, pages: covered });
    }
}

impl FetchState {
    /// Host pages for the leading pages of the hit.
    pub fn give_room(&mut self, pages: Vec<u32>) {
        self.good = vec![false; pages.len()];
        self.pages = pages.into_iter().map(Some).collect();
    }
}

/// Leading pages of the span that one backend has.
fn exists(attached: &Attached, fetch: &Fetch, keys: &[PageKey]) -> Result<usize, MissReason> {
    let (prefix, span) = keys.split_at(fetch.start.min(keys.len()));
    let now = Instant::now();
    let usable =
        attached.with_belief(|belief| span.iter().position(|key| belief.is_shunned(key, now))).unwrap_or(span.len());
    if usable == 0 && !span.is_empty() {
        return Err(MissReason::BackendFailed);
    }
    let span = &span[..usable];
    let chain = ChainInfo { position: prefix.len() as u64, prefix_keys: prefix, session_id: &fetch.session };
    let result =
        attached.call(Way::Read, &fetch.cancel, |backend, options| backend.batch_exists(options, span, &chain));
    let pages = span.len() as u64;
    match result {
        Ok(restorable) => {
            let hit = restorable.longest_within(span.len());
            attached.pages.add(StorageOp::Exists, StorageResult::Ok, hit as u64);
            attached.pages.add(StorageOp::Exists, StorageResult::Missing, pages - hit as u64);
            // The store may have dropped pages by itself; a belief that outlives them would stop
            // them from ever being written again.
            attached.with_belief(|belief| span[hit..].iter().for_each(|key| belief.gone(key)));
            Ok(hit)
        }
        Err(fault) => {
            let result = fault_result(&fault);
            if !matches!(fault, CallFault::Skipped) {
                attached.pages.add(StorageOp::Exists, result, pages);
            }
            Err(reason_of(result))
        }
    }
}

/// Second step: the pages, once there is room for them.
pub(super) fn transfer(shared: &Shared, fetch: &Arc<Fetch>) {
    let mut batches = Vec::new();
    {
        let state = fetch.state.lock();
        let mut from = 0;
        for (end, backend) in &state.plan {
            let end = (*end).min(state.pages.len());
            // A hit of less than a batch for each reader is cut, so that reading and checking overlap.
            let share = (end - from.min(end)).div_ceil(shared.readers).max(SHARED_BATCH);
            let longest = backend.0.limits().preferred_batch.clamp(1, super::BATCH_PAGES).min(share);
            while from < end {
                let to = end.min(from + longest);
                batches.push(Batch { fetch: Arc::clone(fetch), backend: Arc::clone(backend), from, to });
                from = to;
            }
        }
    }
    if batches.is_empty() || fetch.started.swap(true, Ordering::AcqRel) {
        return finish(shared, fetch);
    }
    fetch.batches_left.store(batches.len(), Ordering::Release);
    let mut batches = batches.into_iter();
    let first = batches.next();
    for batch in batches {
        // Other workers take these while this one does the first.
        if let Err(unsent) = shared.batch_sender.send(batch) {
            read(shared, &unsent.into_inner());
        }
    }
    if let Some(first) = first {
        read(shared, &first);
    }
}

/// Reads one batch, checks its seals, and keeps what is right.
pub(super) fn read(shared: &Shared, batch: &Batch) {
    let fetch = &batch.fetch;
    if !fetch.cancel.is_cancelled() && batch.from < fetch.first_bad.load(Ordering::Acquire) {
        read_pages(shared, batch);
    }
    if fetch.batches_left.fetch_sub(1, Ordering::AcqRel) == 1 {
        finish(shared, fetch);
    } else {
        shared.send(Event::FetchProgress(fetch.id));
    }
}

fn read_pages(shared: &Shared, batch: &Batch) {
    let (fetch, attached) = (&batch.fetch, &batch.backend.0);
    let (keys, pages): (Vec<PageKey>, Vec<u32>) = {
        let state = fetch.state.lock();
        let pages: Vec<u32> = state.pages[batch.from..batch.to].iter().flatten().copied().collect();
        (state.keys[..fetch.start + batch.to].to_vec(), pages)
    };
    let (prefix, own) = keys.split_at(fetch.start + batch.from);
    let mut status = vec![PageStatus::Unset; own.len()];
    if pages.len() != own.len() {
        tracing::error!(pages = pages.len(), keys = own.len(), "a fetch lost pages before they were read");
        return fetch.fail(batch.from, MissReason::BackendFailed);
    }
    let chain = ChainInfo { position: prefix.len() as u64, prefix_keys: prefix, session_id: &fetch.session };
    let began = Instant::now();
    let result = attached.call(Way::Read, &fetch.cancel, |backend, options| {
        backend.batch_get(options, own, &pages, &chain, &mut status)
    });
    if matches!(&result, Err(CallFault::Failed(error)) if error.pages_in_use) {
        // The call may still write these pages: nobody gets them before it returns.
        let mut state = fetch.state.lock();
        for place in &mut state.pages[batch.from..batch.to] {
            *place = None;
        }
        attached.hold(&pages, &shared.host);
    }
    let mut good = 0;
    let mut corrupt = Vec::new();
    for (i, (key, &page)) in own.iter().zip(&pages).enumerate() {
        let mut verdict = result_of(&result, status[i]);
        if verdict == StorageResult::Ok {
            // SAFETY: the call has returned, and the fetch alone holds the page.
            if let Err(fault) = unsafe { shared.host.verify(page, key) } {
                tracing::warn!(backend = attached.name(), %fault, "a page from storage is not what it should be");
                verdict = StorageResult::Corrupt;
            }
        }
        if !matches!(result, Err(CallFault::Skipped)) {
            attached.pages.add(StorageOp::Get, verdict, 1);
        }
        if verdict == StorageResult::Ok {
            good += 1;
            fetch.state.lock().good[batch.from + i] = true;
            attached.with_belief(|belief| belief.stored(key));
            continue;
        }
        fetch.fail(batch.from + i, reason_of(verdict));
        if verdict == StorageResult::Corrupt {
            corrupt.push(*key);
        }
        if result.is_ok() {
            attached.with_belief(|belief| belief.shun(key, Some(Instant::now() + SHUN_FAILED)));
        }
    }
    if good > 0 {
        shared.counters.prefetched_tokens.fetch_add(good * shared.page_size as u64, Ordering::Relaxed);
        shared.events.storage_read(attached.name(), good, good * shared.host.page_bytes(), began.elapsed());
    }
    if !corrupt.is_empty() {
        heal(shared, attached, &corrupt);
    }
}

/// Removes corrupt pages from the store, so that they can be written anew. Where a store can't remove at all they are treated as missing
/// for good; where it failed to, for a while, after which the page is looked at again.
fn heal(shared: &Shared, attached: &Attached, keys: &[PageKey]) {
    shared.counters.corrupt_pages.fetch_add(keys.len() as u64, Ordering::Relaxed);
    let mut status = vec![PageStatus::Unset; keys.len()];
    let can_remove = attached.limits().remove;
    let removed = can_remove
        && attached
            .call(Way::Write, &CancelSet::default(), |backend, options| {
                backend.batch_remove(options, keys, &mut status)
            })
            .is_ok();
    let until = can_remove.then(|| Instant::now() + SHUN_UNREMOVED);
    for (key, status) in keys.iter().zip(status) {
        let gone = removed && matches!(status, PageStatus::Ok | PageStatus::Missing);
        attached.with_belief(|belief| match gone {
            true => belief.heal(key),
            false => belief.shun(key, until),
        });
        shared.counters.healed_pages.fetch_add(u64::from(gone), Ordering::Relaxed);
    }
}

fn reason_of(result: StorageResult) -> MissReason {
    match result {
        StorageResult::Corrupt => MissReason::Corrupt,
        StorageResult::Late => MissReason::BackendSlow,
        StorageResult::Missing => MissReason::Evicted,
        StorageResult::Ok | StorageResult::Refused | StorageResult::Failed => MissReason::BackendFailed,
    }
}
