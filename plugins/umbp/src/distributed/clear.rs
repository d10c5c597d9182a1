//! Removing objects wherever they are.

use std::collections::HashMap;
use std::time::Duration;

use kvdock_plugin_api::{Call, Error, ErrorKind, Result};

use super::cluster::Cluster;
use super::limit::Limit;
use super::node::MEETING_PLACE;
use super::objects::{DATA, before, text};
use super::peers::ASK;
use crate::wire::peer::{ClearRequest, DoneResponse, EvictKeyRequest, EvictKeyResponse};

/// How often the master is asked where else an object is.
const COPIES: usize = 8;
/// How long the master may take to hear what has gone.
const TELL: Duration = Duration::from_secs(5);

impl Cluster {
    pub(super) fn remove_all(&self, names: &[Vec<u8>], call: &Call<'_>) -> Result<Vec<bool>> {
        call.check()?;
        let (node, limit) = (&self.node, Limit::of(call, DATA));
        let names: Vec<&str> = names.iter().map(|name| text(name)).collect();
        let mut removed = node.pool.remove(&names);
        let here = removed.contains(&true);
        // The index has one place at a time, and hears of each that goes.
        for _ in 0..COPIES {
            let sources = node.master.route_get(&names, std::slice::from_ref(&node.id), &limit).map_err(Error::from)?;
            let mut by_node: HashMap<(String, String), Vec<usize>> = HashMap::new();
            for (at, source) in sources.into_iter().enumerate() {
                if let Some(source) = source.filter(|source| !source.address.is_empty()) {
                    by_node.entry((source.node, source.address)).or_default().push(at);
                }
            }
            let mut any = false;
            for ((id, address), numbers) in by_node {
                let keys = numbers.iter().filter_map(|at| names.get(*at)).map(|name| (*name).to_owned()).collect();
                let request = EvictKeyRequest { keys, remove: true };
                let answer: std::result::Result<EvictKeyResponse, _> = match node.peers.at(&id, &address) {
                    Ok(peer) => peer.ask("/umbp.UMBPPeer/EvictKey", request, &limit.at_most(ASK)),
                    Err(_) => continue,
                };
                // A node that is gone has taken its objects with it.
                for entry in answer.map(|answer| answer.evicted).unwrap_or_default() {
                    if entry.bytes_freed == 0 {
                        continue;
                    }
                    any = true;
                    for at in &numbers {
                        if let (Some(flag), true) = (removed.get_mut(*at), names.get(*at) == Some(&entry.key.as_str()))
                        {
                            *flag = true;
                        }
                    }
                }
            }
            if !any {
                break;
            }
        }
        if here {
            // The master hears of it later, if not now.
            node.tell(before(&limit, TELL));
        }
        Ok(removed)
    }

    pub(super) fn clear_prefix(&self, prefix: &str, call: &Call<'_>) -> Result<()> {
        call.check()?;
        let (node, limit) = (&self.node, Limit::of(call, DATA));
        node.pool.clear(prefix);
        let matched = node.master.match_external(vec![MEETING_PLACE.to_owned()], &limit).map_err(Error::from)?;
        let mut failures = Vec::new();
        for other in matched.matches.iter().filter(|other| other.node_id != node.id && !other.peer_address.is_empty()) {
            call.check()?;
            let cleared = node.peers.at(&other.node_id, &other.peer_address).and_then(|peer| {
                let request = ClearRequest { prefix: prefix.to_owned() };
                let answer = peer.ask("/kvdock.UmbpNode/Clear", request, &limit.at_most(ASK));
                answer.map(|_: DoneResponse| ()).map_err(|failed| failed.text)
            });
            failures.extend(cleared.err());
        }
        let told = node.tell(before(&limit, TELL));
        if !failures.is_empty() {
            let text = format!("nodes were not cleared: {}", failures.join("; "));
            return Err(Error::new(ErrorKind::Unavailable, text).retryable());
        }
        if !told {
            call.check()?;
            let text = "this node is cleared, and the master was not told in time".to_owned();
            return Err(Error::new(ErrorKind::Unavailable, text).retryable());
        }
        Ok(())
    }
}
