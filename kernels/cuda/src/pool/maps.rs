//! What kernels that copy boxes of rows are told of keys and values.

use std::sync::Arc;

use kvdock_kernels::{KernelError, KvDtype, KvSpec};

use super::CudaKvPool;
use crate::driver::{Arg, BOX_ELEMENTS, MAP_BYTES, RowMap};
use crate::memory::{DeviceMemory, Queue, failed};

/// Maps of the rows of keys and of values, in the memory of the device.
pub(crate) struct RowMaps {
    memory: DeviceMemory,
    /// Rows of a box.
    pub(crate) box_rows: u32,
}

impl RowMaps {
    /// For a kernel: that of keys, that of values.
    pub(crate) fn args(&self) -> [Arg; 2] {
        [0, 1].map(|index| Arg::read(self.memory.at() + (index * MAP_BYTES) as u64, MAP_BYTES))
    }
}

impl CudaKvPool {
    /// Maps of the rows of keys and values over all layers, for GPUs and pools that have a kernel for them: heads as wide as boxes, pages as high.
    pub(crate) fn maps(&self, queue: &Queue) -> Result<Option<Arc<RowMaps>>, KernelError> {
        let op = "attention";
        let KvSpec { layers, kv_heads, head_dim_k, head_dim_v, page_tokens, pages, dtype } = self.spec;
        let wide = |dim: usize| dim.is_multiple_of(BOX_ELEMENTS) && dim <= 256;
        let fits = self.driver.gpu().architecture() == "sm_90a"
            && dtype != KvDtype::F32
            && wide(head_dim_k)
            && wide(head_dim_v)
            && page_tokens.is_multiple_of(8);
        let rows = layers * pages * kv_heads * page_tokens;
        if !fits || i32::try_from(rows).is_err() {
            return Ok(None);
        }
        let mut made = self.maps.lock();
        if let Some(maps) = &*made {
            return Ok(Some(Arc::clone(maps)));
        }
        // Boxes lie within pages, and tiles of keys are whole boxes.
        let box_rows = 1 << page_tokens.trailing_zeros().min(6);
        let map = |memory: &DeviceMemory, dim: usize| {
            let map = RowMap { at: memory.at(), rows: rows as u64, row_elements: dim as u32, box_rows };
            self.driver.row_map(map).map_err(failed(op))
        };
        let bytes = [map(&self.keys, head_dim_k)?, map(&self.values, head_dim_v)?].concat();
        let memory = DeviceMemory::new(&self.driver, bytes.len(), "maps of a KV pool")?;
        // SAFETY: the memory is new and as long as the bytes; whatever reads it is ordered behind the queue.
        unsafe { self.uploads.send(&bytes, memory.at(), queue, op)? };
        let maps = Arc::new(RowMaps { memory, box_rows });
        *made = Some(Arc::clone(&maps));
        Ok(Some(maps))
    }
}
