//! Model families, weight loaders, tokenizers and chat templates of kvdock.
//!
//! [`load`] takes a GGUF file or a Hugging Face folder and gives a [`LoadedModel`]: a [`Model`] that
//! runs batches over a paged KV pool, its [`Tokenizer`] and its [`ChatTemplate`]. The family that
//! runs a checkpoint is picked by the architecture name in it; families register
//! themselves, see [`families`].

mod checkpoint;
mod digest;
mod error;
pub mod families;
pub mod files;
mod forward;
pub mod gguf;
pub mod hf;
mod load;
mod logits;
mod pools;
mod ranks;
mod spec;
mod stop;
mod template;
pub mod testing;
mod tokenizer;
mod weights;

pub use error::ModelError;
pub use forward::{Batch, DraftPass, LayerHooks, Model, NoHooks, PooledBatch, PooledChunk, SeqChunk, Want};
pub use load::{Header, LoadOptions, LoadedModel, check_header, load};
pub use logits::Logits;
pub use pools::{
    HitPolicy, NO_PAGE, PageSource, PoolDecl, PoolKind, PoolLayout, PoolMemory, PoolSet, PoolSizes, StateSave,
};
pub use spec::{GenerationDefaults, KvGeometry, ModelSpec};
pub use template::ChatTemplate;
pub use tokenizer::{DecodeStream, Tokenizer};
pub use weights::{RawTensor, WeightFormat};
