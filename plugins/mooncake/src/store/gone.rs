//! Objects that the master believes in and nobody has any more.
//!
//! A master goes on naming memory of a process that has ended, for as long as `client_ttl`. Meanwhile its objects can't be read, and stand in the
//! way of what is stored under their names. That this process can't read one proves nothing: the way to its owner may be cut from here alone. So
//! an object is removed by force only where each owner of it is proven to have lost it.

use std::collections::HashMap;
use std::time::Duration;

use super::items::Item;
use super::{MOST_NAMES, Store};
use crate::limit::Limit;
use crate::member::RPC_TIME;
use crate::metadata::Owner;
use crate::wire::rpc;
use crate::wire::types::{Place, Replica, ReplicaStatus};

/// How long the look for proofs may take.
const TIME: Duration = Duration::from_secs(2);
/// Owners that were looked for.
type Owners = HashMap<String, Owner>;

impl Store {
    /// Pages that could not be read a moment ago, or lie in the memory of a peer that has ended, stand in the way of what is stored now. Those that
    /// nobody has any more are removed; the others count as stored, as the master says.
    pub(super) fn remove_lost(&self, open: &[&Item<'_>], limit: &Limit<'_>) {
        // Where a peer has ended a while ago, any page may be one of its.
        let any = self.member.peers.one_ended_lately();
        let unread: Vec<&str> =
            open.iter().map(|item| item.name.as_str()).filter(|name| any || self.failed_lately(name)).collect();
        let master = &self.member.master;
        let tenant = self.member.tenant.as_str();
        let limit = limit.at_most(RPC_TIME);
        let looking = limit.at_most(TIME);
        let mut owners = Owners::new();
        for names in unread.chunks(MOST_NAMES) {
            // Where they lie now: somebody may have stored them anew meanwhile.
            let request = (names.to_vec(), tenant);
            let Ok(listed) = master.call::<rpc::BatchGetReplicaList>(&request, &limit) else { return };
            let mut lost = Vec::new();
            for (name, replicas) in names.iter().zip(listed) {
                if replicas.is_ok_and(|replicas| self.nobody_has(&replicas.list, &mut owners, &looking)) {
                    lost.push(*name);
                }
            }
            if !lost.is_empty() {
                let _removing = self.member.under_way.remove();
                // Where it fails, they count as stored.
                let _ = master.call::<rpc::BatchRemove>(&(lost, true, tenant), &limit);
            }
        }
    }

    /// Whether each replica is proven to be gone.
    fn nobody_has(&self, replicas: &[Replica], owners: &mut Owners, limit: &Limit<'_>) -> bool {
        let gone = |replica: &Replica| match &replica.place {
            Place::Memory(memory) if replica.status == ReplicaStatus::COMPLETE => {
                let endpoint = memory.buffer.endpoint.as_str();
                if self.member.own_endpoint() == Some(endpoint) {
                    return false;
                }
                let metadata = self.member.peers.metadata();
                let owner = owners.entry(endpoint.to_owned()).or_insert_with(|| metadata.look_for(endpoint, limit));
                owner.has_lost(memory.buffer.address)
            }
            // Somebody is writing it, or it lies where others may see it.
            _ => false,
        };
        !replicas.is_empty() && replicas.iter().all(gone)
    }
}
