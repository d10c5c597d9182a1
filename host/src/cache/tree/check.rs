//! Checking the tree against itself.

use std::collections::HashSet;

use super::Tree;
use super::node::{NONE, NodeId};

impl Tree {
    /// Checks everything the tree promises. Takes time in proportion to its size.
    pub fn check(&self) -> Result<(), String> {
        let mut device = 0;
        let mut host = 0;
        let mut unlocked = 0;
        let mut live = 0;
        for id in 0..self.nodes.len() as NodeId {
            let node = self.node(id);
            if !node.live {
                continue;
            }
            live += 1;
            self.check_node(id).map_err(|problem| format!("node {id}: {problem}"))?;
            device += node.device.len();
            host += node.host.len();
            if node.locks == 0 {
                unlocked += node.device.len();
            }
        }
        let vacant: HashSet<NodeId> = self.vacant.iter().copied().collect();
        if vacant.len() != self.vacant.len() || vacant.len() + live != self.nodes.len() {
            return Err("vacant slots and live nodes do not add up".to_owned());
        }
        if (device, unlocked, host) != self.totals() {
            return Err(format!(
                "counted {device} device, {unlocked} unlocked, {host} host pages; kept {:?}",
                self.totals()
            ));
        }
        if self.children.len() != live - self.roots.len() {
            return Err(format!(
                "{} entries in the table of children for {} nodes",
                self.children.len(),
                live - self.roots.len()
            ));
        }
        if self.roots.len() != self.root_info.len() {
            return Err("namespaces and roots do not add up".to_owned());
        }
        Ok(())
    }

    fn check_node(&self, id: NodeId) -> Result<(), String> {
        let node = self.node(id);
        let mut children = 0;
        let mut device_children = 0;
        let mut child_locks = 0;
        let mut previous = NONE;
        for child in self.child_ids(id) {
            let below = self.node(child);
            if !below.live || below.parent != id || below.previous_sibling != previous {
                return Err(format!("child {child} is not linked to it"));
            }
            if below.start as usize != node.start as usize + self.len(id) {
                return Err(format!("child {child} does not start where it ends"));
            }
            children += 1;
            device_children += u32::from(below.on_device());
            child_locks += below.locks;
            previous = child;
        }
        if (children, device_children) != (node.children, node.device_children) {
            return Err("children are miscounted".to_owned());
        }
        if child_locks > node.locks {
            return Err(format!("{} locks, but {child_locks} below", node.locks));
        }
        if node.is_root() {
            return match self.root_info.get(&id) {
                Some(info) if self.roots.get(&info.namespace) == Some(&id) => Ok(()),
                _ => Err("root without a namespace".to_owned()),
            };
        }
        self.check_pages(id)?;
        if self.find_child(node.parent, self.first_page(id)) != Some(id) {
            return Err("its parent does not find it".to_owned());
        }
        if node.evictable_from_device() && !node.queued_device || node.evictable_from_host() && !node.queued_host {
            return Err("may be evicted and is not queued for it".to_owned());
        }
        Ok(())
    }

    fn check_pages(&self, id: NodeId) -> Result<(), String> {
        let node = self.node(id);
        let length = self.len(id);
        if length == 0 || !node.span.tokens().len().is_multiple_of(self.page_size) {
            return Err("not a run of whole pages".to_owned());
        }
        for (tier, pages) in [("device", &node.device), ("host", &node.host)] {
            if !pages.is_empty() && pages.len() != length {
                return Err(format!("{} {tier} pages for {length}", pages.len()));
            }
        }
        if node.device.is_empty() && node.host.is_empty() {
            return Err("in no tier".to_owned());
        }
        let parent = self.node(node.parent);
        if node.on_device() && !parent.is_root() && !parent.on_device() {
            return Err("on the device, but its prefix is not".to_owned());
        }
        if node.loading && (node.device.is_empty() || !node.host_ready()) {
            return Err("loads without a source or a target".to_owned());
        }
        if node.backing && (node.host.is_empty() || node.device.is_empty()) {
            return Err("backs up without a source or a target".to_owned());
        }
        if node.storing != 0 && !node.host_ready() {
            return Err("stores without host pages".to_owned());
        }
        Ok(())
    }
}
