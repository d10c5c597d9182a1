//! What the machine offers: memory, limits, kernel features.

use std::ffi::CString;
use std::fs;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::path::Path;

/// Memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    /// All there is: of the machine, or what the control group allows if that is less.
    pub total: u64,
    /// What can be had now without swapping.
    pub available: u64,
}

/// The memory that this process may use; `None` if the system doesn't say.
pub(super) fn memory() -> Option<Memory> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let mut memory = parse_meminfo(&info)?;
    if let Some((limit, used)) = control_group() {
        memory.total = memory.total.min(limit);
        memory.available = memory.available.min(limit.saturating_sub(used));
    }
    Some(memory)
}

fn parse_meminfo(text: &str) -> Option<Memory> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kibibytes: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
        kibibytes.checked_mul(1024)
    };
    Some(Memory { total: field("MemTotal:")?, available: field("MemAvailable:")? })
}

/// Limit and use of the tightest control group (version 2) that this process is in.
fn control_group() -> Option<(u64, u64)> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    let own = root.join(own);
    let number =
        |path: &Path, file: &str| -> Option<u64> { fs::read_to_string(path.join(file)).ok()?.trim().parse().ok() };
    own.ancestors()
        .take_while(|path| path.starts_with(root))
        // A limit of "max" is no number, and no limit.
        .filter_map(|path| Some((number(path, "memory.max")?, number(path, "memory.current")?)))
        .min_by_key(|(limit, used)| limit.saturating_sub(*used))
}

/// Processors that this process may use.
pub(super) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Whether shared memory without a file can be made, which host pools live in.
pub(super) fn memfd() -> Result<(), String> {
    let file = rustix::fs::memfd_create("kvdock-doctor", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(|error| error.to_string())?;
    rustix::fs::ftruncate(&file, 4096).map_err(|error| error.to_string())
}

/// Whether the kernel lets this process use io_uring.
pub(super) fn io_uring() -> Result<(), String> {
    // The kernel's io_uring_params: 120 bytes, all zero for a plain ring.
    let mut params = [0_u64; 15];
    // SAFETY: io_uring_setup reads and writes one io_uring_params at the pointer, which is 120
    // bytes, aligned to 8, and outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, params.as_mut_ptr()) };
    match i32::try_from(result) {
        Ok(fd) if fd >= 0 => {
            // SAFETY: the kernel has just given this descriptor to us alone.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
            Ok(())
        }
        _ => Err(std::io::Error::last_os_error().to_string()),
    }
}

/// Bytes that may be locked in memory; `None` is no limit.
pub(super) fn memlock() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// Descriptors that may be open at once; `None` is no limit.
pub(super) fn open_files() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// Lets this process open as many files as it may. The usual soft limit of 1,024 is there for programs that count descriptors in a bit field; a
/// server has one for each connection, and plugins for each peer. Gives the limit before and after; none where it can't be raised.
pub(super) fn raise_open_files() -> Option<(u64, u64)> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let (before, after) = raised(limit.current, limit.maximum)?;
    let raised = rustix::process::Rlimit { current: Some(after), maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).ok()?;
    Some((before, after))
}

/// The soft limit of open files, and what to raise it to; none where it is high enough.
fn raised(soft: Option<u64>, hard: Option<u64>) -> Option<(u64, u64)> {
    // More helps nobody, and some libraries walk through all numbers that there may be.
    const ENOUGH: u64 = 1 << 19;
    let soft = soft?;
    let to = hard.unwrap_or(ENOUGH).min(ENOUGH);
    (soft < to).then_some((soft, to))
}

/// What the kernel says of huge pages, in words.
pub(super) fn huge_pages() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let transparent = read("/sys/kernel/mm/transparent_hugepage/enabled");
    let chosen =
        transparent.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("unknown", |(word, _)| word);
    let reserved = read("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
    let reserved = if reserved.is_empty() { "unknown".to_owned() } else { reserved };
    format!("transparent: {chosen}; reserved of 2 MiB: {reserved}")
}

/// Bytes free to this user and in all, on the file system that holds `path`.
pub(super) fn disk(path: &Path) -> Result<(u64, u64), String> {
    let text =
        CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| "the path holds a zero byte".to_owned())?;
    let stat = rustix::fs::statvfs(text.as_c_str()).map_err(|error| error.to_string())?;
    Ok((stat.f_bavail.saturating_mul(stat.f_frsize), stat.f_blocks.saturating_mul(stat.f_frsize)))
}

/// `bytes` for people.
pub(super) fn size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_open_files_goes_up_to_the_hard_one_and_never_down() {
        assert_eq!(raised(Some(1024), Some(4096)), Some((1024, 4096)));
        assert_eq!(raised(Some(1024), None), Some((1024, 1 << 19)));
        assert_eq!(raised(Some(1024), Some(1 << 30)), Some((1024, 1 << 19)));
        assert_eq!(raised(Some(4096), Some(4096)), None);
        assert_eq!(raised(Some(1 << 20), Some(1 << 20)), None);
        assert_eq!(raised(None, None), None);
    }

    #[test]
    fn meminfo_is_in_kibibytes() {
        let text = "MemTotal:       16000 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\n";
        let expected = Memory { total: 16_000 * 1024, available: 8_000 * 1024 };
        assert_eq!(parse_meminfo(text), Some(expected));
        assert_eq!(parse_meminfo("MemTotal: x kB\n"), None);
    }

    #[test]
    fn this_machine_has_memory_and_processors() {
        let memory = memory().unwrap();
        assert!(memory.total > 0 && memory.available <= memory.total);
        assert!(cpus() >= 1);
        assert!(disk(Path::new("/")).unwrap().1 > 0);
        assert!(disk(Path::new("/no/such/folder")).is_err());
    }
}
