//! The data plane by RDMA: which memory is registered, and how bytes go to pages of other nodes and come from there.
//!
//! It has been tested with a stand-in for libibverbs, and has not run on hardware.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kvdock_plugin_api::Pool as HostPool;
use kvdock_rdma::{Deadline, Description, Exchange, Job, Operation, Outcome, Registration, RemoteBuffer, Transport};
use parking_lot::Mutex;

use super::limit::Limit;
use super::peers::{ASK, Peer};
use crate::object::Piece;
use crate::wire::peer::{ConnectMessage, KvdockBuffer, KvdockRdma};

/// RDMA of this node.
#[derive(Debug)]
pub struct Rdma {
    /// Memory of the host's pools, by their numbers.
    pools: Mutex<HashMap<u32, Vec<Registration>>>,
    /// First addresses of it, and bytes; how often each.
    ranges: Mutex<BTreeMap<(usize, usize), usize>>,
    /// The memory of this node.
    own: Registration,
    transport: Arc<Transport>,
}

/// Bytes that go between memory here and pages of another node.
#[derive(Debug)]
pub struct Move {
    /// First address there.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Memory here.
    pub pieces: Vec<libc::iovec>,
}

struct Asking<'a> {
    peer: &'a Peer,
    instance: u64,
    limit: &'a Limit<'a>,
}

impl Exchange for Asking<'_> {
    fn exchange(&self, _server: &str, request: &Description, _limit: Deadline<'_>) -> Result<Description, String> {
        let description = serde_json::to_string(request).map_err(|error| error.to_string())?;
        let message = ConnectMessage { description };
        let answer: ConnectMessage = self
            .peer
            .ask_one(self.instance, "/kvdock.UmbpNode/Connect", message, &self.limit.at_most(ASK))
            .map_err(|failed| failed.text)?;
        serde_json::from_str(&answer.description).map_err(|error| format!("it answers with no description: {error}"))
    }
}

impl Rdma {
    /// Opens the devices of this machine, and registers the memory of the node.
    ///
    /// # Errors
    /// When there are none, or one refuses the memory.
    ///
    /// # Safety
    /// The memory is mapped until this is gone, and objects in it are found only through the pool.
    pub unsafe fn open(devices: &[String], server: &str, memory: Piece) -> Result<Rdma, String> {
        let config = kvdock_rdma::Config { devices: devices.to_vec(), ..kvdock_rdma::Config::default() };
        let transport = Transport::open(config, server).map_err(|error| error.to_string())?;
        // SAFETY: the caller's promise.
        let own = unsafe { transport.register(memory.base, memory.len, memory.base as u64, true) };
        let own = own.map_err(|error| error.to_string())?;
        Ok(Rdma { pools: Mutex::default(), ranges: Mutex::default(), own, transport: Arc::new(transport) })
    }

    /// The transport.
    pub fn transport(&self) -> &Arc<Transport> {
        &self.transport
    }

    /// What other nodes of kvdock are told.
    pub fn describe(&self) -> KvdockRdma {
        let buffers = self.own.pieces().into_iter().map(|piece| KvdockBuffer {
            address: piece.address,
            len: piece.len,
            place: piece.place,
            keys: piece.rkeys,
        });
        KvdockRdma {
            server: self.transport.server(),
            devices: self.transport.devices().into_iter().map(|device| device.name).collect(),
            buffers: buffers.collect(),
            // It is made of texts, and can always be written.
            priorities: serde_json::to_string(self.transport.priorities()).unwrap_or_default(),
        }
    }

    /// Registers the memory of a pool of the host.
    ///
    /// # Errors
    /// When a device refuses it.
    pub fn register(&self, pool: &HostPool) -> Result<(), String> {
        let mut held = Vec::new();
        for region in pool.regions() {
            let (start, len) = (region.base, usize::try_from(region.len).unwrap_or(usize::MAX));
            // SAFETY: the host keeps the regions of a pool mapped until it has unregistered the pool.
            let registered = unsafe { self.transport.register(start as *mut u8, len, start as u64, false) };
            held.push(registered.map_err(|error| error.to_string())?);
        }
        let mut ranges = self.ranges.lock();
        for region in pool.regions() {
            *ranges.entry((region.base, region.len as usize)).or_default() += 1;
        }
        drop(ranges);
        self.pools.lock().insert(pool.id(), held);
        Ok(())
    }

    /// Forgets the memory of a pool.
    pub fn unregister(&self, pool: &HostPool) {
        if self.pools.lock().remove(&pool.id()).is_none() {
            return;
        }
        let mut ranges = self.ranges.lock();
        for region in pool.regions() {
            let key = (region.base, region.len as usize);
            if let Some(users) = ranges.get_mut(&key) {
                *users -= 1;
                if *users == 0 {
                    ranges.remove(&key);
                }
            }
        }
    }

    /// Whether a piece lies in registered memory.
    pub fn reaches(&self, piece: &Piece) -> bool {
        let start = piece.base as usize;
        let ranges = self.ranges.lock();
        let mut before = ranges.range(..=(start, usize::MAX)).rev().map(|(range, _)| *range);
        before.any(|(base, len)| start + piece.len <= base + len)
    }

    /// Moves bytes between this node and an incarnation of another one. Each has an outcome.
    ///
    /// # Safety
    /// Until this returns, the pieces may be read (for a write) or are this call's alone to write (for a read).
    pub unsafe fn transfer(
        &self,
        (peer, instance): (&Peer, u64),
        reached: &Arc<kvdock_rdma::Peer>,
        operation: Operation,
        moves: &[Move],
        limit: &Limit<'_>,
    ) -> Vec<Outcome> {
        let jobs: Vec<Job<'_>> = moves
            .iter()
            .map(|one| Job { peer: reached.clone(), address: one.address, len: one.len, pieces: &one.pieces })
            .collect();
        let deadline = || limit.slice().map_err(super::limit::Stop::for_rdma);
        // SAFETY: the caller's promise.
        unsafe { self.transport.transfer(operation, &jobs, &Asking { peer, instance, limit }, &deadline) }
    }
}

/// Another node's RDMA, by what it told; none when that makes no sense.
pub fn peer_of(told: &KvdockRdma) -> Option<Arc<kvdock_rdma::Peer>> {
    if told.server.is_empty() || told.devices.is_empty() || told.buffers.is_empty() {
        return None;
    }
    let buffers = told.buffers.iter().map(|buffer| RemoteBuffer {
        address: buffer.address,
        len: buffer.len,
        place: buffer.place.clone(),
        keys: buffer.keys.clone(),
    });
    Some(Arc::new(kvdock_rdma::Peer {
        server: told.server.clone(),
        devices: told.devices.clone(),
        buffers: buffers.collect(),
        priorities: serde_json::from_str(&told.priorities).unwrap_or_default(),
    }))
}

/// How long a reader may take: the owner keeps the objects where they are.
pub const LEASE: Duration = Duration::from_secs(30);

/// Cuts ranges of an object into moves, by the pages that it has there. None when it has not enough of them.
pub fn moves(
    base: u64,
    page_size: u64,
    pages: &[u32],
    ranges: impl Iterator<Item = (u64, Piece)>,
) -> Option<Vec<Move>> {
    let mut moves: Vec<Move> = Vec::new();
    for (mut offset, piece) in ranges {
        let (mut at, end) = (piece.base, piece.base as usize + piece.len);
        while (at as usize) < end {
            let page = pages.get(usize::try_from(offset / page_size).ok()?)?;
            let inside = offset % page_size;
            let part = (page_size - inside).min((end - at as usize) as u64);
            let address = base + u64::from(*page) * page_size + inside;
            let iov = libc::iovec { iov_base: at.cast(), iov_len: part as usize };
            match moves.last_mut() {
                // Pages, and pieces, that follow one another.
                Some(last) if last.address + last.len == address => {
                    last.len += part;
                    match last.pieces.last_mut() {
                        Some(before) if before.iov_base as usize + before.iov_len == at as usize => {
                            before.iov_len += part as usize;
                        }
                        _ => last.pieces.push(iov),
                    }
                }
                _ => moves.push(Move { address, len: part, pieces: vec![iov] }),
            }
            offset += part;
            at = at.wrapping_add(part as usize);
        }
    }
    Some(moves)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_at_pages_and_joined_where_they_follow_one_another() {
        let piece = |base: usize, len| Piece { base: base as *mut u8, len };
        type Shape = (u64, u64, Vec<(usize, usize)>);
        let shape = |moves: Vec<Move>| -> Vec<Shape> {
            let pieces = |one: &Move| one.pieces.iter().map(|piece| (piece.iov_base as usize, piece.iov_len)).collect();
            moves.iter().map(|one| (one.address, one.len, pieces(one))).collect()
        };
        let ranges = [(10u64, piece(1000, 100)), (110, piece(5000, 150))];
        let cut = moves(1 << 20, 100, &[3, 4, 9], ranges.into_iter()).unwrap();
        assert_eq!(
            shape(cut),
            [((1 << 20) + 310, 190, vec![(1000, 100), (5000, 90)]), ((1 << 20) + 900, 60, vec![(5090, 60)]),]
        );
        assert!(moves(0, 100, &[1], [(50u64, piece(8, 51))].into_iter()).is_none());
        assert!(moves(0, 100, &[], std::iter::empty()).unwrap().is_empty());
    }
}
