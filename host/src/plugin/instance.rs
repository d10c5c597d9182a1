//! One open instance of a plugin, as the cache uses it.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kvdock_plugin_api::v0_1::{CallContext, HealthOut, Stats};
use kvdock_plugin_api::{Capabilities, ClearScope, HealthState};

use super::abi::{Face, RawInstance};
use super::backend::{
    BackendError, BackendLimits, BackendSettings, BackendStats, CallOptions, ChainInfo, ErrorKind, Held, LayerLoad,
    PageKey, PageStatus, PoolGroup, Restorable, StorageBackend,
};
use super::call::{CallBuffers, CallFailure, Operation, deadline_ns, invoke};
use super::controls::Controls;
use super::host_table::{HostContext, LinkNews};
use super::library::Library;
use super::linked::{LinkBuffers, LinkState, LoadPart, PartLane};
use super::pool_desc::Registered;
use super::state::{BackendState, StateCell};
use super::workers::{Outcome, Workers};

/// Most calls at a time, whatever a plugin asks for.
const MOST_CONCURRENCY: usize = 64;

/// How often a drain looks whether it is to end now.
const HURRY_INTERVAL: Duration = Duration::from_millis(10);

/// Least time for `close`.
const LEAST_CLOSE_TIME: Duration = Duration::from_secs(1);

/// What an instance is made of.
pub struct Parts {
    /// Name under which it is attached.
    pub name: String,
    /// The library.
    pub library: Arc<Library>,
    /// What `open` made.
    pub raw: RawInstance,
    /// What it can do.
    pub capabilities: Capabilities,
    /// The pools that were registered.
    pub pools: Vec<Registered>,
    /// What keeps device memory that was registered; none where the pools are the host's.
    pub device: Option<Arc<dyn Any + Send + Sync>>,
    /// The instance's host context.
    pub context: &'static HostContext,
    /// How the host treats it.
    pub settings: BackendSettings,
    /// Its state.
    pub state: Arc<StateCell>,
}

/// One open instance of a plugin.
pub struct Instance {
    name: String,
    library: Arc<Library>,
    raw: RawInstance,
    pools: Vec<Registered>,
    /// Its pools are the device's, and their memory is there until it is closed.
    direct: bool,
    device: Mutex<Option<Arc<dyn Any + Send + Sync>>>,
    context: &'static HostContext,
    limits: BackendLimits,
    settings: BackendSettings,
    state: Arc<StateCell>,
    workers: Arc<Workers>,
    link: Arc<LinkState>,
    /// It has the linker face.
    linker: bool,
    controls: Arc<Controls>,
    calls: AtomicU64,
    /// Data calls between the look at the state and their end. Whoever sees none after the state has left those that serve
    /// sees none later.
    entered: AtomicUsize,
    /// The drain is to end now.
    hurried: AtomicBool,
    /// A health call has not returned.
    asked: Arc<AtomicBool>,
    /// The trouble that the plugin told last by itself; none after it told that all is well.
    told: Arc<Mutex<Option<String>>>,
    /// How far its end has come; locked as long as it is worked on.
    end: Mutex<End>,
}

/// What a data call is about.
#[derive(Clone, Copy)]
struct About<'a> {
    /// Whose pages; none for exists, which asks about all.
    group: Option<PoolGroup>,
    held: Held,
    keys: &'a [PageKey],
    pages: &'a [u32],
}

impl<'a> About<'a> {
    fn pages(group: PoolGroup, keys: &'a [PageKey], pages: &'a [u32]) -> Self {
        About { group: Some(group), held: Held::default(), keys, pages }
    }
}

/// How far the end of an instance has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Nobody has ended it.
    Open,
    /// A call has not returned, so it could not be closed.
    Stuck,
    /// `close` has not returned.
    Closing,
    /// It is closed.
    Closed,
}

/// A context for a control call.
pub(super) fn control_context(deadline: Instant) -> CallContext {
    CallContext { deadline_ns: deadline_ns(deadline), cancel: std::ptr::null(), trace_id: 0 }
}

impl Instance {
    /// Takes over an open and registered instance.
    ///
    /// # Errors
    /// When its threads can't be started. The instance is not closed then.
    pub fn new(parts: Parts) -> std::io::Result<Arc<Instance>> {
        let Parts { name, library, raw, capabilities, pools, device, context, settings, state } = parts;
        let wanted = (capabilities.concurrency as usize).clamp(1, MOST_CONCURRENCY);
        let concurrency = settings.concurrency.map_or(wanted, |most| wanted.min(most.max(1)));
        let limits = BackendLimits {
            preferred_batch: (capabilities.preferred_batch as usize).clamp(1, 4096),
            concurrency,
            remove: capabilities.remove,
            durable: capabilities.durable,
        };
        let late_state = state.clone();
        let on_all_late = Box::new(move || {
            let reason = "every call that it may run at a time hangs";
            late_state.go_if(BackendState::serves, BackendState::Failed, reason);
        });
        let workers = Arc::new(Workers::start(&name, library.face(), raw, pools.clone(), concurrency, on_all_late)?);
        let link: Arc<LinkState> = Arc::default();
        let linker = capabilities.linker && library.face().linker().is_some();
        if linker {
            let (link, workers) = (link.clone(), Arc::downgrade(&workers));
            context.listen_for_links(Some(Box::new(move |news| match news {
                LinkNews::OffloadCompleted => link.offload_completed(),
                LinkNews::LayersSettled => {
                    if let Some(workers) = workers.upgrade() {
                        workers.nudge();
                    }
                }
            })));
        }
        let health_state = state.clone();
        let told: Arc<Mutex<Option<String>>> = Arc::default();
        let tells = told.clone();
        context.listen(Some(Box::new(move |health, reason| {
            let to = match health {
                HealthState::Ok => BackendState::Active,
                HealthState::Degraded => BackendState::Degraded,
                // A backend that says it fails may still heal; it is the host that fails an instance for good.
                HealthState::Failed => BackendState::Degraded,
            };
            let trouble = (to == BackendState::Degraded).then(|| reason.clone());
            *tells.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
            health_state.go_if(BackendState::serves, to, &reason);
        })));
        Ok(Arc::new(Instance {
            name,
            library,
            raw,
            pools,
            direct: device.is_some(),
            device: Mutex::new(device),
            context,
            limits,
            settings,
            state,
            workers,
            link,
            linker,
            controls: Arc::default(),
            calls: AtomicU64::new(0),
            entered: AtomicUsize::new(0),
            hurried: AtomicBool::new(false),
            asked: Arc::default(),
            told,
            end: Mutex::new(End::Open),
        }))
    }

    /// The library it runs from.
    pub fn library(&self) -> &Arc<Library> {
        &self.library
    }

    /// Its state.
    pub fn state(&self) -> &Arc<StateCell> {
        &self.state
    }

    /// What the plugin reported as metrics.
    pub fn context(&self) -> &'static HostContext {
        self.context
    }

    /// Data calls that run now.
    pub fn in_flight(&self) -> usize {
        self.workers.in_flight()
    }

    fn face(&self) -> &'static dyn Face {
        self.library.face()
    }

    fn error(&self, failure: CallFailure, pages_in_use: bool) -> BackendError {
        if failure.panicked {
            self.state.go_if(BackendState::serves, BackendState::Failed, &failure.message);
        }
        BackendError {
            backend: self.name.clone(),
            kind: failure.kind,
            retryable: failure.retryable,
            message: failure.message,
            pages_in_use,
        }
    }

    fn data_call<R>(
        &self,
        operation: Operation,
        options: &CallOptions,
        about: About<'_>,
        chain: &ChainInfo<'_>,
        read: impl FnOnce(&CallBuffers) -> R,
    ) -> Result<R, BackendError> {
        self.linked_call(operation, options, about, chain, |_| {}, None, read)
    }

    /// As `data_call`, with what a linker call has beside that.
    #[allow(clippy::too_many_arguments)] // Each is one of the call's own.
    fn linked_call<R>(
        &self,
        operation: Operation,
        options: &CallOptions,
        about: About<'_>,
        chain: &ChainInfo<'_>,
        link: impl FnOnce(&mut LinkBuffers),
        watch: Option<&mut dyn FnMut()>,
        read: impl FnOnce(&CallBuffers) -> R,
    ) -> Result<R, BackendError> {
        let _entered = Entered::new(&self.entered);
        if !self.state.serves() {
            let state = self.state.report();
            let message = format!("it is {}: {}", state.state.as_str(), state.reason);
            return Err(self.error(CallFailure::new(ErrorKind::Unavailable, true, message), false));
        }
        let trace_id = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let About { group, held, keys, pages } = about;
        let fill = |buffers: &mut CallBuffers| {
            buffers.group = group;
            buffers.held = held;
            buffers.keys.clear();
            buffers.keys.extend_from_slice(keys);
            buffers.pages.clear();
            buffers.pages.extend_from_slice(pages);
            buffers.prefix_keys.clear();
            buffers.prefix_keys.extend_from_slice(chain.prefix_keys);
            buffers.session.clear();
            buffers.session.push_str(chain.session_id);
            buffers.position = chain.position;
            buffers.cancel = options.cancel.clone();
            buffers.deadline_ns = deadline_ns(options.deadline);
            buffers.trace_id = trace_id;
            buffers.link.parts.clear();
            link(&mut buffers.link);
        };
        match self.workers.call(operation, options.deadline, fill, watch, read) {
            Outcome::Returned(result) => result.map_err(|failure| self.error(failure, false)),
            Outcome::Late => {
                self.workers.quarantine(pages.len());
                let message = format!("{operation:?} of {} pages did not return in its time", keys.len());
                tracing::warn!(backend = %self.name, pages = pages.len(), "{message}; the pages are quarantined until it does");
                Err(self.error(CallFailure::new(ErrorKind::TimedOut, true, message), !pages.is_empty()))
            }
            Outcome::Busy => {
                let message = format!("all {} calls that it may run at a time are under way", self.limits.concurrency);
                Err(self.error(CallFailure::new(ErrorKind::Unavailable, true, message), false))
            }
        }
    }

    fn page_call(
        &self,
        operation: Operation,
        options: &CallOptions,
        about: About<'_>,
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        let About { keys, pages, .. } = about;
        if status.len() != keys.len() || (operation != Operation::Remove && pages.len() != keys.len()) {
            let message = format!("{} keys, {} pages, {} statuses", keys.len(), pages.len(), status.len());
            return Err(self.error(CallFailure::new(ErrorKind::Internal, false, message), false));
        }
        status.fill(PageStatus::Failed);
        if keys.is_empty() {
            return Ok(());
        }
        let link = |link: &mut LinkBuffers| link.state = self.link.clone();
        self.linked_call(operation, options, about, chain, link, None, |buffers| read_statuses(buffers, status))
    }

    fn read_restorable(&self, buffers: &CallBuffers) -> Restorable {
        let mask = buffers.restorable.iter().map(|byte| *byte == 1).collect();
        let mut answer = Restorable::from_mask(mask);
        for group in PoolGroup::ALL {
            if self.pools.iter().any(|pool| pool.group == group) {
                let keys = 0..buffers.keys.len();
                let present = keys.map(|key| buffers.present(&self.pools, group, key)).collect();
                answer = answer.with_present_of(group, present);
            }
        }
        answer
    }

    fn control<T: Send + 'static>(
        &self,
        deadline: Instant,
        body: impl FnOnce(&'static dyn Face, RawInstance, CallContext) -> Result<T, CallFailure> + Send + 'static,
    ) -> Result<T, BackendError> {
        let (face, raw) = (self.face(), self.raw);
        self.controls
            .run(deadline, move || body(face, raw, control_context(deadline)))
            .map_err(|failure| self.error(failure, false))
    }

    /// Asks how the backend feels. While an earlier question has no answer, none is asked.
    ///
    /// # Errors
    /// When it can't say in time.
    pub fn health(&self, deadline: Instant) -> Result<(HealthState, String), BackendError> {
        if self.asked.swap(true, Ordering::AcqRel) {
            let message = "an earlier health call has not returned";
            return Err(self.error(CallFailure::new(ErrorKind::TimedOut, true, message), false));
        }
        let answered = Answered(self.asked.clone());
        self.control(deadline, move |face, raw, context| {
            let _answered = answered;
            health(face, raw, &context)
        })
    }

    /// The trouble that the plugin told last by itself, if it has not told that all is well since.
    pub fn told_trouble(&self) -> Option<String> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the drain of a `shut` that runs or comes: calls that run are cancelled at once.
    pub fn hurry(&self) {
        self.hurried.store(true, Ordering::SeqCst);
        self.link.end();
        self.workers.cancel_all();
    }

    /// Ends the instance: takes no new calls, gives those that run until `drain` to return, cancels them, and closes it by `deadline`, which
    /// comes earlier by as much as [`Instance::hurry`] shortens the drain. Says whether it was closed; when a call never returned it stays as a
    /// zombie. A later call closes a zombie whose calls have returned meanwhile.
    ///
    /// A failed instance keeps its state, so that the status still shows why it failed.
    pub fn shut(&self, drain: Instant, deadline: Instant, reason: &str) -> bool {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.go_if(BackendState::serves, BackendState::Draining, reason);
        match *end {
            End::Closed => return true,
            End::Closing => {
                if self.controls.is_idle() {
                    *end = End::Closed;
                    self.let_device_go();
                    self.state.go(BackendState::Detached, "close has returned");
                }
                return *end == End::Closed;
            }
            End::Open | End::Stuck => {}
        }
        let mut deadline = deadline;
        while !self.wait_idle(drain.min(Instant::now() + HURRY_INTERVAL)) && Instant::now() < drain {
            if self.hurried.load(Ordering::SeqCst) {
                deadline -= drain.saturating_duration_since(Instant::now());
                break;
            }
        }
        if !self.wait_idle(Instant::now()) {
            self.link.end();
            self.workers.cancel_all();
        }
        *end = if self.wait_idle(deadline) && self.controls.seal(deadline) {
            self.context.listen(None);
            self.context.listen_for_losses(None);
            self.context.listen_for_links(None);
            self.close(deadline, reason)
        } else {
            self.state.go(BackendState::Zombie, "a call has not returned; it can't be closed before it does");
            End::Stuck
        };
        *end == End::Closed
    }

    /// Whether no call into the plugin runs.
    pub fn is_idle(&self) -> bool {
        self.wait_idle(Instant::now()) && self.controls.is_idle()
    }

    /// Waits until no data call runs. Once the state has left those that serve, none can begin later.
    fn wait_idle(&self, deadline: Instant) -> bool {
        while self.entered.load(Ordering::SeqCst) > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            // Callers leave as soon as their call has returned or is late, so this ends soon after the workers are idle.
            thread::sleep(left.min(Duration::from_millis(1)));
        }
        self.workers.wait_idle(deadline)
    }

    fn close(&self, deadline: Instant, reason: &str) -> End {
        let (face, raw) = (self.face(), self.raw);
        // `close` gets time of its own even when other calls used theirs up.
        let deadline = deadline.max(Instant::now() + LEAST_CLOSE_TIME);
        let closed = self.controls.close(deadline, move || close(face, raw, deadline));
        let (end, state, reason) = match closed {
            Err(error) if error.kind == ErrorKind::TimedOut && !self.controls.is_idle() => {
                (End::Closing, BackendState::Zombie, "close has not returned".to_owned())
            }
            Err(error) => (End::Closed, BackendState::Detached, format!("close failed: {}", error.message)),
            Ok(()) => (End::Closed, BackendState::Detached, reason.to_owned()),
        };
        self.state.go_if(|before| end == End::Closing || before != BackendState::Failed, state, &reason);
        if end == End::Closed {
            self.let_device_go();
        }
        end
    }

    /// The plugin is closed: what it had of a device's memory may go.
    fn let_device_go(&self) {
        let device = self.device.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(device);
    }
}

impl std::fmt::Debug for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Instance").field("name", &self.name).field("state", &self.state).finish_non_exhaustive()
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Whoever was never closed may still use the memory: it stays for ever.
        std::mem::forget(self.device.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// What the plugin said of each page.
fn read_statuses(buffers: &CallBuffers, status: &mut [PageStatus]) {
    for (key, to) in status.iter_mut().enumerate() {
        *to = buffers.status(key);
    }
}

/// Only for `Instance::close`.
fn close(face: &dyn Face, raw: RawInstance, deadline: Instant) -> Result<(), CallFailure> {
    let context = control_context(deadline);
    invoke(&mut Vec::new(), |error| {
        // SAFETY: every other call has returned and none is made again: data calls are refused by the state and counted by `entered`,
        // control calls are refused by `seal`, and `end` lets this be reached once.
        unsafe { face.close(raw, &raw const context, error) }
    })
}

/// Marks a data call from the look at the state to its end.
struct Entered<'a>(&'a AtomicUsize);

impl<'a> Entered<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Entered(count)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Ends the question how the backend feels, also when the call is not made.
struct Answered(Arc<AtomicBool>);

impl Drop for Answered {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Asks an instance how it feels.
pub(super) fn health(
    face: &dyn Face,
    raw: RawInstance,
    context: &CallContext,
) -> Result<(HealthState, String), CallFailure> {
    let mut reason = [0u8; 1024];
    let mut out = HealthOut {
        state: 0,
        reserved: 0,
        reason: reason.as_mut_ptr(),
        reason_capacity: reason.len() as u64,
        reason_len: 0,
    };
    invoke(&mut Vec::new(), |error| {
        // SAFETY: the instance is open; the buffers live until the call returns.
        unsafe { face.health(raw, context, &raw mut out, error) }
    })?;
    let len = usize::try_from(out.reason_len).unwrap_or(usize::MAX).min(reason.len());
    Ok((HealthState::from_raw(out.state), String::from_utf8_lossy(&reason[..len]).into_owned()))
}

impl StorageBackend for Instance {
    fn name(&self) -> &str {
        &self.name
    }

    fn generation(&self) -> u64 {
        self.state.instance()
    }

    fn limits(&self) -> BackendLimits {
        self.limits
    }

    fn settings(&self) -> &BackendSettings {
        &self.settings
    }

    fn batch_exists(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError> {
        if keys.is_empty() {
            return Ok(Restorable::none(0));
        }
        let about = About { group: None, held: *held, keys, pages: &[] };
        self.data_call(Operation::Exists, options, about, chain, |buffers| self.read_restorable(buffers))
    }

    fn batch_get(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.page_call(Operation::Get, options, About::pages(group, keys, pages), chain, status)
    }

    fn batch_set(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.page_call(Operation::Set, options, About::pages(group, keys, pages), chain, status)
    }

    fn batch_remove(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.page_call(Operation::Remove, options, About::pages(group, keys, &[]), &ChainInfo::default(), status)
    }

    fn has_linker(&self) -> bool {
        self.linker
    }

    fn is_direct(&self) -> bool {
        self.direct
    }

    fn lookup(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
        request: u64,
    ) -> Result<Restorable, BackendError> {
        if keys.is_empty() {
            return Ok(Restorable::none(0));
        }
        let link = |link: &mut LinkBuffers| link.request = request;
        let about = About { group: None, held: *held, keys, pages: &[] };
        let read = |buffers: &CallBuffers| self.read_restorable(buffers);
        self.linked_call(Operation::Lookup, options, about, chain, link, None, read)
    }

    fn load_layers(
        &self,
        options: &CallOptions,
        loads: &[LayerLoad<'_>],
        words: &Arc<[AtomicU32]>,
        watch: &mut dyn FnMut(),
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        let (mut keys, mut pages, mut prefix) = (Vec::new(), Vec::new(), Vec::new());
        let mut parts = Vec::with_capacity(loads.len());
        for load in loads {
            let before = prefix.len();
            prefix.extend_from_slice(load.prefix());
            let lanes = PoolGroup::ALL.map(|group| {
                let (from, lane) = (keys.len(), &load.lanes[group as usize]);
                keys.extend_from_slice(load.keys_of(group));
                pages.extend_from_slice(lane.pages);
                let offset = u32::try_from(lane.from.saturating_sub(load.start)).unwrap_or(u32::MAX);
                PartLane { pages: from..keys.len(), offset }
            });
            parts.push(LoadPart {
                request: load.request,
                lanes,
                position: load.start as u64,
                prefix: before..prefix.len(),
            });
        }
        if keys.len() != pages.len() || keys.len() != status.len() {
            let message = format!("{} keys, {} pages, {} statuses", keys.len(), pages.len(), status.len());
            return Err(self.error(CallFailure::new(ErrorKind::Internal, false, message), false));
        }
        status.fill(PageStatus::Failed);
        if keys.is_empty() {
            return Ok(());
        }
        let link = |link: &mut LinkBuffers| {
            link.state = self.link.clone();
            link.parts = parts;
            link.words = words.clone();
        };
        let chain = ChainInfo { position: 0, prefix_keys: &prefix, session_id: "" };
        let read = |buffers: &CallBuffers| read_statuses(buffers, status);
        let about = About { group: None, held: Held::default(), keys: &keys, pages: &pages };
        self.linked_call(Operation::Load, options, about, &chain, link, Some(watch), read)
    }

    fn offload(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.page_call(Operation::Offload, options, About::pages(group, keys, pages), chain, status)
    }

    fn flush(&self, options: &CallOptions) -> Result<(), BackendError> {
        self.control(options.deadline, |face, raw, context| {
            invoke(&mut Vec::new(), |error| {
                // SAFETY: the instance is open.
                unsafe { face.flush(raw, &raw const context, error) }
            })
        })
    }

    fn clear(&self, options: &CallOptions) -> Result<(), BackendError> {
        self.control(options.deadline, |face, raw, context| {
            invoke(&mut Vec::new(), |error| {
                // SAFETY: the instance is open.
                unsafe { face.clear(raw, &raw const context, ClearScope::Namespace.raw(), error) }
            })
        })
    }

    fn stats(&self) -> Result<BackendStats, BackendError> {
        self.control(Instant::now() + self.settings.timeout, |face, raw, context| {
            let mut out =
                Stats { pages: 0, bytes_used: 0, bytes_total: 0, failures: 0, get_mean_ns: 0, set_mean_ns: 0 };
            invoke(&mut Vec::new(), |error| {
                // SAFETY: the instance is open; `out` lives until the call returns.
                unsafe { face.stats(raw, &raw const context, &raw mut out, error) }
            })?;
            Ok(BackendStats {
                pages: out.pages,
                bytes_used: out.bytes_used,
                bytes_total: out.bytes_total,
                failures: out.failures,
            })
        })
    }

    fn reclaim(&self, group: PoolGroup) -> Vec<u32> {
        self.workers.reclaim(group)
    }

    fn quarantined(&self) -> usize {
        self.workers.quarantined()
    }
}
