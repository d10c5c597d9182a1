//! Small checkpoints whose every weight follows from its tensor's name, for tests.
//!
//! They go through the same loaders and the same forward pass as real ones, in both formats. Nothing
//! is shipped: [`TinyModel`] writes them where a test wants them. Their tokenizer has a token for each byte and no
//! other, so any text is as many tokens as it has bytes.

mod agree;
mod decoders;
mod deepseek_v4;
mod fill;
mod fixture;
mod gguf;
mod hf;
mod quantize;
mod shape;

use std::io;
use std::path::{Path, PathBuf};

pub use agree::{Agreement, Course, Flips, SINGLE, agreement};
pub use fill::{fill, token_ids};
pub use fixture::Fixture;
#[cfg(test)]
pub(crate) use gguf::Writer;
pub use shape::{TinyKind, TinyModel, TinyTensor};

/// File name of the real model that tests run on.
pub const TEST_MODEL_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
/// SHA-256 of that file.
pub const TEST_MODEL_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
/// Environment variable that says where it lies.
pub const TEST_MODEL_VARIABLE: &str = "KVDOCK_TEST_MODEL";

/// Writes the tiny model of `kind` as a Hugging Face folder into `dir` and returns `dir`.
///
/// # Errors
/// When a file cannot be written.
pub fn write_tiny_checkpoint(dir: &Path, kind: TinyKind) -> io::Result<PathBuf> {
    TinyModel::new(kind).write_hf(dir)?;
    Ok(dir.to_path_buf())
}

/// Where the real test model lies: the path in `KVDOCK_TEST_MODEL`, else `.cache/models` of the workspace.
///
/// # Errors
/// What to do when it is not there.
pub fn test_model_path() -> Result<PathBuf, String> {
    let path = match std::env::var_os(TEST_MODEL_VARIABLE) {
        Some(path) => PathBuf::from(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/models").join(TEST_MODEL_FILE),
    };
    if path.is_file() {
        return Ok(path);
    }
    Err(format!(
        "the test model is not at {}: `cargo xtask test` fetches it, or set {TEST_MODEL_VARIABLE} to its path",
        path.display()
    ))
}
