//! How long an operation may take.

use std::future::Future;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Call, Error, ErrorKind};

/// How often a wait looks at the cancel flag of its call.
const LOOK: Duration = Duration::from_millis(20);

/// The most by which it ends before the deadline of its call.
const EARLY: Duration = Duration::from_millis(250);

/// Why an operation stops before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Its time is over.
    TimedOut,
    /// The host has cancelled the call.
    Cancelled,
}

impl From<Stop> for Error {
    fn from(stop: Stop) -> Error {
        match stop {
            Stop::TimedOut => Error::new(ErrorKind::TimedOut, "the time of the call is over").retryable(),
            Stop::Cancelled => Error::new(ErrorKind::Cancelled, "the host cancelled the call"),
        }
    }
}

impl Stop {
    /// As RDMA has it.
    pub fn for_rdma(self) -> kvdock_rdma::Stop {
        match self {
            Stop::TimedOut => kvdock_rdma::Stop::TimedOut,
            Stop::Cancelled => kvdock_rdma::Stop::Cancelled,
        }
    }
}

/// The end of an operation's time, and the call whose cancel flag ends it earlier.
#[derive(Debug, Clone, Copy)]
pub struct Limit<'a> {
    until: Instant,
    call: Option<&'a Call<'a>>,
}

/// How long to wait within a call that has so much time left. A call that returns at its deadline is late to the host, and one that has only late calls has
/// failed, so an answer that does not come is given up a little before.
pub fn in_time(left: Duration) -> Duration {
    left - (left / 8).min(EARLY)
}

impl<'a> Limit<'a> {
    /// Time from now.
    pub fn within(time: Duration) -> Limit<'static> {
        Limit { until: Instant::now() + time, call: None }
    }

    /// The time that a call has but for a little, as [`in_time`] says, at most `most`.
    pub fn of(call: &'a Call<'a>, most: Duration) -> Limit<'a> {
        let time = call.remaining().map_or(most, |left| in_time(left).min(most));
        Limit { until: Instant::now() + time, call: Some(call) }
    }

    /// The same, but ending in `time` at the latest.
    pub fn at_most(self, time: Duration) -> Limit<'a> {
        Limit { until: self.until.min(Instant::now() + time), ..self }
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
        if self.call.is_some_and(Call::is_cancelled) {
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
        Ok(if self.call.is_some() { left.min(LOOK) } else { left })
    }

    /// What a future gives, if it comes in time. Otherwise the future is dropped.
    ///
    /// # Errors
    /// When it does not.
    pub async fn race<T>(&self, future: impl Future<Output = T>) -> Result<T, Stop> {
        let mut future = std::pin::pin!(future);
        loop {
            let slice = self.slice()?;
            if let Ok(done) = tokio::time::timeout(slice, &mut future).await {
                return Ok(done);
            }
        }
    }
}
