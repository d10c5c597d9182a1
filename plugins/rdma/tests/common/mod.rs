//! A process that tests drive, and the side of the test.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvdock_rdma::{
    Config, Description, Exchange, Job, Operation, Outcome, Peer, Registration, RemoteBuffer, Stop, Transport,
};
use kvdock_tests::process::stand_still;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Bytes that each side registers.
pub const LEN: usize = 8 << 20;
/// What peers call the first of them.
const BASE: u64 = 1 << 44;

/// Bytes that belong to a seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed.wrapping_mul(77) + 1);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

/// Waits until something holds.
pub fn within(seconds: u64, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(seconds), "it did not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn transport(config: Config, name: &str) -> Transport {
    Transport::open(config, name).unwrap()
}

/// Memory from the system, whose pages are whole.
pub struct Memory(*mut u8);

// SAFETY: the memory is plain bytes.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Memory {
        // SAFETY: a new mapping, which stays.
        let map = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), LEN, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        assert_ne!(map, libc::MAP_FAILED);
        Memory(map.cast())
    }
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.0
    }
    #[allow(clippy::mut_from_ref, reason = "tests look when nothing is under way")]
    pub fn as_mut_slice(&self) -> &mut [u8] {
        // SAFETY: the mapping has so many bytes.
        unsafe { std::slice::from_raw_parts_mut(self.0, LEN) }
    }
}

/// Asks a process of the folder for connections; counts.
struct Asking {
    folder: PathBuf,
    asked: Mutex<Vec<String>>,
}

impl Exchange for Asking {
    fn exchange(
        &self,
        server: &str,
        request: &Description,
        _limit: kvdock_rdma::Deadline<'_>,
    ) -> Result<Description, String> {
        self.asked.lock().unwrap().push(request.local_nic_path.clone());
        let talk = || -> std::io::Result<String> {
            let mut stream = UnixStream::connect(self.folder.join(server))?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            writeln!(stream, "{}", serde_json::to_string(request)?)?;
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line)?;
            Ok(line)
        };
        let line = talk().map_err(|error| format!("{server}: {error}"))?;
        serde_json::from_str(&line).map_err(|error| format!("{server}: {error}"))
    }
}

/// Answers questions in the folder.
fn listen(folder: &Path, name: &str, transport: Arc<Transport>, answered: Arc<AtomicUsize>) {
    let path = folder.join(name);
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut line = String::new();
            if BufReader::new(&stream).read_line(&mut line).is_err() || line.is_empty() {
                continue;
            }
            answered.fetch_add(1, Ordering::Relaxed);
            let answer = transport.answer(&serde_json::from_str(&line).unwrap());
            let _ = writeln!(&stream, "{}", serde_json::to_string(&answer).unwrap());
        }
    });
}

fn describe(name: &str, transport: &Transport, registration: &Registration) -> Value {
    let devices: Vec<_> = transport.devices().into_iter().map(|device| device.name).collect();
    let buffers: Vec<_> = registration
        .pieces()
        .into_iter()
        .map(|piece| json!([piece.address, piece.len, piece.place, piece.rkeys]))
        .collect();
    json!({"server": name, "devices": devices, "buffers": buffers, "priorities": transport.priorities()})
}

fn peer_of(told: &Value) -> Peer {
    let buffer = |value: &Value| RemoteBuffer {
        address: value[0].as_u64().unwrap(),
        len: value[1].as_u64().unwrap(),
        place: value[2].as_str().unwrap().to_owned(),
        keys: serde_json::from_value(value[3].clone()).unwrap(),
    };
    Peer {
        server: told["server"].as_str().unwrap().to_owned(),
        devices: serde_json::from_value(told["devices"].clone()).unwrap(),
        buffers: told["buffers"].as_array().unwrap().iter().map(buffer).collect(),
        priorities: serde_json::from_value(told["priorities"].clone()).unwrap(),
    }
}

fn limit(time: Duration) -> impl Fn() -> Result<Duration, Stop> {
    let until = Instant::now() + time;
    move || match until.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(Stop::TimedOut),
        left => Ok(left),
    }
}

/// What the other process does: `NAME`, then commands on its input, answers on its output.
pub fn serve() {
    let folder = PathBuf::from(std::env::var_os("KVDOCK_STAND_IN").unwrap());
    let name = std::env::var("KVDOCK_PEER").unwrap();
    let transport = Arc::new(transport(Config::default(), &name));
    listen(&folder, &name, transport.clone(), Arc::default());
    let memory = Memory::new();
    // SAFETY: the memory stays.
    let registration = unsafe { transport.register(memory.as_mut_ptr(), LEN, BASE, true) }.unwrap();
    println!("\nanswer {}", describe(&name, &transport, &registration));
    let asking = Asking { folder: folder.clone(), asked: Mutex::default() };
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let file = folder.join("bytes");
        let answer = match words[..] {
            ["get", at, len] => {
                let (at, len): (usize, usize) = (at.parse().unwrap(), len.parse().unwrap());
                std::fs::write(file, &memory.as_mut_slice()[at..at + len]).unwrap();
                "done".to_owned()
            }
            ["put", at] => {
                let (at, bytes): (usize, _) = (at.parse().unwrap(), std::fs::read(file).unwrap());
                memory.as_mut_slice()[at..at + bytes.len()].copy_from_slice(&bytes);
                "done".to_owned()
            }
            ["forget"] => {
                transport.forget("driver");
                "done".to_owned()
            }
            ["read_from_us"] => {
                let told: Value = serde_json::from_slice(&std::fs::read(folder.join("driver.json")).unwrap()).unwrap();
                let peer = Arc::new(peer_of(&told));
                let pieces = [libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: 4096 }];
                let job = Job { peer, address: BASE, len: 4096, pieces: &pieces };
                // SAFETY: the memory is this process's, and used for nothing else now.
                let outcomes =
                    unsafe { transport.transfer(Operation::Read, &[job], &asking, &limit(Duration::from_secs(20))) };
                format!("{:?}", outcomes[0])
            }
            _ => panic!("unknown command {line}"),
        };
        println!("answer {answer}");
    }
}

/// The other process.
pub struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    folder: PathBuf,
}

impl Other {
    fn start(folder: &Path, name: &str) -> (Other, Peer) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["peer_process", "--exact", "--ignored", "--nocapture"])
            .env("KVDOCK_PEER", name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut other = Other { child, input, output, folder: folder.to_owned() };
        let told: Value = serde_json::from_str(&other.answer()).unwrap();
        let peer = peer_of(&told);
        (other, peer)
    }
    pub fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the other process ended");
            if let Some(answer) = line.strip_prefix("answer ") {
                return answer.trim().to_owned();
            }
        }
    }
    pub fn say_later(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
    }
    pub fn say(&mut self, command: &str) {
        self.say_later(command);
        assert_eq!(self.answer(), "done");
    }
    pub fn get(&mut self, at: usize, len: usize) -> Vec<u8> {
        self.say(&format!("get {at} {len}"));
        std::fs::read(self.folder.join("bytes")).unwrap()
    }
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        std::fs::write(self.folder.join("bytes"), bytes).unwrap();
        self.say(&format!("put {at}"));
    }
    pub fn process(&self) -> u32 {
        self.child.id()
    }
    /// Stops the process where it is; its connections stay.
    pub fn stand_still(&self) {
        stand_still(Pid::from_child(&self.child));
    }
    /// Lets it go on.
    pub fn go_on(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This side, with memory, and the other one.
pub struct Side {
    pub memory: Memory,
    transport: Arc<Transport>,
    _registration: Registration,
    asking: Asking,
    answered: Arc<AtomicUsize>,
    pub peer: Other,
    pub remote: Arc<Peer>,
}

impl Side {
    pub fn new(folder: &Path, config: Config) -> Side {
        let transport = Arc::new(transport(config, "driver"));
        let answered = Arc::default();
        listen(folder, "driver", transport.clone(), Arc::clone(&answered));
        let memory = Memory::new();
        // SAFETY: the memory stays.
        let registration = unsafe { transport.register(memory.as_mut_ptr(), LEN, BASE, true) }.unwrap();
        let told = describe("driver", &transport, &registration).to_string();
        std::fs::write(folder.join("driver.json"), told).unwrap();
        let (peer, remote) = Other::start(folder, "peer");
        let asking = Asking { folder: folder.to_owned(), asked: Mutex::default() };
        let remote = Arc::new(remote);
        Side { memory, transport, _registration: registration, asking, answered, peer, remote }
    }

    pub fn peer_again(&mut self, folder: &Path) {
        let (peer, remote) = Other::start(folder, "peer");
        (self.peer, self.remote) = (peer, Arc::new(remote));
    }

    /// A job that moves the first bytes of the memory here to or from `at` there.
    pub fn whole(&self, at: usize, len: usize) -> Vec<(usize, usize, Vec<libc::iovec>)> {
        vec![(at, len, vec![libc::iovec { iov_base: self.memory.as_mut_ptr().cast(), iov_len: len }])]
    }

    pub fn transfer(
        &self,
        operation: Operation,
        jobs: &[(usize, usize, Vec<libc::iovec>)],
        time: Duration,
    ) -> Vec<Outcome> {
        let jobs: Vec<Job<'_>> = jobs
            .iter()
            .map(|(at, len, pieces)| {
                let address = BASE.wrapping_add(*at as u64);
                Job { peer: self.remote.clone(), address, len: *len as u64, pieces }
            })
            .collect();
        // SAFETY: the memory is the test's.
        unsafe { self.transport.transfer(operation, &jobs, &self.asking, &limit(time)) }
    }

    pub fn write(&mut self, at: usize, data: &[u8]) -> Outcome {
        self.memory.as_mut_slice()[..data.len()].copy_from_slice(data);
        self.transfer(Operation::Write, &self.whole(at, data.len()), Duration::from_secs(30)).remove(0)
    }

    pub fn read(&mut self, at: usize, len: usize) -> (Outcome, Vec<u8>) {
        self.memory.as_mut_slice()[..len].fill(0);
        let outcome = self.transfer(Operation::Read, &self.whole(at, len), Duration::from_secs(30)).remove(0);
        (outcome, self.memory.as_mut_slice()[..len].to_vec())
    }

    /// What the peer is believed to have.
    pub fn tell_of_more(&mut self) {
        let mut remote = (*self.remote).clone();
        if let Some(last) = remote.buffers.last_mut() {
            last.len += 1 << 20;
        }
        self.remote = Arc::new(remote);
    }

    pub fn forget(&self) {
        self.transport.forget("peer");
    }
    pub fn asked(&self) -> usize {
        self.asking.asked.lock().unwrap().len()
    }
    pub fn answered(&self) -> usize {
        self.answered.load(Ordering::Relaxed)
    }
    /// Devices here for which the peer was asked.
    pub fn asked_devices(&self) -> Vec<String> {
        let asked = self.asking.asked.lock().unwrap();
        let mut names: Vec<String> =
            asked.iter().filter_map(|path| Some(path.rsplit_once('@')?.1.to_owned())).collect();
        names.sort();
        names.dedup();
        names
    }
}
