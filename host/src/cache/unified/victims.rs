//! Which leaves leave, in order of worth.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::component::Component;
use super::node::{Index, Node};
use super::tree::Tree;

/// Candidates by policy. Entries grow stale when a node is used, locked or removed; a stale one is put right or thrown away when it
/// comes up, so using a node costs nothing here. Each node has at most one entry.
#[derive(Debug, Default)]
pub(super) struct VictimQueue {
    heap: BinaryHeap<Reverse<Candidate>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: (i64, u64),
    index: Index,
    generation: u32,
}

impl VictimQueue {
    /// Adds a candidate. `live` tells how many nodes there are: entries of nodes that are gone are swept out when they are the most.
    fn push(&mut self, candidate: Candidate, live: usize, is_stale: impl Fn(&Candidate) -> bool) {
        if self.heap.len() > 2 * live + 64 {
            self.heap.retain(|Reverse(entry)| !is_stale(entry));
        }
        self.heap.push(Reverse(candidate));
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    pub fn bytes(&self) -> usize {
        self.heap.capacity() * size_of::<Candidate>()
    }
}

/// From which tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tier {
    Device,
    Host,
}

impl Tree {
    /// A leaf of the device: nothing below it is there, and nobody holds any part of it.
    pub(super) fn is_device_leaf(&self, at: Index) -> bool {
        let node = self.arena.node(at);
        node.full.on_device()
            && node.device_children == 0
            && !node.is_root()
            && self.components.iter().all(|&component| {
                let cell = self.cell(component, at);
                cell.locks == 0 && !cell.loading && !cell.backing
            })
    }

    /// May leave the host: nothing needs these pages to be reached, and no transfer reads them.
    pub(super) fn is_host_leaf(&self, at: Index) -> bool {
        let node = self.arena.node(at);
        let reachable_without = match node.full.on_device() {
            // What is held and on the host alone stays.
            true => {
                node.host_children() == 0
                    && self.components.iter().all(|&component| {
                        let cell = self.cell(component, at);
                        cell.locks == 0 || cell.on_device() || cell.host.is_empty()
                    })
            }
            false => node.children == 0 && self.components.iter().all(|&component| self.cell(component, at).locks == 0),
        };
        !node.full.host.is_empty()
            && reachable_without
            && node.host_locks == 0
            && self.components.iter().all(|&component| self.cell(component, at).quiet())
    }

    /// Makes a node a candidate where it may be one.
    pub(super) fn refresh(&mut self, at: Index) {
        let node = self.arena.node(at);
        if !node.live || node.is_root() {
            return;
        }
        let (queued_device, queued_host) = (node.queued_device, node.queued_host);
        let (as_device, as_host) = (!queued_device && self.is_device_leaf(at), !queued_host && self.is_host_leaf(at));
        if !as_device && !as_host {
            return;
        }
        let candidate = self.candidate(at);
        let node = self.arena.node_mut(at);
        node.queued_device |= as_device;
        node.queued_host |= as_host;
        let (arena, live) = (&self.arena, self.arena.live_count());
        let is_stale = |entry: &Candidate| {
            let node = arena.node(entry.index);
            !node.live || node.generation != entry.generation
        };
        if as_device {
            self.device_victims.push(candidate, live, is_stale);
        }
        if as_host {
            self.host_victims.push(candidate, live, is_stale);
        }
    }

    /// The leaf that is worth least. It is no candidate again until `refresh`.
    pub(super) fn victim(&mut self, tier: Tier) -> Option<Index> {
        loop {
            let queue = match tier {
                Tier::Device => &mut self.device_victims,
                Tier::Host => &mut self.host_victims,
            };
            let Reverse(entry) = queue.heap.pop()?;
            let node = self.arena.node_mut(entry.index);
            if !node.live || node.generation != entry.generation {
                continue;
            }
            let leaf = match tier {
                Tier::Device => {
                    node.queued_device = false;
                    self.is_device_leaf(entry.index)
                }
                Tier::Host => {
                    node.queued_host = false;
                    self.is_host_leaf(entry.index)
                }
            };
            if !leaf {
                continue;
            }
            if self.candidate(entry.index) > entry {
                // Worth more since it was queued: in again at its new place.
                self.refresh(entry.index);
                continue;
            }
            return Some(entry.index);
        }
    }

    pub(super) fn rank(&self, at: Index) -> (i64, u64) {
        let Node { used, created, hits, priority, .. } = *self.arena.node(at);
        self.config.policy.rank(used, created, hits, priority)
    }

    fn candidate(&self, at: Index) -> Candidate {
        Candidate { rank: self.rank(at), index: at, generation: self.arena.node(at).generation }
    }

    /// The leaf of the device that is worth least, found by looking at all nodes.
    #[cfg(test)]
    pub(super) fn least_device_leaf(&self) -> Option<Index> {
        self.arena.live().filter(|&at| self.is_device_leaf(at)).min_by_key(|&at| self.candidate(at))
    }

    /// The component whose lists a victim of it is taken from, if it is not full attention.
    pub(super) fn oldest(&self, component: Component, list: super::aux::List) -> Option<Index> {
        self.aux[component as usize - 1].oldest(list)
    }
}
