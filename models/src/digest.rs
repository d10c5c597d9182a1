//! The digest of a checkpoint's weights, and how far loading is.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sha2::{Digest, Sha256};

/// Bytes hashed between two reports.
const STEP: usize = 4 << 20;

/// The files a digest goes over.
pub(crate) struct Digests<'a> {
    files: Vec<&'a [u8]>,
    single: bool,
}

/// How far hashing is, shared with the thread that hashes.
#[derive(Default)]
pub(crate) struct Hashed {
    bytes: AtomicU64,
    cancelled: AtomicBool,
    done: AtomicBool,
}

impl Hashed {
    /// Whether hashing has come to its end.
    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }
}

impl<'a> Digests<'a> {
    /// The digest is that of the file.
    pub(crate) fn one_file(bytes: &'a [u8]) -> Self {
        Self { files: vec![bytes], single: true }
    }

    /// The digest is that of the files' digests, one after the other in this order.
    pub(crate) fn files(files: Vec<&'a [u8]>) -> Self {
        Self { files, single: false }
    }

    pub(crate) fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.len() as u64).sum()
    }

    /// Hashes everything, unless cancelled; then the result means nothing.
    pub(crate) fn compute(&self, hashed: &Hashed) -> [u8; 32] {
        let one = |file: &[u8]| {
            let mut hash = Sha256::new();
            for step in file.chunks(STEP) {
                if hashed.cancelled.load(Ordering::Relaxed) {
                    break;
                }
                hash.update(step);
                hashed.bytes.fetch_add(step.len() as u64, Ordering::Relaxed);
            }
            <[u8; 32]>::from(hash.finalize())
        };
        let digest = match self.files.as_slice() {
            [file] if self.single => one(file),
            files => {
                let mut outer = Sha256::new();
                for file in files {
                    outer.update(one(file));
                }
                outer.finalize().into()
            }
        };
        hashed.done.store(true, Ordering::Release);
        digest
    }
}

/// Adds up hashing and uploading, each of which goes over the weights once.
pub(crate) struct Progress<'a> {
    callback: &'a dyn Fn(u64, u64),
    hashed: Box<Hashed>,
    uploaded: Cell<u64>,
    total: u64,
}

impl<'a> Progress<'a> {
    pub(crate) fn new(callback: &'a dyn Fn(u64, u64), total: u64) -> Self {
        Self { callback, hashed: Box::default(), uploaded: Cell::new(0), total }
    }

    pub(crate) fn hashed(&self) -> &Hashed {
        &self.hashed
    }

    /// Tells of `bytes` more bytes uploaded.
    pub(crate) fn uploaded(&self, bytes: usize) {
        self.uploaded.set((self.uploaded.get() + bytes as u64).min(self.total));
        self.report();
    }

    /// Calls the callback with where things stand.
    pub(crate) fn report(&self) {
        let done = self.uploaded.get() + self.hashed.bytes.load(Ordering::Relaxed).min(self.total);
        (self.callback)(done / 2, self.total);
    }

    /// Stops hashing: loading has failed.
    pub(crate) fn cancel(&self) {
        self.hashed.cancelled.store(true, Ordering::Relaxed);
    }

    /// Calls the callback for the last time.
    pub(crate) fn finish(&self) {
        (self.callback)(self.total, self.total);
    }
}
