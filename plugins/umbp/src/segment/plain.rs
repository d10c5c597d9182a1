//! Opening files of a folder in which somebody else may have put anything.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

/// Which file a path led to: device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity(u64, u64);

impl Identity {
    /// Of an open file, or of what lies at a path.
    pub fn of(metadata: &Metadata) -> Identity {
        Identity(metadata.dev(), metadata.ino())
    }
}

/// What lies at a path now; none where there is nothing. A link is not followed.
///
/// # Errors
/// When the path can't be looked at.
pub fn at(path: &Path) -> io::Result<Option<Metadata>> {
    match std::fs::symlink_metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(named(path, &error)),
    }
}

/// Opens a plain file. Anything else at its path is neither followed nor waited for.
///
/// # Errors
/// When it can't be opened, or is no plain file; the text names the path.
pub fn open(path: &Path, options: &mut OpenOptions, flags: OFlags) -> io::Result<File> {
    if let Some(found) = at(path)? {
        check(path, &found)?;
    }
    // It may be exchanged between the look and the opening: no link is followed, and nothing that has two ends waits for the other one.
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.custom_flags(flags.bits().cast_signed()).open(path).map_err(|error| named(path, &error))?;
    check(path, &file.metadata().map_err(|error| named(path, &error))?)?;
    // Reads through a ring would be given up where others wait.
    let flags = fcntl_getfl(&file)?;
    fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Brings the names in a directory to the disk.
///
/// # Errors
/// When it is gone or can't be written.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    let flags = (OFlags::DIRECTORY | OFlags::NONBLOCK).bits().cast_signed();
    let dir_file = OpenOptions::new().read(true).custom_flags(flags).open(dir).map_err(|error| named(dir, &error))?;
    dir_file.sync_all().map_err(|error| named(dir, &error))
}

/// An error that says where it happened.
pub fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn check(path: &Path, found: &Metadata) -> io::Result<()> {
    let kind = found.file_type();
    let what = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_symlink() => "a symbolic link",
        _ if kind.is_dir() => "a directory",
        _ if kind.is_fifo() => "a named pipe",
        _ if kind.is_socket() => "a socket",
        _ if kind.is_block_device() || kind.is_char_device() => "a device",
        _ => "no plain file",
    };
    let text = format!("{} is {what}; a plain file of this store belongs there: move it away", path.display());
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_files_are_opened_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), b"x").unwrap();
        std::fs::create_dir(path("folder")).unwrap();
        std::os::unix::fs::symlink(path("file"), path("link")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, path("pipe"), rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        for write in [false, true] {
            let open = |name: &str| open(&path(name), OpenOptions::new().read(true).write(write), OFlags::empty());
            let file = open("file").unwrap();
            assert!(!fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
            for (name, what) in [
                ("folder", "is a directory"),
                ("link", "is a symbolic link"),
                ("pipe", "is a named pipe"),
                ("socket", "is a socket"),
            ] {
                let error = open(name).unwrap_err().to_string();
                assert!(error.contains(what) && error.contains(name), "{error}");
            }
            assert_eq!(open("none").unwrap_err().kind(), io::ErrorKind::NotFound);
        }
    }
}
