//! A node: a run of pages that are in the same tiers.

use std::sync::Arc;

use super::span::Span;

/// Place of a node in the arena.
pub(super) type Index = u32;

/// No node.
pub(super) const NONE: Index = Index::MAX;

/// Names a node. Never means another one: a name whose node is gone stays unknown, also when its place is used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId {
    pub(super) index: Index,
    pub(super) generation: u32,
}

/// What a node has of one component.
#[derive(Debug, Default)]
pub(super) struct Cell {
    /// Device slots: one a page (one for a state), or none.
    pub device: Box<[u32]>,
    /// Host slots, likewise.
    pub host: Box<[u32]>,
    /// Stores, as bits, into which the slots are being written.
    pub writing: u64,
    /// Stores, as bits, that have what is here, or need not be given it.
    pub stored: u64,
    /// Device locks. Nodes without a value are counted too, so that a value that comes while they are held is protected.
    pub locks: u32,
    /// Device slots are being filled: nobody may read them yet.
    pub loading: bool,
    /// Host slots are being filled: nobody may read them yet.
    pub backing: bool,
}

impl Cell {
    /// Has device slots, filled or being filled.
    pub fn on_device(&self) -> bool {
        !self.device.is_empty()
    }

    /// Has host slots that can be read.
    pub fn host_ready(&self) -> bool {
        !self.host.is_empty() && !self.backing
    }

    /// No transfer runs on it.
    pub fn quiet(&self) -> bool {
        !self.loading && !self.backing && self.writing == 0
    }

    /// Takes the part before a cut after `pages` pages into a cell of its own. Marks and locks are copied.
    pub fn split(&mut self, pages: usize) -> Cell {
        Cell {
            device: take_front(&mut self.device, pages),
            host: take_front(&mut self.host, pages),
            ..Cell { device: Box::default(), host: Box::default(), ..*self }
        }
    }
}

fn take_front(slots: &mut Box<[u32]>, count: usize) -> Box<[u32]> {
    if slots.is_empty() {
        return Box::default();
    }
    let (head, tail) = slots.split_at(count.min(slots.len()));
    let (head, tail) = (Box::from(head), Box::from(tail));
    *slots = tail;
    head
}

/// A run of pages. All pages of a node are in the same state, component by component.
#[derive(Debug)]
pub(super) struct Node {
    /// Tokens, and keys once computed.
    pub span: Arc<Span>,
    /// Node whose pages come before; `NONE` for a root.
    pub parent: Index,
    /// Pages of the sequence before this node.
    pub start: u32,
    /// Pages.
    pub pages: u32,
    pub first_child: Index,
    pub next_sibling: Index,
    pub previous_sibling: Index,
    pub children: u32,
    /// Children whose full pages are on the device.
    pub device_children: u32,
    /// Transfers that read the host slots of this node.
    pub host_locks: u32,
    pub hits: u32,
    pub priority: i32,
    /// The tree's clock when it was last used.
    pub used: u64,
    /// The tree's clock when it came.
    pub created: u64,
    /// Stores, as bits, that are to be given the pages whatever their write policy says.
    pub owed: u64,
    /// Root of its namespace; a root's own place.
    pub root: Index,
    /// Pages of it, or before it, came from a store whose pages carry no seal: nothing tells whether they are right.
    pub unproven: bool,
    pub full: Cell,
    pub generation: u32,
    pub live: bool,
    pub queued_device: bool,
    pub queued_host: bool,
}

impl Node {
    pub fn new(parent: Index, start: u32, pages: u32, span: Arc<Span>) -> Self {
        Node {
            span,
            parent,
            start,
            pages,
            first_child: NONE,
            next_sibling: NONE,
            previous_sibling: NONE,
            children: 0,
            device_children: 0,
            host_locks: 0,
            hits: 0,
            priority: 0,
            used: 0,
            created: 0,
            owed: 0,
            root: NONE,
            unproven: false,
            full: Cell::default(),
            generation: 0,
            live: true,
            queued_device: false,
            queued_host: false,
        }
    }

    pub fn is_root(&self) -> bool {
        self.parent == NONE
    }

    pub fn end(&self) -> u32 {
        self.start + self.pages
    }

    /// Children that are on the host alone.
    pub fn host_children(&self) -> u32 {
        self.children - self.device_children
    }
}
