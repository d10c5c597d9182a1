//! Making room.
//!
//! One decision a step. The owner frees what a step tells it to free, looks at its pools, and asks for the next step if it still needs
//! room. Full attention leaves from the leaves inward; a window or a state leaves the middle of a path by itself, and its node stays as
//! a tombstone for that component.

use super::action::{Action, Actions};
use super::aux::List;
use super::component::Component;
use super::config::TreeError;
use super::node::{Index, NodeId};
use super::tree::Tree;
use super::victims::Tier;

/// One step of making room.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "slots in its actions are lost unless they are freed"]
pub enum Step {
    /// Something left.
    Freed(Actions),
    /// This node has to be copied to the host first (write-back). Then [`Tree::demote`]; or, where that fails, [`Tree::drop_subtree`], or
    /// [`Tree::tombstone`] for a window or state inside a path.
    BackUpFirst {
        /// The node.
        node: NodeId,
        /// Full for a leaf that leaves as a whole, else the component that is to leave.
        component: Component,
    },
    /// Nothing more may leave.
    Exhausted,
}

impl Tree {
    /// The next step of making room for a component on the device. `want` slots are still missing: of a longer leaf that has no state
    /// the tail alone leaves.
    pub fn evict_device(&mut self, component: Component, want: usize) -> Step {
        if !self.has(component) {
            return Step::Exhausted;
        }
        if component == Component::Full {
            let mut kept = Vec::new();
            let step = loop {
                let Some(leaf) = self.victim(Tier::Device) else { break Step::Exhausted };
                self.trim(leaf, want);
                match self.evict_leaf(leaf) {
                    Some(step) => break step,
                    // Below it is something on the host that a transfer reads.
                    None => kept.push(leaf),
                }
            };
            // They are candidates again at the next step.
            kept.into_iter().for_each(|at| self.refresh(at));
            return step;
        }
        let Some(at) = self.oldest(component, List::Device) else { return Step::Exhausted };
        if self.is_device_leaf(at) {
            self.trim(at, want);
            if let Some(step) = self.evict_leaf(at) {
                return step;
            }
        } else if self.config.write_back && self.cell(component, at).host.is_empty() && self.can_copy(at) {
            return Step::BackUpFirst { node: self.arena.id(at), component };
        }
        Step::Freed(self.tombstone_at(component, at))
    }

    /// As `evict_device`, but what leaves is not copied to the host first.
    pub fn evict_without_copy(&mut self, component: Component, want: usize) -> Step {
        let write_back = std::mem::replace(&mut self.config.write_back, false);
        let step = self.evict_device(component, want);
        self.config.write_back = write_back;
        step
    }

    fn trim(&mut self, leaf: Index, want: usize) {
        let pages = self.arena.node(leaf).pages;
        let wanted = u32::try_from(want).unwrap_or(u32::MAX).max(1);
        if pages > wanted && !self.has(Component::State) {
            self.split_at(leaf, pages - wanted);
        }
    }

    /// A copy of the node is not on its way, and it may be made.
    fn can_copy(&self, at: Index) -> bool {
        let full = &self.arena.node(at).full;
        full.on_device()
            && self.components.iter().all(|&component| {
                let cell = self.cell(component, at);
                !cell.loading && !cell.backing
            })
    }

    fn evict_leaf(&mut self, leaf: Index) -> Option<Step> {
        if self.arena.node(leaf).full.host_ready() {
            return Some(Step::Freed(self.demote_at(leaf)));
        }
        if self.config.write_back {
            // Nothing has changed, so it stays the first candidate.
            self.refresh(leaf);
            return Some(Step::BackUpFirst { node: self.arena.id(leaf), component: Component::Full });
        }
        self.drop_subtree_at(leaf).map(Step::Freed)
    }

    /// Takes a device leaf that has host pages off the device. What it has of other components leaves too, and stays on the host where it
    /// was copied. Refused if the node is no leaf any more, or has no copy.
    pub fn demote(&mut self, node: NodeId) -> Result<Actions, TreeError> {
        let at = self.resolve(node)?;
        if !self.is_device_leaf(at) {
            self.refresh(at);
            return self.refused(at, "it is in use or no leaf of the device any more");
        }
        if !self.arena.node(at).full.host_ready() {
            self.refresh(at);
            return self.refused(at, "it has no copy on the host");
        }
        Ok(self.demote_at(at))
    }

    fn demote_at(&mut self, at: Index) -> Actions {
        let mut actions = Actions::default();
        for &component in self.components.iter().rev() {
            let slots = self.take_device(component, at);
            actions.free_device(component, slots);
        }
        actions.0.push(Action::LeftDevice { node: self.arena.id(at) });
        actions
    }

    /// Drops a node, with all that is below it, from device and host. Refused if any of it is in use.
    pub fn drop_subtree(&mut self, node: NodeId) -> Result<Actions, TreeError> {
        let at = self.resolve(node)?;
        if self.arena.node(at).is_root() {
            return self.refused(at, "a root is no node to drop");
        }
        match self.drop_subtree_at(at) {
            Some(actions) => Ok(actions),
            None => {
                self.refresh(at);
                self.refused(at, "it is in use")
            }
        }
    }

    fn drop_subtree_at(&mut self, at: Index) -> Option<Actions> {
        let mut order = vec![at];
        let mut next = 0;
        while let Some(&below) = order.get(next) {
            let held = self.components.iter().any(|&component| {
                let cell = self.cell(component, below);
                cell.locks > 0 || !cell.quiet()
            });
            if held || self.arena.node(below).host_locks > 0 {
                return None;
            }
            order.extend(self.arena.children(below));
            next += 1;
        }
        let mut actions = Actions::default();
        for &below in order.iter().rev() {
            self.remove(below, &mut actions);
        }
        let pages = actions.freed_device()[Component::Full];
        actions.0.push(Action::Dropped { pages });
        Some(actions)
    }

    /// Removes a node that has nothing below it and that nobody holds.
    fn remove(&mut self, at: Index, actions: &mut Actions) {
        for &component in self.components.iter().rev() {
            let device = self.take_device(component, at);
            actions.free_device(component, device);
            let host = self.take_host(component, at);
            actions.free_host(component, host);
        }
        let node = self.arena.node(at);
        let parent = node.parent;
        self.memory.departed(self.arena.fingerprint(node.root, node.start, self.arena.first_page_of(at)));
        self.arena.unlink(at);
        self.arena.vacate(at);
        self.refresh(parent);
        self.arena.retire_root(parent);
    }

    /// Takes a window or a state off the device and leaves its node; a state goes with its window. Refused if somebody holds it.
    pub fn tombstone(&mut self, component: Component, node: NodeId) -> Result<Actions, TreeError> {
        let at = self.resolve(node)?;
        if component == Component::Full || !self.has(component) || !self.belongs(component, List::Device, at) {
            return self.refused(at, "it has no window or state that may leave");
        }
        Ok(self.tombstone_at(component, at))
    }

    pub(super) fn tombstone_at(&mut self, component: Component, at: Index) -> Actions {
        let mut actions = Actions::default();
        let slots = self.take_device(component, at);
        actions.free_device(component, slots);
        // Without its window a state is of no use. One that somebody holds stays until it is let go.
        if component == Component::Window
            && self.has(Component::State)
            && self.belongs(Component::State, List::Device, at)
        {
            let slots = self.take_device(Component::State, at);
            actions.free_device(Component::State, slots);
        }
        actions
    }

    /// The next step of making room for a component on the host.
    pub fn evict_host(&mut self, component: Component, want: usize) -> Step {
        if !self.has(component) {
            return Step::Exhausted;
        }
        let mut actions = Actions::default();
        if component != Component::Full {
            let Some(at) = self.oldest(component, List::Host) else { return Step::Exhausted };
            let slots = self.take_host(component, at);
            actions.free_host(component, slots);
            return Step::Freed(actions);
        }
        let Some(at) = self.victim(Tier::Host) else { return Step::Exhausted };
        let on_device = self.arena.node(at).full.on_device();
        if !on_device {
            self.trim(at, want);
        }
        actions.0.push(Action::LeftHost { node: self.info_at(at) });
        if on_device {
            for &component in self.components.iter().rev() {
                let slots = self.take_host(component, at);
                actions.free_host(component, slots);
            }
        } else {
            self.remove(at, &mut actions);
        }
        Step::Freed(actions)
    }

    /// Drops states of a path, the shallowest first, until it keeps no more than the limit: all but the tail's own, those at forks and
    /// leaves, and those that somebody holds.
    pub fn cap_states(&mut self, tail: NodeId) -> Result<Actions, TreeError> {
        let at = self.resolve(tail)?;
        let mut actions = Actions::default();
        let Some(limit) = self.config.states.and_then(|states| states.per_path) else { return Ok(actions) };
        let parts = self.arena.parts(at, 0);
        let with_state: Vec<Index> =
            parts.into_iter().filter(|&part| self.cell(Component::State, part).on_device()).collect();
        let mut excess = with_state.len().saturating_sub(limit);
        for part in with_state {
            let spared = part == at || self.arena.node(part).children > 1 || self.is_device_leaf(part);
            if excess > 0 && !spared && self.belongs(Component::State, List::Device, part) {
                let slots = self.take_device(Component::State, part);
                actions.free_device(Component::State, slots);
                excess -= 1;
            }
        }
        Ok(actions)
    }
}
