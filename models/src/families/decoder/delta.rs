//! The gated delta net: a causal convolution, then a recurrence over a matrix of state for each head.
//!
//! The recurrence runs in token order everywhere, prefill included. The form by chunks that other engines use for
//! prefill gives other roundings for other chunks, and a prefix that comes back from a saved state would not be the
//! prefix that was computed.

use kvdock_kernels::Buf;
use kvdock_kernels::ops::{DeltaInput, DeltaSeq, DeltaSizes, DeltaWeights};

use super::run::{Pass, Place};
use crate::ModelError;
use crate::families::blocks::Linear;

/// One layer's net.
pub(super) struct DeltaNet {
    pub(super) place: Place,
    /// q, k and v in a row.
    pub(super) qkv: Linear,
    pub(super) z: Linear,
    pub(super) b: Linear,
    pub(super) a: Linear,
    pub(super) out: Linear,
    /// `[channels, kernel]`.
    pub(super) conv: Buf,
    pub(super) dt_bias: Buf,
    /// `-exp(A_log)`.
    pub(super) decay: Buf,
    /// `[value_dim]`.
    pub(super) norm: Buf,
    pub(super) sizes: DeltaSizes,
    pub(super) eps: f32,
}

impl DeltaNet {
    pub(super) fn apply(&self, pass: &Pass<'_>, x: &Buf) -> Result<Buf, ModelError> {
        let (device, dealt) = (pass.device, pass.dealt);
        let rows = pass.rows();
        let sizes = self.sizes;
        // Each token needs the state that the one before it left, so every rank runs the recurrence over the rows of all.
        let whole = |linear: &Linear| -> Result<Buf, ModelError> {
            Ok(dealt.gather(device, linear.apply(device, x, rows)?, linear.rows())?)
        };
        let mixed = whole(&self.qkv)?;
        let z = whole(&self.z)?;
        let b = whole(&self.b)?;
        let a = whole(&self.a)?;
        let seqs: Vec<DeltaSeq> = dealt
            .whole()
            .seqs
            .iter()
            .map(|seq| DeltaSeq {
                first: seq.first,
                rows: seq.chunk.tokens.len(),
                slot: seq.chunk.slot.unwrap_or_default(),
                resumes: seq.chunk.start > 0,
                saves: seq
                    .chunk
                    .save
                    .iter()
                    .map(|save| ((save.tokens - seq.chunk.start) as usize, save.slot))
                    .collect(),
            })
            .collect();
        let weights = DeltaWeights {
            conv: &self.conv,
            dt_bias: &self.dt_bias,
            decay: &self.decay,
            norm: &self.norm,
            eps: self.eps,
        };
        let input = DeltaInput { mixed: &mixed, z: &z, b: &b, a: &a };
        let states = (pass.pools()?.pages(self.place.pool)?, self.place.buffer);
        let mut y = device.scratch(dealt.whole().rows() * sizes.values())?;
        device.delta_net(sizes, &weights, &input, states, &seqs, &mut y)?;
        let y = dealt.keep(device, y, sizes.values())?;
        Ok(self.out.apply(device, &y, rows)?)
    }
}
