//! Matching, and cutting and joining nodes.

use std::sync::Arc;

use super::Tree;
use super::node::{Node, NodeId};

/// Longest node that `merge_up` makes, in pages.
const MERGED_PAGES: usize = 512;

/// The longest known prefix of a token sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Match {
    /// The deepest node touched; the root if nothing matched.
    pub node: NodeId,
    /// Pages of that node that matched.
    pub used: usize,
    /// Pages of the whole prefix.
    pub pages: usize,
    /// Of these, pages on the device or on their way there; they come first.
    pub device_pages: usize,
}

impl Tree {
    /// Finds the longest prefix of whole pages of `tokens` below `root`.
    pub fn find(&self, root: NodeId, tokens: &[u32]) -> Match {
        let page_size = self.page_size;
        let mut found = Match { node: root, used: 0, pages: 0, device_pages: 0 };
        let mut rest = tokens;
        while let Some(page) = rest.get(..page_size) {
            let Some(child) = self.find_child(found.node, page) else {
                break;
            };
            let step = self.step(child, rest);
            found.node = child;
            found.used = step.used;
            found.pages += step.pages;
            found.device_pages += step.device_pages;
            if step.used < self.len(child) {
                break;
            }
            rest = &rest[step.used * page_size..];
        }
        found
    }

    /// How far `tokens` go along the node `child`, whose first page is known to match.
    pub(super) fn step(&self, child: NodeId, tokens: &[u32]) -> Match {
        let used = common_pages(self.node(child).span.tokens(), tokens, self.page_size);
        let device_pages = if self.node(child).on_device() { used } else { 0 };
        Match { node: child, used, pages: used, device_pages }
    }

    /// Makes the end of a match the end of a node, and says which.
    pub fn settle(&mut self, found: Match) -> NodeId {
        if found.used == 0 || found.used == self.len(found.node) {
            found.node
        } else {
            self.split(found.node, found.used)
        }
    }

    /// Cuts a node after its first `pages` pages. The node keeps its id and the pages after the cut;
    /// the new node before it is returned. Both keep locks and marks, so whoever holds the node
    /// holds both.
    pub fn split(&mut self, id: NodeId, pages: usize) -> NodeId {
        debug_assert!(pages > 0 && pages < self.len(id));
        self.unlink(id);
        let page_size = self.page_size;
        let node = &mut self.nodes[id as usize];
        let (head, tail) = node.span.split(pages, page_size);
        let mut first = Node::new(node.parent, node.start, head);
        first.device = take_front(&mut node.device, pages);
        first.host = take_front(&mut node.host, pages);
        first.loading = node.loading;
        first.backing = node.backing;
        first.storing = node.storing;
        first.settled = node.settled;
        first.owed = node.owed;
        first.unproven = node.unproven;
        first.locks = node.locks;
        first.hits = node.hits;
        first.last_used = node.last_used;
        node.span = tail;
        node.start += pages as u32;
        let first = self.add(first);
        self.nodes[id as usize].parent = first;
        self.link(first);
        self.link(id);
        self.refresh(first);
        self.refresh(id);
        first
    }

    /// Joins a node with the ones before it as long as nothing tells them apart, so that a sequence
    /// that grew page by page does not stay a chain of small nodes. The node keeps its id.
    pub fn merge_up(&mut self, id: NodeId) {
        loop {
            let node = self.node(id);
            if node.is_root() {
                return;
            }
            let above = node.parent;
            let parent = self.node(above);
            let quiet = |node: &Node| !node.loading && !node.backing && node.storing == 0;
            let alike = !parent.is_root()
                && parent.children == 1
                && parent.locks == node.locks
                && parent.on_device() == node.on_device()
                && parent.host.is_empty() == node.host.is_empty()
                && parent.settled == node.settled
                && parent.owed == node.owed
                && parent.unproven == node.unproven
                && quiet(parent)
                && quiet(node)
                && self.len(above) + self.len(id) <= MERGED_PAGES;
            if !alike {
                return;
            }
            self.unlink(id);
            self.unlink(above);
            let parent = &mut self.nodes[above as usize];
            let (grandparent, start) = (parent.parent, parent.start);
            let (device, host) = (std::mem::take(&mut parent.device), std::mem::take(&mut parent.host));
            let (head, hits) = (Arc::clone(&parent.span), parent.hits);
            let node = &mut self.nodes[id as usize];
            node.span = head.join(&node.span);
            node.parent = grandparent;
            node.start = start;
            node.device.splice(..0, device);
            node.host.splice(..0, host);
            node.hits = node.hits.max(hits);
            self.vacate(above);
            self.link(id);
            self.refresh(id);
        }
    }
}

fn take_front(pages: &mut Vec<u32>, count: usize) -> Vec<u32> {
    if pages.is_empty() {
        return Vec::new();
    }
    let tail = pages.split_off(count);
    std::mem::replace(pages, tail)
}

/// Leading whole pages that two sequences share.
fn common_pages(a: &[u32], b: &[u32], page_size: usize) -> usize {
    let length = a.len().min(b.len()) / page_size * page_size;
    if a[..length] == b[..length] {
        return length / page_size;
    }
    a.chunks_exact(page_size).zip(b.chunks_exact(page_size)).take_while(|(a, b)| a == b).count()
}
