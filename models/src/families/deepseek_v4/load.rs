//! The weights of DeepSeek-V4, under the names of the published checkpoints.

use std::sync::Arc;

use kvdock_kernels::ops::{Activation, Scoring};
use kvdock_kernels::{Rope, RopeSpec};

use super::attention::{Attention, AttentionSizes, Compressed, Indexer, Place};
use super::compressor::{Compressor, OVERLAPPING};
use super::config::{Config, HEAVY};
use super::hyper::{Hyper, HyperHead, MIXES, STREAMS};
use super::pools::Pools;
use super::run::{Draft, Layer, Net};
use crate::ModelError;
use crate::families::blocks::Linear;
use crate::families::blocks::load::Loader;
use crate::families::blocks::moe::{Mlp, Moe, Router, group};
use crate::families::blocks::share::Cut;

/// Loads the parts of layers.
struct Parts<'a> {
    loader: &'a Loader<'a>,
    config: &'a Config,
    places: &'a Pools,
    ropes: Ropes,
}

/// Rotations of the last dimensions of heads.
struct Ropes {
    plain: Arc<Rope>,
    compressed: Arc<Rope>,
    /// Of index heads.
    index: Arc<Rope>,
}

impl Ropes {
    fn new(loader: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let rope = |spec: &RopeSpec, dim: usize| {
            let spec = RopeSpec { offset: dim - config.rope_dim, max_positions: config.context, ..spec.clone() };
            Ok::<_, ModelError>(Arc::new(loader.device().upload_rope(&spec)?))
        };
        Ok(Self {
            plain: rope(&config.rope, config.head_dim)?,
            compressed: rope(&config.compress_rope, config.head_dim)?,
            index: rope(&config.compress_rope, config.index_dim)?,
        })
    }
}

pub(super) fn net(loader: &Loader<'_>, config: &Config, places: &Pools) -> Result<Net, ModelError> {
    let parts = Parts { loader, config, places, ropes: Ropes::new(loader, config)? };
    let hidden = config.hidden;
    loader.refuse_further_layer(&format!("layers.{}.attn_norm.weight", config.layers), config.layers)?;
    let layers = (0..config.layers)
        .map(|layer| parts.layer(&format!("layers.{layer}"), layer, config.ratios[layer], config.hashed[layer]));
    let layers = layers.collect::<Result<_, _>>()?;
    let mut drafts = Vec::new();
    for index in 0..config.drafts {
        let base = format!("mtp.{index}");
        // Some checkpoints come without these layers.
        if !loader.has(&format!("{base}.enorm.weight"))? {
            break;
        }
        drafts.push(Draft {
            embedding_norm: loader.vector(&format!("{base}.enorm.weight"), hidden)?,
            stream_norm: loader.vector(&format!("{base}.hnorm.weight"), hidden)?,
            from_embedding: loader.linear(&format!("{base}.e_proj"), hidden, hidden, false)?,
            from_streams: loader.linear(&format!("{base}.h_proj"), hidden, hidden, false)?,
            layer: parts.layer(&base, config.layers + index, 0, false)?,
            mix: parts.hyper_head(&format!("{base}."))?,
            norm: loader.vector(&format!("{base}.norm.weight"), hidden)?,
        });
    }
    Ok(Net {
        embedding: loader.vocabulary("embed.weight", config.vocab, hidden)?,
        layers,
        drafts,
        mix: parts.hyper_head("")?,
        norm: loader.vector("norm.weight", hidden)?,
        head: loader.vocabulary("head.weight", config.vocab, hidden)?,
        eps: config.eps,
        window: config.window - 1,
    })
}

impl Parts<'_> {
    fn layer(&self, base: &str, layer: usize, ratio: usize, hash: bool) -> Result<Layer, ModelError> {
        let hidden = self.config.hidden;
        Ok(Layer {
            attention_norm: self.loader.vector(&format!("{base}.attn_norm.weight"), hidden)?,
            attention_mix: self.hyper(&format!("{base}.hc_attn"))?,
            attention: self.attention(&format!("{base}.attn"), layer, ratio)?,
            ffn_norm: self.loader.vector(&format!("{base}.ffn_norm.weight"), hidden)?,
            ffn_mix: self.hyper(&format!("{base}.hc_ffn"))?,
            ffn: self.moe(&format!("{base}.ffn"), hash)?,
        })
    }

    fn place(&self, pool: &str, layer: usize) -> Result<Place, ModelError> {
        let missing = || ModelError::Batch(format!("layer {layer} has no buffer in the pool {pool}"));
        self.places.place(pool, layer).ok_or_else(missing)
    }

    /// A matrix by its whole name.
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Linear, ModelError> {
        Ok(Linear { weight: self.loader.matrix(name, rows, cols)?, bias: None })
    }

    /// `base.weight`, which has no bias in this family.
    fn linear(&self, base: &str, rows: usize, cols: usize) -> Result<Linear, ModelError> {
        self.loader.linear(base, rows, cols, false)
    }

    fn hyper(&self, base: &str) -> Result<Hyper, ModelError> {
        Ok(Hyper {
            mix: self.matrix(&format!("{base}_fn"), MIXES, STREAMS * self.config.hidden)?,
            base: self.loader.vector(&format!("{base}_base"), MIXES)?,
            scale: self.loader.vector(&format!("{base}_scale"), 3)?,
            eps: self.config.hyper_eps,
            norm_eps: self.config.eps,
            rounds: self.config.hyper_rounds,
        })
    }

    fn hyper_head(&self, base: &str) -> Result<HyperHead, ModelError> {
        Ok(HyperHead {
            mix: self.matrix(&format!("{base}hc_head_fn"), STREAMS, STREAMS * self.config.hidden)?,
            base: self.loader.vector(&format!("{base}hc_head_base"), STREAMS)?,
            scale: self.loader.floats(&format!("{base}hc_head_scale"), &[1])?[0],
            eps: self.config.hyper_eps,
            norm_eps: self.config.eps,
        })
    }

    fn attention(&self, base: &str, layer: usize, ratio: usize) -> Result<Attention, ModelError> {
        let Config { hidden, heads, head_dim, q_rank, o_groups, o_rank, .. } = *self.config;
        let linear = |part: &str, rows, cols| self.linear(&format!("{base}.{part}"), rows, cols);
        let name = format!("{base}.wo_a.weight");
        let group = heads * head_dim / o_groups;
        let all = self.loader.values(&name, o_groups * o_rank, group)?;
        // Whole groups of heads, or a part of one: what a group's second product makes of the ranks' parts adds up as well.
        let (own, held) = self.loader.deal_head_groups(heads, o_groups)?;
        let each = heads / o_groups;
        let inside = own.start % each..own.start % each + own.len().min(each);
        let columns = Cut::head_cols(&inside, head_dim);
        let o_a = all.part((o_groups * o_rank, group), &Cut::Rows(held.start * o_rank..held.end * o_rank));
        let o_a = o_a.part((held.len() * o_rank, group), &columns);
        Ok(Attention {
            sizes: AttentionSizes { heads: own.len(), head_dim, eps: self.config.eps },
            q_a: linear("wq_a", q_rank, hidden)?,
            q_norm: self.loader.vector(&format!("{base}.q_norm.weight"), q_rank)?,
            q_b: self.loader.linear_part(
                &format!("{base}.wq_b"),
                (heads * head_dim, q_rank),
                &Cut::head_rows(&own, head_dim),
                false,
            )?,
            kv: linear("wkv", head_dim, hidden)?,
            kv_norm: self.loader.vector(&format!("{base}.kv_norm.weight"), head_dim)?,
            sinks: self.loader.device().upload(&self.loader.floats(&format!("{base}.attn_sink"), &[heads])?[own])?,
            o_a: self.loader.upload_groups(&name, held.len(), inside.len() * head_dim, &o_a)?,
            o_b: self.loader.linear_part(
                &format!("{base}.wo_b"),
                (hidden, o_groups * o_rank),
                &Cut::head_cols(&held, o_rank),
                false,
            )?,
            rope: Arc::clone(if ratio > 0 { &self.ropes.compressed } else { &self.ropes.plain }),
            window: self.place("swa", layer)?,
            compressed: if ratio > 0 { Some(self.compressed(base, layer, ratio)?) } else { None },
        })
    }

    fn compressed(&self, base: &str, layer: usize, ratio: usize) -> Result<Compressed, ModelError> {
        let (rows, state) = if ratio == HEAVY {
            ("deepseek_v4_c128", "deepseek_v4_c128_state")
        } else {
            ("deepseek_v4_c4", "deepseek_v4_c4_state")
        };
        Ok(Compressed {
            compressor: self.compressor(
                &format!("{base}.compressor"),
                ratio,
                self.config.head_dim,
                &self.ropes.compressed,
            )?,
            rows: self.place(rows, layer)?,
            state: self.place(state, layer)?,
            indexer: if ratio == OVERLAPPING {
                Some(self.indexer(&format!("{base}.indexer"), layer, ratio)?)
            } else {
                None
            },
        })
    }

    fn compressor(&self, base: &str, ratio: usize, dim: usize, rope: &Arc<Rope>) -> Result<Compressor, ModelError> {
        let hidden = self.config.hidden;
        let width = if ratio == OVERLAPPING { 2 * dim } else { dim };
        Ok(Compressor {
            ratio,
            dim,
            ape: self.loader.device().upload(&self.loader.floats(&format!("{base}.ape"), &[ratio, width])?)?,
            kv: self.linear(&format!("{base}.wkv"), width, hidden)?,
            gate: self.linear(&format!("{base}.wgate"), width, hidden)?,
            norm: self.loader.vector(&format!("{base}.norm.weight"), dim)?,
            rope: Arc::clone(rope),
            eps: self.config.eps,
        })
    }

    fn indexer(&self, base: &str, layer: usize, ratio: usize) -> Result<Indexer, ModelError> {
        let Config { hidden, q_rank, index_heads: heads, index_dim: dim, index_top_k: top_k, .. } = *self.config;
        Ok(Indexer {
            q: self.linear(&format!("{base}.wq_b"), heads * dim, q_rank)?,
            weights: self.linear(&format!("{base}.weights_proj"), heads, hidden)?,
            heads,
            dim,
            top_k,
            rope: Arc::clone(&self.ropes.index),
            compressor: self.compressor(&format!("{base}.compressor"), ratio, dim, &self.ropes.index)?,
            keys: self.place("deepseek_v4_c4_indexer", layer)?,
            state: self.place("deepseek_v4_c4_indexer_state", layer)?,
        })
    }

    /// An MLP of `width` columns, of which `wide` and `narrow` are taken of the matrices into it and out of it.
    fn mlp(&self, base: &str, width: usize, (wide, narrow): (&Cut, &Cut)) -> Result<Mlp, ModelError> {
        let hidden = self.config.hidden;
        let linear =
            |part: &str, shape, cut: &Cut| self.loader.linear_part(&format!("{base}.{part}"), shape, cut, false);
        Ok(Mlp {
            gate: linear("w1", (width, hidden), wide)?,
            up: linear("w3", (width, hidden), wide)?,
            down: linear("w2", (hidden, width), narrow)?,
            activation: Activation::ClampedSilu { limit: self.config.limit },
        })
    }

    fn moe(&self, base: &str, hash: bool) -> Result<Moe, ModelError> {
        let Config { vocab, hidden, experts, top_k, width, shared, .. } = *self.config;
        let gate = format!("{base}.gate");
        let (held, whole) = (self.loader.deal(experts, "experts")?, (&Cut::Whole, &Cut::Whole));
        let first = held.start;
        let mlps = held.map(|expert| self.mlp(&format!("{base}.experts.{expert}"), width, whole));
        Ok(Moe {
            router: Router {
                // Its bias is the choice's, not the product's.
                gate: self.matrix(&format!("{gate}.weight"), experts, hidden)?,
                scoring: Scoring::SqrtSoftplus,
                top_k,
                bias: if hash { None } else { Some(self.loader.vector(&format!("{gate}.bias"), experts)?) },
                groups: None,
                renormalize: self.config.renormalize,
                factor: self.config.routed_factor,
                by_token: if hash {
                    let table = self.loader.ids(&format!("{gate}.tid2eid"), &[vocab, top_k], experts)?;
                    Some(self.loader.device().upload_indices(&table)?)
                } else {
                    None
                },
            },
            experts: group(self.loader.device(), mlps.collect::<Result<_, _>>()?, first)?,
            shared: if shared > 0 {
                let columns = self.loader.deal(shared * width, "columns of the shared expert")?;
                let cuts = (&Cut::Rows(columns.clone()), &Cut::Cols(columns));
                Some(self.mlp(&format!("{base}.shared_experts"), shared * width, cuts)?)
            } else {
                None
            },
            shared_gate: None,
        })
    }
}
