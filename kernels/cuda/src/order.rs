//! The order of what is computed: one queue, on which one thread at a time queues.

use std::ops::Deref;
use std::sync::Arc;

use parking_lot::{ReentrantMutex, ReentrantMutexGuard};

use super::driver::Driver;
use super::memory::Queue;
use kvdock_kernels::KernelError;

/// The queue of a device's operations.
pub(super) struct Order {
    queue: Queue,
    /// Held while something is queued, and by one thread for as long as it records: what others queue must not get into the recording.
    turn: ReentrantMutex<()>,
}

/// The queue, for this thread.
pub(super) struct Turn<'a> {
    queue: &'a Queue,
    _turn: ReentrantMutexGuard<'a, ()>,
}

impl Deref for Turn<'_> {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        self.queue
    }
}

impl Order {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Result<Arc<Self>, KernelError> {
        Ok(Arc::new(Self { queue: Queue::new(driver, false)?, turn: ReentrantMutex::new(()) }))
    }

    /// Waits for this thread's turn.
    pub(super) fn enter(&self) -> Turn<'_> {
        let turn = self.turn.lock();
        Turn { queue: &self.queue, _turn: turn }
    }

    /// Blocks until what has been queued has run. Others may queue meanwhile.
    pub(super) fn synchronize(&self, op: &'static str) -> Result<(), KernelError> {
        self.queue.synchronize(op)
    }
}
