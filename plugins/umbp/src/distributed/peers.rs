//! Other nodes, by the names and addresses that the master gives.
//!
//! A name, and an address too, may outlive the node that had it: whoever comes after it under both is another incarnation, with another memory and perhaps
//! another place where it serves bytes. So calls say which incarnation they mean, and one that is not there any more is asked for anew.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::runtime::Handle;

use super::data::lane;
use super::limit::Limit;
use super::rpc::{Failed, Rpc};
use crate::wire::peer::{GetPeerInfoRequest, GetPeerInfoResponse};

/// Time of a question that moves no bytes.
pub const ASK: Duration = Duration::from_secs(10);
/// How long a node that could not be reached is left alone.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a node that is none of kvdock is taken for such a one.
pub const FOREIGN: Duration = Duration::from_secs(60);
/// How often one call asks a node anew what it has told of itself.
pub const ROUNDS: usize = 3;
/// Nodes that are remembered.
const MOST: usize = 4096;
/// Connections to a node that wait for their next use.
const IDLE: usize = 8;

/// What a node tells of itself.
#[derive(Debug, Clone)]
pub struct Info {
    /// Which incarnation of it this is, and where it serves bytes; none of a node that is not one of kvdock.
    pub data: Option<(u64, String)>,
    /// How RDMA reaches it.
    pub rdma: Option<Arc<kvdock_rdma::Peer>>,
}

/// What a node has told, and when.
#[derive(Debug, Clone)]
pub struct Told {
    /// What it told.
    pub info: Arc<Info>,
    /// It was asked just now. Else it was asked earlier, and may have ended since.
    pub now: bool,
    /// It is another incarnation than the one that was met before.
    pub anew: bool,
}

#[derive(Debug, Default)]
struct Known {
    info: Option<(Instant, Arc<Info>)>,
    /// The incarnation that was met last.
    met: Option<u64>,
}

/// Another node.
#[derive(Debug)]
pub struct Peer {
    /// Its address.
    pub address: String,
    rpc: Rpc,
    known: Mutex<Known>,
    idle: Mutex<Vec<(u64, TcpStream)>>,
    trouble: Mutex<Option<(Instant, String)>>,
}

impl Peer {
    /// Why it is left alone now, if it is.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().as_ref().filter(|(until, _)| Instant::now() < *until).map(|(_, why)| why.clone())
    }

    /// It could not be reached.
    pub fn failed(&self, why: &str) {
        *self.trouble.lock() = Some((Instant::now() + PAUSE, why.to_owned()));
        // Another incarnation of it may come.
        self.known.lock().info = None;
        self.idle.lock().clear();
    }

    /// It has not answered since then. A question that had hardly any time says nothing.
    pub fn silent(&self, since: Instant, why: &str) {
        if since.elapsed() >= PAUSE {
            self.failed(why);
        }
    }

    /// It answered.
    pub fn worked(&self) {
        *self.trouble.lock() = None;
    }

    /// What it told does not hold, as it seems: it is asked anew, unless somebody else has done so meanwhile.
    pub fn outdated(&self, info: &Arc<Info>) {
        let mut known = self.known.lock();
        if known.info.as_ref().is_some_and(|(_, told)| Arc::ptr_eq(told, info)) {
            known.info = None;
            drop(known);
            self.idle.lock().clear();
        }
    }

    fn told(&self) -> Option<Arc<Info>> {
        let known = self.known.lock();
        let (when, info) = known.info.as_ref()?;
        (info.data.is_some() || when.elapsed() < FOREIGN).then(|| info.clone())
    }

    /// What it tells of itself; an incarnation of it is asked once.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn info(&self, limit: &Limit<'_>) -> Result<Told, String> {
        if let Some(info) = self.told() {
            return Ok(Told { info, now: false, anew: false });
        }
        if let Some(why) = self.trouble() {
            return Err(why);
        }
        let began = Instant::now();
        let answer: Result<GetPeerInfoResponse, _> =
            self.ask("/umbp.UMBPPeer/GetPeerInfo", GetPeerInfoRequest {}, &limit.at_most(ASK));
        let answer = answer.map_err(|failed| {
            match failed.stop {
                None => self.failed(&failed.text),
                Some(_) => self.silent(began, &failed.text),
            }
            failed.text
        })?;
        let node = answer.kvdock.filter(|node| node.version == 1 && !node.data_address.is_empty());
        let info = Arc::new(Info {
            rdma: node.as_ref().and_then(|node| node.rdma.as_ref()).and_then(super::rdma::peer_of),
            data: node.map(|node| (node.instance, node.data_address)),
        });
        let instance = info.data.as_ref().map(|(instance, _)| *instance);
        let mut known = self.known.lock();
        let before = std::mem::replace(&mut known.met, instance);
        known.info = Some((Instant::now(), info.clone()));
        Ok(Told { info, now: true, anew: before.is_some() && before != instance })
    }

    /// Asks whoever is there now something that may be asked twice. A connection that lay idle may have been closed by a node that has ended; another
    /// one may be there.
    ///
    /// # Errors
    /// When there is no answer in time, or it is a refusal.
    pub fn ask<Q, A>(&self, path: &'static str, request: Q, limit: &Limit<'_>) -> Result<A, Failed>
    where
        Q: prost::Message + Clone + 'static,
        A: prost::Message + Default + 'static,
    {
        let began = Instant::now();
        match self.rpc.call(path, request.clone(), limit) {
            Err(failed) if failed.is_broken() && began.elapsed() < PAUSE => self.rpc.call(path, request, limit),
            answer => answer,
        }
    }

    /// Asks one incarnation.
    ///
    /// # Errors
    /// When there is no answer in time, or it is a refusal; [`Failed::is_for_another`] when another one is there.
    pub fn ask_one<Q, A>(&self, instance: u64, path: &'static str, request: Q, limit: &Limit<'_>) -> Result<A, Failed>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        self.rpc.call_one(Some(instance), path, request, limit)
    }

    /// A connection for bytes, and whether it has been used before.
    ///
    /// # Errors
    /// When there is none.
    pub async fn connect(&self, instance: u64, address: &str, fresh: bool) -> std::io::Result<(TcpStream, bool)> {
        let idle = {
            let mut idle = self.idle.lock();
            if fresh {
                idle.clear();
            }
            idle.retain(|(of, _)| *of == instance);
            idle.pop()
        };
        match idle {
            Some((_, stream)) => Ok((stream, true)),
            None => Ok((lane::connect(address, instance).await?, false)),
        }
    }

    /// Takes a connection back on which nothing is under way.
    pub fn give(&self, instance: u64, stream: TcpStream) {
        let mut idle = self.idle.lock();
        if idle.len() < IDLE {
            idle.push((instance, stream));
        }
    }
}

/// All nodes that were met.
#[derive(Debug)]
pub struct Peers {
    handle: Handle,
    known: Mutex<HashMap<(String, String), Arc<Peer>>>,
}

impl Peers {
    /// None yet.
    pub fn new(handle: &Handle) -> Peers {
        Peers { handle: handle.clone(), known: Mutex::default() }
    }

    /// The node of a name at an address. One of another name that was there before is nobody's business.
    ///
    /// # Errors
    /// When the address is none.
    pub fn at(&self, id: &str, address: &str) -> Result<Arc<Peer>, String> {
        let mut known = self.known.lock();
        let key = (id.to_owned(), address.to_owned());
        if let Some(peer) = known.get(&key) {
            return Ok(peer.clone());
        }
        if known.len() >= MOST {
            known.retain(|_, peer| Arc::strong_count(peer) > 1);
        }
        let peer = Arc::new(Peer {
            address: address.to_owned(),
            rpc: Rpc::new(&self.handle, "node", address)?,
            known: Mutex::default(),
            idle: Mutex::default(),
            trouble: Mutex::default(),
        });
        known.insert(key, peer.clone());
        Ok(peer)
    }

    /// These have left: their connections are of no use any more.
    pub fn forget(&self, gone: &[String]) {
        self.known.lock().retain(|(id, _), _| !gone.contains(id));
    }
}
