//! Memory for the first pages of a pool before they are used.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::mm::Advice;

use super::memory::Region;

/// Bytes that the system is asked for at once: what may be waited for when a pool goes.
const STEP: usize = 4 << 20;

/// A thread that has the system back ranges of memory. It ends when this is dropped, which is to come before the memory goes.
pub(super) struct Prefault {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Prefault {
    /// Backs these ranges of bytes of the regions, in order. A prefix that comes from storage right after a start would otherwise pay for
    /// its memory page fault by page fault, twice as long as it takes to copy. Without a thread memory comes with its first use.
    ///
    /// # Safety
    /// The regions live longer than what is returned.
    pub(super) unsafe fn start(ranges: Vec<(&Region, Range<usize>)>) -> Self {
        let places: Vec<(usize, usize)> = ranges
            .into_iter()
            .filter(|(region, range)| range.start < range.end && range.end <= region.len())
            .map(|(region, range)| (region.as_ptr() as usize + range.start, range.len()))
            .collect();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let work = move || {
            for (start, len) in places {
                for at in (0..len).step_by(STEP) {
                    if stopped.load(Ordering::Relaxed) {
                        return;
                    }
                    back(start + at, STEP.min(len - at));
                }
            }
        };
        let thread = std::thread::Builder::new().name("kernel-prefault".to_owned()).spawn(work).ok();
        Self { stop, thread }
    }

    /// Waits until all ranges are backed.
    #[cfg(test)]
    pub(super) fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Has the system back the pages that these bytes lie in.
fn back(start: usize, len: usize) {
    let page = rustix::param::page_size();
    let first = start / page * page;
    let place = std::ptr::without_provenance_mut::<c_void>(first);
    // SAFETY: whole pages of a mapping, which lives until this thread has ended. Populating changes no content, so others may use the
    // pages meanwhile. Only advice: a kernel that does not know it leaves the pages to their first use.
    let _ = unsafe { rustix::mm::madvise(place, start + len - first, Advice::LinuxPopulateWrite) };
}

impl Drop for Prefault {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It does not panic, and what it left undone does no harm.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of these bytes that have memory.
    fn backed(start: usize, len: usize) -> usize {
        let page = rustix::param::page_size();
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        let mut entries = vec![0u8; len / page * 8];
        std::os::unix::fs::FileExt::read_exact_at(&pagemap, &mut entries, (start / page * 8) as u64).unwrap();
        entries.as_chunks::<8>().0.iter().filter(|entry| u64::from_ne_bytes(**entry) >> 63 == 1).count()
    }

    #[test]
    fn ranges_are_backed_and_nothing_else() {
        let page = rustix::param::page_size();
        let mut region = Region::zeroed(64 * page, "test").unwrap();
        let start = region.as_ptr() as usize;
        assert_eq!(backed(start, region.len()), 0);
        // SAFETY: the region is dropped after it.
        let mut prefault =
            unsafe { Prefault::start(vec![(&region, 0..3 * page), (&region, 10 * page + 5..12 * page)]) };
        prefault.wait();
        drop(prefault);
        assert_eq!(backed(start, 10 * page), 3);
        assert_eq!(backed(start + 10 * page, 54 * page), 2);
        assert!(region.as_mut_slice().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn memory_may_go_before_all_of_it_is_backed() {
        for _ in 0..20 {
            let region = Region::zeroed(1 << 30, "test").unwrap();
            // SAFETY: the region is dropped after it.
            drop(unsafe { Prefault::start(vec![(&region, 0..1 << 30)]) });
        }
    }
}
