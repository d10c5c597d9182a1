//! Batches on io_uring: one thread, many operations in flight.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, cqueue, opcode, squeue};
use parking_lot::Mutex;

use super::{Batch, FILE_MODE, IOV_BATCH, Op, READ_FLAGS, WRITE_FLAGS, discard, execute, skip, through_cache};
use crate::faults;
use rustix::fs::OFlags;

/// Rings, made when they are first needed and kept for the next call.
#[derive(Debug)]
pub struct Uring {
    depth: usize,
    idle: Mutex<Vec<Ring>>,
}

struct Ring(IoUring);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ring")
    }
}

/// What an operation in flight waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Open,
    Move,
    Rename,
    Sync,
}

/// An operation in flight.
struct Flight<'a> {
    index: usize,
    op: Op<'a>,
    step: Step,
    file: Option<OwnedFd>,
    moved: usize,
    rest: Vec<libc::iovec>,
}

impl Uring {
    /// Rings with `depth` operations in flight.
    ///
    /// # Errors
    /// When the kernel has no io_uring for this process, or lacks an operation.
    pub fn new(depth: usize) -> io::Result<Uring> {
        let ring = Uring::ring(depth)?;
        let mut probe = io_uring::Probe::new();
        ring.0.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::OpenAt::CODE,
            opcode::Readv::CODE,
            opcode::Writev::CODE,
            opcode::RenameAt::CODE,
            opcode::Fsync::CODE,
        ];
        if !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring lacks an operation"));
        }
        Ok(Uring { depth, idle: Mutex::new(vec![ring]) })
    }

    fn ring(depth: usize) -> io::Result<Ring> {
        let ring = IoUring::builder().build(depth.next_power_of_two() as u32)?;
        // Buffered writes and syncs run on the kernel's workers; its default is few. An older kernel keeps the default.
        let _ = ring.submitter().register_iowq_max_workers(&mut [depth as u32, depth as u32]);
        Ok(Ring(ring))
    }

    /// Runs a batch to its end.
    pub fn run<'a>(&self, folder: BorrowedFd<'_>, batch: &dyn Batch<'a>) {
        let idle = self.idle.lock().pop();
        let ring = idle.map_or_else(|| Uring::ring(self.depth), Ok);
        let mut ring = match ring {
            Ok(ring) => ring,
            Err(_) => {
                // No ring for one more call at a time: this thread does the work.
                for index in 0..batch.len() {
                    if let Some(op) = batch.start(index) {
                        batch.done(index, execute(folder, &op));
                    }
                }
                return;
            }
        };
        drive(&mut ring.0, self.depth, folder, batch);
        self.idle.lock().push(ring);
    }
}

fn drive<'a>(ring: &mut IoUring, depth: usize, folder: BorrowedFd<'_>, batch: &dyn Batch<'a>) {
    let mut flights: Vec<Option<Flight<'a>>> = (0..depth).map(|_| None).collect();
    let mut free: Vec<usize> = (0..depth).rev().collect();
    let (mut next, count) = (0, batch.len());
    // A panic of the batch may leave this function only when nothing is in flight any more.
    let mut panicked = None;
    loop {
        while next < count
            && panicked.is_none()
            && let Some(slot) = free.pop()
        {
            let index = next;
            next += 1;
            let submitted = match catch_unwind(AssertUnwindSafe(|| batch.start(index))) {
                Ok(Some(op)) => submit(ring, folder, &mut flights, slot, Flight::new(index, op)),
                Ok(None) => {
                    free.push(slot);
                    continue;
                }
                Err(payload) => {
                    panicked = Some(payload);
                    free.push(slot);
                    continue;
                }
            };
            if let Err(error) = submitted {
                if let Some(flight) = flights.get_mut(slot).and_then(Option::take) {
                    panicked = flight.end(folder, batch, Err(error)).err().or(panicked.take());
                }
                free.push(slot);
            }
        }
        if free.len() == depth {
            break;
        }
        // Nothing may return before the kernel is done with the memory, so an error here is tried again.
        if let Err(error) = ring.submit_and_wait(1)
            && error.kind() != io::ErrorKind::Interrupted
        {
            std::thread::yield_now();
        }
        while let Some(entry) = completed(ring) {
            let slot = entry.user_data() as usize;
            let Some(mut flight) = flights.get_mut(slot).and_then(Option::take) else { continue };
            let result = match flight.advance(entry.result()) {
                Ok(None) => match submit(ring, folder, &mut flights, slot, flight) {
                    Ok(()) => continue,
                    Err(error) => {
                        flight = match flights.get_mut(slot).and_then(Option::take) {
                            Some(flight) => flight,
                            None => continue,
                        };
                        Err(error)
                    }
                },
                Ok(Some(moved)) => Ok(moved),
                Err(error) => Err(error),
            };
            panicked = flight.end(folder, batch, result).err().or(panicked.take());
            free.push(slot);
        }
    }
    if let Some(payload) = panicked {
        resume_unwind(payload);
    }
}

fn completed(ring: &mut IoUring) -> Option<cqueue::Entry> {
    ring.completion().next()
}

/// Puts a flight into its slot and its next step into the ring. After an error nothing of it is in the ring.
fn submit<'a>(
    ring: &mut IoUring,
    folder: BorrowedFd<'_>,
    flights: &mut [Option<Flight<'a>>],
    slot: usize,
    flight: Flight<'a>,
) -> io::Result<()> {
    let Some(place) = flights.get_mut(slot) else {
        return Err(io::Error::other("an operation has no slot"));
    };
    // The entry points into the flight, so the flight has to lie where it stays before the entry is made.
    let entry = place.insert(flight).entry(folder)?.user_data(slot as u64);
    for _ in 0..2 {
        // SAFETY: what the entry points at (path and list in the flight, memory of the batch) lives until its completion was seen:
        // the flight stays in its slot, whose vector does not grow, and `drive` waits for all flights.
        if unsafe { ring.submission().push(&entry) }.is_ok() {
            return Ok(());
        }
        ring.submit()?;
    }
    Err(io::Error::other("the ring has no room for an operation"))
}

impl<'a> Flight<'a> {
    fn new(index: usize, op: Op<'a>) -> Flight<'a> {
        let step = match op {
            Op::ReadAt { .. } | Op::WriteAt { .. } => Step::Move,
            Op::ReadFile { .. } | Op::WriteFile { .. } | Op::Sync { .. } => Step::Open,
        };
        Flight { index, op, step, file: None, moved: 0, rest: Vec::new() }
    }

    fn descriptor(&self) -> Fd {
        let own = self.file.as_ref().map(AsRawFd::as_raw_fd);
        Fd(match self.op {
            Op::ReadAt { file, .. } | Op::WriteAt { file, .. } => file.as_raw_fd(),
            _ => own.unwrap_or(-1),
        })
    }

    fn entry(&mut self, folder: BorrowedFd<'_>) -> io::Result<squeue::Entry> {
        let at = Fd(folder.as_raw_fd());
        Ok(match (&self.op, self.step) {
            (Op::ReadFile { path, .. }, Step::Open) => {
                opcode::OpenAt::new(at, path.as_cstr().as_ptr()).flags(READ_FLAGS.bits() as c_int).build()
            }
            (Op::WriteFile { temp, direct, .. }, Step::Open) => {
                faults::check()?;
                let flags = if *direct { WRITE_FLAGS | OFlags::DIRECT } else { WRITE_FLAGS };
                opcode::OpenAt::new(at, temp.as_cstr().as_ptr())
                    .flags(flags.bits() as c_int)
                    .mode(FILE_MODE.as_raw_mode())
                    .build()
            }
            (Op::Sync { path }, Step::Open) => {
                opcode::OpenAt::new(at, path.as_cstr().as_ptr()).flags(READ_FLAGS.bits() as c_int).build()
            }
            (Op::ReadFile { pieces, offset, .. } | Op::ReadAt { pieces, offset, .. }, Step::Move) => {
                self.moving(*pieces, *offset, false)
            }
            (Op::WriteFile { pieces, .. }, Step::Move) => self.moving(*pieces, 0, true),
            (Op::WriteAt { pieces, offset, .. }, Step::Move) => {
                faults::check()?;
                self.moving(*pieces, *offset, true)
            }
            (Op::WriteFile { temp, path, .. }, Step::Rename) => {
                opcode::RenameAt::new(at, temp.as_cstr().as_ptr(), at, path.as_cstr().as_ptr()).build()
            }
            (Op::WriteFile { .. }, Step::Sync) => {
                opcode::Fsync::new(self.descriptor()).flags(FsyncFlags::DATASYNC).build()
            }
            (Op::Sync { .. }, Step::Sync) => opcode::Fsync::new(self.descriptor()).build(),
            _ => return Err(io::Error::other("an operation has no such step")),
        })
    }

    fn moving(&mut self, pieces: super::Pieces, offset: u64, write: bool) -> squeue::Entry {
        self.rest
            .resize(pieces.list().len().min(IOV_BATCH), libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 });
        let count = skip(pieces.list(), self.moved, &mut self.rest) as u32;
        let (file, at) = (self.descriptor(), offset + self.moved as u64);
        if write {
            opcode::Writev::new(file, self.rest.as_ptr(), count).offset(at).build()
        } else {
            opcode::Readv::new(file, self.rest.as_ptr(), count).offset(at).build()
        }
    }

    /// Takes the result of a step: none when there is a next one, the bytes moved when there is not.
    fn advance(&mut self, result: i32) -> io::Result<Option<usize>> {
        if result < 0 {
            let error = io::Error::from_raw_os_error(-result);
            let again = matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN));
            return if again { Ok(None) } else { Err(error) };
        }
        match self.step {
            Step::Open => {
                // SAFETY: the kernel has just given this descriptor to us.
                self.file = Some(unsafe { OwnedFd::from_raw_fd(result) });
                self.step = if matches!(self.op, Op::Sync { .. }) { Step::Sync } else { Step::Move };
                Ok(None)
            }
            Step::Move => {
                self.moved += result as usize;
                match self.op {
                    Op::ReadFile { pieces, .. } | Op::ReadAt { pieces, .. } => {
                        Ok((result == 0 || self.moved >= pieces.len()).then_some(self.moved))
                    }
                    Op::WriteFile { pieces, .. } | Op::WriteAt { pieces, .. } if self.moved < pieces.len() => {
                        match result {
                            0 => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
                            _ => Ok(None),
                        }
                    }
                    Op::WriteFile { .. } => {
                        self.step = Step::Rename;
                        Ok(None)
                    }
                    Op::WriteAt { .. } | Op::Sync { .. } => Ok(Some(self.moved)),
                }
            }
            Step::Rename => {
                self.step = Step::Sync;
                Ok((!matches!(self.op, Op::WriteFile { sync: true, .. })).then_some(self.moved))
            }
            Step::Sync => Ok(Some(self.moved)),
        }
    }

    fn end(
        self,
        folder: BorrowedFd<'_>,
        batch: &dyn Batch<'a>,
        mut result: io::Result<usize>,
    ) -> std::thread::Result<()> {
        drop(self.file);
        if let (Err(error), Op::WriteFile { temp, path, sync, direct, .. }) = (&result, &self.op) {
            discard(folder, temp, path, *sync, error);
            if *direct && error.raw_os_error() == Some(libc::EINVAL) {
                result = execute(folder, &through_cache(&self.op));
            }
        }
        catch_unwind(AssertUnwindSafe(|| batch.done(self.index, result)))
    }
}
