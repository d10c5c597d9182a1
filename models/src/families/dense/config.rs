//! The configuration of a dense decoder, from GGUF keys or from `config.json`.

use kvdock_kernels::{RopeScaling, RopeSpec, RopeStyle};

use crate::ModelError;
use crate::checkpoint::Checkpoint;
use crate::gguf::{Gguf, Value};
use crate::hf::{HfFolder, JsonFile};

/// Sizes above this are no sizes; products of two of them fit in memory arithmetic.
pub(super) const MAX_EXTENT: usize = 1 << 24;
/// No head has more rotated elements than this.
pub(crate) const MAX_ROTATED: usize = 1 << 16;
const MAX_LAYERS: usize = 4096;

/// Where projections have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bias {
    /// The family has them, whatever the configuration says.
    Always,
    /// `attention_bias` says it; in GGUF files, the presence of the tensor.
    AsConfigured,
}

/// What tells the families apart.
#[derive(Debug)]
pub(super) struct Variant {
    pub(super) qkv_bias: Bias,
    /// RMS norm over each head of q and k.
    pub(super) head_norms: bool,
    /// GGUF files hold the rows of q and k ordered for interleaved rotation.
    pub(super) gguf_permutes_q_and_k: bool,
}

/// The description that weights and forward pass go by.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Config {
    pub(super) vocab: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) eps: f32,
    pub(super) context: usize,
    /// Of rows in Hugging Face order.
    pub(super) rope: RopeSpec,
    /// The output matrix is the embedding.
    pub(super) tied: bool,
    /// Biases that must be there.
    pub(super) qkv_bias: bool,
    pub(super) o_bias: bool,
    pub(super) mlp_bias: bool,
}

impl Config {
    pub(super) fn read(checkpoint: &Checkpoint<'_>, variant: &Variant, tokens: usize) -> Result<Self, ModelError> {
        let config = match checkpoint {
            Checkpoint::Gguf(gguf) => Self::from_gguf(gguf, variant, tokens)?,
            Checkpoint::Hf(folder) => Self::from_hf(folder, variant)?,
        };
        config.check(checkpoint)?;
        Ok(config)
    }

    fn from_gguf(gguf: &Gguf<'_>, variant: &Variant, tokens: usize) -> Result<Self, ModelError> {
        let prefix = gguf.required("general.architecture", "a text", |value| value.as_str())?;
        let key = |name: &str| format!("{prefix}.{name}");
        let size = |name: &str| gguf.required(&key(name), EXTENT, |value| extent(value.as_u64()));
        let optional_size = |name: &str| gguf.optional(&key(name), EXTENT, |value| extent(value.as_u64()));
        let number = |name: &str| gguf.optional(&key(name), NUMBER, |value| positive(value.as_f64()));

        let hidden = size("embedding_length")?;
        let heads = size("attention.head_count")?;
        let kv_heads = gguf
            .optional(&key("attention.head_count_kv"), "a count, the same for every layer", |value| match value {
                Value::Array(counts) => {
                    let mut counts = counts.iter().map(|count| extent(count.as_u64()));
                    let first = counts.next()??;
                    counts.all(|count| count == Some(first)).then_some(first)
                }
                value => extent(value.as_u64()),
            })?
            .unwrap_or(heads);
        let head_dim = match optional_size("attention.key_length")? {
            Some(length) => length,
            None => hidden / heads,
        };
        if let Some(length) = optional_size("attention.value_length")?
            && length != head_dim
        {
            return Err(gguf.key_error(
                &key("attention.value_length"),
                &format!("the key length, {head_dim}"),
                format!("{length}"),
            ));
        }
        let context = size("context_length")?;
        let original = optional_size("rope.scaling.original_context_length")?.unwrap_or(context);
        let factor = number("rope.scaling.factor")?;
        let kind_key = key("rope.scaling.type");
        let kind = gguf.optional(&kind_key, "a text", |value| value.as_str())?;
        let scaling = match (kind.unwrap_or("none"), factor) {
            ("none", None) => RopeScaling::None,
            ("none", Some(_)) if kind.is_some() => RopeScaling::None,
            ("none" | "linear", Some(factor)) => RopeScaling::Linear { factor },
            ("yarn", Some(factor)) => RopeScaling::Yarn {
                factor,
                original_context: original as f64,
                beta_fast: number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                attention_factor: number("rope.scaling.attn_factor")?.map(|given| given * (0.1 * factor.ln() + 1.0)),
                truncate: true,
            },
            ("linear" | "yarn", None) => {
                return Err(gguf.key_error(&key("rope.scaling.factor"), NUMBER, "no such key"));
            }
            (other, _) => {
                return Err(gguf.key_error(&kind_key, "one of none, linear, yarn", format!("{other:?}")));
            }
        };
        let dim = optional_size("rope.dimension_count")?.unwrap_or(head_dim);
        let frequency_divisors = match gguf.tensor("rope_freqs.weight") {
            None => None,
            Some(tensor) => {
                tensor.expect_shape(&[dim / 2])?;
                let divisors = super::weights::values(&tensor)?;
                if !divisors.iter().all(|divisor| divisor.is_finite() && *divisor > 0.0) {
                    return Err(tensor.error("divisors above 0", "others"));
                }
                Some(divisors)
            }
        };
        let has = |tensor: &str| gguf.tensor(tensor).is_some();
        Ok(Self {
            vocab: tokens,
            hidden,
            intermediate: size("feed_forward_length")?,
            layers: size("block_count")?,
            heads,
            kv_heads,
            head_dim,
            eps: gguf.required(&key("attention.layer_norm_rms_epsilon"), NUMBER, |value| positive(value.as_f64()))?
                as f32,
            context,
            rope: RopeSpec {
                style: RopeStyle::Half,
                offset: 0,
                dim,
                theta: number("rope.freq_base")?.unwrap_or(10_000.0),
                scaling,
                frequency_divisors,
                max_positions: context,
            },
            tied: !has("output.weight"),
            qkv_bias: variant.qkv_bias == Bias::Always || has("blk.0.attn_q.bias"),
            o_bias: has("blk.0.attn_output.bias"),
            mlp_bias: has("blk.0.ffn_gate.bias"),
        })
    }

    fn from_hf(folder: &HfFolder, variant: &Variant) -> Result<Self, ModelError> {
        let file = folder.config();
        let size = |key: &str| file.required(key, EXTENT, |value| extent(value.as_u64()));
        let optional_size = |key: &str| file.optional(key, EXTENT, |value| extent(value.as_u64()));
        let flag =
            |key: &str| file.optional(key, "true or false", |value| value.as_bool()).map(Option::unwrap_or_default);
        refuse_other_arithmetic(file)?;
        let hidden = size("hidden_size")?;
        let heads = size("num_attention_heads")?;
        let head_dim = optional_size("head_dim")?.unwrap_or(hidden / heads);
        let positions = size("max_position_embeddings")?;
        let scaling = super::hf_rope::scaling(file, positions)?;
        let context = super::hf_rope::context(positions, &scaling);
        let rotated = super::hf_rope::number(file, "partial_rotary_factor")?.unwrap_or(1.0);
        let attention_bias = flag("attention_bias")?;
        Ok(Self {
            vocab: size("vocab_size")?,
            hidden,
            intermediate: size("intermediate_size")?,
            layers: size("num_hidden_layers")?,
            heads,
            kv_heads: optional_size("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            eps: file.required("rms_norm_eps", NUMBER, |value| positive(value.as_f64()))? as f32,
            context,
            rope: RopeSpec {
                style: RopeStyle::Half,
                offset: 0,
                dim: (head_dim as f64 * rotated) as usize,
                theta: super::hf_rope::number(file, "rope_theta")?.unwrap_or(10_000.0),
                scaling,
                frequency_divisors: None,
                max_positions: context,
            },
            tied: flag("tie_word_embeddings")?,
            qkv_bias: variant.qkv_bias == Bias::Always || attention_bias,
            o_bias: variant.qkv_bias == Bias::AsConfigured && attention_bias,
            mlp_bias: flag("mlp_bias")?,
        })
    }

    /// Sizes that must fit together.
    fn check(&self, checkpoint: &Checkpoint<'_>) -> Result<(), ModelError> {
        let rules = [
            (self.layers <= MAX_LAYERS, format!("at most {MAX_LAYERS} layers, found {}", self.layers)),
            (
                self.heads.is_multiple_of(self.kv_heads),
                format!(
                    "a number of heads that is a multiple of the KV heads, found {} and {}",
                    self.heads, self.kv_heads
                ),
            ),
            (
                self.head_dim > 0,
                format!("heads no wider than the model, found {} heads and a width of {}", self.heads, self.hidden),
            ),
            (
                self.rope.dim.is_multiple_of(2) && (2..=self.head_dim.min(MAX_ROTATED)).contains(&self.rope.dim),
                format!(
                    "an even number of rotated dimensions, up to the head's {} and {MAX_ROTATED}, found {}",
                    self.head_dim, self.rope.dim
                ),
            ),
        ];
        let broken = rules.into_iter().find(|(holds, _)| !holds).map(|(_, rule)| rule);
        let broken = broken.or_else(|| {
            self.rope.frequencies().err().map(|error| format!("settings that a rotary embedding can have: {error}"))
        });
        match broken {
            None => Ok(()),
            Some(rule) => Err(ModelError::Damaged {
                path: checkpoint.config_path().to_path_buf(),
                what: format!("expected {rule}"),
            }),
        }
    }
}

/// Settings that would change the arithmetic, and that no dense model here has.
fn refuse_other_arithmetic(file: &JsonFile) -> Result<(), ModelError> {
    let unsupported = |what: String| ModelError::Unsupported { path: file.path().to_path_buf(), what };
    if file.get("quantization_config").is_some() {
        return Err(unsupported(
            "quantization_config (for this family, safetensors in F32, F16 or BF16 are)".to_owned(),
        ));
    }
    let act = file.optional("hidden_act", "a text", |value| value.as_str())?;
    if let Some(act) = act.filter(|act| *act != "silu") {
        return Err(unsupported(format!("hidden_act {act:?} (\"silu\" is)")));
    }
    if file.optional("use_sliding_window", "true or false", |value| value.as_bool())? == Some(true) {
        return Err(unsupported("use_sliding_window".to_owned()));
    }
    let types = file.optional("layer_types", "a list of texts", |value| {
        value.as_array()?.iter().map(|kind| kind.as_str()).collect::<Option<Vec<_>>>()
    })?;
    if let Some(other) = types.iter().flatten().find(|kind| **kind != "full_attention") {
        return Err(unsupported(format!("a layer of type {other:?} (\"full_attention\" is)")));
    }
    Ok(())
}

pub(crate) const EXTENT: &str = "a whole number from 1 to 2^24";
pub(crate) const NUMBER: &str = "a number above 0";

pub(crate) fn extent(value: Option<u64>) -> Option<usize> {
    value.and_then(|value| usize::try_from(value).ok()).filter(|value| (1..=MAX_EXTENT).contains(value))
}

pub(crate) fn positive(value: Option<f64>) -> Option<f64> {
    value.filter(|value| value.is_finite() && *value > 0.0)
}
