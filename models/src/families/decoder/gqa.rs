//! Attention by heads of keys and values in a paged pool, full or over a window.

use std::sync::Arc;

use kvdock_kernels::rowmath::sigmoid;
use kvdock_kernels::{AttentionSpec, Buf, Projection, Rope};

use super::run::{Pass, Place};
use crate::ModelError;
use crate::families::blocks::{Linear, to_host};

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
        let mut q = device.alloc(rows * self.q.rows())?;
        let mut k = device.alloc(rows * self.k.rows())?;
        let mut v = device.alloc(rows * self.v.rows())?;
        let mut products = [
            Projection { weight: &self.q.weight, bias: self.q.bias.as_ref(), out: &mut q },
            Projection { weight: &self.k.weight, bias: self.k.bias.as_ref(), out: &mut k },
            Projection { weight: &self.v.weight, bias: self.v.bias.as_ref(), out: &mut v },
        ];
        device.linear(x, rows, &mut products)?;
        let mut gates = Vec::new();
        if self.gated {
            let both = to_host(device, &q, rows * heads * 2 * dk)?;
            let pairs = both.as_slice().chunks_exact(2 * dk);
            gates = pairs.clone().flat_map(|pair| pair[dk..].iter().copied()).collect();
            q = device.upload(&pairs.flat_map(|pair| pair[..dk].iter().copied()).collect::<Vec<f32>>())?;
        }
        if let Some(norm) = &self.q_norm {
            device.head_rms_norm(&mut q, norm, self.eps, rows, heads)?;
        }
        if let Some(norm) = &self.k_norm {
            device.head_rms_norm(&mut k, norm, self.eps, rows, self.kv_heads)?;
        }
        device.rope(&self.rope, plan, &mut q, heads, dk)?;
        device.rope(&self.rope, plan, &mut k, self.kv_heads, dk)?;
        if let Some(scale) = self.value_scale {
            let scaled: Vec<f32> =
                to_host(device, &v, rows * self.kv_heads * dv)?.iter().map(|value| value * scale).collect();
            v = device.upload(&scaled)?;
        }
        // A pool that is made for layers with more KV heads holds each of these several times: query heads then find
        // the same keys and values as in a pool of their own.
        let copies = pool.spec().kv_heads / self.kv_heads;
        if copies > 1 {
            k = device.upload(&repeated(&to_host(device, &k, rows * self.kv_heads * dk)?, dk, copies))?;
            v = device.upload(&repeated(&to_host(device, &v, rows * self.kv_heads * dv)?, dv, copies))?;
        }
        device.kv_write(pool, buffer, plan, &k, &v)?;
        let spec = AttentionSpec {
            heads,
            scale: (dk as f64).sqrt().recip() as f32,
            window: self.window,
            sinks: self.sinks.as_ref(),
        };
        let mut attended = device.alloc(rows * heads * dv)?;
        device.attention(pool, buffer, plan, &q, &spec, &mut attended)?;
        if self.gated {
            let mut values = to_host(device, &attended, rows * heads * dv)?;
            values.iter_mut().zip(&gates).for_each(|(value, gate)| *value *= sigmoid(*gate));
            device.write(&mut attended, 0, &values)?;
        }
        Ok(self.o.apply(device, &attended, rows)?)
    }
}

/// Each head of `width` elements `copies` times in a row.
fn repeated(values: &[f32], width: usize, copies: usize) -> Vec<f32> {
    values.chunks_exact(width).flat_map(|head| std::iter::repeat_n(head, copies).flatten().copied()).collect()
}
