//! The real services of Mooncake: master, metadata server, the official client, and etcd for several masters.

mod etcd;
mod master;
mod official;

pub use etcd::Etcd;
pub use master::{Master, Mode};
pub use official::Official;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::paths;
pub use crate::port::Port;

const RELEASE: &str = "0.3.13.post1";

fn folder() -> PathBuf {
    paths::workspace().join(".cache").join(format!("mooncake-{RELEASE}"))
}

/// Whether the published programs were fetched.
pub fn is_here() -> bool {
    folder().join("mooncake/mooncake_master").exists()
}

/// Where the published programs lie.
pub fn home() -> PathBuf {
    let home = folder();
    assert!(
        is_here(),
        "this test runs the real Mooncake {RELEASE}; `cargo xtask setup` fetches it into {}",
        home.display()
    );
    home
}

/// A program whose output goes to a file.
fn command(program: &Path, log: &Path) -> Command {
    let log = File::options().create(true).append(true).open(log).expect("the folder is ours");
    let mut command = Command::new(program);
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("files can be opened twice"))
        .stderr(log)
        .env("MC_TCP_BIND_ADDRESS", "127.0.0.1")
        .env("PYTHONPATH", home());
    command
}

/// A process that ends with its owner.
#[derive(Debug)]
struct Process(Child);

impl Process {
    fn has_ended(&mut self) -> bool {
        !matches!(self.0.try_wait(), Ok(None))
    }

    fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
