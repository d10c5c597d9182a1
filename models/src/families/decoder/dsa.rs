//! DeepSeek-V3.2 and GLM-5: latent attention to the tokens that an indexer picks.

use std::sync::Arc;

use kvdock_kernels::{Rope, RopeScaling, RopeSpec, RopeStyle};

use super::common::{Basics, Places, experts, mlp};
use super::mimo::sigmoid_router;
use super::mla::{Indexer, Latent, LatentSizes};
use super::run::{Layer, Place};
use crate::families::blocks::keys::Keys;
use crate::families::blocks::load::{Loader, Values};
use crate::families::blocks::moe::Moe;
use crate::families::blocks::share::Cut;
use crate::families::dense::hf_rope;
use crate::families::{Build, Family, Parts};
use crate::{HitPolicy, ModelError, PageSource, PoolDecl, PoolKind, PoolLayout};

inventory::submit! {
    Family {
        name: "deepseek_v32",
        gguf: &[],
        hf: &["DeepseekV32ForCausalLM"],
        latents: true,
        build: |input| build(input, RopeStyle::Half),
    }
}
inventory::submit! {
    Family {
        name: "glm_moe_dsa",
        gguf: &[],
        hf: &["GlmMoeDsaForCausalLM"],
        latents: true,
        build: |input| build(input, RopeStyle::Interleaved),
    }
}

/// Sizes of the indexer.
#[derive(Clone, Copy)]
struct Index {
    heads: usize,
    dim: usize,
    top_k: usize,
}

/// What every layer's attention is made with.
struct Shared<'a> {
    loader: &'a Loader<'a>,
    hidden: usize,
    q_rank: usize,
    sizes: LatentSizes,
    index: Index,
    rope: Arc<Rope>,
    index_rope: Arc<Rope>,
    scale: f32,
    bias: bool,
}

fn build(input: &Build<'_>, index_style: RopeStyle) -> Result<Parts, ModelError> {
    let loader = Loader::new(input, &["fp8"])?;
    let keys = Keys(loader.config());
    let mut basics = Basics::read(&keys)?;
    let (hidden, layers) = (basics.hidden, basics.layers);
    let sizes = LatentSizes {
        heads: keys.size("num_attention_heads")?,
        nope: keys.size("qk_nope_head_dim")?,
        rope: keys.size("qk_rope_head_dim")?,
        value: keys.size("v_head_dim")?,
        latent: keys.size("kv_lora_rank")?,
    };
    let index = Index {
        heads: keys.size("index_n_heads")?,
        dim: keys.size("index_head_dim")?,
        top_k: keys.size("index_topk")?,
    };
    if index.dim < sizes.rope {
        let what = format!("index heads of at least the {} rotated dimensions, found {}", sizes.rope, index.dim);
        return Err(keys.inconsistent(what));
    }
    let eps = keys.number("rms_norm_eps")? as f32;
    let (rope, temperature) = rotary(&keys, sizes.rope)?;
    basics.context = rope.max_positions;
    let index_style = match keys.0.get("indexer_rope_interleave") {
        None => index_style,
        Some(_) if keys.flag_or("indexer_rope_interleave", false)? => RopeStyle::Interleaved,
        Some(_) => RopeStyle::Half,
    };
    let shared = Shared {
        loader: &loader,
        hidden,
        q_rank: keys.size("q_lora_rank")?,
        sizes,
        index,
        rope: Arc::new(input.device.upload_rope(&RopeSpec { offset: sizes.latent, ..rope.clone() })?),
        index_rope: Arc::new(input.device.upload_rope(&RopeSpec { style: index_style, ..rope })?),
        scale: (((sizes.nope + sizes.rope) as f64).sqrt().recip() * temperature) as f32,
        bias: keys.flag_or("attention_bias", false)?,
    };
    let indexed = indexed_layers(&keys, layers)?;
    let sparse = match keys.kinds("mlp_layer_types", layers, &[("dense", false), ("sparse", true)])? {
        Some(kinds) => kinds,
        None => {
            let dense = keys.count_or("first_k_dense_replace", 3)?;
            let step = keys.size_or("moe_layer_freq", 1)?;
            (0..layers).map(|layer| layer >= dense && layer.is_multiple_of(step)).collect::<Vec<bool>>()
        }
    };
    let mut net = basics.net(&loader, "model", eps, false, 0)?;
    let mut places = Places::new(2);
    for layer in 0..layers {
        let base = format!("model.layers.{layer}");
        let place = places.next(0);
        let index_place = indexed[layer].then(|| places.next(1));
        let ffn = if sparse[layer] {
            moe(&loader, &keys, &format!("{base}.mlp"), hidden)?.into()
        } else {
            mlp(&loader, &format!("{base}.mlp"), keys.size("intermediate_size")?, hidden)?.into()
        };
        net.layers.push(Layer {
            mixer_norm: loader.vector(&format!("{base}.input_layernorm.weight"), hidden)?,
            mixer: shared.attention(&format!("{base}.self_attn"), place, index_place)?.into(),
            ffn_norm: loader.vector(&format!("{base}.post_attention_layernorm.weight"), hidden)?,
            ffn,
        });
    }
    basics.parts(input, net, None, pools(layers, &indexed, sizes, index))
}

fn pools(layers: usize, indexed: &[bool], sizes: LatentSizes, index: Index) -> Vec<PoolDecl> {
    vec![
        PoolDecl {
            name: "kv",
            kind: PoolKind::FullKv,
            source: PageSource::Anchor,
            hit: HitPolicy::AllPages,
            layers: (0..layers).collect(),
            layout: PoolLayout::Rows { tokens: 1, elements: sizes.latent + sizes.rope },
            encoding: "latent, then rotated key",
        },
        PoolDecl {
            name: "indexer",
            kind: PoolKind::IndexKeys { ratio: 1 },
            source: PageSource::Anchor,
            hit: HitPolicy::AllPages,
            layers: (0..layers).filter(|layer| indexed[*layer]).collect(),
            layout: PoolLayout::Rows { tokens: 1, elements: index.dim },
            encoding: "without Hadamard rotation",
        },
    ]
}

/// The rotary embedding, and the factor on scores that goes with its stretching.
fn rotary(keys: &Keys<'_>, dim: usize) -> Result<(RopeSpec, f64), ModelError> {
    let spec = keys.rope(RopeStyle::Interleaved, dim)?;
    let temperature = match spec.scaling {
        RopeScaling::Yarn { factor, .. } => {
            hf_rope::mscale(keys.0, "mscale_all_dim")?.map_or(1.0, |all| hf_rope::yarn_factor(factor, all).powi(2))
        }
        _ => 1.0,
    };
    Ok((spec, temperature))
}

/// Which layers have an indexer; the others take what the one before them has picked.
fn indexed_layers(keys: &Keys<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let indexed: Vec<bool> =
        if let Some(kinds) = keys.kinds("indexer_types", layers, &[("full", true), ("shared", false)])? {
            kinds
        } else if let Some(pattern) = keys.text("index_topk_pattern")? {
            const KEY: &str = "index_topk_pattern";
            keys.one_each(KEY, pattern.as_bytes(), layers)?;
            if pattern.bytes().any(|kind| !b"FS".contains(&kind)) {
                return Err(keys.0.key_error(KEY, "letters F (an indexer) and S (none)", format!("{pattern:?}")));
            }
            pattern.bytes().take(layers).map(|kind| kind == b'F').collect()
        } else {
            let frequency = keys.size_or("index_topk_freq", 1)?;
            let offset = keys.count_or("index_skip_topk_offset", 0)?;
            (0..layers).map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(frequency)).collect()
        };
    if indexed.first() != Some(&true) {
        return Err(keys.inconsistent("an indexer in the first layer".to_owned()));
    }
    Ok(indexed)
}

impl Shared<'_> {
    fn attention(&self, base: &str, place: Place, index: Option<Place>) -> Result<Latent, ModelError> {
        let LatentSizes { heads, nope, rope, value, latent } = self.sizes;
        let loader = self.loader;
        let name = format!("{base}.kv_b_proj.weight");
        let both = loader.values(&name, heads * (nope + value), latent)?;
        let held = loader.deal(heads, "query heads")?;
        let first = |head: usize| head * (nope + value);
        let to_latent =
            held.clone().map(|head| both.rows(latent, first(head)..first(head) + nope).transposed(nope, latent));
        let from_latent = held.clone().map(|head| both.rows(latent, first(head) + nope..first(head + 1)));
        Ok(Latent {
            place,
            q_a: loader.linear(&format!("{base}.q_a_proj"), self.q_rank, self.hidden, self.bias)?,
            q_a_norm: loader.vector(&format!("{base}.q_a_layernorm.weight"), self.q_rank)?,
            q_b: loader.linear_part(
                &format!("{base}.q_b_proj"),
                (heads * (nope + rope), self.q_rank),
                &Cut::head_rows(&held, nope + rope),
                false,
            )?,
            kv_a: loader.linear(&format!("{base}.kv_a_proj_with_mqa"), latent + rope, self.hidden, self.bias)?,
            kv_a_norm: loader.vector(&format!("{base}.kv_a_layernorm.weight"), latent)?,
            to_latent: loader.upload_groups(&name, held.len(), nope, &Values::joined(to_latent))?,
            from_latent: loader.upload_groups(&name, held.len(), latent, &Values::joined(from_latent))?,
            o: loader.linear_part(
                &format!("{base}.o_proj"),
                (self.hidden, heads * value),
                &Cut::head_cols(&held, value),
                self.bias,
            )?,
            sizes: LatentSizes { heads: held.len(), ..self.sizes },
            rope: Arc::clone(&self.rope),
            scale: self.scale,
            indexer: index.map(|place| self.indexer(&format!("{base}.indexer"), place)).transpose()?,
        })
    }

    fn indexer(&self, base: &str, place: Place) -> Result<Indexer, ModelError> {
        let Index { heads, dim, top_k } = self.index;
        let linear = |part: &str, rows, cols| self.loader.linear(&format!("{base}.{part}"), rows, cols, false);
        Ok(Indexer {
            place,
            q: linear("wq_b", heads * dim, self.q_rank)?,
            k: linear("wk", dim, self.hidden)?,
            k_norm: (
                self.loader.vector(&format!("{base}.k_norm.weight"), dim)?,
                self.loader.vector(&format!("{base}.k_norm.bias"), dim)?,
            ),
            weights: linear("weights_proj", heads, self.hidden)?,
            heads,
            dim,
            top_k,
            rope: Arc::clone(&self.index_rope),
        })
    }
}

fn moe(loader: &Loader<'_>, keys: &Keys<'_>, base: &str, hidden: usize) -> Result<Moe, ModelError> {
    let count = keys.size("n_routed_experts")?;
    let top_k = keys.size("num_experts_per_tok")?;
    Basics::check_experts(keys, count, top_k)?;
    let width = keys.size("moe_intermediate_size")?;
    let shared = keys.count_or("n_shared_experts", 1)?;
    Ok(Moe {
        router: sigmoid_router(loader, keys, base, hidden, count, top_k)?,
        experts: experts(loader, &format!("{base}.experts"), count, width, hidden)?,
        shared: (shared > 0)
            .then(|| mlp(loader, &format!("{base}.shared_experts"), shared * width, hidden))
            .transpose()?,
        shared_gate: None,
    })
}
