//! The sockets of a segment: few threads, each with an epoll of its own, serve any number of peers. A peer that stalls holds up nobody.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdock_rdma::Transport;
use parking_lot::Mutex;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use super::memory::Memory;
use super::session::{DataSession, HandshakeSession, Wants};
use crate::metadata::{Descriptor, handshake};
use crate::net;

/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long after a failing `accept` (no descriptors are left) the next one is tried.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long a connection may be silent before the system asks whether the peer's machine is there still.
const KEEPALIVE: Duration = Duration::from_secs(60);

const DATA: u64 = u64::MAX;
const GREETINGS: u64 = u64::MAX - 1;
const WAKE: u64 = u64::MAX - 2;

/// How many connections there may be, and how long one may do nothing.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Connections at a time.
    pub sessions: usize,
    /// How long one may stand still in the middle of a request.
    pub stalled: Duration,
    /// How long one may wait for its first request.
    pub unused: Duration,
    /// How long one may wait for another request. Official peers keep theirs for as long as they live, and fail one object when they find one
    /// closed, so this is long.
    pub idle: Duration,
    /// When there are as many as there may be, the one that has waited longest makes room for a new one, if it has waited so long.
    pub yields: Duration,
}

/// Most connections at a time, where the process may have as many files open. Official peers hold four each.
const MOST_SESSIONS: usize = 16_384;
/// What part of the files that the process may have open goes to connections at most: the others are needed to serve at all.
const PART_OF_FILES: u64 = 2;
/// What part of the connections there may be more for a moment, until another thread has ended some of its own that are of no use.
const SPARE: usize = 8;

impl Bounds {
    /// As many connections as the limit of open files allows for.
    pub fn of_this_process() -> Bounds {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        Bounds::for_files(limit.current)
    }

    /// For a limit of open files; none is no limit.
    fn for_files(files: Option<u64>) -> Bounds {
        let files = files.unwrap_or(u64::MAX) / PART_OF_FILES;
        Bounds {
            sessions: usize::try_from(files).unwrap_or(MOST_SESSIONS).min(MOST_SESSIONS),
            stalled: Duration::from_secs(60),
            unused: Duration::from_secs(300),
            idle: Duration::from_secs(3600),
            yields: Duration::from_secs(10),
        }
    }
}

/// What peers did.
#[derive(Debug, Default)]
pub struct Figures {
    received: AtomicU64,
    sent: AtomicU64,
    refused: AtomicU64,
}

impl Figures {
    pub(super) fn received(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }
    pub(super) fn sent(&self, bytes: usize) {
        self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }
    pub(super) fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }
    /// Bytes that peers have written here.
    pub fn bytes_received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
    /// Bytes that peers have read here.
    pub fn bytes_sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
    /// Requests for ranges that are not here.
    pub fn requests_refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Shared {
    memory: Arc<Memory>,
    data: Option<TcpListener>,
    greetings: TcpListener,
    descriptor: Mutex<Option<Descriptor>>,
    /// Moves the bytes in place of the data port.
    rdma: Option<Arc<Transport>>,
    figures: Figures,
    stop: AtomicBool,
    sessions: AtomicUsize,
    bounds: Bounds,
    busy: AtomicUsize,
}

/// Threads that serve a segment.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    wakes: Vec<OwnedFd>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Server {
    /// Binds the ports and starts to serve. `handshake_port` 0 takes any.
    ///
    /// # Errors
    /// When a port can't be bound or a thread started; the text says which.
    pub fn start(memory: Arc<Memory>, host: &str, handshake_port: u16, threads: usize) -> Result<Server, String> {
        Server::start_with(memory, host, handshake_port, threads, None, Bounds::of_this_process())
    }

    /// As [`Server::start`]; where RDMA moves the bytes there is no data port, and peers that ask for connections are answered by the
    /// transport.
    ///
    /// # Errors
    /// As [`Server::start`].
    pub fn start_with(
        memory: Arc<Memory>,
        host: &str,
        handshake_port: u16,
        threads: usize,
        rdma: Option<Arc<Transport>>,
        bounds: Bounds,
    ) -> Result<Server, String> {
        let data = match &rdma {
            Some(_) => None,
            None => Some(listen(host, 0).map_err(|error| format!("no data port on {host}: {error}"))?),
        };
        let shared = Arc::new(Shared {
            memory,
            data,
            greetings: listen(host, handshake_port)
                .map_err(|error| format!("no handshake port {handshake_port} on {host}: {error}"))?,
            descriptor: Mutex::default(),
            rdma,
            figures: Figures::default(),
            stop: AtomicBool::new(false),
            sessions: AtomicUsize::new(0),
            bounds,
            busy: AtomicUsize::new(0),
        });
        let mut server = Server { shared, wakes: Vec::new(), threads: Mutex::default() };
        for number in 0..threads.max(1) {
            let fail = |error: io::Error| format!("no thread to serve peers: {error}");
            let wake =
                eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| fail(error.into()))?;
            let mut worker = Worker::new(server.shared.clone(), &wake).map_err(fail)?;
            server.wakes.push(wake);
            let spawned = std::thread::Builder::new()
                .name(format!("kvdock-mc-serve{number}"))
                .spawn(move || worker.run())
                .map_err(fail)?;
            server.threads.lock().push(spawned);
        }
        Ok(server)
    }

    /// Port of the data plane; 0 where it is not TCP.
    pub fn data_port(&self) -> u16 {
        let address = self.shared.data.as_ref().and_then(|data| data.local_addr().ok());
        address.map_or(0, |address| address.port())
    }
    /// Port of handshakes.
    pub fn handshake_port(&self) -> u16 {
        self.shared.greetings.local_addr().map_or(0, |address| address.port())
    }
    /// What is told to peers that ask.
    pub fn describe(&self, descriptor: Descriptor) {
        *self.shared.descriptor.lock() = Some(descriptor);
    }
    /// What peers did.
    pub fn figures(&self) -> &Figures {
        &self.shared.figures
    }

    /// Waits up to `time` for requests under way, then closes all connections and ends the threads.
    pub fn stop(&self, time: Duration) {
        let began = Instant::now();
        while self.shared.busy.load(Ordering::Acquire) > 0 && began.elapsed() < time {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.shared.stop.store(true, Ordering::Release);
        for wake in &self.wakes {
            // A full counter wakes as well.
            let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
        }
        for thread in self.threads.lock().drain(..) {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// Listens on the address of a host if it is one of this machine; else, as behind an address translation, on all.
fn listen(host: &str, port: u16) -> io::Result<TcpListener> {
    let mut addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    addresses.push(SocketAddr::from(([0; 8], port)));
    addresses.push(SocketAddr::from(([0; 4], port)));
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                return Ok(listener);
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Err(error),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[derive(Debug)]
enum Kind {
    Data(DataSession),
    Handshake(HandshakeSession),
}

#[derive(Debug)]
struct Session {
    stream: TcpStream,
    kind: Kind,
    wants: Wants,
    busy: bool,
}

#[derive(Debug)]
struct Worker {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    sessions: HashMap<u64, Session>,
    next: u64,
}

impl Worker {
    fn new(shared: Arc<Shared>, wake: &OwnedFd) -> io::Result<Worker> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let one_of_us = EventFlags::IN | EventFlags::EXCLUSIVE;
        if let Some(data) = &shared.data {
            epoll::add(&epoll, data, EventData::new_u64(DATA), one_of_us)?;
        }
        epoll::add(&epoll, &shared.greetings, EventData::new_u64(GREETINGS), one_of_us)?;
        epoll::add(&epoll, wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Worker { shared, epoll, sessions: HashMap::new(), next: 0 })
    }

    fn run(&mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(64);
        let mut swept = Instant::now();
        while !self.shared.stop.load(Ordering::Acquire) {
            events.clear();
            let time = Timespec { tv_sec: 1, tv_nsec: 0 };
            if epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&time)).is_err() {
                // Interrupted; anything else can't be repaired here, and must not spin.
                std::thread::sleep(Duration::from_millis(1));
            }
            for event in &events {
                match event.data.u64() {
                    WAKE => {}
                    DATA => self.accept(false),
                    GREETINGS => self.accept(true),
                    number => self.step(number),
                }
            }
            // Another thread had none that could make room.
            while self.crowded_by(1) && self.make_room() {}
            if swept.elapsed() > Duration::from_secs(1) {
                swept = Instant::now();
                self.sweep();
            }
        }
        let numbers: Vec<u64> = self.sessions.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.close(number));
    }

    fn accept(&mut self, greeting: bool) {
        loop {
            let listener = if greeting { Some(&self.shared.greetings) } else { self.shared.data.as_ref() };
            let Some(listener) = listener else { return };
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(_) => return std::thread::sleep(ACCEPT_PAUSE),
            };
            let spare = self.shared.bounds.sessions / SPARE + 1;
            if self.crowded_by(0) && !self.make_room() && self.crowded_by(spare) {
                continue;
            }
            let ready = stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true));
            let ready = ready.and_then(|()| net::keep_alive(&stream, KEEPALIVE));
            let number = self.next;
            let data = EventData::new_u64(number);
            if ready.is_err() || epoll::add(&self.epoll, &stream, data, EventFlags::IN).is_err() {
                continue;
            }
            self.next += 1;
            self.shared.sessions.fetch_add(1, Ordering::Relaxed);
            let kind = if greeting {
                Kind::Handshake(HandshakeSession::new())
            } else {
                Kind::Data(DataSession::new(self.shared.memory.clone()))
            };
            self.sessions.insert(number, Session { stream, kind, wants: Wants::Input, busy: false });
            self.step(number);
        }
    }

    fn step(&mut self, number: u64) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let wants = match &mut session.kind {
            Kind::Data(data) => data.step(&session.stream, &self.shared.figures),
            Kind::Handshake(greeting) => greeting.step(&session.stream, |kind, json| {
                if let (handshake::Kind::Connection, Some(rdma)) = (kind, &self.shared.rdma) {
                    return handshake::answer_connection(rdma, json);
                }
                let descriptor = self.shared.descriptor.lock();
                descriptor.as_ref().map_or_else(Vec::new, |own| handshake::answer(kind, own))
            }),
        };
        let busy = matches!(&session.kind, Kind::Data(data) if !data.is_idle());
        if busy != session.busy {
            session.busy = busy;
            if busy {
                self.shared.busy.fetch_add(1, Ordering::AcqRel);
            } else {
                self.shared.busy.fetch_sub(1, Ordering::AcqRel);
            }
        }
        // An error ends a session as a close does; the peer notices by itself.
        match wants.unwrap_or(Wants::Close) {
            Wants::Close => self.close(number),
            wants if wants != session.wants => {
                session.wants = wants;
                let flags = if wants == Wants::Input { EventFlags::IN } else { EventFlags::OUT };
                if epoll::modify(&self.epoll, &session.stream, EventData::new_u64(number), flags).is_err() {
                    self.close(number);
                }
            }
            _ => {}
        }
    }

    fn close(&mut self, number: u64) {
        if let Some(session) = self.sessions.remove(&number) {
            // Closing takes it out of the epoll as well; an error here changes nothing.
            let _ = epoll::delete(&self.epoll, session.stream.as_fd());
            self.shared.sessions.fetch_sub(1, Ordering::Relaxed);
            if session.busy {
                self.shared.busy.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Whether there are as many sessions as there may be, and so many more.
    fn crowded_by(&self, more: usize) -> bool {
        self.shared.sessions.load(Ordering::Relaxed) >= self.shared.bounds.sessions.saturating_add(more)
    }

    /// Ends the session of this thread that has waited longest for a request, so that there is room for another one. Says whether there was one.
    fn make_room(&mut self) -> bool {
        let waits = |(number, session): (&u64, &Session)| match &session.kind {
            Kind::Data(data) if data.is_idle() => Some((data.moved, *number)),
            _ => None,
        };
        let longest = self.sessions.iter().filter_map(waits).min();
        let Some((_, number)) = longest.filter(|(since, _)| since.elapsed() >= self.shared.bounds.yields) else {
            return false;
        };
        self.close(number);
        true
    }

    /// Ends what has stood still for too long.
    fn sweep(&mut self) {
        let bounds = self.shared.bounds;
        let over = |session: &Session| match &session.kind {
            Kind::Handshake(greeting) => greeting.since.elapsed() > HANDSHAKE,
            Kind::Data(data) => {
                let most = match (data.is_idle(), data.used) {
                    (false, _) => bounds.stalled,
                    (true, false) => bounds.unused,
                    (true, true) => bounds.idle,
                };
                data.moved.elapsed() > most
            }
        };
        let numbers: Vec<u64> =
            self.sessions.iter().filter(|(_, session)| over(session)).map(|(number, _)| *number).collect();
        numbers.into_iter().for_each(|number| self.close(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_get_half_of_the_files_that_the_process_may_open() {
        for (files, sessions) in
            [(Some(1024), 512), (Some(1), 0), (Some(1 << 20), MOST_SESSIONS), (None, MOST_SESSIONS)]
        {
            assert_eq!(Bounds::for_files(files).sessions, sessions, "{files:?}");
        }
    }
}
