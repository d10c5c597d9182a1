//! What holds at all times.

use super::aux::List;
use super::component::{Component, PerComponent, Sizes};
use super::node::Index;
use super::tree::Tree;

impl Tree {
    /// Checks every invariant; says which one does not hold and where. Walks the whole tree.
    ///
    /// 1. Windows and states stand on nodes that are on the device, or beside host pages of the node; every node has full pages
    ///    in a tier, and slots of a component for all its pages or for none.
    /// 2. What is on the device has its whole prefix there.
    /// 3. Locks of full attention grow towards the root, and are at least as many as those of each other component; marks of transfers
    ///    stand on nodes that are held.
    /// 4. Lists of windows and states hold exactly what may leave, each once; leaves that may leave are queued for it.
    /// 5. Sizes are what the nodes add up to.
    /// 6. Parents find their children; children follow where their parent ends; names of free places stand nowhere.
    pub fn check_integrity(&self) -> Result<(), String> {
        let mut sizes = PerComponent::<Sizes>::default();
        let mut linked = 0;
        for at in self.arena.live() {
            self.check_node(at).map_err(|problem| format!("node {at}: {problem}"))?;
            linked += usize::from(!self.arena.node(at).is_root());
            for &component in self.components {
                let cell = self.cell(component, at);
                sizes[component].device += cell.device.len();
                sizes[component].unlocked += if cell.locks == 0 { cell.device.len() } else { 0 };
                sizes[component].host += cell.host.len();
            }
        }
        if sizes != self.sizes {
            return Err(format!("the sizes are said to be {:?} and are {sizes:?}", self.sizes));
        }
        if self.arena.linked_count() != linked || self.arena.live_count() != linked + self.arena.root_count() {
            return Err("nodes, children and roots do not add up".to_owned());
        }
        for &component in &self.components[1..] {
            for list in [List::Device, List::Host] {
                self.check_list(component, list)?;
            }
        }
        Ok(())
    }

    fn check_list(&self, component: Component, list: List) -> Result<(), String> {
        let name = component.as_str();
        let listed: Vec<Index> = self.aux[component as usize - 1].listed(list).collect();
        if let Some(at) = listed.iter().find(|&&at| !self.arena.node(at).live || !self.belongs(component, list, at)) {
            return Err(format!("node {at} does not belong into the {name} list of {list:?}"));
        }
        let belonging = self.arena.live().filter(|&at| self.belongs(component, list, at)).count();
        if listed.len() != belonging {
            return Err(format!("{} of {belonging} nodes are in the {name} list of {list:?}", listed.len()));
        }
        if self.aux[component as usize - 1].oldest(list) != listed.last().copied() {
            return Err(format!("the {name} list of {list:?} ends wrongly"));
        }
        Ok(())
    }

    fn check_node(&self, at: Index) -> Result<(), String> {
        let node = self.arena.node(at);
        let (mut children, mut device_children, mut child_locks) = (0, 0, 0);
        for child in self.arena.children(at) {
            let below = self.arena.node(child);
            if !below.live || below.parent != at {
                return Err(format!("child {child} is not linked to it"));
            }
            if below.start != node.end() {
                return Err(format!("child {child} does not start where it ends"));
            }
            children += 1;
            device_children += u32::from(below.full.on_device());
            child_locks += below.full.locks;
        }
        if (children, device_children) != (node.children, node.device_children) {
            return Err("children are miscounted".to_owned());
        }
        if child_locks > node.full.locks {
            return Err(format!("{} locks, but {child_locks} below", node.full.locks));
        }
        for &component in self.components {
            if self.cell(component, at).locks > node.full.locks {
                return Err(format!("more locks of {} than of full", component.as_str()));
            }
        }
        if node.is_root() {
            return match self.arena.root_info(at) {
                Some(info) if self.arena.find_root(&info.namespace) == Some(at) => Ok(()),
                _ => Err("root without a namespace".to_owned()),
            };
        }
        if self.arena.find_child(node.parent, node.span.tokens()) != Some(at) {
            return Err("its parent does not find it".to_owned());
        }
        self.check_values(at)?;
        self.check_marks(at)?;
        if self.is_device_leaf(at) && !node.queued_device || self.is_host_leaf(at) && !node.queued_host {
            return Err("may be evicted and is not queued for it".to_owned());
        }
        Ok(())
    }

    fn check_values(&self, at: Index) -> Result<(), String> {
        let node = self.arena.node(at);
        let tokens = node.pages as usize * self.config.page_size + self.config.units.overlap();
        if node.pages == 0 || node.span.tokens().len() != tokens {
            return Err(format!("{} pages of {} tokens", node.pages, node.span.tokens().len()));
        }
        for &component in self.components {
            let cell = self.cell(component, at);
            for slots in [&cell.device, &cell.host] {
                if !slots.is_empty() && slots.len() != self.value_len(component, at) {
                    return Err(format!("{} slots of {} for {} pages", slots.len(), component.as_str(), node.pages));
                }
            }
            if cell.on_device() && !node.full.on_device() {
                return Err(format!("{} on the device without full pages", component.as_str()));
            }
            if !cell.host.is_empty() && node.full.host.is_empty() {
                return Err(format!("{} on the host without full pages", component.as_str()));
            }
        }
        if node.full.device.is_empty() && node.full.host.is_empty() {
            return Err("in no tier".to_owned());
        }
        let parent = self.arena.node(node.parent);
        if node.full.on_device() && !parent.is_root() && !parent.full.on_device() {
            return Err("on the device, but its prefix is not".to_owned());
        }
        Ok(())
    }

    fn check_marks(&self, at: Index) -> Result<(), String> {
        let node = self.arena.node(at);
        for &component in self.components {
            let (cell, name) = (self.cell(component, at), component.as_str());
            if cell.loading && (!cell.on_device() || !cell.host_ready() || node.host_locks == 0 || node.full.locks == 0)
            {
                return Err(format!("{name} loads without a source, a target or a lock"));
            }
            if cell.backing && (cell.host.is_empty() || !cell.on_device() || cell.locks == 0) {
                return Err(format!("{name} backs up without a source, a target or a lock"));
            }
            if cell.writing != 0 && node.host_locks == 0 && cell.locks == 0 {
                return Err(format!("{name} is written to a store, and nobody holds it"));
            }
        }
        Ok(())
    }
}
