//! Steps that are gone through before they are queued.
//!
//! Operations of a step are called twice: dry at first, when nothing is queued, and it is only seen what would be. What is seen decides: a step of the
//! very same launches that has been recorded is queued as one, with the numbers of this step in the place of those of the recording. For that
//! a step has memory of its own, an arena, which gives the same addresses to the same requests, and a block for all numbers that come from the host.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;

use super::driver::{Arg, DevicePtr, Driver, Touch, Touches};
use super::memory::DeviceMemory;
use super::module::Extent;
use super::units::Unit;
use kvdock_kernels::KernelError;

/// Bytes for numbers from the host to begin with.
const LEAST_NUMBERS: usize = 64 << 10;
/// The least room that an array of numbers takes: an array that grows a little stays in its place, and so do those after it.
const LEAST_ARRAY: usize = 256;

/// The memory of steps.
pub(super) struct Arena {
    driver: Arc<dyn Driver>,
    blocks: Vec<Piece>,
    numbers: DeviceMemory,
    /// What the numbers are to be, from the first byte to the end of the last array.
    sent: Vec<u8>,
    /// Bytes that arrays asked for.
    wanted: usize,
}

struct Piece {
    memory: Arc<DeviceMemory>,
    lent: bool,
}

impl Arena {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Result<Self, KernelError> {
        Self::with_numbers(driver, LEAST_NUMBERS)
    }

    fn with_numbers(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Self, KernelError> {
        let numbers = DeviceMemory::new(driver, bytes, "the numbers of a step")?;
        Ok(Self { driver: Arc::clone(driver), blocks: Vec::new(), numbers, sent: Vec::new(), wanted: 0 })
    }

    /// Where the numbers belong, and what they are.
    pub(super) fn numbers(&self) -> (DevicePtr, &[u8]) {
        (self.numbers.at(), &self.sent)
    }

    /// One with more room, if the last step asked for more numbers than there is room for. What was recorded with this one is of no use then.
    pub(super) fn grown(&self) -> Option<Result<Self, KernelError>> {
        let bytes = self.wanted.next_power_of_two();
        (self.wanted > self.numbers.bytes()).then(|| Self::with_numbers(&self.driver, bytes))
    }

    fn begin(&mut self) {
        self.sent.clear();
        self.wanted = 0;
    }

    /// The first block of this size that is not lent; so the same requests get the same blocks.
    fn take(&mut self, bytes: usize, what: &'static str) -> Result<(usize, Arc<DeviceMemory>), KernelError> {
        let free = |piece: &Piece| !piece.lent && piece.memory.bytes() == bytes;
        let index = match self.blocks.iter().position(free) {
            Some(index) => index,
            None => {
                let memory = Arc::new(DeviceMemory::new(&self.driver, bytes, what)?);
                self.blocks.push(Piece { memory, lent: false });
                self.blocks.len() - 1
            }
        };
        self.blocks[index].lent = true;
        Ok((index, Arc::clone(&self.blocks[index].memory)))
    }

    /// Where an array of numbers belongs; nowhere if there is no room left.
    fn array(&mut self, bytes: usize) -> Option<DevicePtr> {
        let from = self.wanted;
        self.wanted += bytes.next_power_of_two().max(LEAST_ARRAY);
        if self.wanted > self.numbers.bytes() {
            return None;
        }
        self.sent.resize(self.wanted, 0);
        Some(self.numbers.at() + from as u64)
    }

    fn send(&mut self, bytes: &[u8], to: DevicePtr) -> bool {
        let from = to.checked_sub(self.numbers.at()).and_then(|from| usize::try_from(from).ok());
        let place = from.and_then(|from| self.sent.get_mut(from..from.checked_add(bytes.len())?));
        place.map(|place| place.copy_from_slice(bytes)).is_some()
    }
}

/// What going through a step has shown.
pub(super) struct Seen {
    pub(super) arena: Arena,
    /// Equal for steps of the same launches with the same arguments.
    pub(super) signature: u64,
    /// Whether it can be queued as one at all.
    pub(super) sound: bool,
    pub(super) result: Result<(), KernelError>,
    /// What each launch touches, for who wants to know.
    pub(super) touches: Vec<Vec<Touch>>,
}

struct Active {
    thread: ThreadId,
    dry: bool,
    arena: Arena,
    signature: DefaultHasher,
    sound: bool,
    touches: Option<Vec<Vec<Touch>>>,
}

/// The step that is gone through, if one is.
#[derive(Default)]
pub(super) struct Script {
    active: Mutex<Option<Active>>,
    on: AtomicBool,
}

/// What becomes of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// It is queued, or recorded.
    Queue,
    /// It is only seen.
    Dry,
}

impl Script {
    /// Runs with the step that this thread goes through; none if it does not.
    fn here<R>(&self, run: impl FnOnce(&mut Active) -> R) -> Option<R> {
        if !self.on.load(Ordering::Acquire) {
            return None;
        }
        let mut active = self.active.lock();
        active.as_mut().filter(|active| active.thread == std::thread::current().id()).map(run)
    }

    /// Whether this thread goes through a step.
    pub(super) fn is_on(&self) -> bool {
        self.here(|_| ()).is_some()
    }

    /// Goes through a step, dry or while it is recorded.
    pub(super) fn go(
        &self,
        mut arena: Arena,
        dry: bool,
        work: &mut dyn FnMut() -> Result<(), KernelError>,
    ) -> Option<Seen> {
        arena.begin();
        let looks = arena.driver.wants_touches();
        let active = Active {
            thread: std::thread::current().id(),
            dry,
            arena,
            signature: DefaultHasher::new(),
            sound: true,
            touches: (dry && looks).then(Vec::new),
        };
        *self.active.lock() = Some(active);
        self.on.store(true, Ordering::Release);
        // Also if `work` panics.
        let _ends = Ends(self);
        let result = work();
        let Active { mut arena, signature, sound, touches, .. } = self.active.lock().take()?;
        // Memory that somebody has kept is not the arena's to give any more.
        let before = arena.blocks.len();
        arena.blocks.retain(|piece| !piece.lent);
        let sound = sound && arena.blocks.len() == before && arena.wanted <= arena.numbers.bytes();
        Some(Seen { arena, signature: signature.finish(), sound, result, touches: touches.unwrap_or_default() })
    }

    /// Memory for an operation of the step; none where none is gone through.
    pub(super) fn room(
        &self,
        bytes: usize,
        what: &'static str,
    ) -> Option<Result<(usize, Arc<DeviceMemory>), KernelError>> {
        self.here(|active| active.arena.take(bytes, what))
    }

    /// Memory of [`Script::room`] is not needed any more.
    pub(super) fn give_back(&self, index: usize, memory: &Arc<DeviceMemory>) {
        self.here(|active| {
            if let Some(piece) = active.arena.blocks.get_mut(index).filter(|piece| Arc::ptr_eq(&piece.memory, memory)) {
                piece.lent = false;
            }
        });
    }

    /// Where an array of numbers belongs; none where no step is gone through.
    pub(super) fn array(&self, bytes: usize, op: &'static str) -> Option<Result<DevicePtr, KernelError>> {
        self.here(|active| {
            let reason = "the numbers of a step have no room yet".to_owned();
            active.arena.array(bytes).ok_or(KernelError::Device { op, reason })
        })
    }

    /// Takes in what is sent to the device; false where it has to be queued.
    pub(super) fn sends(&self, bytes: &[u8], to: DevicePtr, op: &'static str) -> Result<bool, KernelError> {
        match self.here(|active| active.arena.send(bytes, to)) {
            None => Ok(false),
            Some(true) => Ok(true),
            Some(false) => {
                self.refuse(op)?;
                Ok(true)
            }
        }
    }

    /// Takes note of a launch.
    pub(super) fn launches(&self, unit: Unit, name: &str, extent: &Extent, args: &[Arg], touches: &Touches<'_>) -> Way {
        let way = self.here(|active| {
            let to = &mut active.signature;
            (unit, name, extent.grid, extent.threads, extent.shared, args.len()).hash(to);
            args.iter().for_each(|arg| arg.bytes().hash(to));
            if let Some(all) = &mut active.touches {
                let mut own = Vec::new();
                touches(&mut |touch| own.push(touch));
                own.extend(
                    args.iter().filter_map(|arg| if let Arg::Memory(touch) = arg { Some(*touch) } else { None }),
                );
                all.push(own);
            }
            if active.dry { Way::Dry } else { Way::Queue }
        });
        way.unwrap_or(Way::Queue)
    }

    /// What a step that is gone through can't do: then it is queued as it is.
    ///
    /// # Errors
    /// Where one is.
    pub(super) fn refuse(&self, op: &'static str) -> Result<(), KernelError> {
        match self.here(|active| active.sound = false) {
            None => Ok(()),
            Some(()) => {
                let reason = "a step that is gone through beforehand can't do this".to_owned();
                Err(KernelError::Device { op, reason })
            }
        }
    }
}

struct Ends<'a>(&'a Script);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.on.store(false, Ordering::Release);
        *self.0.active.lock() = None;
    }
}
