//! Which pages leave, and taking them out.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::Tree;
use super::node::{NONE, Node, NodeId};
use crate::cache::config::EvictionPolicy;

/// Pages that left the tree; their owner frees them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Removed {
    /// Device pages.
    pub device: Vec<u32>,
    /// Host pages.
    pub host: Vec<u32>,
}

/// Candidates in order of worth. Entries grow stale when a node is used, locked or removed; a stale
/// one is put right or thrown away when it comes up, so using a node costs nothing here. Each node
/// has at most one entry.
#[derive(Debug, Default)]
pub(super) struct VictimQueue {
    heap: BinaryHeap<Reverse<Candidate>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    uses: u32,
    last_used: u64,
    id: NodeId,
    generation: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tier {
    Device,
    Host,
}

impl Tree {
    /// The node on the device that is worth least, or none that may leave. It is no candidate again
    /// until `refresh`.
    pub fn device_victim(&mut self) -> Option<NodeId> {
        self.victim(Tier::Device)
    }

    /// The node on the host that is worth least, or none that may leave. It is no candidate again
    /// until `refresh`.
    pub fn host_victim(&mut self) -> Option<NodeId> {
        self.victim(Tier::Host)
    }

    /// Makes a node a candidate for eviction where it may be one.
    pub fn refresh(&mut self, id: NodeId) {
        let node = self.node(id);
        if !node.live {
            return;
        }
        let candidate = self.candidate(id);
        let node = &mut self.nodes[id as usize];
        if !node.queued_device && node.evictable_from_device() {
            node.queued_device = true;
            self.device_victims.heap.push(Reverse(candidate));
        }
        if !node.queued_host && node.evictable_from_host() {
            node.queued_host = true;
            self.host_victims.heap.push(Reverse(candidate));
        }
    }

    /// Takes a node's pages off the device. Without a copy on the host the node goes, with all that
    /// is below it; None if something there is in use.
    pub fn evict_device(&mut self, id: NodeId) -> Option<Removed> {
        if self.node(id).host_ready() {
            return Some(Removed { device: self.take_device(id), host: Vec::new() });
        }
        self.evict_subtree(id)
    }

    /// Takes a node's pages off the host. A node that is not on the device goes; it has nothing below it.
    pub fn evict_host(&mut self, id: NodeId) -> Removed {
        if self.node(id).on_device() {
            return Removed { device: Vec::new(), host: self.take_host(id) };
        }
        self.remove(id)
    }

    /// Removes a node and all below it, unless somebody uses one of them.
    pub fn evict_subtree(&mut self, id: NodeId) -> Option<Removed> {
        let mut order = vec![id];
        let mut next = 0;
        while let Some(&at) = order.get(next) {
            let node = self.node(at);
            if node.locks > 0 || node.loading || node.backing || node.storing != 0 {
                return None;
            }
            order.extend(self.child_ids(at));
            next += 1;
        }
        let mut removed = Removed::default();
        for &at in order.iter().rev() {
            let part = self.remove(at);
            removed.device.extend(part.device);
            removed.host.extend(part.host);
        }
        Some(removed)
    }

    /// Takes device pages that were never filled off a node that stays on the host.
    pub fn cancel_load(&mut self, id: NodeId) -> Vec<u32> {
        self.nodes[id as usize].loading = false;
        self.take_device(id)
    }

    /// Takes host pages that were never filled off a node that stays on the device.
    pub fn cancel_backup(&mut self, id: NodeId) -> Vec<u32> {
        self.nodes[id as usize].backing = false;
        self.take_host(id)
    }

    fn take_device(&mut self, id: NodeId) -> Vec<u32> {
        let node = &mut self.nodes[id as usize];
        let parent = node.parent;
        let pages = std::mem::take(&mut node.device);
        self.device_total -= pages.len();
        if node.locks == 0 {
            self.unlocked_device -= pages.len();
        }
        self.nodes[parent as usize].device_children -= 1;
        self.refresh(id);
        self.refresh(parent);
        pages
    }

    fn take_host(&mut self, id: NodeId) -> Vec<u32> {
        let node = &mut self.nodes[id as usize];
        let pages = std::mem::take(&mut node.host);
        self.host_total -= pages.len();
        pages
    }

    fn remove(&mut self, id: NodeId) -> Removed {
        debug_assert!(self.node(id).children == 0 && self.node(id).locks == 0);
        let fingerprint = {
            let root = self.root_of(id);
            self.fingerprint(root, self.node(id).start, self.first_page(id))
        };
        self.memory.departed(fingerprint);
        self.unlink(id);
        let node = &mut self.nodes[id as usize];
        let parent = node.parent;
        let device = std::mem::take(&mut node.device);
        let host = std::mem::take(&mut node.host);
        self.device_total -= device.len();
        self.unlocked_device -= device.len();
        self.host_total -= host.len();
        self.vacate(id);
        if parent != NONE {
            self.refresh(parent);
            self.retire_root(parent);
        }
        Removed { device, host }
    }

    fn victim(&mut self, tier: Tier) -> Option<NodeId> {
        loop {
            let queue = match tier {
                Tier::Device => &mut self.device_victims,
                Tier::Host => &mut self.host_victims,
            };
            let Reverse(entry) = queue.heap.pop()?;
            let node = &mut self.nodes[entry.id as usize];
            if !node.live || node.generation != entry.generation {
                continue;
            }
            let evictable = match tier {
                Tier::Device => {
                    node.queued_device = false;
                    node.evictable_from_device()
                }
                Tier::Host => {
                    node.queued_host = false;
                    node.evictable_from_host()
                }
            };
            if !evictable {
                continue;
            }
            if self.candidate(entry.id) > entry {
                // Used since it was queued: in again at its new place.
                self.refresh(entry.id);
                continue;
            }
            return Some(entry.id);
        }
    }

    fn candidate(&self, id: NodeId) -> Candidate {
        let Node { hits, last_used, generation, .. } = *self.node(id);
        Candidate {
            uses: match self.policy {
                EvictionPolicy::Lru => 0,
                EvictionPolicy::Lfu => hits,
            },
            last_used,
            id,
            generation,
        }
    }
}
