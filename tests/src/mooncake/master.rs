//! A real master.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Etcd, Port, Process, command, home};

/// How long a start may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// A port that nobody of the tests has may be taken by somebody else before the master does. Then it ends, or never serves.
const TRIES: usize = 5;
/// How long one of these tries may take.
const TRY: Duration = Duration::from_secs(30);
/// Number of the function that says that the RPC serves: the first bytes of the MD5 of `mooncake::WrappedMasterService::ServiceReady`.
const SERVICE_READY: u32 = 0x7b81_bb56;

/// How peers find one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By asking one another.
    Peer,
    /// Through the HTTP metadata server in the master.
    Http,
}

/// A running master.
#[derive(Debug)]
pub struct Master {
    process: Process,
    scratch: tempfile::TempDir,
    /// Port of its RPC.
    pub port: u16,
    /// Port of its figures and its admin interface.
    pub metrics: u16,
    http: u16,
    /// Holds the three numbers.
    _ports: [Port; 3],
    flags: Vec<String>,
}

impl Master {
    /// Starts one and waits until it serves.
    pub fn start(flags: &[&str]) -> Master {
        for _ in 0..TRIES {
            let mut master = Master::begin(flags);
            if master.wait() {
                return master;
            }
            eprintln!("the master does not start; once more with other ports\n{}", master.log());
        }
        panic!("the master does not start");
    }

    /// Starts one of several, that follow one another: it serves when it is its turn.
    pub fn start_of_several(etcd: &Etcd, cluster: &str) -> Master {
        let cluster = format!("--cluster_id={cluster}");
        let endpoints = format!("--etcd_endpoints={}", etcd.endpoint());
        let mut master = Master::begin(&["--enable_ha=true", &endpoints, &cluster]);
        let began = Instant::now();
        while master.role().is_none() {
            assert!(!master.process.has_ended(), "the master ended\n{}", master.log());
            assert!(began.elapsed() < PATIENCE, "the master does not start\n{}", master.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        master
    }

    fn begin(flags: &[&str]) -> Master {
        let scratch = tempfile::tempdir().expect("there are temporary folders");
        let ports = [Port::take(), Port::take(), Port::take()];
        let [port, metrics, http] = [0, 1, 2].map(|at: usize| ports[at].number);
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let process = Master::spawn(scratch.path(), port, metrics, http, &flags);
        Master { process, scratch, port, metrics, http, _ports: ports, flags }
    }

    fn spawn(scratch: &Path, port: u16, metrics: u16, http: u16, flags: &[String]) -> Process {
        let child = command(&home().join("mooncake/mooncake_master"), &scratch.join("master.log"))
            .arg("--rpc_address=127.0.0.1")
            .arg(format!("--rpc_port={port}"))
            .arg("--metrics_host=127.0.0.1")
            .arg(format!("--metrics_port={metrics}"))
            .arg("--enable_http_metadata_server=true")
            .arg(format!("--http_metadata_server_port={http}"))
            .arg("--logtostderr=1")
            .args(flags)
            .spawn()
            .expect("the master can be started");
        Process(child)
    }

    /// Waits until it serves; false when it has ended instead, or does not begin to.
    fn wait(&mut self) -> bool {
        let began = Instant::now();
        while !self.serves() {
            if self.process.has_ended() || began.elapsed() > TRY {
                return false;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        true
    }

    /// Whether it serves: alone, or as the leader of several.
    pub fn serves(&self) -> bool {
        self.admin("health").is_some_and(|health| health["service_ready"] == json!(true))
            && self.answers().unwrap_or(false)
    }

    /// Whether it is a master that answers calls at its port.
    fn answers(&self) -> std::io::Result<bool> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        // Mark, number of the call, function, and the lengths of a message and an attachment that there are not.
        let words = [0x15, 0, SERVICE_READY, 0, 0].map(u32::to_le_bytes);
        stream.write_all(words.as_flattened())?;
        let mut reply = [0; 16];
        stream.read_exact(&mut reply)?;
        Ok(reply[0] == 0x15 && reply[2] == 0)
    }

    /// `leader` or `standby`; none when it does not answer.
    pub fn role(&self) -> Option<String> {
        self.admin("health").and_then(|health| health["role"].as_str().map(str::to_owned))
    }

    fn admin(&self, path: &str) -> Option<Value> {
        let url = format!("http://127.0.0.1:{}/{path}", self.metrics);
        let config = ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(5))).proxy(None).build();
        let mut response = ureq::Agent::from(config).get(&url).call().ok()?;
        serde_json::from_str(&response.body_mut().read_to_string().ok()?).ok()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("master.log")).unwrap_or_default()
    }

    /// `HOST:PORT` of its RPC.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// What clients call their metadata server.
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

    /// Ends it as kill -9 does.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts it again, with nothing that it knew.
    pub fn start_again(&mut self) {
        for _ in 0..TRIES {
            // Its ports are given; who has taken one meanwhile may give it back.
            self.process = Master::spawn(self.scratch.path(), self.port, self.metrics, self.http, &self.flags);
            if self.wait() {
                return;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        panic!("the master does not start again\n{}", self.log());
    }

    /// Whether its RPC port takes connections.
    pub fn is_listening(&self) -> bool {
        TcpStream::connect(("127.0.0.1", self.port)).is_ok()
    }
}
