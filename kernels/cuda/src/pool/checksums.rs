//! Checksums of pages, taken on the device.

use kvdock_kernels::{KernelError, KvSpec};

use super::{BATCH, CudaKvPool};
use crate::driver::{Access, Arg, Touch};
use crate::memory::{DeviceMemory, Mark, PinnedMemory, failed};
use crate::module::Extent;
use crate::units::Unit;

impl CudaKvPool {
    /// Checksums of at most [`BATCH`] pages behind `after`, or else behind all that was queued to be computed, appended to `out`.
    pub(super) fn sum_up(
        &self,
        pages: &[u32],
        by_heads: bool,
        after: Option<&Mark>,
        out: &mut Vec<u32>,
    ) -> Result<(), KernelError> {
        let op = "checksums";
        let KvSpec { layers, kv_heads, head_dim_k, head_dim_v, page_tokens, dtype, .. } = self.spec;
        let a_page = 2 * layers * size_of::<u32>();
        let bytes = pages.len() * a_page;
        let mut lane = self.out.take();
        let (sums, pinned) = match lane.sums.take() {
            Some(kept) => kept,
            None => (
                DeviceMemory::new(&self.driver, BATCH * a_page, "checksums of pages")?,
                PinnedMemory::new(&self.driver, BATCH * a_page, "checksums of pages")?,
            ),
        };
        match after {
            Some(after) => lane.queue.wait(after, op)?,
            None => {
                lane.ready.record(&self.compute.enter(), op)?;
                lane.queue.wait(&lane.ready, op)?;
            }
        }
        let words: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        let (k_layer, v_layer) = self.layer_bytes();
        let args = [
            Arg::Address(self.keys.at()),
            Arg::Address(self.values.at()),
            Arg::read(lane.jobs.at(), words.len()),
            Arg::write(sums.at(), bytes),
            Arg::U32(kv_heads as u32),
            Arg::U32(page_tokens as u32),
            Arg::U32((head_dim_k * dtype.bytes()) as u32),
            Arg::U32((head_dim_v * dtype.bytes()) as u32),
            Arg::U64(k_layer as u64),
            Arg::U64(v_layer as u64),
            Arg::U32(u32::from(by_heads)),
        ];
        let touches = |tell: &mut dyn FnMut(Touch)| {
            for (page, layer) in pages.iter().flat_map(|page| (0..layers).map(move |layer| (*page, layer))) {
                self.page(layer, page, Access::Read).into_iter().for_each(&mut *tell);
            }
        };
        let extent = Extent { grid: [pages.len(), layers, 2], threads: 256, shared: 0 };
        // SAFETY: the lane's memory has room for a launch's pages, and is used by its queue alone; pages have been checked.
        let queued = unsafe {
            self.uploads.send(&words, lane.jobs.at(), &lane.queue, op).and_then(|()| {
                let queue = &lane.queue;
                self.kernels.launch_touching(Unit::Seal, "seal_checksums", extent, &args, &touches, queue)?;
                self.driver.to_host(pinned.at(), sums.at(), bytes, queue.id()).map_err(failed(op))
            })
        };
        let ran = lane.queue.synchronize(op);
        if let Err(error) = queued.and(ran) {
            // What was queued may still use the memory: it is kept for ever rather than given back under it.
            std::mem::forget((sums, pinned));
            return Err(error);
        }
        // SAFETY: the copy has run.
        let words = unsafe { pinned.read(bytes) }.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        out.extend(words);
        lane.sums = Some((sums, pinned));
        Ok(())
    }
}
