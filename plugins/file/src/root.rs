//! The store's directory: making it, holding it, and knowing whose temporary files may go.

use std::collections::HashMap;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags};
use sha2::{Digest, Sha256};

use crate::io::FILE_MODE;
use crate::names;

/// The file that says which format a directory has.
pub const MARKER: &str = "kvdock-file-store";
const MARKER_TEXT: &str = "kvdock file store, format 1\n";
const OWNERS: &str = "owners";
/// The file whose lock lets one process at a time make room.
pub const EVICT_LOCK: &str = "evict.lock";
/// Permissions of new folders; the process's umask narrows them.
const FOLDER_MODE: Mode = Mode::from_raw_mode(0o755);
const FOLDER_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Seconds since 1970.
pub fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// The open directory and the folder of this instance's namespace in it.
#[derive(Debug)]
pub struct Root {
    /// The store's directory.
    pub dir: OwnedFd,
    /// The folder of the namespace.
    pub namespace: OwnedFd,
    /// Which fan-out folders are known to exist.
    fan_out: Vec<AtomicBool>,
}

/// Makes a folder unless it is there; says whether it was made.
fn make_folder(at: BorrowedFd<'_>, name: &str) -> io::Result<bool> {
    match rustix::fs::mkdirat(at, name, FOLDER_MODE) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::EXIST) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Opens a folder.
pub fn open_folder(at: BorrowedFd<'_>, name: impl rustix::path::Arg) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(at, name, FOLDER_FLAGS, Mode::empty())?)
}

/// Calls `see` with every name in a folder but `.` and `..`.
pub fn list(folder: BorrowedFd<'_>, mut see: impl FnMut(&str)) -> io::Result<()> {
    for entry in Dir::read_from(folder)? {
        // Names of ours are ASCII; others are not ours to look at.
        if let Ok(name) = entry?.file_name().to_str()
            && name != "."
            && name != ".."
        {
            see(name);
        }
    }
    Ok(())
}

impl Root {
    /// Opens the directory, making what is missing of it.
    ///
    /// # Errors
    /// `InvalidData` when it holds a store of another format.
    pub fn create(path: &Path, namespace: &[u8; 32], namespace_json: &str) -> io::Result<Root> {
        std::fs::create_dir_all(path)?;
        let dir: OwnedFd = std::fs::File::open(path)?.into();
        check_marker(dir.as_fd())?;
        let folder = names::namespace_folder(namespace);
        let inside = match open_folder(dir.as_fd(), folder.as_str()) {
            // Nothing is written here: what is stored can be read also from a full or read-only disk.
            Ok(inside) => inside,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                make_folder(dir.as_fd(), &folder)?;
                let inside = open_folder(dir.as_fd(), folder.as_str())?;
                publish(inside.as_fd(), "namespace.json", namespace_json)?;
                rustix::fs::fsync(&inside)?;
                rustix::fs::fsync(&dir)?;
                inside
            }
            Err(error) => return Err(error),
        };
        Ok(Root { dir, namespace: inside, fan_out: (0..256).map(|_| AtomicBool::new(false)).collect() })
    }

    /// Whether other hosts can reach the directory: by the kind of its file system.
    pub fn is_shared(&self) -> bool {
        // NFS, SMB (three), Ceph, Lustre, GPFS, FUSE and virtiofs, OCFS2, GFS2, 9P, AFS.
        const NETWORK: [u32; 12] = [
            0x6969,
            0x517b,
            0xfe53_4d42,
            0xff53_4d42,
            0x00c3_6400,
            0x0bd0_0bd0,
            0x4750_4653,
            0x6573_5546,
            0x7461_636f,
            0x0116_1970,
            0x0102_1997,
            0x5346_414f,
        ];
        rustix::fs::fstatfs(&self.dir).is_ok_and(|stat| NETWORK.contains(&(stat.f_type as u32)))
    }

    /// Whether the folder of the namespace still has a name.
    pub fn is_linked(&self) -> bool {
        rustix::fs::fstat(&self.namespace).is_ok_and(|stat| stat.st_nlink > 0)
    }

    /// Whether this is what `path` names.
    pub fn is_at(&self, path: &Path, namespace: &[u8; 32]) -> bool {
        let there = rustix::fs::stat(path.join(names::namespace_folder(namespace)));
        let here = rustix::fs::fstat(&self.namespace);
        matches!((there, here), (Ok(there), Ok(here)) if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino))
    }

    /// Makes the folders of pages and packs.
    pub fn need_folders(&self) -> io::Result<()> {
        ["p", "packs"].iter().try_for_each(|name| make_folder(self.namespace.as_fd(), name).map(drop))
    }

    /// Makes the fan-out folder for keys that start with `byte`, unless it is known to exist. Says whether it was made.
    pub fn need_fan_out(&self, byte: u8) -> io::Result<bool> {
        let known = &self.fan_out[usize::from(byte)];
        if known.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let made = make_folder(self.namespace.as_fd(), names::fan_out(byte).as_str())?;
        known.store(true, Ordering::Relaxed);
        Ok(made)
    }

    /// Forgets which folders exist.
    pub fn forget_folders(&self) {
        self.fan_out.iter().for_each(|known| known.store(false, Ordering::Relaxed));
    }
}

fn check_marker(dir: BorrowedFd<'_>) -> io::Result<()> {
    for _ in 0..2 {
        match rustix::fs::openat(dir, MARKER, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => {
                let mut text = [0; 64];
                let len = rustix::io::read(&file, &mut text)?;
                if text.get(..len) == Some(MARKER_TEXT.as_bytes()) {
                    return Ok(());
                }
                if len == 0 {
                    // A power cut can leave an empty file where the marker was being made.
                    publish(dir, MARKER, MARKER_TEXT)?;
                    continue;
                }
                let found = String::from_utf8_lossy(text.get(..len).unwrap_or_default());
                let message = format!(
                    "its file {MARKER} says {found:?}, this version reads {MARKER_TEXT:?}; where another version has written it, give this one another dir; where the file is damaged, remove it alone: the pages stay, and each is checked when it is read",
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
            Err(rustix::io::Errno::NOENT) => publish(dir, MARKER, MARKER_TEXT)?,
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("{MARKER} vanishes")))
}

/// Writes a small file that appears whole.
fn publish(folder: BorrowedFd<'_>, name: &str, text: &str) -> io::Result<()> {
    let temp = format!(".{}-0{}", new_id(), names::TEMP_SUFFIX);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder, temp.as_str(), flags, FILE_MODE)?;
    let mut file = std::fs::File::from(file);
    let written = io::Write::write_all(&mut file, text.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| Ok(rustix::fs::renameat(folder, temp.as_str(), folder, name)?));
    if written.is_err() {
        let _ = rustix::fs::unlinkat(folder, temp.as_str(), AtFlags::empty());
    }
    written
}

/// A number that no other instance has.
fn new_id() -> String {
    use std::hash::{BuildHasher, Hasher};
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let mut hasher = Sha256::new();
    // Two random states of the standard library, the process, the time and a counter.
    hasher.update(std::hash::RandomState::new().build_hasher().finish().to_le_bytes());
    hasher.update(std::hash::RandomState::new().hash_one(17u8).to_le_bytes());
    hasher.update(std::process::id().to_le_bytes());
    hasher.update(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_le_bytes());
    hasher.update(COUNT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    let digest = hasher.finalize();
    names::Hex(digest.get(..8).unwrap_or_default()).to_string()
}

/// This instance's number, and the lock that says that it lives. The system drops the lock when the process ends, however it ends.
#[derive(Debug)]
pub struct Owner {
    id: String,
    file: Mutex<Option<OwnedFd>>,
}

/// What is known of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It holds its lock.
    Alive,
    /// Its lock is free: it has ended.
    Dead,
    /// It has no lock file.
    Unknown,
}

impl Owner {
    /// Takes a number; its lock comes with [`Owner::ensure`].
    pub fn new() -> Owner {
        Owner { id: new_id(), file: Mutex::new(None) }
    }

    /// The number: 16 hex digits.
    pub fn id(&self) -> &str {
        &self.id
    }

    fn path(id: &str) -> String {
        format!("{OWNERS}/{id}")
    }

    /// Takes the lock, or makes its file again when it has vanished.
    pub fn ensure(&self, root: &Root) -> io::Result<()> {
        let mut held = self.file.lock();
        let there = rustix::fs::statat(&root.dir, Owner::path(&self.id), AtFlags::empty());
        let ours = held.as_ref().and_then(|file| rustix::fs::fstat(file).ok());
        if matches!((&there, &ours), (Ok(there), Some(ours)) if there.st_ino == ours.st_ino && there.st_dev == ours.st_dev)
        {
            return Ok(());
        }
        make_folder(root.dir.as_fd(), OWNERS)?;
        // Locked under another name first: nobody may take it for the file of a dead owner.
        let fresh = format!("{OWNERS}/.{}", self.id);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&root.dir, fresh.as_str(), flags, FILE_MODE)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        rustix::fs::renameat(&root.dir, fresh.as_str(), &root.dir, Owner::path(&self.id))?;
        *held = Some(file);
        Ok(())
    }

    /// Gives the number back.
    pub fn release(&self, root: &Root) {
        if self.file.lock().take().is_some() {
            let _ = rustix::fs::unlinkat(&root.dir, Owner::path(&self.id), AtFlags::empty());
        }
    }
}

/// Who lives, looked up once a pass.
#[derive(Debug, Default)]
pub struct Lives(HashMap<String, Liveness>);

/// How old a temporary file without a lock file must be to be a leftover: it may belong to a host whose locks are not seen here.
const ORPHAN_AGE: u64 = 3600;

impl Lives {
    /// Whether an instance lives.
    pub fn of(&mut self, root: &Root, id: &str) -> Liveness {
        if let Some(known) = self.0.get(id) {
            return *known;
        }
        let opened = rustix::fs::openat(&root.dir, Owner::path(id), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let liveness = match opened {
            Err(_) => Liveness::Unknown,
            // A shared lock: of two that look at the same moment neither takes the other for the owner.
            Ok(file) => match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
                Ok(()) => Liveness::Dead,
                Err(_) => Liveness::Alive,
            },
        };
        self.0.insert(id.to_owned(), liveness);
        liveness
    }

    /// Removes a temporary file when it is a leftover. Says whether it did.
    pub fn clean_temp(&mut self, root: &Root, folder: BorrowedFd<'_>, name: &CStr, owner: &str) -> bool {
        let leftover = match self.of(root, owner) {
            Liveness::Alive => false,
            Liveness::Dead => true,
            Liveness::Unknown => rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|stat| (stat.st_mtime as u64).saturating_add(ORPHAN_AGE) < now_seconds()),
        };
        leftover && rustix::fs::unlinkat(folder, name, AtFlags::empty()).is_ok()
    }

    /// Finds out who is dead already, for [`Lives::bury`]. To be called before anything is looked through: who dies later may leave files in folders
    /// that were passed by then, which nobody could tell for leftovers once the lock file is gone.
    pub fn look(&mut self, root: &Root) -> io::Result<Vec<String>> {
        let owners = open_folder(root.dir.as_fd(), OWNERS)?;
        let mut dead = Vec::new();
        list(owners.as_fd(), |name| {
            if names::is_owner(name) {
                dead.push(name.to_owned());
            }
        })?;
        dead.retain(|name| self.of(root, name) == Liveness::Dead);
        Ok(dead)
    }

    /// Removes the lock files of these dead, once all they left was looked at.
    pub fn bury(root: &Root, dead: &[String]) -> io::Result<()> {
        let owners = open_folder(root.dir.as_fd(), OWNERS)?;
        for name in dead {
            match rustix::fs::unlinkat(&owners, name.as_str(), AtFlags::empty()) {
                // Another instance was first.
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Folders of namespaces in the store's directory.
pub fn namespaces(root: &Root) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    list(root.dir.as_fd(), |name| {
        if names::is_namespace_folder(name) {
            found.push(name.to_owned());
        }
    })?;
    found.retain(|name| {
        rustix::fs::statat(&root.dir, name.as_str(), AtFlags::SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
    });
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_dies_while_a_folder_is_looked_through_keeps_the_lock_file_for_the_next_look() {
        let scratch = tempfile::tempdir().unwrap();
        let root = Root::create(scratch.path(), &[7; 32], "{}").unwrap();
        let (before, during) = (Owner::new(), Owner::new());
        for owner in [&before, &during] {
            owner.ensure(&root).unwrap();
        }
        let lock_of = |owner: &Owner| scratch.path().join(Owner::path(owner.id()));
        // As the system does it when a process is killed: the lock goes, the file stays.
        before.file.lock().take();
        let mut lives = Lives::default();
        let dead = lives.look(&root).unwrap();
        during.file.lock().take();
        Lives::bury(&root, &dead).unwrap();
        assert!(!lock_of(&before).exists() && lock_of(&during).exists());
        assert_eq!(Lives::default().look(&root).unwrap(), [during.id()]);
        // Another instance may have been first.
        Lives::bury(&root, &dead).unwrap();
    }

    #[test]
    fn two_that_look_at_the_same_moment_do_not_take_each_other_for_the_owner() {
        let scratch = tempfile::tempdir().unwrap();
        let root = Root::create(scratch.path(), &[7; 32], "{}").unwrap();
        let owner = Owner::new();
        owner.ensure(&root).unwrap();
        assert_eq!(Lives::default().of(&root, owner.id()), Liveness::Alive);
        owner.file.lock().take();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        assert_eq!(Lives::default().of(&root, owner.id()), Liveness::Dead);
                    }
                });
            }
        });
    }

    #[test]
    fn a_damaged_mark_says_what_to_do_and_without_it_the_folder_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let dir = std::fs::File::open(folder.path()).unwrap();
        std::fs::write(folder.path().join(MARKER), "\0\0garbage").unwrap();
        let error = check_marker(dir.as_fd()).unwrap_err().to_string();
        assert!(
            error.contains(MARKER) && error.contains("another dir") && error.contains("remove it alone"),
            "{error}"
        );
        std::fs::remove_file(folder.path().join(MARKER)).unwrap();
        check_marker(dir.as_fd()).unwrap();
        check_marker(dir.as_fd()).unwrap();
    }
}
