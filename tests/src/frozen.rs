//! Plugins from the sources of released versions of the boundary, in `tests/frozen`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::paths;

/// The frozen sources of a version.
pub fn sources(version: &str) -> PathBuf {
    paths::workspace().join("tests/frozen").join(version)
}

/// The crate of `version` as it was released, unpacked beside the sources of the frozen plugins. It is made once for each content of the
/// archive, below the folder of the build.
///
/// # Panics
/// When it can't be unpacked.
pub fn unpacked(version: &str) -> PathBuf {
    let (from, archive) = (sources(version), archive(version));
    let bytes = std::fs::read(&archive).unwrap_or_else(|error| panic!("{}: {error}", archive.display()));
    let program = std::env::current_exe().expect("the system knows the path of this program");
    let parent = program.parent().expect("a program lies in a folder").join("frozen");
    let folder = parent.join(format!("{version}-{:08x}", crc32c::crc32c(&bytes)));
    if !folder.exists() {
        // Whole or not at all, whatever test comes first.
        std::fs::create_dir_all(&parent).unwrap();
        let fresh = tempfile::tempdir_in(&parent).unwrap();
        run(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(fresh.path()));
        let _ = std::fs::rename(fresh.keep(), &folder);
    }
    for file in ["Cargo.toml", "Cargo.lock", "rust-plugin/Cargo.toml", "rust-plugin/src/lib.rs"] {
        let (from, to) = (from.join(file), folder.join(file));
        let bytes = std::fs::read(&from).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
        // Only when it differs: a fresh file is built again.
        if std::fs::read(&to).ok().as_ref() != Some(&bytes) {
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::write(&to, bytes).unwrap();
        }
    }
    folder
}

/// The archive of the crate, as `cargo package` made it.
pub fn archive(version: &str) -> PathBuf {
    sources(version).join(format!("kvdock-plugin-api-{version}.0.crate"))
}

/// Builds the frozen Rust plugin into `folder`. What it needs was downloaded for the workspace, unless the workspace has moved on since; then cargo
/// downloads it.
///
/// # Panics
/// When it can't be built.
pub fn rust_plugin(version: &str, folder: &Path) -> PathBuf {
    let workspace = unpacked(version);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    run(Command::new(cargo)
        .current_dir(&workspace)
        .args(["build", "--release", "--locked", "--quiet"])
        .env_remove("CARGO_TARGET_DIR"));
    let plugin = folder.join("libfrozen_rust.so");
    std::fs::copy(workspace.join("target/release/libfrozen_rust.so"), &plugin).unwrap();
    plugin
}

/// Builds the frozen C plugin into `folder`, with the header of its version.
///
/// # Panics
/// When it can't be built.
pub fn c_plugin(version: &str, folder: &Path) -> PathBuf {
    let (sources, plugin) = (sources(version), folder.join("libfrozen_c.so"));
    run(Command::new("cc")
        .args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"])
        .args(["-pthread", "-I"])
        .arg(&sources)
        .arg("-o")
        .arg(&plugin)
        .arg(sources.join("c-plugin/plugin.c")));
    plugin
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("can't start {command:?}: {error}"));
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
}
