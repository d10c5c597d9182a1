//! The linker face of the slow storage: the layers of a load settle at a fixed pace.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{
    Backend, Call, Completed, Error, ErrorKind, Exists, Get, Linker, Load, Offload, Page, PageStatus, Result, Start,
};

use crate::Slow;

/// Longest sleep between two looks at whether a load is to end.
const LOOK: Duration = Duration::from_millis(1);

/// The linker face.
pub struct Paced;

/// Loads that are queued, batches that run, offloads that are done.
#[derive(Default)]
pub struct Face {
    queued: Mutex<Vec<Load>>,
    batches: Mutex<HashMap<u64, Batch>>,
    completed: Mutex<Vec<Completed>>,
}

struct Batch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fills the parts of a page that belong to `layer`, or with none those that belong to no layer.
fn fill(page: &mut Page<'static, Get>, stored: &[u8], layer: Option<usize>) -> Result<()> {
    let pool = page.pool().clone();
    let starts: Vec<usize> = pool
        .segments()
        .iter()
        .scan(0, |end, segment| {
            let start = *end;
            *end += segment.len as usize;
            Some(start)
        })
        .collect();
    let start_of = |segment: usize| starts.get(segment).copied().unwrap_or(0);
    let Some(layer) = layer else {
        let seal = pool.seal_segment().unwrap_or(usize::MAX);
        if let Some(start) = starts.get(seal) {
            let piece = page.piece_mut(seal)?;
            piece.copy_from_slice(stored.get(*start..start + piece.len()).unwrap_or_default());
        }
        return Ok(());
    };
    for part in pool.components().iter().filter(|part| part.layer as usize == layer) {
        let start = start_of(part.segment);
        let piece = page.piece_mut(part.segment)?;
        for run in 0..part.run_count {
            let at = (part.offset + run * part.run_stride) as usize;
            let len = part.run_len as usize;
            let from = stored.get(start + at..start + at + len);
            if let (Some(to), Some(from)) = (piece.get_mut(at..at + len), from) {
                to.copy_from_slice(from);
            }
        }
    }
    Ok(())
}

impl Face {
    /// Ends what runs.
    pub fn close(&self) {
        for batch in std::mem::take(&mut *lock(&self.batches)).into_values() {
            batch.stop.store(true, Ordering::Release);
            // A thread that panicked has ended too.
            let _ = batch.thread.join();
        }
    }
}

impl Linker for Paced {
    type Backend = Slow;

    fn lookup(backend: &Slow, exists: &mut Exists<'_>) -> Result<()> {
        backend.batch_exists(exists)
    }

    fn load(backend: &Slow, load: Load) -> Result<()> {
        lock(&backend.face.queued).push(load);
        Ok(())
    }

    fn start_layer_wise_loading(backend: &Slow, start: Start) -> Result<()> {
        let loads = std::mem::take(&mut *lock(&backend.face.queued));
        let mut pages = Vec::new();
        for page in loads.into_iter().flat_map(Load::into_pages) {
            let stored = backend.pages.read().unwrap_or_else(PoisonError::into_inner).get(page.key()).cloned();
            match stored {
                Some(stored) => pages.push((page, stored)),
                None => page.finish(PageStatus::Missing),
            }
        }
        let (stop, pace) = (Arc::new(AtomicBool::new(false)), backend.layer_time);
        let (number, stopped) = (start.batch, Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("paced".to_owned()).spawn(move || {
            let began = Instant::now();
            let ended = || stopped.load(Ordering::Acquire) || start.call.check().is_err();
            let mut good = pages.iter_mut().all(|(page, stored)| fill(page, stored, None).is_ok());
            for layer in 0..start.done.layers() {
                let due = began + pace * (layer as u32 + 1);
                while good && !ended() && Instant::now() < due {
                    std::thread::sleep(due.saturating_duration_since(Instant::now()).min(LOOK));
                }
                good = good && !ended() && pages.iter_mut().all(|(page, bytes)| fill(page, bytes, Some(layer)).is_ok());
                start.done.settle(layer);
            }
            let status = if good { PageStatus::Ok } else { PageStatus::Failed };
            pages.into_iter().for_each(|(page, _)| page.finish(status));
        });
        let thread = thread.map_err(|error| Error::new(ErrorKind::Unavailable, format!("no thread: {error}")))?;
        lock(&backend.face.batches).insert(number, Batch { stop, thread });
        Ok(())
    }

    fn finish_layer_wise_loading(backend: &Slow, call: &Call<'_>, batch: u64) -> Result<()> {
        let running = lock(&backend.face.batches).remove(&batch);
        let Batch { stop, thread } =
            running.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("batch {batch} does not run")))?;
        while !thread.is_finished() {
            if call.check().is_err() {
                stop.store(true, Ordering::Release);
            }
            std::thread::sleep(LOOK);
        }
        thread.join().map_err(|_| Error::new(ErrorKind::Internal, "a load panicked"))
    }

    fn cancel_queued_load(backend: &Slow, request: u64) -> Result<()> {
        let mut queued = lock(&backend.face.queued);
        let at = queued.iter().position(|load| load.request == request);
        let at = at.ok_or_else(|| Error::new(ErrorKind::NotFound, "it is not queued"))?;
        queued.remove(at);
        Ok(())
    }

    fn offload(backend: &Slow, offload: Offload) -> Result<()> {
        for page in offload.pages() {
            let (key, bytes) = (*page.key(), page.to_vec()?);
            backend.pages.write().unwrap_or_else(PoisonError::into_inner).insert(key, bytes);
            page.finish(PageStatus::Ok);
        }
        lock(&backend.face.completed).push(Completed { operation: offload.operation, result: Ok(()) });
        backend.host.offload_completed();
        Ok(())
    }

    fn num_completed_offloads(backend: &Slow) -> u64 {
        lock(&backend.face.completed).len() as u64
    }

    fn pop_completed_offload(backend: &Slow) -> Option<Completed> {
        let mut completed = lock(&backend.face.completed);
        if completed.is_empty() { None } else { Some(completed.remove(0)) }
    }

    fn reset(backend: &Slow, _: &Call<'_>) -> Result<()> {
        lock(&backend.face.queued).clear();
        backend.face.close();
        lock(&backend.face.completed).clear();
        Ok(())
    }
}
