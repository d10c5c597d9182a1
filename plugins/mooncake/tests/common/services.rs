//! The real services: master, storage peers, official client.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvdock_plugin_mooncake::limit::Limit;
use kvdock_plugin_mooncake::rpc::Client;
use kvdock_plugin_mooncake::wire::{Rpc, rpc};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const RELEASE: &str = "0.3.13.post1";

/// Where the published programs lie.
pub fn home() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().parent().unwrap();
    let home = root.join(".cache").join(format!("mooncake-{RELEASE}"));
    assert!(
        home.join("mooncake/mooncake_master").exists(),
        "this test runs the real Mooncake {RELEASE}; `cargo xtask setup` fetches it into {}",
        home.display()
    );
    home
}

/// A port that nobody listens on now.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn command(program: &Path, log: &Path) -> Command {
    let log = File::options().create(true).append(true).open(log).unwrap();
    let mut command = Command::new(program);
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .env("MC_TCP_BIND_ADDRESS", "127.0.0.1")
        .env("PYTHONPATH", home());
    command
}

/// How peers find one another in a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Peer,
    Http,
}

/// A running master.
pub struct Master {
    child: Child,
    pub scratch: tempfile::TempDir,
    pub port: u16,
    metrics: u16,
    http: u16,
    flags: Vec<String>,
}

impl Master {
    pub fn start(flags: &[&str]) -> Master {
        let scratch = tempfile::tempdir().unwrap();
        let (port, metrics, http) = (free_port(), free_port(), free_port());
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let child = Master::spawn(scratch.path(), port, metrics, http, &flags);
        let mut master = Master { child, scratch, port, metrics, http, flags };
        master.wait();
        master
    }

    fn spawn(scratch: &Path, port: u16, metrics: u16, http: u16, flags: &[String]) -> Child {
        command(&home().join("mooncake/mooncake_master"), &scratch.join("master.log"))
            .arg("--rpc_address=127.0.0.1")
            .arg(format!("--rpc_port={port}"))
            .arg("--metrics_host=127.0.0.1")
            .arg(format!("--metrics_port={metrics}"))
            .arg("--enable_http_metadata_server=true")
            .arg(format!("--http_metadata_server_port={http}"))
            .arg("--logtostderr=1")
            .args(flags)
            .spawn()
            .unwrap()
    }

    fn wait(&mut self) {
        let client = Client::new(&self.address(), 1).unwrap();
        let log = self.scratch.path().join("master.log");
        let began = Instant::now();
        while client.call::<rpc::ServiceReady>(&rpc::NoArguments, &Limit::within(Duration::from_secs(1))).is_err() {
            let ended = self.child.try_wait().unwrap();
            let text = || std::fs::read_to_string(&log).unwrap_or_default();
            assert!(ended.is_none(), "the master ended: {ended:?}\n{}", text());
            assert!(began.elapsed() < Duration::from_secs(60), "the master does not start\n{}", text());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn metadata(&self, mode: Mode) -> String {
        match mode {
            Mode::Peer => "P2PHANDSHAKE".to_owned(),
            Mode::Http => format!("http://127.0.0.1:{}/metadata", self.http),
        }
    }

    /// Configuration of an instance of the plugin with a segment of so many bytes.
    pub fn config(&self, mode: Mode, segment: u64) -> String {
        json!({
            "master_server_address": self.address(),
            "metadata_server": self.metadata(mode),
            "local_hostname": "127.0.0.1",
            "global_segment_size": segment,
            "master_metrics_port": self.metrics,
        })
        .to_string()
    }

    /// Calls the master past the plugin.
    pub fn call<M: Rpc>(&self, request: &M::Request<'_>) -> M::Reply {
        let client = Client::new(&self.address(), 1).unwrap();
        client.call::<M>(request, &Limit::within(Duration::from_secs(20))).unwrap()
    }

    /// Names of all objects.
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = match self.call::<rpc::GetReplicaListByRegex>(&(".*", "default")) {
            Ok(found) => found.0.into_iter().map(|(key, _)| key).collect(),
            Err(_) => Vec::new(),
        };
        keys.sort();
        keys
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again, with nothing that it knew.
    pub fn start_again(&mut self) {
        self.child = Master::spawn(self.scratch.path(), self.port, self.metrics, self.http, &self.flags);
        self.wait();
    }

    pub fn is_listening(&self) -> bool {
        TcpStream::connect(("127.0.0.1", self.port)).is_ok()
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Builds what has the official client find the devices of the stand-in for libibverbs.
fn device_nodes(folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/device_nodes.c");
    let library = folder.join("device_nodes.so");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library
}

/// A real client in a process of its own, with a segment or without.
pub struct Official {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    scratch: tempfile::TempDir,
}

impl Official {
    pub fn start(master: &Master, mode: Mode, segment: u64) -> Official {
        Official::start_over(master, mode, segment, "tcp")
    }

    pub fn start_over(master: &Master, mode: Mode, segment: u64, protocol: &str) -> Official {
        let scratch = tempfile::tempdir().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/common/official.py");
        let mut python = command(Path::new("python3"), &scratch.path().join("client.log"));
        if protocol == "rdma" {
            python.env("LD_PRELOAD", device_nodes(scratch.path()));
        }
        let mut child = python.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut official = Official { child, input, output, scratch };
        let host = "127.0.0.1";
        let answer = official.ask(&json!(["setup", host, master.metadata(mode), segment, master.address(), protocol]));
        assert_eq!(answer, json!(0), "the official client does not start\n{}", official.log());
        official
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("client.log")).unwrap_or_default()
    }

    fn ask(&mut self, request: &Value) -> Value {
        writeln!(self.input, "{request}").unwrap();
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the official client ended\n{}", self.log());
            // Its libraries write to standard output too.
            if let Some(answer) = line.strip_prefix("answer ") {
                return serde_json::from_str(answer).unwrap();
            }
        }
    }

    fn path(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    pub fn put(&mut self, key: &str, data: &[u8]) -> i64 {
        let path = self.path();
        std::fs::write(&path, data).unwrap();
        self.ask(&json!(["put", key, path])).as_i64().unwrap()
    }

    pub fn get(&mut self, key: &str) -> Vec<u8> {
        let path = self.path();
        self.ask(&json!(["get", key, path]));
        std::fs::read(path).unwrap()
    }

    pub fn batch_put(&mut self, keys: &[String], data: &[Vec<u8>]) -> Vec<i64> {
        let path = self.path();
        std::fs::write(&path, data.concat()).unwrap();
        let answer = self.ask(&json!(["batch_put", keys, path, data[0].len()]));
        serde_json::from_value(answer).unwrap()
    }

    pub fn batch_get(&mut self, keys: &[String], size: usize) -> (Vec<i64>, Vec<Vec<u8>>) {
        let path = self.path();
        let answer = self.ask(&json!(["batch_get", keys, path, size]));
        let data = std::fs::read(path).unwrap();
        (serde_json::from_value(answer).unwrap(), data.chunks(size).map(<[u8]>::to_vec).collect())
    }

    pub fn exists(&mut self, keys: &[String]) -> Vec<i64> {
        serde_json::from_value(self.ask(&json!(["exists", keys]))).unwrap()
    }

    /// Stops the process where it is; its sockets stay open.
    pub fn stand_still(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Official {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
