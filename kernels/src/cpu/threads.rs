//! A small pool of threads for loops that take microseconds.
//!
//! A forward step has hundreds of parallel loops of 10 to 1000 µs each. So a worker that runs
//! out of work spins for a while before it sleeps, and a caller never waits for a worker that
//! has not started on its loop: tasks are taken one by one from a counter, the caller takes
//! them too, and a worker that comes late finds the loop closed. Where tasks read one stream of
//! memory, each thread has a run of them of its own ([`ThreadPool::run_streams`]), so that what
//! it fetches ahead is what it comes to next; who ends early takes from the others' runs.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::error::KernelError;

/// How long a worker without work spins before it sleeps.
const SPIN: Duration = Duration::from_micros(60);

/// Runs that the tasks of a loop are cut into at most: each has a counter to be set anew for each loop.
const MOST_RUNS: usize = 16;

/// The loop that is open now: how many tasks in how many runs, and what to do for each.
#[derive(Clone, Copy)]
struct Loop {
    body: *const (dyn Fn(usize) + Sync),
    tasks: usize,
    runs: usize,
}

impl Loop {
    /// Where run `run` begins; it ends where the next begins.
    fn begin(&self, run: usize) -> usize {
        (self.tasks / self.runs) * run + run.min(self.tasks % self.runs)
    }
}

/// The next task of a run, on a cache line of its own.
#[repr(align(128))]
struct Next(AtomicUsize);

struct Shared {
    /// Number of the loop in the high bits, [`CLOSED`], and the number of workers inside.
    state: AtomicU64,
    /// Written only while the state is closed and no worker is inside; read only by workers
    /// that have entered.
    current: UnsafeCell<Option<Loop>>,
    /// Of each run; at or beyond its end if none is left.
    next: Box<[Next]>,
    stop: AtomicBool,
    failure: Mutex<Option<String>>,
    asleep: Box<[AtomicBool]>,
}

// SAFETY: `current` is guarded by `state` as its comment says; the body it points to is Sync
// and outlives the loop, since `ThreadPool::run` returns only after closing it and seeing all
// workers leave.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

const CLOSED: u64 = 1 << 20;
const LOOP: u64 = 1 << 21;

/// Threads that share the tasks of a loop.
pub(super) struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<Thread>,
    handles: Vec<JoinHandle<()>>,
    /// Held by the caller whose loop is running; holds the number of the last loop.
    turn: Mutex<u64>,
}

impl ThreadPool {
    /// A pool in which `threads` threads work on a loop, the caller being one of them.
    pub(super) fn new(threads: usize) -> Result<Self, KernelError> {
        let count = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            state: AtomicU64::new(CLOSED),
            current: UnsafeCell::new(None),
            next: (0..threads.clamp(1, MOST_RUNS)).map(|_| Next(AtomicUsize::new(0))).collect(),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
            asleep: (0..count).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool =
            Self { shared: Arc::clone(&shared), workers: Vec::new(), handles: Vec::new(), turn: Mutex::new(0) };
        for index in 0..count {
            let shared = Arc::clone(&shared);
            let handle = std::thread::Builder::new()
                .name(format!("kernel-{}", index + 1))
                .spawn(move || work(&shared, index))
                .map_err(|e| KernelError::Parameter {
                    what: "threads",
                    reason: format!("cannot start thread {} of {threads}: {e}", index + 2),
                })?;
            pool.workers.push(handle.thread().clone());
            pool.handles.push(handle);
        }
        Ok(pool)
    }

    /// Threads that work on a loop, the caller included.
    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body(0)` to `body(tasks - 1)`, each once, in any order and on any threads; returns
    /// when all are done. A panic in a task becomes an error; other tasks may then be left out. Must
    /// not be called from a task.
    pub(super) fn run(&self, op: &'static str, tasks: usize, body: &(dyn Fn(usize) + Sync)) -> Result<(), KernelError> {
        self.run_in(1, op, tasks, body)
    }

    /// As [`Self::run`], for tasks that read memory one after another: each thread begins with a run of neighbours.
    pub(super) fn run_streams(
        &self,
        op: &'static str,
        tasks: usize,
        body: &(dyn Fn(usize) + Sync),
    ) -> Result<(), KernelError> {
        self.run_in(self.shared.next.len(), op, tasks, body)
    }

    fn run_in(
        &self,
        runs: usize,
        op: &'static str,
        tasks: usize,
        body: &(dyn Fn(usize) + Sync),
    ) -> Result<(), KernelError> {
        let failed = |reason: String| KernelError::Worker { op, reason };
        if self.workers.is_empty() || tasks <= 1 {
            return catch_unwind(AssertUnwindSafe(|| (0..tasks).for_each(body)))
                .map_err(|panic| failed(message(&*panic)));
        }

        let mut turn = self.turn.lock();
        *turn = turn.wrapping_add(LOOP) & !(LOOP - 1);
        let shared = &*self.shared;
        // SAFETY: only the lifetime of the pointee is changed. The pointer is used by workers
        // inside the loop only, and all have left before this function returns.
        let body: *const (dyn Fn(usize) + Sync) =
            unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(body) };
        let job = Loop { body, tasks, runs };
        // SAFETY: the state is closed and no worker is inside: the loop before this one ended
        // so, and `turn` keeps other callers away.
        unsafe { *shared.current.get() = Some(job) };
        for (run, next) in shared.next[..runs].iter().enumerate() {
            next.0.store(job.begin(run), Ordering::Relaxed);
        }
        // SeqCst with the load of `asleep` below: either this thread sees that a worker sleeps,
        // or the worker sees the new loop before it falls asleep.
        shared.state.store(*turn, Ordering::SeqCst);
        for (asleep, worker) in shared.asleep.iter().zip(&self.workers) {
            if asleep.load(Ordering::SeqCst) {
                worker.unpark();
            }
        }

        shared.take_tasks(job, 0);

        shared.state.fetch_or(CLOSED, Ordering::AcqRel);
        let mut spins = 0u32;
        while shared.state.load(Ordering::Acquire) & (CLOSED - 1) != 0 {
            spins += 1;
            if spins < 10_000 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        match shared.failure.lock().take() {
            Some(reason) => Err(failed(reason)),
            None => Ok(()),
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in &self.workers {
            worker.unpark();
        }
        for handle in self.handles.drain(..) {
            // Tasks' panics are caught, so a worker ends only by being told to.
            let _ = handle.join();
        }
    }
}

impl Shared {
    /// Takes and does tasks until none is left, those of the thread's own run first.
    fn take_tasks(&self, job: Loop, thread: usize) {
        let done = catch_unwind(AssertUnwindSafe(|| {
            for run in (0..job.runs).map(|step| (thread + step) % job.runs) {
                let (next, end) = (&self.next[run].0, job.begin(run + 1));
                while next.load(Ordering::Relaxed) < end {
                    let task = next.fetch_add(1, Ordering::Relaxed);
                    if task >= end {
                        break;
                    }
                    // SAFETY: the caller of `run` keeps the body alive until all threads have left.
                    unsafe { (*job.body)(task) };
                }
            }
        }));
        if let Err(panic) = done {
            // Nobody needs the rest of the tasks.
            for next in &self.next[..job.runs] {
                next.0.store(job.tasks, Ordering::Relaxed);
            }
            *self.failure.lock() = Some(message(&*panic));
        }
    }

    /// Enters the loop if it is open and not the one numbered `seen`. Returns its number.
    fn enter(&self, seen: u64) -> Option<u64> {
        let mut state = self.state.load(Ordering::SeqCst);
        loop {
            let number = state & !(LOOP - 1);
            if state & CLOSED != 0 || number == seen {
                return None;
            }
            match self.state.compare_exchange_weak(state, state + 1, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return Some(number),
                Err(now) => state = now,
            }
        }
    }
}

fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    let mut idle_since = Instant::now();
    let mut spins = 0u32;
    while !shared.stop.load(Ordering::Relaxed) {
        if let Some(number) = shared.enter(seen) {
            // SAFETY: this worker is inside, so `current` is not written.
            if let Some(job) = unsafe { *shared.current.get() } {
                shared.take_tasks(job, index + 1);
            }
            shared.state.fetch_sub(1, Ordering::AcqRel);
            seen = number;
            idle_since = Instant::now();
            continue;
        }
        std::hint::spin_loop();
        spins = spins.wrapping_add(1);
        if !spins.is_multiple_of(64) || idle_since.elapsed() < SPIN {
            continue;
        }
        let asleep = &shared.asleep[index];
        asleep.store(true, Ordering::SeqCst);
        let state = shared.state.load(Ordering::SeqCst);
        let work_waits = state & CLOSED == 0 && state & !(LOOP - 1) != seen;
        if !work_waits && !shared.stop.load(Ordering::SeqCst) {
            std::thread::park();
        }
        asleep.store(false, Ordering::SeqCst);
        idle_since = Instant::now();
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "panic".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn each_task_once(pool: &ThreadPool, tasks: usize) {
        let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        pool.run("test", tasks, &|i| {
            counts[i].fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        pool.run_streams("test", tasks, &|i| {
            counts[i].fetch_add(1, Ordering::Relaxed);
        })
        .unwrap();
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 2));
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 8, MOST_RUNS + 1] {
            let pool = ThreadPool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            for round in 0..2000 {
                each_task_once(&pool, round % 23);
            }
        }
    }

    #[test]
    fn sleeping_workers_wake_up() {
        let pool = ThreadPool::new(4).unwrap();
        for _ in 0..20 {
            std::thread::sleep(SPIN * 3);
            each_task_once(&pool, 64);
        }
    }

    #[test]
    fn a_worker_really_takes_part() {
        let pool = ThreadPool::new(2).unwrap();
        // Two tasks that wait for each other end only if two threads run them.
        let arrived = AtomicUsize::new(0);
        pool.run("test", 2, &|_| {
            arrived.fetch_add(1, Ordering::SeqCst);
            let start = Instant::now();
            while arrived.load(Ordering::SeqCst) < 2 {
                assert!(start.elapsed() < Duration::from_secs(20), "alone");
                std::thread::yield_now();
            }
        })
        .unwrap();
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_goes_on() {
        for threads in [1, 3] {
            let pool = ThreadPool::new(threads).unwrap();
            let e = pool.run("test", 100, &|i| assert_ne!(i, 37, "task {i}")).unwrap_err();
            assert!(e.to_string().contains("task 37"), "{e}");
            let e = pool.run_streams("test", 100, &|i| assert_ne!(i, 37, "task {i}")).unwrap_err();
            assert!(e.to_string().contains("task 37"), "{e}");
            each_task_once(&pool, 100);
        }
    }

    #[test]
    fn several_callers_take_turns() {
        let pool = ThreadPool::new(3).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..200).for_each(|n| each_task_once(&pool, n)));
            }
        });
    }
}
