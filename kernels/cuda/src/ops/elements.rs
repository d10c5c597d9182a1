//! Operations on elements and rows.

use std::sync::atomic::Ordering;

use kvdock_kernels::ops::{Activation, Columns, ElementOps, GroupedWeight, Indices, Turn};
use kvdock_kernels::{Buf, KernelError, Rope, RopeStyle, WeightData, WeightFormat};

use super::super::device::{CudaBuf, CudaDevice, CudaRope, product, shape, size};
use super::super::driver::Arg;
use super::super::memory::DeviceMemory;
use super::super::module::Extent;
use super::super::units::{Unit, format_name};
use super::{CudaIndices, read, write};

/// What is behind a [`GroupedWeight`]: the file's bytes.
struct CudaGrouped {
    device: u64,
    memory: DeviceMemory,
    format: WeightFormat,
}

/// Elements of a row from which on a block norms it, and not a warp.
const WIDE: usize = 512;

/// Elements from the first of a part to its last, over all rows; those that a kernel touches, and those before.
fn extent(op: &'static str, columns: Columns, width: usize, rows: usize) -> Result<(usize, usize), KernelError> {
    if columns.at.checked_add(width).is_none_or(|end| end > columns.stride) {
        let found = format!("{width} elements from {} on", columns.at);
        return Err(shape(op, "a part", format!("within {} elements", columns.stride), found));
    }
    let all = product(op, &[columns.stride, rows])?;
    Ok((all, all.saturating_sub(columns.stride) + width))
}

impl ElementOps for CudaDevice {
    fn scratch(&self, len: usize) -> Result<Buf, KernelError> {
        let memory = self.blocks.near(product("scratch", &[len, 4])?, "a buffer")?;
        Ok(Buf::from_parts(len, Box::new(CudaBuf { device: self.id, memory })))
    }

    fn upload_indices(&self, values: &[u32]) -> Result<Indices, KernelError> {
        let block = self.send_words("upload_indices", values, &self.order.enter())?;
        let inner = CudaIndices { device: self.id, block, host: values.to_vec() };
        Ok(Indices::from_parts(values.len(), Box::new(inner)))
    }

    fn activate(&self, activation: Activation, gate: &mut Buf, up: &Buf, len: usize) -> Result<(), KernelError> {
        let op = "activate";
        let mut args = vec![
            write(self.floats(op, "gate", gate, len)?, len),
            read(self.floats(op, "up", up, len)?, len),
            Arg::U64(len as u64),
        ];
        match activation {
            Activation::Silu => self.elementwise("silu_mul", len, &args),
            Activation::ClampedSilu { limit } => {
                args.push(Arg::F32(limit));
                self.elementwise("silu_mul_clamped", len, &args)
            }
            Activation::GptOss { alpha, limit } => {
                args.extend([Arg::F32(alpha), Arg::F32(limit)]);
                self.elementwise("gpt_oss_mul", len, &args)
            }
        }
    }

    fn scale(&self, x: &mut Buf, factor: f32, len: usize) -> Result<(), KernelError> {
        let x = write(self.floats("scale", "x", x, len)?, len);
        self.elementwise("scale", len, &[x, Arg::F32(factor), Arg::U64(len as u64)])
    }

    fn sigmoid_mul(&self, x: &mut Buf, gate: &Buf, len: usize) -> Result<(), KernelError> {
        let op = "sigmoid_mul";
        let (x, gate) = (self.floats(op, "x", x, len)?, self.floats(op, "gate", gate, len)?);
        self.elementwise(op, len, &[write(x, len), read(gate, len), Arg::U64(len as u64)])
    }

    fn copy_columns(
        &self,
        from: &Buf,
        source: Columns,
        to: &mut Buf,
        target: Columns,
        width: usize,
        rows: usize,
    ) -> Result<(), KernelError> {
        let op = "copy_columns";
        let ((all, reads), (all_out, writes)) = (extent(op, source, width, rows)?, extent(op, target, width, rows)?);
        let from = self.floats(op, "from", from, all)? + 4 * source.at as u64;
        let to = self.floats(op, "to", to, all_out)? + 4 * target.at as u64;
        let args = [
            read(from, reads),
            write(to, writes),
            Arg::U64(source.stride as u64),
            Arg::U64(target.stride as u64),
            size(op, "width", width)?,
            size(op, "rows", rows)?,
        ];
        self.elementwise(op, product(op, &[width, rows])?, &args)
    }

    fn norm_rows(
        &self,
        x: &mut Buf,
        weight: Option<&Buf>,
        width: usize,
        eps: f32,
        rows: usize,
    ) -> Result<(), KernelError> {
        let op = "norm_rows";
        let need = product(op, &[rows, width])?;
        let weight = match weight {
            Some(weight) => read(self.floats(op, "weight", weight, width)?, width),
            None => Arg::Address(0),
        };
        let x = write(self.floats(op, "x", x, need)?, need);
        let (width_arg, eps, offset) = (size(op, "width", width)?, Arg::F32(eps), Arg::F32(0.0));
        if width >= WIDE {
            return self.norm("rms_norm", rows, &[x, weight, x, width_arg, eps, offset]);
        }
        let args = [x, weight, size(op, "rows", rows)?, width_arg, eps, offset];
        let blocks = if width == 0 { 0 } else { rows.div_ceil(4) };
        // SAFETY: the buffers are as long as the kernel reads and writes.
        unsafe { self.run(Unit::Norm, "head_rms_norm", Extent::line(blocks, 128), &args) }
    }

    fn layer_norm(&self, x: &mut Buf, weight: &Buf, bias: &Buf, eps: f32, rows: usize) -> Result<(), KernelError> {
        let op = "layer_norm";
        let width = weight.len();
        let need = product(op, &[rows, width])?;
        let x = write(self.floats(op, "x", x, need)?, need);
        let args = [
            x,
            read(self.floats(op, "weight", weight, width)?, width),
            read(self.floats(op, "bias", bias, width)?, width),
            x,
            size(op, "width", width)?,
            Arg::F32(eps),
        ];
        self.norm(op, if width == 0 { 0 } else { rows }, &args)
    }

    fn rotate(
        &self,
        rope: &Rope,
        positions: &Indices,
        x: &mut Buf,
        heads: usize,
        head_dim: usize,
        turn: Turn,
    ) -> Result<(), KernelError> {
        let op = "rotate";
        let table: &CudaRope = rope
            .downcast_ref()
            .filter(|table: &&CudaRope| table.device == self.id)
            .ok_or_else(|| self.foreign(op, "rope"))?;
        if table.offset.saturating_add(rope.dim()) > head_dim {
            let expected = format!("at least {} + {}", table.offset, rope.dim());
            return Err(shape(op, "head_dim", expected, head_dim.to_string()));
        }
        let positions = self.indices(op, "positions", positions)?;
        if let Some(position) = positions.host.iter().find(|position| **position as usize >= rope.max_positions()) {
            let expected = format!("below {}", rope.max_positions());
            return Err(shape(op, "position", expected, position.to_string()));
        }
        self.position_limit.fetch_min(rope.max_positions(), Ordering::Relaxed);
        let rows = positions.host.len();
        let need = product(op, &[rows, heads, head_dim])?;
        let args = [
            write(self.floats(op, "x", x, need)?, need),
            positions.arg(),
            table.cos.read(),
            table.sin.read(),
            size(op, "heads", heads)?,
            size(op, "head_dim", head_dim)?,
            size(op, "offset", table.offset)?,
            size(op, "dim", rope.dim())?,
            Arg::U32(u32::from(table.style == RopeStyle::Interleaved)),
            Arg::F32(if turn == Turn::Forth { 1.0 } else { -1.0 }),
        ];
        let blocks = if heads == 0 { 0 } else { rows };
        // SAFETY: the buffer has room for the rows, and the tables serve their positions.
        unsafe { self.run(Unit::Rope, "rope", Extent::line(blocks, 128), &args) }
    }

    fn upload_groups(&self, weight: &WeightData<'_>, groups: usize) -> Result<GroupedWeight, KernelError> {
        weight.checked_row_bytes()?;
        weight.check_groups(groups)?;
        let memory = DeviceMemory::new(&self.driver, weight.bytes.len(), "a weight matrix")?;
        // SAFETY: the memory is new and as long as the bytes; whatever uses it is queued behind this.
        unsafe { self.uploads.send(weight.bytes, memory.at(), &self.order.enter(), "upload_groups")? };
        let inner = CudaGrouped { device: self.id, memory, format: weight.format };
        Ok(GroupedWeight::from_parts(groups, weight.shape.rows / groups, weight.shape.cols, Box::new(inner)))
    }

    fn linear_groups(&self, x: &Buf, weight: &GroupedWeight, rows: usize, out: &mut Buf) -> Result<(), KernelError> {
        let op = "linear_groups";
        let inner: &CudaGrouped = weight
            .downcast_ref()
            .filter(|inner: &&CudaGrouped| inner.device == self.id)
            .ok_or_else(|| self.foreign(op, "weight"))?;
        let (groups, width, cols) = (weight.groups(), weight.rows(), weight.cols());
        let (x_len, out_len) = (product(op, &[rows, groups, cols])?, product(op, &[rows, groups, width])?);
        let args = [
            inner.memory.read(),
            read(self.floats(op, "x", x, x_len)?, x_len),
            write(self.floats(op, "out", out, out_len)?, out_len),
            size(op, "weight rows", width)?,
            size(op, "weight columns", cols)?,
            size(op, "rows", rows)?,
            Arg::U64((groups * cols) as u64),
            Arg::U64((groups * width) as u64),
        ];
        let name = format!("matvec_groups_{}", format_name(inner.format));
        let extent = Extent { grid: [width.div_ceil(8), rows.div_ceil(4), groups], threads: 256, shared: 0 };
        // SAFETY: all sizes have been checked.
        unsafe { self.run(Unit::Gguf, &name, extent, &args) }
    }
}
