//! Reading objects of one other node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdock_rdma::{Operation, Outcome};

use super::cluster::Cluster;
use super::data::frame::Status;
use super::data::lane;
use super::limit::{Limit, Stop};
use super::objects::text;
use super::peers::{ASK, Peer, ROUNDS};
use super::rdma::{LEASE, Move, Rdma, moves};
use crate::object::{Got, Read};
use crate::wire::peer::{BatchResolveKeysRequest, BatchResolveKeysResponse, DoneResponse, ReleaseRequest, resolved};

/// Time for a word at the end of a call whose own time may be over.
const PARTING: Duration = Duration::from_secs(1);

/// What became of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fetched {
    /// What the node says.
    Got(Got),
    /// The node does not deliver.
    Node(String),
}

/// Why a node has not answered everything over TCP.
struct Broken {
    why: String,
    /// The connection failed. Else the call was stopped here.
    by_node: bool,
}

impl Cluster {
    /// # Safety
    /// As [`crate::object::Objects::get`].
    pub(super) unsafe fn fetch_from(
        &self,
        id: &str,
        address: &str,
        reads: &[&Read],
        limit: &Limit<'_>,
    ) -> Vec<Fetched> {
        let all = |why: String| vec![Fetched::Node(why); reads.len()];
        let peer = match self.node.peers.at(id, address) {
            Ok(peer) => peer,
            Err(why) => return all(why),
        };
        if let Some(why) = peer.trouble() {
            return all(why);
        }
        let mut fetched: Vec<Option<Fetched>> = vec![None; reads.len()];
        let mut rounds = 0;
        let why = loop {
            rounds += 1;
            let told = match peer.info(limit) {
                Ok(told) => told,
                Err(why) => break why,
            };
            if told.anew {
                self.node.came_anew(id, address);
            }
            let Some((instance, data)) = &told.info.data else {
                self.node.is_foreign(id, address);
                // What only such nodes have is not there for us.
                fetched.iter_mut().for_each(|one| *one = Some(one.take().unwrap_or(Fetched::Got(Got::Missing))));
                break String::new();
            };
            if let (Some(rdma), Some(reached)) = (&self.node.rdma, &told.info.rdma) {
                // SAFETY: passed on to the caller.
                unsafe { self.by_rdma(rdma, (&peer, *instance), reached, reads, limit, &mut fetched) };
            }
            let rest: Vec<usize> = (0..reads.len()).filter(|at| fetched.get(*at) == Some(&None)).collect();
            if rest.is_empty() {
                break String::new();
            }
            let part: Vec<&Read> = rest.iter().filter_map(|at| reads.get(*at).copied()).collect();
            let began = Instant::now();
            // SAFETY: passed on to the caller.
            let (answers, broken) = unsafe { self.by_tcp(&peer, *instance, data, &part, limit) };
            let none = answers.is_empty();
            for (at, one) in rest.into_iter().zip(answers) {
                if let Some(entry) = fetched.get_mut(at) {
                    *entry = Some(Fetched::Got(one));
                }
            }
            let Some(Broken { why, by_node }) = broken else {
                peer.worked();
                break String::new();
            };
            if by_node && !told.now && rounds < ROUNDS {
                // It may have been started again since it was asked where it serves bytes.
                peer.outdated(&told.info);
                continue;
            }
            if by_node {
                peer.failed(&why);
            } else if none {
                peer.silent(began, &why);
            }
            break why;
        };
        fetched.into_iter().map(|one| one.unwrap_or_else(|| Fetched::Node(why.clone()))).collect()
    }

    /// Gives the answers that came, from the first read on, and why there are no more.
    unsafe fn by_tcp(
        &self,
        peer: &Peer,
        instance: u64,
        address: &str,
        reads: &[&Read],
        limit: &Limit<'_>,
    ) -> (Vec<Got>, Option<Broken>) {
        let mut answers = Vec::new();
        let mut broken = None;
        for fresh in [false, true] {
            answers.clear();
            let work = async {
                let (mut stream, used) =
                    peer.connect(instance, address, fresh).await.map_err(|error| (false, error))?;
                // SAFETY: passed on to the caller; a future that is not done is dropped before this returns.
                match unsafe { lane::read(&mut stream, reads, &mut answers) }.await {
                    Ok(()) => {
                        peer.give(instance, stream);
                        Ok(())
                    }
                    Err(error) => Err((used, error)),
                }
            };
            broken = match self.handle.block_on(limit.race(work)) {
                Ok(Ok(())) => None,
                // A connection that had lain idle may have been closed meanwhile.
                Ok(Err((true, _))) if !fresh && answers.is_empty() => continue,
                Ok(Err((_, error))) => Some(Broken { why: format!("node {}: {error}", peer.address), by_node: true }),
                Err(Stop::TimedOut) => {
                    Some(Broken { why: format!("node {}: no time is left", peer.address), by_node: false })
                }
                Err(Stop::Cancelled) => Some(Broken { why: "the call was cancelled".to_owned(), by_node: false }),
            };
            break;
        }
        let got = answers.into_iter().zip(reads).map(|(answer, read)| match answer.status {
            Status::Done => Got::Yes,
            Status::Missing => Got::Missing,
            Status::OtherLength => Got::Corrupt(format!("it has {} bytes, not {}", answer.number, read.len)),
            Status::Refused => Got::Failed(format!("node {} has no such ranges", peer.address)),
        });
        (got.collect(), broken)
    }

    /// What RDMA does not bring is left open, for TCP.
    unsafe fn by_rdma(
        &self,
        rdma: &Rdma,
        (peer, instance): (&Peer, u64),
        reached: &Arc<kvdock_rdma::Peer>,
        reads: &[&Read],
        limit: &Limit<'_>,
        fetched: &mut [Option<Fetched>],
    ) {
        let Some(base) = reached.buffers.first().map(|buffer| buffer.address) else { return };
        let registered =
            |at: &usize| reads.get(*at).is_some_and(|read| read.ranges.iter().all(|range| rdma.reaches(&range.piece)));
        let is_open = |at: &usize| fetched.get(*at) == Some(&None);
        let part: Vec<usize> = (0..reads.len()).filter(is_open).filter(registered).collect();
        if part.is_empty() {
            return;
        }
        // The lease runs from when the question was sent.
        let limit = limit.at_most(LEASE);
        let keys = part.iter().filter_map(|at| reads.get(*at)).map(|read| text(&read.name).to_owned()).collect();
        let request = BatchResolveKeysRequest { keys, omit_descs: true, lease_ms: LEASE.as_millis() as u64 };
        let answer: Result<BatchResolveKeysResponse, _> =
            peer.ask_one(instance, "/umbp.UMBPPeer/BatchResolveKeys", request, &limit.at_most(ASK));
        let Ok(answer) = answer else { return };
        // An owner that does not keep them so long may give their pages to others meanwhile.
        if answer.lease_ms >= LEASE.as_millis() as u64 && answer.found.len() == part.len() {
            let (mut all, mut owners): (Vec<Move>, Vec<usize>) = (Vec::new(), Vec::new());
            let mut pages = answer.page_index.as_slice();
            for (number, at) in part.iter().enumerate() {
                let count = answer.page_count.get(number).copied().unwrap_or(0) as usize;
                let (own, later) = pages.split_at_checked(count).unwrap_or((pages, &[]));
                pages = later;
                let (Some(read), Some(entry)) = (reads.get(*at), fetched.get_mut(*at)) else { continue };
                let len = answer.size.get(number).copied().unwrap_or(0);
                if answer.resolve_status.get(number) == Some(&resolved::BUSY) {
                    // It is not in memory there: TCP brings it.
                } else if answer.found.get(number) != Some(&true) {
                    *entry = Some(Fetched::Got(Got::Missing));
                } else if len != read.len {
                    *entry = Some(Fetched::Got(Got::Corrupt(format!("it has {len} bytes, not {}", read.len))));
                } else {
                    let ranges = read.ranges.iter().map(|range| (range.offset, range.piece));
                    if let Some(list) = moves(base, answer.page_size.max(1), own, ranges) {
                        owners.extend(list.iter().map(|_| *at));
                        all.extend(list);
                    }
                }
            }
            // SAFETY: passed on to the caller.
            let outcomes = unsafe { rdma.transfer((peer, instance), reached, Operation::Read, &all, &limit) };
            let mut failed: Option<String> = None;
            for (at, outcome) in owners.iter().zip(outcomes) {
                let Some(entry) = fetched.get_mut(*at) else { continue };
                match (outcome, &*entry) {
                    (Outcome::Moved, None) => *entry = Some(Fetched::Got(Got::Yes)),
                    (Outcome::Moved, _) => {}
                    (Outcome::Rejected(why) | Outcome::Failed(why) | Outcome::Unable(why), _) => {
                        failed.get_or_insert(why.clone());
                        *entry = Some(Fetched::Node(why));
                    }
                    (Outcome::Stopped { .. }, _) => *entry = Some(Fetched::Node("no time is left".to_owned())),
                }
            }
            // A part that failed leaves the whole object to TCP, unless the time is over.
            if let Some(why) = failed {
                let text = format!("node {}: RDMA failed, bytes go over TCP: {why}", peer.address);
                self.node.host.log(kvdock_plugin_api::LogLevel::Warn, "umbp", &text);
                for entry in fetched.iter_mut().filter(|entry| matches!(entry, Some(Fetched::Node(_)))) {
                    if limit.left().is_ok() {
                        *entry = None;
                    }
                }
            }
        }
        if answer.lease_id != 0 {
            let request = ReleaseRequest { lease_id: answer.lease_id };
            // One that is not released ends by itself.
            let _: Result<DoneResponse, _> =
                peer.ask_one(instance, "/kvdock.UmbpNode/Release", request, &Limit::within(PARTING));
        }
    }
}
