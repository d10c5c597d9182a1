//! What wakes the scheduler.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::handle::Command;
use crate::cache::Waker;

/// The scheduler's mailbox before the scheduler exists: the cache is made first and needs its
/// [`waker`](Self::waker).
pub struct Mailbox {
    pub(crate) sender: Sender<Command>,
    pub(crate) receiver: Receiver<Command>,
    pub(crate) pending: Arc<AtomicBool>,
}

impl Mailbox {
    /// An empty mailbox.
    pub fn new() -> Self {
        let (sender, receiver) = unbounded();
        Self { sender, receiver, pending: Arc::new(AtomicBool::new(false)) }
    }

    /// Wakes the scheduler; calls that come before it looked again are one.
    pub fn waker(&self) -> Waker {
        let sender = self.sender.clone();
        let pending = Arc::clone(&self.pending);
        Arc::new(move || {
            if !pending.swap(true, Ordering::AcqRel) {
                // A scheduler that has ended needs no waking.
                let _ = sender.send(Command::Wake);
            }
        })
    }
}

impl Default for Mailbox {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_wakes_are_one_until_the_scheduler_looks() {
        let mailbox = Mailbox::new();
        let waker = mailbox.waker();
        waker();
        waker();
        assert_eq!(mailbox.receiver.len(), 1);
        mailbox.pending.store(false, Ordering::Release);
        waker();
        assert_eq!(mailbox.receiver.len(), 2);
    }
}
