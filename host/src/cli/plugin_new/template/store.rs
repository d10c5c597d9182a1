//! A store of pages: one file each, `DIR/NAMESPACE/POOL/KEY`. It knows nothing of kvdock.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// What became of a page that was to be stored.
#[derive(Debug, PartialEq, Eq)]
pub enum Written {
    /// It is stored.
    New,
    /// It was stored before.
    ThereAlready,
    /// The store is full.
    NoRoom,
}

/// A stored page.
pub struct Stored {
    file: File,
    len: u64,
}

impl Stored {
    /// Bytes of the page.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The next bytes of the page.
    pub fn read_exact(&mut self, to: &mut [u8]) -> io::Result<()> {
        self.file.read_exact(to)
    }
}

/// The pages of one namespace.
pub struct Store {
    folder: PathBuf,
    max_bytes: u64,
    /// Pages and bytes. Held while a page appears or goes, so that the figures are right.
    usage: Mutex<(u64, u64)>,
}

impl Store {
    /// Opens or makes the folder, and counts what is there.
    pub fn open(dir: &Path, namespace: &str, max_bytes: u64) -> io::Result<Store> {
        let folder = dir.join(namespace);
        make_folder(&folder)?;
        let store = Store {
            folder,
            max_bytes,
            usage: Mutex::new((0, 0)),
        };
        let mut usage = (0, 0);
        store.each_file(|path, meta, temporary| {
            if !temporary {
                usage = (usage.0 + 1, usage.1 + meta.len());
            } else if is_old(meta) {
                // A process that crashed left it.
                let _ = fs::remove_file(path);
            }
            Ok(true)
        })?;
        *store.lock() = usage;
        Ok(store)
    }

    /// Where the pages lie.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes that it keeps at most.
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Pages and bytes.
    pub fn usage(&self) -> (u64, u64) {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, (u64, u64)> {
        // Whoever panicked with the lock left two numbers behind, nothing half done.
        self.usage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the folder of a pool.
    pub fn add_pool(&self, pool: &str) -> io::Result<()> {
        make_folder(&self.folder.join(file_name(pool)))
    }

    /// The page under a key.
    pub fn find(&self, pool: &str, key: &[u8; 32]) -> io::Result<Option<Stored>> {
        match File::open(self.path(pool, key)) {
            Ok(file) => {
                let len = file.metadata()?.len();
                Ok(Some(Stored { file, len }))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Stores a page. Readers see the whole page or none: it is written under another name, and
    /// renamed.
    pub fn put(&self, pool: &str, key: &[u8; 32], pieces: &[&[u8]]) -> io::Result<Written> {
        let bytes: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        let path = self.path(pool, key);
        // A page of another length is no page: it is written anew.
        if length(&path)? == Some(bytes) {
            return Ok(Written::ThereAlready);
        }
        if self.usage().1.saturating_add(bytes) > self.max_bytes {
            return Ok(Written::NoRoom);
        }
        let (mut file, temporary) = new_file(&self.folder.join(file_name(pool)))?;
        let written = pieces
            .iter()
            .try_for_each(|piece| file.write_all(piece))
            .and_then(|()| {
                let mut usage = self.lock();
                let before = length(&path)?;
                if before == Some(bytes) {
                    return Ok(Written::ThereAlready);
                }
                let after = (usage.1 - before.unwrap_or(0).min(usage.1)).saturating_add(bytes);
                if after > self.max_bytes {
                    return Ok(Written::NoRoom);
                }
                fs::rename(&temporary, &path)?;
                *usage = (usage.0 + u64::from(before.is_none()), after);
                Ok(Written::New)
            });
        if !matches!(written, Ok(Written::New)) {
            let _ = fs::remove_file(&temporary);
        }
        match written {
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::StorageFull | ErrorKind::QuotaExceeded
                ) =>
            {
                Ok(Written::NoRoom)
            }
            written => written,
        }
    }

    /// Removes a page, and says whether there was one.
    pub fn remove(&self, pool: &str, key: &[u8; 32]) -> io::Result<bool> {
        self.remove_file(&self.path(pool, key))
    }

    fn remove_file(&self, path: &Path) -> io::Result<bool> {
        let mut usage = self.lock();
        let Some(bytes) = length(path)? else {
            return Ok(false);
        };
        fs::remove_file(path)?;
        *usage = (usage.0.saturating_sub(1), usage.1.saturating_sub(bytes));
        Ok(true)
    }

    /// Removes all pages, as long as `go_on` says so.
    pub fn clear(&self, go_on: impl Fn() -> bool) -> io::Result<()> {
        self.each_file(|path, _, temporary| {
            if !temporary {
                self.remove_file(path)?;
            }
            Ok(go_on())
        })
    }

    /// Whether a file can be made.
    pub fn try_writing(&self) -> io::Result<()> {
        let (_, path) = new_file(&self.folder)?;
        fs::remove_file(path)
    }

    fn path(&self, pool: &str, key: &[u8; 32]) -> PathBuf {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        self.folder.join(file_name(pool)).join(name)
    }

    /// Calls `body` for each file of each pool, with whether it is a page in the making, until it
    /// answers false.
    fn each_file(
        &self,
        mut body: impl FnMut(&Path, &fs::Metadata, bool) -> io::Result<bool>,
    ) -> io::Result<()> {
        for pool in fs::read_dir(&self.folder)? {
            let pool = pool?;
            if !pool.file_type()?.is_dir() {
                continue;
            }
            for entry in fs::read_dir(pool.path())? {
                let entry = entry?;
                // Another instance may have removed it meanwhile.
                let Ok(meta) = entry.metadata() else { continue };
                if !body(
                    &entry.path(),
                    &meta,
                    entry.file_name().as_encoded_bytes().starts_with(b"."),
                )? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Nobody else may read it: pages hold what people wrote.
fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// A new file whose name no other instance uses, and its path.
fn new_file(folder: &Path) -> io::Result<(File, PathBuf)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".{}-{number}", std::process::id()));
        match OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
        {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            file => return file.map(|file| (file, path)),
        }
    }
}

fn length(path: &Path) -> io::Result<Option<u64>> {
    match fs::metadata(path) {
        Ok(meta) => Ok(Some(meta.len())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_old(meta: &fs::Metadata) -> bool {
    let age = meta
        .modified()
        .ok()
        .and_then(|time| SystemTime::now().duration_since(time).ok());
    age.is_some_and(|age| age > Duration::from_secs(3600))
}

/// A file name for the name of a pool, which may hold anything: other characters than letters,
/// digits, `_` and `-` become `%` and hex digits.
fn file_name(pool: &str) -> String {
    if pool.is_empty() {
        return "%".to_owned();
    }
    pool.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => char::from(byte).to_string(),
            other => format!("%{other:02x}"),
        })
        .collect()
}
