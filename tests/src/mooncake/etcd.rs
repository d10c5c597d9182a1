//! A real etcd, in which several masters agree who leads.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::{Port, Process, command};
use crate::paths;

/// How long a start may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running etcd of one node.
#[derive(Debug)]
pub struct Etcd {
    process: Process,
    scratch: tempfile::TempDir,
    port: Port,
    peer_port: Port,
}

/// The program: the one on the path, or the one that `cargo xtask setup` fetched.
fn program() -> PathBuf {
    let fetched = paths::workspace().join(".cache/etcd/usr/bin/etcd");
    let on_path = std::env::var_os("PATH")
        .and_then(|path| std::env::split_paths(&path).map(|folder| folder.join("etcd")).find(|file| file.exists()));
    let program = on_path.unwrap_or(fetched);
    assert!(program.exists(), "this test runs a real etcd; `cargo xtask setup` fetches it to {}", program.display());
    program
}

impl Etcd {
    /// Starts one and waits until it answers.
    pub fn start() -> Etcd {
        let scratch = tempfile::tempdir().expect("there are temporary folders");
        let (port, peer_port) = (Port::take(), Port::take());
        let process = Etcd::spawn(&scratch, port.number, peer_port.number);
        let mut etcd = Etcd { process, scratch, port, peer_port };
        etcd.wait();
        etcd
    }

    fn spawn(scratch: &tempfile::TempDir, port: u16, peer_port: u16) -> Process {
        let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer_port}"));
        let child = command(&program(), &scratch.path().join("etcd.log"))
            .args(["--name", "one", "--data-dir"])
            .arg(scratch.path().join("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("one={peer}")])
            .spawn()
            .expect("etcd can be started");
        Process(child)
    }

    fn wait(&mut self) {
        let url = format!("http://127.0.0.1:{}/health", self.port.number);
        let config = ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(5))).proxy(None).build();
        let agent = ureq::Agent::from(config);
        let began = Instant::now();
        while agent.get(&url).call().is_err() {
            let log = || std::fs::read_to_string(self.scratch.path().join("etcd.log")).unwrap_or_default();
            assert!(!self.process.has_ended(), "etcd ended\n{}", log());
            assert!(began.elapsed() < PATIENCE, "etcd does not start\n{}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// `HOST:PORT` for clients.
    pub fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.port.number)
    }

    /// Ends it as kill -9 does.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts it again with what it has stored.
    pub fn start_again(&mut self) {
        self.process = Etcd::spawn(&self.scratch, self.port.number, self.peer_port.number);
        self.wait();
    }
}
