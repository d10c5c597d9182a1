//! RMS norm, plain and fused with the residual add.

use super::simd::{Kernel, LANES, Lanes};

/// Norms `rows` rows of `weight.len()` elements.
///
/// The sum of squares runs in 16 lanes (lane `l` takes elements `l`, `l + 16`, ... in order),
/// which are then added as [`Lanes::sum`] does. Each element is `(x * (1 / sqrt(mean + eps))) *
/// weight`.
pub(super) struct RmsNorm<'a> {
    pub(super) x: *mut f32,
    /// Added to `x` first, if given; `x` keeps the sum.
    pub(super) delta: Option<&'a [f32]>,
    pub(super) weight: &'a [f32],
    pub(super) eps: f32,
    pub(super) rows: usize,
    /// May be the same as `x`.
    pub(super) out: *mut f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    /// `x` and `out` must be valid for `rows * weight.len()` elements, `x` for writes too if
    /// there is a delta.
    #[inline(always)]
    fn call<S: Lanes>(self, s: S) {
        let width = self.weight.len();
        let whole = width / LANES * LANES;
        let rest = width - whole;
        let w = self.weight.as_ptr();
        assert!(self.delta.is_none_or(|d| d.len() >= self.rows * width));
        for row in 0..self.rows {
            // SAFETY: all accesses lie within a row of `width` elements of x, out, delta or
            // weight; the rest of a row goes through arrays of 16.
            unsafe {
                let x = self.x.add(row * width);
                let out = self.out.add(row * width);
                let mut squares = s.splat(0.0);
                let mut i = 0;
                while i < width {
                    let n = LANES.min(width - i);
                    let mut v = load(s, x.add(i), n);
                    if let Some(delta) = self.delta {
                        let d = load(s, delta.as_ptr().add(row * width + i), n);
                        v = s.add(v, d);
                        store(s, x.add(i), v, n);
                    }
                    squares = s.fma(v, v, squares);
                    i += LANES;
                }
                let mean = s.sum(squares) / width as f32;
                let factor = s.splat(1.0 / (mean + self.eps).sqrt());
                let mut i = 0;
                while i < whole {
                    let v = s.mul(s.mul(s.load(x.add(i)), factor), s.load(w.add(i)));
                    s.store(out.add(i), v);
                    i += LANES;
                }
                if rest > 0 {
                    let v = s.mul(load(s, x.add(whole), rest), factor);
                    store(s, out.add(whole), s.mul(v, load(s, w.add(whole), rest)), rest);
                }
            }
        }
    }
}

/// The first `n` lanes from `p`, zeros beyond.
///
/// # Safety
/// `min(n, 16)` floats at `p` are readable.
#[inline(always)]
pub(super) unsafe fn load<S: Lanes>(s: S, p: *const f32, n: usize) -> S::F {
    // SAFETY: a whole vector only if there are 16 floats; else `n` floats into an array.
    unsafe {
        if n >= LANES {
            return s.load(p);
        }
        let mut a = [0.0; LANES];
        let mut l = 0;
        while l < n {
            a[l] = *p.add(l);
            l += 1;
        }
        s.load(a.as_ptr())
    }
}

/// Stores the first `n` lanes to `p`.
///
/// # Safety
/// `min(n, 16)` floats at `p` are writable.
#[inline(always)]
pub(super) unsafe fn store<S: Lanes>(s: S, p: *mut f32, v: S::F, n: usize) {
    // SAFETY: as in `load`.
    unsafe {
        if n >= LANES {
            s.store(p, v);
            return;
        }
        let a = s.to_array(v);
        let mut l = 0;
        while l < n {
            *p.add(l) = a[l];
            l += 1;
        }
    }
}
