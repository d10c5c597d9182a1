//! One data call: its buffers, which outlive a caller that gives up, and the call itself.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use kvdock_plugin_api::v0_1::{BatchArgs, CallContext, ErrorOut, ExistsArgs, PageKey, PoolQuery, PoolTransfer};
use kvdock_plugin_api::{ErrorKind, HitPolicy, monotonic_ns};

use super::abi::{Face, RawInstance};
use super::pool_desc::ANCHOR_POOL;

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
}

/// Everything a data call points at. A call that is late keeps it; so it owns copies, in buffers that are used again and again.
#[derive(Debug, Default)]
pub struct CallBuffers {
    /// Keys of the call.
    pub keys: Vec<PageKey>,
    /// Page indices, one a key; empty for exists and remove.
    pub pages: Vec<u32>,
    /// One status a key.
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
    message: Vec<u8>,
}

impl CallBuffers {
    /// Makes the call.
    pub fn run(&mut self, operation: Operation, face: &dyn Face, instance: RawInstance) -> Result<(), CallFailure> {
        let count = self.keys.len() as u64;
        let context = CallContext {
            deadline_ns: self.deadline_ns,
            cancel: Arc::as_ptr(&self.cancel).cast(),
            trace_id: self.trace_id,
        };
        self.statuses.clear();
        self.statuses.resize(self.keys.len(), 0);
        if operation == Operation::Exists {
            self.restorable.clear();
            self.restorable.resize(self.keys.len() + 1, 0);
            let query = PoolQuery {
                pool: ANCHOR_POOL,
                hit_policy: HitPolicy::AllPages.raw(),
                trailing_pages: 0,
                block_pages: 0,
                group_pages: 0,
                held_pages: 0,
            };
            let args = ExistsArgs {
                context,
                keys: self.keys.as_ptr(),
                key_count: count,
                pools: &raw const query,
                pool_count: 1,
                chain_position: self.position,
                prefix_keys: self.prefix_keys.as_ptr(),
                prefix_key_count: self.prefix_keys.len() as u64,
                request: 0,
                restorable: self.restorable.as_mut_ptr(),
                present: self.statuses.as_mut_ptr(),
            };
            return invoke(&mut self.message, |error| {
                // SAFETY: the face is the library's, the instance is open, and the arguments live until the call returns.
                unsafe { face.batch_exists(instance, &raw const args, error) }
            });
        }
        let transfer = PoolTransfer {
            pool: ANCHOR_POOL,
            layer_first: 0,
            layer_count: 0,
            chain_offset: 0,
            keys: self.keys.as_ptr(),
            pages: if self.pages.is_empty() { std::ptr::null() } else { self.pages.as_ptr() },
            count,
            statuses: self.statuses.as_mut_ptr(),
        };
        let args = BatchArgs {
            context,
            transfers: &raw const transfer,
            transfer_count: 1,
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
                    Operation::Remove | Operation::Exists => face.batch_remove(instance, args, error),
                }
            }
        })
    }
}
