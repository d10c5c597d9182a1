//! Copies between tiers: device to host, host to device, either to stores.
//!
//! A transfer begins with a ticket and ends with it. The ticket names the node and the page where it began, so that it covers all parts
//! if the node is cut meanwhile, and what it reads and writes is held until it ends.

use super::action::Actions;
use super::component::{Component, PerComponent, Slots};
use super::config::TreeError;
use super::lock::{HostLock, Lock};
use super::node::{Index, NodeId};
use super::tree::Tree;

/// A copy of one node to the host.
#[derive(Debug)]
#[must_use = "what a transfer holds is held until it is finished"]
pub struct BackupTicket {
    lock: Lock,
    start: u32,
}

/// A load of the end of a path from the host.
#[derive(Debug)]
#[must_use = "what a transfer holds is held until it is finished"]
pub struct LoadTicket {
    lock: Lock,
    sources: HostLock,
}

/// Slots that a load copies, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadCopy {
    /// Whose pools.
    pub component: Component,
    /// From here.
    pub host: Vec<u32>,
    /// To here.
    pub device: Vec<u32>,
}

/// A write of one node to a store.
#[derive(Debug)]
#[must_use = "what a transfer holds is held until it is finished"]
pub struct StoreTicket {
    hold: Hold,
    node: NodeId,
    start: u32,
    bit: u64,
    components: Vec<Component>,
}

#[derive(Debug)]
enum Hold {
    Device(Lock),
    Host(HostLock),
}

impl BackupTicket {
    /// The node that ends what is copied.
    pub fn node(&self) -> NodeId {
        self.lock.node()
    }

    /// Page of the sequence at which it begins.
    pub fn start(&self) -> u32 {
        self.start
    }
}

impl LoadTicket {
    /// The node that ends what is loaded.
    pub fn node(&self) -> NodeId {
        self.lock.node()
    }

    /// Page of the sequence from which on host slots are held.
    pub fn start(&self) -> u32 {
        self.sources.from
    }
}

impl StoreTicket {
    /// The node that ends what is written.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Page of the sequence at which it begins.
    pub fn start(&self) -> u32 {
        self.start
    }

    /// The store.
    pub fn bit(&self) -> u64 {
        self.bit
    }
}

/// From which tier a store is given pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Device slots (linker mode).
    Device,
    /// Host slots (hierarchical mode).
    Host,
}

impl Tree {
    /// Host slots that a copy of the node would take: what is on the device and has no host slots.
    pub fn backup_needs(&self, node: NodeId) -> Result<PerComponent<usize>, TreeError> {
        let at = self.resolve(node)?;
        let mut needs = PerComponent::default();
        for &component in self.components {
            let cell = self.cell(component, at);
            needs[component] = if cell.on_device() && cell.host.is_empty() { cell.device.len() } else { 0 };
        }
        Ok(needs)
    }

    /// Begins a copy of a node to these host slots, for each component either none or as many as `backup_needs` says. Windows and states
    /// stand on the host beside full pages only.
    pub fn begin_backup(&mut self, node: NodeId, host: Slots) -> Result<BackupTicket, TreeError> {
        let needs = self.backup_needs(node)?;
        let at = self.resolve(node)?;
        for component in Component::ALL {
            let (found, needed) = (host[component].len(), needs[component]);
            if found != 0 && found != needed {
                return Err(TreeError::Shape { component, found, needed });
            }
        }
        if self.is_copied(at) {
            return self.refused(at, "it is being copied already");
        }
        if host[Component::Full].is_empty() && self.arena.node(at).full.host.is_empty() {
            return self.refused(at, "full pages are to be on the host before other components");
        }
        let lock = self.lock(node)?;
        for (component, slots) in Component::ALL.into_iter().zip(host.0).filter(|(_, slots)| !slots.is_empty()) {
            self.cell_mut(component, at).backing = true;
            self.put_host(component, at, slots.into());
        }
        Ok(BackupTicket { lock, start: self.arena.node(at).start })
    }

    /// Ends a copy to the host. If it failed the host slots are to be freed.
    pub fn finish_backup(&mut self, ticket: BackupTicket, ok: bool) -> Result<Actions, TreeError> {
        let at = self.resolve(ticket.node())?;
        let mut actions = Actions::default();
        for part in self.arena.parts(at, ticket.start) {
            for &component in self.components {
                if !self.cell(component, part).backing {
                    continue;
                }
                if ok {
                    self.cell_mut(component, part).backing = false;
                    self.host_changed(component, part);
                } else {
                    let slots = self.take_host(component, part);
                    actions.free_host(component, slots);
                }
            }
            self.refresh(part);
        }
        self.unlock(ticket.lock)?;
        Ok(actions)
    }

    /// Device slots that a load of everything that `node` needs to be gone on from would take.
    pub fn load_needs(&self, node: NodeId) -> Result<PerComponent<usize>, TreeError> {
        let at = self.resolve(node)?;
        let mut needs = PerComponent::default();
        for (component, part) in self.to_load(at) {
            needs[component] += self.value_len(component, part);
        }
        Ok(needs)
    }

    /// What is on the host alone: full pages of the path, the window before its end, the state at its end; top down.
    fn to_load(&self, at: Index) -> Vec<(Component, Index)> {
        let reach = self.arena.node(at).end().saturating_sub(self.window_pages);
        let mut order = Vec::new();
        for part in self.arena.parts(at, 0) {
            let lacks = |component| !self.cell(component, part).on_device() && self.cell(component, part).host_ready();
            if lacks(Component::Full) {
                order.push((Component::Full, part));
            }
            if self.has(Component::Window) && self.arena.node(part).end() > reach && lacks(Component::Window) {
                order.push((Component::Window, part));
            }
            if self.has(Component::State) && part == at && lacks(Component::State) {
                order.push((Component::State, part));
            }
        }
        order
    }

    /// Begins to load into these device slots, exactly as many as `load_needs` says. Refused while anything of the path is being loaded.
    pub fn begin_load(&mut self, node: NodeId, device: Slots) -> Result<LoadTicket, TreeError> {
        let needs = self.load_needs(node)?;
        let at = self.resolve(node)?;
        for component in Component::ALL {
            let (found, needed) = (device[component].len(), needs[component]);
            if found != needed {
                return Err(TreeError::Shape { component, found, needed });
            }
        }
        let path = self.arena.parts(at, 0);
        if path.iter().any(|&part| self.components.iter().any(|&component| self.cell(component, part).loading)) {
            return self.refused(at, "a part of the path is being loaded already");
        }
        let order = self.to_load(at);
        let full: usize = order.iter().filter(|(component, _)| *component == Component::Full).count();
        let lacking = path.iter().filter(|&&part| !self.arena.node(part).full.on_device()).count();
        if lacking > full {
            return self.refused(at, "full pages of the path are not readable on the host");
        }
        let from = order.iter().map(|&(_, part)| self.arena.node(part).start).min();
        let from = from.unwrap_or(self.arena.node(at).end());
        let lock = self.lock(node)?;
        let sources = self.lock_host(at, from);
        let mut given = device.0.map(|slots| slots.into_iter());
        for (component, part) in order {
            let count = self.value_len(component, part);
            let slots: Box<[u32]> = given[component as usize].by_ref().take(count).collect();
            self.cell_mut(component, part).loading = true;
            self.put_device(component, part, slots);
        }
        Ok(LoadTicket { lock, sources })
    }

    /// What a load copies, node by node from the top down.
    pub fn load_copies(&self, ticket: &LoadTicket) -> Result<Vec<LoadCopy>, TreeError> {
        let at = self.resolve(ticket.node())?;
        let mut copies = Vec::new();
        for part in self.arena.parts(at, ticket.sources.from) {
            for &component in self.components {
                let cell = self.cell(component, part);
                if cell.loading {
                    copies.push(LoadCopy { component, host: cell.host.to_vec(), device: cell.device.to_vec() });
                }
            }
        }
        Ok(copies)
    }

    /// Ends a load. If it failed the device slots are to be freed; who locked the path meanwhile finds it gone from the device.
    pub fn finish_load(&mut self, ticket: LoadTicket, ok: bool) -> Result<Actions, TreeError> {
        let at = self.resolve(ticket.node())?;
        let mut actions = Actions::default();
        let parts = self.arena.parts(at, ticket.sources.from);
        for &part in parts.iter().rev() {
            for &component in self.components.iter().rev() {
                if !self.cell(component, part).loading {
                    continue;
                }
                if ok {
                    self.cell_mut(component, part).loading = false;
                } else {
                    let slots = self.take_device(component, part);
                    actions.free_device(component, slots);
                }
            }
            self.refresh(part);
        }
        self.unlock_host(ticket.sources)?;
        self.unlock(ticket.lock)?;
        Ok(actions)
    }

    /// Begins to write a node to the store of this bit: everything that it has in the tier and that the store neither has nor is being
    /// given. What came to a node later is so written later. None if there is nothing, or a write of the node to that store runs.
    pub fn begin_store(
        &mut self,
        node: NodeId,
        bit: u64,
        source: Source,
    ) -> Result<Option<(StoreTicket, Slots)>, TreeError> {
        let at = self.resolve(node)?;
        let mut slots = Slots::default();
        let mut components = Vec::new();
        for &component in self.components {
            let cell = self.cell(component, at);
            if cell.writing & bit != 0 {
                return Ok(None);
            }
            let found = match source {
                Source::Device if !cell.loading => &cell.device,
                Source::Host if !cell.backing => &cell.host,
                _ => continue,
            };
            if cell.stored & bit == 0 && !found.is_empty() {
                slots[component] = found.to_vec();
                components.push(component);
            }
        }
        if components.is_empty() {
            return Ok(None);
        }
        let start = self.arena.node(at).start;
        let hold = match source {
            Source::Device => Hold::Device(self.lock(node)?),
            Source::Host => Hold::Host(self.lock_host(at, start)),
        };
        for &component in &components {
            self.cell_mut(component, at).writing |= bit;
        }
        Ok(Some((StoreTicket { hold, node, start, bit, components }, slots)))
    }

    /// Ends a write. `stored` says that the store has all of it. A failed one never takes back what is known to be stored.
    pub fn finish_store(&mut self, ticket: StoreTicket, stored: bool) -> Result<(), TreeError> {
        let at = self.resolve(ticket.node)?;
        for part in self.arena.parts(at, ticket.start) {
            for &component in &ticket.components {
                // What was cut off before the end has no state.
                let cell = self.cell_mut(component, part);
                if cell.writing & ticket.bit != 0 {
                    cell.writing &= !ticket.bit;
                    cell.stored |= if stored { ticket.bit } else { 0 };
                }
            }
            if stored {
                self.arena.node_mut(part).owed &= !ticket.bit;
            }
        }
        let parts = self.arena.parts(at, ticket.start);
        match ticket.hold {
            Hold::Device(lock) => self.unlock(lock)?,
            Hold::Host(lock) => self.unlock_host(lock)?,
        }
        parts.into_iter().for_each(|part| self.refresh(part));
        Ok(())
    }

    /// Says that these stores have what is known of the path to `node`, of each component from its page of `from` on: it came from there.
    pub fn mark_stored(&mut self, node: NodeId, from: PerComponent<u32>, stores: u64) -> Result<(), TreeError> {
        let at = self.resolve(node)?;
        for &component in self.components {
            let first = from[component];
            for part in self.arena.parts(at, first) {
                // A state stands at the end of its node, the others all along.
                let node = self.arena.node(part);
                let since = if component == Component::State { node.end().saturating_sub(1) } else { node.start };
                let cell = self.cell_mut(component, part);
                if since >= first && (cell.on_device() || !cell.host.is_empty()) {
                    cell.stored |= stores;
                }
            }
        }
        Ok(())
    }

    pub(super) fn is_copied(&self, at: Index) -> bool {
        self.components.iter().any(|&component| {
            let cell = self.cell(component, at);
            cell.loading || cell.backing
        })
    }
}
