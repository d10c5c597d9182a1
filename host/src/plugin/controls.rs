//! Calls into one instance that move no pages, each on a thread of its own.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use kvdock_plugin_api::ErrorKind;

use super::call::CallFailure;

/// Counts the control calls of one instance.
#[derive(Debug, Default)]
pub struct Controls {
    state: Mutex<ControlState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct ControlState {
    running: usize,
    /// No call but `close` is made any more.
    sealed: bool,
}

/// Counts a control call as ended, however it ends.
struct Ends(Arc<Controls>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Controls {
    fn state(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `body` on a thread of its own and waits for it until `deadline`.
    pub(super) fn run<T: Send + 'static>(
        self: &Arc<Self>,
        deadline: Instant,
        body: impl FnOnce() -> Result<T, CallFailure> + Send + 'static,
    ) -> Result<T, CallFailure> {
        let mut state = self.state();
        if state.sealed {
            return Err(CallFailure::new(ErrorKind::Unavailable, true, "it is being closed"));
        }
        state.running += 1;
        drop(state);
        self.wait_for(deadline, body)
    }

    /// Makes the one call that a sealed instance still gets.
    pub(super) fn close<T: Send + 'static>(
        self: &Arc<Self>,
        deadline: Instant,
        body: impl FnOnce() -> Result<T, CallFailure> + Send + 'static,
    ) -> Result<T, CallFailure> {
        self.state().running += 1;
        self.wait_for(deadline, body)
    }

    /// Makes a call that was counted already.
    fn wait_for<T: Send + 'static>(
        self: &Arc<Self>,
        deadline: Instant,
        body: impl FnOnce() -> Result<T, CallFailure> + Send + 'static,
    ) -> Result<T, CallFailure> {
        let (sender, receiver) = channel();
        let ends = Ends(self.clone());
        let spawned = thread::Builder::new().name("kv-control".into()).spawn(move || {
            let result = body();
            // Before the answer, so that whoever has it sees the call ended.
            drop(ends);
            // The receiver is gone when the call was late.
            let _ = sender.send(result);
        });
        if let Err(error) = spawned {
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
        self.state().running -= 1;
        self.ended.notify_all();
    }

    /// Whether no call runs.
    pub fn is_idle(&self) -> bool {
        self.state().running == 0
    }

    /// Waits until no call runs and makes that final: from then on none but `close` is made. Says whether that came before `deadline`.
    pub(super) fn seal(&self, deadline: Instant) -> bool {
        let mut state = self.state();
        while state.running > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.sealed = true;
        true
    }
}
