//! Tiny models as Hugging Face folders.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use half::{bf16, f16};
use kvdock_kernels::WeightFormat;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};

use super::shape::{TinyModel, TinyTensor};
use crate::tokenizer::byte_to_char;

impl TinyModel {
    /// Writes the model into the folder `dir` as one file of F32 weights.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write_hf(&self, dir: &Path) -> io::Result<()> {
        self.write_hf_as(dir, WeightFormat::F32, 1)
    }

    /// Writes the model into the folder `dir`, weights as F32, F16 or BF16, in `shards` files with an index
    /// when there are several.
    ///
    /// # Errors
    /// When a file cannot be written, or safetensors have no such format.
    pub fn write_hf_as(&self, dir: &Path, format: WeightFormat, shards: usize) -> io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let write = |file: &str, value: &Value| std::fs::write(dir.join(file), format!("{value:#}"));
        write("config.json", &self.config_json())?;
        write("tokenizer.json", &byte_tokenizer(self.vocab))?;
        write(
            "tokenizer_config.json",
            &json!({ "chat_template": self.chat_template, "tokenizer_class": "PreTrainedTokenizerFast" }),
        )?;

        let tensors = self.tensors();
        let size = tensors.len().div_ceil(shards.max(1));
        let groups: Vec<&[TinyTensor]> = tensors.chunks(size).collect();
        let mut places = Map::new();
        for (index, group) in groups.iter().enumerate() {
            let file = if groups.len() == 1 {
                "model.safetensors".to_owned()
            } else {
                format!("model-{:05}-of-{:05}.safetensors", index + 1, groups.len())
            };
            for tensor in *group {
                places.insert(tensor.name.clone(), json!(file));
            }
            write_shard(&dir.join(file), group, format)?;
        }
        if groups.len() > 1 {
            write("model.safetensors.index.json", &json!({ "metadata": {}, "weight_map": places }))?;
        }
        Ok(())
    }

    /// The model's `config.json`.
    pub fn config_json(&self) -> Value {
        json!({
            "architectures": [self.kind.architecture()],
            "model_type": self.kind.name(),
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.eps(),
            "rope_theta": self.theta(),
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.tied(),
            "hidden_act": "silu",
            "eos_token_id": self.eos,
            "bos_token_id": null,
            "torch_dtype": "float32",
        })
    }
}

/// A `tokenizer.json` with a token for each byte below `vocab`, the byte's value being its id.
pub(super) fn byte_tokenizer(vocab: usize) -> Value {
    let tokens: Map<String, Value> =
        (0..=255u8).take(vocab).map(|byte| (byte_to_char(byte).to_string(), json!(byte))).collect();
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
    });
    json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": null,
        "decoder": bytes,
        "model": { "type": "BPE", "vocab": tokens, "merges": [] },
    })
}

fn write_shard(path: &Path, tensors: &[TinyTensor], format: WeightFormat) -> io::Result<()> {
    let (dtype, encode): (Dtype, fn(f32) -> Vec<u8>) = match format {
        WeightFormat::F32 => (Dtype::F32, |value| value.to_le_bytes().to_vec()),
        WeightFormat::F16 => (Dtype::F16, |value| f16::from_f32(value).to_le_bytes().to_vec()),
        WeightFormat::BF16 => (Dtype::BF16, |value| bf16::from_f32(value).to_le_bytes().to_vec()),
        other => {
            return Err(io::Error::other(format!("safetensors have no format {}", other.name())));
        }
    };
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|tensor| tensor.values.iter().copied().flat_map(encode).collect()).collect();
    let mut views = BTreeMap::new();
    for (tensor, bytes) in tensors.iter().zip(&bytes) {
        let view = TensorView::new(dtype, tensor.shape.clone(), bytes).map_err(io::Error::other)?;
        views.insert(tensor.name.clone(), view);
    }
    safetensors::serialize_to_file(views, None, path).map_err(io::Error::other)
}
