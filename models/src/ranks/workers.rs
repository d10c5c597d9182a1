//! The threads of the ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// What every rank is to do, by its number.
type Body = dyn Fn(usize) + Sync;

/// A body that outlives the work on it: [`Workers::run`] does not return before all ranks are done.
struct Work(*const Body);

// SAFETY: the body is `Sync`, so that it may be called from any thread; the pointer is used only while it lives, see `Workers::run`.
unsafe impl Send for Work {}

/// A thread for each rank.
pub(super) struct Workers {
    queues: Vec<Sender<Work>>,
    done: Receiver<()>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts `ranks` threads.
    pub(super) fn start(ranks: usize) -> std::io::Result<Self> {
        let (ended, done) = channel();
        let mut workers = Self { queues: Vec::new(), done, threads: Vec::new() };
        for rank in 0..ranks {
            let (queue, work) = channel::<Work>();
            let ended = ended.clone();
            let thread = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(move || {
                while let Ok(Work(body)) = work.recv() {
                    // SAFETY: `run` waits for this thread's word before it lets go of the body.
                    let body = unsafe { &*body };
                    // The body catches its own panics; one that slips through must not keep `run` waiting.
                    let _ = catch_unwind(AssertUnwindSafe(|| body(rank)));
                    if ended.send(()).is_err() {
                        return;
                    }
                }
            })?;
            workers.queues.push(queue);
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    /// Calls `body` with every rank's number, on the rank's thread; returns when all calls have.
    pub(super) fn run(&mut self, body: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime of the pointee is changed; every thread that got the pointer is waited for below.
        let body: *const Body = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Body>(body) };
        // A thread ends only when its queue does, so each takes its work.
        let begun = self.queues.iter().filter(|queue| queue.send(Work(body)).is_ok()).count();
        for _ in 0..begun {
            if self.done.recv().is_err() {
                // All threads are gone, and none holds the body any more.
                return;
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.queues.clear();
        for thread in self.threads.drain(..) {
            // Its panics were caught.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn every_rank_works_on_its_own_thread() {
        let mut workers = Workers::start(3).unwrap();
        for _ in 0..3 {
            let names = Mutex::new(vec![String::new(); 3]);
            workers.run(&|rank| {
                let name = std::thread::current().name().unwrap_or_default().to_owned();
                names.lock().unwrap()[rank] = name;
            });
            assert_eq!(*names.lock().unwrap(), ["rank-0", "rank-1", "rank-2"]);
        }
    }

    #[test]
    fn a_panic_keeps_nobody_waiting() {
        let mut workers = Workers::start(2).unwrap();
        workers.run(&|rank| assert!(rank == 0));
        let ran = Mutex::new(0);
        workers.run(&|_| *ran.lock().unwrap() += 1);
        assert_eq!(*ran.lock().unwrap(), 2);
    }
}
