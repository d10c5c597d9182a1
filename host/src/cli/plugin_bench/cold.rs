//! Takes files out of the page cache, so that a read of them is one from the disk.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::fs::{Advice, fadvise, syncfs};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const PAGE: usize = 4096;

/// Writes what lies below `folder` to the disk and drops it from the page cache. Answers the part of it that stayed in memory, 0 to 1;
/// a folder in memory keeps everything.
pub(super) fn drop_cached(folder: &Path) -> io::Result<f64> {
    // Once for all files: what is not written yet can't be dropped.
    syncfs(File::open(folder)?)?;
    let (mut resident, mut all) = (0, 0);
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                let file = File::open(entry.path())?;
                fadvise(&file, 0, None, Advice::DontNeed)?;
                let (in_memory, pages) = residency(&file)?;
                resident += in_memory;
                all += pages;
            }
        }
    }
    Ok(if all == 0 { 0.0 } else { resident as f64 / all as f64 })
}

/// Pages of a file that are in the page cache, and pages in all.
fn residency(file: &File) -> io::Result<(u64, u64)> {
    let len = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
    if len == 0 {
        return Ok((0, 0));
    }
    let mut pages = vec![0u8; len.div_ceil(PAGE)];
    // SAFETY: a new mapping at an address of the kernel's choice; nobody reads through it.
    let base = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0) }?;
    // SAFETY: the mapping has `len` bytes from `base`; `pages` has a byte for each of its pages of at least 4096 bytes.
    let answered = unsafe { libc::mincore(base, len, pages.as_mut_ptr().cast()) };
    let error = io::Error::last_os_error();
    // SAFETY: what was just mapped, which nobody else knows.
    unsafe { munmap(base, len) }?;
    if answered != 0 {
        return Err(error);
    }
    Ok((pages.iter().filter(|page| **page & 1 != 0).count() as u64, pages.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_just_written_is_in_memory_and_can_be_dropped() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("deep");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), vec![7u8; 1 << 20]).unwrap();
        fs::write(path.join("empty"), "").unwrap();
        let file = File::open(path.join("file")).unwrap();
        assert_eq!(residency(&file).unwrap(), (256, 256));
        let stayed = drop_cached(folder.path()).unwrap();
        assert!((0.0..=1.0).contains(&stayed));
        assert_eq!(residency(&file).unwrap().0, (stayed * 256.0).round() as u64);
        assert!(drop_cached(&folder.path().join("none")).is_err());
    }
}
