//! Ranges that lie side by side in a peer's memory, as the objects of one put often do: they are moved by one request, which saves the peer a header to
//! read and a status to send for each of them.

use std::sync::Arc;

use super::frame::Operation;
use super::peer::Peers;
use super::transfer::{Job, Outcome, over_lanes};
use crate::limit::Limit;

/// Bytes of a request that are joined at most. One request is moved by one connection, and there may be several.
const MOST: u64 = 512 << 10;

/// Moves the jobs over TCP.
///
/// # Safety
/// As [`super::transfer`].
pub(super) unsafe fn over_tcp(
    peers: &Peers,
    operation: Operation,
    jobs: &[Job<'_>],
    limit: &Limit<'_>,
) -> Vec<Outcome> {
    let groups = side_by_side(jobs);
    if groups.len() == jobs.len() {
        // SAFETY: the caller's promise.
        return unsafe { over_lanes(peers, operation, jobs, limit) };
    }
    let members = |group: &'_ Vec<usize>| group.iter().filter_map(|number| jobs.get(*number)).collect::<Vec<_>>();
    let pieces: Vec<Vec<libc::iovec>> =
        groups.iter().map(|group| members(group).iter().flat_map(|job| job.pieces.iter().copied()).collect()).collect();
    let joined: Vec<Job<'_>> = groups
        .iter()
        .zip(&pieces)
        .filter_map(|(group, pieces)| {
            let (members, len) = (members(group), members(group).iter().map(|job| job.len).sum());
            members.first().map(|first| Job { peer: first.peer.clone(), address: first.address, len, pieces })
        })
        .collect();
    // SAFETY: the pieces are those of the jobs, each once.
    let moved = unsafe { over_lanes(peers, operation, &joined, limit) };
    let mut outcomes: Vec<Option<Outcome>> = jobs.iter().map(|_| None).collect();
    let mut alone = Vec::new();
    for (group, outcome) in groups.iter().zip(moved) {
        // The peer may have each of them, in buffers that lie side by side.
        if group.len() > 1 && matches!(outcome, Outcome::Rejected(_)) {
            alone.extend_from_slice(group);
            continue;
        }
        for number in group {
            if let Some(place) = outcomes.get_mut(*number) {
                *place = Some(outcome.clone());
            }
        }
    }
    if !alone.is_empty() {
        let again: Vec<Job<'_>> = alone.iter().filter_map(|number| jobs.get(*number)).map(Job::again).collect();
        // SAFETY: of what was refused nothing was moved; the rest is the caller's promise.
        for (number, outcome) in alone.iter().zip(unsafe { over_lanes(peers, operation, &again, limit) }) {
            if let Some(place) = outcomes.get_mut(*number) {
                *place = Some(outcome);
            }
        }
    }
    let none = || Outcome::PeerFailed("the range was left out".to_owned());
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(none)).collect()
}

/// Numbers of jobs whose ranges follow one another at a peer, in the order of their addresses.
fn side_by_side(jobs: &[Job<'_>]) -> Vec<Vec<usize>> {
    let place = |number: &usize| jobs.get(*number).map(|job| (Arc::as_ptr(&job.peer), job.address));
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by_key(place);
    let mut groups: Vec<Vec<usize>> = Vec::with_capacity(jobs.len());
    // Where the last group ends, and its bytes.
    let mut end = None;
    let mut bytes = 0u64;
    for number in order {
        let Some(job) = jobs.get(number) else { continue };
        let joins = end == place(&number) && bytes.saturating_add(job.len) <= MOST;
        bytes = if joins { bytes + job.len } else { job.len };
        match groups.last_mut().filter(|_| joins) {
            Some(group) => group.push(number),
            None => groups.push(vec![number]),
        }
        end = job.address.checked_add(job.len).map(|end| (Arc::as_ptr(&job.peer), end));
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Metadata;

    #[test]
    fn ranges_of_a_peer_that_follow_one_another_are_joined_up_to_a_length() {
        let peers = Peers::new(Metadata::Peer, 4);
        let [one, two] = ["a:1", "b:1"].map(|name| peers.get(name));
        let job = |peer: &Arc<super::super::Peer>, address, len| Job { peer: peer.clone(), address, len, pieces: &[] };
        let jobs = [
            job(&one, 300, 100),
            job(&one, 100, 100),
            job(&two, 500, 100),
            job(&one, 200, 100),
            // A gap, the same range twice, one that overlaps.
            job(&one, 1000, 10),
            job(&one, 1000, 10),
            job(&one, 1005, 10),
            job(&one, u64::MAX - 9, 10),
        ];
        let mut groups = side_by_side(&jobs);
        groups.sort();
        assert_eq!(groups, [vec![1, 3, 0], vec![2], vec![4], vec![5], vec![6], vec![7]]);
        let long = [job(&one, 0, MOST - 1), job(&one, MOST - 1, 1), job(&one, MOST, 1), job(&one, MOST + 1, MOST)];
        assert_eq!(side_by_side(&long), [vec![0, 1], vec![2], vec![3]]);
        assert!(side_by_side(&[]).is_empty());
    }
}
