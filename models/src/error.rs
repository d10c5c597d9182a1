//! What can go wrong while a checkpoint is read and while a model runs.

use std::path::{Path, PathBuf};

use kvdock_kernels::KernelError;

/// An error of this crate. Every message names what was wrong, where, and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is damaged, cut short, or not of the format its name promises.
    #[error("{path}: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the place, the expected and the found.
        what: String,
    },
    /// A metadata key is missing or holds something that cannot be right.
    #[error("{path}: key \"{key}\": expected {expected}, found {found}")]
    Key {
        /// The file.
        path: PathBuf,
        /// The key, dotted where nested.
        key: String,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A tensor is missing, has a wrong shape, an unknown type or too few bytes.
    #[error("{path}: tensor \"{tensor}\": expected {expected}, found {found}")]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name in that file.
        tensor: String,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The checkpoint's architecture is none that this build knows.
    #[error("{path}: architecture \"{found}\" is not known; known ones are {known}")]
    UnknownArchitecture {
        /// The file that names the architecture.
        path: PathBuf,
        /// The name it gives.
        found: String,
        /// The names this build knows, joined by commas.
        known: String,
    },
    /// The checkpoint is sound but asks for something that is not built.
    #[error("{path}: {what} is not supported")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The feature asked for.
        what: String,
    },
    /// The model's sizes can't be dealt out to that many tensor-parallel ranks.
    #[error("{path}: can't be spread over {ranks} ranks: {what}")]
    Ranks {
        /// The file.
        path: PathBuf,
        /// The ranks asked for.
        ranks: usize,
        /// What does not divide.
        what: String,
    },
    /// The tokenizer could not be built, or could not encode a text.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template does not parse, or failed while it rendered.
    #[error("chat template \"{template}\": {reason}")]
    Template {
        /// Which template: its name, or where it came from.
        template: String,
        /// What the template engine said, with the line.
        reason: String,
    },
    /// A batch handed to a forward pass breaks a rule of [`crate::Batch`].
    #[error("batch: {0}")]
    Batch(String),
    /// A [`crate::LayerHooks`] implementation stopped the pass.
    #[error("stopped before layer {layer}: {reason}")]
    Hook {
        /// The layer that was not run.
        layer: usize,
        /// Why the hook refused.
        reason: String,
    },
    /// A device operation failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl ModelError {
    /// Says in which file the tokenizer was, where the error is about one.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        match self {
            ModelError::Tokenizer(_) => ModelError::Damaged { path: path.to_path_buf(), what: self.to_string() },
            other => other,
        }
    }
}
