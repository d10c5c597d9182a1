//! The official client.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{Master, Mode, Process, command};
use crate::process::stand_still;

/// The official client in a process of its own, with a segment or without.
#[derive(Debug)]
pub struct Official {
    process: Process,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    scratch: tempfile::TempDir,
}

impl Official {
    /// Starts one that joins the cluster of a master.
    pub fn start(master: &Master, mode: Mode, segment: u64) -> Official {
        Official::start_over(master, mode, segment, "tcp")
    }

    /// The same, with another protocol. With `rdma` it finds the devices of the stand-in for libibverbs.
    pub fn start_over(master: &Master, mode: Mode, segment: u64, protocol: &str) -> Official {
        Official::with(&master.address(), &master.metadata(mode), segment, protocol, &[])
    }

    /// Starts one with an address of the master as the client takes it, and more environment.
    pub fn join(master: &str, metadata: &str, segment: u64, environment: &[(&str, &str)]) -> Official {
        Official::with(master, metadata, segment, "tcp", environment)
    }

    fn with(master: &str, metadata: &str, segment: u64, protocol: &str, environment: &[(&str, &str)]) -> Official {
        let mut official = Official::idle(environment, protocol == "rdma");
        let answer = official.ask(&json!(["setup", "127.0.0.1", metadata, segment, master, protocol]));
        assert_eq!(answer, json!(0), "the official client does not start\n{}", official.log());
        official
    }

    fn idle(environment: &[(&str, &str)], devices: bool) -> Official {
        let scratch = tempfile::tempdir().expect("there are temporary folders");
        let mut python = command(Path::new("python3"), &scratch.path().join("client.log"));
        if devices {
            python.env("LD_PRELOAD", device_nodes(scratch.path()));
        }
        let mut child = python
            .args(["-c", include_str!("official.py")])
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 can be started");
        let input = child.stdin.take().expect("its input is a pipe");
        let output = BufReader::new(child.stdout.take().expect("its output is a pipe"));
        Official { process: Process(child), input, output, scratch }
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("client.log")).unwrap_or_default()
    }

    fn ask(&mut self, request: &Value) -> Value {
        self.try_ask(request).unwrap_or_else(|| self.ended())
    }

    /// None when the process has ended.
    fn try_ask(&mut self, request: &Value) -> Option<Value> {
        writeln!(self.input, "{request}").ok()?;
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line).ok()? == 0 {
                return None;
            }
            // Its libraries write to standard output too.
            if let Some(answer) = line.strip_prefix("answer ") {
                return serde_json::from_str(answer).ok();
            }
        }
    }

    fn path(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    fn ended(&self) -> ! {
        panic!("the official client ended\n{}", self.log())
    }

    /// Stores one object; 0, or an error code.
    pub fn put(&mut self, key: &str, data: &[u8]) -> i64 {
        self.try_put(key, data).unwrap_or_else(|| self.ended())
    }

    /// The same; none when the process has ended.
    pub fn try_put(&mut self, key: &str, data: &[u8]) -> Option<i64> {
        let path = self.path();
        std::fs::write(&path, data).expect("the folder is ours");
        self.try_ask(&json!(["put", key, path]))?.as_i64()
    }

    /// Reads one object; nothing when there is none.
    pub fn get(&mut self, key: &str) -> Vec<u8> {
        self.try_get(key).unwrap_or_else(|| self.ended())
    }

    /// The same; none when the process has ended.
    pub fn try_get(&mut self, key: &str) -> Option<Vec<u8>> {
        let path = self.path();
        self.try_ask(&json!(["get", key, path]))?;
        std::fs::read(path).ok()
    }

    /// Stores objects of one size, each with a code.
    pub fn batch_put(&mut self, keys: &[String], data: &[Vec<u8>]) -> Vec<i64> {
        self.try_batch_put(keys, data).unwrap_or_else(|| self.ended())
    }

    /// The same; none when the process has ended.
    pub fn try_batch_put(&mut self, keys: &[String], data: &[Vec<u8>]) -> Option<Vec<i64>> {
        let path = self.path();
        std::fs::write(&path, data.concat()).expect("the folder is ours");
        let size = data.first().map_or(0, Vec::len);
        serde_json::from_value(self.try_ask(&json!(["batch_put", keys, path, size]))?).ok()
    }

    /// Reads objects of one size, each with its bytes or a code.
    pub fn batch_get(&mut self, keys: &[String], size: usize) -> (Vec<i64>, Vec<Vec<u8>>) {
        self.try_batch_get(keys, size).unwrap_or_else(|| self.ended())
    }

    /// The same; none when the process has ended.
    pub fn try_batch_get(&mut self, keys: &[String], size: usize) -> Option<(Vec<i64>, Vec<Vec<u8>>)> {
        let path = self.path();
        let codes = serde_json::from_value(self.try_ask(&json!(["batch_get", keys, path, size]))?).ok()?;
        let data = std::fs::read(path).ok()?;
        Some((codes, data.chunks(size).map(<[u8]>::to_vec).collect()))
    }

    /// Which objects are there: 1 or 0 each.
    pub fn exists(&mut self, keys: &[String]) -> Vec<i64> {
        serde_json::from_value(self.ask(&json!(["exists", keys]))).expect("a list of numbers")
    }

    /// Removes an object; 0, or an error code.
    pub fn remove(&mut self, key: &str, force: bool) -> i64 {
        self.ask(&json!(["remove", key, force])).as_i64().expect("a number")
    }

    /// Removes all objects; how many they were.
    pub fn remove_all(&mut self, force: bool) -> i64 {
        self.ask(&json!(["remove_all", force])).as_i64().expect("a number")
    }

    /// Seconds of one put and one get of a batch of so many objects, which are removed again.
    pub fn time_batch(&mut self, objects: usize, size: usize) -> (f64, f64) {
        serde_json::from_value(self.ask(&json!(["time_batch", objects, size]))).expect("two numbers")
    }

    /// Seconds of asking so many times which of the objects are there.
    pub fn time_exists(&mut self, keys: &[String], times: usize) -> f64 {
        self.ask(&json!(["time_exists", keys, times])).as_f64().expect("a number")
    }

    /// Stops the process where it is; its sockets stay open.
    pub fn stand_still(&self) {
        stand_still(Pid::from_child(&self.process.0));
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        kill_process(Pid::from_child(&self.process.0), Signal::CONT).expect("the process is ours");
    }

    /// Ends it as kill -9 does.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }
}

/// Builds what has the official client find the devices of the stand-in for libibverbs.
fn device_nodes(folder: &Path) -> PathBuf {
    let (source, library) = (folder.join("device_nodes.c"), folder.join("device_nodes.so"));
    std::fs::write(&source, include_str!("device_nodes.c")).expect("the folder is ours");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).output();
    let built = built.expect("there is a C compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library
}
