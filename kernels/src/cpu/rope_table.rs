//! Cosines and sines of a rotary embedding, made when first needed.

use std::sync::OnceLock;

use crate::error::KernelError;
use crate::rope::{RopeSpec, RopeStyle};

/// Positions of one part of the table.
const PART: usize = 128;

/// `[positions][cos dim/2, sin dim/2]`, in parts of [`PART`] positions.
pub(super) struct RopeTable {
    pub(super) style: RopeStyle,
    pub(super) offset: usize,
    pub(super) dim: usize,
    pub(super) max_positions: usize,
    frequencies: Vec<f64>,
    factor: f64,
    parts: Vec<OnceLock<Box<[f32]>>>,
}

impl RopeTable {
    pub(super) fn new(spec: &RopeSpec) -> Result<Self, KernelError> {
        let (frequencies, factor) = spec.frequencies()?;
        let mut parts = Vec::new();
        parts.resize_with(spec.max_positions.div_ceil(PART), OnceLock::new);
        Ok(Self {
            style: spec.style,
            offset: spec.offset,
            dim: spec.dim,
            max_positions: spec.max_positions,
            frequencies,
            factor,
            parts,
        })
    }

    /// Checks that heads of `head_dim` elements can be rotated at `positions`.
    pub(super) fn check(&self, op: &'static str, positions: &[u32], head_dim: usize) -> Result<(), KernelError> {
        if self.offset.saturating_add(self.dim) > head_dim {
            let expected = format!("at least {} + {}", self.offset, self.dim);
            return Err(KernelError::Shape { op, what: "head_dim", expected, found: head_dim.to_string() });
        }
        if let Some(position) = positions.iter().max()
            && *position as usize >= self.max_positions
        {
            let expected = format!("below {}", self.max_positions);
            return Err(KernelError::Shape { op, what: "position", expected, found: position.to_string() });
        }
        Ok(())
    }

    /// Cosines and sines at a position below `max_positions`.
    pub(super) fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let part = self.parts[position / PART].get_or_init(|| self.make(position / PART * PART));
        part[position % PART * self.dim..][..self.dim].split_at(self.dim / 2)
    }

    /// Angles, cosines and sines in f64, from a library whose results are the same on every
    /// machine.
    fn make(&self, first: usize) -> Box<[f32]> {
        let mut values = Vec::with_capacity(PART * self.dim);
        for position in first..first + PART {
            let angle = |f: &f64| position as f64 * f;
            let cos = |f| (libm::cos(angle(f)) * self.factor) as f32;
            let sin = |f| (libm::sin(angle(f)) * self.factor) as f32;
            values.extend(self.frequencies.iter().map(cos));
            values.extend(self.frequencies.iter().map(sin));
        }
        values.into()
    }
}
