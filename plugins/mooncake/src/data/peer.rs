//! Peers: what is known of them, idle connections to them, and how long one that failed is left alone.

use std::collections::HashMap;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::rdma::Rdma;
use crate::limit::Limit;
use crate::metadata::{Metadata, PeerInfo};
use crate::net;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(2);
/// How long a peer that failed is left alone, at first and at most.
const PAUSE_FIRST: Duration = Duration::from_millis(250);
const PAUSE_LAST: Duration = Duration::from_secs(10);
/// Idle connections that are kept to a peer.
const MOST_IDLE: usize = 16;
/// After this time without use a connection is not used again: something on the way may have forgotten it.
const IDLE_FOR: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Trouble {
    why: String,
    until: Instant,
    pause: Duration,
}

/// How long the master may go on naming memory of a peer that has ended: for its `client_ttl`, which nobody tells.
const ENDED_FOR: Duration = Duration::from_secs(600);

/// What the master says of the memory that a peer has lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It was not asked.
    Unasked,
    /// It knows it.
    Mounted,
    /// It has it under a name that nobody tells: of an official peer that is found by asking it.
    Nameless,
    /// It does not.
    Gone,
    /// It can't say.
    Unknown,
}

/// A peer, by the endpoint that stands in replicas.
#[derive(Debug)]
pub struct Peer {
    endpoint: String,
    standing: Mutex<Standing>,
    /// When it was last looked at.
    looked: Mutex<Option<Instant>>,
    /// An address of its memory that bytes went to or came from; 0 for none.
    address: AtomicU64,
    info: Mutex<Option<Arc<PeerInfo>>>,
    idle: Mutex<Vec<(TcpStream, Instant)>>,
    trouble: Mutex<Option<Trouble>>,
    /// Counts up when what is known of the peer is thrown away.
    pub(super) generation: AtomicU64,
}

impl Peer {
    fn new(endpoint: &str) -> Peer {
        Peer {
            endpoint: endpoint.to_owned(),
            standing: Mutex::new(Standing::Unasked),
            looked: Mutex::default(),
            address: AtomicU64::new(0),
            info: Mutex::default(),
            idle: Mutex::default(),
            trouble: Mutex::default(),
            generation: AtomicU64::new(0),
        }
    }

    /// The endpoint.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// It is being looked at.
    pub fn look(&self) {
        *self.looked.lock() = Some(Instant::now());
    }

    /// Takes note of what the master says of its memory; gives what it said before.
    pub fn stands(&self, now: Standing) -> Standing {
        std::mem::replace(&mut *self.standing.lock(), now)
    }

    /// Bytes went to an address of its memory, or came from there: it has it.
    pub(super) fn saw(&self, address: u64) {
        self.address.store(address, Ordering::Relaxed);
    }

    /// An address of memory that it had when bytes were last moved; 0 for none.
    pub fn address(&self) -> u64 {
        self.address.load(Ordering::Relaxed)
    }

    /// Why the peer is left alone now; none when it is not.
    pub fn trouble(&self) -> Option<String> {
        let trouble = self.trouble.lock();
        trouble.as_ref().filter(|trouble| Instant::now() < trouble.until).map(|trouble| trouble.why.clone())
    }

    /// The peer failed. It is left alone for `least` at least: as long as it has cost.
    pub(super) fn failed(&self, why: &str, least: Duration) {
        let mut trouble = self.trouble.lock();
        let now = Instant::now();
        let pause = match &*trouble {
            // Several connections fail at once when a peer dies: that is one failure.
            Some(known) if now < known.until => return,
            Some(known) => (known.pause * 2).min(PAUSE_LAST),
            None => PAUSE_FIRST,
        };
        let pause = pause.max(least.min(PAUSE_LAST));
        *trouble = Some(Trouble { why: why.to_owned(), until: now + pause, pause });
        drop(trouble);
        self.forget();
    }

    /// The peer works.
    pub(super) fn worked(&self) {
        let mut trouble = self.trouble.lock();
        if trouble.is_some() {
            *trouble = None;
        }
    }

    /// Throws away what is known of it, and its idle connections.
    pub(super) fn forget(&self) {
        *self.info.lock() = None;
        self.idle.lock().clear();
        self.generation.fetch_add(1, Ordering::Relaxed);
    }

    /// What is known of it; asked for when nothing is.
    pub(super) fn info(&self, metadata: &Metadata, limit: &Limit<'_>) -> Result<Arc<PeerInfo>, String> {
        // Held while asking: callers that want the same peer ask once.
        let Some(mut info) = self.info.try_lock_until(limit.until()) else {
            return Err(format!("peer {}: nothing is known of it yet", self.endpoint));
        };
        if let Some(info) = &*info {
            return Ok(info.clone());
        }
        let found = Arc::new(metadata.find(&self.endpoint, &limit.at_most(CONNECT * 2))?);
        *info = Some(found.clone());
        Ok(found)
    }

    /// A connection: an idle one, or a new one.
    pub(super) fn connect(&self, info: &PeerInfo, limit: &Limit<'_>) -> Result<TcpStream, String> {
        loop {
            let Some((stream, since)) = self.idle.lock().pop() else { break };
            if since.elapsed() < IDLE_FOR && !net::is_stale(&stream) {
                return Ok(stream);
            }
        }
        let port = info.descriptor.tcp_data_port;
        let time = limit.left().map_err(|_| format!("peer {}: no time left to connect", self.endpoint))?.min(CONNECT);
        net::connect(&info.host, port, time)
            .map_err(|error| format!("peer {}: no connection to {}:{port}: {error}", self.endpoint, info.host))
    }

    /// Gives a connection back on which nothing is under way.
    pub(super) fn give_back(&self, stream: TcpStream) {
        let mut idle = self.idle.lock();
        if idle.len() < MOST_IDLE {
            idle.push((stream, Instant::now()));
        }
    }
}

/// All peers that replicas have named.
#[derive(Debug)]
pub struct Peers {
    metadata: Metadata,
    known: Mutex<HashMap<String, Arc<Peer>>>,
    /// When a peer was last found to have ended whose pages the master may still name.
    ended: Mutex<Option<Instant>>,
    /// Connections that one call uses to one peer.
    pub(super) lanes: usize,
    /// Moves the bytes to peers that it reaches.
    pub(super) rdma: Option<Rdma>,
}

impl Peers {
    /// None yet.
    pub fn new(metadata: Metadata, lanes: usize) -> Peers {
        Peers { metadata, known: Mutex::default(), ended: Mutex::default(), lanes: lanes.max(1), rdma: None }
    }

    /// The same, with RDMA.
    #[must_use]
    pub fn with_rdma(self, rdma: Option<Rdma>) -> Peers {
        Peers { rdma, ..self }
    }

    /// RDMA, if it is used.
    pub fn rdma(&self) -> Option<&Rdma> {
        self.rdma.as_ref()
    }

    /// How peers are found.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// A peer by its endpoint.
    pub fn get(&self, endpoint: &str) -> Arc<Peer> {
        let mut known = self.known.lock();
        if let Some(peer) = known.get(endpoint) {
            return peer.clone();
        }
        let peer = Arc::new(Peer::new(endpoint));
        known.insert(endpoint.to_owned(), peer.clone());
        peer
    }

    /// Endpoints of peers that are known and well; they are the names of their segments as well, but of official peers that find one another by asking.
    pub fn living(&self) -> Vec<String> {
        let is_well = |peer: &Peer| peer.trouble().is_none() && peer.info.try_lock().is_some_and(|info| info.is_some());
        self.known.lock().iter().filter(|(_, peer)| is_well(peer)).map(|(endpoint, _)| endpoint.clone()).collect()
    }

    /// Throws away all that is known of peers: after the master has started anew, their addresses mean other things.
    pub fn forget_all(&self) {
        for peer in self.known.lock().values() {
            peer.forget();
            peer.stands(Standing::Unasked);
        }
    }

    /// Peers whose memory is to be looked at: those that were not looked at yet, or all, those that wait longest first.
    pub fn to_look_at(&self, all: bool) -> Vec<Arc<Peer>> {
        let is_due = |peer: &&Arc<Peer>| match *peer.standing.lock() {
            Standing::Unasked => true,
            Standing::Mounted | Standing::Nameless | Standing::Gone => all,
            Standing::Unknown => false,
        };
        let mut due: Vec<Arc<Peer>> = self.known.lock().values().filter(is_due).cloned().collect();
        due.sort_by_cached_key(|peer| *peer.looked.lock());
        due
    }

    /// A peer has ended, and the master may still name its memory.
    pub fn has_ended(&self, peer: &Peer) {
        *self.ended.lock() = Some(Instant::now());
        // Whoever comes to its place is another one.
        peer.saw(0);
        peer.forget();
    }

    /// Whether the master may still name memory of a peer that has ended.
    pub fn one_ended_lately(&self) -> bool {
        self.ended.lock().is_some_and(|at| at.elapsed() < ENDED_FOR)
    }

    /// Drops peers that have failed for long, or whose memory the master does not know, and that nobody uses: names of processes that are gone do
    /// not pile up.
    pub fn drop_dead(&self) {
        self.known.lock().retain(|_, peer| {
            let failing = || peer.trouble.lock().as_ref().is_some_and(|trouble| trouble.pause >= PAUSE_LAST);
            let dead = match *peer.standing.lock() {
                // That it goes is to be noticed.
                Standing::Mounted | Standing::Nameless => false,
                Standing::Gone => true,
                Standing::Unasked | Standing::Unknown => failing(),
            };
            let goes = dead && Arc::strong_count(peer) == 1;
            if let Some(rdma) = self.rdma.as_ref().filter(|_| goes) {
                rdma.transport().forget(&peer.endpoint);
            }
            !goes
        });
    }
}
