//! Attached backends, and calls to them through the guards.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::belief::Belief;
use super::guard::backoff;
use super::guard::break_even::ReadSpeed;
use super::guard::breaker::{Breaker, Pass};
use super::guard::bucket::Bucket;
use super::guard::cancel::CancelSet;
use super::quarantine::Quarantine;
use crate::cache::config::WritePolicy;
use crate::cache::pool::Holders;
use crate::cache::stats::{BackendCounters, CacheCounters, StorageOp};
use crate::cache::unified::{Component, PerComponent};
use crate::plugin::backend::{
    BackendError, BackendLimits, BackendSettings, BreakEven, BreakerState, CallOptions, ErrorKind, GuardReport,
    StorageBackend, WayReport,
};

/// How often a call that waits for its turn looks whether it was called off.
const TURN_LOOK: Duration = Duration::from_millis(10);
/// A call that was given less than this, to leave time for another backend, says nothing about the backend when it is late.
const FAIR_TIME: Duration = Duration::from_millis(250);
/// Cancel flags kept for later calls.
const SPARE_FLAGS: usize = 64;

/// Why a call brought nothing.
#[derive(Debug)]
pub(crate) enum CallFault {
    /// The backend keeps failing, or left, and was not called.
    Skipped,
    /// The bandwidth limit, or the calls before it, left no time; the backend was not called.
    CrowdedOut,
    /// The operation was called off before the backend was called.
    CalledOff,
    /// The call failed.
    Failed(BackendError),
}

/// Reads and writes fail apart: a full store still reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Exists and get.
    Read,
    /// Set, remove, flush.
    Write,
}

impl Way {
    fn of(op: StorageOp) -> Way {
        match op {
            StorageOp::Get | StorageOp::Exists => Way::Read,
            StorageOp::Set | StorageOp::Remove | StorageOp::Flush => Way::Write,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Way::Read => "reads",
            Way::Write => "writes",
        }
    }
}

/// What a call is about.
#[derive(Clone, Copy)]
pub(crate) struct CallInfo<'a> {
    /// Which call.
    pub op: StorageOp,
    /// Pages it is about.
    pub pages: usize,
    /// Bytes it may move, which count for the bandwidth limit.
    pub bytes: u64,
    /// What it belongs to.
    pub operation: &'a CancelSet,
    /// Less time than the backend's timeout, so that there is some left to ask another one.
    pub within: Option<Duration>,
}

/// Counts of one way.
#[derive(Debug, Default)]
struct WayState {
    breaker: Mutex<Breaker>,
    calls: AtomicU64,
    failed: AtomicU64,
    skipped: AtomicU64,
    retried: AtomicU64,
    queued: AtomicU64,
    crowded_out: AtomicU64,
}

/// A backend in use, with what the host knows of it.
pub(crate) struct Attached {
    backend: Arc<dyn StorageBackend>,
    /// Figures by call and result.
    pub figures: Arc<BackendCounters>,
    /// How fast it is read from.
    pub speed: ReadSpeed,
    counters: Arc<CacheCounters>,
    policy: Option<WritePolicy>,
    /// By component.
    belief: Mutex<PerComponent<Belief>>,
    /// How often its store was emptied.
    emptied: AtomicU32,
    ways: [WayState; 2],
    limits: [Option<Bucket>; 2],
    quarantine: PerComponent<Quarantine>,
    retired: AtomicBool,
    running: Mutex<usize>,
    idle: Condvar,
    /// Cancel flags that no call uses, so that a call allocates none.
    flags: Mutex<Vec<Arc<AtomicU32>>>,
}

/// A place among the calls that the backend wants at a time.
struct Turn<'a>(&'a Attached);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.running.lock() -= 1;
        self.0.idle.notify_all();
    }
}

impl Attached {
    /// A backend of which nothing is known yet.
    pub fn new(backend: Arc<dyn StorageBackend>, counters: Arc<CacheCounters>) -> Self {
        let (figures, settings, now) = (counters.backend(backend.name()), backend.settings(), Instant::now());
        let policy = settings.write_policy.as_deref().and_then(|name| {
            name.parse()
                .inspect_err(|error| {
                    tracing::error!(backend = backend.name(), %error, "the cache's write policy is used");
                })
                .ok()
        });
        let limits = [settings.read_bandwidth, settings.write_bandwidth];
        for way in 0..2 {
            figures.set_breaker(way, BreakerState::Closed);
        }
        Attached {
            figures,
            speed: ReadSpeed::default(),
            counters,
            policy,
            limits: limits.map(|limit| limit.map(|bytes| Bucket::new(bytes, now))),
            backend,
            belief: Mutex::default(),
            emptied: AtomicU32::new(0),
            ways: Default::default(),
            quarantine: PerComponent::default(),
            retired: AtomicBool::new(false),
            running: Mutex::new(0),
            idle: Condvar::new(),
            flags: Mutex::new(Vec::with_capacity(SPARE_FLAGS)),
        }
    }

    /// Name of the backend.
    pub fn name(&self) -> &str {
        self.backend.name()
    }

    /// What suits the backend.
    pub fn limits(&self) -> BackendLimits {
        self.backend.limits()
    }

    /// Most pages of a call: what suits it, and no more than about a second's worth where its bandwidth is limited, so that a part of a hit
    /// comes in time where all of it does not.
    pub fn batch(&self, way: Way, page_bytes: u64) -> usize {
        let settings = self.settings();
        let limit = match way {
            Way::Read => settings.read_bandwidth,
            Way::Write => settings.write_bandwidth,
        };
        let paid = limit.map_or(usize::MAX, |bytes| usize::try_from(bytes / page_bytes.max(1)).unwrap_or(usize::MAX));
        self.limits().preferred_batch.min(paid).clamp(1, super::BATCH_PAGES)
    }

    /// How the host treats it.
    pub fn settings(&self) -> &BackendSettings {
        self.backend.settings()
    }

    /// Its write policy, where that of the cache is `default`.
    pub fn write_policy(&self, default: WritePolicy) -> WritePolicy {
        self.policy.unwrap_or(default)
    }

    /// What the guards have seen.
    pub fn report(&self, break_even: Option<BreakEven>) -> GuardReport {
        let way = |way: Way| {
            let state = &self.ways[way as usize];
            let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let breaker = state.breaker.lock();
            WayReport {
                breaker: breaker.state(),
                resting: breaker.why(),
                since: breaker.since(),
                failures: breaker.failures(),
                calls: count(&state.calls),
                failed: count(&state.failed),
                skipped: count(&state.skipped),
                retried: count(&state.retried),
                queued: count(&state.queued),
                crowded_out: count(&state.crowded_out),
            }
        };
        GuardReport { reads: way(Way::Read), writes: way(Way::Write), break_even }
    }

    /// Whether its reads keep failing and it is left alone for now.
    pub fn is_resting(&self) -> bool {
        self.ways[Way::Read as usize].breaker.lock().is_open(Instant::now())
    }

    /// Calls the backend: not while it rests, no more calls at a time than it wants, within the bandwidth limit and a deadline, and again
    /// after errors that say that this can help. A panic on the way is an error like any other. `attempt` is called once a try.
    ///
    /// Waiting for a turn takes at most the call's timeout, and none of its time: a backend is not blamed for the calls before.
    pub fn call<R>(
        &self,
        info: &CallInfo<'_>,
        mut attempt: impl FnMut(&dyn StorageBackend, &CallOptions) -> Result<R, BackendError>,
    ) -> Result<R, CallFault> {
        let (op, way) = (info.op, Way::of(info.op));
        let _span =
            tracing::debug_span!("storage", backend = self.name(), op = op.as_str(), pages = info.pages).entered();
        let began = Instant::now();
        let result = self.guarded(way, info, &mut attempt);
        let figures = self.figures.call(op);
        let (figure, outcome) = match &result {
            Ok(_) => (&figures.ok, "ok"),
            Err(CallFault::Skipped) => (&figures.skipped, "skipped"),
            Err(CallFault::CrowdedOut) => (&figures.crowded_out, "crowded out"),
            Err(CallFault::CalledOff) => (&figures.cancelled, "called off"),
            Err(CallFault::Failed(error)) if error.kind == ErrorKind::Cancelled => (&figures.cancelled, "cancelled"),
            Err(CallFault::Failed(_)) => (&figures.failed, "failed"),
        };
        figure.fetch_add(1, Ordering::Relaxed);
        match &result {
            Err(CallFault::Skipped) => {
                self.counters.breaker_skips.fetch_add(1, Ordering::Relaxed);
                self.ways[way as usize].skipped.fetch_add(1, Ordering::Relaxed);
            }
            Err(CallFault::CrowdedOut) => drop(self.ways[way as usize].crowded_out.fetch_add(1, Ordering::Relaxed)),
            _ => {}
        }
        let error = result.as_ref().err().and_then(|fault| match fault {
            CallFault::Failed(error) => Some(tracing::field::display(error)),
            _ => None,
        });
        let seconds = began.elapsed().as_secs_f64();
        tracing::debug!(
            backend = self.name(),
            op = op.as_str(),
            pages = info.pages,
            outcome,
            seconds,
            error,
            "storage call"
        );
        result
    }

    fn guarded<R>(
        &self,
        way: Way,
        info: &CallInfo<'_>,
        attempt: &mut impl FnMut(&dyn StorageBackend, &CallOptions) -> Result<R, BackendError>,
    ) -> Result<R, CallFault> {
        let state = &self.ways[way as usize];
        let now = Instant::now();
        let most = self.settings().timeout;
        let timeout = info.within.map_or(most, |within| within.min(most));
        if self.is_retired() || state.breaker.lock().is_open(now) {
            return Err(CallFault::Skipped);
        }
        let patience = now + timeout;
        self.take_bandwidth(way, info, now, patience)?;
        let entered = self.take_turn(info, patience).and_then(|turn| {
            // Asked last: whoever is let through after a rest makes the call.
            state.breaker.lock().allows(Instant::now()).map(|pass| (turn, pass)).ok_or(CallFault::Skipped)
        });
        let (turn, pass) = entered.inspect_err(|_| self.give_bandwidth_back(way, info.bytes))?;
        if pass == Pass::Probe {
            self.figures.set_breaker(way as usize, BreakerState::HalfOpen);
        }
        state.calls.fetch_add(1, Ordering::Relaxed);
        let result = self.tries(way, info, pass, turn, Instant::now() + timeout, attempt);
        self.settle(info.op, pass, timeout >= most.min(FAIR_TIME), &result);
        result.map_err(CallFault::Failed)
    }

    /// The first try and those after it.
    fn tries<R>(
        &self,
        way: Way,
        info: &CallInfo<'_>,
        pass: Pass,
        turn: Turn<'_>,
        deadline: Instant,
        attempt: &mut impl FnMut(&dyn StorageBackend, &CallOptions) -> Result<R, BackendError>,
    ) -> Result<R, BackendError> {
        // Whoever finds out whether a backend works again asks once.
        let retries = if pass == Pass::Probe { 0 } else { self.settings().retries };
        let mut turn = turn;
        for retry in 0.. {
            let error = match self.once(info, deadline, attempt) {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            let again = Instant::now() + backoff::pause(retry);
            // Pages of a call that has not returned are not given to another one.
            let may = error.retryable && !error.pages_in_use && retry < retries && again < deadline;
            if !may || self.is_retired() {
                return Err(error);
            }
            tracing::debug!(backend = self.name(), op = info.op.as_str(), retry, %error, "storage call is made again");
            drop(turn);
            if info.operation.sleep(again) {
                return Err(error);
            }
            turn = match self.take_turn(info, deadline) {
                Ok(turn) => turn,
                Err(_) => return Err(error),
            };
            self.ways[way as usize].retried.fetch_add(1, Ordering::Relaxed);
            self.figures.call(info.op).retries.fetch_add(1, Ordering::Relaxed);
        }
        drop(turn);
        // The loop above ends by its returns.
        Err(self.error(ErrorKind::Internal, "the call was not made"))
    }

    fn once<R>(
        &self,
        info: &CallInfo<'_>,
        deadline: Instant,
        attempt: &mut impl FnMut(&dyn StorageBackend, &CallOptions) -> Result<R, BackendError>,
    ) -> Result<R, BackendError> {
        let options = CallOptions { deadline, cancel: self.flags.lock().pop().unwrap_or_default() };
        info.operation.enter(&options.cancel);
        let began = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| attempt(&*self.backend, &options)));
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.figures.call(info.op).nanos.fetch_add(nanos, Ordering::Relaxed);
        info.operation.leave(&options.cancel);
        let mut result = result.unwrap_or_else(|_| Err(self.error(ErrorKind::Internal, "the call panicked")));
        if let Err(error) = &mut result
            && error.kind == ErrorKind::Cancelled
            && !self.is_retired()
            && (!info.operation.is_cancelled() || (began.elapsed() >= FAIR_TIME && info.operation.blame()))
        {
            // Nobody here called it off, or only because it took so long: its time was over.
            error.kind = ErrorKind::TimedOut;
            error.retryable = true;
        }
        // A flag that was set may be in the hands of a call that has not returned.
        let in_use = matches!(&result, Err(error) if error.pages_in_use || error.kind == ErrorKind::TimedOut);
        if !in_use && !options.is_cancelled() {
            let mut flags = self.flags.lock();
            if flags.len() < SPARE_FLAGS {
                flags.push(options.cancel);
            }
        }
        result
    }

    fn settle<R>(&self, op: StorageOp, pass: Pass, fair: bool, result: &Result<R, BackendError>) {
        let (way, moving) = (Way::of(op), matches!(op, StorageOp::Get | StorageOp::Set));
        let state = &self.ways[way as usize];
        let (name, what) = (self.name(), way.as_str());
        let mut breaker = state.breaker.lock();
        match result {
            Ok(_) => {
                if breaker.succeeded(pass, moving) {
                    tracing::info!(backend = name, "storage works again: {what} are back");
                }
            }
            // What was asked to stop did not fail.
            Err(error) if error.kind == ErrorKind::Cancelled => breaker.unsettled(pass, Instant::now()),
            Err(error) if error.kind == ErrorKind::TimedOut && !fair => breaker.unsettled(pass, Instant::now()),
            // It says that it stores nothing here, as one does whose leader stores it all: an answer, and no failure.
            Err(error) if error.kind == ErrorKind::Unsupported && way == Way::Write => {
                breaker.succeeded(pass, false);
            }
            Err(error) => {
                state.failed.fetch_add(1, Ordering::Relaxed);
                if let Some(pause) = breaker.failed(pass, moving, Instant::now(), || error.to_string()) {
                    let failures = breaker.failures();
                    tracing::warn!(backend = name, failures, ?pause, %error, "storage keeps failing; its {what} rest");
                }
            }
        }
        // A backend that left may have a successor of its name, whose figures these are.
        if !self.is_retired() {
            self.figures.set_breaker(way as usize, breaker.state());
        }
    }

    fn take_bandwidth(&self, way: Way, info: &CallInfo<'_>, now: Instant, patience: Instant) -> Result<(), CallFault> {
        let Some(limit) = self.limits[way as usize].as_ref().filter(|_| info.bytes > 0) else { return Ok(()) };
        let begin = limit.take(info.bytes, now, patience).ok_or(CallFault::CrowdedOut)?;
        if begin > now {
            let called_off = info.operation.sleep(begin);
            let nanos = u64::try_from(now.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.figures.call(info.op).limited_nanos.fetch_add(nanos, Ordering::Relaxed);
            if called_off {
                limit.give_back(info.bytes);
                return Err(CallFault::CalledOff);
            }
        }
        Ok(())
    }

    /// Gives back bandwidth of a call that moved less than it might have.
    pub(super) fn give_bandwidth_back(&self, way: Way, bytes: u64) {
        if let Some(limit) = &self.limits[way as usize]
            && bytes > 0
        {
            limit.give_back(bytes);
        }
    }

    /// Takes note of what a read moved, and of what it might have moved and did not.
    pub fn moved_by_read(&self, bytes: u64, not: u64) {
        self.give_bandwidth_back(Way::Read, not);
        self.figures.moved(StorageOp::Get, bytes);
    }

    /// Waits until fewer calls run than the backend wants at a time.
    fn take_turn(&self, info: &CallInfo<'_>, patience: Instant) -> Result<Turn<'_>, CallFault> {
        let most = self.limits().concurrency.max(1);
        let mut running = self.running.lock();
        if *running >= most {
            let began = Instant::now();
            let figures = self.figures.call(info.op);
            figures.queued.fetch_add(1, Ordering::Relaxed);
            self.ways[Way::of(info.op) as usize].queued.fetch_add(1, Ordering::Relaxed);
            let ended = loop {
                if *running < most || self.is_retired() {
                    break Ok(());
                }
                let now = Instant::now();
                if info.operation.is_cancelled() {
                    break Err(CallFault::CalledOff);
                }
                if now >= patience {
                    break Err(CallFault::CrowdedOut);
                }
                self.idle.wait_until(&mut running, patience.min(now + TURN_LOOK));
            };
            let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            figures.queued_nanos.fetch_add(nanos, Ordering::Relaxed);
            ended?;
        }
        // Counted before the look at `retired`, so that whoever saw none running after a detach sees none later.
        *running += 1;
        drop(running);
        let turn = Turn(self);
        if self.is_retired() { Err(CallFault::Skipped) } else { Ok(turn) }
    }

    /// An error of the host's own.
    pub(crate) fn error(&self, kind: ErrorKind, message: &str) -> BackendError {
        let (backend, message) = (self.name().to_owned(), message.to_owned());
        BackendError { backend, kind, retryable: false, message, pages_in_use: false }
    }

    /// Whether its linker calls are about pages of the device.
    pub fn is_direct(&self) -> bool {
        self.backend.is_direct()
    }

    /// Takes note that a late call still holds `pages` of a component. It is one of their holders in `pool`, the one that its calls are about.
    pub fn hold(&self, component: Component, pages: &[u32], pool: &dyn Holders) {
        self.quarantine[component].hold(pages, pool);
    }

    /// Gives back the pages of late calls that have returned. Says how many are still held.
    pub fn collect(&self, component: Component, pool: &dyn Holders) -> usize {
        self.quarantine[component].collect(pool, || self.backend.reclaim(component.into()))
    }

    /// Pages of late calls.
    pub fn held(&self, component: Component) -> Vec<u32> {
        self.quarantine[component].held()
    }

    /// Runs with what is believed of a component's pages in the store.
    pub fn with_belief<R>(&self, component: Component, run: impl FnOnce(&mut Belief) -> R) -> R {
        run(&mut self.belief.lock()[component])
    }

    /// How often its store was emptied. What was acknowledged before the last time is not there.
    pub fn times_emptied(&self) -> u32 {
        self.emptied.load(Ordering::SeqCst)
    }

    /// Its store was emptied: nothing is believed to be there any more.
    pub(super) fn empty(&self) {
        let mut belief = self.belief.lock();
        self.emptied.fetch_add(1, Ordering::SeqCst);
        belief.0.iter_mut().for_each(Belief::clear);
    }

    /// Believes what a call acknowledged, unless the store was emptied since the call began, when it had been `emptied` times.
    pub fn acknowledge(&self, component: Component, keys: impl Iterator<Item = [u8; 32]>, emptied: u32) {
        let mut belief = self.belief.lock();
        if self.times_emptied() == emptied {
            keys.for_each(|key| belief[component].stored(&key));
        }
    }

    /// Makes no new calls. Those that run are left to return; whoever closes the backend cancels them after a while.
    pub(super) fn retire(&self) {
        self.retired.store(true, Ordering::SeqCst);
        let _running = self.running.lock();
        self.idle.notify_all();
    }

    fn is_retired(&self) -> bool {
        self.retired.load(Ordering::SeqCst)
    }

    pub(super) fn is_done_with(&self) -> bool {
        *self.running.lock() == 0 && self.quarantine.0.iter().all(Quarantine::is_empty)
    }

    pub(super) fn wait_idle(&self, deadline: Instant) -> bool {
        let mut running = self.running.lock();
        while *running > 0 {
            if self.idle.wait_until(&mut running, deadline).timed_out() {
                return *running == 0;
            }
        }
        true
    }
}

#[cfg(test)]
#[path = "attached_tests.rs"]
mod tests;
