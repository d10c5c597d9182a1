//! Reading pages.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Batch, Get, LogLevel, MetricKind, PageStatus, Result};

use super::{Item, Items, Store};
use crate::data::{Job, Operation, Outcome, transfer};
use crate::limit::Limit;
use crate::member::{RPC_TIME, error_of};
use crate::wire::types::{Buffer, Place, ReplicaStatus, Replicas};
use crate::wire::{ErrorCode, rpc};

/// A page whose replicas are known.
struct Found<'a> {
    item: &'a Item<'a>,
    /// In memory and whole, the best last, each with its number.
    buffers: Vec<(u64, Buffer)>,
    until: Instant,
}

/// A page whose bytes have come, and from which replica.
struct Read<'a> {
    item: &'a Item<'a>,
    replica: u64,
    address: u64,
}

impl Store {
    /// Reads the pages of a batch.
    pub fn get(&self, batch: &Batch<'_, Get>) -> Result<()> {
        let began = Instant::now();
        let result = self.get_pages(batch);
        self.figures.get_done(began, result.is_ok());
        result
    }

    fn get_pages(&self, batch: &Batch<'_, Get>) -> Result<()> {
        let call = *batch.call();
        call.check()?;
        let items = self.items(batch, true)?;
        if items.list.is_empty() {
            return Ok(());
        }
        let limit = Store::limit(&call);
        let names = items.list.iter().map(|item| item.name.as_str()).collect();
        let request = (names, self.member.tenant.as_str());
        let epoch = self.member.epoch.load(Ordering::Acquire);
        // A lease counts from when it was asked for.
        let asked = Instant::now();
        let answer =
            self.member.master.call_with_ticket::<rpc::BatchGetReplicaList>(&request, &limit.at_most(RPC_TIME));
        let (listed, ticket) = answer.map_err(|error| error_of(&error))?;
        let mut found = Vec::new();
        for (item, replicas) in items.list.iter().zip(listed) {
            match self.usable(item, replicas, asked) {
                Ok(usable) => found.push(usable),
                Err(status) => item.transfer.finish(item.number, status),
            }
        }
        let mut read: Vec<Read<'_>> = Vec::new();
        let mut why = None;
        while !found.is_empty() {
            found = self.read_round(&items, found, &limit, &mut read, &mut why);
        }
        let checked = self.settle_read(read, &limit);
        // A master that has started anew hands out the same memory again, whatever it promised before.
        let holds = ticket.holds() && self.member.epoch.load(Ordering::Acquire) == epoch;
        for (item, status) in checked {
            item.transfer.finish(item.number, if holds { status } else { PageStatus::Failed });
        }
        if !holds {
            self.warn("the master went away while pages were read; they count as failed");
        }
        if let Some(why) = why {
            self.warn(&why);
        }
        call.check()
    }

    /// Asks once more where the pages are that were read. One that is where it was has been there all the time; one that is not was removed
    /// by force, lease or no lease, and other bytes may have come in its place before they were read.
    fn settle_read<'a>(&self, read: Vec<Read<'a>>, limit: &Limit<'_>) -> Vec<(&'a Item<'a>, PageStatus)> {
        if read.is_empty() {
            return Vec::new();
        }
        let names = read.iter().map(|read| read.item.name.as_str()).collect();
        let request = (names, self.member.tenant.as_str());
        let listed = self.member.master.call::<rpc::BatchGetReplicaList>(&request, &limit.at_most(RPC_TIME));
        let listed = match listed {
            Ok(listed) => listed,
            Err(error) => {
                self.warn(&format!("pages that were read could not be checked: {error}"));
                return read.into_iter().map(|read| (read.item, PageStatus::Failed)).collect();
            }
        };
        let still = |read: &Read<'_>, replicas: &Replicas| {
            let here = |place: &Place| matches!(place, Place::Memory(memory) if memory.buffer.address == read.address);
            replicas.list.iter().any(|replica| replica.id == read.replica && here(&replica.place))
        };
        let verdict = |(read, replicas): (Read<'a>, Result<Replicas, ErrorCode>)| {
            let there = replicas.is_ok_and(|replicas| still(&read, &replicas));
            (read.item, if there { PageStatus::Ok } else { PageStatus::Missing })
        };
        read.into_iter().zip(listed).map(verdict).collect()
    }

    fn warn(&self, text: &str) {
        self.member.host.log(LogLevel::Warn, "store", text);
    }

    /// What of a page can be read.
    fn usable<'a>(
        &self,
        item: &'a Item<'a>,
        replicas: Result<Replicas, ErrorCode>,
        asked: Instant,
    ) -> Result<Found<'a>, PageStatus> {
        let replicas = match replicas {
            Ok(replicas) => replicas,
            Err(ErrorCode::OBJECT_NOT_FOUND | ErrorCode::REPLICA_IS_NOT_READY) => return Err(PageStatus::Missing),
            Err(code) => {
                self.warn(&format!("object {}: {code}", item.name));
                return Err(PageStatus::Failed);
            }
        };
        let until = asked + Duration::from_millis(replicas.lease_ms);
        let mut buffers = Vec::new();
        let mut elsewhere = 0;
        for replica in replicas.list {
            match replica.place {
                Place::Memory(memory) if replica.status == ReplicaStatus::COMPLETE => {
                    buffers.push((replica.id, memory.buffer));
                }
                Place::Memory(_) => {}
                _ => elsewhere += 1,
            }
        }
        if buffers.is_empty() {
            if elsewhere > 0 {
                self.member.host.metric(MetricKind::CounterAdd, "mooncake_pages_not_in_memory", "", 1.0);
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
        Ok(Found { item, buffers, until })
    }

    /// Reads each page from its best replica. Gives those that failed and have another one.
    fn read_round<'a>(
        &self,
        items: &Items<'_>,
        found: Vec<Found<'a>>,
        limit: &Limit<'_>,
        read: &mut Vec<Read<'a>>,
        why: &mut Option<String>,
    ) -> Vec<Found<'a>> {
        let mut remote = Vec::new();
        let mut jobs = Vec::new();
        let mut again = Vec::new();
        for mut page in found {
            let Some((replica, buffer)) = page.buffers.pop() else { continue };
            let from = (replica, buffer.address);
            let pieces = items.pieces(page.item);
            match &self.member.lent {
                // The lease is that the object is there: a marker has no bytes that anybody needs.
                _ if page.item.logical => self.settle(page, from, None, read, &mut again, why),
                Some(lent) if lent.segment.endpoint == buffer.endpoint => {
                    // SAFETY: destination pages of a call are its own to write until it returns.
                    let copied = unsafe { lent.memory.read(buffer.address, pieces) };
                    let failed = copied.err().map(|error| error.to_string());
                    self.settle(page, from, failed, read, &mut again, why);
                }
                _ => {
                    let peer = self.member.peers.get(&buffer.endpoint);
                    jobs.push(Job { peer, address: buffer.address, len: buffer.size, pieces });
                    remote.push((page, from));
                }
            }
        }
        // SAFETY: as above; no page is in two jobs.
        let outcomes = unsafe { transfer(&self.member.peers, Operation::Read, &jobs, limit) };
        for (((page, from), outcome), job) in remote.into_iter().zip(outcomes).zip(&jobs) {
            let failed = match outcome {
                Outcome::Moved => None,
                Outcome::Rejected(why) | Outcome::PeerFailed(why) => Some(why),
                Outcome::Stopped { .. } => {
                    if job.peer.trouble().is_some() {
                        self.note_failed(&page.item.name);
                    }
                    page.item.transfer.finish(page.item.number, PageStatus::Failed);
                    continue;
                }
            };
            self.settle(page, from, failed, read, &mut again, why);
        }
        again
    }

    fn settle<'a>(
        &self,
        page: Found<'a>,
        (replica, address): (u64, u64),
        failed: Option<String>,
        read: &mut Vec<Read<'a>>,
        again: &mut Vec<Found<'a>>,
        why: &mut Option<String>,
    ) {
        let late = Instant::now() >= page.until;
        match failed {
            None if late => {
                // The bytes may be another object's by now.
                self.member.host.metric(MetricKind::CounterAdd, "mooncake_leases_run_out", "", 1.0);
                page.item.transfer.finish(page.item.number, PageStatus::Failed);
            }
            None => {
                self.note_good(&page.item.name);
                read.push(Read { item: page.item, replica, address });
            }
            Some(_) if !late && !page.buffers.is_empty() => again.push(page),
            Some(reason) => {
                self.note_failed(&page.item.name);
                why.get_or_insert(reason);
                page.item.transfer.finish(page.item.number, PageStatus::Failed);
            }
        }
    }
}
