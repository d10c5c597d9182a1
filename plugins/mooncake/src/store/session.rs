//! Objects that are being read: where they lie, and the leases that keep them there for as long as it takes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{MetricKind, PageStatus, Result};

use super::elsewhere::Elsewhere;
use super::items::{Item, Items};
use super::{MOST_NAMES, Store};
use crate::data::{Job, Operation, Outcome, transfer};
use crate::limit::Limit;
use crate::member::{RPC_TIME, Removals, error_of};
use crate::rpc::Ticket;
use crate::wire::types::{Buffer, Place, ReplicaStatus, Replicas};
use crate::wire::{ErrorCode, rpc};

/// An object whose replicas are known.
struct Found<'a> {
    item: &'a Item<'a>,
    /// In memory and whole, the best last, each with its number.
    buffers: Vec<(u64, Buffer)>,
    /// Number and address of each replica that bytes came from.
    used: Vec<(u64, u64)>,
    until: Instant,
    lease: Duration,
    /// Bytes of it came when its lease was over: they may be another object's, unless it has been there all the time.
    overdue: bool,
}

impl Found<'_> {
    /// Whether its bytes have come from places where it still is, and it can be read on from one of them.
    fn is_at(&mut self, replicas: &Replicas) -> bool {
        // One that lies in no memory was read when the session began.
        let in_memory = !self.buffers.is_empty();
        self.buffers.retain(|(replica, buffer)| holds(replicas, (*replica, buffer.address)));
        self.used.iter().all(|used| holds(replicas, *used)) && in_memory != self.buffers.is_empty()
    }
}

/// Objects that are being read.
pub(super) struct Session<'a> {
    store: &'a Store,
    items: &'a Items<'a>,
    found: Vec<Found<'a>>,
    tickets: Vec<Ticket>,
    epoch: u64,
    removals: Removals,
    why: Option<String>,
}

impl<'a> Session<'a> {
    /// Asks where the objects are. From then on the master keeps them there for the time of the lease. Those that are not there have their status.
    ///
    /// # Errors
    /// When the master can't be asked.
    pub fn start(store: &'a Store, items: &'a Items<'a>, limit: &Limit<'_>) -> Result<Session<'a>> {
        let epoch = store.member.epoch.load(Ordering::Acquire);
        let removals = store.member.under_way.removals();
        let mut session = Session { store, items, found: Vec::new(), tickets: Vec::new(), epoch, removals, why: None };
        for list in items.list.chunks(MOST_NAMES) {
            let names = list.iter().map(|item| item.name.as_str()).collect();
            let request = (names, store.member.tenant.as_str());
            // A lease counts from when it was asked for.
            let asked = Instant::now();
            let master = &store.member.master;
            let answer = master.call_with_ticket::<rpc::BatchGetReplicaList>(&request, &limit.at_most(RPC_TIME));
            let (listed, ticket) = answer.map_err(|error| error_of(&error))?;
            session.tickets.push(ticket);
            let mut elsewhere = Vec::new();
            for (item, replicas) in list.iter().zip(listed) {
                match store.usable(item, replicas, asked) {
                    Ok((found, None)) => session.found.push(found),
                    Ok((found, Some(place))) => elsewhere.push((found, place)),
                    Err(status) => item.finish(status),
                }
            }
            session.read_elsewhere(elsewhere, limit);
        }
        Ok(session)
    }

    /// Reads objects that lie in no memory: all of them that later steps would move.
    fn read_elsewhere(&mut self, objects: Vec<(Found<'a>, Elsewhere)>, limit: &Limit<'_>) {
        if objects.is_empty() {
            return;
        }
        let (found, places): (Vec<Found<'a>>, Vec<(&Item<'_>, Elsewhere)>) = objects
            .into_iter()
            .map(|(found, place)| {
                let item = found.item;
                (found, (item, place))
            })
            .unzip();
        let read = self.store.read_elsewhere(self.items, &places, limit);
        for (mut object, read) in found.into_iter().zip(read) {
            match read {
                Ok(()) => {
                    object.overdue = Instant::now() >= object.until;
                    self.found.push(object);
                }
                Err((status, why)) => {
                    self.store.note_failed(&object.item.name);
                    self.why.get_or_insert(why);
                    object.item.finish(status);
                }
            }
        }
    }

    /// Whether nothing is left that could be read.
    pub fn is_over(&self) -> bool {
        self.found.is_empty()
    }

    /// Reads what a step moves of each object, from its best replica; where that fails from another one. Objects that could not be read have
    /// their status, and later steps leave them out.
    pub fn read_step(&mut self, step: usize, limit: &Limit<'_>) {
        self.renew(limit);
        let mut open = std::mem::take(&mut self.found);
        while !open.is_empty() {
            open = self.read_round(step, open, limit);
        }
    }

    /// Gives those that failed and have another replica.
    fn read_round(&mut self, step: usize, found: Vec<Found<'a>>, limit: &Limit<'_>) -> Vec<Found<'a>> {
        let (store, items) = (self.store, self.items);
        let mut jobs = Vec::new();
        let mut remote: Vec<(Found<'a>, usize)> = Vec::new();
        let mut again = Vec::new();
        for object in found {
            let Some((_, buffer)) = object.buffers.last() else {
                // It was read when the session began.
                self.found.push(object);
                continue;
            };
            let spans = items.spans(object.item, step);
            match &store.member.lent {
                // The lease is that the object is there: a marker has no bytes that anybody needs.
                _ if object.item.marker || spans.is_empty() => self.settle(object, None, &mut again),
                Some(lent) if lent.segment.endpoint == buffer.endpoint => {
                    let copied = spans.iter().try_for_each(|span| {
                        // SAFETY: destination pages of an operation are its own to write until it ends.
                        unsafe { lent.memory.read(buffer.address.wrapping_add(span.offset), items.pieces(span)) }
                    });
                    self.settle(object, copied.err().map(|error| error.to_string()), &mut again);
                }
                _ => {
                    let peer = store.member.peers.get(&buffer.endpoint);
                    for span in spans {
                        let address = buffer.address.wrapping_add(span.offset);
                        jobs.push(Job { peer: peer.clone(), address, len: span.len, pieces: items.pieces(span) });
                    }
                    remote.push((object, spans.len()));
                }
            }
        }
        // SAFETY: as above; no byte is in two jobs.
        let mut outcomes = unsafe { transfer(&store.member.peers, Operation::Read, &jobs, limit) }.into_iter();
        let mut jobs = jobs.iter();
        for (object, spans) in remote {
            let in_trouble = jobs.by_ref().take(spans).last().is_some_and(|job| job.peer.trouble().is_some());
            let mut failed = None;
            let mut stopped = false;
            for outcome in outcomes.by_ref().take(spans) {
                match outcome {
                    Outcome::Moved => {}
                    Outcome::Rejected(why) | Outcome::PeerFailed(why) => failed = Some(why),
                    Outcome::Stopped { .. } => stopped = true,
                }
            }
            if stopped {
                if in_trouble {
                    store.note_failed(&object.item.name);
                }
                object.item.finish(PageStatus::Failed);
                continue;
            }
            self.settle(object, failed, &mut again);
        }
        again
    }

    fn settle(&mut self, mut object: Found<'a>, failed: Option<String>, again: &mut Vec<Found<'a>>) {
        let late = Instant::now() >= object.until;
        match failed {
            None => {
                object.overdue |= late;
                self.store.note_good(&object.item.name);
                let from = object.buffers.last().map(|(replica, buffer)| (*replica, buffer.address));
                if object.used.last().copied() != from {
                    object.used.extend(from);
                }
                self.found.push(object);
            }
            Some(_) if object.buffers.len() > 1 => {
                object.buffers.pop();
                again.push(object);
            }
            Some(reason) => {
                self.store.note_failed(&object.item.name);
                self.why.get_or_insert(reason);
                object.item.finish(PageStatus::Failed);
            }
        }
    }

    /// Has the master keep the objects for longer, when the first half of a lease is over: a read in many steps may take longer than a lease.
    fn renew(&mut self, limit: &Limit<'_>) {
        let now = Instant::now();
        let due = |object: &Found<'_>| object.until.saturating_duration_since(now) < object.lease / 2;
        if self.found.iter().any(due) {
            self.ask_again(limit);
        }
    }

    /// Asks once more where the objects are. One that is where it was has been there all the time; one that is not was removed by force, lease
    /// or no lease, and other bytes may have come in its place before they were read.
    fn ask_again(&mut self, limit: &Limit<'_>) {
        let store = self.store;
        let asked = std::mem::take(&mut self.found);
        let mut asked = asked.into_iter();
        loop {
            let list: Vec<Found<'a>> = asked.by_ref().take(MOST_NAMES).collect();
            if list.is_empty() {
                return;
            }
            let names = list.iter().map(|object| object.item.name.as_str()).collect();
            let request = (names, store.member.tenant.as_str());
            let began = Instant::now();
            let listed = store.member.master.call::<rpc::BatchGetReplicaList>(&request, &limit.at_most(RPC_TIME));
            let listed = match listed {
                Ok(listed) => listed,
                Err(error) => {
                    store.warn(&format!("pages that were read could not be checked: {error}"));
                    list.iter().for_each(|object| object.item.finish(PageStatus::Failed));
                    continue;
                }
            };
            for (mut object, replicas) in list.into_iter().zip(listed) {
                match replicas {
                    Ok(replicas) if object.is_at(&replicas) => {
                        object.until = object.until.max(began + Duration::from_millis(replicas.lease_ms));
                        object.overdue = false;
                        self.found.push(object);
                    }
                    _ => {
                        if object.overdue {
                            store.member.host.metric(MetricKind::CounterAdd, "mooncake_expired_pages", "", 1.0);
                        }
                        object.item.finish(PageStatus::Missing);
                    }
                }
            }
        }
    }

    /// Checks that the objects were there all the time, and says so of each.
    pub fn end(mut self, limit: &Limit<'_>) {
        // While their leases last nothing but a removal by force can take their places from them. Where the host knows pages again by a seal it finds
        // other bytes itself; so the master is asked once more only for those without one, for those whose leases did not last, and where this
        // process itself has removed something meanwhile.
        let removed = self.store.member.under_way.removed_since(self.removals);
        let (asked, sure): (Vec<_>, Vec<_>) = std::mem::take(&mut self.found)
            .into_iter()
            .partition(|object| removed || object.overdue || !object.item.sealed);
        self.found = asked;
        if !self.found.is_empty() {
            self.ask_again(limit);
        }
        self.found.extend(sure);
        // A master that has started anew hands out the same memory again, whatever it promised before.
        let epoch = self.store.member.epoch.load(Ordering::Acquire);
        let holds = epoch == self.epoch && self.tickets.iter().all(Ticket::holds);
        let status = if holds { PageStatus::Ok } else { PageStatus::Failed };
        self.found.iter().for_each(|object| object.item.finish(status));
        if !holds {
            let master = self.store.member.master.address();
            self.store.warn(&format!("master {master} went away while pages were read; they count as failed"));
        }
        if let Some(why) = &self.why {
            self.store.warn(why);
        }
    }
}

fn holds(replicas: &Replicas, (number, address): (u64, u64)) -> bool {
    let here = |place: &Place| match place {
        Place::Memory(memory) => memory.buffer.address == address,
        Place::Disk(_) | Place::LocalDisk(_) => true,
        Place::Fabric(_) | Place::Distributed(_) => false,
    };
    replicas.list.iter().any(|replica| replica.id == number && here(&replica.place))
}

impl Store {
    /// What of an object can be read.
    fn usable<'a>(
        &self,
        item: &'a Item<'a>,
        replicas: Result<Replicas, ErrorCode>,
        asked: Instant,
    ) -> Result<(Found<'a>, Option<Elsewhere>), PageStatus> {
        let replicas = match replicas {
            Ok(replicas) => replicas,
            Err(ErrorCode::OBJECT_NOT_FOUND | ErrorCode::REPLICA_IS_NOT_READY) => return Err(PageStatus::Missing),
            Err(code) => {
                self.warn(&format!("master {}: object {}: {code}", self.member.master.address(), item.name));
                return Err(PageStatus::Failed);
            }
        };
        let lease = Duration::from_millis(replicas.lease_ms);
        let mut buffers = Vec::new();
        let mut elsewhere = None;
        let mut unreadable = 0;
        for replica in replicas.list {
            match replica.place {
                Place::Memory(memory) if replica.status == ReplicaStatus::COMPLETE => {
                    buffers.push((replica.id, memory.buffer));
                }
                Place::Memory(_) => {}
                Place::Disk(file) => drop(elsewhere.get_or_insert((replica.id, Elsewhere::Shared(file)))),
                Place::LocalDisk(owner) => drop(elsewhere.get_or_insert((replica.id, Elsewhere::Owner(owner)))),
                Place::Fabric(_) | Place::Distributed(_) => unreadable += 1,
            }
        }
        if buffers.is_empty() {
            if let Some((replica, place)) = elsewhere {
                let found =
                    Found { item, buffers, used: vec![(replica, 0)], until: asked + lease, lease, overdue: false };
                return Ok((found, Some(place)));
            }
            if unreadable > 0 {
                self.member.host.metric(MetricKind::CounterAdd, "mooncake_unreadable_pages", "", 1.0);
            }
            return Err(PageStatus::Missing);
        }
        buffers.retain(|(_, buffer)| buffer.size == item.len);
        if buffers.is_empty() {
            return Err(PageStatus::Corrupt);
        }
        let own = self.member.own_endpoint();
        buffers.sort_by_key(|(_, buffer)| {
            let in_trouble = || self.member.peers.get(&buffer.endpoint).trouble().is_some();
            if Some(buffer.endpoint.as_str()) == own { 0 } else { 1 + u8::from(in_trouble()) }
        });
        // Taken from the end.
        buffers.reverse();
        Ok((Found { item, buffers, used: Vec::new(), until: asked + lease, lease, overdue: false }, None))
    }
}
