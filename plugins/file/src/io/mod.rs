//! Batches of file operations in parallel, on io_uring or on threads. Payload goes straight between the registered pools and the
//! kernel.

pub mod threads;
pub mod uring;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};

use crate::faults;
use crate::names::Name;

/// Pieces of memory for one operation.
#[derive(Debug, Clone, Copy)]
pub struct Pieces {
    first: *const libc::iovec,
    count: usize,
}

// SAFETY: pieces are addresses; who may touch what they name is said where they are made (`Pieces::new`).
unsafe impl Send for Pieces {}
// SAFETY: as for `Send`.
unsafe impl Sync for Pieces {}

impl Pieces {
    /// # Safety
    /// The list, and the memory that it names, live until the operation is done, and nobody else writes the memory until then (for a read
    /// operation: nobody else touches it).
    pub unsafe fn new(list: &[libc::iovec]) -> Pieces {
        Pieces { first: list.as_ptr(), count: list.len() }
    }

    fn list(&self) -> &[libc::iovec] {
        if self.count == 0 {
            return &[];
        }
        // SAFETY: the promise given to `new`.
        unsafe { std::slice::from_raw_parts(self.first, self.count) }
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> usize {
        self.list().iter().map(|piece| piece.iov_len).sum()
    }
}

/// An operation on one file. Paths are relative to the folder of the namespace.
#[derive(Debug, Clone, Copy)]
pub enum Op<'a> {
    /// Opens a file and reads it from a place on; the result is the bytes read, which may be fewer than the pieces take.
    ReadFile { path: Name, offset: u64, pieces: Pieces },
    /// Reads from an open file.
    ReadAt { file: BorrowedFd<'a>, offset: u64, pieces: Pieces },
    /// Writes a new file under a temporary name, gives it its name, and makes its content durable when `sync` says so. `direct`: past the page
    /// cache, where the file system can; the pieces then lie at blocks.
    WriteFile { temp: Name, path: Name, pieces: Pieces, sync: bool, direct: bool },
    /// Writes into an open file.
    WriteAt { file: BorrowedFd<'a>, offset: u64, pieces: Pieces },
    /// Makes the entries of a folder, or the content of a file, durable.
    Sync { path: Name },
}

/// A batch of operations and what is to be done before and after each. Methods may be called from any thread.
pub trait Batch<'a>: Sync {
    /// Number of operations.
    fn len(&self) -> usize;
    /// Makes ready operation `index`, and gives it; none to leave it out.
    fn start(&self, index: usize) -> Option<Op<'a>>;
    /// Operation `index` is done. Its memory is not touched any more.
    fn done(&self, index: usize, result: io::Result<usize>);
    /// Whether all operations read, and may be made ready a second time.
    fn only_reads(&self) -> bool {
        false
    }
}

/// Reads of a batch up to which the thread that calls tries first what the page cache has: waking others takes longer than to copy so little.
const INLINE_READS: usize = 4;

/// What runs batches.
#[derive(Debug)]
pub enum Engine {
    /// A pool of threads with positional vectored I/O.
    Threads(threads::Threads),
    /// io_uring, one ring a call.
    Uring(uring::Uring),
}

impl Engine {
    /// Runs a batch to its end. Relative paths start at `folder`.
    pub fn run<'a>(&self, folder: BorrowedFd<'_>, batch: &dyn Batch<'a>) {
        match self {
            Engine::Threads(threads) => {
                let few = batch.only_reads() && batch.len() <= INLINE_READS;
                let first = if few { read_cached(folder, batch) } else { 0 };
                threads.run(batch.len() - first, &|index| {
                    if let Some(op) = batch.start(first + index) {
                        batch.done(first + index, execute(folder, &op));
                    }
                });
            }
            Engine::Uring(uring) => uring.run(folder, batch),
        }
    }

    /// Name for logs.
    pub fn name(&self) -> &'static str {
        match self {
            Engine::Threads(_) => "threads",
            Engine::Uring(_) => "io_uring",
        }
    }
}

/// How page files are opened to be read.
const READ_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);
/// How page files are made.
const WRITE_FLAGS: OFlags =
    OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);
/// Permissions of new files; the process's umask narrows them.
pub const FILE_MODE: Mode = Mode::from_raw_mode(0o644);

/// Reads what the page cache has, operation by operation, up to the first one that would wait for the disk. Gives how many are done.
fn read_cached<'a>(folder: BorrowedFd<'_>, batch: &dyn Batch<'a>) -> usize {
    for index in 0..batch.len() {
        let result = match batch.start(index) {
            None => continue,
            Some(Op::ReadFile { path, offset, pieces }) => {
                rustix::fs::openat(folder, path.as_cstr(), READ_FLAGS, Mode::empty())
                    .map_err(io::Error::from)
                    .and_then(|file| read_now(file.as_fd(), offset, pieces))
            }
            Some(Op::ReadAt { file, offset, pieces }) => read_now(file, offset, pieces),
            Some(Op::WriteFile { .. } | Op::WriteAt { .. } | Op::Sync { .. }) => return index,
        };
        match result {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EOPNOTSUPP | libc::ENOSYS)) => {
                return index;
            }
            result => batch.done(index, result),
        }
    }
    batch.len()
}

/// Runs one operation on the calling thread.
pub fn execute(folder: BorrowedFd<'_>, op: &Op<'_>) -> io::Result<usize> {
    match op {
        Op::ReadFile { path, offset, pieces } => {
            let file = rustix::fs::openat(folder, path.as_cstr(), READ_FLAGS, Mode::empty())?;
            read_at(file.as_fd(), *offset, *pieces)
        }
        Op::ReadAt { file, offset, pieces } => read_at(*file, *offset, *pieces),
        Op::WriteFile { temp, path, pieces, sync, direct } => {
            faults::check()?;
            let flags = if *direct { WRITE_FLAGS | OFlags::DIRECT } else { WRITE_FLAGS };
            let written = rustix::fs::openat(folder, temp.as_cstr(), flags, FILE_MODE)
                .map_err(io::Error::from)
                .and_then(|file| write_file(folder, file, temp, path, *pieces, *sync))
                .inspect_err(|error| discard(folder, temp, path, *sync, error));
            match written {
                Err(error) if *direct && error.raw_os_error() == Some(libc::EINVAL) => {
                    execute(folder, &through_cache(op))
                }
                written => written,
            }
        }
        Op::WriteAt { file, offset, pieces } => {
            faults::check()?;
            write_at(*file, *offset, *pieces)
        }
        Op::Sync { path } => {
            let opened = rustix::fs::openat(folder, path.as_cstr(), READ_FLAGS, Mode::empty())?;
            rustix::fs::fsync(opened)?;
            Ok(0)
        }
    }
}

fn write_file(
    folder: BorrowedFd<'_>,
    file: OwnedFd,
    temp: &Name,
    path: &Name,
    pieces: Pieces,
    sync: bool,
) -> io::Result<usize> {
    let written = write_at(file.as_fd(), 0, pieces)?;
    rustix::fs::renameat(folder, temp.as_cstr(), folder, path.as_cstr())?;
    if sync {
        rustix::fs::fdatasync(&file)?;
    }
    Ok(written)
}

/// Takes back a file whose writing failed, unless it was not even made. What can't be removed is found by the clean-up, or by its checksum.
fn discard(folder: BorrowedFd<'_>, temp: &Name, path: &Name, sync: bool, error: &io::Error) {
    if error.raw_os_error() == Some(libc::ENOENT) {
        return;
    }
    let renamed = rustix::fs::unlinkat(folder, temp.as_cstr(), AtFlags::empty()).is_err();
    if renamed && sync && error.raw_os_error() != Some(libc::EINVAL) {
        let _ = rustix::fs::unlinkat(folder, path.as_cstr(), AtFlags::empty());
    }
}

/// The same operation for a file system that can't write past the page cache.
fn through_cache<'a>(op: &Op<'a>) -> Op<'a> {
    match *op {
        Op::WriteFile { temp, path, pieces, sync, .. } => Op::WriteFile { temp, path, pieces, sync, direct: false },
        other => other,
    }
}

/// Runs `call` over `pieces` until all is moved or it moves nothing.
fn whole(pieces: Pieces, offset: u64, call: impl Fn(&[libc::iovec], u64) -> io::Result<usize>) -> io::Result<usize> {
    let total = pieces.len();
    let mut moved = 0;
    while moved < total {
        let mut rest = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; IOV_BATCH];
        let count = skip(pieces.list(), moved, &mut rest);
        match call(rest.get(..count).unwrap_or_default(), offset + moved as u64) {
            Ok(0) => break,
            Ok(now) => moved += now,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(moved)
}

/// Pieces that go to the kernel in one call.
const IOV_BATCH: usize = 256;

/// What is left of `list` after its first `moved` bytes, as many pieces as fit into `rest`; gives their number.
fn skip(list: &[libc::iovec], mut moved: usize, rest: &mut [libc::iovec]) -> usize {
    let mut count = 0;
    for piece in list {
        if moved >= piece.iov_len {
            moved -= piece.iov_len;
            continue;
        }
        let Some(slot) = rest.get_mut(count) else { break };
        *slot = libc::iovec {
            iov_base: piece.iov_base.cast::<u8>().wrapping_add(moved).cast(),
            iov_len: piece.iov_len - moved,
        };
        moved = 0;
        count += 1;
    }
    count
}

fn outcome(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn read_at(file: BorrowedFd<'_>, offset: u64, pieces: Pieces) -> io::Result<usize> {
    whole(pieces, offset, |list, at| {
        // SAFETY: the list is valid, and the promise given to `Pieces::new` lets the kernel write what it names.
        outcome(unsafe { libc::preadv(file.as_raw_fd(), list.as_ptr(), list.len() as libc::c_int, at as libc::off_t) })
    })
}

/// As `read_at`, but rather than wait for the disk it fails with `EAGAIN`, with some of the pieces written.
fn read_now(file: BorrowedFd<'_>, offset: u64, pieces: Pieces) -> io::Result<usize> {
    whole(pieces, offset, |list, at| {
        let (file, count) = (file.as_raw_fd(), list.len() as libc::c_int);
        // SAFETY: as in `read_at`.
        outcome(unsafe { libc::preadv2(file, list.as_ptr(), count, at as libc::off_t, libc::RWF_NOWAIT) })
    })
}

fn write_at(file: BorrowedFd<'_>, offset: u64, pieces: Pieces) -> io::Result<usize> {
    let moved = whole(pieces, offset, |list, at| {
        // SAFETY: as in `read_at`; the kernel only reads the memory.
        outcome(unsafe { libc::pwritev(file.as_raw_fd(), list.as_ptr(), list.len() as libc::c_int, at as libc::off_t) })
    })?;
    if moved < pieces.len() {
        return Err(io::Error::from_raw_os_error(libc::ENOSPC));
    }
    Ok(moved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    struct Copies<'a> {
        ops: Vec<Op<'a>>,
        results: Mutex<Vec<Option<io::Result<usize>>>>,
    }

    impl<'a> Batch<'a> for Copies<'a> {
        fn len(&self) -> usize {
            self.ops.len()
        }
        fn start(&self, index: usize) -> Option<Op<'a>> {
            (index % 10 != 9).then(|| self.ops[index])
        }
        fn done(&self, index: usize, result: io::Result<usize>) {
            let before = self.results.lock().unwrap()[index].replace(result);
            assert!(before.is_none(), "operation {index} is done once");
        }
        fn only_reads(&self) -> bool {
            self.ops.iter().all(|op| matches!(op, Op::ReadFile { .. } | Op::ReadAt { .. }))
        }
    }

    fn run(engine: &Engine, folder: &OwnedFd, ops: Vec<Op<'_>>) -> Vec<Option<io::Result<usize>>> {
        let results = Mutex::new(ops.iter().map(|_| None).collect());
        let batch = Copies { ops, results };
        engine.run(folder.as_fd(), &batch);
        batch.results.into_inner().unwrap()
    }

    fn round_trip(engine: &Engine) {
        let scratch = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(scratch.path().join("p/07")).unwrap();
        let folder: OwnedFd = std::fs::File::open(scratch.path()).unwrap().into();
        let source: Vec<u8> = (0..300_000u32).map(|i| (i * 7) as u8).collect();
        let mut target = vec![0u8; source.len() * 40];
        let split = |bytes: &[u8]| {
            let (a, b) = bytes.split_at(1000);
            [a, b].map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() })
        };
        let from = split(&source);
        // SAFETY: the vectors outlive the runs, and every operation has its own part of the target.
        let pieces = |list: &[libc::iovec]| unsafe { Pieces::new(list) };
        let key = |i: u8| {
            let mut key = [i; 32];
            key[0] = 7;
            key
        };
        let write = |i: u8| Op::WriteFile {
            temp: crate::names::temp(&key(i), "0123456789abcdef", u64::from(i)),
            path: crate::names::page(&key(i), "kv-0"),
            pieces: pieces(&from),
            sync: i.is_multiple_of(2),
            // The pieces do not lie at blocks: the file system refuses, and the other way is taken.
            direct: i.is_multiple_of(3),
        };
        let written = run(engine, &folder, (0..40).map(write).collect());
        for (i, result) in written.into_iter().enumerate() {
            match result {
                None => assert_eq!(i % 10, 9, "operation {i} was left out"),
                Some(result) => assert_eq!(result.unwrap(), source.len()),
            }
        }
        assert_eq!(std::fs::read_dir(scratch.path().join("p/07")).unwrap().count(), 36, "no temporary name is left");
        let parts: Vec<_> = target.chunks_mut(source.len()).map(|part| split(part)).collect();
        let read_of = |i: u8| Op::ReadFile {
            offset: 0,
            path: crate::names::page(&key(i), "kv-0"),
            pieces: pieces(&parts[usize::from(i)]),
        };
        let read = run(engine, &folder, (0..40).map(read_of).collect());
        for (i, result) in read.into_iter().enumerate().filter(|(i, _)| i % 10 != 9) {
            assert_eq!(result.unwrap().unwrap(), source.len(), "operation {i}");
            assert_eq!(&target[i * source.len()..(i + 1) * source.len()], &source[..]);
        }
        let missing = Op::ReadFile { offset: 0, path: crate::names::page(&key(99), "kv-0"), pieces: pieces(&parts[0]) };
        // Few reads: those that the page cache has whole, and those of which it has nothing, or a part.
        for dropped in [0..0, 0..source.len() as u64, 100_000..200_000] {
            for i in 1..3 {
                let file = std::fs::File::open(
                    scratch.path().join(crate::names::page(&key(i), "kv-0").as_cstr().to_str().unwrap()),
                );
                let file = file.unwrap();
                file.sync_all().unwrap();
                let length = std::num::NonZeroU64::new(dropped.end - dropped.start);
                if length.is_some() {
                    rustix::fs::fadvise(&file, dropped.start, length, rustix::fs::Advice::DontNeed).unwrap();
                }
            }
            target.fill(0);
            let results = run(engine, &folder, vec![read_of(1), missing, read_of(2)]);
            for (at, i) in [(0, 1), (2, 2)] {
                assert_eq!(*results[at].as_ref().unwrap().as_ref().unwrap(), source.len());
                assert_eq!(&target[i * source.len()..(i + 1) * source.len()], &source[..]);
            }
            let error = results[1].as_ref().unwrap().as_ref().map_err(io::Error::kind);
            assert_eq!(error, Err(io::ErrorKind::NotFound));
        }
        let no_folder = Op::WriteFile {
            temp: crate::names::temp(&[1; 32], "0123456789abcdef", 1),
            path: crate::names::page(&[1; 32], "kv-0"),
            pieces: pieces(&from),
            sync: true,
            direct: true,
        };
        let sync = Op::Sync { path: crate::names::fan_out(7) };
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(scratch.path().join("f"))
            .unwrap();
        let write_at = Op::WriteAt { file: file.as_fd(), offset: 5000, pieces: pieces(&from) };
        let results = run(engine, &folder, vec![missing, no_folder, sync, write_at]);
        let kind = |i: usize| results[i].as_ref().unwrap().as_ref().map_err(io::Error::kind);
        assert_eq!(kind(0), Err(io::ErrorKind::NotFound));
        assert_eq!(kind(1), Err(io::ErrorKind::NotFound));
        assert!(kind(2).is_ok());
        assert_eq!(kind(3).unwrap(), &source.len());
        let read_at = Op::ReadAt { file: file.as_fd(), offset: 6000, pieces: pieces(&parts[0]) };
        let results = run(engine, &folder, vec![read_at]);
        assert_eq!(*results[0].as_ref().unwrap().as_ref().unwrap(), source.len() - 1000, "a short file reads short");
        assert_eq!(&target[..1000], &source[1000..2000]);
    }

    #[test]
    fn threads_move_every_byte() {
        round_trip(&Engine::Threads(threads::Threads::new(8).unwrap()));
    }

    #[test]
    fn io_uring_moves_every_byte() {
        match uring::Uring::new(8) {
            Ok(uring) => round_trip(&Engine::Uring(uring)),
            Err(error) => eprintln!("this kernel has no io_uring for us ({error}): not tested"),
        }
    }
}
