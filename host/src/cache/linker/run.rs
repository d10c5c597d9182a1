//! The load of one request: gates by layer, and the verdict.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kvdock_kernels::KernelError;
use parking_lot::{Condvar, Mutex};

use super::coming::Coming;
use crate::cache::controller::{Attached, CancelSet};
use crate::cache::pool::{Moments, Transfers};
use crate::cache::stats::StorageResult;
use crate::cache::types::{MissReason, RequestId};
use crate::cache::unified::{Component, PerComponent, Slots};
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
    /// Pages after the start of the load up to which the sequence can be gone on from: all that takes is right, with all its layers.
    pub good: usize,
    /// Why it can't be from the end of the load, if it can't.
    pub reason: Option<MissReason>,
}

/// What a layer's gate says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// The layer's bytes are on the device, or on their way to it ([`Arriving::before_layer`]); whether they are right comes with the verdict.
    Open,
    /// The load is over, well or not. Nothing more comes.
    Over,
    /// Not yet.
    Closed,
}

/// What a load brings, and where to. Of each component its pages are the last ones before the end.
#[derive(Debug)]
pub(crate) struct LoadSpan {
    /// Keys of the sequence, from its start to the last page of the load.
    pub keys: Arc<[PageKey]>,
    /// Pages of the sequence before the load: from there it can be gone on without it.
    pub start: usize,
    /// Device slots.
    pub device: Slots,
    /// Transit pages, one for each; none where the backend fills the device slots itself.
    pub transit: Slots,
    /// Pages of windows that going on from a page's end needs; 0 without windows.
    pub window: usize,
}

impl LoadSpan {
    /// Pages of the sequence with those of the load.
    pub fn end(&self) -> usize {
        self.keys.len()
    }

    /// Pages of the sequence before the first page of a component.
    pub fn from(&self, component: Component) -> usize {
        self.end() - self.device[component].len().min(self.end())
    }

    /// The keys of the pages of a component.
    pub fn keys_of(&self, component: Component) -> &[PageKey] {
        self.keys.get(self.from(component)..).unwrap_or_default()
    }

    /// The pages of a component that the backend fills.
    pub fn moved_by(&self, component: Component, is_direct: bool) -> &[u32] {
        if is_direct { &self.device[component] } else { &self.transit[component] }
    }

    /// Pages of all components.
    pub fn moved(&self) -> usize {
        self.device.0.iter().map(Vec::len).sum()
    }

    /// What the results of its pages come to: the longest prefix that can be gone on from.
    pub fn verdict(&self, results: &PerComponent<Vec<StorageResult>>) -> Verdict {
        let (start, end) = (self.start, self.end());
        let good = |component: Component, page: usize| {
            let place = page.checked_sub(self.from(component));
            place.is_some_and(|place| results[component].get(place) == Some(&StorageResult::Ok))
        };
        // Pages between the start and the first one of all tokens are on the device.
        let held = self.from(Component::Full);
        let full_end = (held..end).find(|&page| !good(Component::Full, page)).unwrap_or(end);
        let window = |upto: usize| {
            (upto.saturating_sub(self.window)..upto).all(|page| page < start || good(Component::Window, page))
        };
        let state = |upto: usize| self.device[Component::State].is_empty() || good(Component::State, upto - 1);
        let found = (start + 1..=full_end).rev().find(|&upto| window(upto) && state(upto)).unwrap_or(start);
        let bad = Component::ALL.into_iter().flat_map(|component| &results[component]);
        let reason = bad.copied().find(|&result| result != StorageResult::Ok).filter(|_| found < end).map(reason_of);
        Verdict { good: found - start, reason }
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

/// Pages of one request that come layer by layer into device slots that are its own.
#[derive(Debug)]
pub(crate) struct LoadRun {
    /// Which load it is.
    pub id: u64,
    /// Whose.
    pub request: RequestId,
    /// Where from.
    pub origin: Origin,
    /// What it brings.
    pub span: LoadSpan,
    /// When the slots became the load's: what the device was told to compute since then does not know them.
    pub moments: PerComponent<Moments>,
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
    /// Copies to the device that may still run.
    coming: Coming,
    /// The device slots are being read.
    reading: bool,
    /// The device slots are the load's no more.
    abandoned: bool,
    verdict: Option<Verdict>,
}

impl LoadRun {
    /// A load of `layers` layers that has not begun.
    pub fn new(
        id: u64,
        request: RequestId,
        origin: Origin,
        span: LoadSpan,
        moments: PerComponent<Moments>,
        layers: usize,
    ) -> Arc<Self> {
        let state = State {
            operation: None,
            began: None,
            landed: vec![false; layers],
            coming: Coming::default(),
            reading: false,
            abandoned: false,
            verdict: None,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Arc::new(LoadRun { id, request, origin, span, moments, state, changed })
    }

    /// Pages by which it makes the prefix longer.
    pub fn pages(&self) -> usize {
        self.span.end() - self.span.start
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

    /// Starts to copy a layer, some pages at a time, and opens its gate. `copy` is given the places of pages among those of their component; it is
    /// called no more once the slots are not the load's any more.
    pub fn land(
        &self,
        layer: usize,
        at_once: &PerComponent<usize>,
        mut copy: impl FnMut(Component, Range<usize>) -> Transfers,
    ) {
        for component in Component::ALL {
            let (pages, at_once) = (self.span.device[component].len(), at_once[component].max(1));
            for from in (0..pages).step_by(at_once) {
                // Under the lock, so that nobody gets the slots while they are written.
                let mut state = self.state.lock();
                if state.abandoned {
                    return;
                }
                let transfers = copy(component, from..pages.min(from + at_once));
                state.coming.add(layer, transfers);
            }
        }
        if let Some(landed) = self.state.lock().landed.get_mut(layer) {
            *landed = true;
        }
        self.changed.notify_all();
    }

    /// It is over, when what is being copied has come. The first verdict counts.
    pub fn end(&self, verdict: Verdict) {
        let verdict = match self.arrive() {
            Ok(()) => verdict,
            Err(error) => {
                tracing::error!(%error, "pages did not come to the device");
                Verdict { good: 0, reason: Some(MissReason::BackendFailed) }
            }
        };
        self.state.lock().verdict.get_or_insert(verdict);
        self.changed.notify_all();
    }

    /// Waits for what is being copied.
    pub(super) fn arrive(&self) -> Result<(), KernelError> {
        // They stay where they are meanwhile: a pass that begins now has to wait for them, too.
        let coming = self.state.lock().coming.all();
        let came = coming.iter().try_for_each(|transfer| transfer.wait());
        self.state.lock().coming.forget_done();
        came
    }

    /// Reads what has come into the slots; nobody gets them meanwhile. None if they are the load's no more.
    pub(super) fn read_slots<T>(&self, read: impl FnOnce() -> T) -> Option<T> {
        let mut state = self.state.lock();
        if state.abandoned {
            return None;
        }
        state.reading = true;
        drop(state);
        let _reading = Reading(self);
        Some(read())
    }

    /// The verdict, if it is over.
    pub fn verdict(&self) -> Option<Verdict> {
        self.state.lock().verdict
    }

    /// Whether its slots were taken back.
    pub fn is_abandoned(&self) -> bool {
        self.state.lock().abandoned
    }

    /// Takes the device slots back: when this returns nothing of the load uses them any more. It goes on for the others of its batch.
    pub fn abandon(&self) {
        let mut state = self.state.lock();
        state.abandoned = true;
        self.changed.notify_all();
        while state.reading {
            self.changed.wait(&mut state);
        }
        drop(state);
        if let Err(error) = self.arrive() {
            tracing::error!(%error, "pages that nobody waits for did not come to the device");
        }
    }

    /// The call of its batch, once that was handed down.
    pub fn operation(&self) -> Option<Arc<CancelSet>> {
        self.state.lock().operation.clone()
    }
}

/// The slots of a load are being read, until this is dropped.
struct Reading<'a>(&'a LoadRun);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.state.lock().reading = false;
        self.0.changed.notify_all();
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
        self.0.span.start
    }

    /// The slot into which the recurrent state behind the last page comes, where the model has such: of a layer whose gate is open it can be read.
    pub fn state_slot(&self) -> Option<u32> {
        self.0.span.device[Component::State].first().copied()
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

    /// Lets what the device is told to compute from now on wait for the copies of a layer whose gate is open. Does not wait itself.
    ///
    /// # Errors
    /// The device's own.
    pub fn before_layer(&self, layer: usize) -> Result<(), KernelError> {
        self.0.state.lock().coming.before_layer(layer)
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

#[cfg(test)]
mod tests {
    use StorageResult::{Corrupt, Failed, Late, Missing, Ok};

    use super::*;

    /// A load behind 4 pages, up to page 10.
    fn span(full: usize, window_slots: usize, states: usize, window: usize) -> LoadSpan {
        let slots = |count: usize| (0..count as u32).collect::<Vec<_>>();
        let device = PerComponent([slots(full), slots(window_slots), slots(states)]);
        LoadSpan { keys: vec![[0; 32]; 10].into(), start: 4, transit: device.clone(), device, window }
    }

    fn all(span: &LoadSpan) -> PerComponent<Vec<StorageResult>> {
        PerComponent(span.device.0.each_ref().map(|slots| vec![Ok; slots.len()]))
    }

    #[test]
    fn a_load_is_good_up_to_its_first_bad_page() {
        let span = span(6, 0, 0, 0);
        let of = |results: [StorageResult; 6]| span.verdict(&PerComponent([results.into(), Vec::new(), Vec::new()]));
        assert_eq!(of([Ok; 6]), Verdict { good: 6, reason: None });
        assert_eq!(of([Ok, Missing, Ok, Ok, Ok, Ok]), Verdict { good: 1, reason: Some(MissReason::Evicted) });
        assert_eq!(of([Corrupt; 6]), Verdict { good: 0, reason: Some(MissReason::Corrupt) });
        assert_eq!(of([Late; 6]).reason, Some(MissReason::BackendSlow));
        assert_eq!(of([Failed; 6]).reason, Some(MissReason::BackendFailed));
    }

    /// Only the window before the end was asked for: without it nothing behind the start can be gone on from, but where the window reaches
    /// back to what is on the device.
    #[test]
    fn l22_a_window_that_lacks_a_page_shortens_the_hit_to_where_another_is_whole() {
        let whole = span(6, 3, 0, 3);
        assert_eq!(whole.from(Component::Window), 7);
        assert_eq!(whole.verdict(&all(&whole)), Verdict { good: 6, reason: None });
        for bad in 0..3 {
            let mut results = all(&whole);
            results[Component::Window][bad] = Missing;
            assert_eq!(whole.verdict(&results), Verdict { good: 0, reason: Some(MissReason::Evicted) });
        }
        // The window takes as many pages as the load: the first pages of it stand on what is on the device.
        let wide = span(6, 6, 0, 8);
        let mut results = all(&wide);
        results[Component::Window][2] = Missing;
        assert_eq!(wide.verdict(&results).good, 2);
        let mut results = all(&wide);
        results[Component::Full][4] = Corrupt;
        assert_eq!(wide.verdict(&results), Verdict { good: 4, reason: Some(MissReason::Corrupt) });
    }

    #[test]
    fn l35_without_its_state_nothing_of_a_load_counts() {
        let span = span(6, 0, 1, 0);
        assert_eq!(span.verdict(&all(&span)), Verdict { good: 6, reason: None });
        let mut results = all(&span);
        results[Component::State][0] = Failed;
        assert_eq!(span.verdict(&results), Verdict { good: 0, reason: Some(MissReason::BackendFailed) });
        let mut results = all(&span);
        results[Component::Full][5] = Missing;
        assert_eq!(span.verdict(&results).good, 0, "the state stands for exactly the end");
    }

    /// G8: pages of all tokens behind the start that lacked a window or a state alone.
    #[test]
    fn g08_pages_that_are_on_the_device_need_not_come() {
        let span = span(2, 0, 1, 0);
        assert_eq!((span.from(Component::Full), span.from(Component::State)), (8, 9));
        assert_eq!(span.verdict(&all(&span)), Verdict { good: 6, reason: None });
    }
}
