//! The real services of UMBP: a node's server, the master, and the published client.

mod master;
mod official;
mod server;

pub use master::Master;
pub use official::Official;
pub use server::{Server, TheirNode};

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

/// A port that is this process's alone among those of tests. It is none that the kernel gives out by itself, so a client that keeps asking at it
/// while nobody listens does not meet itself there.
#[derive(Debug)]
pub struct Port {
    /// Its number.
    pub number: u16,
    _lock: File,
}

impl Port {
    /// Takes one.
    pub fn take() -> Port {
        let start = std::process::id().wrapping_mul(97);
        for step in 0..12_000u32 {
            let number = 20_000 + (start.wrapping_add(step) % 12_000) as u16;
            let path = std::env::temp_dir().join(format!("kvdock-test-port-{number}"));
            let Ok(lock) = File::options().create(true).append(true).open(path) else { continue };
            let locked = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive);
            if locked.is_ok() && std::net::TcpListener::bind(("127.0.0.1", number)).is_ok() {
                return Port { number, _lock: lock };
            }
        }
        panic!("there is no free port");
    }
}
