//! How objects are put: room is asked for, bytes are moved, the puts end or are taken back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::Store;
use super::items::{Item, Items};
use crate::data::{Job, Operation, Outcome, Peer, transfer};
use crate::limit::Limit;
use crate::member::RPC_TIME;
use crate::rpc::RpcError;
use crate::wire::types::{ObjectMeta, Place, Replica, ReplicaType, ReplicateConfig};
use crate::wire::{ErrorCode, rpc};

/// What of a call's time is kept for ending puts.
const ENDING: Duration = Duration::from_millis(200);
/// The kind of data, as the store counts it: KV cache.
const KV_CACHE: u8 = 1;

/// How an object fared in a round.
#[derive(Debug)]
pub(super) enum Round {
    /// Its bytes are in place, and once its put has ended it is stored.
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

/// An object that the master was asked to give room to.
#[derive(Debug)]
pub(super) struct Begun<'a> {
    pub item: &'a Item<'a>,
    pub round: Round,
    /// It has room: its put has to end, or to be taken back.
    is_open: bool,
    /// Its put may not be taken back: somebody may still write to its range.
    pub in_doubt: bool,
    on_disk: bool,
}

impl Store {
    fn replicate_config(&self, open: &[&Item<'_>], preferred: &[String]) -> ReplicateConfig {
        let config = &self.config;
        ReplicateConfig {
            replica_num: config.replicas,
            soft_pin_action: u8::from(config.soft_pin),
            soft_pin_ttl_ms: config.soft_pin_ttl.map(|seconds| seconds.saturating_mul(1000)),
            with_hard_pin: config.hard_pin,
            prefer_alloc_in_same_node: config.same_node,
            preferred_segments: preferred.to_vec(),
            data_type: KV_CACHE,
            host_id: self.member.lent.as_ref().map_or_else(String::new, |lent| lent.segment.host_id.clone()),
            group_ids: config.groups.then(|| open.iter().map(|item| self.names.group(item.key)).collect()),
            ..ReplicateConfig::default()
        }
    }

    /// Asks for room and moves the bytes. The error is that nothing could be begun.
    pub(super) fn begin<'a>(
        &self,
        items: &Items<'_>,
        open: &[&'a Item<'a>],
        preferred: &[String],
        limit: &Limit<'_>,
    ) -> Result<Vec<Begun<'a>>, RpcError> {
        let member = &self.member;
        let tenant = member.tenant.as_str();
        limit.left().map_err(RpcError::stopped)?;
        let names = open.iter().map(|item| item.name.as_str()).collect();
        let sizes = open.iter().map(|item| item.len).collect();
        let request = (member.id, names, sizes, self.replicate_config(open, preferred), tenant);
        let started = member.master.call::<rpc::BatchPutStart>(&request, &limit.patient().at_most(RPC_TIME));
        let started = started.inspect_err(|error| {
            if matches!(error, RpcError::Stopped { .. } | RpcError::Lost(_)) {
                // They may have begun.
                member.revoke_later(open.iter().map(|item| item.name.clone()), ReplicaType::ALL);
            }
        })?;
        let mut begun: Vec<Begun<'a>> = Vec::with_capacity(open.len());
        let mut replicas: Vec<(usize, Replica)> = Vec::new();
        for (item, started) in open.iter().zip(started) {
            let mut page = Begun { item, round: Round::Stored, is_open: false, in_doubt: false, on_disk: false };
            match started {
                Ok(list) => {
                    page.is_open = true;
                    for replica in list {
                        match replica.place {
                            Place::Memory(_) => replicas.push((begun.len(), replica)),
                            // Files that other hosts may not see are left to others; their part of the put is taken back.
                            _ => page.on_disk = true,
                        }
                    }
                    if replicas.last().is_none_or(|(number, _)| *number != begun.len()) {
                        page.round = Round::Failed(format!(
                            "master {}: object {}: it gave no room in memory",
                            member.master.address(),
                            item.name
                        ));
                    }
                }
                Err(ErrorCode::OBJECT_ALREADY_EXISTS) => page.round = Round::Exists,
                Err(ErrorCode::NO_AVAILABLE_HANDLE) => page.round = Round::Full,
                Err(code) => {
                    page.round =
                        Round::Failed(format!("master {}: object {}: {code}", member.master.address(), item.name));
                }
            }
            begun.push(page);
        }
        // The end of the puts is part of the call's time too.
        let left = limit.left().unwrap_or_default();
        let moving = limit.at_most(left.saturating_sub(ENDING.min(left / 4)));
        self.write(items, &mut begun, &replicas, &moving);
        Ok(begun)
    }

    fn write(&self, items: &Items<'_>, begun: &mut [Begun<'_>], replicas: &[(usize, Replica)], limit: &Limit<'_>) {
        let mut jobs = Vec::new();
        let mut owners = Vec::new();
        let mut peers: HashMap<&str, Arc<Peer>> = HashMap::new();
        for (number, replica) in replicas {
            let (Place::Memory(memory), Some(page)) = (&replica.place, begun.get_mut(*number)) else { continue };
            let buffer = &memory.buffer;
            let pieces = items.whole(page.item);
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

    /// Takes back the puts that did not go well.
    pub(super) fn revoke_failed(&self, begun: &[Begun<'_>], limit: &Limit<'_>) {
        // Where a peer may still be taking bytes the range must not be given to anybody else until the master gives the put up.
        let failed = |page: &&Begun<'_>| page.is_open && !page.in_doubt && !matches!(page.round, Round::Stored);
        self.revoke_all(begun.iter().filter(failed), limit);
    }

    /// Takes puts back, whose bytes nobody writes any more.
    pub(super) fn revoke_all<'b, 'a: 'b>(&self, begun: impl Iterator<Item = &'b Begun<'a>>, limit: &Limit<'_>) {
        let (mut all, mut disk) = (Vec::new(), Vec::new());
        for page in begun {
            all.push(page.item.name.as_str());
            if page.on_disk {
                disk.push(page.item.name.as_str());
            }
        }
        self.revoke(&all, ReplicaType::ALL, limit);
        self.revoke(&disk, ReplicaType::DISK, limit);
    }

    /// Ends the puts whose bytes are in place, in their order and by one call: from then on they are stored.
    pub(super) fn end(&self, begun: &mut [Begun<'_>], limit: &Limit<'_>) {
        let member = &self.member;
        let tenant = member.tenant.as_str();
        let good: Vec<usize> = begun
            .iter()
            .enumerate()
            .filter(|(_, page)| page.is_open && matches!(page.round, Round::Stored))
            .map(|(number, _)| number)
            .collect();
        let on_disk = good.iter().filter_map(|number| begun.get(*number)).filter(|page| page.on_disk);
        let disk: Vec<String> = on_disk.map(|page| page.item.name.clone()).collect();
        if !good.is_empty() {
            let metas = good.iter().filter_map(|number| begun.get(*number));
            let metas = metas.map(|page| ObjectMeta { key: &page.item.name, checksum: None }).collect();
            let request = (member.id, metas, ReplicaType::ALL, tenant);
            let ended = member.master.call::<rpc::BatchPutEnd>(&request, &limit.patient().at_most(RPC_TIME));
            match ended {
                Ok(ended) => {
                    for (number, ended) in good.iter().zip(ended) {
                        let (Some(page), Err(code)) = (begun.get_mut(*number), ended) else { continue };
                        let why = format!("master {}: object {}: {code}", member.master.address(), page.item.name);
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
                            RpcError::Stopped { .. } => Round::Stopped,
                            _ => Round::Failed(error.to_string()),
                        };
                    }
                }
            }
        }
        let disk: Vec<&str> = disk.iter().map(String::as_str).collect();
        self.revoke(&disk, ReplicaType::DISK, limit);
    }

    fn revoke(&self, names: &[&str], kind: ReplicaType, limit: &Limit<'_>) {
        if names.is_empty() {
            return;
        }
        let request = (self.member.id, names.to_vec(), kind, self.member.tenant.as_str());
        if self.member.master.call::<rpc::BatchPutRevoke>(&request, &limit.patient().at_most(RPC_TIME)).is_err() {
            self.member.revoke_later(names.iter().map(|name| (*name).to_owned()), kind);
        }
    }
}
