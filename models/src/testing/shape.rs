//! What the tiny models are: sizes, settings, tensors.

use serde_json::json;

use super::fill::fill;

/// The families there are tiny models of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TinyKind {
    /// `LlamaForCausalLM`, tied embeddings.
    Llama,
    /// `Qwen2ForCausalLM`: biases on q, k and v.
    Qwen2,
    /// `Qwen3ForCausalLM`: norms on the heads of q and k, heads wider than hidden / heads.
    Qwen3,
}

impl TinyKind {
    /// All of them.
    pub const ALL: [TinyKind; 3] = [TinyKind::Llama, TinyKind::Qwen2, TinyKind::Qwen3];

    /// The family's name, and GGUF's name of the architecture.
    pub fn name(self) -> &'static str {
        match self {
            TinyKind::Llama => "llama",
            TinyKind::Qwen2 => "qwen2",
            TinyKind::Qwen3 => "qwen3",
        }
    }

    /// Hugging Face's name of the architecture.
    pub fn architecture(self) -> &'static str {
        match self {
            TinyKind::Llama => "LlamaForCausalLM",
            TinyKind::Qwen2 => "Qwen2ForCausalLM",
            TinyKind::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// Name of the golden prompt: `token_ids(kind.prompt(), 96, 256)`.
    pub fn prompt(self) -> &'static str {
        match self {
            TinyKind::Llama => "llama.tokens",
            TinyKind::Qwen2 => "qwen2.tokens",
            TinyKind::Qwen3 => "qwen3.tokens",
        }
    }
}

/// A tiny model, ready to be written in either format. The fields may be changed; golden values hold for the
/// weights of [`TinyModel::new`], whatever `context` and `eos` are.
#[derive(Debug, Clone, PartialEq)]
pub struct TinyModel {
    /// The family.
    pub kind: TinyKind,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens.
    pub vocab: usize,
    /// Longest sequence.
    pub context: usize,
    /// Token that ends a generation; none, so that any number of tokens can be asked for.
    pub eos: Option<u32>,
    /// `rope_scaling` of the Hugging Face configuration.
    pub rope_scaling: Option<serde_json::Value>,
    /// The chat template, which both formats carry.
    pub chat_template: Option<String>,
}

/// A tensor of a tiny model.
#[derive(Debug, Clone, PartialEq)]
pub struct TinyTensor {
    /// The name in Hugging Face folders.
    pub name: String,
    /// Extents, slowest axis first.
    pub shape: Vec<usize>,
    /// Its values in order.
    pub values: Vec<f32>,
}

const TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";

impl TinyModel {
    /// The tiny model of `kind` that the golden values are of.
    pub fn new(kind: TinyKind) -> Self {
        Self {
            kind,
            hidden: 64,
            intermediate: 128,
            layers: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: if kind == TinyKind::Qwen3 { 32 } else { 16 },
            vocab: 256,
            context: 4096,
            eos: None,
            rope_scaling: None,
            chat_template: Some(TEMPLATE.to_owned()),
        }
    }

    /// The tiny Llama with a stretched rotary embedding: `rope` is one of `llama3`, `yarn`, `linear`.
    pub fn stretched(rope: &str) -> Self {
        let scaling = match rope {
            "llama3" => json!({
                "rope_type": rope, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32
            }),
            "yarn" => json!({
                "rope_type": rope, "factor": 4.0, "original_max_position_embeddings": 32
            }),
            _ => json!({ "rope_type": rope, "factor": 2.0 }),
        };
        Self { rope_scaling: Some(scaling), context: 128, ..Self::new(TinyKind::Llama) }
    }

    /// As [`TinyModel::new`] but with rows of 256 and 512, which the K-quants of GGUF need.
    pub fn wide(kind: TinyKind) -> Self {
        Self { hidden: 256, intermediate: 512, layers: 2, head_dim: 64, ..Self::new(kind) }
    }

    /// Added to mean squares in norms.
    pub fn eps(&self) -> f64 {
        match self.kind {
            TinyKind::Llama => 1e-5,
            TinyKind::Qwen2 | TinyKind::Qwen3 => 1e-6,
        }
    }

    /// Base of the rotary frequencies.
    pub fn theta(&self) -> f64 {
        match self.kind {
            TinyKind::Llama => 1e5,
            TinyKind::Qwen2 | TinyKind::Qwen3 => 1e6,
        }
    }

    /// Whether the output matrix is the embedding.
    pub fn tied(&self) -> bool {
        self.kind == TinyKind::Llama
    }

    /// All tensors under their Hugging Face names.
    pub fn tensors(&self) -> Vec<TinyTensor> {
        let mut out = Vec::new();
        let (hidden, intermediate) = (self.hidden, self.intermediate);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        out.push(vector("model.embed_tokens.weight", &[self.vocab, hidden], -1.0, 1.0));
        let key_gain = if self.kind == TinyKind::Qwen3 { 1.0 } else { 2.0 };
        for layer in 0..self.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let attention =
                [("q", q, hidden, 1.0), ("k", kv, hidden, key_gain), ("v", kv, hidden, 1.0), ("o", hidden, q, 2.0)];
            for (part, outputs, inputs, gain) in attention {
                let part = format!("self_attn.{part}_proj");
                out.push(matrix(name(&format!("{part}.weight")), outputs, inputs, gain));
                if self.kind == TinyKind::Qwen2 && !part.ends_with("o_proj") {
                    out.push(vector(&name(&format!("{part}.bias")), &[outputs], -0.5, 0.5));
                }
            }
            if self.kind == TinyKind::Qwen3 {
                for part in ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] {
                    out.push(vector(&name(part), &[self.head_dim], 1.0, 2.0));
                }
            }
            let mlp = [
                ("gate", intermediate, hidden, 1.0),
                ("up", intermediate, hidden, 1.0),
                ("down", hidden, intermediate, 2.0),
            ];
            for (part, outputs, inputs, gain) in mlp {
                out.push(matrix(name(&format!("mlp.{part}_proj.weight")), outputs, inputs, gain));
            }
            for part in ["input_layernorm.weight", "post_attention_layernorm.weight"] {
                out.push(vector(&name(part), &[hidden], 0.5, 1.5));
            }
        }
        out.push(vector("model.norm.weight", &[hidden], 0.5, 1.5));
        if !self.tied() {
            out.push(matrix("lm_head.weight".to_owned(), self.vocab, hidden, 2.0));
        }
        out
    }
}

fn vector(name: &str, shape: &[usize], low: f64, high: f64) -> TinyTensor {
    TinyTensor { name: name.to_owned(), shape: shape.to_vec(), values: fill(name, shape.iter().product(), low, high) }
}

/// A matrix whose products have about the variance of its input, times the square of `gain`.
fn matrix(name: String, outputs: usize, inputs: usize, gain: f64) -> TinyTensor {
    let bound = gain * (3.0 / inputs as f64).sqrt();
    let values = fill(&name, outputs * inputs, -bound, bound);
    TinyTensor { name, shape: vec![outputs, inputs], values }
}
