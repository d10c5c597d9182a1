//! What a loaded model is: its sizes, its tokens with a meaning, and its identity.

use kvdock_kernels::{KvDtype, KvSpec};

use crate::pools::{HitPolicy, PageSource, PoolDecl, PoolKind, PoolLayout};

/// Shape of what one token leaves in the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGeometry {
    /// Layers that keep K and V.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Elements of one K row.
    pub head_dim_k: usize,
    /// Elements of one V row.
    pub head_dim_v: usize,
}

impl KvGeometry {
    /// The pool that holds `pages` pages of `page_tokens` tokens of this shape.
    pub fn pool(&self, dtype: KvDtype, page_tokens: usize, pages: usize) -> KvSpec {
        KvSpec {
            layers: self.layers,
            kv_heads: self.kv_heads,
            head_dim_k: self.head_dim_k,
            head_dim_v: self.head_dim_v,
            page_tokens,
            pages,
            dtype,
        }
    }

    /// The declaration of a model that has this one pool.
    pub fn declared(&self) -> PoolDecl {
        PoolDecl {
            name: "kv",
            kind: PoolKind::FullKv,
            source: PageSource::Anchor,
            hit: HitPolicy::AllPages,
            layers: (0..self.layers).collect(),
            layout: PoolLayout::Heads {
                kv_heads: self.kv_heads,
                head_dim_k: self.head_dim_k,
                head_dim_v: self.head_dim_v,
            },
            encoding: "",
        }
    }
}

/// Sampling values that a checkpoint recommends (`generation_config.json`). `None`: it says nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Sampling temperature. (`do_sample` is not looked at: other engines do not either.)
    pub temperature: Option<f32>,
    /// Nucleus size.
    pub top_p: Option<f32>,
    /// How many of the likeliest tokens are kept.
    pub top_k: Option<u32>,
    /// Smallest probability kept, as a part of the largest.
    pub min_p: Option<f32>,
    /// Penalty on tokens seen before.
    pub repetition_penalty: Option<f32>,
}

/// What a loaded model is. Made by [`crate::load`]; it never changes afterwards.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// The architecture name as the checkpoint gives it (`llama`, `Qwen3ForCausalLM`).
    pub architecture: String,
    /// The family that runs it (`llama`, `qwen2`, `qwen3`).
    pub family: &'static str,
    /// The name the checkpoint gives itself, where it has one.
    pub name: Option<String>,
    /// Rows of the output matrix: a row of logits has this many values. It may exceed the number
    /// of tokens the tokenizer knows.
    pub vocab_size: usize,
    /// The longest sequence the model was made for, in tokens.
    pub context_length: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// What a token leaves in the KV cache of a model that runs over one pool of all tokens
    /// ([`crate::Model::forward`]). `None`: it needs all of [`ModelSpec::pools`].
    pub kv: Option<KvGeometry>,
    /// The pools of [`crate::Model::forward_pools`].
    pub pools: Vec<PoolDecl>,
    /// The pools of [`crate::Model::forward_draft`]: of layers that predict further tokens. Empty where there are none.
    pub draft_pools: Vec<PoolDecl>,
    /// Tokens that a page must hold a multiple of.
    pub page_multiple: usize,
    /// Ranks that compute it. With several, [`ModelSpec::pools`] are those of each rank, and the model runs over a
    /// [`crate::PoolSet`] of as many ranks.
    pub ranks: usize,
    /// How many of the ranks have the same share of the model, and deal the rows of a pass out among them: context parallelism. With t of
    /// `ranks / context_ranks` shares, rank `c * t + s` is the one with share `s` that computes part `c` of the rows.
    pub context_ranks: usize,
    /// Token that starts a text, where the model has one.
    pub bos: Option<u32>,
    /// All tokens that end a generation, ascending: end of text and end of turn, from the config, the
    /// generation config, the GGUF metadata and the chat template.
    pub eos: Vec<u32>,
    /// Sampling values that the checkpoint recommends.
    pub generation: GenerationDefaults,
    /// SHA-256 over the content of the weights: of the GGUF file, or over the digests of
    /// `config.json` and of every weight file in order of their names.
    pub weights_digest: [u8; 32],
    /// Names the arithmetic of the device the model runs on. Pages written under another id are
    /// not bit for bit what this model would write.
    pub numerics_id: String,
}

impl ModelSpec {
    /// The one pool's shape, for a pass over no other ([`crate::Model::forward`]).
    ///
    /// # Errors
    /// The pools that the model needs instead.
    pub fn one_pool(&self) -> Result<KvGeometry, String> {
        self.kv.ok_or_else(|| {
            let names: Vec<&str> = self.pools.iter().map(|pool| pool.name).collect();
            format!(
                "a model of the family {} keeps its cache in {} pools ({}); this takes models that can do with one pool of \
                 keys and values",
                self.family,
                names.len(),
                names.join(", ")
            )
        })
    }

    /// [`ModelSpec::weights_digest`] in lower-case hexadecimal digits.
    pub fn weights_digest_hex(&self) -> String {
        self.weights_digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
