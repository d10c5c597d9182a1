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
use crate::metadata::{Descriptor, handshake};
use crate::net;
use crate::wire::rpc;
use crate::wire::types::{Place, Replica, ReplicaStatus};

/// How long the look for proofs may take.
const TIME: Duration = Duration::from_secs(2);
/// How long one owner may take to answer.
const OWNER: Duration = Duration::from_secs(1);

/// What is known of an owner.
enum Owner {
    /// Nobody listens any more where it did.
    Ended,
    /// Whoever listens there has this.
    Has(Box<Descriptor>),
    /// It does not answer, or nobody knows where it is.
    Unknown,
}

/// Owners that were looked for.
type Owners = HashMap<String, Owner>;

impl Store {
    /// Pages that could not be read a moment ago stand in the way of what is stored now. Those that nobody has any more are removed; the others
    /// count as stored, as the master says.
    pub(super) fn remove_lost(&self, open: &[&Item<'_>], limit: &Limit<'_>) {
        let unread: Vec<&str> =
            open.iter().map(|item| item.name.as_str()).filter(|name| self.failed_lately(name)).collect();
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
                let owner = owners.entry(endpoint.to_owned()).or_insert_with(|| self.look_for(endpoint, limit));
                match owner {
                    Owner::Ended => true,
                    Owner::Has(descriptor) => !descriptor.holds(memory.buffer.address, 1),
                    Owner::Unknown => false,
                }
            }
            // Somebody is writing it, or it lies where others may see it.
            _ => false,
        };
        !replicas.is_empty() && replicas.iter().all(gone)
    }

    fn look_for(&self, endpoint: &str, limit: &Limit<'_>) -> Owner {
        let Ok((host, port)) = self.member.peers.metadata().handshake_place(endpoint, limit) else {
            return Owner::Unknown;
        };
        let Ok(left) = limit.left() else { return Owner::Unknown };
        if net::is_refused(&host, port, left.min(OWNER)) {
            return Owner::Ended;
        }
        match handshake::ask(&host, port, &limit.at_most(OWNER)) {
            // Another process may have come to the place; what it has is its own.
            Ok(descriptor) => Owner::Has(Box::new(descriptor)),
            Err(_) => Owner::Unknown,
        }
    }
}
