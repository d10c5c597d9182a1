//! The configuration of DeepSeek-V4.

use kvdock_kernels::{PACKED_GROUP, PACKED_SCALES, RopeScaling, RopeSpec, RopeStyle};

use super::compressor::{OVERLAPPING, RING};
use super::hyper::STREAMS;
use crate::ModelError;
use crate::families::blocks::keys::Keys;
use crate::families::decoder::Basics;

/// The ratio whose rows are all attended to.
pub(super) const HEAVY: usize = 128;

/// Normalisations of a mix above this change nothing but the time they take.
const MAX_ROUNDS: usize = 1024;

pub(super) struct Config {
    pub(super) vocab: usize,
    pub(super) hidden: usize,
    pub(super) layers: usize,
    /// Layers that predict further tokens.
    pub(super) drafts: usize,
    pub(super) context: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) q_rank: usize,
    pub(super) o_groups: usize,
    pub(super) o_rank: usize,
    pub(super) index_heads: usize,
    pub(super) index_dim: usize,
    pub(super) index_top_k: usize,
    pub(super) window: usize,
    /// Tokens of a compressed row, for each layer; 0 for layers without.
    pub(super) ratios: Vec<usize>,
    /// Rotary embedding of layers without compressed rows, and of those with; for a head of `rope_dim` elements.
    pub(super) rope: RopeSpec,
    pub(super) compress_rope: RopeSpec,
    pub(super) rope_dim: usize,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) shared: usize,
    pub(super) width: usize,
    /// Layers whose experts follow from the token id.
    pub(super) hashed: Vec<bool>,
    pub(super) renormalize: bool,
    pub(super) routed_factor: f32,
    pub(super) limit: f32,
    pub(super) eps: f32,
    pub(super) hyper_eps: f32,
    pub(super) hyper_rounds: usize,
}

impl Config {
    pub(super) fn read(keys: &Keys<'_>) -> Result<Self, ModelError> {
        let basics = Basics::read(keys)?;
        if basics.tied {
            return Err(keys.unsupported("tie_word_embeddings for this family".to_owned()));
        }
        let layers = basics.layers;
        let drafts = basics.predicting;
        let head_dim = keys.size("head_dim")?;
        const SHARE: &str = "partial_rotary_factor";
        let rope_dim = match keys.optional_size("qk_rope_head_dim")? {
            None if keys.0.get(SHARE).is_some() => keys.rotated(head_dim, keys.number(SHARE)?)?,
            _ => keys.size("qk_rope_head_dim")?,
        };
        let config = Self {
            vocab: basics.vocab,
            hidden: basics.hidden,
            layers,
            drafts,
            context: basics.context,
            heads: keys.size("num_attention_heads")?,
            head_dim,
            q_rank: keys.size("q_lora_rank")?,
            o_groups: keys.size("o_groups")?,
            o_rank: keys.size("o_lora_rank")?,
            index_heads: keys.size("index_n_heads")?,
            index_dim: keys.size("index_head_dim")?,
            index_top_k: keys.size("index_topk")?,
            window: keys.size("sliding_window")?,
            ratios: ratios(keys, layers)?,
            rope: keys.rotary(
                RopeStyle::Interleaved,
                rope_dim,
                theta(keys, "main", "rope_theta", 1e4)?,
                RopeScaling::None,
            )?,
            compress_rope: keys.rotary(
                RopeStyle::Interleaved,
                rope_dim,
                theta(keys, "compress", "compress_rope_theta", 160_000.0)?,
                compress_scaling(keys)?,
            )?,
            rope_dim,
            experts: keys.size("n_routed_experts")?,
            top_k: keys.size("num_experts_per_tok")?,
            shared: keys.count_or("n_shared_experts", 1)?,
            width: keys.size("moe_intermediate_size")?,
            hashed: hashed(keys, layers)?,
            renormalize: keys.flag_or("norm_topk_prob", true)?,
            routed_factor: keys.number_or("routed_scaling_factor", 1.0)? as f32,
            limit: keys.number_or("swiglu_limit", 10.0)? as f32,
            eps: keys.number("rms_norm_eps")? as f32,
            hyper_eps: keys.number_or("hc_eps", 1e-6)? as f32,
            hyper_rounds: keys.size_or("hc_sinkhorn_iters", 20)?,
        };
        config.check(keys)?;
        Ok(config)
    }

    fn check(&self, keys: &Keys<'_>) -> Result<(), ModelError> {
        Basics::check_experts(keys, self.experts, self.top_k)?;
        keys.expect("scoring_func", &["sqrtsoftplus"])?;
        keys.expect("topk_method", &["noaux_tc"])?;
        keys.expect("rope_parameters.main.rope_type", &["default"])?;
        let streams = keys.size_or("hc_mult", STREAMS)?;
        if streams != STREAMS {
            return Err(keys.unsupported(format!("hc_mult {streams} ({STREAMS} is)")));
        }
        let kv_heads = keys.size_or("num_key_value_heads", 1)?;
        if kv_heads != 1 {
            return Err(keys.unsupported(format!("num_key_value_heads {kv_heads} (1 is)")));
        }
        let rules = [
            (self.rope_dim <= self.head_dim.min(self.index_dim), "rotated dimensions no more than those of a head"),
            (self.heads.is_multiple_of(self.o_groups), "heads that o_groups divides"),
            (
                self.head_dim - self.rope_dim.min(self.head_dim) <= PACKED_GROUP * PACKED_SCALES,
                "a head_dim of at most 512 and qk_rope_head_dim",
            ),
            (self.window >= RING, "a sliding_window of at least 8"),
            (self.hyper_rounds <= MAX_ROUNDS, "an hc_sinkhorn_iters of at most 1024"),
        ];
        match rules.into_iter().find(|(holds, _)| !holds) {
            None => Ok(()),
            Some((_, rule)) => Err(keys.inconsistent(rule.to_owned())),
        }
    }
}

/// Tokens of a compressed row for each layer, in either spelling.
fn ratios(keys: &Keys<'_>, layers: usize) -> Result<Vec<usize>, ModelError> {
    let ratios: Vec<usize> = match keys.counts("compress_ratios")? {
        Some(ratios) => {
            keys.one_each("compress_ratios", &ratios, layers)?;
            ratios.into_iter().take(layers).collect()
        }
        None => {
            let rate = |kind: &str, usual: usize| keys.size_or(&format!("compress_rates.{kind}"), usual);
            let kinds = [
                ("sliding_attention", 0),
                ("compressed_sparse_attention", rate("compressed_sparse_attention", OVERLAPPING)?),
                ("heavily_compressed_attention", rate("heavily_compressed_attention", HEAVY)?),
            ];
            keys.kinds("layer_types", layers, &kinds)?.ok_or_else(|| {
                keys.0.key_error("compress_ratios", "a list of ratios, one a layer, or layer_types", "neither")
            })?
        }
    };
    match ratios.iter().find(|ratio| ![0, OVERLAPPING, HEAVY].contains(ratio)) {
        None => Ok(ratios),
        Some(other) => Err(keys.unsupported(format!("a compress ratio of {other} (0, {OVERLAPPING} and {HEAVY} are)"))),
    }
}

/// Which layers route by token id, in either spelling.
fn hashed(keys: &Keys<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let count = keys.count_or("num_hash_layers", 0)?;
    let kinds = keys.kinds("mlp_layer_types", layers, &[("hash_moe", true), ("moe", false)])?;
    Ok(kinds.unwrap_or_else(|| (0..layers).map(|layer| layer < count).collect()))
}

/// The base of the rotary embedding called `kind`: in a section of its own in newer files, else under `key`.
fn theta(keys: &Keys<'_>, kind: &str, key: &str, usual: f64) -> Result<f64, ModelError> {
    let given = keys.number_or(key, usual)?;
    keys.number_or(&format!("rope_parameters.{kind}.rope_theta"), given)
}

/// YaRN as these layers have it, without a factor on cosines and sines.
fn compress_scaling(keys: &Keys<'_>) -> Result<RopeScaling, ModelError> {
    for section in ["rope_scaling", "rope_parameters.compress", "rope_parameters"] {
        let key = |name: &str| format!("{section}.{name}");
        let kind = match keys.text(&key("rope_type"))? {
            Some(kind) => Some(kind),
            None => keys.text(&key("type"))?,
        };
        match kind {
            None if keys.0.get(&key("factor")).is_none() => {}
            Some("default") => {}
            None | Some("yarn") => {
                return Ok(RopeScaling::Yarn {
                    factor: keys.number(&key("factor"))?,
                    original_context: keys.number(&key("original_max_position_embeddings"))?,
                    beta_fast: keys.number_or(&key("beta_fast"), 32.0)?,
                    beta_slow: keys.number_or(&key("beta_slow"), 1.0)?,
                    attention_factor: Some(1.0),
                    truncate: true,
                });
            }
            Some(other) => {
                return Err(keys.unsupported(format!("{section} of type {other:?} (\"default\" and \"yarn\" are)")));
            }
        }
    }
    Ok(RopeScaling::None)
}
