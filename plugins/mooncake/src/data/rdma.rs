//! The data plane over RDMA: which jobs go over it, and what it needs of this plugin.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kvdock_plugin_api::Pool;
use kvdock_rdma::{Deadline, Description, Exchange, RdmaError, Registration, Transport};
use parking_lot::Mutex;

use super::frame::Operation;
use super::join::over_tcp;
use super::peer::Peers;
use super::transfer::{Job, Outcome};
use crate::limit::{Limit, Stop};
use crate::metadata::{Metadata, handshake};

/// How long a peer may take to answer a question about a connection.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// RDMA of this process.
#[derive(Debug)]
pub struct Rdma {
    /// Memory of pools, by their numbers. It goes before the transport.
    pools: Mutex<HashMap<u32, Vec<Registration>>>,
    transport: Arc<Transport>,
}

/// Asks peers by their handshake ports.
struct Asking<'a> {
    metadata: &'a Metadata,
    limit: &'a Limit<'a>,
}

impl Exchange for Asking<'_> {
    fn exchange(&self, server: &str, request: &Description, _limit: Deadline<'_>) -> Result<Description, String> {
        let limit = self.limit.at_most(HANDSHAKE);
        let (host, port) = self.metadata.handshake_place(server, &limit)?;
        handshake::ask_to_connect(&host, port, request, &limit)
    }
}

fn stop_of(stop: Stop) -> kvdock_rdma::Stop {
    match stop {
        Stop::TimedOut => kvdock_rdma::Stop::TimedOut,
        Stop::Cancelled => kvdock_rdma::Stop::Cancelled,
    }
}

impl Rdma {
    /// Over a transport.
    pub fn new(transport: Transport) -> Rdma {
        Rdma { pools: Mutex::default(), transport: Arc::new(transport) }
    }

    /// The transport.
    pub fn transport(&self) -> &Arc<Transport> {
        &self.transport
    }

    /// Registers the memory of a pool, which lives until the pool is unregistered. Peers do not reach it.
    ///
    /// # Errors
    /// When a device refuses it.
    pub fn register(&self, pool: &Pool) -> Result<(), RdmaError> {
        let mut held = Vec::new();
        for region in pool.regions() {
            let start = region.base as *mut u8;
            let len = usize::try_from(region.len).unwrap_or(usize::MAX);
            // SAFETY: the host keeps the regions of a pool mapped until it has unregistered the pool.
            held.push(unsafe { self.transport.register(start, len, region.base as u64, false) }?);
        }
        self.pools.lock().insert(pool.id(), held);
        Ok(())
    }

    /// Forgets the memory of a pool.
    pub fn unregister(&self, pool: &Pool) {
        self.pools.lock().remove(&pool.id());
    }

    /// Moves the jobs: by RDMA to peers that it reaches, by TCP to others.
    ///
    /// # Safety
    /// As [`super::transfer`].
    pub(super) unsafe fn transfer(
        &self,
        peers: &Peers,
        operation: Operation,
        jobs: &[Job<'_>],
        limit: &Limit<'_>,
    ) -> Vec<Outcome> {
        let mut outcomes: Vec<Option<Outcome>> = jobs.iter().map(|_| None).collect();
        // What a peer refuses is tried once more, after it was asked anew what it has.
        for again in [false, true] {
            let (mut numbers, mut batch, mut by_tcp) = (Vec::new(), Vec::new(), Vec::new());
            for (number, (job, place)) in jobs.iter().zip(&mut outcomes).enumerate() {
                match place {
                    None => {}
                    Some(Outcome::Rejected(_)) if again => {}
                    Some(_) => continue,
                }
                if let Some(why) = job.peer.trouble() {
                    *place = Some(Outcome::PeerFailed(why));
                    continue;
                }
                match job.peer.info(peers.metadata(), limit) {
                    Err(why) => {
                        job.peer.failed(&why, Duration::ZERO);
                        *place = Some(Outcome::PeerFailed(why));
                    }
                    Ok(info) => match &info.over_rdma {
                        Some(peer) => {
                            numbers.push(number);
                            batch.push(kvdock_rdma::Job {
                                peer: peer.clone(),
                                address: job.address,
                                len: job.len,
                                pieces: job.pieces,
                            });
                        }
                        None => by_tcp.push(number),
                    },
                }
            }
            if !batch.is_empty() {
                let way = match operation {
                    Operation::Read => kvdock_rdma::Operation::Read,
                    Operation::Write => kvdock_rdma::Operation::Write,
                };
                let asking = Asking { metadata: peers.metadata(), limit };
                let deadline = || limit.slice().map_err(stop_of);
                // SAFETY: the caller's promise.
                let moved = unsafe { self.transport.transfer(way, &batch, &asking, &deadline) };
                for (number, outcome) in numbers.into_iter().zip(moved) {
                    if let (Some(job), Some(place)) = (jobs.get(number), outcomes.get_mut(number)) {
                        *place = Some(settle(job, outcome));
                    }
                }
            }
            if !by_tcp.is_empty() {
                let list: Vec<Job<'_>> = by_tcp.iter().filter_map(|number| jobs.get(*number)).map(Job::again).collect();
                // SAFETY: the caller's promise.
                let moved = unsafe { over_tcp(peers, operation, &list, limit) };
                for (number, outcome) in by_tcp.into_iter().zip(moved) {
                    if let Some(place) = outcomes.get_mut(number) {
                        *place = Some(outcome);
                    }
                }
            }
            let is_rejected = |outcome: &Option<Outcome>| matches!(outcome, Some(Outcome::Rejected(_)));
            if !outcomes.iter().any(is_rejected) {
                break;
            }
        }
        let left = || Outcome::PeerFailed("it was not moved".to_owned());
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(left)).collect()
    }
}

/// What became of a job, and what it says of its peer.
fn settle(job: &Job<'_>, outcome: kvdock_rdma::Outcome) -> Outcome {
    match outcome {
        kvdock_rdma::Outcome::Moved => {
            job.peer.worked();
            Outcome::Moved
        }
        kvdock_rdma::Outcome::Rejected(why) => {
            job.peer.forget();
            Outcome::Rejected(why)
        }
        kvdock_rdma::Outcome::Failed(why) => {
            job.peer.failed(&why, Duration::ZERO);
            Outcome::PeerFailed(why)
        }
        kvdock_rdma::Outcome::Unable(why) => Outcome::PeerFailed(why),
        kvdock_rdma::Outcome::Stopped { stop, in_doubt } => {
            let stop = match stop {
                kvdock_rdma::Stop::TimedOut => Stop::TimedOut,
                kvdock_rdma::Stop::Cancelled => Stop::Cancelled,
            };
            Outcome::Stopped { stop, in_doubt }
        }
    }
}
