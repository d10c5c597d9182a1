//! Fixtures of DeepSeek-V4: one in plain floats, one with the real inner sizes and number formats.

use half::bf16;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::fill::fill;
use super::fixture::{Fixture, StoredBytes, Tensors};

const VOCAB: usize = 256;

/// How large the model is.
struct Sizes {
    hidden: usize,
    head_dim: usize,
    heads: usize,
    q_rank: usize,
    o_groups: usize,
    o_rank: usize,
    index_heads: usize,
    index_dim: usize,
    width: usize,
    experts: usize,
    top_k: usize,
    hash_layers: usize,
    ratios: &'static [usize],
    /// Layers beyond those of the main model.
    mtp: usize,
}

/// Writes tensors in plain f32, or in the formats of real checkpoints.
struct Writer {
    t: Tensors,
    real: bool,
}

impl Writer {
    /// A matrix that real checkpoints hold in fp8.
    fn fp8(&mut self, name: String, shape: [usize; 2], gain: f64) {
        if !self.real {
            return self.t.lin(name, shape, gain);
        }
        let byte = |u: &f32| {
            let r = (256.0 * f64::from(*u)) as u32;
            ((r & 0x80) | ((6 + ((r >> 3) & 3)) << 3) | (r & 7)) as u8
        };
        let bytes = fill(&name, shape[0] * shape[1], 0.0, 1.0).iter().map(byte).collect();
        self.scale(&name, [shape[0].div_ceil(128), shape[1].div_ceil(128)], gain / (3.3 * (shape[1] as f64).sqrt()));
        self.t.0.push(StoredBytes { name, dtype: Dtype::F8_E4M3, shape: shape.to_vec(), bytes });
    }

    /// A matrix that real checkpoints hold in mxfp4.
    fn fp4(&mut self, name: String, shape: [usize; 2], gain: f64) {
        if !self.real {
            return self.t.lin(name, shape, gain);
        }
        let byte = |u: &f32| (256.0 * f64::from(*u)) as u8;
        let bytes = fill(&name, shape[0] * shape[1] / 2, 0.0, 1.0).iter().map(byte).collect();
        self.scale(&name, [shape[0], shape[1] / 32], gain / (2.93 * (shape[1] as f64).sqrt()));
        self.t.0.push(StoredBytes { name, dtype: Dtype::I8, shape: vec![shape[0], shape[1] / 2], bytes });
    }

    fn scale(&mut self, weight: &str, shape: [usize; 2], size: f64) {
        let name = weight.replace("weight", "scale");
        let least = (127.0 + size.log2().round()) as u8 - 1;
        let byte = |u: &f32| least + (3.0 * f64::from(*u)) as u8;
        let bytes = fill(&name, shape[0] * shape[1], 0.0, 1.0).iter().map(byte).collect();
        self.t.0.push(StoredBytes { name, dtype: Dtype::F8_E8M0, shape: shape.to_vec(), bytes });
    }

    /// Values that real checkpoints hold in bf16.
    fn bf16(&mut self, name: String, shape: &[usize], low: f64, high: f64) {
        if !self.real {
            return self.t.vec(name, shape, low, high);
        }
        let values = fill(&name, shape.iter().product(), low, high);
        let bytes = values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect();
        self.t.0.push(StoredBytes { name, dtype: Dtype::BF16, shape: shape.to_vec(), bytes });
    }

    fn bf16_lin(&mut self, name: String, shape: [usize; 2], gain: f64) {
        let bound = gain * (3.0 / shape[1] as f64).sqrt();
        self.bf16(name, &shape, -bound, bound);
    }

    fn hyper(&mut self, base: &str, hidden: usize) {
        self.t.lin(format!("{base}_fn"), [24, 4 * hidden], 1.0);
        self.t.vec(format!("{base}_base"), &[24], -1.0, 1.0);
        self.t.vec(format!("{base}_scale"), &[3], 0.5, 1.5);
    }

    fn hyper_head(&mut self, base: &str, hidden: usize) {
        self.t.lin(format!("{base}hc_head_fn"), [4, 4 * hidden], 1.0);
        self.t.vec(format!("{base}hc_head_base"), &[4], -1.0, 1.0);
        self.t.vec(format!("{base}hc_head_scale"), &[1], 0.5, 1.5);
    }

    fn compressor(&mut self, base: &str, ratio: usize, dim: usize, hidden: usize) {
        let width = if ratio == 4 { 2 * dim } else { dim };
        self.t.vec(format!("{base}.ape"), &[ratio, width], -1.0, 1.0);
        self.bf16_lin(format!("{base}.wkv.weight"), [width, hidden], 1.0);
        self.bf16_lin(format!("{base}.wgate.weight"), [width, hidden], 2.0);
        self.bf16(format!("{base}.norm.weight"), &[dim], 1.0, 3.0);
    }

    /// One layer below `base`. `hash`: experts by token id.
    fn layer(&mut self, base: &str, sizes: &Sizes, ratio: usize, hash: bool) {
        let Sizes { hidden, head_dim, heads, q_rank, .. } = *sizes;
        for part in ["attn_norm", "ffn_norm"] {
            self.bf16(format!("{base}.{part}.weight"), &[hidden], 0.5, 1.5);
        }
        self.hyper(&format!("{base}.hc_attn"), hidden);
        self.hyper(&format!("{base}.hc_ffn"), hidden);
        let attn = format!("{base}.attn");
        self.fp8(format!("{attn}.wq_a.weight"), [q_rank, hidden], 1.0);
        self.bf16(format!("{attn}.q_norm.weight"), &[q_rank], 0.5, 1.5);
        self.fp8(format!("{attn}.wq_b.weight"), [heads * head_dim, q_rank], 1.0);
        self.fp8(format!("{attn}.wkv.weight"), [head_dim, hidden], 1.0);
        self.bf16(format!("{attn}.kv_norm.weight"), &[head_dim], 1.0, 3.0);
        self.t.vec(format!("{attn}.attn_sink"), &[heads], -1.0, 1.0);
        let groups = sizes.o_groups;
        self.fp8(format!("{attn}.wo_a.weight"), [groups * sizes.o_rank, heads * head_dim / groups], 1.0);
        self.fp8(format!("{attn}.wo_b.weight"), [hidden, groups * sizes.o_rank], 2.0);
        if ratio > 0 {
            self.compressor(&format!("{attn}.compressor"), ratio, head_dim, hidden);
        }
        if ratio == 4 {
            let indexer = format!("{attn}.indexer");
            self.fp8(format!("{indexer}.wq_b.weight"), [sizes.index_heads * sizes.index_dim, q_rank], 1.0);
            self.bf16_lin(format!("{indexer}.weights_proj.weight"), [sizes.index_heads, hidden], 1.0);
            self.compressor(&format!("{indexer}.compressor"), 4, sizes.index_dim, hidden);
        }
        let ffn = format!("{base}.ffn");
        self.bf16_lin(format!("{ffn}.gate.weight"), [sizes.experts, hidden], 2.0);
        if hash {
            let id = |token: usize, k: usize| ((7 * token + 3 * k + 9) % sizes.experts) as i64;
            let ids = (0..VOCAB).flat_map(|token| (0..sizes.top_k).map(move |k| (token, k)));
            let bytes = ids.flat_map(|(token, k)| id(token, k).to_le_bytes()).collect();
            let shape = vec![VOCAB, sizes.top_k];
            self.t.0.push(StoredBytes { name: format!("{ffn}.gate.tid2eid"), dtype: Dtype::I64, shape, bytes });
        } else {
            self.t.vec(format!("{ffn}.gate.bias"), &[sizes.experts], -0.5, 0.5);
        }
        let shapes = [
            ("w1", [sizes.width, hidden], 1.0),
            ("w3", [sizes.width, hidden], 1.0),
            ("w2", [hidden, sizes.width], 2.0),
        ];
        for expert in 0..sizes.experts {
            for (part, shape, gain) in shapes {
                self.fp4(format!("{ffn}.experts.{expert}.{part}.weight"), shape, gain);
            }
        }
        for (part, shape, gain) in shapes {
            self.fp8(format!("{ffn}.shared_experts.{part}.weight"), shape, gain);
        }
    }
}

fn tensors(sizes: &Sizes, real: bool) -> Vec<StoredBytes> {
    let hidden = sizes.hidden;
    let mut w = Writer { t: Tensors::default(), real };
    w.bf16("embed.weight".to_owned(), &[VOCAB, hidden], -1.0, 1.0);
    w.bf16_lin("head.weight".to_owned(), [VOCAB, hidden], 2.0);
    w.bf16("norm.weight".to_owned(), &[hidden], 0.5, 1.5);
    w.hyper_head("", hidden);
    for (layer, ratio) in sizes.ratios.iter().enumerate() {
        w.layer(&format!("layers.{layer}"), sizes, *ratio, layer < sizes.hash_layers);
    }
    for index in 0..sizes.mtp {
        let base = format!("mtp.{index}");
        w.layer(&base, sizes, 0, false);
        w.fp8(format!("{base}.e_proj.weight"), [hidden, hidden], 1.0);
        w.fp8(format!("{base}.h_proj.weight"), [hidden, hidden], 1.0);
        for part in ["enorm", "hnorm", "norm"] {
            w.bf16(format!("{base}.{part}.weight"), &[hidden], 0.5, 1.5);
        }
        w.hyper_head(&format!("{base}."), hidden);
    }
    w.t.0
}

fn config(sizes: &Sizes, own: Value) -> Value {
    let mut ratios = sizes.ratios.to_vec();
    ratios.extend(std::iter::repeat_n(0, sizes.mtp));
    let mut all = json!({
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": sizes.hidden,
        "head_dim": sizes.head_dim, "num_attention_heads": sizes.heads, "num_key_value_heads": 1,
        "q_lora_rank": sizes.q_rank, "o_groups": sizes.o_groups, "o_lora_rank": sizes.o_rank,
        "index_n_heads": sizes.index_heads, "index_head_dim": sizes.index_dim, "index_topk": 8,
        "moe_intermediate_size": sizes.width, "n_routed_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k, "n_shared_experts": 1, "num_hidden_layers": sizes.ratios.len(),
        "num_hash_layers": sizes.hash_layers, "num_nextn_predict_layers": sizes.mtp, "vocab_size": VOCAB,
        "rope_theta": 10000, "compress_rope_theta": 160000, "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": true, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": false, "attention_bias": false, "compress_ratios": ratios,
        "bos_token_id": null, "eos_token_id": null,
    });
    if let (Some(all), Value::Object(own)) = (all.as_object_mut(), own) {
        all.extend(own);
    }
    all
}

/// "t-dsv4": window, ratio 4, ratio 128, ratio 4, and one layer for the token after the next.
pub(super) fn plain() -> Fixture {
    let sizes = Sizes {
        hidden: 64,
        head_dim: 32,
        heads: 4,
        q_rank: 32,
        o_groups: 2,
        o_rank: 16,
        index_heads: 8,
        index_dim: 16,
        width: 32,
        experts: 8,
        top_k: 2,
        hash_layers: 2,
        ratios: &[0, 4, 128, 4],
        mtp: 1,
    };
    Fixture {
        name: "dsv4",
        config: config(
            &sizes,
            json!({
                "qk_rope_head_dim": 8, "sliding_window": 16, "swiglu_limit": 1.0, "max_position_embeddings": 2048,
                "torch_dtype": "float32",
                "rope_scaling": {
                    "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                    "original_max_position_embeddings": 128
                },
            }),
        ),
        tensors: tensors(&sizes, false),
    }
}

/// "t-dsv4q": fp8 blocks, mxfp4 experts and bf16, with the real inner sizes.
pub(super) fn quantized() -> Fixture {
    let sizes = Sizes {
        hidden: 128,
        head_dim: 512,
        heads: 1,
        q_rank: 128,
        o_groups: 1,
        o_rank: 128,
        index_heads: 8,
        index_dim: 128,
        width: 128,
        experts: 4,
        top_k: 2,
        hash_layers: 1,
        ratios: &[4, 128],
        mtp: 0,
    };
    Fixture {
        name: "dsv4q",
        config: config(
            &sizes,
            json!({
                "qk_rope_head_dim": 64, "sliding_window": 128, "swiglu_limit": 10.0, "expert_dtype": "fp4",
                "max_position_embeddings": 1048576, "torch_dtype": "bfloat16",
                "rope_scaling": {
                    "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                    "original_max_position_embeddings": 65536
                },
                "quantization_config": {
                    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
                    "weight_block_size": [128, 128]
                },
            }),
        ),
        tensors: tensors(&sizes, true),
    }
}
