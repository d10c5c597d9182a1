//! The radix tree over token sequences: which pages of which prefix are in which tier.
//!
//! A pure decision core. It holds page numbers and never touches a page, knows no storage and no
//! clock but its own counter; the manager beside it does what it decides.
//!
//! Each namespace has a root of its own, so nothing is ever shared between namespaces. Nodes hold
//! whole pages. What holds at all times (and `check` checks):
//!
//! - a node's pages are all on the device or none, all on the host or none, and at least one of both;
//! - what is on the device has its whole prefix on the device;
//! - locks grow towards the root, and what is locked on the device stays there.
//!
//! Finding a child is one probe in a table of (parent, tokens of the first page), so the cost of a
//! match grows with the length of the key, not with the size of the tree.

mod check;
mod evict;
mod insert;
mod memory;
mod node;
mod span;
mod walk;

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashTable};

pub(crate) use evict::Removed;
pub(crate) use insert::StorageMarks;
pub(crate) use node::{NONE, Node, NodeId, NodeRef};
pub(crate) use span::KeyPath;
pub(crate) use walk::Match;

use super::config::EvictionPolicy;
use super::types::CacheNamespace;
use crate::plugin::backend::PageKey;
use evict::VictimQueue;
use memory::Memory;

#[derive(Debug)]
struct Root {
    namespace: CacheNamespace,
    seed: Option<PageKey>,
    /// Tells namespaces apart in fingerprints.
    tag: u64,
}

/// The tree.
#[derive(Debug)]
pub(crate) struct Tree {
    page_size: usize,
    policy: EvictionPolicy,
    nodes: Vec<Node>,
    vacant: Vec<NodeId>,
    children: HashTable<NodeId>,
    hasher: DefaultHashBuilder,
    roots: HashMap<CacheNamespace, NodeId>,
    root_info: HashMap<NodeId, Root>,
    clock: u64,
    /// Device pages in nodes that nobody locks.
    unlocked_device: usize,
    device_total: usize,
    host_total: usize,
    device_victims: VictimQueue,
    host_victims: VictimQueue,
    memory: Memory,
}

impl Tree {
    /// An empty tree over pages of `page_size` tokens.
    pub fn new(page_size: usize, policy: EvictionPolicy) -> Self {
        Tree {
            page_size: page_size.max(1),
            policy,
            nodes: Vec::new(),
            vacant: Vec::new(),
            children: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            roots: HashMap::new(),
            root_info: HashMap::new(),
            clock: 0,
            unlocked_device: 0,
            device_total: 0,
            host_total: 0,
            device_victims: VictimQueue::default(),
            host_victims: VictimQueue::default(),
            memory: Memory::default(),
        }
    }

    /// The root of a namespace, made if there is none.
    pub fn root(&mut self, namespace: &CacheNamespace) -> NodeId {
        if let Some(&root) = self.roots.get(namespace) {
            return root;
        }
        let root = self.add(Node::new(NONE, 0, Arc::default()));
        let info = Root { namespace: namespace.clone(), seed: namespace.seed(), tag: self.hasher.hash_one(namespace) };
        self.roots.insert(namespace.clone(), root);
        self.root_info.insert(root, info);
        root
    }

    /// The root of a namespace, if it has one.
    pub fn find_root(&self, namespace: &CacheNamespace) -> Option<NodeId> {
        self.roots.get(namespace).copied()
    }

    /// A node. The id must be of a live node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }

    /// Pages of a node.
    pub fn len(&self, id: NodeId) -> usize {
        self.node(id).span.tokens().len() / self.page_size
    }

    /// The name of a node for an operation that may outlive it.
    pub fn reference(&self, id: NodeId) -> NodeRef {
        NodeRef { id, generation: self.node(id).generation }
    }

    /// The node, if it still is there.
    pub fn resolve(&self, node: NodeRef) -> Option<NodeId> {
        self.nodes
            .get(node.id as usize)
            .filter(|found| found.live && found.generation == node.generation)
            .map(|_| node.id)
    }

    /// Ids of all live nodes but the roots.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        (0..self.nodes.len() as NodeId).filter(|&id| self.node(id).live && !self.node(id).is_root())
    }

    /// Live nodes but the roots.
    pub fn node_count(&self) -> usize {
        self.nodes.len() - self.vacant.len() - self.roots.len()
    }

    /// Device pages in the tree, in nodes that nobody locks, and host pages in the tree.
    pub fn totals(&self) -> (usize, usize, usize) {
        (self.device_total, self.unlocked_device, self.host_total)
    }

    /// Nodes from the first after the root down to `id`.
    pub fn path(&self, id: NodeId) -> Vec<NodeId> {
        let mut path = Vec::new();
        let mut at = id;
        while !self.node(at).is_root() {
            path.push(at);
            at = self.node(at).parent;
        }
        path.reverse();
        path
    }

    /// The way to the first `used` pages of `id`, for computing keys.
    pub fn key_path(&self, id: NodeId, used: usize) -> KeyPath {
        let mut spans = Vec::new();
        let mut at = id;
        while !self.node(at).is_root() {
            spans.push(Arc::clone(&self.node(at).span));
            at = self.node(at).parent;
        }
        spans.reverse();
        KeyPath {
            seed: self.root_info.get(&at).and_then(|root| root.seed),
            spans,
            pages: self.node(id).start as usize + used,
        }
    }

    /// Locks a node and everything before it.
    pub fn lock(&mut self, id: NodeId) {
        let mut at = id;
        while at != NONE {
            let node = &mut self.nodes[at as usize];
            if node.locks == 0 {
                self.unlocked_device -= node.device.len();
            }
            node.locks += 1;
            at = node.parent;
        }
    }

    /// Takes back one `lock` of the same node.
    pub fn unlock(&mut self, id: NodeId) {
        let mut at = id;
        while at != NONE {
            let node = &mut self.nodes[at as usize];
            let parent = node.parent;
            match node.locks.checked_sub(1) {
                Some(locks) => node.locks = locks,
                None => {
                    tracing::error!(node = at, "cache node unlocked more often than locked");
                    return;
                }
            }
            if node.locks == 0 {
                self.unlocked_device += node.device.len();
                self.refresh(at);
                self.retire_root(at);
            }
            at = parent;
        }
    }

    /// Marks a node and everything before it as used now.
    pub fn touch(&mut self, id: NodeId) {
        self.mark_used(id, 0);
    }

    /// As `touch`, and counts it: a request reuses these pages.
    pub fn hit(&mut self, id: NodeId) {
        self.mark_used(id, 1);
    }

    fn mark_used(&mut self, id: NodeId, hits: u32) {
        self.clock += 1;
        let mut at = id;
        while at != NONE {
            let clock = self.clock;
            let node = &mut self.nodes[at as usize];
            node.last_used = clock;
            node.hits = node.hits.saturating_add(hits);
            at = node.parent;
        }
    }

    /// Gives a node device pages. Its parent must be on the device.
    pub fn set_device(&mut self, id: NodeId, pages: Vec<u32>, loading: bool) {
        let node = &mut self.nodes[id as usize];
        let parent = node.parent;
        self.device_total += pages.len();
        if node.locks == 0 {
            self.unlocked_device += pages.len();
        }
        node.device = pages;
        node.loading = loading;
        self.nodes[parent as usize].device_children += 1;
        self.refresh(id);
        self.refresh(parent);
    }

    /// Gives a node host pages that are being filled.
    pub fn set_host_backing(&mut self, id: NodeId, pages: Vec<u32>) {
        self.host_total += pages.len();
        let node = &mut self.nodes[id as usize];
        node.host = pages;
        node.backing = true;
    }

    /// Changes the marks of the node `tail` and of the nodes that were split off it since it began at
    /// page `start`, top down.
    pub fn update_since(&mut self, tail: NodeId, start: u32, change: impl Fn(&mut Node)) -> Vec<NodeId> {
        let mut nodes = Vec::new();
        let mut at = tail;
        while at != NONE && !self.node(at).is_root() && self.node(at).start >= start {
            nodes.push(at);
            at = self.node(at).parent;
        }
        nodes.reverse();
        for &id in &nodes {
            change(&mut self.nodes[id as usize]);
            self.refresh(id);
        }
        nodes
    }

    /// Forgets what is known of these backends, given as bits.
    pub fn forget_backends(&mut self, bits: u64) {
        for node in &mut self.nodes {
            node.settled &= !bits;
            node.owed &= !bits;
        }
    }

    /// Whether the page after `pages` pages of a sequence was here and was evicted.
    pub fn was_evicted(&self, root: NodeId, pages: usize, page: &[u32]) -> bool {
        let fingerprint = self.fingerprint(root, pages as u32, page);
        self.memory.has_departed(fingerprint)
    }

    /// Whether another namespace began a sequence with `page`.
    pub fn is_elsewhere(&self, root: NodeId, page: &[u32]) -> bool {
        let tag = self.root_info.get(&root).map_or(0, |info| info.tag);
        self.memory.began_elsewhere(self.hasher.hash_one(page), tag)
    }

    fn fingerprint(&self, root: NodeId, start: u32, page: &[u32]) -> u64 {
        let tag = self.root_info.get(&root).map_or(0, |info| info.tag);
        self.hasher.hash_one((tag, start, page))
    }

    fn root_of(&self, id: NodeId) -> NodeId {
        let mut at = id;
        while !self.node(at).is_root() {
            at = self.node(at).parent;
        }
        at
    }

    fn first_page(&self, id: NodeId) -> &[u32] {
        let tokens = self.node(id).span.tokens();
        tokens.get(..self.page_size).unwrap_or(tokens)
    }

    fn add(&mut self, mut node: Node) -> NodeId {
        match self.vacant.pop() {
            Some(id) => {
                node.generation = self.nodes[id as usize].generation.wrapping_add(1);
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as NodeId
            }
        }
    }

    fn vacate(&mut self, id: NodeId) {
        let node = &mut self.nodes[id as usize];
        node.live = false;
        node.span = Arc::default();
        self.vacant.push(id);
    }

    /// Removes the root of a namespace that holds nothing and that nobody uses.
    pub fn retire_root(&mut self, id: NodeId) {
        let node = self.node(id);
        if !node.live || !node.is_root() || node.children > 0 || node.locks > 0 {
            return;
        }
        if let Some(root) = self.root_info.remove(&id) {
            self.roots.remove(&root.namespace);
            self.vacate(id);
        }
    }

    fn find_child(&self, parent: NodeId, page: &[u32]) -> Option<NodeId> {
        let hash = self.hasher.hash_one((parent, page));
        self.children.find(hash, |&id| self.node(id).parent == parent && self.first_page(id) == page).copied()
    }

    /// Enters a node under its parent: table, sibling list, counts.
    fn link(&mut self, id: NodeId) {
        let parent = self.node(id).parent;
        let hash = self.hasher.hash_one((parent, self.first_page(id)));
        let (nodes, hasher, page_size) = (&self.nodes, &self.hasher, self.page_size);
        self.children.insert_unique(hash, id, |&id| {
            let node = &nodes[id as usize];
            let tokens = node.span.tokens();
            hasher.hash_one((node.parent, tokens.get(..page_size).unwrap_or(tokens)))
        });
        let first = self.node(parent).first_child;
        if first != NONE {
            self.nodes[first as usize].previous_sibling = id;
        }
        let on_device = u32::from(self.node(id).on_device());
        let node = &mut self.nodes[id as usize];
        node.next_sibling = first;
        node.previous_sibling = NONE;
        let parent = &mut self.nodes[parent as usize];
        parent.first_child = id;
        parent.children += 1;
        parent.device_children += on_device;
    }

    /// Takes a node out from under its parent.
    fn unlink(&mut self, id: NodeId) {
        let node = self.node(id);
        let (parent, next, previous) = (node.parent, node.next_sibling, node.previous_sibling);
        let on_device = u32::from(node.on_device());
        let hash = self.hasher.hash_one((parent, self.first_page(id)));
        if let Ok(entry) = self.children.find_entry(hash, |&found| found == id) {
            entry.remove();
        }
        if next != NONE {
            self.nodes[next as usize].previous_sibling = previous;
        }
        if previous != NONE {
            self.nodes[previous as usize].next_sibling = next;
        }
        let parent = &mut self.nodes[parent as usize];
        if parent.first_child == id {
            parent.first_child = next;
        }
        parent.children -= 1;
        parent.device_children -= on_device;
    }

    fn child_ids(&self, id: NodeId) -> Vec<NodeId> {
        let mut ids = Vec::new();
        let mut at = self.node(id).first_child;
        while at != NONE {
            ids.push(at);
            at = self.node(at).next_sibling;
        }
        ids
    }
}
