//! MiMo-V2: a window in most layers, with KV heads, rotary base and sinks of its own; keys wider than values.

use std::ops::Range;
use std::sync::Arc;

use kvdock_kernels::ops::Scoring;
use kvdock_kernels::{RopeScaling, RopeStyle};

use super::common::{Basics, Places, experts, mlp};
use super::gpt_oss::{expect_both_kinds, window_pools, window_types};
use super::gqa::Heads;
use super::run::Layer;
use crate::families::blocks::keys::Keys;
use crate::families::blocks::load::Loader;
use crate::families::blocks::moe::{Moe, Router};
use crate::families::blocks::share::Cut;
use crate::families::dense::hf_rope;
use crate::families::{Build, Family, Parts};
use crate::{KvGeometry, ModelError};

inventory::submit! {
    Family {
        name: "mimo_v2",
        gguf: &[],
        hf: &["MiMoV2FlashForCausalLM"],
        latents: false,
        build,
    }
}

/// Attention of one kind of layer.
#[derive(Clone, Copy)]
struct Kind {
    heads: usize,
    kv_heads: usize,
    head_dim_k: usize,
    head_dim_v: usize,
    theta: f64,
    /// The share of a key that is rotated.
    rotated: f64,
    sinks: bool,
}

impl Kind {
    /// The settings under keys that begin with `prefix`; `full` are those of the other kind, which stand in.
    fn read(keys: &Keys<'_>, prefix: &str, full: Option<Kind>) -> Result<Self, ModelError> {
        let size = |key: &str, other: Option<usize>| match other {
            Some(other) => keys.size_or(&format!("{prefix}{key}"), other),
            None => keys.size(&format!("{prefix}{key}")),
        };
        let heads = size("num_attention_heads", full.map(|kind| kind.heads))?;
        let kv_heads = size("num_key_value_heads", full.map(|kind| kind.kv_heads))?;
        Basics::check_heads(keys, heads, kv_heads)?;
        let head_dim_k = size("head_dim", full.map(|kind| kind.head_dim_k))?;
        let head_dim_v = size("v_head_dim", Some(full.map_or(head_dim_k, |kind| kind.head_dim_v)))?;
        let (section, sink, default) = match full {
            None => ("full_attention", "add_full_attention_sink_bias", 5e6),
            Some(_) => ("sliding_attention", "add_swa_attention_sink_bias", 1e4),
        };
        // Newer files have a section for each kind of layer.
        let section = format!("rope_parameters.{section}");
        keys.expect(&format!("{section}.rope_type"), &["default"])?;
        let theta = keys.number_or(&format!("{prefix}rope_theta"), default)?;
        let rotated = hf_rope::number(keys.0, "partial_rotary_factor")?.unwrap_or(0.334);
        Ok(Self {
            heads,
            kv_heads,
            head_dim_k,
            head_dim_v,
            theta: keys.number_or(&format!("{section}.rope_theta"), theta)?,
            rotated: keys.number_or(&format!("{section}.partial_rotary_factor"), rotated)?,
            sinks: keys.flag_or(sink, full.is_some())?,
        })
    }

    fn rows(self) -> (usize, usize, usize) {
        (self.kv_heads, self.head_dim_k, self.head_dim_v)
    }

    /// The kind with the heads that this rank holds, and which these are: query heads, KV heads.
    fn held(self, loader: &Loader<'_>) -> Result<(Self, Range<usize>, Range<usize>), ModelError> {
        let (heads, kv_heads) = (loader.deal(self.heads, "query heads")?, loader.deal_kv_heads(self.kv_heads)?);
        Ok((Self { heads: heads.len(), kv_heads: kv_heads.len(), ..self }, heads, kv_heads))
    }
}

fn build(input: &Build<'_>) -> Result<Parts, ModelError> {
    let loader = Loader::new(input, &["fp8"])?;
    let keys = Keys(loader.config());
    let basics = Basics::read(&keys)?;
    let (hidden, layers) = (basics.hidden, basics.layers);
    if hf_rope::scaling(keys.0, basics.context)? != RopeScaling::None {
        return Err(keys.unsupported("a stretched rotary embedding for this family".to_owned()));
    }
    let full = Kind::read(&keys, "", None)?;
    let swa = Kind::read(&keys, "swa_", Some(full))?;
    let eps = match keys.0.get("layernorm_epsilon") {
        Some(_) => keys.number("layernorm_epsilon")?,
        None => keys.number("rms_norm_eps")?,
    } as f32;
    let windowed = windowed(&keys, layers)?;
    // This family counts the tokens before the query.
    let window = match keys.optional_size("sliding_window_size")? {
        Some(before) => before + 1,
        None => keys.size("sliding_window")?,
    };
    let rope = |kind: Kind| {
        let dim = keys.rotated(kind.head_dim_k, kind.rotated)?;
        let spec = keys.rotary(RopeStyle::Half, dim, kind.theta, RopeScaling::None)?;
        Ok::<_, ModelError>(Arc::new(input.device.upload_rope(&spec)?))
    };
    let ropes = [rope(full)?, rope(swa)?];
    let value_scale = keys.0.optional("attention_value_scale", "a number", |value| value.as_f64())?.map(|x| x as f32);
    let bias = keys.flag_or("attention_bias", false)?;
    let sparse = match keys.switches("moe_layer_freq", layers)? {
        Some(sparse) => sparse,
        None => (0..layers).map(|layer| layer > 0).collect(),
    };
    let mut net = basics.net(&loader, "model", eps, false, window - 1)?;
    let mut places = Places::new(2);
    for index in 0..layers {
        let base = format!("model.layers.{index}");
        let attention = format!("{base}.self_attn");
        if loader.has(&format!("{attention}.qkv_proj.weight"))? {
            return Err(
                keys.unsupported(format!("the fused tensor {attention}.qkv_proj.weight (q_proj, k_proj, v_proj are)"))
            );
        }
        let kind = if windowed[index] { swa } else { full };
        let Kind { heads, kv_heads, head_dim_k, head_dim_v, .. } = kind;
        let (held, q_heads, k_heads) = kind.held(&loader)?;
        let linear = |part: &str, shape, cut: &Cut, bias| {
            loader.linear_part(&format!("{attention}.{part}_proj"), shape, cut, bias)
        };
        let rows = Cut::head_rows;
        let ffn = if sparse[index] {
            moe(&loader, &keys, &format!("{base}.mlp"), hidden)?.into()
        } else {
            mlp(&loader, &format!("{base}.mlp"), keys.size("intermediate_size")?, hidden)?.into()
        };
        net.layers.push(Layer {
            mixer_norm: loader.vector(&format!("{base}.input_layernorm.weight"), hidden)?,
            mixer: Heads {
                place: places.next(usize::from(windowed[index])),
                q: linear("q", (heads * head_dim_k, hidden), &rows(&q_heads, head_dim_k), bias)?,
                k: linear("k", (kv_heads * head_dim_k, hidden), &rows(&k_heads, head_dim_k), bias)?,
                v: linear("v", (kv_heads * head_dim_v, hidden), &rows(&k_heads, head_dim_v), bias)?,
                o: linear("o", (hidden, heads * head_dim_v), &Cut::head_cols(&q_heads, head_dim_v), false)?,
                q_norm: None,
                k_norm: None,
                heads: held.heads,
                kv_heads: held.kv_heads,
                head_dim_k,
                head_dim_v,
                rope: Arc::clone(&ropes[usize::from(windowed[index])]),
                window: windowed[index].then_some(window as u32),
                sinks: if kind.sinks {
                    let sinks = loader.floats(&format!("{attention}.attention_sink_bias"), &[heads])?;
                    Some(loader.device().upload(&sinks[q_heads])?)
                } else {
                    None
                },
                value_scale,
                gated: false,
                eps,
            }
            .into(),
            ffn_norm: loader.vector(&format!("{base}.post_attention_layernorm.weight"), hidden)?,
            ffn,
        });
    }
    let (full, swa) = (full.held(&loader)?.0, swa.held(&loader)?.0);
    let pools = window_pools(&windowed, window, full.rows(), swa.rows(), "values scaled");
    basics.parts(input, net, one_pool(layers, full, swa), pools)
}

/// Which layers have a window.
fn windowed(keys: &Keys<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let windowed = match keys.switches("hybrid_layer_pattern", layers)? {
        Some(pattern) => pattern,
        None => window_types(keys, layers)?.ok_or_else(|| {
            keys.0.key_error("hybrid_layer_pattern", "a list of 0 (full) and 1 (window), or layer_types", "neither")
        })?,
    };
    expect_both_kinds(keys, &windowed)?;
    Ok(windowed)
}

/// One pool for both kinds of layers, where the heads of one can be copies of the other's.
fn one_pool(layers: usize, full: Kind, swa: Kind) -> Option<KvGeometry> {
    let kv_heads = full.kv_heads.max(swa.kv_heads);
    let fits = |kind: Kind| kv_heads.is_multiple_of(kind.kv_heads) && kind.heads.is_multiple_of(kv_heads);
    let same = (full.head_dim_k, full.head_dim_v) == (swa.head_dim_k, swa.head_dim_v);
    (same && fits(full) && fits(swa)).then_some(KvGeometry {
        layers,
        kv_heads,
        head_dim_k: full.head_dim_k,
        head_dim_v: full.head_dim_v,
    })
}

fn moe(loader: &Loader<'_>, keys: &Keys<'_>, base: &str, hidden: usize) -> Result<Moe, ModelError> {
    let count = keys.size("n_routed_experts")?;
    let top_k = keys.size("num_experts_per_tok")?;
    Basics::check_experts(keys, count, top_k)?;
    let width = keys.size("moe_intermediate_size")?;
    Ok(Moe {
        router: sigmoid_router(loader, keys, base, hidden, count, top_k)?,
        experts: experts(loader, &format!("{base}.experts"), count, width, hidden)?,
        shared: None,
        shared_gate: None,
    })
}

/// A router by sigmoids with a bias for the choice ("noaux_tc").
pub(super) fn sigmoid_router(
    loader: &Loader<'_>,
    keys: &Keys<'_>,
    base: &str,
    hidden: usize,
    count: usize,
    top_k: usize,
) -> Result<Router, ModelError> {
    keys.expect("scoring_func", &["sigmoid"])?;
    keys.expect("topk_method", &["noaux_tc"])?;
    let groups = keys.size_or("n_group", 1)?;
    let chosen = keys.size_or("topk_group", 1)?;
    let roomy = chosen <= groups && count.is_multiple_of(groups) && chosen * (count / groups) >= top_k;
    if !roomy {
        let what =
            format!("groups that divide {count} experts and leave {top_k} to choose, found {groups}, {chosen} kept");
        return Err(keys.inconsistent(what));
    }
    Ok(Router {
        gate: loader.linear(&format!("{base}.gate"), count, hidden, false)?,
        scoring: Scoring::Sigmoid,
        top_k,
        bias: Some(loader.vector(&format!("{base}.gate.e_score_correction_bias"), count)?),
        groups: (groups > 1).then_some((groups, chosen)),
        renormalize: keys.flag_or("norm_topk_prob", true)?,
        factor: keys.number_or("routed_scaling_factor", 1.0)? as f32,
        by_token: None,
    })
}
