//! The load of one request: gates by layer, and the verdict.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::cache::controller::{Attached, CancelSet};
use crate::cache::types::{MissReason, RequestId};
use crate::plugin::backend::PageKey;

/// Where pages come from.
#[derive(Clone)]
pub(crate) struct Origin {
    /// The backend.
    pub attached: Arc<Attached>,
    /// How often its store had been emptied when it was asked.
    pub emptied: u32,
}

impl std::fmt::Debug for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.attached.name())
    }
}

/// What became of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Leading pages that are right, with all their layers.
    pub good: usize,
    /// Why the next page is not, if there is one.
    pub reason: Option<MissReason>,
}

/// What a layer's gate says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// The layer's bytes are on the device; whether they are right comes with the verdict.
    Open,
    /// The load is over, well or not. Nothing more comes.
    Over,
    /// Not yet.
    Closed,
}

/// Pages of one request that come layer by layer into device slots that are its own.
#[derive(Debug)]
pub(crate) struct LoadRun {
    /// Which load it is.
    pub id: u64,
    /// Whose.
    pub request: RequestId,
    /// Where from.
    pub origin: Origin,
    /// Keys of the sequence, from its start to the last page of the load.
    pub keys: Arc<[PageKey]>,
    /// Pages of the sequence before the load.
    pub start: usize,
    /// Device slots.
    pub device: Vec<u32>,
    /// Transit pages.
    pub transit: Vec<u32>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The call of its batch, once that was handed down.
    operation: Option<Arc<CancelSet>>,
    /// When storage was asked for the bytes.
    began: Option<Instant>,
    landed: Vec<bool>,
    /// The device slots are the load's no more.
    abandoned: bool,
    verdict: Option<Verdict>,
}

impl LoadRun {
    /// A load of `device.len()` pages, of `layers` layers, that has not begun.
    #[allow(clippy::too_many_arguments)] // They are its fields.
    pub fn new(
        id: u64,
        request: RequestId,
        origin: Origin,
        keys: Arc<[PageKey]>,
        start: usize,
        device: Vec<u32>,
        transit: Vec<u32>,
        layers: usize,
    ) -> Arc<Self> {
        let state =
            State { operation: None, began: None, landed: vec![false; layers], abandoned: false, verdict: None };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Arc::new(LoadRun { id, request, origin, keys, start, device, transit, state, changed })
    }

    /// Pages that it loads.
    pub fn pages(&self) -> usize {
        self.device.len()
    }

    /// The keys of its pages.
    pub fn own_keys(&self) -> &[PageKey] {
        self.keys.get(self.start..).unwrap_or_default()
    }

    /// It was handed down in a batch.
    pub fn hand_down(&self, operation: &Arc<CancelSet>) {
        self.state.lock().operation = Some(Arc::clone(operation));
    }

    /// Its batch starts. False if nobody wants it any more.
    pub fn begin(&self) -> bool {
        let mut state = self.state.lock();
        state.began = Some(Instant::now());
        !state.abandoned
    }

    /// Copies a layer, page by page, and opens its gate. `copy` is given a page's place in the load and its slot; it is called no more once the
    /// slots are not the load's any more.
    pub fn land(&self, layer: usize, mut copy: impl FnMut(usize, u32)) {
        for (page, &slot) in self.device.iter().enumerate() {
            // Under the lock, so that nobody gets the slot while it is written.
            let state = self.state.lock();
            if state.abandoned {
                return;
            }
            copy(page, slot);
        }
        if let Some(landed) = self.state.lock().landed.get_mut(layer) {
            *landed = true;
        }
        self.changed.notify_all();
    }

    /// It is over. The first verdict counts.
    pub fn end(&self, verdict: Verdict) {
        self.state.lock().verdict.get_or_insert(verdict);
        self.changed.notify_all();
    }

    /// The verdict, if it is over.
    pub fn verdict(&self) -> Option<Verdict> {
        self.state.lock().verdict
    }

    /// Whether its slots were taken back.
    pub fn is_abandoned(&self) -> bool {
        self.state.lock().abandoned
    }

    /// Takes the device slots back: when this returns nothing writes into them any more. The load goes on for the others of its batch.
    pub fn abandon(&self) {
        self.state.lock().abandoned = true;
        self.changed.notify_all();
    }

    /// The call of its batch, once that was handed down.
    pub fn operation(&self) -> Option<Arc<CancelSet>> {
        self.state.lock().operation.clone()
    }
}

/// The load of a request as the engine sees it.
#[derive(Debug, Clone)]
pub struct Arriving(pub(crate) Arc<LoadRun>);

impl PartialEq for Arriving {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Arriving {}

impl Arriving {
    /// Pages of the sequence before those that come.
    pub fn start(&self) -> usize {
        self.0.start
    }

    /// Waits, until `until`, for the gate of a layer.
    pub fn wait(&self, layer: usize, until: Instant) -> Gate {
        let mut state = self.0.state.lock();
        loop {
            // A layer that the load does not know has nothing to wait for.
            if state.landed.get(layer).copied().unwrap_or(true) {
                return Gate::Open;
            }
            if state.verdict.is_some() || state.abandoned {
                return Gate::Over;
            }
            if self.0.changed.wait_until(&mut state, until).timed_out() {
                return Gate::Closed;
            }
        }
    }

    /// Waits, until `until`, for the verdict.
    pub fn wait_verdict(&self, until: Instant) -> Option<Verdict> {
        let mut state = self.0.state.lock();
        while state.verdict.is_none() {
            if self.0.changed.wait_until(&mut state, until).timed_out() {
                return state.verdict;
            }
        }
        state.verdict
    }

    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        self.0.verdict().is_some()
    }

    /// Seconds a layer that it has taken so far, and the layers that are still to come. None before the first layer.
    pub fn pace(&self) -> Option<(f64, usize)> {
        let state = self.0.state.lock();
        let done = state.landed.iter().filter(|&&landed| landed).count();
        let began = state.began.filter(|_| done > 0)?;
        Some((began.elapsed().as_secs_f64() / done as f64, state.landed.len() - done))
    }
}
