//! Memory, streams and events that are given back when they are dropped, and the way of small data to the device.

use std::sync::Arc;

use parking_lot::Mutex;

use super::driver::{Access, Arg, DevicePtr, Driver, DriverError, Event, Stream, Touch};
use super::order::Order;
use super::script::Script;
use kvdock_kernels::{KernelError, Moment};

/// A failed call as an error of an operation.
pub(super) fn failed(op: &'static str) -> impl Fn(DriverError) -> KernelError {
    move |error| KernelError::Device { op, reason: error.to_string() }
}

/// What can't be done about a failed call while something is dropped, but be told.
fn tell(what: &str, result: Result<(), DriverError>) {
    if let Err(error) = result {
        tracing::warn!(%error, "{what} could not be given back to the CUDA driver");
    }
}

/// Device memory.
pub(super) struct DeviceMemory {
    driver: Arc<dyn Driver>,
    at: DevicePtr,
    bytes: usize,
}

impl DeviceMemory {
    /// `bytes` bytes with any content.
    pub(super) fn new(driver: &Arc<dyn Driver>, bytes: usize, what: &'static str) -> Result<Self, KernelError> {
        let at = driver.alloc(bytes).map_err(|error| KernelError::Memory {
            what,
            bytes,
            reason: match (error.is_out_of_memory(), driver.memory()) {
                (true, Ok((free, _))) => format!("{error}; {free} bytes of the GPU's memory are free"),
                _ => error.to_string(),
            },
        })?;
        Ok(Self { driver: Arc::clone(driver), at, bytes })
    }

    pub(super) fn at(&self) -> DevicePtr {
        self.at
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// An argument by which a kernel reads all of it.
    pub(super) fn read(&self) -> Arg {
        Arg::read(self.at, self.bytes)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: the memory is this one's own, and whoever queued work on it has kept it until it is not queued any more; the
        // driver waits for what runs.
        tell("device memory", unsafe { self.driver.free(self.at) });
    }
}

/// Host memory that the device reads and writes by itself. Its owner keeps track of what the device still does with it.
pub(super) struct PinnedMemory {
    driver: Arc<dyn Driver>,
    at: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory; the methods that touch it ask for what keeps them from racing.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    pub(super) fn new(driver: &Arc<dyn Driver>, bytes: usize, what: &'static str) -> Result<Self, KernelError> {
        let at =
            driver.alloc_host(bytes).map_err(|error| KernelError::Memory { what, bytes, reason: error.to_string() })?;
        Ok(Self { driver: Arc::clone(driver), at, bytes })
    }

    pub(super) fn at(&self) -> *mut u8 {
        self.at
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its first bytes, to be written.
    ///
    /// # Safety
    /// `len` is at most its length, and the device does not use them while the slice lives.
    pub(super) unsafe fn write(&mut self, len: usize) -> &mut [u8] {
        debug_assert!(len <= self.bytes);
        self.driver.host_access(Touch { at: self.at as u64, len, access: Access::Write });
        // SAFETY: as promised by the caller; any byte is a value.
        unsafe { std::slice::from_raw_parts_mut(self.at, len) }
    }

    /// Its first bytes, which have been written.
    ///
    /// # Safety
    /// `len` is at most its length; the device has written them and does not write them while the slice lives.
    pub(super) unsafe fn read(&self, len: usize) -> &[u8] {
        debug_assert!(len <= self.bytes);
        self.driver.host_access(Touch { at: self.at as u64, len, access: Access::Read });
        // SAFETY: as promised by the caller.
        unsafe { std::slice::from_raw_parts(self.at, len) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: its own memory; its owner has waited for what the device did with it.
        tell("pinned memory", unsafe { self.driver.free_host(self.at) });
    }
}

/// A stream.
pub(super) struct Queue {
    driver: Arc<dyn Driver>,
    stream: Stream,
}

impl Queue {
    pub(super) fn new(driver: &Arc<dyn Driver>, urgent: bool) -> Result<Self, KernelError> {
        let stream = driver.stream(urgent).map_err(failed("a stream"))?;
        Ok(Self { driver: Arc::clone(driver), stream })
    }

    pub(super) fn id(&self) -> Stream {
        self.stream
    }

    /// Blocks until everything that is queued has run.
    pub(super) fn synchronize(&self, op: &'static str) -> Result<(), KernelError> {
        self.driver.synchronize(self.stream).map_err(failed(op))
    }

    /// Lets what is queued later run after what `mark` marks.
    pub(super) fn wait(&self, mark: &Mark, op: &'static str) -> Result<(), KernelError> {
        self.driver.wait(self.stream, mark.event).map_err(failed(op))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: its own stream; nobody queues on it any more.
        tell("a stream", unsafe { self.driver.destroy_stream(self.stream) });
    }
}

/// An event.
pub(super) struct Mark {
    driver: Arc<dyn Driver>,
    event: Event,
}

impl Mark {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Result<Self, KernelError> {
        let event = driver.event(false).map_err(failed("an event"))?;
        Ok(Self { driver: Arc::clone(driver), event })
    }

    /// The point behind all that was queued to be computed.
    pub(super) fn moment(driver: &Arc<dyn Driver>, compute: &Order) -> Result<Moment, KernelError> {
        let mark = Self::new(driver)?;
        mark.record(&compute.enter(), "moment")?;
        Ok(Moment::from_parts(Box::new(mark)))
    }

    /// Marks what has been queued on `queue` so far.
    pub(super) fn record(&self, queue: &Queue, op: &'static str) -> Result<(), KernelError> {
        self.driver.record(self.event, queue.stream).map_err(failed(op))
    }

    pub(super) fn is_done(&self, op: &'static str) -> Result<bool, KernelError> {
        self.driver.is_done(self.event).map_err(failed(op))
    }

    /// Blocks until what it marks has run.
    pub(super) fn wait_here(&self, op: &'static str) -> Result<(), KernelError> {
        self.driver.wait_here(self.event).map_err(failed(op))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: its own event; a queue that has been told to wait for it still does.
        tell("an event", unsafe { self.driver.destroy_event(self.event) });
    }
}

/// Pinned memory that data passes through on its way to the device: pieces of it are on their way while others are filled.
pub(super) struct Uploads {
    driver: Arc<dyn Driver>,
    script: Arc<Script>,
    slots: Mutex<Slots>,
}

struct Slots {
    all: Vec<Slot>,
    next: usize,
}

struct Slot {
    memory: PinnedMemory,
    /// What was last copied out of the memory.
    done: Mark,
}

/// Slots at most; a further upload waits for the oldest.
const SLOTS: usize = 8;
/// Bytes that pass at a time at most.
pub(super) const PIECE: usize = 4 << 20;
/// Bytes of the smallest slot.
const SMALL: usize = 64 << 10;

impl Uploads {
    pub(super) fn new(driver: &Arc<dyn Driver>, script: &Arc<Script>) -> Self {
        Self {
            driver: Arc::clone(driver),
            script: Arc::clone(script),
            slots: Mutex::new(Slots { all: Vec::new(), next: 0 }),
        }
    }

    /// Queues on `queue` that `bytes` come to `to`. When it returns, `bytes` may be used for something else.
    ///
    /// # Safety
    /// The target is valid until the copy has run, and nothing uses it that is not ordered with `queue`.
    pub(super) unsafe fn send(
        &self,
        bytes: &[u8],
        to: DevicePtr,
        queue: &Queue,
        op: &'static str,
    ) -> Result<(), KernelError> {
        if self.script.sends(bytes, to, op)? {
            return Ok(());
        }
        let mut at = to;
        for piece in bytes.chunks(PIECE) {
            // SAFETY: a part of what the caller promises.
            unsafe { self.fill_and_send(piece.len(), at, queue, op, |slot| slot.copy_from_slice(piece))? };
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// As [`Uploads::send`], for up to [`PIECE`] bytes that `fill` writes.
    ///
    /// # Safety
    /// As [`Uploads::send`].
    pub(super) unsafe fn fill_and_send(
        &self,
        len: usize,
        to: DevicePtr,
        queue: &Queue,
        op: &'static str,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), KernelError> {
        if len == 0 {
            return Ok(());
        }
        let mut slots = self.slots.lock();
        let slot = slots.take(&self.driver, len, op)?;
        // SAFETY: what was last copied out of the slot has run, and the lock keeps others away.
        fill(unsafe { slot.memory.write(len) });
        // SAFETY: the slot is not written before the event that is recorded next has been waited for; the target is the caller's
        // promise.
        unsafe { self.driver.to_device(to, slot.memory.at(), len, queue.stream) }.map_err(failed(op))?;
        slot.done.record(queue, op)
    }
}

impl Slots {
    /// A slot of at least `len` bytes that nothing is copied out of.
    fn take(&mut self, driver: &Arc<dyn Driver>, len: usize, op: &'static str) -> Result<&mut Slot, KernelError> {
        let count = self.all.len();
        for step in 0..count {
            let index = (self.next + step) % count;
            if self.all[index].memory.bytes() >= len && self.all[index].done.is_done(op)? {
                self.next = (index + 1) % count;
                return Ok(&mut self.all[index]);
            }
        }
        if count < SLOTS {
            let memory = PinnedMemory::new(driver, len.next_power_of_two().max(SMALL), "an upload")?;
            self.all.push(Slot { memory, done: Mark::new(driver)? });
            return Ok(&mut self.all[count]);
        }
        let index = self.next % count;
        self.next = (index + 1) % count;
        let slot = &mut self.all[index];
        slot.done.wait_here(op)?;
        if slot.memory.bytes() < len {
            slot.memory = PinnedMemory::new(driver, len.next_power_of_two(), "an upload")?;
        }
        Ok(slot)
    }
}

impl Drop for Uploads {
    fn drop(&mut self) {
        for slot in &self.slots.get_mut().all {
            // An error here is one of work that somebody else is told of.
            let _ = slot.done.wait_here("the end of an upload");
        }
    }
}

/// Device memory for what lives for a step: blocks are kept and given out again. All of their uses are ordered by one queue, so a
/// block may be given out while work on it is still queued.
pub(super) struct Blocks {
    driver: Arc<dyn Driver>,
    script: Arc<Script>,
    free: Mutex<Vec<DeviceMemory>>,
}

/// Free blocks that are kept.
const KEPT_BLOCKS: usize = 256;

impl Blocks {
    pub(super) fn new(driver: &Arc<dyn Driver>, script: &Arc<Script>) -> Arc<Self> {
        Arc::new(Self { driver: Arc::clone(driver), script: Arc::clone(script), free: Mutex::new(Vec::new()) })
    }

    /// A block of at least `bytes` bytes.
    pub(super) fn take(self: &Arc<Self>, bytes: usize, what: &'static str) -> Result<Block, KernelError> {
        self.exactly(bytes.next_power_of_two().max(1024), what)
    }

    /// A block of at least `bytes` bytes for numbers from the host, which are sent before anything else is done with it.
    pub(super) fn numbers(self: &Arc<Self>, bytes: usize, what: &'static str) -> Result<Block, KernelError> {
        match self.script.array(bytes, what) {
            None => self.take(bytes, what),
            Some(at) => Ok(Block { at: at?, bytes, of: Of::Numbers }),
        }
    }

    /// A block of at least `bytes` bytes, and not many more: for buffers, which may be large.
    pub(super) fn near(self: &Arc<Self>, bytes: usize, what: &'static str) -> Result<Block, KernelError> {
        let step = bytes.checked_next_power_of_two().map_or(1024, |power| (power / 8).max(1024));
        self.exactly(bytes.max(1).next_multiple_of(step), what)
    }

    fn exactly(self: &Arc<Self>, bytes: usize, what: &'static str) -> Result<Block, KernelError> {
        if let Some(lent) = self.script.room(bytes, what) {
            let (index, memory) = lent?;
            let (at, script) = (memory.at(), Arc::clone(&self.script));
            return Ok(Block { at, bytes, of: Of::Script(script, index, memory) });
        }
        let kept = {
            let mut free = self.free.lock();
            let index = free.iter().position(|memory| memory.bytes() == bytes);
            index.map(|index| free.swap_remove(index))
        };
        let memory = match kept {
            Some(memory) => memory,
            None => DeviceMemory::new(&self.driver, bytes, what)?,
        };
        Ok(Block { at: memory.at(), bytes, of: Of::Blocks(Arc::clone(self), Some(memory)) })
    }
}

/// A block on loan.
pub(super) struct Block {
    at: DevicePtr,
    bytes: usize,
    of: Of,
}

/// Whose memory a block is.
enum Of {
    Blocks(Arc<Blocks>, Option<DeviceMemory>),
    /// A step's that is gone through, by its number there.
    Script(Arc<Script>, usize, Arc<DeviceMemory>),
    /// Among the numbers of such a step.
    Numbers,
}

impl Block {
    pub(super) fn at(&self) -> DevicePtr {
        self.at
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        match &mut self.of {
            Of::Blocks(home, memory) => {
                let Some(memory) = memory.take() else { return };
                let mut free = home.free.lock();
                if free.len() < KEPT_BLOCKS {
                    free.push(memory);
                }
            }
            Of::Script(script, index, memory) => script.give_back(*index, memory),
            Of::Numbers => {}
        }
    }
}
