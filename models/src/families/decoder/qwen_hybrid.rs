//! Qwen3-Next and Qwen3.5: gated delta nets with gated full attention in every fourth layer, MLPs or experts.

use std::ops::Range;
use std::sync::Arc;

use kvdock_kernels::ops::DeltaSizes;
use kvdock_kernels::{RopeStyle, rowmath::exp};

use super::Linear;
use super::common::{Basics, Places, mlp};
use super::delta::DeltaNet;
use super::gqa::Heads;
use super::qwen_moe::{has_experts, moe};
use super::run::{Layer, Place};
use crate::families::blocks::keys::Keys;
use crate::families::blocks::load::Loader;
use crate::families::blocks::moe::Moe;
use crate::families::blocks::share::Cut;
use crate::families::dense::hf_rope;
use crate::families::{Build, Family, Parts};
use crate::{HitPolicy, ModelError, PageSource, PoolDecl, PoolKind, PoolLayout};

inventory::submit! {
    Family {
        name: "qwen3_next",
        gguf: &[],
        hf: &["Qwen3NextForCausalLM"],
        latents: false,
        build,
    }
}
inventory::submit! {
    Family {
        name: "qwen3_5",
        gguf: &[],
        hf: &[
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ],
        latents: false,
        build,
    }
}

/// What is dealt out of a delta net.
const KEY_HEADS: &str = "key heads of linear attention";

/// Sizes of the full attention.
#[derive(Clone, Copy)]
struct Attention {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    bias: bool,
    eps: f32,
}

fn build(input: &Build<'_>) -> Result<Parts, ModelError> {
    let loader = Loader::new(input, &["fp8"])?;
    // A model that also sees keeps its text part in a section of its own.
    let section = loader.config().section("text_config");
    let config = section.as_ref().unwrap_or(loader.config());
    let prefix = if loader.has("model.language_model.embed_tokens.weight")? { "model.language_model" } else { "model" };
    let keys = Keys(config);
    let mut basics = Basics::read(&keys)?;
    if keys.0.get("tie_word_embeddings").is_none() {
        basics.tied = Keys(loader.config()).flag_or("tie_word_embeddings", false)?;
    }
    keys.expect("output_gate_type", &["swish", "silu"])?;
    if !keys.flag_or("attn_output_gate", true)? {
        return Err(keys.unsupported("attn_output_gate false".to_owned()));
    }
    let (hidden, layers) = (basics.hidden, basics.layers);
    let eps = keys.number("rms_norm_eps")? as f32;
    let heads = keys.size("num_attention_heads")?;
    let kv_heads = keys.size_or("num_key_value_heads", heads)?;
    Basics::check_heads(&keys, heads, kv_heads)?;
    let head_dim = keys.size_or("head_dim", hidden / heads)?;
    let attention = Attention { heads, kv_heads, head_dim, bias: keys.flag_or("attention_bias", false)?, eps };
    let sizes = delta_sizes(&keys)?;
    let linear = linear_layers(&keys, layers)?;
    let partial = hf_rope::number(config, "partial_rotary_factor")?.unwrap_or(0.25);
    let rope = keys.rope(RopeStyle::Half, keys.rotated(head_dim, partial)?)?;
    basics.context = rope.max_positions;
    let rope = Arc::new(input.device.upload_rope(&rope)?);
    let with_experts = keys.count_or("num_experts", 0)? > 0;
    let sparse = has_experts(&keys, layers)?;
    let mut net = basics.net(&loader, prefix, eps, true, 0)?;
    let mut places = Places::new(2);
    for index in 0..layers {
        let base = format!("{prefix}.layers.{index}");
        let place = places.next(usize::from(linear[index]));
        let mixer = if linear[index] {
            delta(&loader, &format!("{base}.linear_attn"), place, sizes, hidden, eps)?.into()
        } else {
            full(&loader, &format!("{base}.self_attn"), place, attention, hidden, &rope)?.into()
        };
        let ffn = if with_experts && sparse[index] {
            shared_moe(&loader, &keys, &format!("{base}.mlp"), hidden)?.into()
        } else {
            mlp(&loader, &format!("{base}.mlp"), keys.size("intermediate_size")?, hidden)?.into()
        };
        net.layers.push(Layer {
            mixer_norm: loader.vector_plus_one(&format!("{base}.input_layernorm.weight"), hidden)?,
            mixer,
            ffn_norm: loader.vector_plus_one(&format!("{base}.post_attention_layernorm.weight"), hidden)?,
            ffn,
        });
    }
    let attention = Attention { kv_heads: loader.deal_kv_heads(kv_heads)?.len(), ..attention };
    let sizes = sizes.of_key_heads(loader.deal(sizes.key_heads, KEY_HEADS)?.len());
    basics.parts(input, net, None, pools(&linear, attention, sizes))
}

fn pools(linear: &[bool], attention: Attention, sizes: DeltaSizes) -> Vec<PoolDecl> {
    let layers = |kind: bool| (0..linear.len()).filter(|layer| linear[*layer] == kind).collect();
    vec![
        PoolDecl {
            name: "kv",
            kind: PoolKind::FullKv,
            source: PageSource::Anchor,
            hit: HitPolicy::AllPages,
            layers: layers(false),
            layout: PoolLayout::Heads {
                kv_heads: attention.kv_heads,
                head_dim_k: attention.head_dim,
                head_dim_v: attention.head_dim,
            },
            encoding: "",
        },
        PoolDecl {
            name: "mamba",
            kind: PoolKind::Recurrent,
            source: PageSource::Slot,
            hit: HitPolicy::ExactState,
            layers: layers(true),
            layout: PoolLayout::Slot { elements: sizes.state() },
            encoding: "convolution inputs oldest first, then state by value head, key, value",
        },
    ]
}

fn delta_sizes(keys: &Keys<'_>) -> Result<DeltaSizes, ModelError> {
    let sizes = DeltaSizes {
        key_heads: keys.size("linear_num_key_heads")?,
        value_heads: keys.size("linear_num_value_heads")?,
        key_dim: keys.size("linear_key_head_dim")?,
        value_dim: keys.size("linear_value_head_dim")?,
        kernel: keys.size("linear_conv_kernel_dim")?,
    };
    if sizes.value_heads.is_multiple_of(sizes.key_heads) {
        return Ok(sizes);
    }
    Err(keys.inconsistent(format!(
        "a number of value heads that is a multiple of the key heads, found {} and {}",
        sizes.value_heads, sizes.key_heads
    )))
}

/// Which layers have a delta net.
fn linear_layers(keys: &Keys<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let kinds = [("full_attention", false), ("linear_attention", true)];
    let linear: Vec<bool> = match keys.kinds("layer_types", layers, &kinds)? {
        Some(linear) => linear,
        None => {
            let interval = keys.size_or("full_attention_interval", 4)?;
            (0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect()
        }
    };
    if !(linear.contains(&true) && linear.contains(&false)) {
        return Err(keys.inconsistent("layers with linear attention and layers with full attention".to_owned()));
    }
    Ok(linear)
}

fn full(
    loader: &Loader<'_>,
    base: &str,
    place: Place,
    sizes: Attention,
    hidden: usize,
    rope: &Arc<kvdock_kernels::Rope>,
) -> Result<Heads, ModelError> {
    let Attention { heads, kv_heads, head_dim, bias, eps } = sizes;
    let (q_heads, k_heads) = (loader.deal(heads, "query heads")?, loader.deal_kv_heads(kv_heads)?);
    let kv_cut = Cut::head_rows(&k_heads, head_dim);
    let linear = |part: &str, shape, cut: &Cut| loader.linear_part(&format!("{base}.{part}_proj"), shape, cut, bias);
    Ok(Heads {
        place,
        q: linear("q", (2 * heads * head_dim, hidden), &Cut::head_rows(&q_heads, 2 * head_dim))?,
        k: linear("k", (kv_heads * head_dim, hidden), &kv_cut)?,
        v: linear("v", (kv_heads * head_dim, hidden), &kv_cut)?,
        o: linear("o", (hidden, heads * head_dim), &Cut::head_cols(&q_heads, head_dim))?,
        q_norm: Some(loader.vector_plus_one(&format!("{base}.q_norm.weight"), head_dim)?),
        k_norm: Some(loader.vector_plus_one(&format!("{base}.k_norm.weight"), head_dim)?),
        heads: q_heads.len(),
        kv_heads: k_heads.len(),
        head_dim_k: head_dim,
        head_dim_v: head_dim,
        rope: Arc::clone(rope),
        window: None,
        sinks: None,
        value_scale: None,
        gated: true,
        eps,
    })
}

fn delta(
    loader: &Loader<'_>,
    base: &str,
    place: Place,
    sizes: DeltaSizes,
    hidden: usize,
    eps: f32,
) -> Result<DeltaNet, ModelError> {
    let (values, heads) = (sizes.values(), sizes.value_heads);
    let key_heads = loader.deal(sizes.key_heads, KEY_HEADS)?;
    let held = sizes.of_key_heads(key_heads.len());
    let each = heads / sizes.key_heads;
    let value_heads = key_heads.start * each..key_heads.end * each;
    let channels = channels(sizes, &key_heads, &value_heads);
    let [qkv, z, b, a] = if loader.has(&format!("{base}.in_proj_qkvz.weight"))? {
        grouped(loader, base, sizes, hidden, key_heads)?
    } else {
        let linear = |part: &str, rows, width| {
            let cut = Cut::head_rows(&value_heads, width);
            loader.linear_part(&format!("{base}.in_proj_{part}"), (rows, hidden), &cut, false)
        };
        let qkv = if loader.share().is_alone() {
            loader.linear(&format!("{base}.in_proj_qkv"), sizes.channels(), hidden, false)?
        } else {
            let name = format!("{base}.in_proj_qkv.weight");
            let rows = loader.values(&name, sizes.channels(), hidden)?.rows(hidden, channels.iter().copied());
            Linear { weight: loader.upload(&name, channels.len(), hidden, &rows)?, bias: None }
        };
        [qkv, linear("z", values, sizes.value_dim)?, linear("b", heads, 1)?, linear("a", heads, 1)?]
    };
    let conv = loader.floats(&format!("{base}.conv1d.weight"), &[sizes.channels(), 1, sizes.kernel])?;
    let of_heads = |part: &str| {
        Ok::<_, ModelError>(loader.floats(&format!("{base}.{part}"), &[heads])?[value_heads.clone()].to_vec())
    };
    let conv: Vec<f32> =
        channels.iter().flat_map(|channel| &conv[channel * sizes.kernel..][..sizes.kernel]).copied().collect();
    let decay: Vec<f32> = of_heads("A_log")?.iter().map(|log| -exp(*log)).collect();
    Ok(DeltaNet {
        place,
        qkv,
        z,
        b,
        a,
        out: loader.linear_part(
            &format!("{base}.out_proj"),
            (hidden, values),
            &Cut::head_cols(&value_heads, sizes.value_dim),
            false,
        )?,
        conv: loader.device().upload(&conv)?,
        dt_bias: loader.device().upload(&of_heads("dt_bias")?)?,
        decay: loader.device().upload(&decay)?,
        norm: loader.vector(&format!("{base}.norm.weight"), sizes.value_dim)?,
        sizes: held,
        eps,
    })
}

/// The channels of q, k and v that belong to these heads.
fn channels(sizes: DeltaSizes, key_heads: &Range<usize>, value_heads: &Range<usize>) -> Vec<usize> {
    let keys = key_heads.start * sizes.key_dim..key_heads.end * sizes.key_dim;
    let values = value_heads.start * sizes.value_dim..value_heads.end * sizes.value_dim;
    let behind = |part: Range<usize>, channels: usize| part.map(move |channel| channel + channels);
    keys.clone().chain(behind(keys, sizes.keys())).chain(behind(values, 2 * sizes.keys())).collect()
}

/// Projections that are kept together by key head: `[q | k | v of its value heads | z of them]`, and `[b | a]`;
/// of these the key heads `held`.
fn grouped(
    loader: &Loader<'_>,
    base: &str,
    sizes: DeltaSizes,
    hidden: usize,
    held: Range<usize>,
) -> Result<[Linear; 4], ModelError> {
    let DeltaSizes { key_heads, value_heads, key_dim, .. } = sizes;
    let each = value_heads / key_heads;
    let group = each * sizes.value_dim;
    let stride = 2 * key_dim + 2 * group;
    let name = format!("{base}.in_proj_qkvz.weight");
    let all = loader.values(&name, key_heads * stride, hidden)?;
    let part =
        |from: usize, len: usize| held.clone().flat_map(move |head| head * stride + from..head * stride + from + len);
    let qkv = part(0, key_dim).chain(part(key_dim, key_dim)).chain(part(2 * key_dim, group));
    let name_ba = format!("{base}.in_proj_ba.weight");
    let ba = loader.values(&name_ba, 2 * value_heads, hidden)?;
    let half = |which: usize| {
        held.clone().flat_map(move |head| {
            let from = head * 2 * each + which * each;
            from..from + each
        })
    };
    let linear = |name: &str, rows, values| {
        Ok::<_, ModelError>(Linear { weight: loader.upload(name, rows, hidden, &values)?, bias: None })
    };
    let sizes = sizes.of_key_heads(held.len());
    Ok([
        linear(&name, sizes.channels(), all.rows(hidden, qkv))?,
        linear(&name, sizes.values(), all.rows(hidden, part(2 * key_dim + group, group)))?,
        linear(&name_ba, sizes.value_heads, ba.rows(hidden, half(0)))?,
        linear(&name_ba, sizes.value_heads, ba.rows(hidden, half(1)))?,
    ])
}

/// Experts beside a shared one that has a gate of its own.
fn shared_moe(loader: &Loader<'_>, keys: &Keys<'_>, base: &str, hidden: usize) -> Result<Moe, ModelError> {
    let width = keys.size("shared_expert_intermediate_size")?;
    Ok(Moe {
        shared: Some(mlp(loader, &format!("{base}.shared_expert"), width, hidden)?),
        shared_gate: Some(loader.linear(&format!("{base}.shared_expert_gate"), 1, hidden, false)?),
        ..moe(loader, keys, base, hidden, true)?
    })
}
