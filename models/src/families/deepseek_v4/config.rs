//! The configuration of DeepSeek-V4.

use kvdock_kernels::{PACKED_GROUP, PACKED_SCALES, RopeScaling, RopeSpec, RopeStyle};

use super::compressor::{OVERLAPPING, RING};
use super::hyper::STREAMS;
use crate::ModelError;
use crate::families::blocks::keys::Keys;
use crate::families::decoder::Basics;

/// The ratio whose rows are all attended to.
pub(super) const HEAVY: usize = 128;

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
    pub(super) hash_layers: usize,
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
        let drafts = keys.count_or("num_nextn_predict_layers", 0)?;
        let rope_dim = keys.size("qk_rope_head_dim")?;
        let config = Self {
            vocab: basics.vocab,
            hidden: basics.hidden,
            layers,
            drafts,
            context: basics.context,
            heads: keys.size("num_attention_heads")?,
            head_dim: keys.size("head_dim")?,
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
                keys.number_or("rope_theta", 1e4)?,
                RopeScaling::None,
            )?,
            compress_rope: keys.rotary(
                RopeStyle::Interleaved,
                rope_dim,
                keys.number_or("compress_rope_theta", 160_000.0)?,
                compress_scaling(keys)?,
            )?,
            rope_dim,
            experts: keys.size("n_routed_experts")?,
            top_k: keys.size("num_experts_per_tok")?,
            shared: keys.count_or("n_shared_experts", 1)?,
            width: keys.size("moe_intermediate_size")?,
            hash_layers: keys.count_or("num_hash_layers", 0)?,
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
        match keys.text("scoring_func")? {
            None | Some("sqrtsoftplus") => {}
            Some(other) => return Err(keys.unsupported(format!("scoring_func {other:?} (\"sqrtsoftplus\" is)"))),
        }
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
            ((self.heads * self.head_dim).is_multiple_of(self.o_groups), "heads that o_groups divides"),
            (
                self.head_dim - self.rope_dim.min(self.head_dim) <= PACKED_GROUP * PACKED_SCALES,
                "a head_dim of at most 512 and qk_rope_head_dim",
            ),
            (self.window >= RING, "a sliding_window of at least 8"),
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
            let types = keys.texts("layer_types")?.unwrap_or_default();
            keys.one_each("layer_types", &types, layers)?;
            let ratio = |kind: &str| match kind {
                "sliding_attention" => Ok(0),
                "compressed_sparse_attention" => Ok(OVERLAPPING),
                "heavily_compressed_attention" => Ok(HEAVY),
                other => Err(keys.unsupported(format!("a layer of type {other:?}"))),
            };
            types.into_iter().take(layers).map(ratio).collect::<Result<_, _>>()?
        }
    };
    match ratios.iter().find(|ratio| ![0, OVERLAPPING, HEAVY].contains(ratio)) {
        None => Ok(ratios),
        Some(other) => Err(keys.unsupported(format!("a compress ratio of {other} (0, {OVERLAPPING} and {HEAVY} are)"))),
    }
}

/// YaRN as these layers have it, without a factor on cosines and sines.
fn compress_scaling(keys: &Keys<'_>) -> Result<RopeScaling, ModelError> {
    let section = if keys.0.get("rope_scaling.factor").is_some() { "rope_scaling" } else { "rope_parameters.compress" };
    let key = |name: &str| format!("{section}.{name}");
    if keys.0.get(&key("factor")).is_none() {
        return Ok(RopeScaling::None);
    }
    Ok(RopeScaling::Yarn {
        factor: keys.number(&key("factor"))?,
        original_context: keys.number(&key("original_max_position_embeddings"))?,
        beta_fast: keys.number_or(&key("beta_fast"), 32.0)?,
        beta_slow: keys.number_or(&key("beta_slow"), 1.0)?,
        attention_factor: Some(1.0),
        truncate: true,
    })
}
