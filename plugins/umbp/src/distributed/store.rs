//! Storing objects with one other node.

use std::time::{Duration, Instant};

use kvdock_rdma::{Operation, Outcome};

use super::cluster::Cluster;
use super::data::frame::Status;
use super::data::lane::{self, Fill};
use super::limit::{Limit, Stop};
use super::objects::text;
use super::peers::{ASK, Info, Peer, ROUNDS};
use super::pool::PENDING;
use super::rdma::{Move, moves};
use crate::object::{Piece, Put};
use crate::wire::peer::{
    AllocateSlotRequest, AllocateSlotResponse, BatchAbortSlotsRequest, BatchAllocateSlotsRequest,
    BatchAllocateSlotsResponse, BatchCommitSlotsRequest, BatchSuccessResponse, CommitSlotRequest, allocated, tier,
};

/// What of the time of a place is left when the bytes have to be there.
const MARGIN: Duration = Duration::from_secs(10);

/// Time for a word at the end of a call whose own time may be over.
const PARTING: Duration = Duration::from_secs(1);

fn mark(there: &mut [bool], number: usize, value: bool) {
    if let Some(entry) = there.get_mut(number) {
        *entry = value;
    }
}

/// What became of the bytes for a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    Yes,
    No,
    /// Some may still arrive.
    InDoubt,
}

/// Whether a node has done what it could.
enum Round {
    Done,
    /// What it told of itself may not hold any more.
    Outdated(String),
    Failed,
}

impl Cluster {
    /// Says which of the objects the node has now.
    ///
    /// # Safety
    /// As [`crate::object::Objects::put`].
    pub(super) unsafe fn store_with(&self, id: &str, address: &str, puts: &[&Put], limit: &Limit<'_>) -> Vec<bool> {
        let mut there = vec![false; puts.len()];
        let Ok(peer) = self.node.peers.at(id, address) else { return there };
        if peer.trouble().is_some() {
            return there;
        }
        for round in 1..=ROUNDS {
            let Ok(told) = peer.info(limit) else { break };
            if told.anew {
                self.node.came_anew(id, address);
            }
            if told.info.data.is_none() {
                self.node.is_foreign(id, address);
                break;
            }
            // SAFETY: passed on to the caller.
            match unsafe { self.store_once(&peer, &told.info, puts, &mut there, limit) } {
                Round::Outdated(_) if !told.now && round < ROUNDS => peer.outdated(&told.info),
                Round::Outdated(why) => {
                    peer.failed(&why);
                    break;
                }
                Round::Done | Round::Failed => break,
            }
        }
        there
    }

    /// Stores what is not there yet.
    unsafe fn store_once(
        &self,
        peer: &Peer,
        info: &Info,
        puts: &[&Put],
        there: &mut [bool],
        limit: &Limit<'_>,
    ) -> Round {
        let Some((instance, _)) = info.data else { return Round::Failed };
        // The places are this long the caller's alone.
        let limit = &limit.at_most(PENDING.saturating_sub(MARGIN));
        let asked: Vec<usize> = (0..puts.len()).filter(|at| there.get(*at) == Some(&false)).collect();
        let entries = asked.iter().filter_map(|at| puts.get(*at)).map(|put| AllocateSlotRequest {
            size: put.len(),
            tier: tier::DRAM,
            key: text(&put.name).to_owned(),
            ..AllocateSlotRequest::default()
        });
        let request = BatchAllocateSlotsRequest { entries: entries.collect() };
        let began = Instant::now();
        let path = "/umbp.UMBPPeer/BatchAllocateSlots";
        let slots: BatchAllocateSlotsResponse = match peer.ask_one(instance, path, request, &limit.at_most(ASK)) {
            Ok(slots) => slots,
            Err(failed) => {
                if failed.stop.is_none() {
                    return Round::Outdated(failed.text);
                }
                peer.silent(began, &failed.text);
                return Round::Failed;
            }
        };
        if slots.entries.len() != asked.len() {
            return Round::Failed;
        }
        let mut open: Vec<(usize, &AllocateSlotResponse)> = Vec::new();
        for (number, slot) in asked.into_iter().zip(&slots.entries) {
            match slot.outcome {
                allocated::YES => open.push((number, slot)),
                allocated::ALREADY_EXISTS => mark(there, number, true),
                _ => {}
            }
        }
        if open.is_empty() {
            return Round::Done;
        }
        // SAFETY: passed on to the caller.
        let (sent, mut round) = unsafe { self.send(peer, info, puts, &open, limit) };
        let (mut commit, mut committed, mut abort) = (Vec::new(), Vec::new(), Vec::new());
        for ((number, slot), sent) in open.iter().zip(sent) {
            match sent {
                Sent::Yes => {
                    let key = puts.get(*number).map(|put| text(&put.name).to_owned()).unwrap_or_default();
                    commit.push(CommitSlotRequest { slot_id: slot.slot_id, key });
                    committed.push(*number);
                }
                Sent::No => abort.push(slot.slot_id),
                // Its place must not become another object's as long as bytes for it are on their way.
                Sent::InDoubt => {}
            }
        }
        if !commit.is_empty() {
            let request = BatchCommitSlotsRequest { entries: commit };
            let answer: Result<BatchSuccessResponse, _> =
                peer.ask_one(instance, "/umbp.UMBPPeer/BatchCommitSlots", request, &limit.at_most(ASK));
            match answer {
                Ok(answer) => {
                    committed.into_iter().zip(answer.success).for_each(|(number, good)| mark(there, number, good));
                }
                Err(failed) if failed.is_for_another() => round = Round::Outdated(failed.text),
                Err(_) => {}
            }
        }
        if !abort.is_empty() {
            let request = BatchAbortSlotsRequest { slot_ids: abort };
            // Places that were not given back are free again after a while.
            let _: Result<BatchSuccessResponse, _> =
                peer.ask_one(instance, "/umbp.UMBPPeer/BatchAbortSlots", request, &Limit::within(PARTING));
        }
        round
    }

    unsafe fn send(
        &self,
        peer: &Peer,
        info: &Info,
        puts: &[&Put],
        open: &[(usize, &AllocateSlotResponse)],
        limit: &Limit<'_>,
    ) -> (Vec<Sent>, Round) {
        let mut sent = vec![Sent::No; open.len()];
        // SAFETY: passed on to the caller.
        unsafe { self.send_by_rdma(peer, info, puts, open, limit, &mut sent) };
        let rest: Vec<usize> = (0..open.len()).filter(|at| sent.get(*at) == Some(&Sent::No)).collect();
        let fills: Vec<Fill<'_>> = rest
            .iter()
            .filter_map(|at| open.get(*at))
            .filter_map(|(number, slot)| Some(Fill { slot: slot.slot_id, pieces: &puts.get(*number)?.pieces }))
            .collect();
        if fills.is_empty() || limit.left().is_err() {
            return (sent, Round::Done);
        }
        let Some((instance, address)) = &info.data else { return (sent, Round::Failed) };
        let (mut answers, began) = (Vec::new(), Instant::now());
        let mut round = Round::Done;
        for fresh in [false, true] {
            answers.clear();
            let work = async {
                let (mut stream, used) =
                    peer.connect(*instance, address, fresh).await.map_err(|error| (false, error))?;
                // SAFETY: passed on to the caller.
                match unsafe { lane::fill(&mut stream, &fills, &mut answers) }.await {
                    Ok(()) => {
                        peer.give(*instance, stream);
                        Ok(())
                    }
                    Err(error) => Err((used, error)),
                }
            };
            match self.handle.block_on(limit.race(work)) {
                Ok(Ok(())) => peer.worked(),
                // A connection that had lain idle may have been closed meanwhile.
                Ok(Err((true, _))) if !fresh && answers.is_empty() => continue,
                Ok(Err((_, error))) => round = Round::Outdated(format!("node {}: {error}", peer.address)),
                Err(Stop::TimedOut) => peer.silent(began, &format!("node {}: it takes no bytes", peer.address)),
                Err(Stop::Cancelled) => {}
            }
            break;
        }
        for (at, answer) in rest.into_iter().zip(answers) {
            if let Some(sent) = sent.get_mut(at).filter(|_| answer.status == Status::Done) {
                *sent = Sent::Yes;
            }
        }
        (sent, round)
    }

    unsafe fn send_by_rdma(
        &self,
        peer: &Peer,
        info: &Info,
        puts: &[&Put],
        open: &[(usize, &AllocateSlotResponse)],
        limit: &Limit<'_>,
        sent: &mut [Sent],
    ) {
        let (Some(rdma), Some(reached)) = (&self.node.rdma, &info.rdma) else { return };
        let Some((instance, _)) = info.data else { return };
        let Some(base) = reached.buffers.first().map(|buffer| buffer.address) else { return };
        let (mut all, mut owners): (Vec<Move>, Vec<usize>) = (Vec::new(), Vec::new());
        for (at, (number, slot)) in open.iter().enumerate() {
            let Some(put) = puts.get(*number).filter(|put| put.pieces.iter().all(|piece| rdma.reaches(piece))) else {
                continue;
            };
            let pages: Vec<u32> = slot.pages.iter().map(|page| page.page_index).collect();
            if let Some(list) = moves(base, slot.page_size.max(1), &pages, in_order(&put.pieces)) {
                owners.extend(list.iter().map(|_| at));
                all.extend(list);
            }
        }
        if all.is_empty() {
            return;
        }
        let mut how: Vec<Option<Sent>> = vec![None; open.len()];
        // SAFETY: passed on to the caller.
        let outcomes = unsafe { rdma.transfer((peer, instance), reached, Operation::Write, &all, limit) };
        for (owner, outcome) in owners.into_iter().zip(outcomes) {
            let one = match outcome {
                Outcome::Moved => Sent::Yes,
                Outcome::Stopped { in_doubt: true, .. } => Sent::InDoubt,
                // Late bytes of it would be the same that TCP brings to the same place.
                Outcome::Rejected(_) | Outcome::Failed(_) | Outcome::Unable(_) | Outcome::Stopped { .. } => Sent::No,
            };
            if let Some(all) = how.get_mut(owner) {
                *all = Some(match (*all, one) {
                    (Some(Sent::InDoubt), _) | (_, Sent::InDoubt) => Sent::InDoubt,
                    (Some(Sent::No), _) | (_, Sent::No) => Sent::No,
                    _ => Sent::Yes,
                });
            }
        }
        for (sent, how) in sent.iter_mut().zip(how) {
            *sent = how.unwrap_or(*sent);
        }
    }
}

fn in_order(pieces: &[Piece]) -> impl Iterator<Item = (u64, Piece)> + '_ {
    let mut offset = 0;
    pieces.iter().map(move |piece| {
        let at = offset;
        offset += piece.len as u64;
        (at, *piece)
    })
}
