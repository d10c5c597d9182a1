//! One open instance of a plugin, as the cache uses it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use kvdock_plugin_api::v0_1::{CallContext, HealthOut, Stats};
use kvdock_plugin_api::{Capabilities, ClearScope, HealthState};

use super::abi::{Face, RawInstance};
use super::backend::{
    BackendError, BackendLimits, BackendSettings, BackendStats, CallOptions, ChainInfo, ErrorKind, PageKey, PageStatus,
    Restorable, StorageBackend,
};
use super::call::{CallBuffers, CallFailure, Operation, deadline_ns, invoke};
use super::host_table::HostContext;
use super::library::Library;
use super::state::{BackendState, StateCell};
use super::workers::{Outcome, Workers};

/// Most calls at a time, whatever a plugin asks for.
const MOST_CONCURRENCY: usize = 64;

/// What an instance is made of.
#[derive(Debug)]
pub struct Parts {
    /// Name under which it is attached.
    pub name: String,
    /// The library.
    pub library: Arc<Library>,
    /// What `open` made.
    pub raw: RawInstance,
    /// What it can do.
    pub capabilities: Capabilities,
    /// The instance's host context.
    pub context: &'static HostContext,
    /// How the host treats it.
    pub settings: BackendSettings,
    /// Its state.
    pub state: Arc<StateCell>,
    /// Differs between any two instances.
    pub generation: u64,
}

/// One open instance of a plugin.
#[derive(Debug)]
pub struct Instance {
    name: String,
    library: Arc<Library>,
    raw: RawInstance,
    context: &'static HostContext,
    generation: u64,
    limits: BackendLimits,
    settings: BackendSettings,
    state: Arc<StateCell>,
    workers: Workers,
    controls: Arc<Controls>,
    calls: AtomicU64,
    /// Whether `shut` ran, and how it ended.
    shut: Mutex<Option<bool>>,
}

/// Counts a control call as ended, however it ends.
struct Ends(Arc<Controls>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Control calls that run now.
#[derive(Debug, Default)]
pub(super) struct Controls {
    running: Mutex<usize>,
    ended: Condvar,
}

impl Controls {
    /// Runs `body` on a thread of its own and waits for it until `deadline`.
    pub(super) fn run<T: Send + 'static>(
        self: &Arc<Self>,
        deadline: Instant,
        body: impl FnOnce() -> Result<T, CallFailure> + Send + 'static,
    ) -> Result<T, CallFailure> {
        let (sender, receiver) = channel();
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let controls = self.clone();
        let spawned = thread::Builder::new().name("kv-control".into()).spawn(move || {
            let _ends = Ends(controls);
            // The receiver is gone when the call was late.
            let _ = sender.send(body());
        });
        if let Err(error) = spawned {
            self.end();
            return Err(CallFailure::new(ErrorKind::Unavailable, true, format!("no thread for the call: {error}")));
        }
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => {
                Err(CallFailure::new(ErrorKind::TimedOut, true, "the call did not return in its time"))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(CallFailure::new(ErrorKind::Internal, false, "the thread of the call ended without an answer"))
            }
        }
    }

    fn end(&self) {
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.ended.notify_all();
    }

    fn wait(&self, deadline: Instant) -> bool {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        while *running > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            running = self.ended.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
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
        let Parts { name, library, raw, capabilities, context, settings, state, generation } = parts;
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
        let workers = Workers::start(&name, library.face(), raw, concurrency, on_all_late)?;
        let health_state = state.clone();
        context.listen(Some(Box::new(move |health, reason| {
            let to = match health {
                HealthState::Ok => BackendState::Active,
                HealthState::Degraded => BackendState::Degraded,
                // A backend that says it fails may still heal; it is the host that fails an instance for good.
                HealthState::Failed => BackendState::Degraded,
            };
            health_state.go_if(BackendState::serves, to, &reason);
        })));
        Ok(Arc::new(Instance {
            name,
            library,
            raw,
            context,
            generation,
            limits,
            settings,
            state,
            workers,
            controls: Arc::default(),
            calls: AtomicU64::new(0),
            shut: Mutex::new(None),
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
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        read: impl FnOnce(&CallBuffers) -> R,
    ) -> Result<R, BackendError> {
        if !self.state.serves() {
            let state = self.state.report();
            let message = format!("it is {}: {}", state.state.as_str(), state.reason);
            return Err(self.error(CallFailure::new(ErrorKind::Unavailable, true, message), false));
        }
        let trace_id = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let fill = |buffers: &mut CallBuffers| {
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
        };
        match self.workers.call(operation, options.deadline, fill, read) {
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
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        if status.len() != keys.len() || (operation != Operation::Remove && pages.len() != keys.len()) {
            let message = format!("{} keys, {} pages, {} statuses", keys.len(), pages.len(), status.len());
            return Err(self.error(CallFailure::new(ErrorKind::Internal, false, message), false));
        }
        status.fill(PageStatus::Failed);
        if keys.is_empty() {
            return Ok(());
        }
        self.data_call(operation, options, keys, pages, chain, |buffers| {
            for (to, from) in status.iter_mut().zip(&buffers.statuses) {
                *to = match PageStatus::from_raw(*from) {
                    // Left unanswered counts as failed.
                    PageStatus::Unset => PageStatus::Failed,
                    answered => answered,
                };
            }
        })
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

    /// Asks how the backend feels.
    ///
    /// # Errors
    /// When it can't say in time.
    pub fn health(&self, deadline: Instant) -> Result<(HealthState, String), BackendError> {
        self.control(deadline, |face, raw, context| health(face, raw, &context))
    }

    /// Ends the instance: takes no new calls, gives those that run until `drain` to return, cancels them, and closes it by `deadline`. Says
    /// whether it was closed; when a call never returned it stays as a zombie. A second call does nothing more.
    ///
    /// A failed instance keeps its state, so that the status still shows why it failed.
    pub fn shut(&self, drain: Instant, deadline: Instant, reason: &str) -> bool {
        let mut shut = self.shut.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(closed) = *shut {
            return closed;
        }
        self.state.go_if(BackendState::serves, BackendState::Draining, reason);
        if !self.workers.wait_idle(drain) {
            self.workers.cancel_all();
        }
        let closed = if self.workers.wait_idle(deadline) && self.controls.wait(deadline) {
            self.close(deadline, reason)
        } else {
            self.state.go(BackendState::Zombie, "a call has not returned; it can't be closed before the process ends");
            false
        };
        self.context.listen(None);
        *shut = Some(closed);
        closed
    }

    fn close(&self, deadline: Instant, reason: &str) -> bool {
        let closed = self.control(deadline, |face, raw, context| {
            invoke(&mut Vec::new(), |error| {
                // SAFETY: every other call has returned and none is made again: the state refuses them, and `shut` runs once.
                unsafe { face.close(raw, &raw const context, error) }
            })
        });
        let (state, reason) = match closed {
            Err(error) if error.kind == ErrorKind::TimedOut => {
                (BackendState::Zombie, "close has not returned".to_owned())
            }
            Err(error) => (BackendState::Detached, format!("close failed: {}", error.message)),
            Ok(()) => (BackendState::Detached, reason.to_owned()),
        };
        self.state.go_if(|before| state == BackendState::Zombie || before != BackendState::Failed, state, &reason);
        state != BackendState::Zombie
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
        self.generation
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
        chain: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError> {
        if keys.is_empty() {
            return Ok(Restorable::none(0));
        }
        self.data_call(Operation::Exists, options, keys, &[], chain, |buffers| {
            let present = buffers.statuses.iter().map(|raw| PageStatus::from_raw(*raw) == PageStatus::Ok).collect();
            Restorable::from_mask(buffers.restorable.iter().map(|byte| *byte == 1).collect()).with_present(present)
        })
    }

    fn batch_get(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.page_call(Operation::Get, options, keys, pages, chain, status)
    }

    fn batch_set(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.page_call(Operation::Set, options, keys, pages, chain, status)
    }

    fn batch_remove(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.page_call(Operation::Remove, options, keys, &[], &ChainInfo::default(), status)
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

    fn reclaim(&self) -> Vec<u32> {
        self.workers.reclaim()
    }

    fn quarantined(&self) -> usize {
        self.workers.quarantined()
    }
}

/// Number for the next instance.
pub(super) fn next_generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
