//! The linker face: pages straight between device pools and the store, layer by layer.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::backend::Backend;
use crate::batch::{Get, Page, Set, Transfer};
use crate::call::{Call, Chain};
use crate::exists::Exists;
use crate::{Error, ErrorKind, Host, ReadyKind, Result};

/// The load of one request. What it names may be touched until the load is finished or cancelled.
#[derive(Debug)]
pub struct Load {
    /// Number of the request.
    pub request: u64,
    /// The pools' parts.
    pub(crate) transfers: Vec<Transfer<'static>>,
    /// The part of the chain that the load is about.
    pub chain: Chain<'static>,
}

impl Load {
    /// The parts by pool.
    pub fn transfers(&self) -> &[Transfer<'static>] {
        &self.transfers
    }

    /// Every page of every pool, each once, to be filled. They may be spread over threads, and may be touched until the load is finished or
    /// cancelled.
    pub fn into_pages(self) -> impl Iterator<Item = Page<'static, Get>> {
        self.transfers.into_iter().flat_map(Transfer::into_pages)
    }
}

/// The start of a batch of loads.
#[derive(Debug)]
pub struct Start {
    /// Deadline and cancel flag of the whole load; they may be used until the batch is finished.
    pub call: Call<'static>,
    /// Number of the batch.
    pub batch: u64,
    /// What to wait for before a page is written; all of them.
    pub ready: Vec<Ready>,
    /// Where to say which layers are settled.
    pub done: LayerDone,
}

/// The words of the host that say which layers are settled (`layer_done_counter`).
#[derive(Debug, Clone, Copy)]
pub struct LayerDone {
    pub(crate) words: &'static [AtomicU32],
    pub(crate) host: Host,
    pub(crate) batch: u64,
}

impl LayerDone {
    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.words.len()
    }
    /// Says that layer `layer` of every request of the batch is settled: loaded, and its bytes are where every later reader sees them, or
    /// failed.
    pub fn settle(&self, layer: usize) {
        if let Some(word) = self.words.get(layer) {
            word.store(1, Ordering::Release);
            self.host.layers_settled(self.batch);
        }
    }
    /// Says that all layers are settled.
    pub fn settle_all(&self) {
        self.words.iter().for_each(|word| word.store(1, Ordering::Release));
        self.host.layers_settled(self.batch);
    }
}

/// Says when pages may be touched. It may be asked for as long as the operation that brought it.
#[derive(Debug, Clone, Copy)]
pub struct Ready {
    pub(crate) kind: ReadyKind,
    pub(crate) handle: u64,
}

impl Ready {
    /// What kind of sign it is.
    pub fn kind(&self) -> ReadyKind {
        self.kind
    }
    /// What the kind says.
    pub fn handle(&self) -> u64 {
        self.handle
    }
    /// Whether the pages may be touched.
    ///
    /// # Errors
    /// `Unsupported` for a sign of a device, which the host's threads can't look at.
    pub fn is_set(&self) -> Result<bool> {
        match self.kind {
            ReadyKind::Now => Ok(true),
            ReadyKind::HostFlag => {
                // SAFETY: rule of the boundary: the handle is the address of an aligned 32-bit word that is written atomically and lives as
                // long as the operation that brought it.
                let word = unsafe { AtomicU32::from_ptr(self.handle as *mut u32) };
                Ok(word.load(Ordering::Acquire) == 1)
            }
            ReadyKind::CudaEvent | ReadyKind::Unknown => {
                Err(Error::unsupported(&format!("waiting for a {}", self.kind)))
            }
        }
    }
}

/// The store of pages of several pools: all become visible or none.
#[derive(Debug)]
pub struct Offload {
    /// Number of the operation.
    pub operation: u64,
    /// Deadline in nanoseconds of CLOCK_MONOTONIC; 0 for never.
    pub deadline_ns: u64,
    /// The pools' parts.
    pub(crate) transfers: Vec<Transfer<'static>>,
    /// What to wait for before a page is read.
    pub ready: Vec<Ready>,
    /// The part of the chain that the operation is about.
    pub chain: Chain<'static>,
    /// Session that the request names, or empty.
    pub session_id: String,
}

impl Offload {
    /// The parts by pool.
    pub fn transfers(&self) -> &[Transfer<'static>] {
        &self.transfers
    }

    /// Every page of every pool, to be read once `ready` says so, until the offload is popped.
    pub fn pages(&self) -> impl Iterator<Item = Page<'static, Set>> {
        self.transfers.iter().cloned().flat_map(Transfer::into_pages)
    }
}

/// A completed offload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completed {
    /// Number of the operation.
    pub operation: u64,
    /// Whether everything was stored.
    pub result: Result<()>,
}

/// The linker face of a backend. `lookup` counts as a data call and may run beside any other. `finish_layer_wise_loading` and
/// `cancel_queued_load` may run beside any call but `reset`. The others come from one thread at a time.
///
/// Transfers of loads and offloads are `'static` here because they outlive the call that brings them: they may be
/// touched until `finish_layer_wise_loading` of their batch, `cancel_queued_load`, `pop_completed_offload` or `reset` returns, and not longer.
pub trait Linker: Send + Sync + 'static {
    /// The backend it belongs to.
    type Backend: Backend;
    /// Whether there is a linker face at all.
    const PRESENT: bool = true;

    /// Which prefixes can be restored into the device pools.
    ///
    /// # Errors
    /// When the store can't be asked.
    fn lookup(backend: &Self::Backend, exists: &mut Exists<'_>) -> Result<()>;
    /// Queues a load. Whether it refuses depends on the transfers alone.
    ///
    /// # Errors
    /// When the transfers can't be served.
    fn load(backend: &Self::Backend, load: Load) -> Result<()>;
    /// Starts what is queued as one batch. Does not wait. With nothing queued every layer is settled at once.
    ///
    /// # Errors
    /// When nothing could be started; what was queued is forgotten then.
    fn start_layer_wise_loading(backend: &Self::Backend, start: Start) -> Result<()>;
    /// Waits for the end of a batch. When it returns, with any result, every layer is settled, every status is written and no page is touched
    /// again. At the deadline the backend ends the load; it does not return before it is quiet.
    ///
    /// # Errors
    /// `TimedOut`, `NotFound` for a batch that was not started.
    fn finish_layer_wise_loading(backend: &Self::Backend, call: &Call<'_>, batch: u64) -> Result<()>;
    /// Takes a queued load back.
    ///
    /// # Errors
    /// `NotFound` when it is not queued, or has started.
    fn cancel_queued_load(backend: &Self::Backend, request: u64) -> Result<()>;
    /// Queues an offload.
    ///
    /// # Errors
    /// When it is not taken; its pages are free at once.
    fn offload(backend: &Self::Backend, offload: Offload) -> Result<()>;
    /// How many completed offloads wait to be popped.
    fn num_completed_offloads(backend: &Self::Backend) -> u64;
    /// Pops the oldest completed offload.
    fn pop_completed_offload(backend: &Self::Backend) -> Option<Completed>;
    /// Cancels what is queued, ends what runs, forgets completed offloads.
    ///
    /// # Errors
    /// When something still runs at the deadline.
    fn reset(backend: &Self::Backend, call: &Call<'_>) -> Result<()>;
}

/// The linker face of a backend that has none.
#[derive(Debug)]
pub struct NoLinker<B>(PhantomData<fn() -> B>);

fn none<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, "this backend has no linker face"))
}

impl<B: Backend> Linker for NoLinker<B> {
    type Backend = B;
    const PRESENT: bool = false;

    fn lookup(_: &B, _: &mut Exists<'_>) -> Result<()> {
        none()
    }
    fn load(_: &B, _: Load) -> Result<()> {
        none()
    }
    fn start_layer_wise_loading(_: &B, _: Start) -> Result<()> {
        none()
    }
    fn finish_layer_wise_loading(_: &B, _: &Call<'_>, _: u64) -> Result<()> {
        none()
    }
    fn cancel_queued_load(_: &B, _: u64) -> Result<()> {
        none()
    }
    fn offload(_: &B, _: Offload) -> Result<()> {
        none()
    }
    fn num_completed_offloads(_: &B) -> u64 {
        0
    }
    fn pop_completed_offload(_: &B) -> Option<Completed> {
        None
    }
    fn reset(_: &B, _: &Call<'_>) -> Result<()> {
        none()
    }
}
