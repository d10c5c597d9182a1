//! How long an operation may take.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdock_plugin_api::Call;

/// How often a wait looks at the cancel flag of its call.
const LOOK: Duration = Duration::from_millis(20);

/// Why an operation stops before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Its time is over.
    TimedOut,
    /// The host has cancelled the call.
    Cancelled,
}

/// The end of an operation's time, and the call whose cancel flag ends it earlier.
#[derive(Debug, Clone, Copy)]
pub struct Limit<'a> {
    until: Instant,
    call: Option<&'a Call<'a>>,
    stop: Option<&'a AtomicBool>,
}

impl<'a> Limit<'a> {
    /// Time from now.
    pub fn within(time: Duration) -> Limit<'static> {
        Limit { until: Instant::now() + time, call: None, stop: None }
    }

    /// The time that a call has, at most `most`.
    pub fn of(call: &'a Call<'a>, most: Duration) -> Limit<'a> {
        let time = call.remaining().map_or(most, |left| left.min(most));
        Limit { until: Instant::now() + time, call: Some(call), stop: None }
    }

    /// The same, but ending also when `stop` becomes true, as a cancelled call does.
    pub fn stopped_by(self, stop: &'a AtomicBool) -> Limit<'a> {
        Limit { stop: Some(stop), ..self }
    }

    /// The same, but ending in `time` at the latest.
    pub fn at_most(self, time: Duration) -> Limit<'a> {
        Limit { until: self.until.min(Instant::now() + time), ..self }
    }

    /// The same, but not ending earlier than its time: for what would leave a trace if it was broken off.
    pub fn patient(self) -> Limit<'static> {
        Limit { until: self.until, call: None, stop: None }
    }

    /// When the time is over.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// The time that is left.
    ///
    /// # Errors
    /// When there is none, or the call was cancelled.
    pub fn left(&self) -> Result<Duration, Stop> {
        if self.call.is_some_and(Call::is_cancelled) || self.stop.is_some_and(|stop| stop.load(Ordering::Acquire)) {
            return Err(Stop::Cancelled);
        }
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(Stop::TimedOut),
            left => Ok(left),
        }
    }

    /// How long to wait before looking at the limit again.
    ///
    /// # Errors
    /// As [`Limit::left`].
    pub fn slice(&self) -> Result<Duration, Stop> {
        let left = self.left()?;
        Ok(if self.call.is_some() || self.stop.is_some() { left.min(LOOK) } else { left })
    }
}
