//! Random sequences of legal calls, the same in every run, against a model.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU32, Ordering};

use super::super::bench::Bench;
use super::super::data::keys;
use super::super::store::succeeds;
use super::super::{Check, Stop, ensure, fail};
use super::face::{NOW, Queued, Words, flag, handles};
use super::loads::Dice;
use super::scene::{At, LAYERS_OF_POOLS, PAGES, Scene, part, seed};
use crate::mock::{MockPool, Options, Query};
use crate::{ErrorKind, PageStatus};

/// Calls of a sequence.
const CALLS: usize = 400;
/// Numbers that keys are made of.
const NUMBERS: u64 = 24;

/// A load: its pages in the anchor and in the side pool.
struct Load {
    request: u64,
    kv: Vec<At>,
    side: Vec<At>,
    /// Numbers that were stored when it was queued.
    known: BTreeSet<u64>,
    queued: Queued,
}

struct Batch {
    loads: Vec<Load>,
    words: Words,
    late: Option<&'static AtomicU32>,
}

/// An offload that has not been popped.
struct Offload {
    operation: u64,
    numbers: Vec<u64>,
    pages: Vec<u32>,
}

/// What a right plugin has, and what the host has queued.
struct Model {
    scene: Scene,
    dice: Dice,
    /// Numbers that are stored in both pools, by offloads that were popped.
    stored: BTreeSet<u64>,
    /// Numbers of offloads that may or may not have been done.
    unknown: BTreeSet<u64>,
    free: Vec<u32>,
    queued: Vec<Load>,
    batches: BTreeMap<u64, Batch>,
    offloads: VecDeque<Offload>,
    next: u64,
    trail: Vec<String>,
}

pub(super) fn random(bench: &Bench) -> Check {
    // A model finds again what the simple rules find, so it has no verdict of its own when one of them is broken.
    for rule in super::simple_rules() {
        for step in rule.steps {
            let scratch = tempfile::tempdir().map_err(|e| Stop::Skip(format!("there is no scratch folder: {e}")))?;
            match step(&Bench::new(&bench.subject, rule, scratch.path(), bench.watch.clone())) {
                Ok(()) | Err(Stop::Skip(_)) => {}
                Err(Stop::Fail(finding)) if finding.rule.is_none() => {
                    return Err(Stop::Skip(format!("ended early: {} is broken", rule.id)));
                }
                Err(stop) => return Err(stop),
            }
        }
    }
    for seed in 0..3 {
        let mut model = Model::new(bench, seed)?;
        for _ in 0..CALLS {
            if let Err(stop) = model.step() {
                return Err(model.tell(stop, seed));
            }
        }
        if let Err(stop) = model.drain() {
            return Err(model.tell(stop, seed));
        }
        model.scene.store.close()?;
    }
    Ok(())
}

impl Model {
    fn new(bench: &Bench, seed: u64) -> Check<Model> {
        let mut bench_of_seed =
            Bench::new(&bench.subject, bench.rule, &bench.scratch.join(seed.to_string()), bench.watch.clone());
        bench_of_seed.host = bench.host;
        std::fs::create_dir_all(&bench_of_seed.scratch)
            .map_err(|e| Stop::Skip(format!("there is no scratch folder: {e}")))?;
        Ok(Model {
            scene: Scene::new(&bench_of_seed)?,
            dice: Dice::new(0x5eed + seed),
            stored: BTreeSet::new(),
            unknown: BTreeSet::new(),
            free: (0..PAGES).collect(),
            queued: Vec::new(),
            batches: BTreeMap::new(),
            offloads: VecDeque::new(),
            next: 1,
            trail: Vec::new(),
        })
    }

    /// Adds to a finding what led to it. Findings are this rule's own: the simple rules have passed.
    fn tell(&self, stop: Stop, seed: u64) -> Stop {
        match stop {
            Stop::Fail(mut finding) => {
                if finding.rule.as_deref().is_some_and(|rule| rule.starts_with("linker.")) {
                    finding.rule = None;
                }
                let last: Vec<&str> = self.trail.iter().rev().take(8).rev().map(String::as_str).collect();
                finding.seen =
                    format!("{} (sequence {seed}, call {}: {})", finding.seen, self.trail.len(), last.join(", "));
                Stop::Fail(finding)
            }
            other => other,
        }
    }

    fn step(&mut self) -> Check {
        match self.dice.below(100) {
            0..20 => self.offload(),
            20..35 => self.pop(),
            35..60 => self.load(),
            60..66 => self.cancel(),
            66..78 => self.start(),
            78..90 => self.finish(),
            90..98 => self.lookup(),
            _ => self.reset(),
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn take_pages(&mut self, count: usize) -> Option<Vec<u32>> {
        (self.free.len() >= count).then(|| self.free.split_off(self.free.len() - count))
    }

    fn some_numbers(&mut self) -> Vec<u64> {
        let first = self.dice.below(NUMBERS);
        let count = 1 + self.dice.below(3);
        (first..first + count).collect()
    }

    fn offload(&mut self) -> Check {
        let numbers = self.some_numbers();
        let Some(pages) = self.take_pages(numbers.len()) else { return Ok(()) };
        let at: Vec<At> = numbers.iter().copied().zip(pages.iter().copied()).collect();
        let operation = self.number();
        self.trail.push(format!("offload {operation} of {numbers:?}"));
        self.scene.fill(&self.scene.kv, &at);
        self.scene.fill(&self.scene.side, &at);
        let parts = [part(&self.scene.side, &at), part(&self.scene.kv, &at)];
        succeeds("offload", self.scene.face()?.offload(operation, None, &parts, &[NOW])?)?;
        self.offloads.push_back(Offload { operation, numbers, pages });
        Ok(())
    }

    fn pop(&mut self) -> Check {
        let Some(offload) = self.offloads.front() else {
            let popped = self.scene.pop_now()?;
            return ensure(popped.is_none(), "nothing to pop", || format!("{popped:?}"));
        };
        self.trail.push(format!("pop {}", offload.operation));
        let popped = self.scene.pop()?;
        ensure(
            popped == Some((offload.operation, None)),
            format!("operation {} is popped", offload.operation),
            || format!("{popped:?}"),
        )?;
        if let Some(Offload { numbers, pages, .. }) = self.offloads.pop_front() {
            numbers.iter().for_each(|number| {
                self.unknown.remove(number);
            });
            self.stored.extend(numbers);
            self.free.extend(pages);
        }
        Ok(())
    }

    /// Whether it is open if a number is stored.
    fn is_open(&self, number: u64) -> bool {
        let pending = self.offloads.iter().any(|offload| offload.numbers.contains(&number));
        !self.stored.contains(&number) && (pending || self.unknown.contains(&number))
    }

    fn load(&mut self) -> Check {
        let numbers: Vec<u64> = self.some_numbers().into_iter().filter(|number| !self.is_open(*number)).collect();
        let Some(pages) = self.take_pages(numbers.len()) else { return Ok(()) };
        let kv: Vec<At> = numbers.iter().copied().zip(pages).collect();
        let side: Vec<At> = kv.iter().copied().skip(self.dice.below(2) as usize).collect();
        let request = self.number();
        self.trail.push(format!("load {request} of {numbers:?}"));
        let queued = self.scene.queue(request, &[(&self.scene.side, &side), (&self.scene.kv, &kv)])?;
        let known = numbers.into_iter().filter(|number| self.stored.contains(number)).collect();
        self.queued.push(Load { request, kv, side, known, queued });
        Ok(())
    }

    fn cancel(&mut self) -> Check {
        let index = self.dice.below(self.queued.len() as u64 + 1) as usize;
        if index >= self.queued.len() {
            return match self.scene.face()?.cancel(1_000_000)? {
                Err(error) if error.kind == ErrorKind::NotFound => Ok(()),
                other => fail("cancelling what is not queued is not found", format!("{other:?}")),
            };
        }
        let load = self.queued.remove(index);
        self.trail.push(format!("cancel {}", load.request));
        succeeds("cancel_queued_load", self.scene.face()?.cancel(load.request)?)?;
        self.is_untouched(&load)
    }

    fn is_untouched(&mut self, load: &Load) -> Check {
        let untouched =
            self.scene.are_blank(&self.scene.kv, &load.kv) && self.scene.are_blank(&self.scene.side, &load.side);
        ensure(untouched, format!("the pages of the load {} are left alone", load.request), || {
            "one was written".into()
        })?;
        self.free.extend(load.kv.iter().map(|page| page.1));
        Ok(())
    }

    fn start(&mut self) -> Check {
        if self.batches.len() >= 3 {
            return Ok(());
        }
        let batch = self.number();
        let late = (self.dice.below(2) == 0).then(flag);
        let ready = late.map_or(vec![NOW], |late| handles(&[late]));
        self.trail.push(format!("start {batch} with {} loads", self.queued.len()));
        let started = self.scene.face()?.start(&Options::default(), batch, LAYERS_OF_POOLS, &ready)?;
        let words = succeeds("start_layer_wise_loading", started)?;
        let loads = std::mem::take(&mut self.queued);
        self.batches.insert(batch, Batch { loads, words, late });
        Ok(())
    }

    fn finish(&mut self) -> Check {
        let index = self.dice.below(self.batches.len() as u64 + 1) as usize;
        match self.batches.keys().nth(index).copied() {
            Some(batch) => self.finish_batch(batch),
            None => match self.scene.face()?.finish(&Options::default(), 1_000_000)? {
                Err(error) if error.kind == ErrorKind::NotFound => Ok(()),
                other => fail("finishing what does not run is not found", format!("{other:?}")),
            },
        }
    }

    fn finish_batch(&mut self, number: u64) -> Check {
        let Some(batch) = self.batches.remove(&number) else { return Ok(()) };
        self.trail.push(format!("finish {number}"));
        if let Some(late) = batch.late {
            late.store(1, Ordering::Release);
        }
        let queued: Vec<Queued> = batch.loads.iter().map(|load| load.queued).collect();
        self.scene.finish(number, batch.words, &queued)?;
        for load in batch.loads {
            let statuses = load.queued.statuses();
            self.verdicts(&self.scene.side, &load.side, &statuses[0], &load.known)?;
            self.verdicts(&self.scene.kv, &load.kv, &statuses[1], &load.known)?;
            self.free.extend(load.kv.iter().map(|page| page.1));
        }
        Ok(())
    }

    fn verdicts(&self, pool: &MockPool, pages: &[At], statuses: &[PageStatus], known: &BTreeSet<u64>) -> Check {
        for ((number, at), status) in pages.iter().zip(statuses) {
            let right = match status {
                // It may have been stored since the load was queued.
                PageStatus::Ok => self.stored.contains(number) || self.is_open(*number),
                PageStatus::Missing => !known.contains(number),
                _ => false,
            };
            ensure(right, format!("page {number} of pool {} is loaded if it is stored", pool.id()), || {
                format!("status {status}, stored before the load: {}", known.contains(number))
            })?;
            let filled = *status != PageStatus::Ok || pool.holds(*at, seed(pool, *number));
            ensure(filled, format!("page {number} has the bytes that were stored"), || "other bytes".to_owned())?;
        }
        Ok(())
    }

    fn lookup(&mut self) -> Check {
        let numbers: Vec<u64> = self.some_numbers().into_iter().filter(|number| !self.is_open(*number)).collect();
        self.trail.push(format!("lookup {numbers:?}"));
        let queries = [Query::of(&self.scene.kv), Query::of(&self.scene.side)];
        let answer = self.scene.face()?.lookup(&Options::default(), &keys(numbers.iter().copied()), &queries)?;
        let found = succeeds("lookup", answer)?;
        let there = |length: usize| numbers[..length].iter().all(|number| self.stored.contains(number));
        let expected: Vec<bool> = (0..=numbers.len()).map(there).collect();
        ensure(found.restorable == expected, format!("restorable {expected:?}"), || format!("{:?}", found.restorable))
    }

    fn reset(&mut self) -> Check {
        self.trail.push("reset".to_owned());
        succeeds("reset", self.scene.face()?.reset(&Options::default())?)?;
        for load in std::mem::take(&mut self.queued) {
            self.is_untouched(&load)?;
        }
        for batch in std::mem::take(&mut self.batches).into_values() {
            if let Some(late) = batch.late {
                late.store(1, Ordering::Release);
            }
            let pages = batch.loads.iter().flat_map(|load| load.kv.iter().map(|page| page.1));
            self.free.extend(pages);
        }
        for offload in std::mem::take(&mut self.offloads) {
            let open = offload.numbers.into_iter().filter(|number| !self.stored.contains(number));
            self.unknown.extend(open);
            self.free.extend(offload.pages);
        }
        let count = self.scene.face()?.completed()?;
        ensure(count == 0, "a reset forgets completed offloads", || format!("{count}"))
    }

    fn drain(&mut self) -> Check {
        while let Some(batch) = self.batches.keys().next().copied() {
            self.finish_batch(batch)?;
        }
        while !self.offloads.is_empty() {
            self.pop()?;
        }
        for load in std::mem::take(&mut self.queued) {
            succeeds("cancel_queued_load", self.scene.face()?.cancel(load.request)?)?;
            self.is_untouched(&load)?;
        }
        let stored: Vec<u64> = self.stored.iter().copied().collect();
        for numbers in stored.chunks(8) {
            let pages: Vec<At> = numbers.iter().copied().zip(0..).collect();
            let request = self.number();
            self.trail.push(format!("load {request} of all that is stored"));
            self.scene.come_back(request, &self.scene.kv, &pages)?;
        }
        let count = self.scene.face()?.completed()?;
        ensure(count == 0, "no completed offload is left", || format!("{count}"))
    }
}
