//! A `kvdock serve` under test.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::client::Client;
use crate::paths;

/// How long a start or a stop may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a server is started with.
#[derive(Clone, Default)]
pub struct Launch {
    storage: Option<PathBuf>,
    set: BTreeMap<String, String>,
    wrapper: Vec<String>,
}

impl Launch {
    /// The small model on a free port, no storage tier, pools that hold a few thousand tokens.
    pub fn new() -> Self {
        Self::default().set("cache.device_tokens", 8192).set("cache.host_tokens", 16384)
    }

    /// As `new`, in linker mode.
    pub fn linked() -> Self {
        Self::default().set("cache.mode", "\"linker\"").set("cache.device_tokens", 8192)
    }

    /// Keeps pages in `folder` with the file plugin.
    pub fn storage(mut self, folder: &Path) -> Self {
        self.storage = Some(folder.to_path_buf());
        self
    }

    /// Sets a config key; `value` is TOML.
    pub fn set(mut self, key: &str, value: impl ToString) -> Self {
        self.set.insert(key.to_owned(), value.to_string());
        self
    }

    /// Starts the server through another program, such as `unshare`.
    pub fn through(mut self, wrapper: &[&str]) -> Self {
        self.wrapper = wrapper.iter().map(|part| (*part).to_owned()).collect();
        self
    }

    /// Starts the server and waits until it listens.
    pub fn start(&self) -> Server {
        let server = self.spawn();
        server.wait_until_ready();
        server
    }

    /// Starts the server and answers at once.
    pub fn spawn(&self) -> Server {
        let program = paths::kvdock();
        let mut command = match self.wrapper.split_first() {
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(&program);
                command
            }
            None => Command::new(&program),
        };
        command.arg("serve");
        let set = |command: &mut Command, key: &str, value: &str| {
            command.args(["--set", &format!("{key}={value}")]);
        };
        if !self.set.contains_key("model.path") {
            set(&mut command, "model.path", &quoted(&paths::model()));
        }
        set(&mut command, "server.port", "0");
        if let Some(folder) = &self.storage {
            let plugins = paths::file_plugin();
            let folder_of_plugins = plugins.parent().expect("the plugin lies in a folder");
            set(&mut command, "storage.backend", "\"file\"");
            set(&mut command, "storage.plugin_path", &format!("[{}]", quoted(folder_of_plugins)));
            set(&mut command, "storage.file.dir", &quoted(folder));
            // How full the disk of the machine is must not matter.
            set(&mut command, "storage.file.min_free_bytes", "0");
        }
        for (key, value) in &self.set {
            set(&mut command, key, value);
        }
        // A setting of the shell that runs the tests must not reach the server.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("KVDOCK_") {
                command.env_remove(&name);
            }
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("can't start {}: {error}", show(&command)));
        let log = Arc::new(Log::default());
        let stderr = child.stderr.take().expect("standard error is a pipe");
        let reader = std::thread::spawn({
            let log = Arc::clone(&log);
            move || log.read(stderr)
        });
        Server { child, log, reader: Some(reader) }
    }
}

/// A running server. Dropped, it is killed.
pub struct Server {
    child: Child,
    log: Arc<Log>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Waits for the line that says where it listens.
    pub fn wait_until_ready(&self) {
        if self.log.address(PATIENCE).is_none() {
            panic!("the server does not listen; its log:\n{}", self.log.text());
        }
    }

    /// `http://HOST:PORT`.
    pub fn address(&self) -> String {
        self.log.address(Duration::ZERO).expect("the server listens")
    }

    /// A client of this server.
    pub fn client(&self) -> Client {
        Client::new(&self.address())
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it has logged so far.
    pub fn log(&self) -> String {
        self.log.text()
    }

    /// Resident memory in bytes.
    pub fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("the server runs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("the kernel tells VmRSS");
        let kib: u64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("VmRSS is a number");
        kib * 1024
    }

    /// Stops it with SIGTERM; it must end with success. Answers its log.
    pub fn stop(self) -> String {
        self.signal(Signal::TERM);
        self.stop_after_signal()
    }

    /// Waits for the end after SIGTERM was sent; it must be a success. Answers its log.
    pub fn stop_after_signal(mut self) -> String {
        let status = self.wait();
        let log = self.finished_log();
        assert!(status.success(), "the server ended with {status} after SIGTERM; its log:\n{log}");
        log
    }

    /// Ends it as kill -9 does.
    pub fn kill(mut self) {
        self.signal(Signal::KILL);
        self.wait();
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().cast_signed()).expect("a process id is above 0");
        kill_process(pid, signal).expect("the server is ours");
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("the server is ours") {
                return status;
            }
            assert!(Instant::now() < deadline, "the server does not end; its log:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The whole log, after the end of the process.
    pub fn finished_log(&mut self) -> String {
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        self.log.text()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- log of the server {}:\n{}---", self.pid(), self.log.text());
        }
    }
}

#[derive(Default)]
struct Log {
    state: Mutex<LogState>,
    changed: Condvar,
}

#[derive(Default)]
struct LogState {
    text: String,
    address: Option<String>,
    closed: bool,
}

impl Log {
    fn read(&self, stderr: ChildStderr) {
        for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            let mut state = self.state.lock().expect("no one panics with the log");
            if let Some(address) = line.split("listening on ").nth(1) {
                state.address = Some(address.trim().to_owned());
                self.changed.notify_all();
            }
            state.text.push_str(&line);
            state.text.push('\n');
        }
        self.state.lock().expect("no one panics with the log").closed = true;
        self.changed.notify_all();
    }

    fn text(&self) -> String {
        self.state.lock().expect("no one panics with the log").text.clone()
    }

    /// The address, waiting for it at most `patience`; none if the process ended before.
    fn address(&self, patience: Duration) -> Option<String> {
        let state = self.state.lock().expect("no one panics with the log");
        let waiting = |state: &mut LogState| state.address.is_none() && !state.closed;
        let (state, _) = self.changed.wait_timeout_while(state, patience, waiting).expect("no one panics with the log");
        state.address.clone()
    }
}

fn quoted(path: &Path) -> String {
    let text = path.to_str().expect("the tree lies under a UTF-8 path");
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

fn show(command: &Command) -> String {
    let parts: Vec<&OsStr> = std::iter::once(command.get_program()).chain(command.get_args()).collect();
    format!("{parts:?}")
}
