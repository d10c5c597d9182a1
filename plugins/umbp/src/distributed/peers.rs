//! Other nodes, by the addresses that the master gives.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::runtime::Handle;

use super::data::lane;
use super::limit::Limit;
use super::rpc::Rpc;
use crate::wire::peer::{GetPeerInfoRequest, GetPeerInfoResponse};

/// Time of a question that moves no bytes.
pub const ASK: Duration = Duration::from_secs(10);
/// How long a node that could not be reached is left alone.
const PAUSE: Duration = Duration::from_secs(1);
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

/// Another node.
#[derive(Debug)]
pub struct Peer {
    /// Its address.
    pub address: String,
    /// Calls it.
    pub rpc: Rpc,
    info: Mutex<Option<Arc<Info>>>,
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
        self.forget();
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

    /// What it told of itself may not hold any more.
    pub fn forget(&self) {
        *self.info.lock() = None;
        self.idle.lock().clear();
    }

    /// What it tells of itself; it is asked once.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn info(&self, limit: &Limit<'_>) -> Result<Arc<Info>, String> {
        if let Some(info) = self.info.lock().clone() {
            return Ok(info);
        }
        if let Some(why) = self.trouble() {
            return Err(why);
        }
        let began = Instant::now();
        let answer: Result<GetPeerInfoResponse, _> =
            self.rpc.call("/umbp.UMBPPeer/GetPeerInfo", GetPeerInfoRequest {}, &limit.at_most(ASK));
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
        *self.info.lock() = Some(info.clone());
        Ok(info)
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
    known: Mutex<HashMap<String, Arc<Peer>>>,
}

impl Peers {
    /// None yet.
    pub fn new(handle: &Handle) -> Peers {
        Peers { handle: handle.clone(), known: Mutex::default() }
    }

    /// The node at an address.
    ///
    /// # Errors
    /// When the address is none.
    pub fn at(&self, address: &str) -> Result<Arc<Peer>, String> {
        let mut known = self.known.lock();
        if let Some(peer) = known.get(address) {
            return Ok(peer.clone());
        }
        if known.len() >= MOST {
            known.retain(|_, peer| Arc::strong_count(peer) > 1);
        }
        let peer = Arc::new(Peer {
            address: address.to_owned(),
            rpc: Rpc::new(&self.handle, "node", address)?,
            info: Mutex::default(),
            idle: Mutex::default(),
            trouble: Mutex::default(),
        });
        known.insert(address.to_owned(), peer.clone());
        Ok(peer)
    }
}
