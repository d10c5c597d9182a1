//! The master.

use std::io::{Read, Write};
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{Port, command};
use crate::process::stand_still;

/// A running master.
#[derive(Debug)]
pub struct Master {
    child: Child,
    port: Port,
    metrics: Port,
    scratch: tempfile::TempDir,
    variables: Vec<(&'static str, String)>,
}

impl Master {
    /// Heartbeats are asked for five times a second, and puts stay where they come in unless `variables` say otherwise.
    pub fn start(variables: &[(&'static str, &str)]) -> Master {
        let (scratch, port, metrics) = (tempfile::tempdir().unwrap(), Port::take(), Port::take());
        let mut all = vec![("UMBP_HEARTBEAT_INTERVAL_DIVISOR", "50".to_owned())];
        all.extend(variables.iter().map(|(name, value)| (*name, (*value).to_owned())));
        let child = Master::spawn(scratch.path(), &port, &metrics, &all);
        let mut master = Master { child, port, metrics, scratch, variables: all };
        master.wait();
        master
    }

    fn spawn(scratch: &Path, port: &Port, metrics: &Port, variables: &[(&'static str, String)]) -> Child {
        command(&scratch.join("master.log"))
            .args(["master", &format!("127.0.0.1:{}", port.number), &metrics.number.to_string()])
            .envs(variables.iter().map(|(name, value)| (*name, value.as_str())))
            .spawn()
            .unwrap()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("master.log")).unwrap_or_default()
    }

    fn wait(&mut self) {
        let began = Instant::now();
        while !self.log().contains("[Master] Listening on") {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "the master ended: {ended:?}\n{}", self.log());
            assert!(began.elapsed() < Duration::from_secs(120), "the master does not start\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Where it is called.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port.number)
    }

    /// Settings of a node: 64 MiB of memory in pages of 4 KiB, bytes over TCP, and what `more` says.
    pub fn config(&self, more: Value) -> String {
        let mut config = json!({
            "master_address": self.address(), "node_address": "127.0.0.1", "dram_capacity_bytes": 64 << 20,
            "dram_page_size": 4096, "data_plane": "tcp",
        });
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        config.to_string()
    }

    /// Ends it as kill -9 does.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again, with nothing that it knew.
    pub fn start_again(&mut self) {
        std::fs::remove_file(self.scratch.path().join("master.log")).unwrap();
        self.child = Master::spawn(self.scratch.path(), &self.port, &self.metrics, &self.variables);
        self.wait();
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops it where it is.
    pub fn stand_still(&self) {
        stand_still(Pid::from_child(&self.child));
    }

    /// What its figures say, as text.
    pub fn metrics(&self) -> String {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", self.metrics.number)).unwrap();
        write!(stream, "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
