//! The weights of a dense decoder on their device.

use std::ops::Range;

use kvdock_kernels::{Buf, Device, MatrixShape, Rope, Weight, WeightData, dequantize};

use super::config::{Config, Variant};
use crate::ModelError;
use crate::checkpoint::Checkpoint;
use crate::families::Build;
use crate::families::blocks::Linear;
use crate::families::blocks::share::{Cut, Share};
use crate::weights::RawTensor;

pub(super) struct Layer {
    pub(super) attention_norm: Buf,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) q_norm: Option<Buf>,
    pub(super) k_norm: Option<Buf>,
    pub(super) o: Linear,
    pub(super) mlp_norm: Buf,
    pub(super) gate: Linear,
    pub(super) up: Linear,
    pub(super) down: Linear,
}

pub(super) struct Weights {
    pub(super) embedding: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Buf,
    /// `None`: the embedding.
    pub(super) head: Option<Weight>,
    pub(super) rope: Rope,
}

/// What of a model one rank holds.
#[derive(Debug)]
pub(super) struct Held {
    heads: Range<usize>,
    kv_heads: Range<usize>,
    /// Columns of the MLP.
    intermediate: Range<usize>,
    /// Rows of embedding and output matrix.
    vocab: Range<usize>,
}

impl Held {
    /// What `share` holds of a model.
    ///
    /// # Errors
    /// When it can't be dealt out.
    pub(super) fn of(build: &Build<'_>, share: &Share, config: &Config) -> Result<Self, ModelError> {
        let path = build.config_path();
        Ok(Self {
            heads: share.deal(path, config.heads, "query heads")?,
            kv_heads: share.kv_heads(path, config.kv_heads)?,
            intermediate: share.deal(path, config.intermediate, "columns of the MLP")?,
            vocab: share.vocab(path, config.vocab)?,
        })
    }

    /// The description of what is held, by which the rank computes. The vocabulary stays whole.
    pub(super) fn config(&self, config: &Config) -> Config {
        Config {
            heads: self.heads.len(),
            kv_heads: self.kv_heads.len(),
            intermediate: self.intermediate.len(),
            ..config.clone()
        }
    }
}

impl Weights {
    /// Checks every tensor against `config` and uploads what is `held` of it.
    pub(super) fn upload(
        build: &Build<'_>,
        config: &Config,
        held: &Held,
        variant: &Variant,
    ) -> Result<Self, ModelError> {
        let permuted = variant.gguf_permutes_q_and_k && matches!(build.checkpoint, Checkpoint::Gguf(_));
        let upload = Upload { build, device: build.device.as_ref(), permuted, head_dim: config.head_dim, held };
        check_shapes(build.checkpoint, config, variant)?;
        let layer_past_the_last = format!("model.layers.{}.input_layernorm.weight", config.layers);
        if let Some(extra) = build.checkpoint.optional(&layer_past_the_last)? {
            return Err(extra.error(
                format!("{} layers by the model's configuration", config.layers),
                "a tensor of a further layer",
            ));
        }
        let mut layers = Vec::new();
        let vocab = Cut::Rows(held.vocab.clone());
        let table = |name| upload.matrix(name, (config.vocab, config.hidden), &vocab, None);
        let embedding = table("model.embed_tokens.weight")?;
        for index in 0..config.layers {
            layers.push(upload.layer(index, config, variant)?);
        }
        Ok(Self {
            embedding,
            layers,
            norm: upload.vector("model.norm.weight", config.hidden)?,
            head: if config.tied { None } else { Some(table("lm_head.weight")?) },
            rope: build.device.upload_rope(&config.rope)?,
        })
    }

    /// The output matrix.
    pub(super) fn head(&self) -> &Weight {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

/// Checks that all tensors are there in the shapes that `config` asks for: a wrong one is found before the first is
/// uploaded, and no size is used that the file does not bear out.
fn check_shapes(checkpoint: &Checkpoint<'_>, config: &Config, variant: &Variant) -> Result<(), ModelError> {
    let (hidden, intermediate) = (config.hidden, config.intermediate);
    let q_rows = config.heads * config.head_dim;
    let kv_rows = config.kv_heads * config.head_dim;
    checkpoint.required("model.embed_tokens.weight", &[config.vocab, hidden])?;
    checkpoint.required("model.norm.weight", &[hidden])?;
    if !config.tied {
        checkpoint.required("lm_head.weight", &[config.vocab, hidden])?;
    }
    for layer in 0..config.layers {
        let check = |part: &str, shape: &[usize]| {
            checkpoint.required(&format!("model.layers.{layer}.{part}.weight"), shape).map(drop)
        };
        check("input_layernorm", &[hidden])?;
        check("self_attn.q_proj", &[q_rows, hidden])?;
        check("self_attn.k_proj", &[kv_rows, hidden])?;
        check("self_attn.v_proj", &[kv_rows, hidden])?;
        check("self_attn.o_proj", &[hidden, q_rows])?;
        check("post_attention_layernorm", &[hidden])?;
        check("mlp.gate_proj", &[intermediate, hidden])?;
        check("mlp.up_proj", &[intermediate, hidden])?;
        check("mlp.down_proj", &[hidden, intermediate])?;
        if variant.head_norms {
            check("self_attn.q_norm", &[config.head_dim])?;
            check("self_attn.k_norm", &[config.head_dim])?;
        }
    }
    Ok(())
}

struct Upload<'a> {
    build: &'a Build<'a>,
    device: &'a dyn Device,
    /// The rows of q and k lie in the order of interleaved rotation.
    permuted: bool,
    head_dim: usize,
    held: &'a Held,
}

impl Upload<'_> {
    fn layer(&self, index: usize, config: &Config, variant: &Variant) -> Result<Layer, ModelError> {
        let (hidden, intermediate, dim) = (config.hidden, config.intermediate, config.head_dim);
        let q_rows = config.heads * dim;
        let kv_rows = config.kv_heads * dim;
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let linear = |part: &str, shape: (usize, usize), cut: &Cut, bias: bool, heads: Option<usize>| {
            self.linear(&name(part), shape, cut, bias, heads)
        };
        let Held { heads, kv_heads, intermediate: columns, .. } = self.held;
        let q_heads = self.permuted.then_some(heads.len());
        let k_heads = self.permuted.then_some(kv_heads.len());
        let (q_cut, kv_cut) = (Cut::head_rows(heads, dim), Cut::head_rows(kv_heads, dim));
        let wide = Cut::Rows(columns.clone());
        let head_norm = |part: &str| variant.head_norms.then(|| self.vector(&name(part), config.head_dim)).transpose();
        let (qkv_bias, mlp_bias) = (config.qkv_bias, config.mlp_bias);
        Ok(Layer {
            attention_norm: self.vector(&name("input_layernorm.weight"), hidden)?,
            q: linear("self_attn.q_proj", (q_rows, hidden), &q_cut, qkv_bias, q_heads)?,
            k: linear("self_attn.k_proj", (kv_rows, hidden), &kv_cut, qkv_bias, k_heads)?,
            v: linear("self_attn.v_proj", (kv_rows, hidden), &kv_cut, qkv_bias, None)?,
            q_norm: head_norm("self_attn.q_norm.weight")?,
            k_norm: head_norm("self_attn.k_norm.weight")?,
            o: linear("self_attn.o_proj", (hidden, q_rows), &Cut::head_cols(heads, dim), config.o_bias, None)?,
            mlp_norm: self.vector(&name("post_attention_layernorm.weight"), hidden)?,
            gate: linear("mlp.gate_proj", (intermediate, hidden), &wide, mlp_bias, None)?,
            up: linear("mlp.up_proj", (intermediate, hidden), &wide, mlp_bias, None)?,
            down: linear("mlp.down_proj", (hidden, intermediate), &Cut::Cols(columns.clone()), mlp_bias, None)?,
        })
    }

    /// `heads`: the rows are permuted within so many heads of what is held.
    fn linear(
        &self,
        name: &str,
        shape: (usize, usize),
        cut: &Cut,
        biased: bool,
        heads: Option<usize>,
    ) -> Result<Linear, ModelError> {
        let order = heads.map(|heads| half_order(heads, self.head_dim));
        let weight = self.matrix(&format!("{name}.weight"), shape, cut, order.as_deref())?;
        let bias_name = format!("{name}.bias");
        let bias = match self.build.checkpoint.optional(&bias_name)? {
            // A bias that the configuration knows nothing of would be left out silently.
            Some(tensor) if !biased => {
                return Err(tensor.error("no bias by the model's configuration", "one"));
            }
            None if !biased => None,
            _ => {
                let tensor = self.build.checkpoint.required(&bias_name, &[shape.0])?;
                let values = self.build.share.bias(cut, values(&tensor)?);
                self.build.uploaded(tensor.data.len());
                let ordered = |values: Vec<f32>| match &order {
                    None => values,
                    Some(order) => order.iter().filter_map(|&row| values.get(row as usize).copied()).collect(),
                };
                values.map(|values| self.device.upload(&ordered(values))).transpose()?
            }
        };
        Ok(Linear { weight, bias })
    }

    /// A part of the matrix `name` of `rows` x `cols`; `row_order` is that of its rows.
    fn matrix(
        &self,
        name: &str,
        (rows, cols): (usize, usize),
        cut: &Cut,
        row_order: Option<&[u32]>,
    ) -> Result<Weight, ModelError> {
        let tensor = self.build.checkpoint.required(name, &[rows, cols])?;
        let (rows, cols) = cut.of(rows, cols);
        let shape = MatrixShape { rows: rows.len(), cols: cols.len() };
        let bytes = tensor.cut(rows, cols)?;
        let weight = self.device.upload_weight(&WeightData {
            name: &tensor.name,
            shape,
            format: tensor.format,
            bytes: &bytes,
            row_order,
        })?;
        self.build.uploaded(bytes.len());
        Ok(weight)
    }

    fn vector(&self, name: &str, length: usize) -> Result<Buf, ModelError> {
        let tensor = self.build.checkpoint.required(name, &[length])?;
        let values = values(&tensor)?;
        self.build.uploaded(tensor.data.len());
        Ok(self.device.upload(&values)?)
    }
}

/// The values of a tensor as f32.
pub(super) fn values(tensor: &RawTensor<'_>) -> Result<Vec<f32>, ModelError> {
    let mut values = vec![0.0; tensor.shape.iter().product()];
    dequantize(tensor.format, tensor.data, &mut values)?;
    Ok(values)
}

/// For each row in half-split order, the row it has in the order for interleaved rotation: within
/// a head of `dim` rows, row `half * dim/2 + j` lies at `2j + half`.
fn half_order(heads: usize, dim: usize) -> Vec<u32> {
    (0..heads * dim)
        .map(|row| {
            let (head, within) = (row / dim, row % dim);
            let (half, pair) = (within / (dim / 2), within % (dim / 2));
            (head * dim + 2 * pair + half) as u32
        })
        .collect()
}

#[cfg(test)]
mod unit {
    use super::half_order;

    #[test]
    fn interleaved_rows_come_back_in_halves() {
        assert_eq!(half_order(1, 6), [0, 2, 4, 1, 3, 5]);
        assert_eq!(half_order(2, 4), [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
