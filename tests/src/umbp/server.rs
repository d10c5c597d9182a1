//! A node's server.

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::{Master, Port, command};
use crate::process::stand_still;

/// A running server of a node.
#[derive(Debug)]
pub struct Server {
    child: Child,
    /// Its folder, with its sockets.
    pub scratch: tempfile::TempDir,
    memory: u64,
}

impl Server {
    /// Starts one with so many bytes of memory, and waits until it serves.
    pub fn start(memory: u64) -> Server {
        let scratch = tempfile::tempdir().unwrap();
        let child = Server::spawn(scratch.path(), memory);
        let mut server = Server { child, scratch, memory };
        server.wait();
        server
    }

    fn spawn(scratch: &Path, memory: u64) -> Child {
        command(&scratch.join("server.log"))
            .args(["standalone", &format!("unix://{}", scratch.join("node.grpc.sock").display())])
            .env("UMBP_DRAM_CAPACITY", memory.to_string())
            .env("UMBP_EMBEDDED_DRAM_PAGE_SIZE", "4096")
            .spawn()
            .unwrap()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("server.log")).unwrap_or_default()
    }

    fn wait(&mut self) {
        let began = Instant::now();
        while !self.log().contains("[StandaloneServer] running on") {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "the server ended: {ended:?}\n{}", self.log());
            assert!(began.elapsed() < Duration::from_secs(120), "the server does not start\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Where it is called.
    pub fn address(&self) -> String {
        format!("unix://{}", self.scratch.path().join("node.grpc.sock").display())
    }

    /// Configuration of an instance of the plugin that uses it.
    pub fn config(&self) -> String {
        json!({"standalone_address": self.address()}).to_string()
    }

    /// Ends it as kill -9 does.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again, with nothing that it knew.
    pub fn start_again(&mut self) {
        std::fs::remove_file(self.scratch.path().join("server.log")).unwrap();
        self.child = Server::spawn(self.scratch.path(), self.memory);
        self.wait();
    }

    /// Stops the process where it is; its sockets stay open.
    pub fn stand_still(&self) {
        stand_still(Pid::from_child(&self.child));
    }
    /// Lets it go on.
    pub fn go_on(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server of the published programs that is a node of a master too.
#[derive(Debug)]
pub struct TheirNode {
    /// The server.
    pub server: Server,
    /// Where its service is called.
    pub port: Port,
}

impl TheirNode {
    /// Starts one that joins a master under a name.
    pub fn start(master: &Master, id: &str) -> TheirNode {
        let (scratch, port) = (tempfile::tempdir().unwrap(), Port::take());
        let child = command(&scratch.path().join("server.log"))
            .args(["standalone", &format!("unix://{}", scratch.path().join("node.grpc.sock").display())])
            .env("UMBP_DRAM_CAPACITY", (64u64 << 20).to_string())
            .env("UMBP_DISTRIBUTED_DRAM_PAGE_SIZE", "4096")
            .env("UMBP_MASTER_ADDRESS", master.address())
            .env("UMBP_NODE_ID", id)
            .env("UMBP_PEER_SERVICE_PORT", port.number.to_string())
            .spawn()
            .unwrap();
        let mut server = Server { child, scratch, memory: 0 };
        server.wait();
        TheirNode { server, port }
    }
}
