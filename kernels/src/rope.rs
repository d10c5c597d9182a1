//! Rotary position embeddings: parameters, frequencies and the values of their tables.

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
