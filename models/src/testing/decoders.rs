//! Fixtures of decoders with a plain residual stream.

use safetensors::Dtype;
use serde_json::{Value, json};

use super::fill::fill;
use super::fixture::{Fixture, StoredBytes, Tensors};

const VOCAB: usize = 256;
const HIDDEN: usize = 64;

/// Configuration keys that all have.
fn config(own: Value) -> Value {
    let mut config = json!({
        "hidden_size": HIDDEN, "vocab_size": VOCAB, "max_position_embeddings": 4096, "hidden_act": "silu",
        "tie_word_embeddings": false, "attention_bias": false, "bos_token_id": null, "eos_token_id": null,
        "torch_dtype": "float32",
    });
    if let (Some(all), Value::Object(own)) = (config.as_object_mut(), own) {
        all.extend(own);
    }
    config
}

/// Embedding, final norm and output matrix.
fn ends(t: &mut Tensors, (low, high): (f64, f64)) {
    t.vec("model.embed_tokens.weight", &[VOCAB, HIDDEN], -1.0, 1.0);
    t.vec("model.norm.weight", &[HIDDEN], low, high);
    t.lin("lm_head.weight", [VOCAB, HIDDEN], 2.0);
}

/// The two norms of a layer.
fn norms(t: &mut Tensors, base: &str, (low, high): (f64, f64)) {
    t.vec(format!("{base}.input_layernorm.weight"), &[HIDDEN], low, high);
    t.vec(format!("{base}.post_attention_layernorm.weight"), &[HIDDEN], low, high);
}

fn mlp(t: &mut Tensors, base: &str, width: usize) {
    t.lin(format!("{base}.gate_proj.weight"), [width, HIDDEN], 1.0);
    t.lin(format!("{base}.up_proj.weight"), [width, HIDDEN], 1.0);
    t.lin(format!("{base}.down_proj.weight"), [HIDDEN, width], 2.0);
}

fn experts(t: &mut Tensors, base: &str, count: usize, width: usize) {
    for expert in 0..count {
        mlp(t, &format!("{base}.{expert}"), width);
    }
}

pub(super) fn qwen3_moe() -> Fixture {
    let mut t = Tensors::default();
    ends(&mut t, (0.5, 1.5));
    for layer in 0..3 {
        let base = format!("model.layers.{layer}");
        norms(&mut t, &base, (0.5, 1.5));
        for (part, rows, cols, gain) in
            [("q", 128, HIDDEN, 1.0), ("k", 64, HIDDEN, 1.0), ("v", 64, HIDDEN, 1.0), ("o", HIDDEN, 128, 2.0)]
        {
            t.lin(format!("{base}.self_attn.{part}_proj.weight"), [rows, cols], gain);
        }
        for part in ["q", "k"] {
            t.vec(format!("{base}.self_attn.{part}_norm.weight"), &[32], 1.0, 2.0);
        }
        if layer == 1 {
            mlp(&mut t, &format!("{base}.mlp"), 96);
        } else {
            t.lin(format!("{base}.mlp.gate.weight"), [8, HIDDEN], 2.0);
            experts(&mut t, &format!("{base}.mlp.experts"), 8, 32);
        }
    }
    Fixture {
        name: "qwen3_moe",
        config: config(json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
            "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": true,
            "decoder_sparse_step": 1, "mlp_only_layers": [1], "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        })),
        tensors: t.0,
    }
}

/// Experts as plain floats, or packed as mxfp4.
pub(super) fn gpt_oss(packed: bool) -> Fixture {
    let (experts, width) = (4, 32);
    let mut t = Tensors::default();
    ends(&mut t, (0.5, 1.5));
    for layer in 0..4 {
        let base = format!("model.layers.{layer}");
        norms(&mut t, &base, (0.5, 1.5));
        for (part, rows, cols, gain) in
            [("q", HIDDEN, HIDDEN, 1.0), ("k", 32, HIDDEN, 2.0), ("v", 32, HIDDEN, 1.0), ("o", HIDDEN, HIDDEN, 2.0)]
        {
            t.lin(format!("{base}.self_attn.{part}_proj.weight"), [rows, cols], gain);
            t.vec(format!("{base}.self_attn.{part}_proj.bias"), &[rows], -0.5, 0.5);
        }
        t.vec(format!("{base}.self_attn.sinks"), &[4], -1.0, 1.0);
        t.lin(format!("{base}.mlp.router.weight"), [experts, HIDDEN], 2.0);
        t.vec(format!("{base}.mlp.router.bias"), &[experts], -0.5, 0.5);
        let mlp = format!("{base}.mlp.experts");
        for (part, rows, cols, gain) in [("gate_up_proj", 2 * width, HIDDEN, 1.5), ("down_proj", HIDDEN, width, 2.0)] {
            let name = format!("{mlp}.{part}");
            if packed {
                packed_experts(&mut t, &name, experts, rows, cols);
            } else {
                let bound = gain * (3.0 / cols as f64).sqrt();
                t.vec(name.clone(), &[experts, cols, rows], -bound, bound);
            }
            t.vec(format!("{name}_bias"), &[experts, rows], -0.5, 0.5);
        }
    }
    let mut own = json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": width,
        "num_local_experts": experts, "num_experts_per_tok": 2, "attention_bias": true, "rms_norm_eps": 1e-5,
        "sliding_window": 16, "swiglu_limit": 1.5, "rope_theta": 150000.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 512
        },
    });
    if packed {
        own["quantization_config"] = json!({
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                "lm_head"],
        });
    }
    Fixture { name: if packed { "gpt_oss_mxfp4" } else { "gpt_oss" }, config: config(own), tensors: t.0 }
}

/// `NAME_blocks` and `NAME_scales`.
fn packed_experts(t: &mut Tensors, name: &str, experts: usize, rows: usize, cols: usize) {
    let byte = |u: &f32| (256.0 * f64::from(*u)) as u8;
    let blocks_name = format!("{name}_blocks");
    let blocks = fill(&blocks_name, experts * rows * cols / 2, 0.0, 1.0).iter().map(byte).collect();
    t.0.push(StoredBytes {
        name: blocks_name,
        dtype: Dtype::U8,
        shape: vec![experts, rows, cols / 32, 16],
        bytes: blocks,
    });
    let scales_name = format!("{name}_scales");
    let least = (127.0 + (2.0 / (2.93 * (cols as f64).sqrt())).log2().round()) as u8 - 1;
    let scales =
        fill(&scales_name, experts * rows * cols / 32, 0.0, 1.0).iter().map(|u| least + (3.0 * u) as u8).collect();
    t.0.push(StoredBytes { name: scales_name, dtype: Dtype::U8, shape: vec![experts, rows, cols / 32], bytes: scales });
}

pub(super) fn mimo() -> Fixture {
    let pattern = [0, 1, 1, 0];
    let mut t = Tensors::default();
    ends(&mut t, (0.5, 1.5));
    for (layer, kind) in pattern.iter().enumerate() {
        let base = format!("model.layers.{layer}");
        norms(&mut t, &base, (0.5, 1.5));
        let kv_heads = 1 + kind;
        for (part, rows, cols, gain) in [
            ("q", 4 * 24, HIDDEN, 1.0),
            ("k", kv_heads * 24, HIDDEN, 2.0),
            ("v", kv_heads * 16, HIDDEN, 1.0),
            ("o", HIDDEN, 4 * 16, 2.0),
        ] {
            t.lin(format!("{base}.self_attn.{part}_proj.weight"), [rows, cols], gain);
        }
        if *kind == 1 {
            t.vec(format!("{base}.self_attn.attention_sink_bias"), &[4], -1.0, 1.0);
        }
        if layer == 0 {
            mlp(&mut t, &format!("{base}.mlp"), 96);
        } else {
            t.lin(format!("{base}.mlp.gate.weight"), [8, HIDDEN], 2.0);
            t.vec(format!("{base}.mlp.gate.e_score_correction_bias"), &[8], -0.3, 0.3);
            experts(&mut t, &format!("{base}.mlp.experts"), 8, 32);
        }
    }
    Fixture {
        name: "mimo",
        config: config(json!({
            "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "num_hidden_layers": 4,
            "hybrid_layer_pattern": pattern, "moe_layer_freq": [0, 1, 1, 1], "num_attention_heads": 4,
            "num_key_value_heads": 1, "swa_num_key_value_heads": 2, "head_dim": 24, "v_head_dim": 16,
            "intermediate_size": 96, "sliding_window_size": 16, "partial_rotary_factor": 0.334, "rope_theta": 5e6,
            "swa_rope_theta": 1e4, "attention_value_scale": 0.707, "add_swa_attention_sink_bias": true,
            "add_full_attention_sink_bias": false, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "n_shared_experts": null, "n_group": 1, "topk_group": 1,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": true,
            "routed_scaling_factor": null, "layernorm_epsilon": 1e-5,
        })),
        tensors: t.0,
    }
}

/// Tensors of a full layer of the hybrid families.
fn gated_attention(t: &mut Tensors, base: &str) {
    for (part, rows, cols, gain) in
        [("q", 2 * 128, HIDDEN, 1.0), ("k", 64, HIDDEN, 1.0), ("v", 64, HIDDEN, 1.0), ("o", HIDDEN, 128, 2.0)]
    {
        t.lin(format!("{base}.{part}_proj.weight"), [rows, cols], gain);
    }
    for part in ["q", "k"] {
        t.vec(format!("{base}.{part}_norm.weight"), &[32], 0.0, 1.0);
    }
}

/// What the delta nets of both families have: 2 key heads, 4 value heads, 16 elements each.
fn delta(t: &mut Tensors, base: &str) {
    t.vec(format!("{base}.conv1d.weight"), &[128, 1, 4], -0.8, 0.8);
    t.vec(format!("{base}.dt_bias"), &[4], -3.0, 0.0);
    t.vec(format!("{base}.A_log"), &[4], -2.0, 1.0);
    t.vec(format!("{base}.norm.weight"), &[16], 0.5, 1.5);
    t.lin(format!("{base}.out_proj.weight"), [HIDDEN, 64], 2.0);
}

fn hybrid(own: Value) -> Value {
    let mut all = json!({
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "intermediate_size": 96, "rms_norm_eps": 1e-6,
    });
    if let (Some(all), Value::Object(own)) = (all.as_object_mut(), own) {
        all.extend(own);
    }
    config(all)
}

pub(super) fn qwen3_5() -> Fixture {
    let mut t = Tensors::default();
    ends(&mut t, (-0.5, 0.5));
    for layer in 0..4 {
        let base = format!("model.layers.{layer}");
        norms(&mut t, &base, (-0.5, 0.5));
        if layer == 3 {
            gated_attention(&mut t, &format!("{base}.self_attn"));
        } else {
            let base = format!("{base}.linear_attn");
            for (part, rows) in [("qkv", 128), ("z", 64), ("b", 4), ("a", 4)] {
                t.lin(format!("{base}.in_proj_{part}.weight"), [rows, HIDDEN], 1.0);
            }
            delta(&mut t, &base);
        }
        mlp(&mut t, &format!("{base}.mlp"), 96);
    }
    Fixture {
        name: "qwen3_5",
        config: hybrid(json!({
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1], "mrope_interleaved": true
            },
        })),
        tensors: t.0,
    }
}

pub(super) fn qwen3_next() -> Fixture {
    let mut t = Tensors::default();
    ends(&mut t, (-0.5, 0.5));
    for layer in 0..4 {
        let base = format!("model.layers.{layer}");
        norms(&mut t, &base, (-0.5, 0.5));
        if layer == 3 {
            gated_attention(&mut t, &format!("{base}.self_attn"));
        } else {
            let base = format!("{base}.linear_attn");
            t.lin(format!("{base}.in_proj_qkvz.weight"), [192, HIDDEN], 1.0);
            t.lin(format!("{base}.in_proj_ba.weight"), [8, HIDDEN], 1.0);
            delta(&mut t, &base);
        }
        let base = format!("{base}.mlp");
        t.lin(format!("{base}.gate.weight"), [8, HIDDEN], 2.0);
        experts(&mut t, &format!("{base}.experts"), 8, 32);
        mlp(&mut t, &format!("{base}.shared_expert"), 48);
        t.lin(format!("{base}.shared_expert_gate.weight"), [1, HIDDEN], 1.0);
    }
    Fixture {
        name: "qwen3_next",
        config: hybrid(json!({
            "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "decoder_sparse_step": 1,
            "mlp_only_layers": [], "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
            "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": true, "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        })),
        tensors: t.0,
    }
}

/// Tensors of latent attention, with an indexer where `indexed`.
fn latent(t: &mut Tensors, base: &str, indexed: bool) {
    for (part, rows, cols, gain) in [
        ("q_a_proj", 32, HIDDEN, 1.0),
        ("q_b_proj", 4 * 24, 32, 2.0),
        ("kv_a_proj_with_mqa", 40, HIDDEN, 1.0),
        ("kv_b_proj", 4 * 32, 32, 1.0),
        ("o_proj", HIDDEN, 64, 2.0),
    ] {
        t.lin(format!("{base}.{part}.weight"), [rows, cols], gain);
    }
    for part in ["q_a", "kv_a"] {
        t.vec(format!("{base}.{part}_layernorm.weight"), &[32], 0.5, 1.5);
    }
    if indexed {
        let base = format!("{base}.indexer");
        t.lin(format!("{base}.wq_b.weight"), [8 * 16, 32], 1.0);
        t.lin(format!("{base}.wk.weight"), [16, HIDDEN], 1.0);
        t.lin(format!("{base}.weights_proj.weight"), [8, HIDDEN], 1.0);
        t.vec(format!("{base}.k_norm.weight"), &[16], 0.5, 1.5);
        t.vec(format!("{base}.k_norm.bias"), &[16], -0.5, 0.5);
    }
}

/// A model with latent attention: layer 0 dense, the others with experts.
fn dsa(indexed: [bool; 4]) -> Tensors {
    let mut t = Tensors::default();
    ends(&mut t, (0.5, 1.5));
    for (layer, indexed) in indexed.into_iter().enumerate() {
        let base = format!("model.layers.{layer}");
        norms(&mut t, &base, (0.5, 1.5));
        latent(&mut t, &format!("{base}.self_attn"), indexed);
        let base = format!("{base}.mlp");
        if layer == 0 {
            mlp(&mut t, &base, 96);
        } else {
            t.lin(format!("{base}.gate.weight"), [8, HIDDEN], 2.0);
            t.vec(format!("{base}.gate.e_score_correction_bias"), &[8], -0.3, 0.3);
            experts(&mut t, &format!("{base}.experts"), 8, 32);
            mlp(&mut t, &format!("{base}.shared_experts"), 32);
        }
    }
    t
}

fn dsa_config(own: Value) -> Value {
    let mut all = json!({
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "index_n_heads": 8, "index_head_dim": 16, "index_topk": 8, "first_k_dense_replace": 1,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": true, "routed_scaling_factor": 2.5,
    });
    if let (Some(all), Value::Object(own)) = (all.as_object_mut(), own) {
        all.extend(own);
    }
    config(all)
}

pub(super) fn glm_dsa() -> Fixture {
    Fixture {
        name: "glm_dsa",
        config: dsa_config(json!({
            "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "rms_norm_eps": 1e-5,
            "indexer_types": ["full", "full", "shared", "full"], "index_topk_freq": 2, "index_skip_topk_offset": 2,
            "n_group": 1, "topk_group": 1, "rope_parameters": { "rope_type": "default", "rope_theta": 8e6 },
        })),
        tensors: dsa([true, true, false, true]).0,
    }
}

pub(super) fn deepseek_v32() -> Fixture {
    Fixture {
        name: "deepseek_v32",
        config: dsa_config(json!({
            "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "rms_norm_eps": 1e-6,
            "n_group": 4, "topk_group": 2, "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn", "rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 512
            },
        })),
        tensors: dsa([true; 4]).0,
    }
}
