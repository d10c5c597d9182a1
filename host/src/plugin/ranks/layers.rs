//! Loads layer by layer on all ranks: a layer is settled when it is on each of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::super::backend::{BackendError, CallOptions, ErrorKind, LayerLoad, PageStatus, PoolGroup, StorageBackend};
use super::fan::{Fan, OfPages, Page, panicked};

/// How often the caller looks, should no rank have news.
const LOOK: Duration = Duration::from_millis(2);

/// What the ranks tell the thread that waits for all of them.
struct News {
    /// Ranks whose calls have ended.
    ended: AtomicUsize,
    told: Mutex<bool>,
    changed: Condvar,
}

impl News {
    fn tell(&self) {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if !*told {
            told = self.changed.wait_timeout(told, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        *told = false;
    }
}

fn settled(words: &[AtomicU32]) -> usize {
    words.iter().filter(|word| word.load(Ordering::Acquire) == 1).count()
}

impl<B: StorageBackend> Fan<B> {
    /// As [`StorageBackend::load_layers`], of every rank's part of the pages. `watch` is called on this thread alone.
    pub fn load_layers(
        &self,
        options: &CallOptions,
        loads: &[LayerLoad<'_>],
        words: &Arc<[AtomicU32]>,
        watch: &mut dyn FnMut(),
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        let ranks = self.ranks();
        let blank = || words.iter().map(|_| AtomicU32::new(0)).collect();
        let own: Vec<Arc<[AtomicU32]>> = ranks.iter().map(|_| blank()).collect();
        let news = News { ended: AtomicUsize::new(0), told: Mutex::default(), changed: Condvar::new() };
        let pages = status.len();
        let load = |number: usize| -> Result<OfPages, BackendError> {
            let (rank, words) = (&ranks[number], &own[number]);
            let mut status = vec![PageStatus::Unset; pages];
            let mut seen = 0;
            let mut look = || {
                let now = settled(words);
                if std::mem::replace(&mut seen, now) != now {
                    news.tell();
                }
            };
            let call = AssertUnwindSafe(|| rank.load_layers(options, loads, words, &mut look, &mut status));
            let result = catch_unwind(call);
            news.ended.fetch_add(1, Ordering::AcqRel);
            news.tell();
            result.map(|result| (result, status)).map_err(|_| panicked(rank.as_ref(), number))
        };
        let load = &load;
        let answers: Vec<Result<OfPages, BackendError>> = thread::scope(|scope| {
            let spawn = |number: usize| {
                thread::Builder::new().name(format!("kv-rank-{number}")).spawn_scoped(scope, move || load(number))
            };
            let threads: Vec<_> = (0..ranks.len()).map(spawn).collect();
            let begun = threads.iter().flatten().count();
            while news.ended.load(Ordering::Acquire) < begun {
                news.wait();
                settle(words, &own);
                watch();
            }
            settle(words, &own);
            let answer = |(number, thread): (usize, std::io::Result<thread::ScopedJoinHandle<'_, _>>)| match thread {
                Ok(thread) => thread.join().unwrap_or_else(|_| Err(panicked(ranks[number].as_ref(), number))),
                Err(error) => Err(BackendError {
                    backend: ranks[number].name().to_owned(),
                    kind: ErrorKind::Unavailable,
                    retryable: true,
                    message: format!("no thread for its load: {error}"),
                    pages_in_use: false,
                }),
            };
            threads.into_iter().enumerate().map(answer).collect()
        });
        let of_group = |load: &LayerLoad<'_>, group: PoolGroup| {
            let pages = load.lanes[group as usize].pages;
            pages.iter().map(|&page| (group, page)).collect::<Vec<Page>>()
        };
        let used: Vec<Page> =
            loads.iter().flat_map(|load| PoolGroup::ALL.map(|group| of_group(load, group))).flatten().collect();
        self.together(&used, status, answers)
    }
}

/// Settles the layers that are settled on every rank.
fn settle(words: &[AtomicU32], own: &[Arc<[AtomicU32]>]) {
    for (layer, word) in words.iter().enumerate() {
        if own.iter().all(|rank| rank[layer].load(Ordering::Acquire) == 1) {
            word.store(1, Ordering::Release);
        }
    }
}
