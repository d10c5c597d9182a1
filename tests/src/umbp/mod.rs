//! The real services of UMBP: a node's server, the master, and the published client.

mod master;
mod official;
mod server;

pub use master::Master;
pub use official::Official;
pub use server::{Server, TheirNode};

pub use crate::port::Port;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::paths;

const RELEASE: &str = "1.2.4";

/// Where the published programs lie.
fn home() -> PathBuf {
    let home = paths::workspace().join(".cache").join(format!("umbp-{RELEASE}")).canonicalize();
    let there = home.as_ref().is_ok_and(|home| home.join("stamp").exists());
    assert!(there, "this test runs the real UMBP {RELEASE}; `cargo xtask setup` fetches it into .cache/umbp-{RELEASE}");
    home.unwrap()
}

/// One of the programs, whose output goes to a file.
fn command(log: &Path) -> Command {
    let log = File::options().create(true).append(true).open(log).unwrap();
    let mut command = Command::new(paths::workspace().join("plugins/umbp/tests/peer/run.sh"));
    command.arg(home()).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    command
}
