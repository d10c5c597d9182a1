//! Rotary position embeddings: parameters, frequencies and the values of their tables.

use crate::error::KernelError;

/// Which elements of a head form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs `(i, i + dim/2)`: Hugging Face weights, GGUF weights of all but "llama".
    Half,
    /// Pairs `(2i, 2i + 1)`: GGUF weights of architecture "llama".
    Interleaved,
}

/// How the frequencies are stretched for long contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context the model was trained with at first.
        original_context: f64,
    },
    /// YaRN: a ramp over the dimensions between divided and kept frequencies, and a factor on
    /// cosines and sines.
    Yarn {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Context the model was trained with at first.
        original_context: f64,
        /// Rotations over the original context above which a frequency is kept (usually 32).
        beta_fast: f64,
        /// Rotations over the original context below which it is divided (usually 1).
        beta_slow: f64,
        /// Factor on cosines and sines; `None` means `0.1 * ln(factor) + 1`.
        attention_factor: Option<f64>,
        /// Whether the ramp begins and ends at whole pairs. gpt-oss says no, all others yes.
        truncate: bool,
    },
}

/// Parameters of a rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Pairing of elements.
    pub style: RopeStyle,
    /// First rotated element of a head, usually 0.
    pub offset: usize,
    /// Rotated elements of a head, even; the others stay as they are.
    pub dim: usize,
    /// Base of the frequencies: `theta^(-2i/dim)`.
    pub theta: f64,
    /// Stretching of the frequencies.
    pub scaling: RopeScaling,
    /// If given, `dim / 2` divisors of the frequencies, applied after `scaling`
    /// (GGUF's `rope_freqs.weight`).
    pub frequency_divisors: Option<Vec<f32>>,
    /// Positions the tables must serve: 0 up to this, exclusive.
    pub max_positions: usize,
}

impl RopeSpec {
    /// Checks the parameters; gives the `dim / 2` frequencies and the factor on cosines and
    /// sines. All arithmetic is f64 with functions that give the same bits on every machine.
    pub fn frequencies(&self) -> Result<(Vec<f64>, f64), KernelError> {
        let refuse = |what, reason: String| Err(KernelError::Parameter { what, reason });
        if self.dim == 0 || !self.dim.is_multiple_of(2) {
            return refuse("rope dim", format!("{} is not an even number above 0", self.dim));
        }
        if !(self.theta.is_finite() && self.theta > 0.0) {
            return refuse("rope theta", format!("{} is not a number above 0", self.theta));
        }
        let pairs = self.dim / 2;
        let plain = (0..pairs).map(|i| libm::pow(self.theta, -2.0 * i as f64 / self.dim as f64)).collect();
        let (mut frequencies, factor) = self.scaling.apply(plain, self.theta)?;
        if let Some(divisors) = &self.frequency_divisors {
            if divisors.len() != pairs {
                let found = divisors.len();
                return refuse("rope frequency divisors", format!("{found} for {pairs} pairs"));
            }
            for (f, divisor) in frequencies.iter_mut().zip(divisors) {
                if !(divisor.is_finite() && *divisor > 0.0) {
                    let reason = format!("{divisor} is not a number above 0");
                    return refuse("rope frequency divisors", reason);
                }
                *f /= f64::from(*divisor);
            }
        }
        Ok((frequencies, factor))
    }
}

/// A rotary embedding for rows in host memory.
#[derive(Debug, Clone)]
pub struct Rotation {
    style: RopeStyle,
    offset: usize,
    dim: usize,
    frequencies: Vec<f64>,
    factor: f64,
}

/// Cosines, then sines, of one position: the same values as those of [`crate::Device::rope`].
#[derive(Debug, Clone)]
pub struct Angles(Vec<f32>);

impl Rotation {
    /// Checks the parameters.
    ///
    /// # Errors
    /// Parameters that [`RopeSpec::frequencies`] refuses.
    pub fn new(spec: &RopeSpec) -> Result<Self, KernelError> {
        let (frequencies, factor) = spec.frequencies()?;
        Ok(Self { style: spec.style, offset: spec.offset, dim: spec.dim, frequencies, factor })
    }

    /// The angles at a position.
    pub fn at(&self, position: u32) -> Angles {
        let angle = |f: &f64| f64::from(position) * f;
        let cos = self.frequencies.iter().map(|f| (libm::cos(angle(f)) * self.factor) as f32);
        let sin = self.frequencies.iter().map(|f| (libm::sin(angle(f)) * self.factor) as f32);
        Angles(cos.chain(sin).collect())
    }

    /// Rotates a head in place, which is at least `offset + dim` long.
    pub fn rotate(&self, angles: &Angles, head: &mut [f32]) {
        self.turn(angles, head, 1.0);
    }

    /// Rotates a head back.
    pub fn rotate_back(&self, angles: &Angles, head: &mut [f32]) {
        self.turn(angles, head, -1.0);
    }

    fn turn(&self, angles: &Angles, head: &mut [f32], sign: f32) {
        let pairs = self.dim / 2;
        let (cos, sin) = angles.0.split_at(pairs);
        let x = &mut head[self.offset..][..self.dim];
        for i in 0..pairs {
            let (first, second) = match self.style {
                RopeStyle::Half => (i, i + pairs),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            let (a, b) = (x[first], x[second]);
            let s = sign * sin[i];
            x[first] = a * cos[i] - b * s;
            x[second] = a * s + b * cos[i];
        }
    }
}

impl RopeScaling {
    fn apply(&self, plain: Vec<f64>, theta: f64) -> Result<(Vec<f64>, f64), KernelError> {
        use std::f64::consts::PI;

        let above_zero = |what, x: f64| {
            if x.is_finite() && x > 0.0 {
                Ok(())
            } else {
                let reason = format!("{x} is not a number above 0");
                Err(KernelError::Parameter { what, reason })
            }
        };
        match *self {
            Self::None => Ok((plain, 1.0)),
            Self::Linear { factor } => {
                above_zero("rope factor", factor)?;
                Ok((plain.into_iter().map(|f| f / factor).collect(), 1.0))
            }
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                above_zero("rope factor", factor)?;
                above_zero("rope low_freq_factor", low_freq_factor)?;
                above_zero("rope original context", original_context)?;
                if high_freq_factor.is_nan() || high_freq_factor <= low_freq_factor {
                    return Err(KernelError::Parameter {
                        what: "rope high_freq_factor",
                        reason: format!("{high_freq_factor} is not above low_freq_factor {low_freq_factor}"),
                    });
                }
                let scale = |f: f64| {
                    let wavelength = 2.0 * PI / f;
                    if wavelength < original_context / high_freq_factor {
                        f
                    } else if wavelength > original_context / low_freq_factor {
                        f / factor
                    } else {
                        let ramp =
                            (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        f * (ramp + (1.0 - ramp) / factor)
                    }
                };
                Ok((plain.into_iter().map(scale).collect(), 1.0))
            }
            Self::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor, truncate } => {
                above_zero("rope factor", factor)?;
                above_zero("rope original context", original_context)?;
                above_zero("rope beta_fast", beta_fast)?;
                above_zero("rope beta_slow", beta_slow)?;
                if theta <= 1.0 {
                    above_zero("rope theta for yarn, less 1,", theta - 1.0)?;
                }
                let pairs = plain.len() as f64;
                // The (fractional) pair whose frequency turns `rotations` times in the original
                // context.
                let pair_of =
                    |rotations: f64| pairs * libm::log(original_context / (rotations * 2.0 * PI)) / libm::log(theta);
                let last = 2.0 * pairs - 1.0;
                let (low, high) = (pair_of(beta_fast), pair_of(beta_slow));
                let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(last));
                let width = if high == low { 0.001 } else { high - low };
                let scaled = plain.into_iter().enumerate().map(|(i, f)| {
                    let divided = ((i as f64 - low) / width).clamp(0.0, 1.0);
                    f / factor * divided + f * (1.0 - divided)
                });
                let default = if factor > 1.0 { 0.1 * libm::log(factor) + 1.0 } else { 1.0 };
                Ok((scaled.collect(), attention_factor.unwrap_or(default)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(dim: usize, theta: f64, scaling: RopeScaling) -> RopeSpec {
        RopeSpec { style: RopeStyle::Half, offset: 0, dim, theta, scaling, frequency_divisors: None, max_positions: 16 }
    }

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() <= 1e-12 * b.abs(), "{a} is not {b}");
    }

    #[test]
    fn plain_and_linear() {
        let (f, factor) = spec(4, 10_000.0, RopeScaling::None).frequencies().unwrap();
        near(f[0], 1.0);
        near(f[1], 0.01);
        assert_eq!((f.len(), factor), (2, 1.0));
        let linear = RopeScaling::Linear { factor: 4.0 };
        near(spec(4, 10_000.0, linear).frequencies().unwrap().0[1], 0.0025);
    }

    #[test]
    fn llama3_keeps_short_and_divides_long_wavelengths() {
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192.0 };
        let (f, _) = spec(128, 500_000.0, scaling).frequencies().unwrap();
        let (plain, _) = spec(128, 500_000.0, RopeScaling::None).frequencies().unwrap();
        near(f[0], plain[0]);
        near(f[63], plain[63] / 8.0);
        // Wavelengths 2048 to 8192 lie on the ramp: 2 pi / f with f = theta^(-i/64).
        let i = 30;
        let wavelength = 2.0 * std::f64::consts::PI / plain[i];
        assert!((2048.0..8192.0).contains(&wavelength), "{wavelength}");
        let ramp = (8192.0 / wavelength - 1.0) / 3.0;
        near(f[i], plain[i] * (ramp + (1.0 - ramp) / 8.0));
    }

    #[test]
    fn yarn_ramp_and_attention_factor() {
        let yarn = |attention_factor| RopeScaling::Yarn {
            factor: 4.0,
            original_context: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor,
            truncate: true,
        };
        let (f, factor) = spec(64, 10_000.0, yarn(None)).frequencies().unwrap();
        let (plain, _) = spec(64, 10_000.0, RopeScaling::None).frequencies().unwrap();
        near(factor, 1.138_629_436_111_989);
        // 32 ln(4096 / (32 * 2 pi)) / ln 10000 = 10.47, and with one rotation 22.51.
        near(f[10], plain[10]);
        near(f[23], plain[23] / 4.0);
        let divided = (16.0 - 10.0) / 13.0;
        near(f[16], plain[16] * (divided / 4.0 + 1.0 - divided));
        assert_eq!(spec(64, 10_000.0, yarn(Some(1.5))).frequencies().unwrap().1, 1.5);
    }

    #[test]
    fn a_ramp_that_is_not_truncated_begins_between_pairs() {
        let scaling = RopeScaling::Yarn {
            factor: 32.0,
            original_context: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            truncate: false,
        };
        let (f, _) = spec(64, 150_000.0, scaling).frequencies().unwrap();
        let (plain, _) = spec(64, 150_000.0, RopeScaling::None).frequencies().unwrap();
        let pair = |turns: f64| 32.0 * (4096.0 / (turns * 2.0 * std::f64::consts::PI)).ln() / 150_000f64.ln();
        let divided = (12.0 - pair(32.0)) / (pair(1.0) - pair(32.0));
        near(f[12], plain[12] * (divided / 32.0 + 1.0 - divided));
    }

    #[test]
    fn turning_back_undoes_a_rotation() {
        for style in [RopeStyle::Half, RopeStyle::Interleaved] {
            let rotation = Rotation::new(&RopeSpec { style, offset: 1, ..spec(4, 100.0, RopeScaling::None) }).unwrap();
            let original = [5.0, 1.0, 2.0, 3.0, 4.0, 6.0];
            let mut head = original;
            rotation.rotate(&rotation.at(3), &mut head);
            let (c, s) = (3f32.cos(), 3f32.sin());
            let partner = if style == RopeStyle::Half { 3.0 } else { 2.0 };
            assert!((head[1] - (c - s * partner)).abs() < 1e-6, "{head:?}");
            assert_eq!((head[0], head[5]), (5.0, 6.0));
            rotation.rotate_back(&rotation.at(3), &mut head);
            assert!(head.iter().zip(original).all(|(a, b)| (a - b).abs() < 1e-5), "{head:?}");
        }
    }

    #[test]
    fn divisors_apply_last() {
        let mut s = spec(4, 10_000.0, RopeScaling::Linear { factor: 2.0 });
        s.frequency_divisors = Some(vec![1.0, 5.0]);
        near(s.frequencies().unwrap().0[1], 0.001);
        s.frequency_divisors = Some(vec![1.0]);
        assert!(s.frequencies().unwrap_err().to_string().contains("1 for 2 pairs"));
        s.frequency_divisors = Some(vec![1.0, 0.0]);
        assert!(s.frequencies().is_err());
    }

    #[test]
    fn wrong_parameters_are_refused() {
        for s in [
            spec(3, 1e4, RopeScaling::None),
            spec(0, 1e4, RopeScaling::None),
            spec(4, 0.0, RopeScaling::None),
            spec(4, f64::NAN, RopeScaling::None),
            spec(4, 1e4, RopeScaling::Linear { factor: 0.0 }),
            spec(
                4,
                1e4,
                RopeScaling::Llama3 {
                    factor: 8.0,
                    low_freq_factor: 4.0,
                    high_freq_factor: 4.0,
                    original_context: 8192.0,
                },
            ),
            spec(
                4,
                1.0,
                RopeScaling::Yarn {
                    factor: 8.0,
                    original_context: 4096.0,
                    beta_fast: 32.0,
                    beta_slow: 1.0,
                    attention_factor: None,
                    truncate: true,
                },
            ),
        ] {
            assert!(s.frequencies().is_err(), "{s:?}");
        }
    }
}
