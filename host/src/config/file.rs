//! Reading a config file, which may be a pipe.

use std::fs::{File, FileType};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::Duration;

use kvdock_models::files::what_it_is;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

/// Most bytes of a configuration.
const MOST: usize = 1 << 20;

/// How long a pipe may have nothing to say.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// The text of the file at `path`: a regular file, or a pipe, to which somebody has to write within `patience`.
///
/// # Errors
/// What is wrong with it, to follow its name.
pub(super) fn text(path: &Path, patience: Duration) -> Result<String, String> {
    let unreadable = |error: std::io::Error| format!("can't be read: {error}");
    // Before it is opened, which does something to some devices.
    expect_file_or_pipe(std::fs::metadata(path).map_err(unreadable)?.file_type())?;
    // Without waiting for somebody who opens a FIFO to write.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| unreadable(error.into()))?;
    let mut file = File::from(file);
    expect_file_or_pipe(file.metadata().map_err(unreadable)?.file_type())?;
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 16 << 10];
    loop {
        wait(&file, patience)?;
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(buffer.get(..count).unwrap_or_default()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(unreadable(error)),
        }
        if bytes.len() > MOST {
            return Err(format!("is longer than {MOST} bytes, the most that a config file may have"));
        }
    }
    String::from_utf8(bytes).map_err(|error| format!("is not UTF-8 at byte {}", error.utf8_error().valid_up_to()))
}

fn expect_file_or_pipe(kind: FileType) -> Result<(), String> {
    match kind.is_file() || kind.is_fifo() {
        true => Ok(()),
        false => Err(format!("is {}: expected a regular file or a pipe", what_it_is(kind))),
    }
}

/// Waits until there is something to read or nothing ever will be, as for a regular file at once.
fn wait(file: &File, patience: Duration) -> Result<(), String> {
    let most = Timespec { tv_sec: patience.as_secs().cast_signed(), tv_nsec: patience.subsec_nanos().into() };
    match poll(&mut [PollFd::new(file, PollFlags::IN)], Some(&most)) {
        Ok(0) => Err(format!("is a pipe to which nobody wrote anything for {} s", patience.as_secs_f64())),
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(format!("can't be waited for: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;
    use std::path::PathBuf;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);

    fn fifo(folder: &Path) -> PathBuf {
        let path = folder.join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    }

    #[test]
    fn a_device_was_read_without_end() {
        let error = text(Path::new("/dev/zero"), PATIENCE).unwrap_err();
        assert_eq!(error, "is a device: expected a regular file or a pipe");
        let folder = tempfile::tempdir().unwrap();
        assert!(text(folder.path(), PATIENCE).unwrap_err().starts_with("is a folder: "));
    }

    #[test]
    fn a_fifo_to_which_nobody_writes_was_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let error = text(&fifo(folder.path()), SOON).unwrap_err();
        assert_eq!(error, "is a pipe to which nobody wrote anything for 0.02 s");
    }

    #[test]
    fn a_pipe_is_read_to_its_end_in_whatever_pieces_it_comes() {
        let folder = tempfile::tempdir().unwrap();
        let path = fifo(folder.path());
        // As the shell makes it of `<(...)`: nameless, open, and written to by somebody else.
        let (reader, mut writer) = std::io::pipe().unwrap();
        let nameless = PathBuf::from(format!("/dev/fd/{}", reader.as_raw_fd()));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut named = File::options().write(true).open(&path).unwrap();
                for part in ["[server]\n", "port = 1\n"] {
                    named.write_all(part.as_bytes()).unwrap();
                    std::thread::yield_now();
                }
            });
            scope.spawn(move || writer.write_all("#".repeat(MOST).as_bytes()).unwrap());
            assert_eq!(text(&path, PATIENCE).unwrap(), "[server]\nport = 1\n");
            assert_eq!(text(&nameless, PATIENCE).unwrap().len(), MOST);
        });
        assert_eq!(text(&nameless, PATIENCE).unwrap(), "", "who wrote has closed it");
    }

    #[test]
    fn what_is_longer_than_any_configuration_is_not_read_to_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 40).unwrap();
        assert!(text(file.path(), PATIENCE).unwrap_err().starts_with("is longer than 1048576 bytes"));
    }
}
