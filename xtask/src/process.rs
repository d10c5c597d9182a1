//! Running other programs, and saying how long a stage took.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::paths;

/// A command that runs in the root of the workspace and reads no input.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.current_dir(paths::root()).stdin(Stdio::null());
    command
}

/// The cargo that started this program, or the one on the path.
pub fn cargo() -> Command {
    let program = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut cargo = command(&program);
    // Cargo sets these for the program it runs; they'd make a nested build differ from a plain one.
    for name in ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CARGO_PKG_NAME", "CARGO_PKG_VERSION"] {
        cargo.env_remove(name);
    }
    cargo
}

/// Runs `command` to its end.
///
/// # Errors
/// When it can't be started or fails; the error shows the command line.
pub fn run(command: &mut Command) -> Result<()> {
    let line = show(command);
    let status = command.status().with_context(|| format!("can't start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

/// Whether `program` with `arguments` can be started and succeeds; its output is dropped.
pub fn succeeds(program: &str, arguments: &[&str]) -> bool {
    command(program)
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The command line, for messages.
pub fn show(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|part| part.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Runs a named stage and keeps how long it took.
#[derive(Default)]
pub struct Stages {
    done: Vec<(String, f64)>,
}

impl Stages {
    /// Runs `work` as the stage `name`.
    ///
    /// # Errors
    /// Those of `work`, with the stage's name.
    pub fn stage<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        eprintln!("==> {name}");
        let start = Instant::now();
        let outcome = work().with_context(|| format!("stage \"{name}\""));
        self.done.push((name.to_owned(), start.elapsed().as_secs_f64()));
        outcome
    }

    /// One line with every stage and its seconds.
    pub fn summary(&self) -> String {
        let parts: Vec<String> = self.done.iter().map(|(name, seconds)| format!("{name} {seconds:.1} s")).collect();
        format!("stages: {}", parts.join(", "))
    }
}
