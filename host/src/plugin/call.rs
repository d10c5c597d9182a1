//! One data call: its buffers, which outlive a caller that gives up, and the call itself.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use kvdock_plugin_api::v0_1::{BatchArgs, CallContext, ErrorOut, ExistsArgs, PageKey, PoolQuery, PoolTransfer};
use kvdock_plugin_api::{ErrorKind, PageStatus, monotonic_ns};
use smallvec::SmallVec;

use super::abi::{Face, RawInstance};
use super::backend::{Held, PoolGroup};
use super::linked::{LinkBuffers, LoadPart};
use super::pool_desc::Registered;

/// Pools that a call names without an allocation.
const FEW_POOLS: usize = 8;

/// What a call moves, pool by pool.
pub(super) type Transfers = SmallVec<[PoolTransfer; FEW_POOLS]>;

/// Bytes for the message of an error.
const MESSAGE_BYTES: usize = 2048;

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallFailure {
    /// Kind.
    pub kind: ErrorKind,
    /// Whether the same call may succeed later.
    pub retryable: bool,
    /// The plugin panicked.
    pub panicked: bool,
    /// For a person.
    pub message: String,
}

impl CallFailure {
    /// A failure of the host's own making.
    pub fn new(kind: ErrorKind, retryable: bool, message: impl Into<String>) -> CallFailure {
        CallFailure { kind, retryable, panicked: false, message: message.into() }
    }
}

/// `deadline` on the clock of the boundary.
pub fn deadline_ns(deadline: Instant) -> u64 {
    let left = deadline.saturating_duration_since(Instant::now());
    // 0 means no deadline, so a passed one is now.
    monotonic_ns().saturating_add(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX / 2)).max(1)
}

/// Calls a function of a plugin with a place for its error. `message` is the buffer; it is kept to avoid an allocation a call.
pub fn invoke(message: &mut Vec<u8>, function: impl FnOnce(*mut ErrorOut) -> u32) -> Result<(), CallFailure> {
    message.resize(MESSAGE_BYTES, 0);
    let mut out = ErrorOut {
        kind: 0,
        retryable: 0,
        panicked: 0,
        reserved: [0; 2],
        message: message.as_mut_ptr(),
        message_capacity: MESSAGE_BYTES as u64,
        message_len: 0,
    };
    let status = function(&raw mut out);
    if status == 0 {
        return Ok(());
    }
    let len = usize::try_from(out.message_len).unwrap_or(usize::MAX).min(MESSAGE_BYTES);
    let text = String::from_utf8_lossy(&message[..len]);
    let text = if text.is_empty() { "no reason given".into() } else { text };
    Err(CallFailure {
        kind: ErrorKind::from_raw(status),
        retryable: out.retryable != 0,
        panicked: out.panicked != 0,
        message: text.into_owned(),
    })
}

/// Which data call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// `batch_exists`
    Exists,
    /// `batch_get`
    Get,
    /// `batch_set`
    Set,
    /// `batch_remove`
    Remove,
    /// `lookup` of the linker face
    Lookup,
    /// From `load` to the end of `finish_layer_wise_loading`
    Load,
    /// From `offload` to `pop_completed_offload`
    Offload,
}

/// Everything a data call points at. A call that is late keeps it; so it owns copies, in buffers that are used again and again.
#[derive(Debug, Default)]
pub struct CallBuffers {
    /// Keys of the call.
    pub keys: Vec<PageKey>,
    /// Page indices, one a key; empty for exists and remove.
    pub pages: Vec<u32>,
    /// The group that the pages are of; none for exists, and for a load, whose parts say it.
    pub group: Option<PoolGroup>,
    /// What the host has itself; for exists.
    pub held: Held,
    /// One status a key, pool after pool of the call.
    pub statuses: Vec<u8>,
    /// `keys + 1` answers of an exists.
    pub restorable: Vec<u8>,
    /// Keys before the first.
    pub prefix_keys: Vec<PageKey>,
    /// Session.
    pub session: String,
    /// Pages before the first key.
    pub position: u64,
    /// Cancel flag shared with whoever made the call.
    pub cancel: Arc<AtomicU32>,
    /// Deadline on the boundary's clock.
    pub deadline_ns: u64,
    /// Number of the call.
    pub trace_id: u64,
    /// What a call by the linker face has beside that.
    pub link: LinkBuffers,
    pub(super) message: Vec<u8>,
}

impl CallBuffers {
    /// Makes the call, about those of `pools` that it concerns.
    pub fn run(
        &mut self,
        operation: Operation,
        face: &dyn Face,
        instance: RawInstance,
        pools: &[Registered],
    ) -> Result<(), CallFailure> {
        let count = self.keys.len();
        let linker = || {
            let lacks = || CallFailure::new(ErrorKind::Unsupported, false, "the plugin has no linker face");
            face.linker().ok_or_else(lacks)
        };
        let context = self.context();
        self.statuses.clear();
        if matches!(operation, Operation::Exists | Operation::Lookup) {
            self.statuses.resize(pools.len() * count, 0);
            self.restorable.clear();
            self.restorable.resize(count + 1, 0);
            let queries: SmallVec<[PoolQuery; FEW_POOLS]> = pools.iter().map(|pool| pool.query(&self.held)).collect();
            let args = ExistsArgs {
                context,
                keys: self.keys.as_ptr(),
                key_count: count as u64,
                pools: queries.as_ptr(),
                pool_count: queries.len() as u64,
                chain_position: self.position,
                prefix_keys: self.prefix_keys.as_ptr(),
                prefix_key_count: self.prefix_keys.len() as u64,
                request: if operation == Operation::Lookup { self.link.request } else { 0 },
                restorable: self.restorable.as_mut_ptr(),
                present: self.statuses.as_mut_ptr(),
            };
            let args = &raw const args;
            let linker = (operation == Operation::Lookup).then(linker).transpose()?;
            return invoke(&mut self.message, |error| {
                // SAFETY: the face is the library's, the instance is open, and the arguments live until the call returns.
                unsafe {
                    match linker {
                        Some(linker) => linker.lookup(instance, args, error),
                        None => face.batch_exists(instance, args, error),
                    }
                }
            });
        }
        if operation == Operation::Load {
            return self.load(linker()?, instance, pools);
        }
        let named = self.own(pools).count();
        if named == 0 {
            // A transfer that no pool is registered for would store nothing, and say that all is well.
            let group = self.group.map_or("no", PoolGroup::as_str);
            let message = format!("pages of {group} pools, of which none is registered with this backend");
            return Err(CallFailure::new(ErrorKind::Internal, false, message));
        }
        self.statuses.resize(named * count, 0);
        if operation == Operation::Offload {
            return self.offload(linker()?, instance, pools);
        }
        let transfers = self.transfers(pools, 0..count);
        let args = BatchArgs {
            context,
            transfers: transfers.as_ptr(),
            transfer_count: transfers.len() as u64,
            chain_position: self.position,
            prefix_keys: self.prefix_keys.as_ptr(),
            prefix_key_count: self.prefix_keys.len() as u64,
            session_id: self.session.as_str().into(),
        };
        let args = &raw const args;
        invoke(&mut self.message, |error| {
            // SAFETY: as above.
            unsafe {
                match operation {
                    Operation::Get => face.batch_get(instance, args, error),
                    Operation::Set => face.batch_set(instance, args, error),
                    _ => face.batch_remove(instance, args, error),
                }
            }
        })
    }

    /// The pages of the call, by group.
    pub(super) fn pages_by_group(&self) -> impl Iterator<Item = (PoolGroup, &[u32])> {
        let all = self.group.map(|group| (group, self.pages.as_slice()));
        let of_part = |part: &LoadPart| PoolGroup::ALL.map(|group| (group, part.lanes[group as usize].pages.clone()));
        let of_loads = self.link.parts.iter().flat_map(of_part);
        all.into_iter().chain(of_loads.map(|(group, range)| (group, self.pages.get(range).unwrap_or_default())))
    }

    /// Deadline and cancel flag.
    pub(super) fn context(&self) -> CallContext {
        CallContext { deadline_ns: self.deadline_ns, cancel: Arc::as_ptr(&self.cancel).cast(), trace_id: self.trace_id }
    }

    /// Those of `pools` that a call about pages moves.
    pub(super) fn own<'a>(&self, pools: &'a [Registered]) -> impl Iterator<Item = &'a Registered> {
        let group = self.group;
        pools.iter().filter(move |pool| Some(pool.group) == group)
    }

    /// Part of the call's pages, in each pool. `statuses` is as long as it takes.
    pub(super) fn transfers(&mut self, pools: &[Registered], pages: Range<usize>) -> Transfers {
        let count = self.keys.len();
        let statuses = self.statuses.as_mut_ptr();
        let indices = if self.pages.is_empty() { std::ptr::null() } else { self.pages[pages.clone()].as_ptr() };
        let keys = self.keys[pages.clone()].as_ptr();
        let mut transfers: Transfers = self
            .own(pools)
            .enumerate()
            .map(|(place, pool)| PoolTransfer {
                pool: pool.pool,
                layer_first: 0,
                layer_count: 0,
                chain_offset: 0,
                keys,
                pages: indices,
                count: pages.len() as u64,
                statuses: statuses.wrapping_add(place * count + pages.start),
            })
            .collect();
        // Side pools come first: a page that the anchor has is there in all pools.
        transfers.reverse();
        transfers
    }

    /// The status of page `key` of a get, set or remove over all pools of its group: that of the pool in which it is worst. Left unanswered
    /// counts as failed.
    pub fn status(&self, key: usize) -> PageStatus {
        let count = self.keys.len().max(1);
        let of_pools = self.statuses.iter().skip(key).step_by(count).map(|raw| PageStatus::from_raw(*raw));
        of_pools.max_by_key(badness).map_or(PageStatus::Failed, answered)
    }

    /// Whether every pool of `group` has page `key`, by the answers of an exists over `pools`.
    pub fn present(&self, pools: &[Registered], group: PoolGroup, key: usize) -> bool {
        let count = self.keys.len();
        let mut own = pools.iter().enumerate().filter(|(_, pool)| pool.group == group).peekable();
        own.peek().is_some()
            && own.all(|(place, _)| {
                self.statuses.get(place * count + key).is_some_and(|raw| PageStatus::from_raw(*raw) == PageStatus::Ok)
            })
    }
}

/// What is told of a page whose pools say different things.
fn badness(status: &PageStatus) -> u8 {
    match status {
        PageStatus::Ok => 0,
        PageStatus::Refused => 1,
        PageStatus::Missing => 2,
        PageStatus::Failed | PageStatus::Unset => 3,
        PageStatus::Corrupt => 4,
    }
}

fn answered(status: PageStatus) -> PageStatus {
    match status {
        PageStatus::Unset => PageStatus::Failed,
        answered => answered,
    }
}

#[cfg(test)]
#[path = "call_tests.rs"]
mod tests;
