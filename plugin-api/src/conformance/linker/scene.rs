//! What most rules of the linker face begin with: an instance in linker mode, two pools, stored pages.

use std::time::Duration;

use super::super::bench::Bench;
use super::super::data::keys;
use super::super::store::Store;
use super::super::{Check, fail_rule};
use super::face::{Face, NOW, Popped, Queued, Words, eventually};
use super::{EMPTY_START, LAYERS, LOAD, OFFLOAD, POP_EMPTY, START_READY, STATUSES};
use crate::mock::{KvShape, MockPool, Options, Part, PoolSpec};
use crate::v0_1::PageKey;
use crate::{CacheMode, Dtype, PageStatus};

/// Layers of the pools.
pub(crate) const LAYERS_OF_POOLS: usize = 3;
/// Pages of each pool.
pub(crate) const PAGES: u32 = 48;
/// Seed of what lies in a page before it is loaded: no page is stored with it.
const BEFORE: u64 = 0xbe_f0e5;
/// How long a rule looks whether a page is touched that must not be.
pub(crate) const QUIET: Duration = Duration::from_millis(60);

/// An instance with two pools of keys and values.
#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) store: Store,
    /// The anchor, with a seal.
    pub(crate) kv: MockPool,
    /// A side pool in another layout.
    pub(crate) side: MockPool,
}

/// A page of a rule: the number that its key is made of, and its place in the pool.
pub(crate) type At = (u64, u32);

/// The bytes of a stored page follow from its pool and number.
pub(crate) fn seed(pool: &MockPool, number: u64) -> u64 {
    number * 8 + u64::from(pool.id()) + 1
}

/// The pages of a pool in a call.
pub(crate) fn part(pool: &MockPool, pages: &[At]) -> Part {
    Part::new(pool, &numbers(pages.iter().map(|page| page.0)), &pages.iter().map(|page| page.1).collect::<Vec<_>>())
}

fn numbers(numbers: impl IntoIterator<Item = u64>) -> Vec<PageKey> {
    keys(numbers)
}

impl Scene {
    pub(crate) fn new(bench: &Bench) -> Check<Scene> {
        let shape = KvShape {
            pages: u64::from(PAGES),
            page_tokens: 4,
            layers: LAYERS_OF_POOLS as u32,
            heads: 2,
            head_dim: 8,
            dtype: Dtype::F16,
        };
        let kv = MockPool::new(PoolSpec::kv(0, "kv", "page_first_direct", shape).with_seal(64));
        let side = MockPool::new(PoolSpec::kv(1, "side", "layer_first", shape));
        let store = bench.open_mode(&bench.identity(), CacheMode::Linker)?;
        store.register_all(&[&kv, &side])?;
        Ok(Scene { store, kv, side })
    }

    pub(crate) fn face(&self) -> Check<Face<'_>> {
        Face::of(&self.store)
    }

    fn time(&self) -> Duration {
        self.store.watch.limits.call
    }

    /// Fills pages with the bytes they are stored with.
    pub(crate) fn fill(&self, pool: &MockPool, pages: &[At]) {
        pages.iter().for_each(|(number, at)| pool.fill(*at, seed(pool, *number)));
    }

    /// Fills pages with what is never stored.
    pub(crate) fn blank(&self, pool: &MockPool, pages: &[At]) {
        pages.iter().for_each(|(_, at)| pool.fill(*at, BEFORE));
    }

    /// Pages are as [`Scene::blank`] left them.
    pub(crate) fn are_blank(&self, pool: &MockPool, pages: &[At]) -> bool {
        pages.iter().all(|(_, at)| pool.holds(*at, BEFORE))
    }

    /// Stores pages by an offload.
    pub(crate) fn put(&self, pool: &MockPool, pages: &[At]) -> Check {
        self.fill(pool, pages);
        let face = self.face()?;
        let operation = 1000 + pages.first().map_or(0, |page| page.0);
        let stored = "an offload of pages that may be read at once stores them";
        let queued = match face.offload(operation, None, &[part(pool, pages)], &[NOW])? {
            Ok(queued) => queued,
            Err(error) => return fail_rule(OFFLOAD, stored, error.to_string()),
        };
        match self.pop()? {
            Some((popped, None)) if popped == operation => {}
            other => return fail_rule(OFFLOAD, format!("{stored}, and is popped"), format!("{other:?}")),
        }
        queued.check_settled(OFFLOAD, "pop_completed_offload")?;
        let statuses = queued.statuses();
        if statuses.iter().flatten().any(|status| *status != PageStatus::Ok) {
            return fail_rule(OFFLOAD, "a page of an offload that succeeded is ok", format!("{statuses:?}"));
        }
        Ok(())
    }

    /// Pops the next completed offload, and waits for it.
    pub(crate) fn pop(&self) -> Check<Option<Popped>> {
        let mut popped = Ok(None);
        eventually(self.time(), || {
            popped = self.pop_now();
            !matches!(popped, Ok(None))
        });
        popped
    }

    /// Pops the next completed offload, if there is one.
    pub(crate) fn pop_now(&self) -> Check<Option<Popped>> {
        match self.face()?.pop()? {
            Ok(popped) => Ok(popped),
            Err(error) => fail_rule(POP_EMPTY, "popping answers an offload or not found", error.to_string()),
        }
    }

    /// Starts and finishes a batch without loads.
    pub(crate) fn empty_batch(&self, batch: u64) -> Check {
        let empty = "a batch without loads starts, is settled and is finished";
        let face = self.face()?;
        let words = match face.start(&Options::default(), batch, LAYERS_OF_POOLS, &[NOW])? {
            Ok(words) => words,
            Err(error) => return fail_rule(EMPTY_START, empty, error.to_string()),
        };
        if let Err(error) = face.finish(&Options::default(), batch)? {
            return fail_rule(EMPTY_START, empty, error.to_string());
        }
        words.check_settled(EMPTY_START, "a batch without loads")
    }

    /// After a while no page was written by a load whose flag has not come yet.
    pub(crate) fn waits_for_its_flag(&self, pool: &MockPool, pages: &[At]) -> Check {
        std::thread::sleep(QUIET);
        if self.are_blank(pool, pages) {
            return Ok(());
        }
        fail_rule(START_READY, "no page of a load is written before its flag is 1", "a page was written")
    }

    /// Queues the load of pages, which are blank before.
    pub(crate) fn queue(&self, request: u64, parts: &[(&MockPool, &[At])]) -> Check<Queued> {
        parts.iter().for_each(|(pool, pages)| self.blank(pool, pages));
        let transfers: Vec<Part> = parts.iter().map(|(pool, pages)| part(pool, pages)).collect();
        match self.face()?.load(request, &transfers)? {
            Ok(queued) => Ok(queued),
            Err(error) => fail_rule(LOAD, "a load into registered pools is queued", error.to_string()),
        }
    }

    /// Starts what is queued, at once.
    pub(crate) fn start(&self, batch: u64) -> Check<Words> {
        match self.face()?.start(&Options::default(), batch, LAYERS_OF_POOLS, &[NOW])? {
            Ok(words) => Ok(words),
            Err(error) => fail_rule(LOAD, "a batch of queued loads starts", error.to_string()),
        }
    }

    /// Finishes a batch that nothing keeps from its end.
    pub(crate) fn finish(&self, batch: u64, words: Words, queued: &[Queued]) -> Check {
        if let Err(error) = self.face()?.finish(&Options::default(), batch)? {
            return fail_rule(LOAD, "a batch that was started is finished", error.to_string());
        }
        words.check_settled(LAYERS, "finish_layer_wise_loading")?;
        queued.iter().try_for_each(|queued| queued.check_settled(STATUSES, "finish_layer_wise_loading"))
    }

    /// Pages of a pool are loaded with the bytes that were stored.
    pub(crate) fn loaded(&self, statuses: &[PageStatus], pool: &MockPool, pages: &[At]) -> Check {
        for ((number, at), status) in pages.iter().zip(statuses) {
            if *status != PageStatus::Ok {
                let expected = format!("page {number}, which is stored, is loaded");
                return fail_rule(LOAD, expected, format!("status {status}"));
            }
            if !pool.holds(*at, seed(pool, *number)) {
                let expected = format!("page {number} is loaded with the bytes that were stored");
                return fail_rule(LOAD, expected, "other bytes, with the status ok");
            }
        }
        Ok(())
    }

    /// Stored pages come back by a load of their own.
    pub(crate) fn come_back(&self, request: u64, pool: &MockPool, pages: &[At]) -> Check {
        let queued = self.queue(request, &[(pool, pages)])?;
        let words = self.start(request)?;
        self.finish(request, words, &[queued])?;
        self.loaded(&queued.statuses()[0], pool, pages)
    }

    /// Statuses of a load of pages.
    pub(crate) fn statuses_of(&self, request: u64, pool: &MockPool, pages: &[At]) -> Check<Vec<PageStatus>> {
        let queued = self.queue(request, &[(pool, pages)])?;
        let words = self.start(request)?;
        self.finish(request, words, &[queued])?;
        Ok(queued.statuses().swap_remove(0))
    }

    /// No page of these is stored.
    pub(crate) fn none_stored(&self, request: u64, pool: &MockPool, pages: &[At], why: &str) -> Check {
        let statuses = self.statuses_of(request, pool, pages)?;
        if statuses.contains(&PageStatus::Ok) {
            return super::super::fail(format!("no page is stored by {why}"), format!("a load gives {statuses:?}"));
        }
        Ok(())
    }

    /// Every layer is settled in time.
    pub(crate) fn settles(&self, words: Words) -> Check {
        if words.wait(self.time()) {
            return Ok(());
        }
        fail_rule(LAYERS, "the words of the layers become 1 while the batch runs", "a word is still 0")
    }
}
