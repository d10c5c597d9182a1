//! A fetch: its order, its plan, and what has come of it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::attached::Attached;
use super::guard::cancel::CancelSet;
use crate::cache::types::MissReason;
use crate::cache::unified::{Component, KeyPath, NO_SLOT, PerComponent, Slots};
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
    /// Leading pages of the span that the tree has, and that lack a window or a state alone.
    pub held: usize,
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
    /// Position in the span of the first page of all tokens that will not come.
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
    /// Pages of the span that storage says it has, with all that going on from their end needs; none before it answered.
    pub hit: Option<usize>,
    /// What is read, component by component.
    pub lanes: PerComponent<Lane>,
    /// Pages came from a store whose pages carry no seal.
    pub unproven: bool,
    /// Pages handed to the tree.
    pub taken: usize,
    /// Why pages that storage has did not come.
    pub fault: Option<MissReason>,
}

/// Pages of one component that a fetch reads. What is said by page begins with the first page of `span`.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    /// Pages of the fetch's span that are read.
    pub span: Range<usize>,
    /// Ends, in the fetch's span, of the runs of pages, and which source delivers each, in order.
    pub plan: Vec<(usize, usize)>,
    /// Host pages, until the tree or a late call takes them.
    pub pages: Vec<Option<u32>>,
    /// Pages that came in whole and right.
    pub good: Vec<bool>,
    /// For each page the sources, as bits, that are to be given it.
    pub offers: Vec<u64>,
}

impl Lane {
    /// Host pages for the leading pages of the lane.
    pub fn give_room(&mut self, pages: Vec<u32>) {
        self.span.end = self.span.start + pages.len();
        self.good = vec![false; pages.len()];
        self.offers = vec![0; pages.len()];
        self.pages = pages.into_iter().map(Some).collect();
    }

    /// Place of page `at` of the fetch's span in this lane.
    fn place(&self, at: usize) -> Option<usize> {
        at.checked_sub(self.span.start).filter(|&place| place < self.pages.len())
    }

    /// The host page for page `at` of the fetch's span.
    pub fn page(&self, at: usize) -> Option<u32> {
        self.place(at).and_then(|place| self.pages[place])
    }

    /// As `page`, to be changed.
    pub fn page_mut(&mut self, at: usize) -> Option<&mut Option<u32>> {
        self.place(at).map(|place| &mut self.pages[place])
    }

    /// Takes note that a page came, and of who is to be given it.
    pub fn came(&mut self, at: usize, offers: u64) {
        if let Some(place) = self.place(at) {
            self.good[place] = true;
            self.offers[place] |= offers;
        }
    }

    /// Sources, as bits, that are to be given a page.
    pub fn offer(&mut self, at: usize, offers: u64) {
        if let Some(place) = self.place(at) {
            self.offers[place] |= offers;
        }
    }

    /// Takes the host page of a page that came in right.
    fn take(&mut self, at: usize) -> Option<u32> {
        self.place(at).filter(|&place| self.good[place]).and_then(|place| self.pages[place].take())
    }
}

/// A backend that pages may come from.
pub(crate) struct Source {
    /// The backend.
    pub attached: Arc<Attached>,
    /// How often its store had been emptied when the fetch began.
    pub emptied: u32,
    /// Which pages of the span it may have: as far as it was asked, those it has. None while it was not asked at all.
    pub may_have: Option<PerComponent<Vec<bool>>>,
    /// Its reads so far.
    pub reads: Option<Reads>,
}

/// What reads of one backend took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reads {
    /// First begin.
    pub first: Instant,
    /// Last end.
    pub last: Instant,
    /// Pages that were asked for.
    pub asked: usize,
    /// Pages that came.
    pub came: usize,
    /// One ended before it was through, as nobody waited any longer.
    pub cut: bool,
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
    /// Host pages of all tokens; [`NO_SLOT`] for those that the tree has.
    pub pages: Vec<u32>,
    /// For each page the sources, as bits, that are to be given it.
    pub offers: Vec<u64>,
    /// Host pages of windows, one a page, or [`NO_SLOT`]; empty where none were read.
    pub windows: Vec<u32>,
    /// The state after the last page.
    pub state: Option<u32>,
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

    /// Pages that came in, follow the ones taken before, and are all right. They are the caller's now. Where windows or states are
    /// needed to go on from a page, pages are handed over once the fetch has `ended`, with what there is of those.
    pub fn take_ready(&self, ended: bool) -> Delivery {
        let mut state = self.state.lock();
        let FetchState { lanes: PerComponent([full, window, recurrent]), taken, .. } = &mut *state;
        let from = *taken;
        let nothing = Delivery { from, pages: Vec::new(), offers: Vec::new(), windows: Vec::new(), state: None };
        let alone = window.pages.is_empty() && recurrent.pages.is_empty();
        if !(alone || ended) {
            return nothing;
        }
        let held = full.span.start;
        let first = from.saturating_sub(held);
        let came = full.good.get(first..).unwrap_or_default().iter().take_while(|&&good| good).count();
        let end = held + first + came;
        if end <= from || (first + came == 0 && alone) {
            return nothing;
        }
        let mut pages = vec![NO_SLOT; held.saturating_sub(from)];
        let mut offers = vec![0; pages.len()];
        for at in from.max(held)..end {
            pages.extend(full.take(at));
            offers.push(full.offers[at - held]);
        }
        let windows: Vec<u32> = (from..end).map(|at| window.take(at).unwrap_or(NO_SLOT)).collect();
        let windows = if windows.iter().all(|&slot| slot == NO_SLOT) { Vec::new() } else { windows };
        *taken = end;
        Delivery { from, pages, offers, windows, state: recurrent.take(end - 1) }
    }

    /// Pages that the fetch still holds. They are the caller's now; only for a fetch that is done.
    pub fn take_rest(&self) -> Slots {
        let mut state = self.state.lock();
        let rest = |lane: &mut Lane| lane.pages.iter_mut().filter_map(Option::take).collect();
        PerComponent(state.lanes.0.each_mut().map(rest))
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
    pub(super) fn fail(&self, component: Component, at: usize, reason: MissReason) {
        if component != Component::Full {
            self.state.lock().fault.get_or_insert(reason);
        } else if self.first_bad.fetch_min(at, Ordering::AcqRel) > at {
            self.state.lock().fault = Some(reason);
        }
    }
}

impl FetchState {
    /// Host pages that the lanes want.
    pub fn room_needed(&self) -> PerComponent<usize> {
        PerComponent(self.lanes.0.each_ref().map(|lane| lane.span.len()))
    }

    /// Host pages for the lanes, each as many as it wants, or for leading ones.
    pub fn give_room(&mut self, room: Slots) {
        for (lane, pages) in self.lanes.0.iter_mut().zip(room.0) {
            lane.give_room(pages);
        }
    }
}
