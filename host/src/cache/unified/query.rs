//! What can be asked of the tree.

use super::component::{Component, Sizes};
use super::config::TreeError;
use super::matching::Boundary;
use super::node::{Cell, Index, NONE, NodeId};
use super::span::KeyPath;
use super::tree::Tree;
use crate::plugin::backend::PageKey;

/// What policies look at in a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeInfo {
    /// Pages of the sequence before it.
    pub start: u32,
    /// Its pages.
    pub pages: u32,
    /// Requests that used it.
    pub hits: u32,
    /// The highest priority of a request that inserted it or went through it.
    pub priority: i32,
    /// Its full pages are on the device, or on their way there.
    pub on_device: bool,
    /// They are on their way there.
    pub loading: bool,
    /// Its full pages can be read on the host.
    pub on_host: bool,
    /// They are on their way there.
    pub backing: bool,
    /// A copy of any of its components between device and host runs.
    pub copied: bool,
    /// Stores, as bits, that are to be given the pages whatever their write policy says.
    pub owed: u64,
    /// Stores, as bits, that have all that is on the host, of every component, or need not be given it.
    pub stored: u64,
    /// Stores, as bits, that have all that is on device or host.
    pub stored_all: u64,
    /// Stores, as bits, to which something is being written.
    pub writing: u64,
    /// Nothing tells whether the pages are right: they, or pages before them, came from a store whose pages carry no seal.
    pub unproven: bool,
}

/// Whether the end of a node can be gone on from at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// Everything is on the device.
    Ready,
    /// Something is on its way to the device. Something else may be lacking.
    Loading,
    /// Nothing is on its way to the device, and something is not there.
    Lacking,
}

impl Tree {
    /// Slots in the tree.
    pub fn sizes(&self, component: Component) -> Sizes {
        self.sizes[component]
    }

    /// Nodes but the roots.
    pub fn node_count(&self) -> usize {
        self.arena.count()
    }

    /// Whether the node still is there.
    pub fn contains(&self, node: NodeId) -> bool {
        self.arena.resolve(node).is_some()
    }

    /// What policies look at.
    pub fn info(&self, node: NodeId) -> Result<NodeInfo, TreeError> {
        Ok(self.info_at(self.resolve(node)?))
    }

    pub(super) fn info_at(&self, at: Index) -> NodeInfo {
        let node = self.arena.node(at);
        let (mut stored, mut stored_all, mut writing) = (node.full.stored, node.full.stored, node.full.writing);
        for &component in &self.components[1..] {
            let cell = self.cell(component, at);
            writing |= cell.writing;
            if cell.host_ready() {
                stored &= cell.stored;
            }
            if cell.on_device() || cell.host_ready() {
                stored_all &= cell.stored;
            }
        }
        NodeInfo {
            start: node.start,
            pages: node.pages,
            hits: node.hits,
            priority: node.priority,
            on_device: node.full.on_device(),
            loading: node.full.loading,
            on_host: node.full.host_ready(),
            backing: node.full.backing,
            copied: self.is_copied(at),
            owed: node.owed,
            stored,
            stored_all,
            writing,
            unproven: node.unproven,
        }
    }

    /// Pages of the sequence that the node ends: the end of its own.
    pub fn end(&self, node: NodeId) -> Result<u32, TreeError> {
        Ok(self.arena.node(self.resolve(node)?).end())
    }

    /// Pages of the sequence before the node.
    pub fn start(&self, node: NodeId) -> Result<u32, TreeError> {
        Ok(self.arena.node(self.resolve(node)?).start)
    }

    /// Nodes from the first after the root down to `node`.
    pub fn path(&self, node: NodeId) -> Result<Vec<NodeId>, TreeError> {
        let at = self.resolve(node)?;
        Ok(self.arena.parts(at, 0).into_iter().map(|at| self.arena.id(at)).collect())
    }

    /// The node before this one; none before the first of a sequence.
    pub fn parent(&self, node: NodeId) -> Result<Option<NodeId>, TreeError> {
        let parent = self.arena.node(self.resolve(node)?).parent;
        Ok((parent != NONE && !self.arena.node(parent).is_root()).then(|| self.arena.id(parent)))
    }

    /// The nodes, from the top down, that what was `tail` when it began at page `start` is made of now.
    pub fn parts(&self, tail: NodeId, start: u32) -> Result<Vec<NodeId>, TreeError> {
        let at = self.resolve(tail)?;
        let start = start.min(self.arena.node(at).start);
        Ok(self.arena.parts(at, start).into_iter().map(|at| self.arena.id(at)).collect())
    }

    /// Locks of a component on a node, and transfers that read its host slots.
    pub fn holders(&self, component: Component, node: NodeId) -> Result<(u32, u32), TreeError> {
        let at = self.resolve(node)?;
        Ok((self.cell(component, at).locks, self.arena.node(at).host_locks))
    }

    /// Whether the end of a node can be gone on from with what is on the device.
    pub fn readiness(&self, node: NodeId) -> Result<Readiness, TreeError> {
        let at = self.resolve(node)?;
        let reach = self.arena.node(at).end().saturating_sub(self.window_pages);
        let mut ready = Readiness::Ready;
        for part in self.arena.upward(at) {
            for &component in self.components {
                let needed = match component {
                    Component::Full => true,
                    Component::Window => self.arena.node(part).end() > reach,
                    Component::State => part == at,
                };
                let cell = self.cell(component, part);
                if needed && cell.loading {
                    return Ok(Readiness::Loading);
                }
                if needed && !cell.on_device() {
                    ready = Readiness::Lacking;
                }
            }
        }
        Ok(ready)
    }

    /// Whether the page after `pages` pages of a sequence was here and left. Forgetful: a no may be false.
    pub fn was_evicted(&self, root: NodeId, pages: u32, page: &[u32]) -> bool {
        let page = self.arena.fingerprint(root.index, pages, page);
        self.memory.has_departed(page)
    }

    /// Whether a sequence of another namespace began with `page`. Forgetful: a no may be false.
    pub fn is_elsewhere(&self, root: NodeId, page: &[u32]) -> bool {
        self.memory.began_elsewhere(self.arena.first_fingerprint(page), self.arena.tag(root.index))
    }

    /// All nodes but the roots.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.arena.live().filter(|&at| !self.arena.node(at).is_root()).map(|at| self.arena.id(at))
    }

    /// Device slots of the path to `node`: a page table from position 0. Pages that are not on the device stand as
    /// [`NO_SLOT`](super::NO_SLOT); for states the slot at the node's end alone.
    pub fn device_table(&self, component: Component, node: NodeId) -> Result<Vec<u32>, TreeError> {
        let at = self.resolve(node)?;
        if component == Component::State {
            return Ok(self.cell(component, at).device.to_vec());
        }
        let mut table = Vec::with_capacity(self.arena.node(at).end() as usize);
        for part in self.arena.parts(at, 0) {
            let cell = self.cell(component, part);
            match cell.on_device() {
                true => table.extend_from_slice(&cell.device),
                false => table.resize(table.len() + self.arena.node(part).pages as usize, super::NO_SLOT),
            }
        }
        Ok(table)
    }

    /// Device slots of the node alone.
    pub fn device_slots(&self, component: Component, node: NodeId) -> Result<&[u32], TreeError> {
        Ok(&self.cell(component, self.resolve(node)?).device)
    }

    /// Host slots of the node alone, filled or being filled.
    pub fn host_slots(&self, component: Component, node: NodeId) -> Result<&[u32], TreeError> {
        Ok(&self.cell(component, self.resolve(node)?).host)
    }

    /// Stores, as bits, that have what the node has of a component.
    pub fn stored(&self, component: Component, node: NodeId) -> Result<u64, TreeError> {
        Ok(self.cell(component, self.resolve(node)?).stored)
    }

    /// The way to the node's end, for computing keys.
    pub fn key_path(&self, node: NodeId) -> Result<KeyPath, TreeError> {
        let at = self.resolve(node)?;
        Ok(self.key_path_at(at, self.arena.node(at).end()))
    }

    /// The way to a boundary, for computing keys.
    pub fn key_path_to(&self, boundary: Boundary) -> Result<KeyPath, TreeError> {
        Ok(self.key_path_at(self.resolve(boundary.node)?, boundary.pages))
    }

    fn key_path_at(&self, at: Index, pages: u32) -> KeyPath {
        let parts = self.arena.parts(at, 0);
        let root = parts.first().map_or(at, |&first| self.arena.node(first).parent);
        KeyPath {
            seed: self.arena.root_info(root).and_then(|root| root.seed),
            spans: parts.iter().map(|&part| self.arena.node(part).span.clone()).collect(),
            pages: pages as usize,
            page_size: self.config.page_size,
            units: self.config.units,
        }
    }

    /// The start of a sequence in a namespace that has no root yet, for computing keys.
    pub fn key_path_from(&self, seed: Option<PageKey>) -> KeyPath {
        KeyPath { seed, page_size: self.config.page_size, units: self.config.units, ..KeyPath::default() }
    }

    /// Bytes that the tree takes, without what the allocator adds.
    pub fn bytes(&self) -> usize {
        let slots = |cell: &Cell| size_of_val(&*cell.device) + size_of_val(&*cell.host);
        let aux: usize = self.components[1..]
            .iter()
            .map(|&component| {
                let values: usize = self.arena.live().map(|at| slots(self.cell(component, at))).sum();
                values + self.aux[component as usize - 1].bytes()
            })
            .sum();
        self.arena.bytes() + aux + self.device_victims.bytes() + self.host_victims.bytes()
    }
}
