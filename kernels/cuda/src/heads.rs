//! The heads of new rows, in one launch.

use kvdock_kernels::{Buf, KernelError, KvPool, KvSpec, NewHeads, Plan, RopeStyle};

use super::device::{CudaDevice, product, shape, size};
use super::driver::{Arg, Touch};
use super::module::Extent;
use super::units::Unit;

impl CudaDevice {
    /// [`kvdock_kernels::Device::heads_enter`].
    pub(super) fn enter_heads(
        &self,
        pool: &dyn KvPool,
        layer: usize,
        plan: &Plan,
        new: NewHeads<'_>,
    ) -> Result<(), KernelError> {
        let op = "heads_enter";
        let (pool, plan) = self.pool_and_plan(op, pool, layer, plan)?;
        let KvSpec { kv_heads, head_dim_k: dk, head_dim_v: dv, page_tokens, dtype, .. } = *pool.spec();
        let NewHeads { q, k, v, heads, q_norm, k_norm, eps, rope } = new;
        let table = self.rope_table(op, rope, plan, dk)?;
        let rows = plan.rows();
        let norm = |what, weight: Option<&Buf>| match weight {
            None => Ok(Arg::Address(0)),
            Some(weight) if weight.len() == dk => Ok(Arg::read(self.floats(op, what, weight, dk)?, 4 * dk)),
            Some(weight) => Err(shape(op, what, format!("{dk} elements"), weight.len().to_string())),
        };
        let (q_len, k_len) = (product(op, &[rows, heads, dk])?, product(op, &[rows, kv_heads, dk])?);
        let v_len = product(op, &[rows, kv_heads, dv])?;
        let (keys, values) = pool.layer(layer);
        let args = [
            Arg::write(self.floats(op, "q", q, q_len)?, 4 * q_len),
            Arg::read(self.floats(op, "k", k, k_len)?, 4 * k_len),
            Arg::read(self.floats(op, "v", v, v_len)?, 4 * v_len),
            norm("q_norm", q_norm)?,
            norm("k_norm", k_norm)?,
            Arg::F32(eps),
            plan.positions(0, rows),
            table.cos.read(),
            table.sin.read(),
            Arg::Address(keys),
            Arg::Address(values),
            plan.slots(),
            size(op, "heads", heads)?,
            size(op, "kv_heads", kv_heads)?,
            size(op, "head_dim_k", dk)?,
            size(op, "head_dim_v", dv)?,
            size(op, "page_tokens", page_tokens)?,
            size(op, "offset", table.offset)?,
            size(op, "dim", rope.dim())?,
            Arg::U32(u32::from(table.style == RopeStyle::Interleaved)),
        ];
        let touches = |tell: &mut dyn FnMut(Touch)| plan.written(tell, pool, layer);
        let name = format!("heads_enter_{}", dtype.name());
        let extent = Extent::plane(rows, (heads + 2 * kv_heads).div_ceil(4), 128);
        // SAFETY: the plan's slots lie within this very pool, and no other row of the step has them; the buffers have room for the rows, and the tables serve
        // their positions.
        unsafe { self.kernels.launch_touching(Unit::Heads, &name, extent, &args, &touches, &self.order.enter()) }
    }
}
