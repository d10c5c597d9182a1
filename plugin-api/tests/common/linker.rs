//! The linker face of the backend in memory: a thread a batch, a thread for the offloads.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use kvdock_plugin_api::*;

use super::{Memory, Pages, copy_out, lock};

/// What is queued and what runs.
#[derive(Default)]
pub struct Queues {
    loads: Mutex<Vec<Load>>,
    batches: Mutex<HashMap<u64, Running>>,
    offloads: Mutex<VecDeque<(u64, Option<Result<()>>)>>,
    /// One offload at a time runs, in the order of their numbers here.
    turns: Mutex<Turns>,
    turn: Condvar,
    stop: Mutex<Arc<AtomicBool>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// A batch: how to end it, and its thread.
type Running = (Arc<AtomicBool>, JoinHandle<Result<()>>);

#[derive(Default)]
struct Turns {
    given: u64,
    now: u64,
}

/// Waits for every sign, or for an end before that.
fn wait(ready: &[Ready], check: &dyn Fn() -> Result<()>) -> Result<()> {
    for ready in ready {
        while !ready.is_set()? {
            check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    check()
}

fn stopped(stop: &AtomicBool) -> Result<()> {
    match stop.load(Ordering::Acquire) {
        true => Err(Error::new(ErrorKind::Cancelled, "the host ended it")),
        false => Ok(()),
    }
}

fn fill(pages: &Mutex<Pages>, loads: Vec<Load>, start: &Start, stop: &AtomicBool) -> Result<()> {
    let check = || stopped(stop).and_then(|()| start.call.check());
    let mut ended = wait(&start.ready, &check);
    for page in loads.into_iter().flat_map(Load::into_pages) {
        ended = ended.and_then(|()| check());
        match ended {
            Ok(()) => copy_out(pages, page),
            Err(_) => page.finish(PageStatus::Failed),
        }
    }
    start.done.settle_all();
    ended
}

fn store(pages: &Mutex<Pages>, offload: &Offload, stop: &AtomicBool) -> Result<()> {
    let check = || {
        stopped(stop)?;
        match offload.deadline_ns {
            0 => Ok(()),
            deadline if monotonic_ns() < deadline => Ok(()),
            _ => Err(Error::new(ErrorKind::TimedOut, "the deadline of the offload has passed")),
        }
    };
    let bytes = |page: Page<'static, Set>| Ok(((page.pool().name().to_owned(), *page.key()), page.to_vec()?));
    let result = wait(&offload.ready, &check).and_then(|()| offload.pages().map(bytes).collect::<Result<Vec<_>>>());
    let status = if result.is_ok() { PageStatus::Ok } else { PageStatus::Failed };
    let result = result.map(|stored| {
        // All pages become visible at once.
        let mut pages = lock(pages);
        stored.into_iter().for_each(|(name, bytes)| {
            pages.entry(name).or_insert(bytes);
        });
    });
    offload.pages().for_each(|page| page.finish(status));
    result
}

impl Queues {
    /// Ends everything that is queued or runs.
    pub fn end(&self) {
        lock(&self.loads).clear();
        let stop = std::mem::take(&mut *lock(&self.stop));
        stop.store(true, Ordering::Release);
        for (stop, thread) in std::mem::take(&mut *lock(&self.batches)).into_values() {
            stop.store(true, Ordering::Release);
            let _ = thread.join().unwrap();
        }
        std::mem::take(&mut *lock(&self.threads)).into_iter().for_each(|thread| thread.join().unwrap());
        lock(&self.offloads).clear();
    }
}

impl Linker for Memory {
    type Backend = Memory;

    fn lookup(backend: &Memory, exists: &mut Exists<'_>) -> Result<()> {
        backend.batch_exists(exists)
    }

    fn load(backend: &Memory, load: Load) -> Result<()> {
        lock(&backend.queues.loads).push(load);
        Ok(())
    }

    fn start_layer_wise_loading(backend: &Memory, start: Start) -> Result<()> {
        let loads = std::mem::take(&mut *lock(&backend.queues.loads));
        let (pages, stop, batch) = (backend.pages.clone(), Arc::new(AtomicBool::new(false)), start.batch);
        let thread = std::thread::spawn({
            let stop = stop.clone();
            move || {
                if loads.is_empty() {
                    start.done.settle_all();
                    return Ok(());
                }
                fill(&pages, loads, &start, &stop)
            }
        });
        lock(&backend.queues.batches).insert(batch, (stop, thread));
        Ok(())
    }

    fn finish_layer_wise_loading(backend: &Memory, call: &Call<'_>, batch: u64) -> Result<()> {
        let running = lock(&backend.queues.batches).remove(&batch);
        let (stop, thread) =
            running.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("batch {batch} does not run")))?;
        let mut late = Ok(());
        while !thread.is_finished() && late.is_ok() {
            late = call.check();
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(late.is_err(), Ordering::Release);
        let ended = thread.join().unwrap();
        if ended.is_err() { late.and(ended) } else { Ok(()) }
    }

    fn cancel_queued_load(backend: &Memory, request: u64) -> Result<()> {
        let mut loads = lock(&backend.queues.loads);
        let queued = loads.iter().position(|load| load.request == request);
        let queued =
            queued.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("request {request} is not queued")))?;
        loads.remove(queued);
        Ok(())
    }

    fn offload(backend: &Memory, offload: Offload) -> Result<()> {
        let (queues, pages, host) = (backend.queues.clone(), backend.pages.clone(), backend.host);
        let stop = lock(&queues.stop).clone();
        lock(&queues.offloads).push_back((offload.operation, None));
        let mine = {
            let mut turns = lock(&queues.turns);
            turns.given += 1;
            turns.given - 1
        };
        let thread = std::thread::spawn(move || {
            let turns = queues.turn.wait_while(lock(&queues.turns), |turns| turns.now != mine).unwrap();
            drop(turns);
            let result = store(&pages, &offload, &stop);
            if let Some(entry) = lock(&queues.offloads).iter_mut().find(|entry| entry.1.is_none()) {
                entry.1 = Some(result);
            }
            lock(&queues.turns).now += 1;
            queues.turn.notify_all();
            host.offload_completed();
        });
        lock(&backend.queues.threads).push(thread);
        Ok(())
    }

    fn num_completed_offloads(backend: &Memory) -> u64 {
        lock(&backend.queues.offloads).iter().take_while(|entry| entry.1.is_some()).count() as u64
    }

    fn pop_completed_offload(backend: &Memory) -> Option<Completed> {
        let mut offloads = lock(&backend.queues.offloads);
        let result = offloads.front()?.1.clone()?;
        offloads.pop_front().map(|(operation, _)| Completed { operation, result })
    }

    fn reset(backend: &Memory, _: &Call<'_>) -> Result<()> {
        backend.queues.end();
        Ok(())
    }
}
