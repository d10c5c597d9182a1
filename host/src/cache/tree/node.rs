//! A node: a run of pages that are in the same tiers.

use std::sync::Arc;

use super::span::Span;

/// Index of a node in the arena.
pub(crate) type NodeId = u32;

/// No node.
pub(crate) const NONE: NodeId = NodeId::MAX;

/// A node as operations name it: stale once the node is gone, even if its slot is used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NodeRef {
    /// Slot.
    pub id: NodeId,
    /// How often the slot had been used before.
    pub generation: u32,
}

/// A run of pages. Each page is on the device, on the host, or both; all pages of a node are in the
/// same state.
#[derive(Debug)]
pub(crate) struct Node {
    /// Node whose pages come before; `NONE` for a root.
    pub parent: NodeId,
    /// Pages of the sequence before this node.
    pub start: u32,
    /// Tokens, and keys once computed.
    pub span: Arc<Span>,
    /// Device pages, one a page of the span, or empty.
    pub device: Vec<u32>,
    /// Host pages, one a page of the span, or empty.
    pub host: Vec<u32>,
    /// Device pages are being filled from the host: nobody may read them yet.
    pub loading: bool,
    /// Host pages are being filled from the device: nobody may read them yet.
    pub backing: bool,
    /// Backends, as bits, into which the host pages are being written: the node stays.
    pub storing: u64,
    /// Backends, as bits, that acknowledged all pages, or that need not be given them.
    pub settled: u64,
    /// Backends, as bits, that are to be given the pages whatever their write policy says.
    pub owed: u64,
    /// Pages of it, or before it, came from a store whose pages carry no seal: nothing tells whether they are right, so no store that
    /// relies on seals is given any of them.
    pub unproven: bool,
    /// Requests and operations that hold this node or one below it.
    pub locks: u32,
    /// Times it was used.
    pub hits: u32,
    /// The tree's clock when it was last used.
    pub last_used: u64,
    pub(super) first_child: NodeId,
    pub(super) next_sibling: NodeId,
    pub(super) previous_sibling: NodeId,
    pub(super) children: u32,
    pub(super) device_children: u32,
    pub(super) queued_device: bool,
    pub(super) queued_host: bool,
    pub(super) generation: u32,
    pub(super) live: bool,
}

impl Node {
    pub(super) fn new(parent: NodeId, start: u32, span: Arc<Span>) -> Self {
        Node {
            parent,
            start,
            span,
            device: Vec::new(),
            host: Vec::new(),
            loading: false,
            backing: false,
            storing: 0,
            settled: 0,
            owed: 0,
            unproven: false,
            locks: 0,
            hits: 0,
            last_used: 0,
            first_child: NONE,
            next_sibling: NONE,
            previous_sibling: NONE,
            children: 0,
            device_children: 0,
            queued_device: false,
            queued_host: false,
            generation: 0,
            live: true,
        }
    }

    /// Whether it is the root of a namespace.
    pub fn is_root(&self) -> bool {
        self.parent == NONE
    }

    /// Whether its pages are on the device, or being brought there.
    pub fn on_device(&self) -> bool {
        !self.device.is_empty()
    }

    /// Whether its pages can be read on the host.
    pub fn host_ready(&self) -> bool {
        !self.host.is_empty() && !self.backing
    }

    /// May leave the device: nobody holds it and nothing below it is on the device.
    pub(super) fn evictable_from_device(&self) -> bool {
        self.on_device()
            && self.locks == 0
            && self.device_children == 0
            && !self.loading
            && !self.backing
            && !self.is_root()
    }

    /// May leave the host: nothing needs these pages to be reached, and no operation holds them.
    pub(super) fn evictable_from_host(&self) -> bool {
        let reachable_without = if self.on_device() {
            self.children == self.device_children
        } else {
            self.children == 0 && self.locks == 0
        };
        !self.host.is_empty() && reachable_without && !self.loading && !self.backing && self.storing == 0
    }
}
