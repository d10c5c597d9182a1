//! Attention by heads of keys and values in a paged pool, full or over a window.

use std::sync::Arc;

use kvdock_kernels::ops::Columns;
use kvdock_kernels::{AttentionSpec, Buf, Device, KernelError, NewHeads, Projection, Rope};

use super::run::{Pass, Place};
use crate::ModelError;
use crate::families::blocks::Linear;

/// One layer's attention.
pub(super) struct Heads {
    pub(super) place: Place,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) o: Linear,
    /// Weights of the norms over each head.
    pub(super) q_norm: Option<Buf>,
    pub(super) k_norm: Option<Buf>,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim_k: usize,
    pub(super) head_dim_v: usize,
    pub(super) rope: Arc<Rope>,
    /// Keys that a query sees, its own included.
    pub(super) window: Option<u32>,
    /// One logit a head.
    pub(super) sinks: Option<Buf>,
    /// Factor on the values.
    pub(super) value_scale: Option<f32>,
    /// `q` gives a query and a gate for each head; the heads' outputs are weighted with the gates' sigmoids.
    pub(super) gated: bool,
    pub(super) eps: f32,
}

impl Heads {
    pub(super) fn apply(&self, pass: &Pass<'_>, x: &Buf) -> Result<Buf, ModelError> {
        let device = pass.device;
        let rows = pass.rows();
        let (heads, dk, dv) = (self.heads, self.head_dim_k, self.head_dim_v);
        let (pool, buffer, plan) = pass.heads(self.place)?;
        let mut q = device.scratch(rows * self.q.rows())?;
        let mut k = device.scratch(rows * self.k.rows())?;
        let mut v = device.scratch(rows * self.v.rows())?;
        let mut products = [
            Projection { weight: &self.q.weight, bias: self.q.bias.as_ref(), out: &mut q },
            Projection { weight: &self.k.weight, bias: self.k.bias.as_ref(), out: &mut k },
            Projection { weight: &self.v.weight, bias: self.v.bias.as_ref(), out: &mut v },
        ];
        device.linear(x, rows, &mut products)?;
        let mut gates = None;
        if self.gated {
            let both = q;
            let part = |at: usize| -> Result<Buf, KernelError> {
                let mut part = device.scratch(rows * heads * dk)?;
                let (source, target) = (Columns { stride: 2 * dk, at }, Columns { stride: dk, at: 0 });
                device.copy_columns(&both, source, &mut part, target, dk, rows * heads)?;
                Ok(part)
            };
            q = part(0)?;
            gates = Some(part(dk)?);
        }
        // A pool that is made for layers with more KV heads holds each of these several times: query heads then find
        // the same keys and values as in a pool of their own.
        let copies = pool.spec().kv_heads / self.kv_heads;
        if copies == 1 && self.value_scale.is_none() && pass.computes_all_rows() {
            let (q_norm, k_norm) = (self.q_norm.as_ref(), self.k_norm.as_ref());
            let new = NewHeads { q: &mut q, k: &mut k, v: &v, heads, q_norm, k_norm, eps: self.eps, rope: &self.rope };
            device.heads_enter(pool, buffer, plan, new)?;
        } else {
            if let Some(norm) = &self.q_norm {
                device.head_rms_norm(&mut q, norm, self.eps, rows, heads)?;
            }
            if let Some(norm) = &self.k_norm {
                device.head_rms_norm(&mut k, norm, self.eps, rows, self.kv_heads)?;
            }
            device.rope(&self.rope, plan, &mut q, heads, dk)?;
            device.rope(&self.rope, plan, &mut k, self.kv_heads, dk)?;
            if let Some(scale) = self.value_scale {
                device.scale(&mut v, scale, rows * self.kv_heads * dv)?;
            }
            if copies > 1 {
                k = repeated(device, &k, dk, copies, rows * self.kv_heads)?;
                v = repeated(device, &v, dv, copies, rows * self.kv_heads)?;
            }
            let width = pool.spec().kv_heads;
            pass.write_heads(self.place, (k, width * dk), (v, width * dv))?;
        }
        let spec = AttentionSpec {
            heads,
            scale: (dk as f64).sqrt().recip() as f32,
            window: self.window,
            sinks: self.sinks.as_ref(),
        };
        let mut attended = device.scratch(rows * heads * dv)?;
        device.attention(pool, buffer, plan, &q, &spec, &mut attended)?;
        if let Some(gates) = &gates {
            device.sigmoid_mul(&mut attended, gates, rows * heads * dv)?;
        }
        Ok(self.o.apply(device, &attended, rows)?)
    }
}

/// Each of `heads` heads of `width` elements `copies` times in a row.
fn repeated(device: &dyn Device, x: &Buf, width: usize, copies: usize, heads: usize) -> Result<Buf, KernelError> {
    let mut out = device.scratch(heads * copies * width)?;
    for copy in 0..copies {
        let target = Columns { stride: copies * width, at: copy * width };
        device.copy_columns(x, Columns { stride: width, at: 0 }, &mut out, target, width, heads)?;
    }
    Ok(out)
}
