//! The real services.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use kvdock_tests::process::stand_still;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const RELEASE: &str = "1.2.4";

/// Where the published programs lie.
fn home() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().parent().unwrap();
    let home = root.join(".cache").join(format!("umbp-{RELEASE}")).canonicalize();
    let there = home.as_ref().is_ok_and(|home| home.join("stamp").exists());
    assert!(there, "this test runs the real UMBP {RELEASE}; `cargo xtask setup` fetches it into .cache/umbp-{RELEASE}");
    home.unwrap()
}

fn command(log: &Path) -> Command {
    let log = File::options().create(true).append(true).open(log).unwrap();
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peer/run.sh"));
    command.arg(home()).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    command
}

/// A running server of a node.
pub struct Server {
    child: Child,
    pub scratch: tempfile::TempDir,
    memory: u64,
}

impl Server {
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

    pub fn address(&self) -> String {
        format!("unix://{}", self.scratch.path().join("node.grpc.sock").display())
    }

    pub fn config(&self) -> String {
        json!({"standalone_address": self.address()}).to_string()
    }

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

/// The published Python client in a process of its own.
pub struct Official {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    scratch: tempfile::TempDir,
}

impl Official {
    /// None where there is no CPython 3.12, for which it is made.
    pub fn start(server: &Server) -> Option<Official> {
        let scratch = tempfile::tempdir().unwrap();
        let mut child = command(&scratch.path().join("client.log"))
            .arg("client")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut official = Official { child, input, output, scratch };
        let answer = official.ask(&json!({"op": "connect", "address": server.address()}));
        let Some(answer) = answer else {
            assert_eq!(official.child.wait().unwrap().code(), Some(3), "{}", official.log());
            return None;
        };
        assert_eq!(answer["ok"], json!(true), "{answer}");
        Some(official)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("client.log")).unwrap_or_default()
    }

    /// The answer; none when the client has ended.
    pub fn ask(&mut self, request: &Value) -> Option<Value> {
        writeln!(self.input, "{request}").ok()?;
        let mut line = String::new();
        (self.output.read_line(&mut line).unwrap() > 0).then(|| serde_json::from_str(&line).unwrap())
    }
}

impl Drop for Official {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port that is this process's alone among those of tests. It is none that the kernel gives out by itself, so a client that keeps asking at it
/// while nobody listens does not meet itself there.
pub struct Port {
    pub number: u16,
    _lock: File,
}

impl Port {
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

/// A running master.
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

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops it where it is.
    pub fn stand_still(&self) {
        kvdock_tests::process::stand_still(Pid::from_child(&self.child));
    }

    /// What its figures say, as text.
    pub fn metrics(&self) -> String {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", self.metrics.number)).unwrap();
        write!(stream, "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
        let mut text = String::new();
        std::io::Read::read_to_string(&mut stream, &mut text).unwrap();
        text
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server of the published programs that is a node of a master too.
pub struct TheirNode {
    pub server: Server,
    pub port: Port,
}

impl TheirNode {
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
