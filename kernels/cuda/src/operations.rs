//! The operations of the device's face.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvdock_kernels::{
    AttentionSpec, Buf, Device, KernelError, KvPool, KvSpec, NarrowData, NewHeads, Plan, Projection, Rope, RopeSpec,
    RopeStyle, SampleRow, Sampled, SeqSpan, Weight, WeightData,
};

use super::device::{CudaBuf, CudaDevice, CudaRope, CudaWeight, next_id, product, shape, size};
use super::driver::{Arg, DevicePtr, Touch};
use super::memory::{DeviceMemory, PIECE, PinnedMemory, failed};
use super::module::Extent;
use super::plan::CudaPlan;
use super::pool::CudaKvPool;
use super::units::{Unit, format_name};

fn read(at: DevicePtr, floats: usize) -> Arg {
    Arg::read(at, 4 * floats)
}

fn write(at: DevicePtr, floats: usize) -> Arg {
    Arg::write(at, 4 * floats)
}

impl CudaDevice {
    /// Calls `then` with `bytes` bytes of device memory, when all that was queued has run.
    pub(super) fn download(
        &self,
        op: &'static str,
        at: DevicePtr,
        bytes: usize,
        then: impl FnOnce(&[u8]),
    ) -> Result<(), KernelError> {
        self.script.refuse(op)?;
        let mut download = self.download.lock();
        if download.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            *download = Some(PinnedMemory::new(&self.driver, bytes.next_power_of_two().max(4096), "results")?);
        }
        let Some(memory) = download.as_ref() else { return Ok(()) };
        // SAFETY: both ranges are valid, and the pinned one is used by nothing else while the lock is held, which is until the copy has
        // run.
        let queued = unsafe { self.driver.to_host(memory.at(), at, bytes, self.order.enter().id()) };
        let ended = queued.map_err(failed(op)).and(self.order.synchronize(op));
        if let Err(error) = ended {
            // The copy may still run: the memory is kept for ever rather than given back under it.
            std::mem::forget(download.take());
            return Err(error);
        }
        // SAFETY: the copy has run.
        then(unsafe { memory.read(bytes) });
        Ok(())
    }
}

impl CudaDevice {
    /// The tables of a rotary embedding, found to serve the heads and positions of a step.
    pub(super) fn rope_table<'a>(
        &self,
        op: &'static str,
        rope: &'a Rope,
        plan: &CudaPlan,
        head_dim: usize,
    ) -> Result<&'a CudaRope, KernelError> {
        let table: &CudaRope = rope
            .downcast_ref()
            .filter(|table: &&CudaRope| table.device == self.id)
            .ok_or_else(|| self.foreign(op, "rope"))?;
        if table.offset.saturating_add(rope.dim()) > head_dim {
            let expected = format!("at least {} + {}", table.offset, rope.dim());
            return Err(shape(op, "head_dim", expected, head_dim.to_string()));
        }
        if plan.rows() > 0 && plan.last_position() >= rope.max_positions() {
            let expected = format!("below {}", rope.max_positions());
            return Err(shape(op, "position", expected, plan.last_position().to_string()));
        }
        self.position_limit.fetch_min(rope.max_positions(), Ordering::Relaxed);
        Ok(table)
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn numerics_id(&self) -> &str {
        &self.numerics_id
    }

    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn own_memory(&self) -> Option<(u64, u64)> {
        self.driver.memory().ok()
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        self.order.synchronize("synchronize")
    }

    fn alloc(&self, len: usize) -> Result<Buf, KernelError> {
        let op = "alloc";
        self.script.refuse(op)?;
        let bytes = product(op, &[len, 4])?;
        let memory = self.blocks.near(bytes, "a buffer")?;
        if bytes > 0 {
            let queue = self.order.enter();
            // SAFETY: the memory is the buffer's own, and all of its uses are ordered by the queue.
            unsafe { self.driver.fill(memory.at(), 0, bytes, queue.id()) }.map_err(failed(op))?;
        }
        Ok(Buf::from_parts(len, Box::new(CudaBuf { device: self.id, memory })))
    }

    fn write(&self, dst: &mut Buf, offset: usize, src: &[f32]) -> Result<(), KernelError> {
        let op = "write";
        let at = self.floats(op, "dst", dst, offset.saturating_add(src.len()))?;
        let bytes: Vec<u8> = src.iter().flat_map(|value| value.to_le_bytes()).collect();
        // SAFETY: the range lies within the buffer, whose uses are ordered by the queue.
        unsafe { self.uploads.send(&bytes, at + 4 * offset as u64, &self.order.enter(), op) }
    }

    fn read(&self, src: &Buf, offset: usize, dst: &mut [f32]) -> Result<(), KernelError> {
        let op = "read";
        let at = self.floats(op, "src", src, offset.saturating_add(dst.len()))?;
        if dst.is_empty() {
            return Ok(());
        }
        self.download(op, at + 4 * offset as u64, 4 * dst.len(), |bytes| {
            for (to, from) in dst.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *to = f32::from_le_bytes(*from);
            }
        })
    }

    fn upload_weight(&self, weight: &WeightData<'_>) -> Result<Weight, KernelError> {
        let op = "upload_weight";
        let row_bytes = weight.checked_row_bytes()?;
        let memory = DeviceMemory::new(&self.driver, weight.bytes.len(), "a weight matrix")?;
        let queue = self.order.enter();
        match weight.row_order {
            // SAFETY: the memory is new and as long as the bytes; whatever uses it is queued behind this.
            None => unsafe { self.uploads.send(weight.bytes, memory.at(), &queue, op)? },
            Some(order) => {
                let rows = (PIECE / row_bytes).max(1);
                for (index, part) in order.chunks(rows).enumerate() {
                    let to = memory.at() + (index * rows * row_bytes) as u64;
                    let mut bytes = Vec::with_capacity(part.len() * row_bytes);
                    for from in part {
                        bytes.extend_from_slice(&weight.bytes[*from as usize * row_bytes..][..row_bytes]);
                    }
                    // SAFETY: as above, for a part.
                    unsafe { self.uploads.send(&bytes, to, &queue, op)? };
                }
            }
        }
        Ok(Weight::from_parts(
            weight.shape,
            weight.format,
            Box::new(CudaWeight { device: self.id, memory, narrow: None }),
        ))
    }

    fn upload_narrow(&self, weight: &NarrowData<'_>) -> Result<Option<Weight>, KernelError> {
        self.take_narrow(weight).map(Some)
    }

    fn samples(&self) -> bool {
        true
    }

    fn sample(&self, logits: &mut Buf, vocab: usize, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, KernelError> {
        self.choose_tokens(logits, vocab, rows)
    }

    fn upload_rope(&self, spec: &RopeSpec) -> Result<Rope, KernelError> {
        let op = "upload_rope";
        let (frequencies, factor) = spec.frequencies()?;
        let (positions, pairs) = (spec.max_positions, spec.dim / 2);
        let floats = product(op, &[positions, pairs])?;
        let cos = DeviceMemory::new(&self.driver, 4 * floats, "cosines")?;
        let sin = DeviceMemory::new(&self.driver, 4 * floats, "sines")?;
        let block = self.blocks.take(8 * pairs, "frequencies")?;
        let bytes: Vec<u8> = frequencies.iter().flat_map(|value| value.to_le_bytes()).collect();
        let queue = self.order.enter();
        let args = [
            Arg::read(block.at(), bytes.len()),
            Arg::F64(factor),
            write(cos.at(), floats),
            write(sin.at(), floats),
            size(op, "max_positions", positions)?,
            size(op, "dim", pairs)?,
        ];
        // SAFETY: the block holds the frequencies and the tables are as long as the kernel writes; all are ordered by the queue.
        unsafe {
            self.uploads.send(&bytes, block.at(), &queue, op)?;
            self.kernels.launch(Unit::Rope, "rope_table", Extent::line(floats.div_ceil(256), 256), &args, &queue)?;
        }
        let inner = CudaRope { device: self.id, style: spec.style, offset: spec.offset, cos, sin };
        Ok(Rope::from_parts(spec.dim, positions, Box::new(inner)))
    }

    fn alloc_kv_pool(&self, spec: KvSpec) -> Result<Arc<dyn KvPool>, KernelError> {
        let pool = CudaKvPool::new(next_id(), spec, &self.driver, &self.kernels, &self.uploads, &self.order)?;
        Ok(Arc::new(pool))
    }

    fn plan(&self, pool: &dyn KvPool, seqs: &[SeqSpan<'_>]) -> Result<Plan, KernelError> {
        let pool = self.pool("plan", pool)?;
        let queue = self.order.enter();
        let plan = CudaPlan::new(pool.spec(), pool.id, seqs, &self.blocks, &self.uploads, &queue)?;
        Ok(Plan::from_parts(plan.rows(), Box::new(plan)))
    }

    fn repeats(&self) -> bool {
        self.recordings
    }

    fn replays(&self) -> bool {
        self.recordings
    }

    fn replay(&self, key: u64, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<(), KernelError> {
        self.run_replayed(key, work)
    }

    fn repeat(
        &self,
        key: u64,
        plan: &Plan,
        work: &mut dyn FnMut(&Plan) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        self.run_repeated(key, plan, work)
    }

    fn embed(&self, table: &Weight, ids: &[u32], out: &mut Buf) -> Result<(), KernelError> {
        let op = "embed";
        let weight = self.weight(op, table)?;
        if weight.narrow.is_some() {
            return Err(shape(op, "table", "a table of 16 bits or of GGUF".into(), "one of eight or four bits".into()));
        }
        let (rows, cols) = (table.shape().rows, table.shape().cols);
        if let Some((row, index)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= rows) {
            return Err(KernelError::Index { op, row, index: *index, rows });
        }
        let need = product(op, &[ids.len(), cols])?;
        let out = self.floats(op, "out", out, need)?;
        if ids.is_empty() {
            return Ok(());
        }
        let queue = self.order.enter();
        let block = self.send_words(op, ids, &queue)?;
        let args =
            [weight.memory.read(), Arg::read(block.at(), 4 * ids.len()), write(out, need), size(op, "columns", cols)?];
        let name = format!("embed_{}", format_name(table.format()));
        // SAFETY: ids lie within the table, and the buffer has room for their rows.
        unsafe { self.kernels.launch(Unit::Gguf, &name, Extent::line(ids.len(), 128), &args, &queue) }
    }

    fn gather_rows(&self, x: &Buf, width: usize, indices: &[u32], out: &mut Buf) -> Result<(), KernelError> {
        let op = "gather_rows";
        let (len, need) = (x.len(), product(op, &[indices.len(), width])?);
        let (x, out) = (self.floats(op, "x", x, len)?, self.floats(op, "out", out, need)?);
        let rows = len.checked_div(width).unwrap_or(0);
        if let Some((row, index)) = indices.iter().enumerate().find(|(_, index)| **index as usize >= rows) {
            return Err(KernelError::Index { op, row, index: *index, rows });
        }
        if indices.is_empty() {
            return Ok(());
        }
        let queue = self.order.enter();
        let block = self.send_words(op, indices, &queue)?;
        let args = [
            read(x, len),
            Arg::read(block.at(), 4 * indices.len()),
            write(out, need),
            size(op, "width", width)?,
            size(op, "indices", indices.len())?,
        ];
        let extent = Extent::line(indices.len(), 256);
        // SAFETY: indices lie within `x`, and `out` has room for their rows.
        unsafe { self.kernels.launch(Unit::Elementwise, "gather_rows", extent, &args, &queue) }
    }

    fn rms_norm(&self, x: &Buf, weight: &Buf, eps: f32, rows: usize, out: &mut Buf) -> Result<(), KernelError> {
        let op = "rms_norm";
        let width = weight.len();
        let need = product(op, &[rows, width])?;
        let args = [
            read(self.floats(op, "x", x, need)?, need),
            read(self.floats(op, "weight", weight, width)?, width),
            write(self.floats(op, "out", out, need)?, need),
            size(op, "width", width)?,
            Arg::F32(eps),
            Arg::F32(0.0),
        ];
        self.norm(op, if width == 0 { 0 } else { rows }, &args)
    }

    fn add_rms_norm(
        &self,
        x: &mut Buf,
        delta: &Buf,
        weight: &Buf,
        eps: f32,
        rows: usize,
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "add_rms_norm";
        let width = weight.len();
        let need = product(op, &[rows, width])?;
        let args = [
            write(self.floats(op, "x", x, need)?, need),
            read(self.floats(op, "delta", delta, need)?, need),
            read(self.floats(op, "weight", weight, width)?, width),
            write(self.floats(op, "out", out, need)?, need),
            size(op, "width", width)?,
            Arg::F32(eps),
            Arg::F32(0.0),
        ];
        self.norm(op, if width == 0 { 0 } else { rows }, &args)
    }

    fn head_rms_norm(&self, x: &mut Buf, weight: &Buf, eps: f32, rows: usize, heads: usize) -> Result<(), KernelError> {
        let op = "head_rms_norm";
        let width = weight.len();
        let need = product(op, &[rows, heads, width])?;
        let args = [
            write(self.floats(op, "x", x, need)?, need),
            read(self.floats(op, "weight", weight, width)?, width),
            size(op, "heads", rows * heads)?,
            size(op, "width", width)?,
            Arg::F32(eps),
            Arg::F32(0.0),
        ];
        let blocks = if width == 0 { 0 } else { (rows * heads).div_ceil(4) };
        // SAFETY: the buffers are as long as the kernel reads and writes.
        unsafe { self.kernels.launch(Unit::Norm, op, Extent::line(blocks, 128), &args, &self.order.enter()) }
    }

    fn linear(&self, x: &Buf, rows: usize, projections: &mut [Projection<'_>]) -> Result<(), KernelError> {
        let op = "linear";
        let Some(first) = projections.first() else {
            return Ok(());
        };
        let cols = first.weight.shape().cols;
        let x_len = product(op, &[rows, cols])?;
        let x = self.floats(op, "x", x, x_len)?;
        let mut products = Vec::with_capacity(projections.len());
        for p in projections.iter() {
            let weight = self.weight(op, p.weight)?;
            let width = p.weight.shape().rows;
            if p.weight.shape().cols != cols {
                let found = format!("{} columns wide", p.weight.shape().cols);
                return Err(shape(op, "weight", format!("{cols} columns"), found));
            }
            let bias = match p.bias {
                Some(bias) => read(self.floats(op, "bias", bias, width)?, width),
                None => Arg::Address(0),
            };
            let need = product(op, &[rows, width])?;
            let out = write(self.floats(op, "out", p.out, need)?, need);
            products.push((p.weight, weight, bias, out));
        }
        let _turn = self.order.enter();
        for (weight, inner, bias, out) in products {
            self.queue_product(op, (weight, inner), read(x, x_len), rows, bias, out)?;
        }
        Ok(())
    }

    fn rope(&self, rope: &Rope, plan: &Plan, x: &mut Buf, heads: usize, head_dim: usize) -> Result<(), KernelError> {
        let op = "rope";
        let plan = self.plan_of(op, plan)?;
        let table = self.rope_table(op, rope, plan, head_dim)?;
        let rows = plan.rows();
        let need = product(op, &[rows, heads, head_dim])?;
        let args = [
            write(self.floats(op, "x", x, need)?, need),
            plan.positions(0, rows),
            table.cos.read(),
            table.sin.read(),
            size(op, "heads", heads)?,
            size(op, "head_dim", head_dim)?,
            size(op, "offset", table.offset)?,
            size(op, "dim", rope.dim())?,
            Arg::U32(u32::from(table.style == RopeStyle::Interleaved)),
            Arg::F32(1.0),
        ];
        let blocks = if heads == 0 { 0 } else { rows };
        // SAFETY: the buffer has room for the rows, and the tables serve their positions.
        unsafe { self.kernels.launch(Unit::Rope, op, Extent::line(blocks, 128), &args, &self.order.enter()) }
    }

    fn silu_mul(&self, gate: &mut Buf, up: &Buf, len: usize) -> Result<(), KernelError> {
        let op = "silu_mul";
        let (gate, up) = (self.floats(op, "gate", gate, len)?, self.floats(op, "up", up, len)?);
        self.elementwise(op, len, &[write(gate, len), read(up, len), Arg::U64(len as u64)])
    }

    fn add(&self, x: &mut Buf, delta: &Buf, len: usize) -> Result<(), KernelError> {
        let op = "add";
        let (x, delta) = (self.floats(op, "x", x, len)?, self.floats(op, "delta", delta, len)?);
        self.elementwise(op, len, &[write(x, len), read(delta, len), Arg::U64(len as u64)])
    }

    fn kv_write(&self, pool: &dyn KvPool, layer: usize, plan: &Plan, k: &Buf, v: &Buf) -> Result<(), KernelError> {
        let op = "kv_write";
        let (pool, plan) = self.pool_and_plan(op, pool, layer, plan)?;
        let KvSpec { kv_heads, head_dim_k: dk, head_dim_v: dv, page_tokens, dtype, .. } = *pool.spec();
        let rows = plan.rows();
        let (k_len, v_len) = (product(op, &[rows, kv_heads, dk])?, product(op, &[rows, kv_heads, dv])?);
        let (keys, values) = pool.layer(layer);
        let args = [
            read(self.floats(op, "k", k, k_len)?, k_len),
            read(self.floats(op, "v", v, v_len)?, v_len),
            Arg::Address(keys),
            Arg::Address(values),
            plan.slots(),
            size(op, "kv_heads", kv_heads)?,
            size(op, "head_dim_k", dk)?,
            size(op, "head_dim_v", dv)?,
            size(op, "page_tokens", page_tokens)?,
        ];
        let touches = |tell: &mut dyn FnMut(Touch)| plan.written(tell, pool, layer);
        let name = format!("kv_write_{}", dtype.name());
        let (extent, queue) = (Extent::line(rows, 128), self.order.enter());
        // SAFETY: the plan's slots lie within this very pool, and no other row of the step has them.
        unsafe { self.kernels.launch_touching(Unit::KvWrite, &name, extent, &args, &touches, &queue) }
    }

    fn heads_enter(&self, pool: &dyn KvPool, layer: usize, plan: &Plan, new: NewHeads<'_>) -> Result<(), KernelError> {
        self.enter_heads(pool, layer, plan, new)
    }

    fn attention(
        &self,
        pool: &dyn KvPool,
        layer: usize,
        plan: &Plan,
        q: &Buf,
        spec: &AttentionSpec<'_>,
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let (pool, plan) = self.pool_and_plan("attention", pool, layer, plan)?;
        self.attend(pool, layer, plan, q, spec, out)
    }
}
