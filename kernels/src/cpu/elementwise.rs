//! Operations on elements: sums, gated activations, rotations.

use super::math::silu;
use super::norm::{load, store};
use super::simd::{Kernel, LANES, Lanes};
use crate::rope::RopeStyle;

/// `gate = silu(gate) * up`.
pub(super) struct SiluMul<'a> {
    pub(super) gate: &'a mut [f32],
    /// At least as long as `gate`.
    pub(super) up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Lanes>(self, s: S) {
        let len = self.gate.len();
        assert!(self.up.len() >= len);
        let mut i = 0;
        while i < len {
            let n = LANES.min(len - i);
            // SAFETY: `n` elements from `i` on exist in both.
            unsafe {
                let gate = self.gate.as_mut_ptr().add(i);
                let y = silu(s, load(s, gate, n));
                store(s, gate, s.mul(y, load(s, self.up.as_ptr().add(i), n)), n);
            }
            i += LANES;
        }
    }
}

/// `x += delta`.
pub(super) fn add(x: &mut [f32], delta: &[f32]) {
    for (x, d) in x.iter_mut().zip(delta) {
        *x += d;
    }
}

/// Rotates the pairs of one head's rotated elements. `cos` and `sin` have a value a pair. Plain
/// products and sums (never fused), so every machine gives the same bits.
pub(super) fn rotate(style: RopeStyle, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    match style {
        RopeStyle::Half => {
            let (low, high) = x.split_at_mut(cos.len());
            let pairs = low.iter_mut().zip(high.iter_mut());
            for ((a, b), (c, s)) in pairs.zip(cos.iter().zip(sin)) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
        RopeStyle::Interleaved => {
            for ([a, b], (c, s)) in x.as_chunks_mut().0.iter_mut().zip(cos.iter().zip(sin)) {
                (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
            }
        }
    }
}
