//! A pool of threads that runs the indices of a batch.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use parking_lot::{Condvar, Mutex};

/// One batch that threads take indices from.
struct Task {
    body: *const (dyn Fn(usize) + Sync),
    count: usize,
    next: AtomicUsize,
    finished: Mutex<usize>,
    all_finished: Condvar,
    panicked: AtomicBool,
}

// SAFETY: `body` is called only for an index below `count`, and `run` returns only after every such call has ended.
unsafe impl Send for Task {}
// SAFETY: as for `Send`; the body is `Sync`.
unsafe impl Sync for Task {}

impl Task {
    fn work(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.count {
                return;
            }
            // SAFETY: `run` waits for this index, so the body lives.
            let body = unsafe { &*self.body };
            if catch_unwind(AssertUnwindSafe(|| body(index))).is_err() {
                self.panicked.store(true, Ordering::Release);
            }
            let mut finished = self.finished.lock();
            *finished += 1;
            if *finished == self.count {
                self.all_finished.notify_all();
            }
        }
    }
}

/// Threads that live as long as the store.
#[derive(Debug)]
pub struct Threads {
    queue: Option<Sender<Arc<Task>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    /// A pool of `count` threads.
    pub fn new(count: usize) -> io::Result<Threads> {
        let (queue, tasks): (Sender<Arc<Task>>, Receiver<Arc<Task>>) = unbounded();
        let mut pool = Threads { queue: Some(queue), threads: Vec::with_capacity(count) };
        for number in 0..count {
            let tasks = tasks.clone();
            let named = std::thread::Builder::new().name(format!("kvdock-file-{number}"));
            pool.threads.push(named.spawn(move || tasks.iter().for_each(|task| task.work()))?);
        }
        Ok(pool)
    }

    /// Calls `body` for every index below `count`, on the pool's threads and this one, and returns when all calls have ended.
    ///
    /// # Panics
    /// When a call panicked.
    pub fn run(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        if count == 0 {
            return;
        }
        // SAFETY: only the lifetime changes; this function returns after the last call of the body.
        let body: *const (dyn Fn(usize) + Sync + 'static) =
            unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), _>(std::ptr::from_ref(body)) };
        let task = Arc::new(Task {
            body,
            count,
            next: AtomicUsize::new(0),
            finished: Mutex::new(0),
            all_finished: Condvar::new(),
            panicked: AtomicBool::new(false),
        });
        if let Some(queue) = &self.queue {
            for _ in 1..count.min(self.threads.len() + 1) {
                // Without receivers this thread does all of the work.
                let _ = queue.send(task.clone());
            }
        }
        task.work();
        let mut finished = task.finished.lock();
        while *finished < count {
            task.all_finished.wait(&mut finished);
        }
        drop(finished);
        assert!(!task.panicked.load(Ordering::Acquire), "an operation of the batch panicked");
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.queue = None;
        for thread in self.threads.drain(..) {
            // A worker can't panic: every body runs inside of `catch_unwind`.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_of_many_threads_share_the_pool() {
        let pool = Threads::new(4).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for count in [0usize, 1, 3, 100] {
                        let hits: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                        pool.run(count, &|index| {
                            hits[index].fetch_add(1, Ordering::Relaxed);
                        });
                        assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_after_the_batch_has_ended() {
        let pool = Threads::new(2).unwrap();
        let ended = AtomicUsize::new(0);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(50, &|index| {
                ended.fetch_add(1, Ordering::Relaxed);
                assert!(index != 7, "planted");
            });
        }));
        assert!(caught.is_err());
        assert_eq!(ended.load(Ordering::Relaxed), 50);
        pool.run(3, &|_| {});
    }
}
