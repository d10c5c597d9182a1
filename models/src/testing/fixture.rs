//! Tiny checkpoints of the families beyond the dense one, as Hugging Face folders with the tensor names and types of real
//! ones. Every weight follows from its tensor's name.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::fill::fill;
use super::hf::byte_tokenizer;
use super::{decoders, deepseek_v4};
use crate::families::blocks::narrow::e4m3;

/// A tensor as a checkpoint stores it.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredBytes {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Vec<u8>,
}

/// A tiny checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Fixture {
    /// Its name; golden prompts are `token_ids("NAME.tokens", ..)` unless said otherwise.
    pub name: &'static str,
    /// `config.json`.
    pub config: Value,
    pub(super) tensors: Vec<StoredBytes>,
}

impl Fixture {
    /// Names of all fixtures.
    pub const NAMES: [&'static str; 10] = [
        "qwen3_moe",
        "gpt_oss",
        "gpt_oss_mxfp4",
        "mimo",
        "qwen3_5",
        "qwen3_next",
        "glm_dsa",
        "deepseek_v32",
        "dsv4",
        "dsv4q",
    ];

    /// The fixture called `name`.
    pub fn new(name: &str) -> Option<Self> {
        Some(match name {
            "qwen3_moe" => decoders::qwen3_moe(),
            "gpt_oss" => decoders::gpt_oss(false),
            "gpt_oss_mxfp4" => decoders::gpt_oss(true),
            "mimo" => decoders::mimo(),
            "qwen3_5" => decoders::qwen3_5(),
            "qwen3_next" => decoders::qwen3_next(),
            "glm_dsa" => decoders::glm_dsa(),
            "deepseek_v32" => decoders::deepseek_v32(),
            "dsv4" => deepseek_v4::plain(),
            "dsv4q" => deepseek_v4::quantized(),
            _ => return None,
        })
    }

    /// Writes the folder `dir`.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        self.write_shards(dir, 1)
    }

    /// As [`Fixture::write`], the tensors dealt out to `shards` files with an index when there are several: a weight
    /// and its scales then lie in different files.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write_shards(&self, dir: &Path, shards: usize) -> io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let write = |file: &str, value: &Value| std::fs::write(dir.join(file), format!("{value:#}"));
        write("config.json", &self.config)?;
        write("tokenizer.json", &byte_tokenizer(256))?;
        write("tokenizer_config.json", &json!({ "tokenizer_class": "PreTrainedTokenizerFast" }))?;
        let shards = shards.max(1);
        let file = |shard: usize| match shards {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
        };
        for shard in 0..shards {
            let mut views = BTreeMap::new();
            for tensor in self.tensors.iter().skip(shard).step_by(shards) {
                let view =
                    TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).map_err(io::Error::other)?;
                views.insert(tensor.name.as_str(), view);
            }
            safetensors::serialize_to_file(views, None, &dir.join(file(shard))).map_err(io::Error::other)?;
        }
        if shards == 1 {
            return Ok(());
        }
        let place = |(index, tensor): (usize, &StoredBytes)| (tensor.name.clone(), Value::from(file(index % shards)));
        let places: serde_json::Map<String, Value> = self.tensors.iter().enumerate().map(place).collect();
        write("model.safetensors.index.json", &json!({ "metadata": {}, "weight_map": places }))
    }

    /// How many elements the tensors have, packed ones counted as stored.
    pub fn elements(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum()
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.bytes.len()).sum()
    }

    /// Number of tensors.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// The same model with its matrices in fp8, a scale in f32 for each block of so many rows and columns; and its twin
    /// with the same values written out in f32.
    pub fn in_fp8_blocks(&self, block: [usize; 2]) -> (Self, Self) {
        let (mut packed, mut plain) = (self.clone(), self.clone());
        packed.config["quantization_config"] =
            json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block });
        packed.tensors.clear();
        for (tensor, twin) in self.tensors.iter().zip(&mut plain.tensors) {
            let [rows, cols] = tensor.shape[..] else {
                packed.tensors.push(tensor.clone());
                continue;
            };
            let kept = ["embed_tokens", "lm_head", ".gate.weight", "sinks", "bias", "shared_expert_gate"];
            if tensor.dtype != Dtype::F32 || kept.iter().any(|part| tensor.name.contains(part)) {
                packed.tensors.push(tensor.clone());
                continue;
            }
            let (bytes, scales, values) = fp8_blocks(&tensor.bytes, cols, block);
            let shape = vec![rows.div_ceil(block[0]), cols.div_ceil(block[1])];
            let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            packed.tensors.push(StoredBytes { dtype: Dtype::F8_E4M3, bytes, ..tensor.clone() });
            let name = format!("{}_scale_inv", tensor.name);
            packed.tensors.push(StoredBytes { name, dtype: Dtype::F32, shape, bytes: scales });
            twin.bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        }
        (packed, plain)
    }

    /// The same model with the experts of a layer in one tensor: gate and up below each other, and down.
    pub fn with_fused_experts(&self) -> Self {
        let mut fused = self.clone();
        fused.tensors.clear();
        let mut groups: BTreeMap<String, StoredBytes> = BTreeMap::new();
        for tensor in &self.tensors {
            let Some((base, rest)) = tensor.name.split_once(".experts.") else {
                fused.tensors.push(tensor.clone());
                continue;
            };
            // Experts come in order, gate, up and down of each.
            let (name, factor) = if rest.contains("down_proj") { ("down_proj", 1) } else { ("gate_up_proj", 2) };
            let name = format!("{base}.experts.{name}");
            let all = groups.entry(name.clone()).or_insert_with(|| StoredBytes {
                name,
                dtype: tensor.dtype,
                shape: vec![0, factor * tensor.shape[0], tensor.shape[1]],
                bytes: Vec::new(),
            });
            all.bytes.extend_from_slice(&tensor.bytes);
            all.shape[0] = all.bytes.len() / (factor * tensor.bytes.len());
        }
        fused.tensors.extend(groups.into_values());
        fused
    }
}

/// Values of `cols` columns as fp8 bytes with a scale for each block, and what those stand for.
fn fp8_blocks(bytes: &[u8], cols: usize, [block_rows, block_cols]: [usize; 2]) -> (Vec<u8>, Vec<f32>, Vec<f32>) {
    let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let across = cols.div_ceil(block_cols);
    let block = |at: usize| at / cols / block_rows * across + at % cols / block_cols;
    let mut scales = vec![0.0f32; (values.len() / cols).div_ceil(block_rows) * across];
    for (at, value) in values.iter().enumerate() {
        scales[block(at)] = scales[block(at)].max(value.abs() / 448.0);
    }
    let table: Vec<f32> = (0..=255).map(e4m3).collect();
    let nearest = |x: f32| {
        let distance = |byte: &u8| (table[usize::from(*byte)] - x).abs();
        // NaN is no neighbour of anything.
        (0..=255u8).filter(|byte| byte & 0x7F != 0x7F).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0)
    };
    let packed: Vec<u8> = values.iter().enumerate().map(|(at, value)| nearest(value / scales[block(at)])).collect();
    let back = packed.iter().enumerate().map(|(at, byte)| table[usize::from(*byte)] * scales[block(at)]).collect();
    (packed, scales, back)
}

/// Collects tensors by the rules of fill.
#[derive(Default)]
pub(super) struct Tensors(pub(super) Vec<StoredBytes>);

impl Tensors {
    /// Uniform values from `low` to `high`.
    pub(super) fn vec(&mut self, name: impl Into<String>, shape: &[usize], low: f64, high: f64) {
        let name = name.into();
        let values = fill(&name, shape.iter().product(), low, high);
        self.f32(name, shape, &values);
    }

    /// A matrix whose products have about the variance of its input, times the square of `gain`.
    pub(super) fn lin(&mut self, name: impl Into<String>, shape: [usize; 2], gain: f64) {
        let bound = gain * (3.0 / shape[1] as f64).sqrt();
        self.vec(name, &shape, -bound, bound);
    }

    pub(super) fn f32(&mut self, name: String, shape: &[usize], values: &[f32]) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.0.push(StoredBytes { name, dtype: Dtype::F32, shape: shape.to_vec(), bytes });
    }
}
