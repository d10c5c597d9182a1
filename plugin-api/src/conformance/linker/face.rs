//! The linker face of an open instance under watch.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::super::calls::ERROR_FORM;
use super::super::store::Store;
use super::super::{Check, fail_rule};
use super::TABLE;
use crate::mock::{Found, Options, Part, Query};
use crate::v0_1::{
    FinishArgs, LinkerTable, LoadArgs, OffloadArgs, OffloadDone, PageKey, PoolTransfer, ReadyHandle, StartArgs,
};
use crate::{ErrorKind, PageStatus, ReadyKind, Result, monotonic_ns};

/// The linker face.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Face<'a> {
    pub(crate) store: &'a Store,
    table: &'static LinkerTable,
}

/// A word that becomes 1 when pages may be touched. It lives as long as the process.
pub(crate) fn flag() -> &'static AtomicU32 {
    Box::leak(Box::new(AtomicU32::new(0)))
}

/// Handles of flags.
pub(crate) fn handles(flags: &[&'static AtomicU32]) -> Vec<ReadyHandle> {
    let handle = |flag: &&'static AtomicU32| ReadyHandle {
        kind: ReadyKind::HostFlag.raw(),
        reserved: 0,
        handle: flag.as_ptr() as u64,
    };
    flags.iter().map(handle).collect()
}

/// The handle that says that pages may be touched at once.
pub(crate) const NOW: ReadyHandle = ReadyHandle { kind: ReadyKind::Now as u32, reserved: 0, handle: 0 };

/// What a queued operation names. It has to outlive the operation, whose end a rule may never see, so it is leaked.
#[derive(Debug)]
struct Named {
    parts: Vec<Part>,
    statuses: Vec<Vec<AtomicU8>>,
}

/// A status beside those that are asked for, which stays as it is.
const GUARD: u8 = 0xc3;

/// A completed offload: its operation, and the kind of its error.
pub(crate) type Popped = (u64, Option<ErrorKind>);

/// A queued load or offload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Queued(&'static Named);

impl Queued {
    fn new(parts: &[Part]) -> Queued {
        let statuses = |part: &Part| {
            let zeros = part.keys.iter().map(|_| AtomicU8::new(0));
            std::iter::once(AtomicU8::new(GUARD)).chain(zeros).chain([AtomicU8::new(GUARD)]).collect()
        };
        Queued(Box::leak(Box::new(Named { parts: parts.to_vec(), statuses: parts.iter().map(statuses).collect() })))
    }

    fn transfers(&self) -> Vec<PoolTransfer> {
        let place = |statuses: &Vec<AtomicU8>| statuses[1..].as_ptr().cast_mut().cast::<u8>();
        self.0.parts.iter().zip(&self.0.statuses).map(|(part, statuses)| part.transfer(place(statuses))).collect()
    }

    /// Status of each page, part after part.
    pub(crate) fn statuses(&self) -> Vec<Vec<PageStatus>> {
        let read = |status: &AtomicU8| PageStatus::from_raw(status.load(Ordering::Acquire));
        self.0.statuses.iter().map(|part| part[1..part.len() - 1].iter().map(read).collect()).collect()
    }

    /// Every page has a status, and nothing beside the statuses was written. `rule` is the one that promises it.
    pub(crate) fn check_settled(&self, rule: &str, after: &str) -> Check {
        for (part, statuses) in self.0.parts.iter().zip(&self.0.statuses) {
            if [statuses.first(), statuses.last()]
                .into_iter()
                .flatten()
                .any(|guard| guard.load(Ordering::Acquire) != GUARD)
            {
                return fail_rule(rule, "nothing beside the statuses is written", "bytes beside them were written");
            }
            let unset = statuses.iter().position(|status| status.load(Ordering::Acquire) == 0);
            if let Some(index) = unset {
                let expected = format!("after {after} every page of the operation has a status");
                let seen = format!("0 for page {} of {} in pool {}", index - 1, part.keys.len(), part.pool);
                return fail_rule(rule, expected, seen);
            }
        }
        Ok(())
    }
}

/// The words that say which layers are settled, with a word on each side that stays as it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Words(&'static [AtomicU32]);

const WORD_GUARD: u32 = 0x5a5a_a5a5;

impl Words {
    fn new(layers: usize) -> Words {
        let zeros = (0..layers).map(|_| AtomicU32::new(0));
        let words = std::iter::once(AtomicU32::new(WORD_GUARD)).chain(zeros).chain([AtomicU32::new(WORD_GUARD)]);
        Words(Box::leak(words.collect()))
    }
    /// Whether a layer is settled.
    pub(crate) fn settled(&self, layer: usize) -> bool {
        self.0[layer + 1].load(Ordering::Acquire) == 1
    }
    fn layers(&self) -> usize {
        self.0.len() - 2
    }
    /// Waits until every layer is settled.
    pub(crate) fn wait(&self, time: Duration) -> bool {
        eventually(time, || (0..self.layers()).all(|layer| self.settled(layer)))
    }
    /// Every layer is settled, and nothing else is written. `rule` is the one that promises it.
    pub(crate) fn check_settled(&self, rule: &str, after: &str) -> Check {
        let guards = [self.0.first(), self.0.last()];
        if guards.into_iter().flatten().any(|word| word.load(Ordering::Acquire) != WORD_GUARD) {
            return fail_rule(
                rule,
                "nothing beside the words of the layers is written",
                "a word beside them has changed",
            );
        }
        let values: Vec<u32> = self.0[1..=self.layers()].iter().map(|word| word.load(Ordering::Acquire)).collect();
        if values.iter().all(|word| *word == 1) {
            return Ok(());
        }
        fail_rule(rule, format!("after {after} the word of every layer is 1"), format!("{values:?}"))
    }
}

/// Polls until something holds; whether it did in time.
pub(crate) fn eventually(time: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + time;
    loop {
        if holds() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

impl<'a> Face<'a> {
    pub(crate) fn of(store: &'a Store) -> Check<Face<'a>> {
        match store.linker_table() {
            Some(table) => Ok(Face { store, table }),
            None => fail_rule(TABLE, "a plugin with the capability linker has the linker table", "null"),
        }
    }

    pub(crate) fn lookup(&self, options: &Options<'_>, keys: &[PageKey], queries: &[Query]) -> Check<Result<Found>> {
        self.store.ask("lookup", options, keys, queries, |args, error| {
            // SAFETY: everything in `args` lives through the call.
            unsafe { (self.table.lookup)(self.store.this, args, error) }
        })
    }

    pub(crate) fn load(&self, request: u64, parts: &[Part]) -> Check<Result<Queued>> {
        let queued = Queued::new(parts);
        let transfers = queued.transfers();
        let args = LoadArgs {
            request,
            transfers: transfers.as_ptr(),
            transfer_count: transfers.len() as u64,
            chain_position: 0,
            prefix_keys: std::ptr::null(),
            prefix_key_count: 0,
        };
        let answer = self.store.watch.call("load", self.store.watch.limits.call, |error| {
            // SAFETY: `args` lives through the call, and what it names is never freed.
            unsafe { (self.table.load)(self.store.this, &raw const args, error) }
        })?;
        Ok(answer.map(|()| queued))
    }

    /// `start_layer_wise_loading`; the words say which layers are settled. A cancel flag has to live as long as the batch.
    pub(crate) fn start(
        &self,
        options: &Options<'static>,
        batch: u64,
        layers: usize,
        ready: &[ReadyHandle],
    ) -> Check<Result<Words>> {
        let words = Words::new(layers);
        let args = StartArgs {
            context: self.store.context(options),
            batch,
            ready: ready.as_ptr(),
            ready_count: ready.len() as u64,
            layer_done: words.0[1..].as_ptr().cast_mut().cast(),
            layer_count: layers as u64,
        };
        let answer = self.store.watch.call("start_layer_wise_loading", self.store.watch.limits.call, |error| {
            // SAFETY: `args` lives through the call, the words and what the handles name for ever.
            unsafe { (self.table.start_layer_wise_loading)(self.store.this, &raw const args, error) }
        })?;
        Ok(answer.map(|()| words))
    }

    pub(crate) fn finish(&self, options: &Options<'_>, batch: u64) -> Check<Result<()>> {
        let args = FinishArgs { context: self.store.context(options), batch };
        self.store.watch.call("finish_layer_wise_loading", self.store.time(options), |error| {
            // SAFETY: `args` lives through the call.
            unsafe { (self.table.finish_layer_wise_loading)(self.store.this, &raw const args, error) }
        })
    }

    pub(crate) fn cancel(&self, request: u64) -> Check<Result<()>> {
        self.store.watch.call("cancel_queued_load", self.store.watch.limits.call, |error| {
            // SAFETY: the instance is open.
            unsafe { (self.table.cancel_queued_load)(self.store.this, request, error) }
        })
    }

    pub(crate) fn offload(
        &self,
        operation: u64,
        deadline: Option<Duration>,
        parts: &[Part],
        ready: &[ReadyHandle],
    ) -> Check<Result<Queued>> {
        let queued = Queued::new(parts);
        let transfers = queued.transfers();
        let args = OffloadArgs {
            operation,
            deadline_ns: deadline.map_or(0, |time| monotonic_ns() + time.as_nanos() as u64),
            transfers: transfers.as_ptr(),
            transfer_count: transfers.len() as u64,
            ready: ready.as_ptr(),
            ready_count: ready.len() as u64,
            chain_position: 0,
            prefix_keys: std::ptr::null(),
            prefix_key_count: 0,
            session_id: "".into(),
        };
        let answer = self.store.watch.call("offload", self.store.watch.limits.call, |error| {
            // SAFETY: `args` lives through the call, and what it names is never freed.
            unsafe { (self.table.offload)(self.store.this, &raw const args, error) }
        })?;
        Ok(answer.map(|()| queued))
    }

    pub(crate) fn completed(&self) -> Check<u64> {
        let mut count = 0;
        let _ = self.store.watch.call("num_completed_offloads", self.store.watch.limits.call, |_| {
            // SAFETY: the instance is open.
            count = unsafe { (self.table.num_completed_offloads)(self.store.this) };
            0
        })?;
        Ok(count)
    }

    /// `pop_completed_offload`: the operation and the kind of its error; none when there is none.
    pub(crate) fn pop(&self) -> Check<Result<Option<Popped>>> {
        let mut done = OffloadDone { operation: 0, status: 0, retryable: 0 };
        let answer = self.store.watch.call("pop_completed_offload", self.store.watch.limits.call, |error| {
            // SAFETY: `done` lives through the call.
            unsafe { (self.table.pop_completed_offload)(self.store.this, &raw mut done, error) }
        })?;
        match answer {
            Ok(()) if done.retryable > 1 => {
                fail_rule(ERROR_FORM, "retryable of a completed offload is 0 or 1", done.retryable.to_string())
            }
            Ok(()) => Ok(Ok(Some((done.operation, (done.status != 0).then(|| ErrorKind::from_raw(done.status)))))),
            Err(error) if error.kind == ErrorKind::NotFound => Ok(Ok(None)),
            Err(error) => Ok(Err(error)),
        }
    }

    pub(crate) fn reset(&self, options: &Options<'_>) -> Check<Result<()>> {
        let context = self.store.context(options);
        self.store.watch.call("reset", self.store.time(options), |error| {
            // SAFETY: the instance is open.
            unsafe { (self.table.reset)(self.store.this, &raw const context, error) }
        })
    }
}
