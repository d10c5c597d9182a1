//! Loads layer by layer on all ranks: a layer is settled when it is on each of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::super::backend::{BackendError, CallOptions, LayerLoad, PageStatus, PoolGroup, StorageBackend};
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
        let answers: Vec<Mutex<Option<Result<OfPages, BackendError>>>> =
            ranks.iter().map(|_| Mutex::new(None)).collect();
        let body = |number: usize| {
            let answered = load(number);
            if let Some(answer) = answers.get(number) {
                *answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answered);
            }
        };
        self.crew.beside(ranks.len(), &body, |begun| {
            while news.ended.load(Ordering::Acquire) < begun {
                news.wait();
                settle(words, &own);
                watch();
            }
        });
        settle(words, &own);
        let answers = answers.into_iter().zip(ranks.iter().enumerate()).map(|(answer, (number, rank))| {
            let answer = answer.into_inner().unwrap_or_else(PoisonError::into_inner);
            answer.unwrap_or_else(|| Err(panicked(rank.as_ref(), number)))
        });
        let answers: Vec<_> = answers.collect();
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
