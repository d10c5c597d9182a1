//! The CPU device: checks of arguments, and the way from the device's face to the kernels.

use std::sync::Arc;

use parking_lot::Mutex;

use super::attention::Attention;
use super::elementwise::{SiluMul, add, rotate};
use super::kv_pool::{CpuKvPool, with_kv_element};
use super::linear::{self, Product};
use super::memory::FloatArray;
use super::norm::RmsNorm;
use super::packed::PackedWeight;
use super::plan::StepPlan;
use super::rope_table::RopeTable;
use super::shared::CpuPlan;
use super::simd::{Isa, Machine};
use super::threads::ThreadPool;
use crate::device::{AttentionSpec, Buf, Device, Plan, Projection, Rope, SeqSpan, Weight, WeightData};
use crate::error::KernelError;
use crate::kv::{KvPool, KvSpec};
use crate::rope::RopeSpec;

/// Elements below which an operation is not worth waking another thread.
const WORTH_A_TASK: usize = 16 * 1024;

/// The CPU as a [`Device`]. Operations run in the call, on the caller's thread and the device's
/// own; calls from several threads take turns where they must.
pub struct CpuDevice {
    name: String,
    pub(super) machine: Machine,
    pub(super) threads: ThreadPool,
    /// Work space of matrix products and of attention.
    pub(super) rows: Mutex<FloatArray>,
    partial: Mutex<FloatArray>,
}

impl CpuDevice {
    /// A device that works with `threads` threads (at least 1; the caller's counts) and the best
    /// instruction set of the machine.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        let best = Isa::available().first().copied().unwrap_or(Isa::Portable);
        Self::with_isa(threads, best)
    }

    /// A device with a given instruction set. The results are the same with all of them.
    pub fn with_isa(threads: usize, isa: Isa) -> Result<Self, KernelError> {
        if !(1..=1024).contains(&threads) {
            return Err(KernelError::Parameter {
                what: "threads",
                reason: format!("{threads} is not within 1 to 1024"),
            });
        }
        let machine = Machine::new(isa).ok_or_else(|| KernelError::Parameter {
            what: "instruction set",
            reason: format!("this machine has no {}", isa.name()),
        })?;
        let plural = if threads == 1 { "" } else { "s" };
        Ok(Self {
            name: format!("cpu ({}, {threads} thread{plural})", isa.name()),
            machine,
            threads: ThreadPool::new(threads)?,
            rows: Mutex::new(FloatArray::empty()),
            partial: Mutex::new(FloatArray::empty()),
        })
    }

    pub(super) fn foreign(&self, op: &'static str, what: &'static str) -> KernelError {
        KernelError::ForeignHandle { op, what, device: self.name.clone() }
    }

    /// The first `need` elements of a buffer.
    pub(super) fn floats<'a>(
        &self,
        op: &'static str,
        what: &'static str,
        buf: &'a Buf,
        need: usize,
    ) -> Result<&'a [f32], KernelError> {
        let array: &FloatArray = buf.downcast_ref().ok_or_else(|| self.foreign(op, what))?;
        array.as_slice().get(..need).ok_or_else(|| too_short(op, what, need, buf.len()))
    }

    /// The first `need` elements of a buffer, to write.
    pub(super) fn floats_mut<'a>(
        &self,
        op: &'static str,
        what: &'static str,
        buf: &'a mut Buf,
        need: usize,
    ) -> Result<&'a mut [f32], KernelError> {
        let len = buf.len();
        let array: &mut FloatArray = buf.downcast_mut().ok_or_else(|| self.foreign(op, what))?;
        array.as_mut_slice().get_mut(..need).ok_or_else(|| too_short(op, what, need, len))
    }

    fn weight<'a>(&self, op: &'static str, weight: &'a Weight) -> Result<&'a PackedWeight, KernelError> {
        weight.downcast_ref().ok_or_else(|| self.foreign(op, "weight"))
    }

    fn plan_of<'a>(&self, op: &'static str, plan: &'a Plan) -> Result<&'a CpuPlan, KernelError> {
        plan.downcast_ref().ok_or_else(|| self.foreign(op, "plan"))
    }

    fn pool<'a>(&self, op: &'static str, pool: &'a dyn KvPool) -> Result<&'a CpuKvPool, KernelError> {
        pool.as_any().downcast_ref().ok_or_else(|| self.foreign(op, "pool"))
    }

    /// The pool and the plan of an operation on a layer, found to belong together.
    fn pool_and_plan<'a>(
        &self,
        op: &'static str,
        pool: &'a dyn KvPool,
        layer: usize,
        plan: &'a Plan,
    ) -> Result<(&'a CpuKvPool, &'a StepPlan), KernelError> {
        let (pool, plan) = (self.pool(op, pool)?, &self.plan_of(op, plan)?.step);
        if plan.spec != *pool.spec() {
            let (expected, found) = (format!("{:?}", pool.spec()), format!("{:?}", plan.spec));
            return Err(shape(op, "the plan's pool", expected, found));
        }
        if layer >= plan.spec.layers {
            let expected = format!("below {}", plan.spec.layers);
            return Err(shape(op, "layer", expected, layer.to_string()));
        }
        Ok((pool, plan))
    }

    /// Splits `count` items of `size` elements into tasks and calls `body` with ranges of items.
    pub(super) fn each(
        &self,
        op: &'static str,
        count: usize,
        size: usize,
        body: &(dyn Fn(std::ops::Range<usize>) + Sync),
    ) -> Result<(), KernelError> {
        let tasks = (count * size / WORTH_A_TASK).clamp(1, 4 * self.threads.threads());
        let step = count.div_ceil(tasks).max(1);
        self.threads.run(op, count.div_ceil(step), &|task| {
            body(task * step..((task + 1) * step).min(count));
        })
    }

    /// Splits a norm's rows among the threads.
    fn norm(&self, op: &'static str, all: RmsNorm<'_>) -> Result<(), KernelError> {
        let RmsNorm { delta, weight, eps, rows, .. } = all;
        let (x, out) = (Shared(all.x), Shared(all.out));
        let width = weight.len();
        self.each(op, rows, width, &|part| {
            let first = part.start * width;
            self.machine.run(RmsNorm {
                x: x.at(first),
                delta: delta.map(|d| &d[first..]),
                weight,
                eps,
                rows: part.len(),
                out: out.at(first),
            });
        })
    }
}

/// A pointer that tasks may share, each using elements of its own.
#[derive(Clone, Copy)]
pub(super) struct Shared(pub(super) *mut f32);
// SAFETY: tasks use disjoint elements of a buffer that outlives them.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn at(self, index: usize) -> *mut f32 {
        self.0.wrapping_add(index)
    }

    /// # Safety
    /// The part lies within the buffer, and no other task uses it.
    pub(super) unsafe fn part<'a>(self, at: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: as promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }
}

pub(super) fn shape(op: &'static str, what: &'static str, expected: String, found: String) -> KernelError {
    KernelError::Shape { op, what, expected, found }
}

pub(super) fn too_short(op: &'static str, what: &'static str, need: usize, len: usize) -> KernelError {
    let expected = format!("at least {need} elements");
    shape(op, what, expected, format!("{len} elements long"))
}

/// The product of sizes, or an error if it overflows.
pub(super) fn product(op: &'static str, sizes: &[usize]) -> Result<usize, KernelError> {
    sizes.iter().try_fold(1usize, |a, b| a.checked_mul(*b)).ok_or_else(|| {
        let expected = "a product that fits the address space".into();
        shape(op, "the size", expected, format!("{sizes:?}"))
    })
}

impl Device for CpuDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn numerics_id(&self) -> &str {
        "cpu-f32-2"
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn alloc(&self, len: usize) -> Result<Buf, KernelError> {
        let array = FloatArray::zeroed(len, "a buffer")?;
        Ok(Buf::from_parts(len, Box::new(array)))
    }

    fn write(&self, dst: &mut Buf, offset: usize, src: &[f32]) -> Result<(), KernelError> {
        let need = offset.saturating_add(src.len());
        self.floats_mut("write", "dst", dst, need)?[offset..].copy_from_slice(src);
        Ok(())
    }

    fn read(&self, src: &Buf, offset: usize, dst: &mut [f32]) -> Result<(), KernelError> {
        let need = offset.saturating_add(dst.len());
        dst.copy_from_slice(&self.floats("read", "src", src, need)?[offset..]);
        Ok(())
    }

    fn upload_weight(&self, weight: &WeightData<'_>) -> Result<Weight, KernelError> {
        let packed = PackedWeight::new(weight, &self.threads)?;
        Ok(Weight::from_parts(weight.shape, weight.format, Box::new(packed)))
    }

    fn upload_rope(&self, spec: &RopeSpec) -> Result<Rope, KernelError> {
        let table = RopeTable::new(spec)?;
        Ok(Rope::from_parts(spec.dim, spec.max_positions, Box::new(table)))
    }

    fn alloc_kv_pool(&self, spec: KvSpec) -> Result<Arc<dyn KvPool>, KernelError> {
        Ok(Arc::new(CpuKvPool::new(spec)?))
    }

    fn plan(&self, pool: &dyn KvPool, seqs: &[SeqSpan<'_>]) -> Result<Plan, KernelError> {
        let plan = StepPlan::new(self.pool("plan", pool)?.spec(), seqs)?;
        Ok(Plan::from_parts(plan.positions.len(), Box::new(CpuPlan::new(plan))))
    }

    fn embed(&self, table: &Weight, ids: &[u32], out: &mut Buf) -> Result<(), KernelError> {
        let weight = self.weight("embed", table)?;
        let (rows, cols) = (weight.shape.rows, weight.shape.cols);
        if let Some((row, index)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= rows) {
            return Err(KernelError::Index { op: "embed", row, index: *index, rows });
        }
        let need = product("embed", &[ids.len(), cols])?;
        let out = Shared(self.floats_mut("embed", "out", out, need)?.as_mut_ptr());
        // Reading one lane of a tile costs as much as reading sixteen.
        self.each("embed", ids.len(), 16 * cols, &|part| {
            for row in part {
                // SAFETY: row `row` of `out`, which this task alone has.
                let out = unsafe { out.part(row * cols, cols) };
                weight.row(self.machine, ids[row] as usize, out);
            }
        })
    }

    fn gather_rows(&self, x: &Buf, width: usize, indices: &[u32], out: &mut Buf) -> Result<(), KernelError> {
        let op = "gather_rows";
        let x = self.floats(op, "x", x, x.len())?;
        let need = product(op, &[indices.len(), width])?;
        let out = self.floats_mut(op, "out", out, need)?;
        let rows = x.len().checked_div(width).unwrap_or(0);
        for (row, index) in indices.iter().enumerate() {
            let from = *index as usize;
            if from >= rows {
                let index = *index;
                return Err(KernelError::Index { op, row, index, rows });
            }
            out[row * width..][..width].copy_from_slice(&x[from * width..][..width]);
        }
        Ok(())
    }

    fn rms_norm(&self, x: &Buf, weight: &Buf, eps: f32, rows: usize, out: &mut Buf) -> Result<(), KernelError> {
        let op = "rms_norm";
        let weight = self.floats(op, "weight", weight, weight.len())?;
        let need = product(op, &[rows, weight.len()])?;
        let x = self.floats(op, "x", x, need)?.as_ptr().cast_mut();
        let out = self.floats_mut(op, "out", out, need)?.as_mut_ptr();
        // Without a delta `x` is only read.
        self.norm(op, RmsNorm { x, delta: None, weight, eps, rows, out })
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
        let weight = self.floats(op, "weight", weight, weight.len())?;
        let need = product(op, &[rows, weight.len()])?;
        let delta = self.floats(op, "delta", delta, need)?;
        let x = self.floats_mut(op, "x", x, need)?.as_mut_ptr();
        let out = self.floats_mut(op, "out", out, need)?.as_mut_ptr();
        self.norm(op, RmsNorm { x, delta: Some(delta), weight, eps, rows, out })
    }

    fn head_rms_norm(&self, x: &mut Buf, weight: &Buf, eps: f32, rows: usize, heads: usize) -> Result<(), KernelError> {
        let op = "head_rms_norm";
        let weight = self.floats(op, "weight", weight, weight.len())?;
        let need = product(op, &[rows, heads, weight.len()])?;
        let x = self.floats_mut(op, "x", x, need)?.as_mut_ptr();
        self.norm(op, RmsNorm { x, delta: None, weight, eps, rows: rows * heads, out: x })
    }

    fn linear(&self, x: &Buf, rows: usize, projections: &mut [Projection<'_>]) -> Result<(), KernelError> {
        let op = "linear";
        let Some(first) = projections.first() else {
            return Ok(());
        };
        let cols = first.weight.shape().cols;
        let x = self.floats(op, "x", x, product(op, &[rows, cols])?)?;
        let mut products = Vec::with_capacity(projections.len());
        for p in projections.iter_mut() {
            let weight = self.weight(op, p.weight)?;
            if weight.shape.cols != cols {
                let found = format!("{} columns wide", weight.shape.cols);
                return Err(shape(op, "weight", format!("{cols} columns"), found));
            }
            let width = weight.shape.rows;
            let bias = match p.bias {
                Some(bias) => Some(self.floats(op, "bias", bias, width)?),
                None => None,
            };
            let need = product(op, &[rows, width])?;
            let out = self.floats_mut(op, "out", p.out, need)?;
            products.push(Product { weight, bias, out });
        }
        let mut scratch = self.rows.lock();
        linear::run(self.machine, &self.threads, &mut scratch, x, rows, &mut products)
    }

    fn rope(&self, rope: &Rope, plan: &Plan, x: &mut Buf, heads: usize, head_dim: usize) -> Result<(), KernelError> {
        let op = "rope";
        let table: &RopeTable = rope.downcast_ref().ok_or_else(|| self.foreign(op, "rope"))?;
        let plan = &self.plan_of(op, plan)?.step;
        table.check(op, &plan.positions, head_dim)?;
        let width = product(op, &[heads, head_dim])?;
        let need = product(op, &[plan.positions.len(), width])?;
        let x = Shared(self.floats_mut(op, "x", x, need)?.as_mut_ptr());
        self.each(op, plan.positions.len(), width, &|part| {
            for row in part {
                // SAFETY: row `row` of `x`, which this task alone has.
                let x = unsafe { x.part(row * width, width) };
                let (cos, sin) = table.at(plan.positions[row] as usize);
                for head in x.chunks_exact_mut(head_dim) {
                    let rotated = &mut head[table.offset..][..table.dim];
                    rotate(table.style, rotated, cos, sin);
                }
            }
        })
    }

    fn silu_mul(&self, gate: &mut Buf, up: &Buf, len: usize) -> Result<(), KernelError> {
        let up = self.floats("silu_mul", "up", up, len)?;
        let gate = self.floats_mut("silu_mul", "gate", gate, len)?;
        let gate = Shared(gate.as_mut_ptr());
        self.each("silu_mul", len, 4, &|part| {
            self.machine.run(SiluMul {
                // SAFETY: this part of `gate` belongs to this task alone.
                gate: unsafe { gate.part(part.start, part.len()) },
                up: &up[part],
            });
        })
    }

    fn add(&self, x: &mut Buf, delta: &Buf, len: usize) -> Result<(), KernelError> {
        let delta = self.floats("add", "delta", delta, len)?;
        let x = Shared(self.floats_mut("add", "x", x, len)?.as_mut_ptr());
        self.each("add", len, 1, &|part| {
            // SAFETY: this part of `x` belongs to this task alone.
            add(unsafe { x.part(part.start, part.len()) }, &delta[part]);
        })
    }

    fn kv_write(&self, pool: &dyn KvPool, layer: usize, plan: &Plan, k: &Buf, v: &Buf) -> Result<(), KernelError> {
        let op = "kv_write";
        let (pool, plan) = self.pool_and_plan(op, pool, layer, plan)?;
        let KvSpec { kv_heads, head_dim_k: dk, head_dim_v: dv, page_tokens, dtype, .. } = plan.spec;
        let rows = plan.positions.len();
        let k = self.floats(op, "k", k, product(op, &[rows, kv_heads, dk])?)?;
        let v = self.floats(op, "v", v, product(op, &[rows, kv_heads, dv])?)?;
        let _writing = pool.in_use.write();
        self.each(op, kv_heads, rows * (dk + dv), &|heads| {
            for head in heads {
                for span in &plan.spans {
                    for row in span.rows.clone() {
                        let position = plan.positions[row] as usize;
                        let page = span.pages[position / page_tokens];
                        let k = &k[(row * kv_heads + head) * dk..][..dk];
                        let v = &v[(row * kv_heads + head) * dv..][..dv];
                        let token = position % page_tokens;
                        // SAFETY: the plan's pages lie within a pool of this very geometry;
                        // each head is written by one task, and the lock keeps others away.
                        with_kv_element!(dtype, E => unsafe {
                            pool.put::<E>(layer, page, head, token, k, v);
                        });
                    }
                }
            }
        })
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
        let op = "attention";
        let shared = self.plan_of(op, plan)?.shared();
        let (pool, plan) = self.pool_and_plan(op, pool, layer, plan)?;
        let heads = spec.heads;
        if heads == 0 || !heads.is_multiple_of(plan.spec.kv_heads) {
            let expected = format!("a multiple of {} KV heads", plan.spec.kv_heads);
            return Err(shape(op, "heads", expected, heads.to_string()));
        }
        if spec.window == Some(0) {
            return Err(shape(op, "window", "at least 1".into(), "0".into()));
        }
        let sinks = match spec.sinks {
            Some(sinks) => Some(self.floats(op, "sinks", sinks, heads)?),
            None => None,
        };
        let rows = plan.positions.len();
        let q_len = product(op, &[rows, heads, plan.spec.head_dim_k])?;
        let out_len = product(op, &[rows, heads, plan.spec.head_dim_v])?;
        let q = self.floats(op, "q", q, q_len)?;
        let out = self.floats_mut(op, "out", out, out_len)?;
        let _reading = pool.in_use.read();
        let mut partial = self.partial.lock();
        Attention {
            pool,
            layer,
            plan,
            shared,
            q,
            heads,
            scale: spec.scale,
            window: spec.window.map(|w| w as usize),
            sinks,
            out,
        }
        .run(self.machine, &self.threads, &mut partial)
    }
}
