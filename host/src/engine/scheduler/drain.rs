//! Stopping without losing what runs.

use std::time::{Duration, Instant};

use tokio::sync::oneshot::Sender;

use super::Scheduler;
use crate::engine::handle::DrainReport;
use crate::engine::request::{AbortKind, FinishReason};

/// Most of the time to drain that is kept for backups: a quarter of it, and at most this.
const BACKUP_TIME: Duration = Duration::from_secs(5);

/// Backups that did not end in time get this much longer when requests used it all up.
const LEAST_BACKUP_TIME: Duration = Duration::from_millis(100);

/// A drain under way.
pub(super) struct Drain {
    /// When requests that still run are aborted.
    requests_until: Instant,
    deadline: Instant,
    finished: usize,
    aborted: usize,
    replies: Vec<Sender<DrainReport>>,
}

impl Drain {
    pub fn count(&mut self, reason: &FinishReason) {
        match reason {
            FinishReason::Abort { .. } => self.aborted += 1,
            _ => self.finished += 1,
        }
    }
}

impl Scheduler {
    /// Begins to drain, or brings the deadline of a drain forward.
    pub(super) fn begin_drain(&mut self, deadline: Instant, reply: Sender<DrainReport>) {
        let left = deadline.saturating_duration_since(Instant::now());
        let requests_until = deadline.checked_sub(BACKUP_TIME.min(left / 4)).unwrap_or(deadline);
        let drain = self.drain.get_or_insert_with(|| Drain {
            requests_until,
            deadline,
            finished: 0,
            aborted: 0,
            replies: Vec::new(),
        });
        drain.deadline = drain.deadline.min(deadline);
        drain.requests_until = drain.requests_until.min(requests_until);
        drain.replies.push(reply);
    }

    /// Aborts what still runs when its time is over.
    pub(super) fn enforce_drain(&mut self) {
        if self.drain.as_ref().is_some_and(|drain| Instant::now() >= drain.requests_until) {
            let message = "the server is shutting down";
            self.abort_where(|_| true, AbortKind::ShuttingDown, message);
        }
    }

    /// When [`enforce_drain`](Self::enforce_drain) must be called.
    pub(super) fn drain_deadline(&self) -> Option<Instant> {
        self.drain.as_ref().map(|drain| drain.requests_until)
    }

    /// Whether a drain is under way and no request is left.
    pub(super) fn drained(&self) -> bool {
        self.drain.is_some() && self.open.is_empty()
    }

    /// Writes what is left to be backed up and answers whoever drains.
    pub(super) fn finish_drain(&mut self) {
        let Some(drain) = self.drain.take() else { return };
        let until = drain.deadline.max(Instant::now() + LEAST_BACKUP_TIME);
        let backups = self.parts.cache.drain_backups(until);
        if backups.left > 0 {
            tracing::warn!(pages = backups.left, "backups not finished before the deadline");
        }
        let report =
            DrainReport { finished: drain.finished, aborted: drain.aborted, backups_flushed: backups.left == 0 };
        for reply in drain.replies {
            let _ = reply.send(report);
        }
    }
}
