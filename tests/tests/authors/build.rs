//! Builds plugins as their authors do, and runs the commands for authors.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvdock_tests::paths;
use tempfile::TempDir;

/// Runs cargo on a crate outside of the workspace. All of them share a folder for what is built, because they share most crates.
pub fn cargo(krate: &Path, arguments: &[&str]) -> Output {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    // What the cargo that runs this test has set is meant for the workspace.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_") && text != "CARGO_HOME" {
            command.env_remove(&name);
        }
    }
    let output = command
        .current_dir(krate)
        .env("CARGO_TARGET_DIR", target())
        .env("CARGO_TERM_COLOR", "never")
        // What is built here is run for a moment: it has to be built quickly, and once for the library and the tests.
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
        .env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true")
        .env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true")
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("cargo: {error}"));
    assert!(output.status.success(), "cargo {arguments:?} in {}:\n{}", krate.display(), text(&output));
    output
}

fn target() -> PathBuf {
    paths::build().join("authors")
}

/// Builds the library of a crate, and puts it into a folder that nobody else may write.
pub fn library(krate: &Path, file: &str) -> Installed {
    cargo(krate, &["build", "--release", "--lib"]);
    Installed::new(&target().join("release").join(file))
}

/// A plugin in a folder of its own, installed as the guide says.
pub struct Installed {
    folder: TempDir,
    pub file: PathBuf,
}

impl Installed {
    pub fn new(file: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join(file.file_name().unwrap());
        let from = file.display();
        std::fs::write(&to, std::fs::read(file).unwrap_or_else(|error| panic!("{from}: {error}"))).unwrap();
        Self { folder, file: to }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// Runs `kvdock plugin` with these arguments.
pub fn kvdock_plugin(arguments: &[&str]) -> Output {
    Command::new(paths::kvdock()).arg("plugin").args(arguments).output().unwrap()
}

/// What a command printed.
pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The path as an argument.
pub fn argument(path: &Path) -> &str {
    path.to_str().unwrap()
}
