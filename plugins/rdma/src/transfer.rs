//! Many ranges at once, between registered memory here and that of peers. When a call returns, no device touches the memory for it any more.

mod cut;
mod run;

use std::sync::Arc;
use std::time::Duration;

use crate::handshake::path;
use crate::topology::Priorities;
use crate::transport::{Exchange, Transport};

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// From the peer.
    Read,
    /// To the peer.
    Write,
}

/// Why a call stops before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Its time is over.
    TimedOut,
    /// It was cancelled.
    Cancelled,
}

/// Says how long to wait before it is asked again, or that the call has to stop.
pub type Deadline<'a> = &'a dyn Fn() -> Result<Duration, Stop>;

/// Memory of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteBuffer {
    /// First address.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Where it lies.
    pub place: String,
    /// Its keys, in the order of the peer's devices.
    pub keys: Vec<u32>,
}

/// A peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// The name by which it is asked for connections.
    pub server: String,
    /// Names of its devices.
    pub devices: Vec<String>,
    /// Its memory.
    pub buffers: Vec<RemoteBuffer>,
    /// Which of its devices are near which memory.
    pub priorities: Priorities,
}

impl Peer {
    /// The buffer that an address lies in.
    fn buffer(&self, address: u64) -> Option<usize> {
        let holds = |buffer: &RemoteBuffer| address.checked_sub(buffer.address).is_some_and(|at| at < buffer.len);
        self.buffers.iter().position(holds)
    }

    fn near(&self, place: &str) -> (Vec<usize>, usize) {
        let place_of = |name: &String| self.devices.iter().position(|device| device == name);
        let tiers = self.priorities.get(place);
        let mut list: Vec<usize> = tiers.iter().flat_map(|tiers| &tiers.0).filter_map(place_of).collect();
        let near = list.len();
        list.extend(tiers.iter().flat_map(|tiers| &tiers.1).filter_map(place_of));
        if list.is_empty() {
            return ((0..self.devices.len()).collect(), self.devices.len());
        }
        (list, near)
    }

    fn path(&self, device: usize) -> Option<String> {
        self.devices.get(device).map(|name| path(&self.server, name))
    }
}

/// One range to move.
#[derive(Debug)]
pub struct Job<'a> {
    /// Where it lies.
    pub peer: Arc<Peer>,
    /// Its first address there.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Memory here; as many bytes. Of a write of up to 64 bytes it need not be registered.
    pub pieces: &'a [libc::iovec],
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All bytes are where they should be.
    Moved,
    /// The peer has no such range.
    Rejected(String),
    /// It failed on every way that was tried.
    Failed(String),
    /// It was not tried: something is wrong here, not with the peer.
    Unable(String),
    /// The time was over, or the call cancelled. `in_doubt`: bytes of a write may still be on their way.
    Stopped {
        /// Why.
        stop: Stop,
        /// Whether bytes may still arrive.
        in_doubt: bool,
    },
}

impl Transport {
    /// Moves the jobs. Each has an outcome.
    ///
    /// # Safety
    /// Until this returns, the pieces of the jobs may be read (for a write) or are this call's alone to write (for a read).
    pub unsafe fn transfer(
        &self,
        operation: Operation,
        jobs: &[Job<'_>],
        exchange: &dyn Exchange,
        limit: Deadline<'_>,
    ) -> Vec<Outcome> {
        let mut run = run::Run::new(self, operation, jobs, exchange, limit);
        // SAFETY: the caller's promise; the run waits for all that it has begun.
        unsafe { run.complete() }
    }
}
