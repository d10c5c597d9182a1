//! An open instance, called through its C functions.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{MockHost, MockLinker, MockPool};
use crate::v0_1::{
    self, BackendTable, BatchArgs, CallContext, ErrorOut, ExistsArgs, PageKey, PoolDesc, PoolTransfer, Stats,
};
use crate::{
    CacheMode, Capabilities, ClearScope, Error, ErrorKind, Health, HealthState, Identity, PageStatus, Result,
    monotonic_ns,
};

/// Deadline, cancel flag and chain position of a call.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// Time the call has; none for no deadline. Zero is a deadline that has passed.
    pub deadline: Option<Duration>,
    /// Cancel flag.
    pub cancel: Option<&'a AtomicU32>,
    /// Pages of the sequence before the first key.
    pub position: u64,
    /// Keys of those pages.
    pub prefix_keys: &'a [PageKey],
    /// Session that the request names.
    pub session_id: &'a str,
    /// Number of the request.
    pub request: u64,
}

impl Options<'_> {
    pub(crate) fn context(&self) -> CallContext {
        CallContext {
            deadline_ns: self.deadline.map_or(0, |time| monotonic_ns() + time.as_nanos() as u64),
            cancel: self.cancel.map_or(std::ptr::null(), |flag| flag.as_ptr().cast_const()),
            trace_id: 0,
        }
    }
}

/// The pages of one pool in a batch.
#[derive(Debug, Clone)]
pub struct Part {
    /// Number of the pool.
    pub pool: u32,
    /// Keys, one a page.
    pub keys: Vec<PageKey>,
    /// Page indices, one a key.
    pub pages: Vec<u32>,
    /// First layer and number of layers; none for all.
    pub layers: Option<(u32, u32)>,
}

impl Part {
    /// Pages of a pool.
    pub fn new(pool: &MockPool, keys: &[PageKey], pages: &[u32]) -> Part {
        Part { pool: pool.id(), keys: keys.to_vec(), pages: pages.to_vec(), layers: None }
    }

    pub(crate) fn transfer(&self, statuses: *mut u8) -> PoolTransfer {
        let (layer_first, layer_count) = self.layers.unwrap_or_default();
        PoolTransfer {
            pool: self.pool,
            layer_first,
            layer_count,
            chain_offset: 0,
            keys: self.keys.as_ptr(),
            pages: if self.pages.len() == self.keys.len() { self.pages.as_ptr() } else { std::ptr::null() },
            count: self.keys.len() as u64,
            statuses,
        }
    }
}

/// What a batch call answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Result of the call.
    pub result: Result<()>,
    /// Status of each page, part after part.
    pub statuses: Vec<Vec<PageStatus>>,
}

impl Outcome {
    /// Whether the call succeeded and every page is `Ok`.
    pub fn all_ok(&self) -> bool {
        self.result.is_ok() && self.statuses.iter().flatten().all(|status| *status == PageStatus::Ok)
    }
}

/// A pool that an exists call asks about.
#[derive(Debug, Clone, Copy)]
pub struct Query {
    /// The numbers that cross the boundary.
    pub raw: v0_1::PoolQuery,
}

impl Query {
    /// Asks about a pool by its own policy.
    pub fn of(pool: &MockPool) -> Query {
        let spec = pool.spec();
        Query {
            raw: v0_1::PoolQuery {
                pool: spec.id,
                hit_policy: spec.hit_policy,
                trailing_pages: spec.trailing_pages,
                block_pages: spec.block_pages,
                group_pages: spec.group_pages,
                held_pages: 0,
            },
        }
    }
}

/// What an exists call answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// At `n`: whether the first `n` keys can be restored in full.
    pub restorable: Vec<bool>,
    /// Status of each page, pool after pool.
    pub present: Vec<Vec<PageStatus>>,
}

impl Found {
    /// The longest prefix that can be restored, in pages.
    pub fn longest(&self) -> usize {
        self.restorable.iter().rposition(|can| *can).unwrap_or(0)
    }
}

/// An identity as it crosses the boundary; it borrows the texts.
pub(crate) fn raw_identity(identity: &Identity) -> v0_1::Identity {
    v0_1::Identity {
        namespace_digest: identity.namespace,
        namespace_json: identity.namespace_json.as_str().into(),
        model_name: identity.model_name.as_str().into(),
        weights_digest: identity.weights_digest,
        numerics_id: identity.numerics_id.as_str().into(),
        page_tokens: identity.page_tokens,
        tp_rank: identity.tp.0,
        tp_size: identity.tp.1,
        pp_rank: identity.pp.0,
        pp_size: identity.pp.1,
        cp_rank: identity.cp.0,
        cp_size: identity.cp.1,
        dp_rank: identity.dp.0,
        dp_size: identity.dp.1,
        dcp_rank: identity.dcp.0,
        dcp_size: identity.dcp.1,
        tp_lcm_size: identity.tp_lcm_size,
        replicated: u32::from(identity.replicated),
        writer: u32::from(identity.writer),
    }
}

/// Calls a C function and reads its error.
pub(super) fn call(run: impl FnOnce(*mut ErrorOut) -> v0_1::Status) -> Result<()> {
    let mut message = [0u8; MESSAGE_CAPACITY];
    let mut error = ErrorOut {
        kind: 0,
        retryable: 0,
        panicked: 0,
        reserved: [0; 2],
        message: message.as_mut_ptr(),
        message_capacity: message.len() as u64,
        message_len: 0,
    };
    let status = run(&raw mut error);
    if status == 0 {
        return Ok(());
    }
    assert_eq!(status, error.kind, "the status of a call and the kind in its error are the same");
    assert!(error.message_len <= MESSAGE_CAPACITY as u64, "a message stays in its buffer");
    let text = std::str::from_utf8(&message[..error.message_len as usize]);
    Err(Error {
        kind: ErrorKind::from_raw(error.kind),
        retryable: error.retryable != 0,
        panicked: error.panicked != 0,
        message: text.unwrap_or("(the message is no UTF-8)").to_owned(),
    })
}

/// Bytes that an error message can have.
pub(super) const MESSAGE_CAPACITY: usize = 512;

/// An open instance of a plugin. Data calls may come from many threads. It is closed once, by [`Instance::close`] or when it is dropped.
#[derive(Debug)]
pub struct Instance {
    table: &'static BackendTable,
    this: *mut c_void,
    pools: Mutex<Vec<MockPool>>,
    closed: Cell<bool>,
}

// SAFETY: the plugin promises that its calls may come from any thread.
unsafe impl Send for Instance {}
// SAFETY: as for `Send`; `closed` is touched by `close` and drop only, which own the instance.
unsafe impl Sync for Instance {}

impl Instance {
    /// Opens an instance.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn open(
        host: &MockHost,
        table: &'static BackendTable,
        config: &str,
        identity: &Identity,
        options: &Options<'_>,
    ) -> Result<Instance> {
        let raw = raw_identity(identity);
        let (host, host_context) = host.table();
        let args = v0_1::OpenArgs {
            context: options.context(),
            config_json: config.into(),
            instance_name: "mock".into(),
            identity: &raw const raw,
            host,
            host_context,
            cache_mode: CacheMode::Hierarchical.raw(),
            reserved: 0,
        };
        let mut this = std::ptr::null_mut();
        // SAFETY: everything in `args` lives through the call, the host's table for ever.
        call(|error| unsafe { (table.open)(&raw const args, &raw mut this, error) })?;
        assert!(!this.is_null(), "an open that succeeds gives an instance");
        Ok(Instance { table, this, pools: Mutex::default(), closed: Cell::new(false) })
    }

    /// `capabilities`: what this instance can do.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn capabilities(&self) -> Result<Capabilities> {
        let mut out = v0_1::CapabilitiesOut { flags: 0, alignment: 1, preferred_batch: 0, concurrency: 0, reserved: 0 };
        // SAFETY: `out` lives through the call, and the instance is open.
        call(|error| unsafe { (self.table.capabilities)(self.this, &raw mut out, error) })?;
        Ok(Capabilities::from_raw(&out))
    }

    fn hold(&self, pools: &[&MockPool]) {
        let mut held = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        held.extend(pools.iter().map(|pool| (*pool).clone()));
    }

    /// `register_mem_pool_host`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn register(&self, anchor: &MockPool) -> Result<()> {
        self.hold(&[anchor]);
        let context = Options::default().context();
        anchor.describe(|desc| {
            // SAFETY: the description lives through the call, the pool until the instance is closed.
            call(|error| unsafe { (self.table.register_mem_pool_host)(self.this, &raw const context, desc, error) })
        })
    }

    /// `register_v2_side_pools`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn register_side(&self, pools: &[&MockPool]) -> Result<()> {
        self.hold(pools);
        let mut descs = Vec::new();
        self.describe_all(pools, &mut descs)
    }

    // Descriptions borrow from stack frames, so they are gathered frame by frame.
    fn describe_all(&self, pools: &[&MockPool], descs: &mut Vec<PoolDesc>) -> Result<()> {
        let Some((pool, rest)) = pools.split_first() else {
            let context = Options::default().context();
            let count = descs.len() as u64;
            return call(|error| {
                // SAFETY: the frames below hold what the descriptions point at; the pools live until the instance is closed.
                unsafe {
                    (self.table.register_v2_side_pools)(self.this, &raw const context, descs.as_ptr(), count, error)
                }
            });
        };
        pool.describe(|desc| {
            descs.push(*desc);
            self.describe_all(rest, descs)
        })
    }

    /// `unregister`, by number.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn unregister(&self, ids: &[u32]) -> Result<()> {
        let context = Options::default().context();
        call(|error| {
            // SAFETY: the numbers live through the call.
            unsafe { (self.table.unregister)(self.this, &raw const context, ids.as_ptr(), ids.len() as u64, error) }
        })
    }

    /// `pools_ready`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn ready(&self) -> Result<()> {
        let context = Options::default().context();
        // SAFETY: the instance is open.
        call(|error| unsafe { (self.table.pools_ready)(self.this, &raw const context, error) })
    }

    /// `batch_exists`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn exists(&self, options: &Options<'_>, keys: &[PageKey], queries: &[Query]) -> Result<Found> {
        exists(options, keys, queries, |args, error| {
            // SAFETY: everything in `args` lives through the call.
            unsafe { (self.table.batch_exists)(self.this, args, error) }
        })
    }

    fn batch(
        &self,
        function: unsafe extern "C" fn(*mut c_void, *const BatchArgs, *mut ErrorOut) -> v0_1::Status,
        options: &Options<'_>,
        parts: &[Part],
    ) -> Outcome {
        let mut statuses: Vec<Vec<u8>> = parts.iter().map(|part| vec![0; part.keys.len()]).collect();
        let transfers: Vec<PoolTransfer> =
            parts.iter().zip(&mut statuses).map(|(part, statuses)| part.transfer(statuses.as_mut_ptr())).collect();
        let args = BatchArgs {
            context: options.context(),
            transfers: transfers.as_ptr(),
            transfer_count: transfers.len() as u64,
            chain_position: options.position,
            prefix_keys: options.prefix_keys.as_ptr(),
            prefix_key_count: options.prefix_keys.len() as u64,
            session_id: options.session_id.into(),
        };
        // SAFETY: everything in `args` lives through the call; by the rules of the boundary nothing is touched after it.
        let result = call(|error| unsafe { function(self.this, &raw const args, error) });
        Outcome {
            result,
            statuses: statuses.iter().map(|part| part.iter().map(|s| PageStatus::from_raw(*s)).collect()).collect(),
        }
    }

    /// `batch_get`.
    pub fn get(&self, options: &Options<'_>, parts: &[Part]) -> Outcome {
        self.batch(self.table.batch_get, options, parts)
    }
    /// `batch_set`.
    pub fn set(&self, options: &Options<'_>, parts: &[Part]) -> Outcome {
        self.batch(self.table.batch_set, options, parts)
    }
    /// `batch_remove`.
    pub fn remove(&self, options: &Options<'_>, parts: &[Part]) -> Outcome {
        self.batch(self.table.batch_remove, options, parts)
    }

    /// `clear`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn clear(&self, options: &Options<'_>, scope: ClearScope) -> Result<()> {
        let context = options.context();
        // SAFETY: the instance is open.
        call(|error| unsafe { (self.table.clear)(self.this, &raw const context, scope.raw(), error) })
    }

    /// `stats`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn stats(&self) -> Result<Stats> {
        let context = Options::default().context();
        let mut stats = Stats { pages: 0, bytes_used: 0, bytes_total: 0, failures: 0, get_mean_ns: 0, set_mean_ns: 0 };
        // SAFETY: `stats` lives through the call.
        call(|error| unsafe { (self.table.stats)(self.this, &raw const context, &raw mut stats, error) })?;
        Ok(stats)
    }

    /// `health`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn health(&self) -> Result<Health> {
        let context = Options::default().context();
        let mut reason = [0u8; MESSAGE_CAPACITY];
        let mut out = v0_1::HealthOut {
            state: 0,
            reserved: 0,
            reason: reason.as_mut_ptr(),
            reason_capacity: reason.len() as u64,
            reason_len: 0,
        };
        // SAFETY: `out` and its buffer live through the call.
        call(|error| unsafe { (self.table.health)(self.this, &raw const context, &raw mut out, error) })?;
        let text = std::str::from_utf8(&reason[..out.reason_len as usize]).unwrap_or("(the reason is no UTF-8)");
        Ok(Health { state: HealthState::from_raw(out.state), reason: text.to_owned() })
    }

    /// `flush`.
    ///
    /// # Errors
    /// What the plugin answers.
    pub fn flush(&self, options: &Options<'_>) -> Result<()> {
        let context = options.context();
        // SAFETY: the instance is open.
        call(|error| unsafe { (self.table.flush)(self.this, &raw const context, error) })
    }

    /// The linker face, if there is one.
    pub fn linker(&self) -> Option<MockLinker<'_>> {
        // SAFETY: null or a constant table, by the rules of the boundary.
        unsafe { self.table.linker.as_ref() }.map(|table| MockLinker {
            table,
            this: self.this,
            instance: std::marker::PhantomData,
        })
    }

    /// `close`.
    ///
    /// # Errors
    /// What the plugin answers; the instance is gone all the same.
    pub fn close(self) -> Result<()> {
        self.close_once()
    }

    fn close_once(&self) -> Result<()> {
        if self.closed.replace(true) {
            return Ok(());
        }
        let context = Options::default().context();
        // SAFETY: the instance is owned here, so no other call runs, and `closed` keeps this from happening twice.
        call(|error| unsafe { (self.table.close)(self.this, &raw const context, error) })
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // An error has nobody to go to; tests that care call `close`.
        let _ = self.close_once();
    }
}

/// Builds the arguments of an exists call and reads the answer.
pub(super) fn exists(
    options: &Options<'_>,
    keys: &[PageKey],
    queries: &[Query],
    run: impl FnOnce(&ExistsArgs, *mut ErrorOut) -> v0_1::Status,
) -> Result<Found> {
    let pools: Vec<v0_1::PoolQuery> = queries.iter().map(|query| query.raw).collect();
    let mut restorable = vec![0u8; keys.len() + 1];
    let mut present = vec![0u8; keys.len() * pools.len()];
    let args = ExistsArgs {
        context: options.context(),
        keys: keys.as_ptr(),
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
    call(|error| run(&args, error))?;
    assert!(restorable.iter().all(|entry| *entry <= 1), "every length is answered with 0 or 1: {restorable:?}");
    let present = if keys.is_empty() {
        vec![Vec::new(); pools.len()]
    } else {
        present.chunks(keys.len()).map(|pool| pool.iter().map(|s| PageStatus::from_raw(*s)).collect()).collect()
    };
    Ok(Found { restorable: restorable.iter().map(|entry| *entry == 1).collect(), present })
}
