//! Storing pages.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Batch, Call, Error, ErrorKind, LogLevel, PageStatus, Result, Set};

use super::{Item, Items, Store};
use crate::data::{Job, Operation, Outcome, Peer, transfer};
use crate::limit::Limit;
use crate::member::{RPC_TIME, error_of};
use crate::rpc::RpcError;
use crate::wire::types::{ObjectMeta, Place, Replica, ReplicaType, ReplicateConfig};
use crate::wire::{ErrorCode, rpc};

/// Pauses before pages are tried again that found no room, no living peer, or somebody else who writes them. The master makes room when it
/// has been asked in vain.
const PAUSES: [Duration; 5] = [
    Duration::from_millis(5),
    Duration::from_millis(15),
    Duration::from_millis(40),
    Duration::from_millis(100),
    Duration::from_millis(160),
];
/// What of a call's time is kept for ending puts.
const ENDING: Duration = Duration::from_millis(200);
/// The kind of data, as the store counts it: KV cache.
const KV_CACHE: u8 = 1;

/// How a page fared in a round.
enum Round {
    /// It is stored.
    Stored,
    /// It is stored, or being stored, by somebody else.
    Exists,
    /// No segment has room.
    Full,
    /// The peer that was to take it does not.
    PeerFailed(String),
    /// It will not be stored.
    Failed(String),
    /// The time is over.
    Stopped,
}

/// A page that the master has given room to.
struct Begun<'a> {
    item: &'a Item<'a>,
    round: Round,
    /// Its put may not be taken back: somebody may still write to its range.
    in_doubt: bool,
    on_disk: bool,
}

impl Store {
    /// Stores the pages of a batch.
    pub fn set(&self, batch: &Batch<'_, Set>) -> Result<()> {
        let began = Instant::now();
        let result = self.set_pages(batch);
        self.figures.set_done(began, result.is_ok());
        result
    }

    fn set_pages(&self, batch: &Batch<'_, Set>) -> Result<()> {
        let call = *batch.call();
        call.check()?;
        let items = self.items(batch, true)?;
        let mut first: HashMap<&str, usize> = HashMap::with_capacity(items.list.len());
        let (mut open, mut twins) = (Vec::new(), Vec::new());
        for (at, item) in items.list.iter().enumerate() {
            match first.get(item.name.as_str()) {
                Some(twin) => twins.push((at, *twin)),
                None => {
                    first.insert(&item.name, at);
                    open.push(item);
                }
            }
        }
        let error = self.set_items(&items, open, &call);
        for (at, twin) in twins {
            if let (Some(item), Some(twin)) = (items.list.get(at), items.list.get(twin)) {
                item.transfer.finish(item.number, twin.transfer.status(twin.number));
            }
        }
        call.check()?;
        // A call of which a part was stored is a success: each page has its status.
        let any = items.list.iter().any(|item| item.transfer.status(item.number) == PageStatus::Ok);
        match error {
            Some(error) if !any => Err(error),
            Some(error) => {
                self.member.host.log(LogLevel::Debug, "store", &format!("some pages were not stored: {error}"));
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn set_items<'a>(&self, items: &Items<'_>, mut open: Vec<&'a Item<'a>>, call: &Call<'_>) -> Option<Error> {
        let limit = Store::limit(call);
        let mut preferred = self.config.preferred.clone();
        if self.config.prefer_own {
            preferred.extend(self.member.own_endpoint().map(str::to_owned));
        }
        let wished = preferred.len();
        let mut error = None;
        let mut pauses = PAUSES.iter();
        self.remove_unreadable(&open, &limit);
        while !open.is_empty() {
            let begun = match self.set_round(items, &open, &preferred, &limit) {
                Ok(begun) => begun,
                Err(failed) => {
                    open.iter().for_each(|item| item.transfer.finish(item.number, PageStatus::Failed));
                    error = Some(error_of(&failed));
                    break;
                }
            };
            open.clear();
            let mut exists = Vec::new();
            let pause = pauses.next();
            for page in begun {
                let item = page.item;
                let (status, why) = match page.round {
                    Round::Stored => {
                        self.note_good(&item.name);
                        (PageStatus::Ok, None)
                    }
                    Round::Exists => {
                        exists.push(item);
                        continue;
                    }
                    Round::Full | Round::PeerFailed(_) if pause.is_some() && !page.in_doubt => {
                        if matches!(page.round, Round::PeerFailed(_)) && preferred.len() == wished {
                            // The master goes on placing objects at a peer that is gone until it notices; these live.
                            preferred.extend(self.member.own_endpoint().map(str::to_owned));
                            preferred.extend(self.member.peers.living());
                        }
                        open.push(item);
                        continue;
                    }
                    Round::Full => (PageStatus::Refused, Some(no_space(self.member.master.address()))),
                    Round::PeerFailed(why) | Round::Failed(why) => {
                        (PageStatus::Failed, Some(Error::new(ErrorKind::Unavailable, why).retryable()))
                    }
                    Round::Stopped => (PageStatus::Failed, None),
                };
                item.transfer.finish(item.number, status);
                if error.is_none() {
                    error = why;
                }
            }
            match self.settle_existing(exists, &limit) {
                Ok(rest) if pause.is_some() => open.extend(rest),
                Ok(rest) => rest.iter().for_each(|item| item.transfer.finish(item.number, PageStatus::Refused)),
                Err(failed) => error = error.or(Some(error_of(&failed))),
            }
            if let Some(pause) = pause.filter(|_| !open.is_empty()) {
                std::thread::sleep((*pause).min(limit.left().unwrap_or_default()));
                if limit.left().is_err() {
                    open.iter().for_each(|item| item.transfer.finish(item.number, PageStatus::Failed));
                    break;
                }
            }
        }
        error
    }

    /// Pages that could not be read a moment ago, for their owner is gone, stand in the way of what is stored now: the master goes on
    /// believing in them for a while.
    fn remove_unreadable(&self, open: &[&Item<'_>], limit: &Limit<'_>) {
        let names: Vec<&str> =
            open.iter().map(|item| item.name.as_str()).filter(|name| self.failed_lately(name)).collect();
        if names.is_empty() {
            return;
        }
        let request = (names, true, self.member.tenant.as_str());
        // Where it fails, the pages count as stored, as the master says.
        let _ = self.member.master.call::<rpc::BatchRemove>(&request, &limit.at_most(RPC_TIME));
    }

    /// An object that exists may be one that somebody is still writing, or began to write and did not finish, or has removed meanwhile.
    /// Gives those that can't be read.
    fn settle_existing<'a>(&self, exists: Vec<&'a Item<'a>>, limit: &Limit<'_>) -> Result<Vec<&'a Item<'a>>, RpcError> {
        if exists.is_empty() {
            return Ok(exists);
        }
        let names = exists.iter().map(|item| item.name.as_str()).collect();
        let request = (names, self.member.tenant.as_str());
        let found = self.member.master.call::<rpc::BatchExistKey>(&request, &limit.at_most(RPC_TIME));
        let found = found.inspect_err(|_| {
            exists.iter().for_each(|item| item.transfer.finish(item.number, PageStatus::Failed));
        })?;
        let (stored, rest): (Vec<_>, Vec<_>) = exists.into_iter().zip(found).partition(|(_, found)| *found == Ok(true));
        stored.iter().for_each(|(item, _)| item.transfer.finish(item.number, PageStatus::Ok));
        Ok(rest.into_iter().map(|(item, _)| item).collect())
    }

    fn replicate_config(&self, open: &[&Item<'_>], preferred: &[String]) -> ReplicateConfig {
        let config = &self.config;
        let group = |item: &&Item<'_>| item.transfer.keys().get(item.number).map(|key| self.names.group(key));
        ReplicateConfig {
            replica_num: config.replicas,
            soft_pin_action: u8::from(config.soft_pin),
            soft_pin_ttl_ms: config.soft_pin_ttl.map(|seconds| seconds.saturating_mul(1000)),
            preferred_segments: preferred.to_vec(),
            data_type: KV_CACHE,
            host_id: self.member.lent.as_ref().map_or_else(String::new, |lent| lent.segment.host_id.clone()),
            group_ids: config.groups.then(|| open.iter().filter_map(group).collect()),
            ..ReplicateConfig::default()
        }
    }

    /// Asks for room, moves the bytes, ends the puts. The error is that nothing could be begun.
    fn set_round<'a>(
        &self,
        items: &Items<'_>,
        open: &[&'a Item<'a>],
        preferred: &[String],
        limit: &Limit<'_>,
    ) -> Result<Vec<Begun<'a>>, RpcError> {
        let member = &self.member;
        let tenant = member.tenant.as_str();
        let names = open.iter().map(|item| item.name.as_str()).collect();
        let sizes = open.iter().map(|item| item.len).collect();
        let request = (member.id, names, sizes, self.replicate_config(open, preferred), tenant);
        let started = member.master.call::<rpc::BatchPutStart>(&request, &limit.at_most(RPC_TIME));
        let started = started.inspect_err(|error| {
            if matches!(error, RpcError::Stopped(_) | RpcError::Lost(_)) {
                // They may have begun.
                member.revoke_later(open.iter().map(|item| item.name.clone()), ReplicaType::ALL);
            }
        })?;
        let mut begun: Vec<Begun<'a>> = Vec::with_capacity(open.len());
        let mut replicas: Vec<(usize, Replica)> = Vec::new();
        let mut to_end = Vec::new();
        for (item, started) in open.iter().zip(started) {
            let mut page = Begun { item, round: Round::Stored, in_doubt: false, on_disk: false };
            match started {
                Ok(list) => {
                    to_end.push(begun.len());
                    for replica in list {
                        match replica.place {
                            Place::Memory(_) => replicas.push((begun.len(), replica)),
                            // Files that other hosts may not see are left to others; their part of the put is taken back.
                            _ => page.on_disk = true,
                        }
                    }
                    if !replicas.iter().any(|(number, _)| *number == begun.len()) {
                        page.round = Round::Failed(format!("object {}: the master gave no room in memory", item.name));
                    }
                }
                Err(ErrorCode::OBJECT_ALREADY_EXISTS) => page.round = Round::Exists,
                Err(ErrorCode::NO_AVAILABLE_HANDLE) => page.round = Round::Full,
                Err(code) => page.round = Round::Failed(format!("object {}: {code}", item.name)),
            }
            begun.push(page);
        }
        // The end of the puts is part of the call's time too.
        let left = limit.left().unwrap_or_default();
        let moving = limit.at_most(left.saturating_sub(ENDING.min(left / 4)));
        self.write(items, &mut begun, &replicas, &moving);
        self.end(&mut begun, &to_end, limit);
        Ok(begun)
    }

    fn write(&self, items: &Items<'_>, begun: &mut [Begun<'_>], replicas: &[(usize, Replica)], limit: &Limit<'_>) {
        let mut jobs = Vec::new();
        let mut owners = Vec::new();
        let mut peers: HashMap<&str, Arc<Peer>> = HashMap::new();
        for (number, replica) in replicas {
            let (Place::Memory(memory), Some(page)) = (&replica.place, begun.get_mut(*number)) else { continue };
            let buffer = &memory.buffer;
            let pieces = items.pieces(page.item);
            if buffer.size != page.item.len {
                let (name, len) = (&page.item.name, page.item.len);
                page.round = Round::Failed(format!("object {name}: {len} bytes were given {}", buffer.size));
                continue;
            }
            match &self.member.lent {
                Some(lent) if lent.segment.endpoint == buffer.endpoint => {
                    // SAFETY: the host does not write source pages of a call, and the marker is a constant.
                    if let Err(error) = unsafe { lent.memory.write(buffer.address, pieces) } {
                        page.round = Round::Failed(format!("object {}: {error}", page.item.name));
                    }
                }
                _ => {
                    let peer = peers.entry(&buffer.endpoint).or_insert_with(|| self.member.peers.get(&buffer.endpoint));
                    jobs.push(Job { peer: peer.clone(), address: buffer.address, len: buffer.size, pieces });
                    owners.push(*number);
                }
            }
        }
        // SAFETY: as above.
        let outcomes = unsafe { transfer(&self.member.peers, Operation::Write, &jobs, limit) };
        for (number, outcome) in owners.into_iter().zip(outcomes) {
            let Some(page) = begun.get_mut(number) else { continue };
            match outcome {
                Outcome::Moved => {}
                Outcome::Rejected(why) | Outcome::PeerFailed(why) => {
                    if !matches!(page.round, Round::Stopped) {
                        page.round = Round::PeerFailed(why);
                    }
                }
                Outcome::Stopped { in_doubt, .. } => {
                    page.round = Round::Stopped;
                    page.in_doubt |= in_doubt;
                }
            }
        }
    }

    /// Ends the puts that went well and takes back the others.
    fn end(&self, begun: &mut [Begun<'_>], to_end: &[usize], limit: &Limit<'_>) {
        let member = &self.member;
        let tenant = member.tenant.as_str();
        let (mut good, mut bad, mut disk) = (Vec::new(), Vec::new(), Vec::new());
        for number in to_end {
            let Some(page) = begun.get(*number) else { continue };
            let name = page.item.name.as_str();
            match page.round {
                Round::Stored => good.push(*number),
                // A peer may still be taking bytes: the range must not be given to anybody else until the master gives the put up.
                _ if page.in_doubt => {}
                _ => bad.push(name),
            }
            if page.on_disk && !page.in_doubt {
                disk.push(name);
            }
        }
        self.revoke(&bad, ReplicaType::ALL, limit);
        if !good.is_empty() {
            let metas = good.iter().filter_map(|number| begun.get(*number));
            let metas = metas.map(|page| ObjectMeta { key: &page.item.name, checksum: None }).collect();
            let request = (member.id, metas, ReplicaType::ALL, tenant);
            let ended = member.master.call::<rpc::BatchPutEnd>(&request, &limit.at_most(RPC_TIME));
            match ended {
                Ok(ended) => {
                    for (number, ended) in good.iter().zip(ended) {
                        let (Some(page), Err(code)) = (begun.get_mut(*number), ended) else { continue };
                        let why = format!("object {}: {code}", page.item.name);
                        page.round = match code {
                            // Its segment was taken back meanwhile.
                            ErrorCode::OBJECT_NOT_FOUND => Round::PeerFailed(why),
                            _ => Round::Failed(why),
                        };
                    }
                }
                Err(error) => {
                    // All bytes are in place, so nobody writes any more: it may be taken back, or have ended.
                    let names = good.iter().filter_map(|number| begun.get(*number)).map(|page| page.item.name.clone());
                    member.revoke_later(names.collect::<Vec<_>>(), ReplicaType::ALL);
                    for number in &good {
                        let Some(page) = begun.get_mut(*number) else { continue };
                        page.round = match error {
                            RpcError::Stopped(_) => Round::Stopped,
                            _ => Round::Failed(error.to_string()),
                        };
                    }
                }
            }
        }
        let disk: Vec<&str> = disk;
        self.revoke(&disk, ReplicaType::DISK, limit);
    }

    fn revoke(&self, names: &[&str], kind: ReplicaType, limit: &Limit<'_>) {
        if names.is_empty() {
            return;
        }
        let request = (self.member.id, names.to_vec(), kind, self.member.tenant.as_str());
        if self.member.master.call::<rpc::BatchPutRevoke>(&request, &limit.at_most(RPC_TIME)).is_err() {
            self.member.revoke_later(names.iter().map(|name| (*name).to_owned()), kind);
        }
    }
}

fn no_space(address: &str) -> Error {
    let text = format!(
        "no segment of the store at {address} has room; its master evicts what nobody has read lately, so it may have soon"
    );
    Error::new(ErrorKind::NoSpace, text).retryable()
}
