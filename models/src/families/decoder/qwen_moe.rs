//! Qwen3-MoE: attention as in Qwen3, experts in most layers.

use std::sync::Arc;

use kvdock_kernels::RopeStyle;
use kvdock_kernels::ops::Scoring;

use super::common::{Basics, Places, experts, mlp};
use super::gqa::Heads;
use super::run::Layer;
use crate::families::blocks::keys::Keys;
use crate::families::blocks::load::Loader;
use crate::families::blocks::moe::{Moe, Router};
use crate::families::blocks::share::Cut;
use crate::families::{Build, Family, Parts};
use crate::{KvGeometry, ModelError};

inventory::submit! {
    Family {
        name: "qwen3_moe",
        gguf: &[],
        hf: &["Qwen3MoeForCausalLM"],
        latents: false,
        build,
    }
}

/// Which layers have experts, as the Qwen families say it.
pub(super) fn has_experts(keys: &Keys<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let step = keys.size_or("decoder_sparse_step", 1)?;
    let dense = keys.counts("mlp_only_layers")?.unwrap_or_default();
    Ok((0..layers).map(|layer| !dense.contains(&layer) && (layer + 1).is_multiple_of(step)).collect())
}

/// Experts behind a softmax router. `renormalize` is what the family does where the configuration says nothing.
pub(super) fn moe(
    loader: &Loader<'_>,
    keys: &Keys<'_>,
    base: &str,
    hidden: usize,
    renormalize: bool,
) -> Result<Moe, ModelError> {
    let count = keys.size("num_experts")?;
    let top_k = keys.size("num_experts_per_tok")?;
    Basics::check_experts(keys, count, top_k)?;
    let width = keys.size("moe_intermediate_size")?;
    Ok(Moe {
        router: Router {
            gate: loader.linear(&format!("{base}.gate"), count, hidden, false)?,
            scoring: Scoring::Softmax,
            top_k,
            bias: None,
            groups: None,
            renormalize: keys.flag_or("norm_topk_prob", renormalize)?,
            factor: 1.0,
            by_token: None,
        },
        experts: experts(loader, &format!("{base}.experts"), count, width, hidden)?,
        shared: None,
        shared_gate: None,
    })
}

fn build(input: &Build<'_>) -> Result<Parts, ModelError> {
    let loader = Loader::new(input, &["fp8"])?;
    let keys = Keys(loader.config());
    let mut basics = Basics::read(&keys)?;
    if keys.flag_or("use_sliding_window", false)? {
        return Err(keys.unsupported("use_sliding_window".to_owned()));
    }
    let hidden = basics.hidden;
    let heads = keys.size("num_attention_heads")?;
    let kv_heads = keys.size_or("num_key_value_heads", heads)?;
    Basics::check_heads(&keys, heads, kv_heads)?;
    let head_dim = keys.size_or("head_dim", hidden / heads)?;
    let eps = keys.number("rms_norm_eps")? as f32;
    let bias = keys.flag_or("attention_bias", false)?;
    let rope = keys.rope(RopeStyle::Half, head_dim)?;
    basics.context = rope.max_positions;
    let rope = Arc::new(input.device.upload_rope(&rope)?);
    let (q_heads, k_heads) = (loader.deal(heads, "query heads")?, loader.deal_kv_heads(kv_heads)?);
    let (q_cut, kv_cut) = (Cut::head_rows(&q_heads, head_dim), Cut::head_rows(&k_heads, head_dim));
    let o_cut = Cut::head_cols(&q_heads, head_dim);
    let sparse = has_experts(&keys, basics.layers)?;
    let mut net = basics.net(&loader, "model", eps, false, 0)?;
    let mut places = Places::new(1);
    for (index, sparse) in sparse.into_iter().enumerate() {
        let base = format!("model.layers.{index}");
        let attention = format!("{base}.self_attn");
        let linear =
            |part: &str, shape, cut: &Cut| loader.linear_part(&format!("{attention}.{part}_proj"), shape, cut, bias);
        let ffn = if sparse {
            moe(&loader, &keys, &format!("{base}.mlp"), hidden, false)?.into()
        } else {
            mlp(&loader, &format!("{base}.mlp"), keys.size("intermediate_size")?, hidden)?.into()
        };
        net.layers.push(Layer {
            mixer_norm: loader.vector(&format!("{base}.input_layernorm.weight"), hidden)?,
            mixer: Heads {
                place: places.next(0),
                q: linear("q", (heads * head_dim, hidden), &q_cut)?,
                k: linear("k", (kv_heads * head_dim, hidden), &kv_cut)?,
                v: linear("v", (kv_heads * head_dim, hidden), &kv_cut)?,
                o: linear("o", (hidden, heads * head_dim), &o_cut)?,
                q_norm: Some(loader.vector(&format!("{attention}.q_norm.weight"), head_dim)?),
                k_norm: Some(loader.vector(&format!("{attention}.k_norm.weight"), head_dim)?),
                heads: q_heads.len(),
                kv_heads: k_heads.len(),
                head_dim_k: head_dim,
                head_dim_v: head_dim,
                rope: Arc::clone(&rope),
                window: None,
                sinks: None,
                value_scale: None,
                gated: false,
                eps,
            }
            .into(),
            ffn_norm: loader.vector(&format!("{base}.post_attention_layernorm.weight"), hidden)?,
            ffn,
        });
    }
    let kv_heads = k_heads.len();
    let kv = KvGeometry { layers: basics.layers, kv_heads, head_dim_k: head_dim, head_dim_v: head_dim };
    basics.parts(input, net, Some(kv), vec![kv.declared()])
}
