//! Calls by the linker face, as data calls: each begins, waits for its end, and keeps what the plugin may touch until then.
//!
//! The boundary has a load in three calls, `load`, `start_layer_wise_loading` and `finish_layer_wise_loading`, and an offload in two, `offload` and
//! `pop_completed_offload`. To the host each is one call that runs on a thread of the instance: it has a deadline, its caller can leave it, and it
//! is late until it has returned, as any other.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvdock_plugin_api::v0_1::{
    CallContext, FinishArgs, LoadArgs, OffloadArgs, OffloadDone, PoolTransfer, ReadyHandle, StartArgs,
};
use kvdock_plugin_api::{ErrorKind, PageStatus, ReadyKind};

use super::abi::{LinkerFace, RawInstance};
use super::backend::PoolGroup;
use super::call::{CallBuffers, CallFailure, Transfers, invoke};
use super::pool_desc::Registered;

/// How often a wait for an offload looks again, should the plugin not tell of its end.
const LOOK: Duration = Duration::from_millis(2);

/// What the linker calls of one instance share.
#[derive(Debug, Default)]
pub struct LinkState {
    /// Held over those calls that come from one thread at a time.
    serial: Mutex<()>,
    /// Loads between their start and the end of their finish: a reset does not run beside them.
    finishing: AtomicUsize,
    /// Numbers of batches and offloads.
    next: AtomicU64,
    /// Offloads that were popped by another's call.
    done: Mutex<HashMap<u64, OffloadDone>>,
    changed: Condvar,
    /// Whatever is queued is to end.
    ending: AtomicBool,
    /// Resets so far: what was queued before one has no end that could be popped.
    resets: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LinkState {
    /// A plugin told that an offload has completed.
    pub fn offload_completed(&self) {
        self.changed.notify_all();
    }

    /// What waits for an offload is to end, by a reset.
    pub fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// The pages of one group in a load.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PartLane {
    /// Its keys and pages among those of the call.
    pub pages: Range<usize>,
    /// Pages of the sequence from the start of the load to the first of them.
    pub offset: u32,
}

/// A load of one request in a batch of loads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadPart {
    /// Number of the request.
    pub request: u64,
    /// What it fills, by group.
    pub lanes: [PartLane; PoolGroup::ALL.len()],
    /// Pages of its sequence before them.
    pub position: u64,
    /// The keys of those among the prefix keys of the call.
    pub prefix: Range<usize>,
}

/// What a linker call has beside what every data call has.
#[derive(Debug, Default)]
pub struct LinkBuffers {
    /// Shared by the calls of the instance.
    pub state: Arc<LinkState>,
    /// The loads of a batch.
    pub parts: Vec<LoadPart>,
    /// The words by which the plugin says which layers are settled.
    pub words: Arc<[AtomicU32]>,
    /// Number of the request of a lookup.
    pub request: u64,
}

impl CallBuffers {
    /// Loads layer by layer: queues all parts, starts them as one batch, and waits for its end.
    pub(super) fn load(
        &mut self,
        face: &dyn LinkerFace,
        instance: RawInstance,
        pools: &[Registered],
    ) -> Result<(), CallFailure> {
        self.unset_statuses(pools)?;
        let state = self.link.state.clone();
        let context = self.context();
        let batch = state.number();
        let serial = lock(&state.serial);
        let mut refusal = None;
        let mut queued = 0;
        for part in self.link.parts.clone() {
            let transfers = self.part_transfers(pools, &part);
            let prefix = self.prefix_keys.get(part.prefix.clone()).unwrap_or_default();
            let args = LoadArgs {
                request: part.request,
                transfers: transfers.as_ptr(),
                transfer_count: transfers.len() as u64,
                chain_position: part.position,
                prefix_keys: prefix.as_ptr(),
                prefix_key_count: prefix.len() as u64,
            };
            let taken = invoke(&mut self.message, |error| {
                // SAFETY: as above; what the transfers name is in these buffers, which stay with this call until `finish` has returned.
                unsafe { face.load(instance, &raw const args, error) }
            });
            match taken {
                Ok(()) => queued += 1,
                Err(failure) => {
                    let count = self.keys.len().max(1);
                    for statuses in self.statuses.chunks_mut(count) {
                        part.lanes.iter().for_each(|lane| statuses[lane.pages.clone()].fill(PageStatus::Refused.raw()));
                    }
                    refusal = Some(failure);
                }
            }
        }
        if queued == 0 {
            return refusal.map_or(Ok(()), Err);
        }
        let ready = ReadyHandle { kind: ReadyKind::Now.raw(), reserved: 0, handle: 0 };
        let start = StartArgs {
            context,
            batch,
            ready: &raw const ready,
            ready_count: 1,
            layer_done: self.link.words.as_ptr().cast::<u32>().cast_mut(),
            layer_count: self.link.words.len() as u64,
        };
        invoke(&mut self.message, |error| {
            // SAFETY: as above; words and cancel flag are kept by these buffers, and are accessed atomically only.
            unsafe { face.start(instance, &raw const start, error) }
        })?;
        state.finishing.fetch_add(1, Ordering::SeqCst);
        drop(serial);
        let finish = FinishArgs { context, batch };
        let ended = invoke(&mut self.message, |error| {
            // SAFETY: as above. A finish may run beside any call but a reset, which `finishing` keeps away.
            unsafe { face.finish(instance, &raw const finish, error) }
        });
        state.finishing.fetch_sub(1, Ordering::SeqCst);
        ended
    }

    /// Makes room for the statuses of a load: one a key for each pool of the key's group. Where other groups have more pools, the rest says
    /// nothing against the page.
    fn unset_statuses(&mut self, pools: &[Registered]) -> Result<(), CallFailure> {
        let of_group = PoolGroup::ALL.map(|group| pools.iter().filter(|pool| pool.group == group).count());
        let count = self.keys.len();
        self.statuses.clear();
        self.statuses.resize(of_group.into_iter().max().unwrap_or(0) * count, PageStatus::Ok.raw());
        for (group, lane) in self.link.parts.iter().flat_map(|part| PoolGroup::ALL.into_iter().zip(&part.lanes)) {
            let own = of_group[group as usize];
            if own == 0 && !lane.pages.is_empty() {
                let group = group.as_str();
                let message =
                    format!("a load of pages of {group} pools, of which none is registered with this backend");
                return Err(CallFailure::new(ErrorKind::Internal, false, message));
            }
            for statuses in self.statuses.chunks_mut(count.max(1)).take(own) {
                statuses[lane.pages.clone()].fill(PageStatus::Unset.raw());
            }
        }
        Ok(())
    }

    /// The pages of one load, in each pool.
    fn part_transfers(&mut self, pools: &[Registered], part: &LoadPart) -> Transfers {
        let count = self.keys.len();
        let statuses = self.statuses.as_mut_ptr();
        let mut transfers = Transfers::new();
        for (group, lane) in PoolGroup::ALL.into_iter().zip(&part.lanes).filter(|(_, lane)| !lane.pages.is_empty()) {
            let (keys, pages) = (self.keys[lane.pages.clone()].as_ptr(), self.pages[lane.pages.clone()].as_ptr());
            let own = pools.iter().filter(|pool| pool.group == group).enumerate();
            transfers.extend(own.map(|(place, pool)| PoolTransfer {
                pool: pool.pool,
                layer_first: 0,
                layer_count: 0,
                chain_offset: lane.offset,
                keys,
                pages,
                count: lane.pages.len() as u64,
                statuses: statuses.wrapping_add(place * count + lane.pages.start),
            }));
        }
        // The anchor last, as in every call about pages.
        transfers.reverse();
        transfers
    }

    /// Offloads pages, and waits until that has completed.
    pub(super) fn offload(
        &mut self,
        face: &dyn LinkerFace,
        instance: RawInstance,
        pools: &[Registered],
    ) -> Result<(), CallFailure> {
        let state = self.link.state.clone();
        let operation = state.number();
        let transfers = self.transfers(pools, 0..self.keys.len());
        let ready = ReadyHandle { kind: ReadyKind::Now.raw(), reserved: 0, handle: 0 };
        let args = OffloadArgs {
            operation,
            deadline_ns: self.deadline_ns,
            transfers: transfers.as_ptr(),
            transfer_count: transfers.len() as u64,
            ready: &raw const ready,
            ready_count: 1,
            chain_position: self.position,
            prefix_keys: self.prefix_keys.as_ptr(),
            prefix_key_count: self.prefix_keys.len() as u64,
            session_id: self.session.as_str().into(),
        };
        let serial = lock(&state.serial);
        let resets = state.resets.load(Ordering::SeqCst);
        invoke(&mut self.message, |error| {
            // SAFETY: as above; what the transfers name is in these buffers, which stay with this call until the operation is popped or reset.
            unsafe { face.offload(instance, &raw const args, error) }
        })?;
        drop(serial);
        loop {
            if let Some(done) = lock(&state.done).remove(&operation) {
                return self.offloaded(&done);
            }
            {
                let _serial = lock(&state.serial);
                if state.resets.load(Ordering::SeqCst) != resets {
                    return Err(CallFailure::new(ErrorKind::Cancelled, true, "the offload was ended"));
                }
                self.pop(&state, face, instance)?;
                if state.ending.load(Ordering::SeqCst) && state.finishing.load(Ordering::SeqCst) == 0 {
                    self.reset(&state, face, instance)?;
                    continue;
                }
            }
            let done = lock(&state.done);
            if !done.contains_key(&operation) {
                drop(state.changed.wait_timeout(done, LOOK).unwrap_or_else(PoisonError::into_inner));
            }
        }
    }

    /// Takes in what has completed, whosever it is.
    fn pop(&mut self, state: &LinkState, face: &dyn LinkerFace, instance: RawInstance) -> Result<(), CallFailure> {
        // SAFETY: the instance is open, and `serial` is held.
        let completed = unsafe { face.completed(instance) };
        for _ in 0..completed {
            let mut out = OffloadDone { operation: 0, status: 0, retryable: 0 };
            invoke(&mut self.message, |error| {
                // SAFETY: as above; `out` lives until the call returns.
                unsafe { face.pop(instance, &raw mut out, error) }
            })?;
            lock(&state.done).insert(out.operation, out);
        }
        if completed > 0 {
            state.changed.notify_all();
        }
        Ok(())
    }

    fn reset(&mut self, state: &LinkState, face: &dyn LinkerFace, instance: RawInstance) -> Result<(), CallFailure> {
        let context = CallContext { deadline_ns: 0, cancel: std::ptr::null(), trace_id: self.trace_id };
        invoke(&mut self.message, |error| {
            // SAFETY: `serial` is held, so no load starts, and none runs.
            unsafe { face.reset(instance, &raw const context, error) }
        })?;
        state.resets.fetch_add(1, Ordering::SeqCst);
        state.changed.notify_all();
        Ok(())
    }

    fn offloaded(&mut self, done: &OffloadDone) -> Result<(), CallFailure> {
        if done.status == 0 {
            // All pages are stored, or none.
            self.statuses.fill(PageStatus::Ok.raw());
            return Ok(());
        }
        let kind = ErrorKind::from_raw(done.status);
        let message = "the offload failed; the plugin's own message is in the log";
        Err(CallFailure::new(kind, done.retryable != 0, message))
    }
}
