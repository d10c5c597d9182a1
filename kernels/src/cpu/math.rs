//! The exponential function and what is built on it, the same bits on every instruction set.

use super::simd::Lanes;

/// `e^x` by lane.
///
/// `x` is held within -87 to 88 (so the result is neither infinite nor subnormal; the
/// softmax sets masked lanes to zero itself). NaN stays NaN. `x = n ln 2 + r` with whole `n`
/// and `|r| <= ln 2 / 2`; a polynomial of degree 6 for `e^r` whose own relative error is below
/// 4e-9, so that rounding rules: at most 2 units in the last place.
#[inline(always)]
pub(super) fn exp<S: Lanes>(s: S, x: S::F) -> S::F {
    // Adding 1.5 * 2^23 rounds to a whole number, halves to even, on every machine.
    const TO_WHOLE: f32 = 12_582_912.0;
    // ln 2 in two parts, so that `n * LN2` is subtracted with more than f32's precision.
    const LN2_HIGH: f32 = std::f32::consts::LN_2;
    const LN2_LOW: f32 = (std::f64::consts::LN_2 - LN2_HIGH as f64) as f32;

    let x = s.max(s.splat(-87.0), s.min(s.splat(88.0), x));
    let magic = s.fma(x, s.splat(std::f32::consts::LOG2_E), s.splat(TO_WHOLE));
    let n = s.sub(magic, s.splat(TO_WHOLE));
    let r = s.fma(n, s.splat(-LN2_HIGH), x);
    let r = s.fma(n, s.splat(-LN2_LOW), r);

    // e^r = 1 + r + r^2 q(r); coefficients fitted for the least greatest relative error.
    let q = s.splat(0.001_381_459_9);
    let q = s.fma(q, r, s.splat(0.008_368_717));
    let q = s.fma(q, r, s.splat(0.041_668_39));
    let q = s.fma(q, r, s.splat(0.166_665_21));
    let q = s.fma(q, r, s.splat(0.499_999_94));
    let y = s.fma(s.mul(r, r), q, r);
    let y = s.add(y, s.splat(1.0));
    s.mul(y, s.pow2_of_rounded(magic))
}

/// `x / (1 + e^-x)` by lane.
#[inline(always)]
pub(super) fn silu<S: Lanes>(s: S, x: S::F) -> S::F {
    let e = exp(s, s.sub(s.splat(0.0), x));
    s.div(x, s.add(s.splat(1.0), e))
}

#[cfg(test)]
mod tests {
    use super::super::simd::{Isa, Kernel, LANES, Machine};
    use super::*;

    struct Map<'a> {
        x: &'a [f32],
        silu: bool,
    }

    impl Kernel for Map<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn call<S: Lanes>(self, s: S) -> Vec<f32> {
            let mut out = Vec::new();
            for chunk in self.x.chunks_exact(LANES) {
                // SAFETY: the chunk has 16 elements.
                let x = unsafe { s.load(chunk.as_ptr()) };
                out.extend(s.to_array(if self.silu { silu(s, x) } else { exp(s, x) }));
            }
            out
        }
    }

    /// Values from -100 to 100, dense around zero.
    fn inputs() -> Vec<f32> {
        (-80_000i32..80_000).map(|i| (i as f32 / 80_000.0).powi(3) * 100.0).collect()
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let x = inputs();
        let portable = Machine::new(Isa::Portable).unwrap();
        for (x, y) in x.iter().zip(portable.run(Map { x: &x, silu: false })) {
            let exact = f64::from(x.clamp(-87.0, 88.0)).exp();
            let error = (f64::from(y) - exact).abs() / exact;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "exp({x}) = {y}, error {error:e}");
        }
    }

    #[test]
    fn silu_is_accurate() {
        let x = inputs();
        let portable = Machine::new(Isa::Portable).unwrap();
        for (x, y) in x.iter().zip(portable.run(Map { x: &x, silu: true })) {
            let x = f64::from(*x);
            let exact = x / (1.0 + (-x).exp());
            let error = (f64::from(y) - exact).abs();
            assert!(error <= 4e-7 * exact.abs() + 1e-35, "silu({x}) = {y}, not {exact}");
        }
    }

    #[test]
    fn special_values() {
        let x = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, 0.0].repeat(LANES / 4);
        for isa in Isa::available() {
            let y = Machine::new(isa).unwrap().run(Map { x: &x, silu: false });
            assert!(y[0] > 0.0 && y[0] < 1e-37, "{}", isa.name());
            assert!(y[1] > 1e38 && y[1].is_finite(), "{}", isa.name());
            assert!(y[2].is_nan(), "{}", isa.name());
            assert_eq!(y[3], 1.0, "{}", isa.name());
        }
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        let x = inputs();
        for silu in [false, true] {
            let expected = Machine::new(Isa::Portable).unwrap().run(Map { x: &x, silu });
            for isa in Isa::available() {
                let got = Machine::new(isa).unwrap().run(Map { x: &x, silu });
                assert!(expected.iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", isa.name());
            }
        }
    }
}
