//! The tree's own state, and the steps that all changes are made of.

use super::action::Actions;
use super::arena::Arena;
use super::aux::{Aux, List};
use super::component::{Component, PerComponent, Sizes};
use super::config::{BackupRule, Below, TreeConfig, TreeError};
use super::memory::Memory;
use super::node::{Cell, Index, Node, NodeId};
use super::victims::VictimQueue;
use crate::cache::CacheNamespace;

/// The tree.
#[derive(Debug)]
pub struct Tree {
    pub(super) config: TreeConfig,
    pub(super) window_pages: u32,
    pub(super) components: &'static [Component],
    pub(super) arena: Arena,
    pub(super) aux: [Aux; 2],
    pub(super) clock: u64,
    pub(super) sizes: PerComponent<Sizes>,
    pub(super) device_victims: VictimQueue,
    pub(super) host_victims: VictimQueue,
    /// Stores in use, as bits.
    pub(super) stores: u64,
    pub(super) memory: Memory,
}

impl Tree {
    /// An empty tree.
    pub fn new(config: TreeConfig) -> Result<Self, TreeError> {
        config.check()?;
        use Component::{Full, State, Window};
        let components: &'static [Component] = match (config.window.is_some(), config.states.is_some()) {
            (false, false) => &[Full],
            (true, false) => &[Full, Window],
            (false, true) => &[Full, State],
            (true, true) => &[Full, Window, State],
        };
        Ok(Tree {
            window_pages: config.window_pages(),
            components,
            arena: Arena::new(config.page_size + config.units.overlap()),
            aux: Default::default(),
            clock: 0,
            sizes: PerComponent::default(),
            device_victims: VictimQueue::default(),
            host_victims: VictimQueue::default(),
            stores: 0,
            memory: Memory::default(),
            config,
        })
    }

    /// Changes when the tier below is given what is here, for what is used, inserted or evicted from now on.
    pub fn set_rules(&mut self, backup: BackupRule, write_back: bool) -> Result<(), TreeError> {
        let config = TreeConfig { backup, write_back, ..self.config };
        config.check()?;
        self.config = config;
        Ok(())
    }

    /// Its settings.
    pub fn config(&self) -> &TreeConfig {
        &self.config
    }

    /// The components it holds, full attention first.
    pub fn components(&self) -> &'static [Component] {
        self.components
    }

    /// Makes place for as many nodes, so that no insert up to there has to move those that are here; that would take some milliseconds
    /// at a million. There are never more nodes than pages in the pools of device and host. Place that is not used yet costs
    /// address space alone, but for a byte a node.
    pub fn reserve(&mut self, nodes: usize) {
        self.arena.reserve(nodes);
        for &component in &self.components[1..] {
            self.aux[component as usize - 1].reserve(nodes);
        }
    }

    /// Says which stores are in use, as bits. What nodes know of the others is forgotten, so that their bits can be given anew.
    pub fn set_stores(&mut self, stores: u64) {
        self.forget_stores(!stores);
        self.stores = stores;
    }

    /// Forgets what is known of these stores, for instance because they were emptied. Writes that run are not touched.
    pub fn forget_stores(&mut self, bits: u64) {
        let live: Vec<Index> = self.arena.live().collect();
        for at in live {
            self.arena.node_mut(at).owed &= !bits;
            for &component in self.components {
                self.cell_mut(component, at).stored &= !bits;
            }
        }
    }

    /// The root of a namespace, made if there is none. It goes when the last node below it does, unless it is locked: who inserts below
    /// it locks it first.
    pub fn root(&mut self, namespace: &CacheNamespace) -> NodeId {
        let at = match self.arena.find_root(namespace) {
            Some(at) => at,
            None => {
                let at = self.arena.add_root(namespace);
                self.enter_aux(at);
                at
            }
        };
        self.arena.id(at)
    }

    /// The root of a namespace, if it has one.
    pub fn find_root(&self, namespace: &CacheNamespace) -> Option<NodeId> {
        self.arena.find_root(namespace).map(|at| self.arena.id(at))
    }

    /// Forgets the root of a namespace if it holds nothing and nobody locks it.
    pub fn retire_root(&mut self, root: NodeId) {
        if let Some(at) = self.arena.resolve(root) {
            self.arena.retire_root(at);
        }
    }

    pub(super) fn resolve(&self, node: NodeId) -> Result<Index, TreeError> {
        self.arena.resolve(node).ok_or(TreeError::UnknownNode(node))
    }

    pub(super) fn refused<T>(&self, at: Index, problem: &'static str) -> Result<T, TreeError> {
        Err(TreeError::Refused { node: self.arena.id(at), problem })
    }

    pub(super) fn has(&self, component: Component) -> bool {
        self.components.contains(&component)
    }

    pub(super) fn cell(&self, component: Component, at: Index) -> &Cell {
        match component {
            Component::Full => &self.arena.node(at).full,
            other => self.aux[other as usize - 1].cell(at),
        }
    }

    pub(super) fn cell_mut(&mut self, component: Component, at: Index) -> &mut Cell {
        match component {
            Component::Full => &mut self.arena.node_mut(at).full,
            other => self.aux[other as usize - 1].cell_mut(at),
        }
    }

    /// Slots that a value of this node takes.
    pub(super) fn value_len(&self, component: Component, at: Index) -> usize {
        match component {
            Component::State => 1,
            _ => self.arena.node(at).pages as usize,
        }
    }

    /// Enters a node, with whatever stands in its full cell, and makes its other cells.
    pub(super) fn enter(&mut self, node: Node) -> Index {
        let at = self.arena.add(node);
        self.enter_aux(at);
        self.arena.link(at);
        at
    }

    fn enter_aux(&mut self, at: Index) {
        for &component in &self.components[1..] {
            self.aux[component as usize - 1].enter(at);
        }
    }

    pub(super) fn put_device(&mut self, component: Component, at: Index, slots: Box<[u32]>) {
        let cell = self.cell_mut(component, at);
        let (count, unlocked) = (slots.len(), cell.locks == 0);
        cell.device = slots;
        self.sizes[component].device += count;
        self.sizes[component].unlocked += if unlocked { count } else { 0 };
        if component == Component::Full {
            let parent = self.arena.node(at).parent;
            self.arena.node_mut(parent).device_children += 1;
            self.refresh(at);
            self.refresh(parent);
        } else {
            self.aux_changed(component, at);
        }
    }

    pub(super) fn take_device(&mut self, component: Component, at: Index) -> Box<[u32]> {
        let cell = self.cell_mut(component, at);
        let (slots, unlocked) = (std::mem::take(&mut cell.device), cell.locks == 0);
        cell.loading = false;
        if slots.is_empty() {
            return slots;
        }
        self.sizes[component].device -= slots.len();
        self.sizes[component].unlocked -= if unlocked { slots.len() } else { 0 };
        if component == Component::Full {
            let parent = self.arena.node(at).parent;
            self.arena.node_mut(parent).device_children -= 1;
            self.refresh(at);
            self.refresh(parent);
        } else {
            self.relist(component, at);
        }
        slots
    }

    pub(super) fn put_host(&mut self, component: Component, at: Index, slots: Box<[u32]>) {
        self.sizes[component].host += slots.len();
        self.cell_mut(component, at).host = slots;
        self.host_changed(component, at);
    }

    pub(super) fn take_host(&mut self, component: Component, at: Index) -> Box<[u32]> {
        let cell = self.cell_mut(component, at);
        cell.backing = false;
        let slots = std::mem::take(&mut cell.host);
        self.sizes[component].host -= slots.len();
        self.host_changed(component, at);
        slots
    }

    /// To be called when what is on the host, or who reads it, changed.
    pub(super) fn host_changed(&mut self, component: Component, at: Index) {
        match component {
            Component::Full => self.refresh(at),
            other => self.aux_changed(other, at),
        }
    }

    /// What a node has of a window or a state decides about its lists, and about the node as a whole.
    fn aux_changed(&mut self, component: Component, at: Index) {
        self.relist(component, at);
        self.refresh(at);
    }

    /// Puts a node into the lists where it belongs, as the newest if it was not there, and out of the others.
    pub(super) fn relist(&mut self, component: Component, at: Index) {
        for list in [List::Device, List::Host] {
            let belongs = self.belongs(component, list, at);
            let aux = &mut self.aux[component as usize - 1];
            match (belongs, aux.is_listed(list, at)) {
                (true, false) => aux.renew(list, at),
                (false, true) => aux.remove(list, at),
                _ => {}
            }
        }
    }

    pub(super) fn belongs(&self, component: Component, list: List, at: Index) -> bool {
        let cell = self.cell(component, at);
        match list {
            List::Device => cell.on_device() && cell.locks == 0,
            List::Host => {
                let held = cell.locks > 0 && !cell.on_device();
                cell.host_ready() && !held && self.arena.node(at).host_locks == 0
            }
        }
    }

    /// Marks a node and everything before it as used now, the node last: an ancestor always is older than what is below it. Of windows
    /// those count that the node's end needs, of states the node's own.
    pub fn touch(&mut self, node: NodeId) -> Result<(), TreeError> {
        let at = self.resolve(node)?;
        self.touch_at(at);
        Ok(())
    }

    pub(super) fn touch_at(&mut self, at: Index) {
        let mut time = self.clock + u64::from(self.arena.node(at).end()) + 1;
        self.clock = time;
        let mut above = at;
        while !self.arena.node(above).is_root() {
            let node = self.arena.node_mut(above);
            node.used = time;
            time -= 1;
            above = node.parent;
        }
        if self.has(Component::Window) {
            let reach = self.arena.node(at).end().saturating_sub(self.window_pages + 1);
            let mut nodes: Vec<Index> =
                self.arena.upward(at).take_while(|&above| self.arena.node(above).end() > reach).collect();
            nodes.reverse();
            nodes.into_iter().for_each(|at| self.renew(Component::Window, at));
        }
        if self.has(Component::State) {
            self.renew(Component::State, at);
        }
    }

    fn renew(&mut self, component: Component, at: Index) {
        let aux = &mut self.aux[component as usize - 1];
        for list in [List::Device, List::Host] {
            if aux.is_listed(list, at) {
                aux.renew(list, at);
            }
        }
    }

    /// Gives a node and everything before it at least this priority.
    pub fn prioritize(&mut self, node: NodeId, priority: i32) -> Result<(), TreeError> {
        let at = self.resolve(node)?;
        for part in self.arena.parts(at, 0) {
            let node = self.arena.node_mut(part);
            node.priority = node.priority.max(priority);
        }
        Ok(())
    }

    /// Counts that a request uses the nodes that begin at page `from` or later, up to `node`, and says which of them are to be backed up
    /// now. A request counts a node once: it passes as `from` where it ended the time before.
    pub fn count_use(&mut self, node: NodeId, from: u32) -> Result<Actions, TreeError> {
        let at = self.resolve(node)?;
        let mut actions = Actions::default();
        self.count_use_at(at, from, &mut actions);
        Ok(actions)
    }

    pub(super) fn count_use_at(&mut self, at: Index, from: u32, actions: &mut Actions) {
        let parts = self.arena.parts(at, from);
        for &part in &parts {
            let node = self.arena.node_mut(part);
            node.hits = node.hits.saturating_add(1);
        }
        let BackupRule::AfterHits(threshold) = self.config.backup else { return };
        if self.config.below == Below::Nothing {
            return;
        }
        let due = |at: Index| self.arena.node(at).hits >= threshold && self.lacks_backup(at);
        let Some(&deepest) = parts.iter().rev().find(|&&part| due(part)) else { return };
        // What is before it comes first, also if no request counted it often enough.
        let mut nodes: Vec<NodeId> = self
            .arena
            .upward(deepest)
            .filter(|&at| self.arena.node(at).start >= from && due(at) || at == deepest || self.lacks_full_backup(at))
            .map(|at| self.arena.id(at))
            .collect();
        nodes.reverse();
        actions.0.push(super::Action::Backup { nodes });
    }

    /// Whether the tier below lacks something that the node has on the device, and no transfer brings it there.
    fn lacks_backup(&self, at: Index) -> bool {
        self.components.iter().any(|&component| {
            let cell = self.cell(component, at);
            let lacking = match self.config.below {
                Below::Nothing => false,
                Below::Host => cell.host.is_empty(),
                Below::Stores => (cell.stored | cell.writing) & self.stores != self.stores,
            };
            cell.on_device() && !cell.loading && lacking
        })
    }

    fn lacks_full_backup(&self, at: Index) -> bool {
        let cell = self.cell(Component::Full, at);
        cell.on_device()
            && match self.config.below {
                Below::Nothing => false,
                Below::Host => cell.host.is_empty(),
                Below::Stores => (cell.stored | cell.writing) & self.stores != self.stores,
            }
    }
}
