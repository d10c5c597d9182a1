//! Taking pages into the tree.

use super::Tree;
use std::hash::BuildHasher;
use std::sync::Arc;

use super::node::{Node, NodeId};
use super::span::Span;
use crate::plugin::backend::PageKey;

/// What became of device pages that were inserted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InsertedDevice {
    /// The node that ends the inserted pages.
    pub node: NodeId,
    /// Pages that are in the tree now, from the first one given.
    pub pages: usize,
    /// Of the pages given, those that the tree took.
    pub adopted: Vec<u32>,
    /// Of the pages given, those that the tree had already: the giver frees them.
    pub duplicates: Vec<u32>,
    /// New nodes, on the device alone.
    pub fresh: Vec<NodeId>,
}

/// What backends have of pages that come from storage, as bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StorageMarks {
    /// Those that need not be given them.
    pub settled: u64,
    /// Those that are to be given them whatever their write policy says.
    pub owed: u64,
    /// Nothing tells whether the pages are right.
    pub unproven: bool,
}

/// What became of host pages that were inserted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InsertedHost {
    /// The node of the pages that the tree took, if it took any.
    pub node: Option<NodeId>,
    /// Pages it did not take: it has them, or the prefix before them is gone.
    pub rejected: Vec<u32>,
    /// Whether the prefix before the pages was gone.
    pub orphaned: bool,
}

impl Tree {
    /// Inserts computed device pages for `tokens` after the node `from`, which is on the device and
    /// locked by the caller. Entries of `pages` are replaced by the tree's pages where it has them.
    /// Stops before pages that are being loaded: they cannot be read yet.
    pub fn insert_device(&mut self, from: NodeId, tokens: &[u32], pages: &mut [u32]) -> InsertedDevice {
        let page_size = self.page_size;
        let mut result =
            InsertedDevice { node: from, pages: 0, adopted: Vec::new(), duplicates: Vec::new(), fresh: Vec::new() };
        while result.pages < pages.len() {
            let rest = &tokens[result.pages * page_size..pages.len() * page_size];
            let found = self.find_child(result.node, &rest[..page_size]);
            let Some(child) = found else {
                let own = pages[result.pages..].to_vec();
                result.adopted.extend_from_slice(&own);
                result.node = self.add_leaf(result.node, Span::new(rest), own, Vec::new());
                self.nodes[result.node as usize].hits = 1;
                result.fresh.push(result.node);
                result.pages = pages.len();
                break;
            };
            if self.node(child).loading {
                break;
            }
            let step = self.step(child, rest);
            let child = self.settle(step);
            let given = &mut pages[result.pages..result.pages + step.used];
            if self.node(child).on_device() {
                result.duplicates.extend_from_slice(given);
                given.copy_from_slice(&self.node(child).device);
            } else {
                result.adopted.extend_from_slice(given);
                self.set_device(child, given.to_vec(), false);
            }
            let node = &mut self.nodes[child as usize];
            node.hits = node.hits.saturating_add(1);
            result.node = child;
            result.pages += step.used;
        }
        self.touch(result.node);
        result
    }

    /// Inserts host pages that came from storage. `tokens` is the sequence from its start to the end
    /// of the pages, of which the first stands after `start` pages.
    pub fn insert_host(
        &mut self,
        root: NodeId,
        tokens: &[u32],
        start: usize,
        keys: &[PageKey],
        pages: Vec<u32>,
        marks: StorageMarks,
    ) -> InsertedHost {
        let found = self.find(root, tokens);
        let Some(known) = found.pages.checked_sub(start) else {
            return InsertedHost { node: None, rejected: pages, orphaned: true };
        };
        let mut rejected = pages;
        let known = known.min(rejected.len());
        let adopted = rejected.split_off(known);
        if !adopted.is_empty() {
            let tokens = &tokens[(start + known) * self.page_size..];
            let parent = self.settle(found);
            let span = Span::with_keys(tokens, &keys[known..]);
            let node = self.add_leaf(parent, span, Vec::new(), adopted);
            self.nodes[node as usize].settled = marks.settled;
            self.nodes[node as usize].owed = marks.owed;
            self.nodes[node as usize].unproven |= marks.unproven;
            self.touch(node);
            return InsertedHost { node: Some(node), rejected, orphaned: false };
        }
        InsertedHost { node: None, rejected, orphaned: false }
    }

    fn add_leaf(&mut self, parent: NodeId, span: Arc<Span>, device: Vec<u32>, host: Vec<u32>) -> NodeId {
        let start = self.node(parent).start + self.len(parent) as u32;
        self.device_total += device.len();
        self.unlocked_device += device.len();
        self.host_total += host.len();
        let mut node = Node::new(parent, start, span);
        node.device = device;
        node.host = host;
        node.unproven = self.node(parent).unproven;
        let id = self.add(node);
        self.link(id);
        if start == 0
            && let Some(root) = self.root_info.get(&parent)
        {
            let page = self.hasher.hash_one(self.first_page(id));
            self.memory.began(page, root.tag);
        }
        self.refresh(id);
        self.refresh(parent);
        id
    }
}
