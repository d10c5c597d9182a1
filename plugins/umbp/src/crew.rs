//! Threads that are kept, for work that a caller shares with them.
//!
//! To start a thread takes as long as copying half a megabyte, and most calls copy only a few. A caller never waits for a thread to come:
//! what none of them has begun it does itself.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

/// Threads that wait for work.
#[derive(Debug)]
pub struct Crew {
    shared: Arc<Shared>,
    /// How many there may be, besides those who call.
    most: usize,
    /// Those that there are: none before the first work for them.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    offers: Mutex<Offers>,
    /// There is an offer, or an end.
    come: Condvar,
}

#[derive(Debug, Default)]
struct Offers {
    open: Vec<Offer>,
    ended: bool,
}

/// Work that so many more threads may join.
#[derive(Debug)]
struct Offer {
    task: Arc<Task>,
    room: usize,
}

/// Work over items, shared by threads.
struct Task {
    work: *const (dyn Fn(usize) + Sync),
    count: usize,
    next: AtomicUsize,
    /// Items that are done.
    done: Mutex<usize>,
    all_done: Condvar,
    panic: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

// SAFETY: `work` is called only for an item below `count`, and `Crew::share` returns only after every such call has ended.
unsafe impl Send for Task {}
// SAFETY: as for `Send`; the work is `Sync`.
unsafe impl Sync for Task {}

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Task").field("count", &self.count).field("next", &self.next).finish_non_exhaustive()
    }
}

impl Task {
    fn run(&self) {
        let mut mine = 0;
        loop {
            let item = self.next.fetch_add(1, Ordering::Relaxed);
            if item >= self.count {
                break;
            }
            // SAFETY: this item is not counted as done yet, so the one who shares it waits and the work lives.
            let work = unsafe { &*self.work };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(item))) {
                self.panic.lock().get_or_insert(panic);
            }
            mine += 1;
        }
        if mine > 0 {
            let mut done = self.done.lock();
            *done += mine;
            if *done == self.count {
                self.all_done.notify_all();
            }
        }
    }
}

impl Crew {
    /// Up to `most` threads, which start when there is work for them.
    pub fn new(most: usize) -> Crew {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Crew { shared: Arc::default(), most: most.min(processors.saturating_sub(1)), threads: Mutex::default() }
    }

    /// Runs work over `count` items, by `threads` threads at most, of which the caller is one. When it returns, all of it is done.
    ///
    /// # Panics
    /// When the work did.
    pub fn share(&self, count: usize, threads: usize, work: impl Fn(usize) + Sync) {
        let more = threads.min(count).saturating_sub(1).min(self.most);
        if more == 0 || !self.start(more) {
            return (0..count).for_each(work);
        }
        let work: &(dyn Fn(usize) + Sync) = &work;
        // SAFETY: only the lifetime changes. Whoever calls it does so for an item, and this function returns after the last item is done.
        let work: *const (dyn Fn(usize) + Sync + 'static) =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), _>(std::ptr::from_ref(work)) };
        let task = Arc::new(Task {
            work,
            count,
            next: AtomicUsize::new(0),
            done: Mutex::new(0),
            all_done: Condvar::new(),
            panic: Mutex::default(),
        });
        self.shared.offers.lock().open.push(Offer { task: task.clone(), room: more });
        for _ in 0..more {
            self.shared.come.notify_one();
        }
        task.run();
        self.shared.offers.lock().open.retain(|offer| !Arc::ptr_eq(&offer.task, &task));
        let mut done = task.done.lock();
        while *done < count {
            task.all_done.wait(&mut done);
        }
        drop(done);
        let panic = task.panic.lock().take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Sees to it that there are so many threads; false when there is none.
    fn start(&self, wanted: usize) -> bool {
        let mut threads = self.threads.lock();
        while threads.len() < wanted {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name(format!("kvdock-umbp-copy-{}", threads.len()));
            let Ok(thread) = thread.spawn(move || shared.work()) else { break };
            threads.push(thread);
        }
        !threads.is_empty()
    }
}

impl Shared {
    fn work(&self) {
        let mut offers = self.offers.lock();
        while !offers.ended {
            let offer = offers.open.iter_mut().find(|offer| offer.room > 0);
            let Some(offer) = offer else {
                self.come.wait(&mut offers);
                continue;
            };
            offer.room -= 1;
            let task = offer.task.clone();
            parking_lot::MutexGuard::unlocked(&mut offers, || task.run());
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.offers.lock().ended = true;
        self.shared.come.notify_all();
        for thread in self.threads.get_mut().drain(..) {
            // It can't have panicked: work runs inside of `catch_unwind`.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `Crew::new`, on a machine with enough processors.
    fn crew(most: usize) -> Crew {
        let mut crew = Crew::new(0);
        crew.most = most;
        crew
    }

    #[test]
    fn every_item_is_done_once_whoever_calls() {
        let crew = crew(3);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for count in [0usize, 1, 2, 5, 200] {
                        let hits: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                        crew.share(count, 4, |item| {
                            hits[item].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1), "{count}");
                    }
                });
            }
        });
        assert!(crew.shared.offers.lock().open.is_empty());
        assert!(crew.threads.lock().len() <= 3);
    }

    #[test]
    fn threads_take_part_and_none_is_started_without_need() {
        let crew = crew(2);
        crew.share(100, 1, |_| {});
        assert_eq!(crew.threads.lock().len(), 0);
        // Each of two items waits for the other: one thread alone would never end.
        let both = std::sync::Barrier::new(2);
        crew.share(2, 2, |_| {
            both.wait();
        });
        assert_eq!(crew.threads.lock().len(), 1, "one more than who calls");
    }

    #[test]
    fn a_panic_reaches_the_caller_after_all_is_done() {
        let crew = crew(2);
        let done = AtomicUsize::new(0);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            crew.share(50, 3, |item| {
                done.fetch_add(1, Ordering::Relaxed);
                assert!(item != 7, "planted");
            });
        }));
        assert!(caught.is_err());
        assert_eq!(done.load(Ordering::Relaxed), 50);
        crew.share(3, 3, |_| {});
    }
}
