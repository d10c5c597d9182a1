//! gpt-oss: a window in every other layer, a sink for each head, biases everywhere, experts in mxfp4.

use std::sync::Arc;

use kvdock_kernels::RopeStyle;
use kvdock_kernels::ops::{Activation, Scoring};

use super::Linear;
use super::common::{Basics, Places};
use super::gqa::Heads;
use super::run::Layer;
use crate::families::blocks::keys::Keys;
use crate::families::blocks::load::{Loader, Values};
use crate::families::blocks::moe::{Mlp, Moe, Router, group};
use crate::families::blocks::share::Cut;
use crate::families::{Build, Family, Parts};
use crate::{HitPolicy, KvGeometry, ModelError, PageSource, PoolDecl, PoolKind, PoolLayout};

inventory::submit! {
    Family {
        name: "gpt_oss",
        gguf: &[],
        hf: &["GptOssForCausalLM"],
        latents: false,
        build,
    }
}

/// The pools of a model with full and window layers: `kv` and `swa`.
pub(super) fn window_pools(
    windowed: &[bool],
    window: usize,
    full: (usize, usize, usize),
    swa: (usize, usize, usize),
    encoding: &'static str,
) -> Vec<PoolDecl> {
    let layout = |(kv_heads, head_dim_k, head_dim_v)| PoolLayout::Heads { kv_heads, head_dim_k, head_dim_v };
    let layers = |kind: bool| (0..windowed.len()).filter(|layer| windowed[*layer] == kind).collect();
    vec![
        PoolDecl {
            name: "kv",
            kind: PoolKind::FullKv,
            source: PageSource::Anchor,
            hit: HitPolicy::AllPages,
            layers: layers(false),
            layout: layout(full),
            encoding,
        },
        PoolDecl {
            name: "swa",
            kind: PoolKind::Window,
            source: PageSource::Window,
            hit: HitPolicy::Trailing { tokens: window - 1 },
            layers: layers(true),
            layout: layout(swa),
            encoding,
        },
    ]
}

/// Which layers have a window, by `layer_types`.
pub(super) fn window_types(keys: &Keys<'_>, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    keys.kinds("layer_types", layers, &[("full_attention", false), ("sliding_attention", true)])
}

/// A pool without layers is none.
pub(super) fn expect_both_kinds(keys: &Keys<'_>, windowed: &[bool]) -> Result<(), ModelError> {
    if windowed.contains(&true) && windowed.contains(&false) {
        return Ok(());
    }
    Err(keys.inconsistent("layers with a window and layers without".to_owned()))
}

fn build(input: &Build<'_>) -> Result<Parts, ModelError> {
    let loader = Loader::new(input, &["mxfp4"])?;
    let keys = Keys(loader.config());
    let mut basics = Basics::read(&keys)?;
    let (hidden, layers) = (basics.hidden, basics.layers);
    let heads = keys.size("num_attention_heads")?;
    let kv_heads = keys.size_or("num_key_value_heads", heads)?;
    Basics::check_heads(&keys, heads, kv_heads)?;
    let head_dim = keys.size_or("head_dim", hidden / heads)?;
    let eps = keys.number("rms_norm_eps")? as f32;
    let bias = keys.flag_or("attention_bias", true)?;
    let window = keys.size("sliding_window")?;
    let windowed = match window_types(&keys, layers)? {
        Some(windowed) => windowed,
        None => (0..layers).map(|layer| layer.is_multiple_of(2)).collect(),
    };
    expect_both_kinds(&keys, &windowed)?;
    let rope = keys.rope(RopeStyle::Half, head_dim)?;
    basics.context = rope.max_positions;
    let rope = Arc::new(input.device.upload_rope(&rope)?);
    let (q_heads, k_heads) = (loader.deal(heads, "query heads")?, loader.deal_kv_heads(kv_heads)?);
    let (q_cut, kv_cut) = (Cut::head_rows(&q_heads, head_dim), Cut::head_rows(&k_heads, head_dim));
    let o_cut = Cut::head_cols(&q_heads, head_dim);
    let mut net = basics.net(&loader, "model", eps, false, window - 1)?;
    let mut places = Places::new(2);
    for (index, windowed) in windowed.iter().enumerate() {
        let base = format!("model.layers.{index}");
        let attention = format!("{base}.self_attn");
        let linear =
            |part: &str, shape, cut: &Cut| loader.linear_part(&format!("{attention}.{part}_proj"), shape, cut, bias);
        let sinks = loader.floats(&format!("{attention}.sinks"), &[heads])?;
        net.layers.push(Layer {
            mixer_norm: loader.vector(&format!("{base}.input_layernorm.weight"), hidden)?,
            mixer: Heads {
                place: places.next(usize::from(*windowed)),
                q: linear("q", (heads * head_dim, hidden), &q_cut)?,
                k: linear("k", (kv_heads * head_dim, hidden), &kv_cut)?,
                v: linear("v", (kv_heads * head_dim, hidden), &kv_cut)?,
                o: linear("o", (hidden, heads * head_dim), &o_cut)?,
                q_norm: None,
                k_norm: None,
                heads: q_heads.len(),
                kv_heads: k_heads.len(),
                head_dim_k: head_dim,
                head_dim_v: head_dim,
                rope: Arc::clone(&rope),
                window: windowed.then_some(window as u32),
                sinks: Some(loader.device().upload(&sinks[q_heads.clone()])?),
                value_scale: None,
                gated: false,
                eps,
            }
            .into(),
            ffn_norm: loader.vector(&format!("{base}.post_attention_layernorm.weight"), hidden)?,
            ffn: experts(&loader, &keys, &format!("{base}.mlp"), hidden)?.into(),
        });
    }
    let kv_heads = k_heads.len();
    let kv = KvGeometry { layers, kv_heads, head_dim_k: head_dim, head_dim_v: head_dim };
    let rows = (kv_heads, head_dim, head_dim);
    basics.parts(input, net, Some(kv), window_pools(&windowed, window, rows, rows, ""))
}

/// The experts: `gate_up_proj` holds gate and up in turns, as mxfp4 blocks `[experts, 2 · width, hidden / 32, 16]`, or
/// as plain floats `[experts, hidden, 2 · width]`; `down_proj` likewise.
fn experts(loader: &Loader<'_>, keys: &Keys<'_>, base: &str, hidden: usize) -> Result<Moe, ModelError> {
    let count = keys.size("num_local_experts")?;
    let top_k = match keys.optional_size("num_experts_per_tok")? {
        Some(top_k) => top_k,
        None => keys.size("experts_per_token")?,
    };
    Basics::check_experts(keys, count, top_k)?;
    let width = keys.size("intermediate_size")?;
    let activation = Activation::GptOss {
        alpha: keys.number_or("swiglu_alpha", 1.702)? as f32,
        limit: keys.number_or("swiglu_limit", 7.0)? as f32,
    };
    let (both, down) = (format!("{base}.experts.gate_up_proj"), format!("{base}.experts.down_proj"));
    let packed = loader.has(&format!("{both}_blocks"))?;
    let values = |name: &str, expert: usize, rows: usize, cols: usize| -> Result<Values, ModelError> {
        if packed {
            loader.mxfp4_slice(name, (expert, count), rows, cols)
        } else {
            Ok(loader.slice(name, (expert, count), cols, rows)?.transposed(cols, rows))
        }
    };
    let both_bias = loader.floats(&format!("{both}_bias"), &[count, 2 * width])?;
    let down_bias = loader.floats(&format!("{down}_bias"), &[count, hidden])?;
    // The rows that each of `orders` names, of an expert's matrix of `rows` by `cols`, with the biases of these rows.
    let linears = |name: &str, expert: usize, (rows, cols): (usize, usize), orders: &[Vec<usize>], bias: &[f32]| {
        let mut wide = None;
        let linear = |order: &Vec<usize>| {
            let rows_of = || order.iter().copied();
            let narrow = if packed { loader.mxfp4_rows(name, (expert, count), (rows, cols), rows_of())? } else { None };
            let weight = match narrow {
                Some(weight) => weight,
                None => {
                    let all = match wide.take() {
                        Some(all) => all,
                        None => values(name, expert, rows, cols)?,
                    };
                    let weight = loader.upload(name, order.len(), cols, &all.rows(cols, rows_of()))?;
                    wide = Some(all);
                    weight
                }
            };
            let bias: Vec<f32> = rows_of().map(|row| bias[expert * rows + row]).collect();
            Ok::<_, ModelError>(Linear { weight, bias: Some(loader.device().upload(&bias)?) })
        };
        orders.iter().map(linear).collect::<Result<Vec<_>, ModelError>>()
    };
    let halves = [0, 1].map(|which| (0..width).map(|row| 2 * row + which).collect());
    let held = loader.deal(count, "experts")?;
    let mut experts = Vec::with_capacity(held.len());
    for expert in held.clone() {
        let first = linears(&both, expert, (2 * width, hidden), &halves, &both_bias)?;
        let second = linears(&down, expert, (hidden, width), &[(0..hidden).collect()], &down_bias)?;
        let mut parts = first.into_iter().chain(second);
        let (Some(gate), Some(up), Some(down)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(keys.inconsistent("three matrices for each expert".to_owned()));
        };
        experts.push(Mlp { gate, up, down, activation });
    }
    Ok(Moe {
        router: Router {
            gate: loader.linear(&format!("{base}.router"), count, hidden, true)?,
            scoring: Scoring::SoftmaxOfChosen,
            top_k,
            bias: None,
            groups: None,
            renormalize: false,
            factor: 1.0,
            by_token: None,
        },
        experts: group(loader.device(), experts, held.start)?,
        shared: None,
        shared_gate: None,
    })
}
