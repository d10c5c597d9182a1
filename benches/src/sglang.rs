//! SGLang, of which the tree core and the file backend run without a GPU. It is here only after `cargo xtask bench --sglang`.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use kvdock_tests::paths;
use serde_json::json;

use crate::asked::Asked;

/// The release that is fetched, with the packages that these parts of it import. 5 GB, nearly all of it torch.
const FOLDER: &str = ".cache/peers/sglang-0.5.23";

/// Why rows beside it are skipped.
pub const MISSING: &str = "SGLang is not here; with --sglang it is fetched (5 GB)";

/// Starts it, where it is here.
fn start() -> Result<Option<Asked>> {
    let folder = paths::workspace().join(FOLDER);
    if !folder.join("complete").exists() {
        return Ok(None);
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/sglang.py");
    Asked::start("SGLang", Command::new("python3").arg(script).arg(folder)).map(Some)
}

/// Its native tree core, through its binding for Python.
pub struct NativeTree(Asked);

impl NativeTree {
    /// One with so many pages of 16 tokens, in keys of so many tokens; none where SGLang is not here.
    ///
    /// # Errors
    /// When it does not work.
    pub fn filled(pages: usize, tokens: usize) -> Result<Option<NativeTree>> {
        let Some(mut asked) = start()? else { return Ok(None) };
        asked.ask(&json!(["tree", pages, tokens]))?;
        Ok(Some(NativeTree(asked)))
    }

    /// Seconds of matching so many whole keys.
    ///
    /// # Errors
    /// When one is not found whole.
    pub fn matches(&mut self, count: usize) -> Result<f64> {
        self.0.seconds(&json!(["match", count]))
    }

    /// Seconds of inserting so many new keys.
    ///
    /// # Errors
    /// When it refuses one.
    pub fn inserts(&mut self, count: usize) -> Result<f64> {
        self.0.seconds(&json!(["insert", count]))
    }
}

/// Its file backend, which syncs nothing and checks nothing.
pub struct FileBackend {
    asked: Asked,
    /// Batches that were put.
    put: u64,
}

impl FileBackend {
    /// One over a folder, for batches of so many pages; none where SGLang is not here.
    ///
    /// # Errors
    /// When it does not work.
    pub fn open(folder: &Path, page_bytes: u64, batch: u64) -> Result<Option<FileBackend>> {
        let Some(mut asked) = start()? else { return Ok(None) };
        asked.ask(&json!(["files", folder, page_bytes, batch]))?;
        Ok(Some(FileBackend { asked, put: 0 }))
    }

    /// Seconds of putting so many new batches.
    ///
    /// # Errors
    /// When it does not take them all.
    pub fn put(&mut self, calls: u64) -> Result<f64> {
        let first = self.put;
        self.put += calls;
        self.asked.seconds(&json!(["put", first, calls]))
    }

    /// Seconds of getting those that were put last.
    ///
    /// # Errors
    /// When it does not have them all.
    pub fn get(&mut self, calls: u64) -> Result<f64> {
        self.asked.seconds(&json!(["get", self.put.saturating_sub(calls), calls]))
    }
}
