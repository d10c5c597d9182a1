//! Hyper-connections: the residual state is several streams, which a sublayer reads as one mix and is added back to by
//! another.

use kvdock_kernels::ops::{HyperMix, HyperOut};
use kvdock_kernels::{Buf, Device};

use crate::ModelError;
use crate::families::blocks::Linear;

pub(super) use kvdock_kernels::ops::STREAMS;

/// Values of a mix: into the sublayer, out of it, and among the streams.
pub(super) const MIXES: usize = (2 + STREAMS) * STREAMS;

/// Values of the way back: what each stream takes of the output, and of each stream.
const BACKS: usize = (1 + STREAMS) * STREAMS;

/// The mixes around one sublayer.
pub(super) struct Hyper {
    /// `[MIXES, STREAMS * hidden]`.
    pub(super) mix: Linear,
    pub(super) base: Buf,
    /// Three factors.
    pub(super) scale: Buf,
    pub(super) eps: f32,
    pub(super) norm_eps: f32,
    /// Normalisations of the mix among the streams.
    pub(super) rounds: usize,
}

impl Hyper {
    /// One sublayer between its mixes, with the norm of its input: `streams` `[rows, STREAMS, hidden]` become those after
    /// it.
    pub(super) fn around(
        &self,
        device: &dyn Device,
        (norm, eps): (&Buf, f32),
        rows: usize,
        streams: &mut Buf,
        of: impl FnOnce(&Buf) -> Result<Buf, ModelError>,
    ) -> Result<(), ModelError> {
        let hidden = norm.len();
        let mixes = self.mix.apply(device, streams, rows)?;
        let mix = HyperMix {
            base: &self.base,
            scale: &self.scale,
            rounds: self.rounds,
            eps: self.eps,
            norm_eps: self.norm_eps,
        };
        let (mut input, mut backs) = (device.scratch(rows * hidden)?, device.scratch(rows * BACKS)?);
        device.hyper_enter(streams, &mixes, &mix, (rows, hidden), &mut input, &mut backs)?;
        device.norm_rows(&mut input, Some(norm), hidden, eps, rows)?;
        let y = of(&input)?;
        Ok(device.hyper_leave(streams, &backs, &y, (rows, hidden))?)
    }
}

/// The mix of the streams that the output matrix sees.
pub(super) struct HyperHead {
    /// `[STREAMS, STREAMS * hidden]`.
    pub(super) mix: Linear,
    pub(super) base: Buf,
    pub(super) scale: f32,
    pub(super) eps: f32,
    pub(super) norm_eps: f32,
}

impl HyperHead {
    /// `[rows, hidden]` for streams `[rows, STREAMS, hidden]`.
    pub(super) fn apply(
        &self,
        device: &dyn Device,
        streams: &Buf,
        rows: usize,
        hidden: usize,
    ) -> Result<Buf, ModelError> {
        let mixes = self.mix.apply(device, streams, rows)?;
        let mix = HyperOut { base: &self.base, scale: self.scale, eps: self.eps, norm_eps: self.norm_eps };
        let mut out = device.scratch(rows * hidden)?;
        device.hyper_head(streams, &mixes, &mix, (rows, hidden), &mut out)?;
        Ok(out)
    }
}
