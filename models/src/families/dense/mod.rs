//! Dense decoders with rotary attention and a gated MLP: Llama (SmolLM2, Llama 3), Qwen2, Qwen3.
//!
//! The three differ in where they have biases and head norms, and in how GGUF files order the rows of q and k.
//! [`config`] reads both formats into one description, [`weights`] uploads by it, [`run`] is
//! the forward pass of all of them.

pub(super) mod config;
pub(super) mod hf_rope;
mod run;
mod weights;
mod workspace;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::{Build, Family, Geometry, Parts};
use crate::spec::KvGeometry;
use crate::{Model, ModelError};
use config::{Bias, Config, Variant};
use run::DenseModel;
use weights::{Held, Weights};

/// Llama and what is built like it.
static LLAMA: Variant = Variant { qkv_bias: Bias::AsConfigured, head_norms: false, gguf_permutes_q_and_k: true };
static QWEN2: Variant = Variant { qkv_bias: Bias::Always, head_norms: false, gguf_permutes_q_and_k: false };
static QWEN3: Variant = Variant { qkv_bias: Bias::AsConfigured, head_norms: true, gguf_permutes_q_and_k: false };

inventory::submit! {
    Family {
        name: "llama",
        gguf: &["llama"],
        hf: &["LlamaForCausalLM"],
        latents: false,
        build: |input| build(input, &LLAMA),
    }
}
inventory::submit! {
    Family {
        name: "qwen2",
        gguf: &["qwen2"],
        hf: &["Qwen2ForCausalLM"],
        latents: false,
        build: |input| build(input, &QWEN2),
    }
}
inventory::submit! {
    Family {
        name: "qwen3",
        gguf: &["qwen3"],
        hf: &["Qwen3ForCausalLM"],
        latents: false,
        build: |input| build(input, &QWEN3),
    }
}

fn build(input: &Build<'_>, variant: &'static Variant) -> Result<Parts, ModelError> {
    let config = Config::read(input.checkpoint, variant, input.tokens)?;
    let held = Held::of(input, input.share, &config)?;
    let weights = Weights::upload(input, &config, &held, variant)?;
    let config = held.config(&config);
    let kv = KvGeometry {
        layers: config.layers,
        kv_heads: config.kv_heads,
        head_dim_k: config.head_dim,
        head_dim_v: config.head_dim,
    };
    let geometry = Geometry {
        vocab_size: config.vocab,
        context_length: config.context,
        hidden: config.hidden,
        layers: config.layers,
        kv: Some(kv),
        pools: vec![kv.declared()],
        draft_pools: Vec::new(),
        page_multiple: 1,
    };
    let (device, share) = (Arc::clone(input.device), input.share.clone());
    let finish = move |spec| Arc::new(DenseModel::new(spec, config, weights, device, share)) as Arc<dyn Model>;
    Ok(Parts { geometry, finish: Box::new(finish) })
}
