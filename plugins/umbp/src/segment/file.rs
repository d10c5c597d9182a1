//! A segment file, and where a record lies in one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::OFlags;

use super::log::Options;
use super::plain::{self, Identity};
use super::record::{FLAGS_AT, Header, Version, record_len};

/// No segment is longer: a record has less than 4 GiB, and what says to be longer is no segment.
pub const MOST_SEGMENT: u64 = 64 << 30;

/// A segment file.
#[derive(Debug)]
pub struct Segment {
    /// Its number.
    pub id: u64,
    pub(super) path: PathBuf,
    pub(super) file: File,
    pub(super) direct: Option<File>,
    identity: Identity,
    pub(super) len: AtomicU64,
    pub(super) live: AtomicU64,
    pub(super) sealed: AtomicBool,
    lost: AtomicBool,
}

impl Segment {
    /// Opens the file of a number, or makes it.
    pub(super) fn open(dir: &Path, id: u64, options: &Options, new: bool) -> io::Result<Arc<Segment>> {
        let path = dir.join(format!("segment_{id}.log"));
        let write = !options.follower;
        let mut how = OpenOptions::new();
        let file = plain::open(&path, how.read(true).write(write).create_new(new).mode(0o600), OFlags::empty())?;
        let identity = Identity::of(&file.metadata()?);
        let direct = if options.direct {
            let direct = plain::open(&path, OpenOptions::new().read(true).write(write), OFlags::DIRECT).ok();
            // Both have to be the same file, whatever happens in the folder meanwhile.
            direct.filter(|direct| direct.metadata().is_ok_and(|found| Identity::of(&found) == identity))
        } else {
            None
        };
        Ok(Arc::new(Segment {
            id,
            path,
            file,
            direct,
            identity,
            len: AtomicU64::new(0),
            live: AtomicU64::new(0),
            sealed: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        }))
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }
    /// Bytes of records that count.
    pub fn live(&self) -> u64 {
        self.live.load(Ordering::Acquire)
    }
    /// Nothing is appended to it any more.
    pub fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }
    /// Somebody else has removed it: it belongs to no log any more, and no later process finds it.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    pub(super) fn lose(&self) {
        self.sealed.store(true, Ordering::Release);
        self.lost.store(true, Ordering::Release);
    }

    /// Whether its path still leads to it.
    pub(super) fn is_in_place(&self) -> io::Result<bool> {
        Ok(plain::at(&self.path)?.is_some_and(|found| Identity::of(&found) == self.identity))
    }

    /// Whether the next record may follow the last one: somebody may have removed the file, or cut it.
    pub(super) fn can_grow(&self) -> io::Result<bool> {
        let found = plain::at(&self.path)?;
        Ok(found.is_some_and(|found| Identity::of(&found) == self.identity && found.len() == self.len()))
    }

    /// The file to read from: past the page cache where what is read is `aligned`.
    pub fn file(&self, aligned: bool) -> &File {
        self.direct.as_ref().filter(|_| aligned).unwrap_or(&self.file)
    }

    /// Reads `bytes` from `at` on; both are whole blocks where `aligned`.
    ///
    /// # Errors
    /// When the file can't be read so far.
    pub fn read(&self, bytes: &mut [u8], at: u64, aligned: bool) -> io::Result<()> {
        self.file(aligned).read_exact_at(bytes, at)
    }

    /// Marks a record as one that does not count.
    pub(super) fn mark(&self, offset: u64) {
        // The flag of a record without a checksum stays beside it; a failure leaves a page that is found again later, and is right.
        let mut flags = [0];
        if self.file.read_exact_at(&mut flags, offset + FLAGS_AT).is_ok() {
            let _ = self.file.write_all_at(&[flags[0] & !1], offset + FLAGS_AT);
        }
    }
}

/// Where a record lies.
#[derive(Debug, Clone)]
pub struct Location {
    /// The segment.
    pub segment: Arc<Segment>,
    /// Offset of the record.
    pub offset: u64,
    /// Bytes of its key.
    pub key_len: u32,
    /// Bytes of its value.
    pub value_len: u32,
    /// How it is laid out.
    pub version: Version,
    /// Its generation.
    pub generation: u64,
}

impl Location {
    pub(super) fn of(segment: &Arc<Segment>, offset: u64, header: &Header) -> Location {
        Location {
            segment: segment.clone(),
            offset,
            key_len: header.key_len,
            value_len: header.value_len,
            version: header.version,
            generation: header.generation,
        }
    }
    /// Bytes of the record.
    pub fn len(&self) -> u64 {
        record_len(self.version, self.key_len, self.value_len)
    }
}
