//! The operations of families beyond plain dense decoders ([`kvdock_kernels::ops`]).

mod elements;
mod experts;
mod latent;
mod rows;
mod sampling;
mod states;

use kvdock_kernels::KernelError;
use kvdock_kernels::ops::Indices;

use super::device::CudaDevice;
use super::driver::{Arg, DevicePtr, Touches, nothing_more};
use super::memory::{Block, Queue};
use super::module::Extent;
use super::page_pool::CudaPages;
use super::units::Unit;

/// What is behind [`Indices`].
struct CudaIndices {
    device: u64,
    block: Block,
    /// The same numbers.
    host: Vec<u32>,
}

fn read(at: DevicePtr, floats: usize) -> Arg {
    Arg::read(at, 4 * floats)
}

fn write(at: DevicePtr, floats: usize) -> Arg {
    Arg::write(at, 4 * floats)
}

impl CudaIndices {
    fn arg(&self) -> Arg {
        Arg::read(self.block.at(), 4 * self.host.len())
    }
}

impl CudaDevice {
    fn indices<'a>(
        &self,
        op: &'static str,
        what: &'static str,
        of: &'a Indices,
    ) -> Result<&'a CudaIndices, KernelError> {
        let inner: Option<&CudaIndices> = of.downcast_ref();
        inner.filter(|inner| inner.device == self.id).ok_or_else(|| self.foreign(op, what))
    }

    /// The memory of a pool of pages that this device has made.
    fn pages<'a>(&self, op: &'static str, pool: &'a kvdock_kernels::PagePool) -> Result<&'a CudaPages, KernelError> {
        let inner: Option<&CudaPages> = pool.device_memory();
        inner.filter(|inner| inner.device == self.id).ok_or_else(|| self.foreign(op, "pool"))
    }

    /// Queues a kernel that touches nothing but what its arguments say.
    ///
    /// # Safety
    /// As [`super::driver::Driver::launch`].
    unsafe fn run(&self, unit: Unit, name: &str, extent: Extent, args: &[Arg]) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.run_touching(unit, name, extent, args, &nothing_more) }
    }

    /// As [`CudaDevice::run`]; `touches` tells what else is touched.
    ///
    /// # Safety
    /// As [`super::driver::Driver::launch`].
    unsafe fn run_touching(
        &self,
        unit: Unit,
        name: &str,
        extent: Extent,
        args: &[Arg],
        touches: &Touches<'_>,
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.kernels.launch_touching(unit, name, extent, args, touches, &self.order.enter()) }
    }

    /// Memory of `floats` f32 for what lives within an operation.
    fn room(&self, floats: usize) -> Result<Block, KernelError> {
        self.blocks.near(4 * floats, "an operation's work space")
    }

    /// Queues addresses to the device, to be used by what is queued before the block is dropped.
    fn send_addresses(&self, op: &'static str, addresses: &[u64], queue: &Queue) -> Result<Block, KernelError> {
        let block = self.blocks.numbers(addresses.len() * 8, "addresses")?;
        let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_le_bytes()).collect();
        // SAFETY: the block is as long as the addresses, and all of its uses are ordered by the queue.
        unsafe { self.uploads.send(&bytes, block.at(), queue, op)? };
        Ok(block)
    }
}
