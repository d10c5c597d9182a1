//! An open instance under watch.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::bench::Bench;
use super::calls::{ERROR_FORM, Watch};
use super::{Check, fail, fail_rule};
use crate::mock::{Found, MockPool, Options, Outcome, Part, Query, raw_identity, table_of};
use crate::v0_1::{
    self, BackendTable, BatchArgs, CallContext, CapabilitiesOut, ErrorOut, ExistsArgs, HealthOut, LinkerTable,
    OpenArgs, PageKey, PoolDesc, PoolTransfer, Stats, Status,
};
use crate::{CacheMode, Capabilities, ClearScope, Error, Health, HealthState, Identity, PageStatus, Result};

/// A status of every page that was asked about, and nothing else is written.
pub(crate) const STATUSES: &str = "data.statuses";
/// What is read from is not written.
pub(crate) const SOURCES: &str = "memory.sources";

/// An open instance, called through its C functions. Where a method answers a result within a result, the outer one ends the rule and the
/// inner one is the plugin's answer. It is closed once, by [`Store::close`] or when it is dropped.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) table: &'static BackendTable,
    pub(crate) this: *mut c_void,
    pub(crate) capabilities: Capabilities,
    pub(crate) watch: Arc<Watch>,
    pools: Mutex<Vec<MockPool>>,
    closed: Cell<bool>,
}

// SAFETY: the plugin promises that its calls may come from any thread.
unsafe impl Send for Store {}
// SAFETY: as for `Send`; `closed` is touched by `close` and drop only, which own the instance.
unsafe impl Sync for Store {}

type BatchFn = unsafe extern "C" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> Status;

/// Bytes around what a plugin writes, which must stay as they are.
const GUARD: usize = 16;
const GUARD_BYTE: u8 = 0xc3;

impl Store {
    pub(super) fn open(bench: &Bench, config: &str, identity: &Identity, mode: CacheMode) -> Check<Result<Store>> {
        let table = match table_of(bench.subject.entry) {
            Ok(table) => table,
            Err(error) => return fail_rule("load.entry", "a table for version 0.1", error.message),
        };
        let raw = raw_identity(identity);
        let (host, host_context) = bench.host.table();
        let watch = bench.watch.clone();
        let time = watch.limits.call;
        let options = Options { deadline: Some(time), ..Options::default() };
        let args = OpenArgs {
            context: options.context(),
            config_json: config.into(),
            instance_name: "check".into(),
            identity: &raw const raw,
            host,
            host_context,
            cache_mode: mode.raw(),
            reserved: 0,
        };
        let mut this = std::ptr::null_mut();
        // SAFETY: everything in `args` lives through the call, the host's table for ever.
        let opened =
            watch.call("open", time, |error| unsafe { (table.open)(&raw const args, &raw mut this, error) })?;
        if let Err(error) = opened {
            return Ok(Err(error));
        }
        if this.is_null() {
            return fail("an open that succeeds gives an instance", "null");
        }
        let closed = Cell::new(false);
        let mut store = Store { table, this, capabilities: Capabilities::NONE, watch, pools: Mutex::default(), closed };
        store.capabilities = Capabilities::from_raw(&store.raw_capabilities()?);
        Ok(Ok(store))
    }

    pub(crate) fn time(&self, options: &Options<'_>) -> Duration {
        options.deadline.unwrap_or(self.watch.limits.call)
    }

    /// The context of a call: a rule that names no deadline gets the usual one, as a host gives it.
    pub(crate) fn context(&self, options: &Options<'_>) -> CallContext {
        Options { deadline: Some(self.time(options)), ..*options }.context()
    }

    /// `capabilities`.
    pub(crate) fn raw_capabilities(&self) -> Check<CapabilitiesOut> {
        let mut out = CapabilitiesOut { flags: 0, alignment: 0, preferred_batch: 0, concurrency: 0, reserved: 0 };
        let time = self.watch.limits.call;
        // SAFETY: `out` lives through the call.
        let run = |error: *mut ErrorOut| unsafe { (self.table.capabilities)(self.this, &raw mut out, error) };
        match self.watch.call("capabilities", time, run)? {
            Ok(()) => Ok(out),
            Err(error) => fail("capabilities answers", error.to_string()),
        }
    }

    fn hold(&self, pools: &[&MockPool]) {
        let mut held = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        held.extend(pools.iter().map(|pool| (*pool).clone()));
    }

    /// Registers pools, the first as the anchor, and says that they are ready.
    pub(crate) fn register_all(&self, pools: &[&MockPool]) -> Check {
        if let Some((anchor, side)) = pools.split_first() {
            if let Err(error) = self.register(anchor)? {
                return fail(format!("the pool {:?} is taken", anchor.spec()), error.to_string());
            }
            if !side.is_empty()
                && let Err(error) = self.register_side(side)?
            {
                let specs: Vec<_> = side.iter().map(|pool| pool.spec()).collect();
                return fail(format!("the side pools {specs:?} are taken"), error.to_string());
            }
        }
        match self.ready()? {
            Ok(()) => Ok(()),
            Err(error) => fail("pools_ready takes pools that were registered", error.to_string()),
        }
    }

    /// `register_mem_pool_host`.
    pub(crate) fn register(&self, anchor: &MockPool) -> Check<Result<()>> {
        self.hold(&[anchor]);
        let context = self.context(&Options::default());
        anchor.describe(|desc| {
            self.watch.call("register_mem_pool_host", self.watch.limits.call, |error| {
                // SAFETY: the description lives through the call, the pool until the instance is closed.
                unsafe { (self.table.register_mem_pool_host)(self.this, &raw const context, desc, error) }
            })
        })
    }

    /// `register_v2_side_pools`.
    pub(crate) fn register_side(&self, pools: &[&MockPool]) -> Check<Result<()>> {
        self.hold(pools);
        self.describe_all(pools, &mut Vec::new())
    }

    // Descriptions borrow from stack frames, so they are gathered frame by frame.
    fn describe_all(&self, pools: &[&MockPool], descs: &mut Vec<PoolDesc>) -> Check<Result<()>> {
        let Some((pool, rest)) = pools.split_first() else {
            let context = self.context(&Options::default());
            let count = descs.len() as u64;
            return self.watch.call("register_v2_side_pools", self.watch.limits.call, |error| {
                let descs = descs.as_ptr();
                // SAFETY: the frames below hold what the descriptions point at; the pools live until the instance is closed.
                unsafe { (self.table.register_v2_side_pools)(self.this, &raw const context, descs, count, error) }
            });
        };
        pool.describe(|desc| {
            descs.push(*desc);
            self.describe_all(rest, descs)
        })
    }

    /// `unregister`, by number.
    pub(crate) fn unregister(&self, ids: &[u32]) -> Check<Result<()>> {
        let context = self.context(&Options::default());
        self.watch.call("unregister", self.watch.limits.call, |error| {
            // SAFETY: the numbers live through the call.
            unsafe { (self.table.unregister)(self.this, &raw const context, ids.as_ptr(), ids.len() as u64, error) }
        })
    }

    /// `pools_ready`.
    pub(crate) fn ready(&self) -> Check<Result<()>> {
        let context = self.context(&Options::default());
        // SAFETY: the instance is open.
        let run = |error: *mut ErrorOut| unsafe { (self.table.pools_ready)(self.this, &raw const context, error) };
        self.watch.call("pools_ready", self.watch.limits.call, run)
    }

    /// `batch_exists`.
    pub(crate) fn exists(&self, options: &Options<'_>, keys: &[PageKey], queries: &[Query]) -> Check<Result<Found>> {
        self.ask("batch_exists", options, keys, queries, |args, error| {
            // SAFETY: everything in `args` lives through the call.
            unsafe { (self.table.batch_exists)(self.this, args, error) }
        })
    }

    /// `batch_exists`, or `lookup` of the linker face.
    pub(crate) fn ask(
        &self,
        name: &'static str,
        options: &Options<'_>,
        keys: &[PageKey],
        queries: &[Query],
        run: impl FnOnce(*const ExistsArgs, *mut ErrorOut) -> Status,
    ) -> Check<Result<Found>> {
        let pools: Vec<v0_1::PoolQuery> = queries.iter().map(|query| query.raw).collect();
        let own_keys = keys.to_vec();
        let mut restorable = Guarded::new(keys.len() + 1);
        let mut present = Guarded::new(keys.len() * pools.len());
        let args = ExistsArgs {
            context: self.context(options),
            keys: own_keys.as_ptr(),
            key_count: keys.len() as u64,
            pools: pools.as_ptr(),
            pool_count: pools.len() as u64,
            chain_position: options.position,
            prefix_keys: options.prefix_keys.as_ptr(),
            prefix_key_count: options.prefix_keys.len() as u64,
            request: options.request,
            restorable: restorable.as_mut_ptr(),
            present: present.as_mut_ptr(),
        };
        let result = self.watch.call(name, self.time(options), |error| run(&raw const args, error))?;
        restorable.check(name, "restorable")?;
        present.check(name, "present")?;
        unchanged(name, &own_keys, keys)?;
        if let Err(error) = result {
            return Ok(Err(error));
        }
        if let Some(length) = restorable.bytes().iter().position(|entry| *entry > 1) {
            let seen = format!("{} for length {length}", restorable.bytes()[length]);
            return fail_rule(STATUSES, format!("{name} answers 0 or 1 for each length"), seen);
        }
        let status = |byte: &u8| PageStatus::from_raw(*byte);
        let present = match keys.len() {
            0 => vec![Vec::new(); pools.len()],
            len => present.bytes().chunks(len).map(|pool| pool.iter().map(status).collect()).collect(),
        };
        Ok(Ok(Found { restorable: restorable.bytes().iter().map(|entry| *entry == 1).collect(), present }))
    }

    fn batch(&self, name: &'static str, function: BatchFn, options: &Options<'_>, parts: &[Part]) -> Check<Outcome> {
        let own: Vec<Part> = parts.to_vec();
        let mut statuses: Vec<Guarded> = parts.iter().map(|part| Guarded::new(part.keys.len())).collect();
        let transfers: Vec<PoolTransfer> =
            own.iter().zip(&mut statuses).map(|(part, statuses)| part.transfer(statuses.as_mut_ptr())).collect();
        let args = BatchArgs {
            context: self.context(options),
            transfers: transfers.as_ptr(),
            transfer_count: transfers.len() as u64,
            chain_position: options.position,
            prefix_keys: options.prefix_keys.as_ptr(),
            prefix_key_count: options.prefix_keys.len() as u64,
            session_id: options.session_id.into(),
        };
        let result = self.watch.call(name, self.time(options), |error| {
            // SAFETY: everything in `args` lives through the call; by the rules of the boundary nothing is touched after it.
            unsafe { function(self.this, &raw const args, error) }
        })?;
        for ((part, own), statuses) in parts.iter().zip(&own).zip(&statuses) {
            statuses.check(name, "statuses")?;
            unchanged(name, &own.keys, &part.keys)?;
            unchanged(name, &own.pages, &part.pages)?;
            let unset = statuses.bytes().iter().position(|status| *status == 0);
            if let (Ok(()), Some(index)) = (&result, unset) {
                let expected = format!("{name}, which succeeds, writes a status for every page");
                return fail_rule(STATUSES, expected, format!("0 for page {index} of {}", part.keys.len()));
            }
        }
        let status = |byte: &u8| PageStatus::from_raw(*byte);
        let statuses = statuses.iter().map(|part| part.bytes().iter().map(status).collect()).collect();
        Ok(Outcome { result, statuses })
    }

    /// `batch_get`.
    pub(crate) fn get(&self, options: &Options<'_>, parts: &[Part]) -> Check<Outcome> {
        self.batch("batch_get", self.table.batch_get, options, parts)
    }
    /// `batch_set`.
    pub(crate) fn set(&self, options: &Options<'_>, parts: &[Part]) -> Check<Outcome> {
        self.batch("batch_set", self.table.batch_set, options, parts)
    }
    /// `batch_remove`.
    pub(crate) fn remove(&self, options: &Options<'_>, parts: &[Part]) -> Check<Outcome> {
        self.batch("batch_remove", self.table.batch_remove, options, parts)
    }

    /// `clear`.
    pub(crate) fn clear(&self, options: &Options<'_>, scope: ClearScope) -> Check<Result<()>> {
        self.clear_raw(options, scope.raw())
    }

    /// `clear` of a scope by its number, known or not.
    pub(crate) fn clear_raw(&self, options: &Options<'_>, scope: u32) -> Check<Result<()>> {
        let context = self.context(options);
        self.watch.call("clear", self.time(options), |error| {
            // SAFETY: the instance is open.
            unsafe { (self.table.clear)(self.this, &raw const context, scope, error) }
        })
    }

    /// `stats`.
    pub(crate) fn stats(&self, options: &Options<'_>) -> Check<Result<Stats>> {
        let context = self.context(options);
        let mut stats = Stats { pages: 0, bytes_used: 0, bytes_total: 0, failures: 0, get_mean_ns: 0, set_mean_ns: 0 };
        let answer = self.watch.call("stats", self.time(options), |error| {
            // SAFETY: `stats` lives through the call.
            unsafe { (self.table.stats)(self.this, &raw const context, &raw mut stats, error) }
        })?;
        Ok(answer.map(|()| stats))
    }

    /// `health`; a state that this version does not know is none.
    pub(crate) fn health(&self, options: &Options<'_>) -> Check<Result<(Option<HealthState>, Health)>> {
        let context = self.context(options);
        let mut reason = Guarded::new(256);
        let mut out =
            HealthOut { state: 0, reserved: 0, reason: reason.as_mut_ptr(), reason_capacity: 256, reason_len: 0 };
        let answer = self.watch.call("health", self.time(options), |error| {
            // SAFETY: `out` and its buffer live through the call.
            unsafe { (self.table.health)(self.this, &raw const context, &raw mut out, error) }
        })?;
        reason.check("health", "reason")?;
        if let Err(error) = answer {
            return Ok(Err(error));
        }
        let Some(text) = reason.bytes().get(..out.reason_len as usize) else {
            let seen = format!("a length of {}", out.reason_len);
            return fail_rule(ERROR_FORM, "the reason of health has at most the 256 bytes of its buffer", seen);
        };
        let Ok(text) = std::str::from_utf8(text) else {
            return fail_rule(ERROR_FORM, "the reason of health is UTF-8", format!("{text:?}"));
        };
        let health = Health { state: HealthState::from_raw(out.state), reason: text.to_owned() };
        Ok(Ok((HealthState::try_from_raw(out.state), health)))
    }

    /// `flush`.
    pub(crate) fn flush(&self, options: &Options<'_>) -> Check<Result<()>> {
        let context = self.context(options);
        // SAFETY: the instance is open.
        let run = |error: *mut ErrorOut| unsafe { (self.table.flush)(self.this, &raw const context, error) };
        self.watch.call("flush", self.time(options), run)
    }

    /// `report_held_pages`: the worker holds these pages in host memory now. A host calls it where the instance asks for it.
    pub(crate) fn report_held_pages(&self, options: &Options<'_>, keys: &[PageKey]) -> Check<Result<()>> {
        if !self.capabilities.held_pages {
            return Ok(Ok(()));
        }
        let args = v0_1::HeldPages {
            context: self.context(options),
            tier: crate::HeldTier::Host.raw(),
            change: crate::HeldChange::Added.raw(),
            keys: keys.as_ptr(),
            key_count: keys.len() as u64,
        };
        // SAFETY: `args` and the keys live through the call.
        let run = |error: *mut ErrorOut| unsafe { (self.table.report_held_pages)(self.this, &raw const args, error) };
        self.watch.call("report_held_pages", self.time(options), run)
    }

    /// The table of the linker face, if there is one.
    #[allow(dead_code, reason = "for the rules of the linker face")]
    pub(crate) fn linker_table(&self) -> Option<&'static LinkerTable> {
        // SAFETY: null or a constant table, by the rules of the boundary.
        unsafe { self.table.linker.as_ref() }
    }

    /// `close`, which must succeed.
    pub(crate) fn close(self) -> Check {
        match self.close_once()? {
            Ok(()) => Ok(()),
            Err(error) => fail("close succeeds", error.to_string()),
        }
    }

    fn close_once(&self) -> Check<Result<()>> {
        if self.closed.replace(true) {
            return Ok(Ok(()));
        }
        let context = self.context(&Options::default());
        // SAFETY: the instance is owned here, so no other call runs, and `closed` keeps this from happening twice.
        let run = |error: *mut ErrorOut| unsafe { (self.table.close)(self.this, &raw const context, error) };
        self.watch.call("close", self.watch.limits.call, run)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // The rule has ended already; what close says adds nothing.
        let _ = self.close_once();
    }
}

/// Zeroed bytes for the plugin to write, with bytes around them that it must leave alone.
#[derive(Debug)]
pub(crate) struct Guarded(Vec<u8>);

impl Guarded {
    pub(crate) fn new(len: usize) -> Guarded {
        let mut bytes = vec![GUARD_BYTE; len + 2 * GUARD];
        bytes[GUARD..GUARD + len].fill(0);
        Guarded(bytes)
    }
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0[GUARD..].as_mut_ptr()
    }
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0[GUARD..self.0.len() - GUARD]
    }
    pub(crate) fn check(&self, call: &str, what: &str) -> Check {
        let guards = self.0.iter().take(GUARD).chain(self.0.iter().rev().take(GUARD));
        if guards.into_iter().all(|byte| *byte == GUARD_BYTE) {
            return Ok(());
        }
        fail_rule(
            STATUSES,
            format!("{call} writes its {what} and nothing beside them"),
            "bytes beside them were written",
        )
    }
}

fn unchanged<T: PartialEq>(call: &str, now: &[T], before: &[T]) -> Check {
    if now == before {
        return Ok(());
    }
    fail_rule(SOURCES, format!("{call} leaves the keys and page indices alone"), "they have changed")
}

/// A call that must succeed.
pub(crate) fn succeeds<T>(what: &str, answer: Result<T, Error>) -> Check<T> {
    answer.or_else(|error| fail(format!("{what} succeeds"), error.to_string()))
}
