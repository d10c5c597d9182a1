//! Model families and how a checkpoint finds its own.
//!
//! A family registers itself with [`inventory::submit!`]; [`find`] picks the one that claims the
//! architecture name of a checkpoint. Adding a family touches no other file.

pub(crate) mod blocks;
mod decoder;
mod deepseek_v4;
mod dense;

use std::path::Path;
use std::sync::Arc;

use kvdock_kernels::Device;

pub use crate::checkpoint::Checkpoint;
use crate::digest::Progress;
use crate::spec::KvGeometry;
use crate::{Model, ModelError, ModelSpec, PoolDecl};
use blocks::share::Share;

/// A family of models: the architecture names it runs, and how it is built.
pub struct Family {
    /// The family's name.
    pub name: &'static str,
    /// Values of `general.architecture` in GGUF files.
    pub gguf: &'static [&'static str],
    /// Values of `architectures[0]` in Hugging Face configurations.
    pub hf: &'static [&'static str],
    /// A token leaves latents, which all heads read, so that every tensor-parallel rank holds all of them.
    pub latents: bool,
    /// Reads the configuration, checks it against the tensors, uploads the weights.
    pub build: fn(&Build<'_>) -> Result<Parts, ModelError>,
}

inventory::collect!(Family);

/// What a family builds from.
pub struct Build<'a> {
    /// The opened checkpoint.
    pub checkpoint: &'a Checkpoint<'a>,
    /// Where the weights go.
    pub device: &'a Arc<dyn Device>,
    /// Number of tokens the tokenizer knows.
    pub tokens: usize,
    /// As [`crate::LoadOptions::packed_rows`].
    pub packed_rows: bool,
    /// Which rank's part is built.
    pub(crate) share: &'a Share,
    pub(crate) progress: &'a Progress<'a>,
}

impl Build<'_> {
    /// To be called after each upload, with the bytes it took from the file.
    pub fn uploaded(&self, bytes: usize) {
        self.progress.uploaded(bytes);
    }

    /// The file that a refusal to spread the model names.
    pub(crate) fn config_path(&self) -> &Path {
        self.checkpoint.config_path()
    }
}

/// Sizes a family read from the configuration; they go into the [`ModelSpec`].
#[derive(Debug, Clone, PartialEq)]
pub struct Geometry {
    /// Rows of the output matrix.
    pub vocab_size: usize,
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// What a token leaves in the cache of a model that can do with one pool.
    pub kv: Option<KvGeometry>,
    /// The pools.
    pub pools: Vec<PoolDecl>,
    /// The pools of layers that predict further tokens.
    pub draft_pools: Vec<PoolDecl>,
    /// Tokens that a page must hold a multiple of.
    pub page_multiple: usize,
}

/// A model all but its [`ModelSpec`], which is complete only when everything has been read.
pub struct Parts {
    /// The sizes.
    pub geometry: Geometry,
    /// Makes the model.
    pub finish: Box<dyn FnOnce(ModelSpec) -> Arc<dyn Model>>,
}

/// The family that runs `checkpoint`.
///
/// # Errors
/// [`ModelError::UnknownArchitecture`] with the names of this format that are known.
pub fn find(checkpoint: &Checkpoint<'_>) -> Result<&'static Family, ModelError> {
    let architecture = checkpoint.architecture()?;
    let names = |family: &'static Family| match checkpoint {
        Checkpoint::Gguf(_) => family.gguf,
        Checkpoint::Hf(_) => family.hf,
    };
    let mut known: Vec<&str> = Vec::new();
    for family in inventory::iter::<Family> {
        if names(family).contains(&architecture) {
            return Ok(family);
        }
        known.extend(names(family));
    }
    known.sort_unstable();
    Err(ModelError::UnknownArchitecture {
        path: checkpoint.config_path().to_path_buf(),
        found: architecture.to_owned(),
        known: known.join(", "),
    })
}
