//! What a process that writes a directory does first: it locks it, and tries what the file system can do.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, OFlags, flock};

use super::buffer::Buffer;
use super::plain::{self, Identity};
use super::record::BLOCK;

const LOCK: &str = ".kvdock-umbp-lock";
const PROBE: &str = ".umbp_odirect_probe";

/// The right to write a directory, for as long as it lives.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    identity: Identity,
    // Open for as long as the lock is held.
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // To close it is not enough: a child that this process starts just now has the file too, until it becomes another program.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

impl Lock {
    /// Locks a directory, which is made where it is missing.
    ///
    /// # Errors
    /// When another process has it, or it can't be made or written.
    pub fn take(dir: &Path) -> io::Result<Lock> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(|error| io::Error::new(error.kind(), format!("{}: it can't be created: {error}", dir.display())))?;
        let path = dir.join(LOCK);
        loop {
            let mut how = OpenOptions::new();
            let file = plain::open(&path, how.create(true).truncate(false).write(true).mode(0o600), OFlags::empty())?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    let text = format!(
                        "{}: another process writes it: give each process a directory, or make this one a follower",
                        dir.display()
                    );
                    return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
                }
                Err(error) => return Err(plain::named(&path, &error.into())),
            }
            let identity = Identity::of(&file.metadata()?);
            let lock = Lock { path: path.clone(), identity, file };
            // One that was removed before it was locked keeps nobody out.
            if lock.is_in_place()? {
                return Ok(lock);
            }
        }
    }

    /// Whether it still keeps others out: somebody may have removed the file, or the whole directory.
    ///
    /// # Errors
    /// When that can't be seen.
    pub fn is_in_place(&self) -> io::Result<bool> {
        Ok(plain::at(&self.path)?.is_some_and(|found| Identity::of(&found) == self.identity))
    }
}

/// Whether a block can be written and read past the page cache.
pub fn is_direct(dir: &Path) -> bool {
    let path = dir.join(PROBE);
    // An earlier process may have left one; what somebody else may have put there, such as a link to another file, is not written.
    let _ = std::fs::remove_file(&path);
    let mut how = OpenOptions::new();
    let Ok(file) = plain::open(&path, how.read(true).write(true).create_new(true).mode(0o600), OFlags::DIRECT) else {
        // A file system without direct I/O may have made it all the same.
        let _ = std::fs::remove_file(&path);
        return false;
    };
    let works = try_block(&file);
    let _ = std::fs::remove_file(&path);
    works.unwrap_or(false)
}

fn try_block(file: &File) -> io::Result<bool> {
    let mut buffer = Buffer::new();
    buffer.reserve(BLOCK as usize);
    let block = buffer.bytes_mut().get_mut(..BLOCK as usize).unwrap_or_default();
    block.fill(0x5a);
    file.write_all_at(block, 0)?;
    block.fill(0);
    file.read_exact_at(block, 0)?;
    Ok(block.iter().all(|byte| *byte == 0x5a))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder was refused as another process's for as long as a child that was just being started had its lock too.
    #[test]
    fn a_lock_ends_where_others_have_its_file_open_still() {
        let dir = tempfile::tempdir().unwrap();
        let lock = Lock::take(dir.path()).unwrap();
        let of_a_child = lock.file.try_clone().unwrap();
        assert_eq!(Lock::take(dir.path()).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(lock);
        Lock::take(dir.path()).unwrap();
        drop(of_a_child);
    }
}
