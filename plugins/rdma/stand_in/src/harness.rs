//! How a test runs with the stand-in: the loader reads its variables when a program starts, so the test starts its own program once more.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The built stand-in.
///
/// # Panics
/// When it was not built.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let folder = program.parent().unwrap();
    let name = "libkvdock_verbs_stand_in.so";
    let places = [folder.join(name), folder.parent().unwrap().join(name)];
    let found = places.iter().find(|path| path.exists());
    found.unwrap_or_else(|| panic!("{name} is missing in {}; `cargo xtask test` makes it", folder.display())).clone()
}

/// A folder in which the stand-in is `libibverbs.so.1`.
pub fn install(folder: &Path) {
    std::os::unix::fs::symlink(library(), folder.join("libibverbs.so.1")).unwrap();
}

/// Variables for programs that use the stand-in of a folder.
pub fn set<'a>(command: &'a mut Command, folder: &Path) -> &'a mut Command {
    let mut path = folder.as_os_str().to_owned();
    if let Some(more) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(more);
    }
    command.env("LD_LIBRARY_PATH", path).env("KVDOCK_STAND_IN", folder)
}

/// Runs the body of the test `name` in a process that has the stand-in, with more variables set; the body gets the stand-in's folder.
///
/// # Panics
/// When the body does.
pub fn with_stand_in(name: &str, folder: &Path, variables: &[(&str, &str)], body: impl FnOnce(&Path)) {
    if let Some(folder) = std::env::var_os("KVDOCK_STAND_IN") {
        return body(Path::new(&folder));
    }
    install(folder);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture"]).envs(variables.iter().copied()).stdin(Stdio::null());
    let output = set(&mut command, folder).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{name} failed: {}\n{out}\n{err}", output.status);
    assert!(out.contains("1 passed"), "there is no test {name}\n{out}");
}
