//! The examples outside of the workspace: they build, pass their own tests, and the check.

use std::path::{Path, PathBuf};
use std::process::Command;

use kvdock_tests::paths;

use crate::build::{Installed, argument, cargo, kvdock_plugin, library, text};

fn example(name: &str) -> PathBuf {
    paths::workspace().join("examples").join(name)
}

fn passes(file: &Path) {
    let checked = kvdock_plugin(&["check", argument(file)]);
    assert!(checked.status.success(), "{}", text(&checked));
}

#[test]
fn the_example_on_redb_passes_its_tests_and_the_check() {
    cargo(&example("redb"), &["test", "--release"]);
    passes(&library(&example("redb"), "libkvdock_plugin_redb.so").file);
}

#[test]
fn the_small_example_in_rust_passes_the_check() {
    // As it is in the tree, with the versions that it locks.
    cargo(&example("rust-minimal"), &["build", "--release", "--lib", "--locked"]);
    passes(&library(&example("rust-minimal"), "libkvdock_rust_minimal.so").file);
}

#[test]
fn the_example_in_c_passes_the_check() {
    let out = tempfile::tempdir().unwrap();
    let made = Command::new("make")
        .args(["--always-make", "-C", argument(&example("c-minimal")), &format!("OUT={}", out.path().display())])
        .output()
        .unwrap_or_else(|error| panic!("make and cc are needed for this test: {error}"));
    assert!(made.status.success(), "{}", text(&made));
    passes(&Installed::new(&out.path().join("libkvdock_c_memory.so")).file);
}

#[test]
fn what_info_says_of_an_example() {
    let plugin = library(&example("redb"), "libkvdock_plugin_redb.so");
    let info = kvdock_plugin(&["info", argument(&plugin.file)]);
    let text = text(&info);
    assert!(info.status.success(), "{text}");
    for part in ["redb", "abi           0.1", "clear_everything", "path: string, required", "sync: boolean = true"] {
        assert!(text.contains(part), "{part:?} is missing in\n{text}");
    }
}
