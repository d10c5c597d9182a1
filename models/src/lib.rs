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
mod forward;
pub mod gguf;
pub mod hf;
mod load;
mod spec;
mod stop;
mod template;
pub mod testing;
mod tokenizer;
mod weights;

pub use error::ModelError;
pub use forward::{Batch, LayerHooks, Logits, Model, NoHooks, SeqChunk, Want};
pub use load::{LoadOptions, LoadedModel, load};
pub use spec::{GenerationDefaults, KvGeometry, ModelSpec};
pub use template::ChatTemplate;
pub use tokenizer::{DecodeStream, Tokenizer};
pub use weights::{RawTensor, WeightFormat};
