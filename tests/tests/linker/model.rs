//! Small models of random weights, one for each family, behind servers.

use kvdock_models::testing::{Fixture, token_ids};

use kvdock_tests::server::Launch;

/// Whole pages of a prompt.
pub const PAGES: usize = 3;

/// A tiny model in a folder of its own.
pub struct Model {
    name: &'static str,
    folder: tempfile::TempDir,
    vocab: u32,
    /// Tokens a page that a server takes by itself.
    pub page: usize,
}

impl Model {
    /// All of them.
    pub const NAMES: &'static [&'static str] = &Fixture::NAMES;

    /// Writes the one of this name.
    pub fn write(name: &'static str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let fixture = Fixture::new(name).expect("a fixture of this name");
        fixture.write(folder.path()).expect("a model is written");
        let vocab = fixture.config.get("vocab_size").and_then(serde_json::Value::as_u64).unwrap_or(256).min(256);
        // What DeepSeek-V4 keeps of 128 tokens in a row takes pages of as many.
        let page = if name.starts_with("dsv4") { 128 } else { 16 };
        Model { name, folder, vocab: vocab as u32, page }
    }

    /// A server for it that asks storage for every page.
    pub fn served_by(&self, launch: Launch) -> Launch {
        launch
            .set("model.path", format!("{:?}", self.folder.path().display().to_string()))
            .set("cache.prefetch_threshold", 16)
            .set("engine.max_running_requests", 2)
            // What the tests ask is whether pages come, not whether they come sooner than they are computed.
            .set("cache.prefetch_policy", "\"wait_complete\"")
    }

    /// Tokens that stand for `what`.
    pub fn prompt(&self, what: &str, count: usize) -> Vec<u32> {
        token_ids(&format!("{} {what}", self.name), count, self.vocab)
    }

    /// Tokens in so many pages.
    pub fn tokens(&self, pages: usize) -> u64 {
        (pages * self.page) as u64
    }
}
