//! Other nodes that were there and are not any more: what lay in their memory is gone, and the host is told, which would believe in it for ever.

use std::collections::{HashMap, HashSet};

use kvdock_plugin_api::LogLevel;
use parking_lot::Mutex;

use super::limit::Limit;
use super::node::{MEETING_PLACE, Node};
use super::peers::ASK;

/// In so many looks one after another a node has to be missing: a master that was started again hears of its nodes one by one.
const MISSED: u32 = 3;

/// Nodes of kvdock that the master has named, each with the looks at which it was missing since.
#[derive(Debug, Default)]
pub struct Neighbours(Mutex<HashMap<String, u32>>);

impl Neighbours {
    /// Takes note of who is there now; gives those that have gone.
    fn are(&self, now: &HashSet<String>) -> Vec<String> {
        let mut known = self.0.lock();
        known.extend(now.iter().map(|node| (node.clone(), 0)));
        let mut gone = Vec::new();
        known.retain(|node, missed| {
            if !now.contains(node) {
                *missed += 1;
            }
            let stays = *missed < MISSED;
            if !stays {
                gone.push(node.clone());
            }
            stays
        });
        gone
    }
}

impl Node {
    /// Asks the master who is there, and tells the host when somebody has gone.
    pub fn look_at_neighbours(&self) {
        // A master that does not answer says nothing.
        let Ok(matched) = self.master.match_external(vec![MEETING_PLACE.to_owned()], &Limit::within(ASK)) else {
            return;
        };
        let alive =
            matched.matches.into_iter().filter(|other| !other.peer_address.is_empty() && other.node_id != self.id);
        let gone = self.neighbours.are(&alive.map(|other| other.node_id).collect());
        if gone.is_empty() {
            return;
        }
        let text = format!("nodes have left the cluster, and the pages in their memory are gone: {}", gone.join(", "));
        self.host.log(LogLevel::Warn, "umbp", &text);
        self.peers.forget(&gone);
        self.host.contents_lost();
    }

    /// A node of this name has ended, and another one has come in its place before anybody missed it: one whose name and address are settings.
    pub fn came_anew(&self, id: &str, address: &str) {
        let text = format!("node {id} at {address} was started anew, and the pages in its memory are gone");
        self.host.log(LogLevel::Warn, "umbp", &text);
        self.host.contents_lost();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_gone_when_it_is_missing_for_long_and_that_is_said_once() {
        let neighbours = Neighbours::default();
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<HashSet<_>>();
        assert!(neighbours.are(&set(&["a", "b"])).is_empty());
        assert!(neighbours.are(&set(&[])).is_empty() && neighbours.are(&set(&[])).is_empty());
        assert!(neighbours.are(&set(&["a"])).contains(&"b".to_owned()));
        for _ in 0..5 {
            assert!(neighbours.are(&set(&["a"])).is_empty());
        }
        assert!(neighbours.are(&set(&[])).is_empty() && neighbours.are(&set(&[])).is_empty());
        assert_eq!(neighbours.are(&set(&[])), ["a"]);
        assert!(neighbours.are(&set(&[])).is_empty());
    }
}
