//! A fetch: its order, its plan, and what has come of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::attached::Attached;
use super::guard::cancel::CancelSet;
use crate::cache::types::MissReason;
use crate::cache::unified::KeyPath;
use crate::plugin::backend::PageKey;

/// Backends that a fetch can tell apart.
pub(crate) const MOST_SOURCES: usize = crate::plugin::MOST_BACKENDS;

/// Least time for a call to a backend for which another one could stand in.
const LEAST_SHARE: Duration = Duration::from_millis(20);

/// What is to be fetched.
#[derive(Debug, Default)]
pub(crate) struct FetchOrder {
    /// The way to the last page that the tree had.
    pub path: KeyPath,
    /// The prompt up to the end of the span.
    pub tokens: Arc<[u32]>,
    /// Pages in the span.
    pub span: usize,
    /// Fewest pages worth a transfer.
    pub threshold: usize,
    /// Session of the first request that waits for it, or empty.
    pub session: String,
    /// How long the requests that wait for it do so, where that is known.
    pub patience: Option<Duration>,
    /// Whether only what is faster than computing is read.
    pub break_even: bool,
    /// A few pages are read though computing is faster, to measure anew.
    pub explore: bool,
}

/// One fetch: the pages of a prompt after what device and host have. Belongs to no request; several may
/// wait for it.
#[derive(Debug)]
pub(crate) struct Fetch {
    /// Which fetch it is.
    pub id: u64,
    /// What is to be fetched.
    pub order: FetchOrder,
    /// When it was made.
    began: Instant,
    /// Pages before the span.
    pub start: usize,
    /// Pages in the span.
    pub span: usize,
    /// Stops it.
    pub cancel: CancelSet,
    /// Position in the span of the first page that will not come.
    pub(super) first_bad: AtomicUsize,
    pub(super) batches_left: AtomicUsize,
    pub(super) started: AtomicBool,
    /// What is known so far.
    pub state: Mutex<FetchState>,
}

/// Progress of a fetch.
#[derive(Debug, Default)]
pub(crate) struct FetchState {
    /// Keys of the prefix and of the span.
    pub keys: Arc<[PageKey]>,
    /// The backends in use when storage was asked, in order; at most `MOST_SOURCES`.
    pub sources: Vec<Source>,
    /// Ends of the runs of pages, and which source delivers each, in order.
    pub plan: Vec<(usize, usize)>,
    /// Pages of the span that storage says it has; none before it answered.
    pub hit: Option<usize>,
    /// Host pages of the hit, until the tree or a late call takes them.
    pub pages: Vec<Option<u32>>,
    /// Pages that came in whole and right.
    pub good: Vec<bool>,
    /// For each page the sources, as bits, that are to be given it.
    pub offers: Vec<u64>,
    /// Pages came from a store whose pages carry no seal.
    pub unproven: bool,
    /// Pages handed to the tree.
    pub taken: usize,
    /// Why pages that storage has did not come.
    pub fault: Option<MissReason>,
}

/// A backend that pages may come from.
pub(crate) struct Source {
    /// The backend.
    pub attached: Arc<Attached>,
    /// How often its store had been emptied when the fetch began.
    pub emptied: u32,
    /// Which pages of the span it may have: as far as it was asked, those it has. None while it was not asked at all.
    pub may_have: Option<Vec<bool>>,
    /// First begin and last end of reads, and the pages they moved.
    pub reads: Option<(Instant, Instant, usize)>,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.attached.name())
    }
}

/// Pages of a fetch that came in and are the caller's.
#[derive(Debug)]
pub(crate) struct Delivery {
    /// Position of the first one in the span.
    pub from: usize,
    /// Host pages.
    pub pages: Vec<u32>,
    /// For each page the sources, as bits, that are to be given it.
    pub offers: Vec<u64>,
}

impl Fetch {
    /// A fetch that has not begun.
    pub fn new(id: u64, order: FetchOrder) -> Arc<Self> {
        Arc::new(Fetch {
            id,
            start: order.path.pages(),
            span: order.span,
            began: Instant::now(),
            order,
            cancel: CancelSet::default(),
            first_bad: AtomicUsize::new(usize::MAX),
            batches_left: AtomicUsize::new(0),
            started: AtomicBool::new(false),
            state: Mutex::default(),
        })
    }

    /// Pages that came in, follow the ones taken before, and are all right. They are the caller's now.
    pub fn take_ready(&self) -> Delivery {
        let mut state = self.state.lock();
        let from = state.taken;
        let ready = state.good[from..].iter().take_while(|&&good| good).count();
        let pages: Vec<u32> = state.pages[from..from + ready].iter_mut().filter_map(Option::take).collect();
        state.taken += ready;
        Delivery { from, pages, offers: state.offers[from..from + ready].to_vec() }
    }

    /// Pages that the fetch still holds. They are the caller's now; only for a fetch that is done.
    pub fn take_rest(&self) -> Vec<u32> {
        self.state.lock().pages.iter_mut().filter_map(Option::take).collect()
    }

    /// The time for a call to one backend that leaves those `after` it some to stand in for it; none where nobody can, or where nobody
    /// says how long that may take.
    pub(super) fn share<'a>(&self, after: impl IntoIterator<Item = &'a Source>) -> Option<Duration> {
        self.share_among(after.into_iter().filter(|source| !source.attached.is_resting()).count())
    }

    /// As `share`, with so many backends that can stand in.
    pub(super) fn share_among(&self, others: usize) -> Option<Duration> {
        let left = self.order.patience?.saturating_sub(self.began.elapsed());
        (others > 0).then(|| (left / (others as u32 + 1)).max(LEAST_SHARE))
    }

    /// Page `at` of the span will not come.
    pub(super) fn fail(&self, at: usize, reason: MissReason) {
        if self.first_bad.fetch_min(at, Ordering::AcqRel) > at {
            self.state.lock().fault = Some(reason);
        }
    }
}

impl FetchState {
    /// Host pages for the leading pages of the hit.
    pub fn give_room(&mut self, pages: Vec<u32>) {
        self.good = vec![false; pages.len()];
        self.offers = vec![0; pages.len()];
        self.pages = pages.into_iter().map(Some).collect();
    }
}
