//! Opening the files of a checkpoint, or of whoever else is given a path by a user.

use std::fs::{File, FileType};
use std::io::{Error, ErrorKind, Read as _, Result};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

/// Opens a regular file. Anything else is refused before it is opened: a FIFO would wait for somebody to write, and a device need not end.
///
/// # Errors
/// Those of the system, and one that says what was found in place of a file.
pub fn open_regular(path: &Path) -> Result<File> {
    expect_regular(std::fs::metadata(path)?.file_type())?;
    let file = File::open(path)?;
    // It may be another one by now.
    expect_regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// The bytes of a regular file of at most `most` bytes.
///
/// # Errors
/// As [`open_regular`], and a file of more bytes.
pub fn read_regular(path: &Path, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("expected at most {most} bytes, found more")));
    }
    Ok(bytes)
}

fn expect_regular(kind: FileType) -> Result<()> {
    match kind.is_file() {
        true => Ok(()),
        false => {
            Err(Error::new(ErrorKind::InvalidInput, format!("expected a regular file, found {}", what_it_is(kind))))
        }
    }
}

/// The kind of a file in words.
pub fn what_it_is(kind: FileType) -> &'static str {
    match () {
        () if kind.is_file() => "a regular file",
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a FIFO",
        () if kind.is_socket() => "a socket",
        () => "a device",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(path: &Path) -> String {
        read_regular(path, 10).unwrap_err().to_string()
    }

    #[test]
    fn a_path_that_is_no_file_was_waited_for_or_read_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let link = folder.path().join("config.json");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        assert_eq!(refused(&fifo), "expected a regular file, found a FIFO");
        assert_eq!(refused(&link), "expected a regular file, found a device");
        assert_eq!(refused(folder.path()), "expected a regular file, found a folder");
        assert_eq!(open_regular(&folder.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_file_of_any_size_was_read_into_memory() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "0123456789").unwrap();
        assert_eq!(read_regular(file.path(), 10).unwrap(), b"0123456789");
        file.as_file().set_len(1 << 40).unwrap();
        assert_eq!(refused(file.path()), "expected at most 10 bytes, found more");
    }
}
