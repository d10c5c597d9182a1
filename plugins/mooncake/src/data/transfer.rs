//! Many ranges at once, between memory of this process and several peers. The thread that calls moves them: when it returns, nothing
//! touches the memory any more.

use std::sync::Arc;
use std::time::Duration;

use super::frame::Operation;
use super::join;
use super::lane::{Ended, Lane, Load};
use super::peer::{Peer, Peers};
use crate::limit::{Limit, Stop};
use crate::net;

/// A peer that moves nothing for so long is taken for dead.
const PROGRESS: Duration = Duration::from_secs(15);
/// A peer that has moved nothing for so long when a call's time is over is the reason.
const SILENCE: Duration = Duration::from_secs(1);
/// Bytes that are worth another connection.
const LANE_BYTES: u64 = 512 << 10;
/// How often what a refusal or a broken idle connection held up is tried again.
const ROUNDS: usize = 3;

/// One range to move.
#[derive(Debug)]
pub struct Job<'a> {
    /// Where it lies.
    pub peer: Arc<Peer>,
    /// Its first address there.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Memory here; as many bytes.
    pub pieces: &'a [libc::iovec],
}

impl<'a> Job<'a> {
    /// The same job.
    pub(super) fn again(&self) -> Job<'a> {
        Job { peer: self.peer.clone(), address: self.address, len: self.len, pieces: self.pieces }
    }
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All bytes are where they should be.
    Moved,
    /// The peer has no such range.
    Rejected(String),
    /// The peer can't be reached, or went away.
    PeerFailed(String),
    /// The time was over, or the call cancelled. `in_doubt`: the peer may still take bytes of a write that were sent.
    Stopped {
        /// Why.
        stop: Stop,
        /// Whether the peer may still be at it.
        in_doubt: bool,
    },
}

/// Moves the jobs. Each has an outcome.
///
/// # Safety
/// Until this returns, the pieces of the jobs may be read (for a write) or are this call's alone to write (for a read).
pub unsafe fn transfer(peers: &Peers, operation: Operation, jobs: &[Job<'_>], limit: &Limit<'_>) -> Vec<Outcome> {
    let outcomes = match &peers.rdma {
        // SAFETY: the caller's promise.
        Some(rdma) => unsafe { rdma.transfer(peers, operation, jobs, limit) },
        // SAFETY: as above.
        None => unsafe { join::over_tcp(peers, operation, jobs, limit) },
    };
    for (job, _) in jobs.iter().zip(&outcomes).filter(|(_, outcome)| **outcome == Outcome::Moved) {
        job.peer.saw(job.address);
    }
    outcomes
}

/// Moves the jobs over TCP, each by a request of its own.
///
/// # Safety
/// As [`transfer`].
pub(super) unsafe fn over_lanes(
    peers: &Peers,
    operation: Operation,
    jobs: &[Job<'_>],
    limit: &Limit<'_>,
) -> Vec<Outcome> {
    let mut outcomes: Vec<Option<Outcome>> = jobs.iter().map(|_| None).collect();
    let mut open: Vec<usize> = (0..jobs.len()).collect();
    for round in 0..ROUNDS {
        let mut lanes = Vec::new();
        for (peer, numbers) in by_peer(jobs, &open) {
            open_lanes(peers, operation, jobs, &peer, &numbers, limit, &mut lanes, &mut outcomes, round > 0);
        }
        open = run(lanes, limit, &mut outcomes, round + 1 == ROUNDS);
        if open.is_empty() {
            break;
        }
    }
    let left = || Outcome::PeerFailed("the peer closed the connection again and again".to_owned());
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(left)).collect()
}

fn by_peer(jobs: &[Job<'_>], open: &[usize]) -> Vec<(Arc<Peer>, Vec<usize>)> {
    let mut groups: Vec<(Arc<Peer>, Vec<usize>)> = Vec::new();
    for number in open {
        let Some(job) = jobs.get(*number) else { continue };
        match groups.iter_mut().find(|(peer, _)| Arc::ptr_eq(peer, &job.peer)) {
            Some((_, numbers)) => numbers.push(*number),
            None => groups.push((job.peer.clone(), vec![*number])),
        }
    }
    groups
}

#[allow(clippy::too_many_arguments, reason = "the state of one transfer")]
fn open_lanes(
    peers: &Peers,
    operation: Operation,
    jobs: &[Job<'_>],
    peer: &Arc<Peer>,
    numbers: &[usize],
    limit: &Limit<'_>,
    lanes: &mut Vec<Lane>,
    outcomes: &mut [Option<Outcome>],
    again: bool,
) {
    let mut give_up = |numbers: &[usize], outcome: &Outcome| {
        for number in numbers {
            if let Some(place) = outcomes.get_mut(*number) {
                *place = Some(outcome.clone());
            }
        }
    };
    if let Err(stop) = limit.left() {
        return give_up(numbers, &Outcome::Stopped { stop, in_doubt: false });
    }
    if let Some(why) = peer.trouble().filter(|_| !again) {
        return give_up(numbers, &Outcome::PeerFailed(why));
    }
    let holds = |info: &crate::metadata::PeerInfo, number: &usize| {
        jobs.get(*number).is_some_and(|job| info.descriptor.holds(job.address, job.len))
    };
    let mut found = peer.info(peers.metadata(), limit);
    if found.as_ref().is_ok_and(|info| !numbers.iter().all(|number| holds(info, number))) {
        // Its buffers may have changed since it was asked.
        peer.forget();
        found = peer.info(peers.metadata(), limit);
    }
    let info = match found {
        Ok(info) => info,
        Err(why) => {
            peer.failed(&why, Duration::ZERO);
            return give_up(numbers, &Outcome::PeerFailed(why));
        }
    };
    if !info.descriptor.speaks_tcp() {
        let why = format!(
            "peer {} is reached by rdma alone; set protocol = \"rdma\", as all members of a cluster do, or have it lend its memory over tcp",
            peer.endpoint()
        );
        peer.failed(&why, Duration::ZERO);
        return give_up(numbers, &Outcome::PeerFailed(why));
    }
    let (inside, outside): (Vec<usize>, Vec<usize>) = numbers.iter().partition(|number| holds(&info, number));
    give_up(&outside, &Outcome::Rejected(format!("peer {} has no such range", peer.endpoint())));
    let total: u64 = inside.iter().filter_map(|number| jobs.get(*number)).map(|job| job.len).sum();
    let count = (total.div_ceil(LANE_BYTES) as usize).clamp(1, peers.lanes).min(inside.len());
    let share = total.div_ceil(count.max(1) as u64).max(1);
    let mut rest = inside.as_slice();
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = rest.iter().take_while(|number| {
            let room = bytes < share;
            bytes += jobs.get(**number).map_or(0, |job| job.len);
            room
        });
        let (part, later) = rest.split_at(fits.count().max(1));
        rest = later;
        match peer.connect(&info, limit) {
            Ok(stream) => {
                let loads: Vec<Load<'_>> = part
                    .iter()
                    .filter_map(|number| jobs.get(*number).map(|job| (*number, job)))
                    .map(|(number, job)| Load { job: number, address: job.address, len: job.len, pieces: job.pieces })
                    .collect();
                lanes.push(Lane::new(peer.clone(), stream, operation, info.descriptor.tcp_proto_version, &loads));
            }
            Err(why) => {
                peer.failed(&why, Duration::ZERO);
                give_up(part, &Outcome::PeerFailed(why));
            }
        }
    }
}

/// Runs lanes to their end. Gives the jobs that are worth another try.
fn run(mut lanes: Vec<Lane>, limit: &Limit<'_>, outcomes: &mut [Option<Outcome>], last: bool) -> Vec<usize> {
    let mut again = Vec::new();
    let stop = loop {
        for lane in &mut lanes {
            lane.step(|job, how| settle(outcomes, &mut again, job, how, "", last));
            if lane.progress.elapsed() > PROGRESS {
                lane.broken.get_or_insert_with(|| format!("it moved nothing for {} s", PROGRESS.as_secs()));
            }
        }
        let mut at = 0;
        while let Some(lane) = lanes.get(at) {
            if lane.is_over() { end(lanes.swap_remove(at), outcomes, &mut again, last) } else { at += 1 }
        }
        if lanes.is_empty() {
            return again;
        }
        let time = match limit.slice() {
            Ok(time) => time.min(Duration::from_secs(1)),
            Err(stop) => break stop,
        };
        let mut fds: Vec<_> = lanes.iter().map(Lane::poll_fd).collect();
        // What is wrong with a descriptor shows when it is used.
        let _ = net::wait(&mut fds, time);
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        // When the time is over each has a look, whatever it waits for.
        let none = !ready.contains(&true);
        lanes.iter_mut().zip(ready).for_each(|(lane, ready)| lane.is_due = ready || none);
    };
    for lane in lanes {
        let silent = lane.progress.elapsed();
        if stop == Stop::TimedOut && silent > SILENCE {
            let peer = lane.peer.clone();
            peer.failed(
                &format!("peer {}: it moved nothing for {:.1} s", peer.endpoint(), silent.as_secs_f64()),
                silent,
            );
        }
        lane.close(|job, how| {
            if let Some(place) = outcomes.get_mut(job) {
                *place = Some(Outcome::Stopped { stop, in_doubt: how != Ended::Unsent });
            }
        });
    }
    again
}

/// Takes the outcome of a lane that is over.
fn end(lane: Lane, outcomes: &mut [Option<Outcome>], again: &mut Vec<usize>, last: bool) {
    let (peer, why) = (lane.peer.clone(), lane.broken.clone());
    let late = lane.progress.elapsed() > PROGRESS;
    match &why {
        None => peer.worked(),
        // The connection is closed, the peer is well.
        Some(_) if lane.refused => peer.forget(),
        Some(why) => {
            let cost = if late { PROGRESS } else { Duration::ZERO };
            peer.failed(&format!("peer {}: {why}", peer.endpoint()), cost);
        }
    }
    let why = format!("peer {}: {}", peer.endpoint(), why.unwrap_or_default());
    lane.close(|job, how| match how {
        // A silent peer may still take what it was sent.
        Ended::Broken if late => {
            if let Some(place) = outcomes.get_mut(job) {
                *place = Some(Outcome::Stopped { stop: Stop::TimedOut, in_doubt: true });
            }
        }
        how => settle(outcomes, again, job, how, &why, last),
    });
}

fn settle(outcomes: &mut [Option<Outcome>], again: &mut Vec<usize>, job: usize, how: Ended, why: &str, last: bool) {
    let Some(place) = outcomes.get_mut(job) else { return };
    match how {
        Ended::Moved => *place = Some(Outcome::Moved),
        Ended::Rejected => *place = Some(Outcome::Rejected("the peer refused the range".to_owned())),
        Ended::Broken | Ended::Unsent | Ended::InDoubt if last => *place = Some(Outcome::PeerFailed(why.to_owned())),
        // The range before it was refused, or an idle connection had been closed: it may well go through on another one.
        Ended::Broken | Ended::Unsent | Ended::InDoubt => again.push(job),
    }
}
