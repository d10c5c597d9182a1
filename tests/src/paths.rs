//! Where the built programs and the model lie.

use std::path::{Path, PathBuf};

/// The folder with the `kvdock` binary and the plugins: `KVDOCK_TEST_BUILD`, or the folder of the
/// release build this test is part of.
pub fn build() -> PathBuf {
    if let Some(folder) = std::env::var_os("KVDOCK_TEST_BUILD") {
        return PathBuf::from(folder);
    }
    let program = std::env::current_exe().expect("the system knows the path of this program");
    let folder = program.parent().expect("a program lies in a folder");
    // Tests lie in `release/deps`, benches and other programs in `release`.
    if folder.ends_with("deps") {
        folder.parent().expect("deps lies in a folder").to_path_buf()
    } else {
        folder.to_path_buf()
    }
}

/// The `kvdock` program.
pub fn kvdock() -> PathBuf {
    existing(build().join("kvdock"), "the server")
}

/// The file plugin.
pub fn file_plugin() -> PathBuf {
    existing(build().join("libkvdock_plugin_file.so"), "the file plugin")
}

/// The Mooncake plugin.
pub fn mooncake_plugin() -> PathBuf {
    existing(build().join("libkvdock_plugin_mooncake.so"), "the Mooncake plugin")
}

/// The UMBP plugin.
pub fn umbp_plugin() -> PathBuf {
    existing(build().join("libkvdock_plugin_umbp.so"), "the UMBP plugin")
}

/// The plugin into which tests plant faults; see [`crate::broken`].
pub fn broken_plugin() -> PathBuf {
    existing(build().join("libkvdock_broken_plugin.so"), "the plugin of tests/broken")
}

/// The small real model: `KVDOCK_TEST_MODEL`, or where `cargo xtask test` keeps it.
pub fn model() -> PathBuf {
    let file = std::env::var_os("KVDOCK_TEST_MODEL")
        .map_or_else(|| workspace().join(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"), PathBuf::from);
    existing(file, "the small model")
}

/// The root of the workspace.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate lies in the workspace")
}

fn existing(path: PathBuf, what: &str) -> PathBuf {
    assert!(path.exists(), "{what} is missing at {}; `cargo xtask test` makes it", path.display());
    path
}
