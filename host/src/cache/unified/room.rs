//! Slots: what the pools have, and what the tree lets go for them.
//!
//! The first piece of what carries the tree's decisions out. It knows pools by a trait alone.

use super::action::{Action, Actions};
use super::component::{Component, PerComponent, Slots};
use super::config::TreeError;
use super::evict::Step;
use super::node::NodeId;
use super::tree::Tree;

/// The pools of one tier, one a component.
pub trait SlotPools {
    /// Slots that could be taken now.
    fn free(&self, component: Component) -> usize;
    /// Takes as many slots, or none if there are not enough.
    fn take(&mut self, component: Component, count: usize) -> Option<Vec<u32>>;
    /// Gives slots back.
    fn give_back(&mut self, component: Component, slots: &[u32]);
}

/// The tiers that a tree's slots are of.
pub trait Tiers {
    /// Pools on the device.
    fn device(&mut self) -> &mut dyn SlotPools;
    /// Pools on the host, if there is a host tier.
    fn host(&mut self) -> Option<&mut dyn SlotPools>;
    /// Copies device slots to host slots, at once. False if that failed.
    fn copy_down(&mut self, component: Component, device: &[u32], host: &[u32]) -> bool;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Device,
    Host,
}

/// A tree with the tiers that its slots are of.
pub struct Room<'a> {
    tree: &'a mut Tree,
    tiers: &'a mut dyn Tiers,
}

impl<'a> Room<'a> {
    /// Puts the two together.
    pub fn new(tree: &'a mut Tree, tiers: &'a mut dyn Tiers) -> Self {
        Room { tree, tiers }
    }

    /// Device slots, of all components or of none. What nobody holds leaves for what the pools lack, no more than that.
    pub fn take_device(&mut self, want: &PerComponent<usize>) -> Option<Slots> {
        self.take(Side::Device, want)
    }

    /// Host slots, likewise. None too without a host tier.
    pub fn take_host(&mut self, want: &PerComponent<usize>) -> Option<Slots> {
        self.take(Side::Host, want)
    }

    /// Frees what these actions say is free. The others come back, in order: they are not for pools alone.
    pub fn carry_out(&mut self, actions: Actions) -> Vec<Action> {
        let mut others = Vec::new();
        for action in actions.0 {
            match action {
                Action::FreeDevice { component, slots } => self.tiers.device().give_back(component, &slots),
                Action::FreeHost { component, slots } => {
                    if let Some(pools) = self.tiers.host() {
                        pools.give_back(component, &slots);
                    }
                }
                other => others.push(other),
            }
        }
        others
    }

    /// Copies what a node has on the device alone to the host, at once. False if the host has no room or the copy failed; then nothing has
    /// changed but what left the host for it.
    pub fn back_up_now(&mut self, node: NodeId) -> Result<bool, TreeError> {
        let needs = self.tree.backup_needs(node)?;
        let Some(slots) = self.take_host(&needs) else { return Ok(false) };
        let ticket = match self.tree.begin_backup(node, slots.clone()) {
            Ok(ticket) => ticket,
            Err(refusal) => {
                self.give_back(Side::Host, slots);
                return Err(refusal);
            }
        };
        let mut ok = true;
        for &component in self.tree.components() {
            if !slots[component].is_empty() {
                ok = ok && self.tiers.copy_down(component, self.tree.device_slots(component, node)?, &slots[component]);
            }
        }
        let actions = self.tree.finish_backup(ticket, ok)?;
        self.carry_out(actions);
        Ok(ok)
    }

    fn take(&mut self, side: Side, want: &PerComponent<usize>) -> Option<Slots> {
        let mut taken = Slots::default();
        for component in Component::ALL {
            let count = want[component];
            if count == 0 {
                continue;
            }
            self.make_room(side, component, count);
            match self.pools(side).and_then(|pools| pools.take(component, count)) {
                Some(slots) => taken[component] = slots,
                None => {
                    self.give_back(side, taken);
                    return None;
                }
            }
        }
        Some(taken)
    }

    fn pools(&mut self, side: Side) -> Option<&mut dyn SlotPools> {
        match side {
            Side::Device => Some(self.tiers.device()),
            Side::Host => self.tiers.host(),
        }
    }

    fn give_back(&mut self, side: Side, slots: Slots) {
        for component in Component::ALL.into_iter().rev() {
            if let Some(pools) = self.pools(side).filter(|_| !slots[component].is_empty()) {
                pools.give_back(component, &slots[component]);
            }
        }
    }

    /// Evicts until the pool has `count` free slots, or nothing more may leave. Nothing leaves where that can't be enough.
    fn make_room(&mut self, side: Side, component: Component, count: usize) {
        let Some(free) = self.pools(side).map(|pools| pools.free(component)) else { return };
        let sizes = self.tree.sizes(component);
        let most = if side == Side::Device { sizes.unlocked } else { sizes.host };
        if free + most < count {
            return;
        }
        while let Some(missing) = self.missing(side, component, count) {
            let step = match side {
                Side::Device => self.tree.evict_device(component, missing),
                Side::Host => self.tree.evict_host(component, missing),
            };
            let actions = match step {
                Step::Freed(actions) => actions,
                Step::Exhausted => return,
                Step::BackUpFirst { node, component } => match self.let_go(node, component) {
                    Ok(actions) => actions,
                    // The host has no room for it, and a transfer reads what is below it: there is room when that has ended.
                    Err(refusal) => {
                        tracing::debug!(%refusal, "the next victim cannot leave now");
                        return;
                    }
                },
            };
            self.carry_out(actions);
        }
    }

    fn missing(&mut self, side: Side, component: Component, count: usize) -> Option<usize> {
        let free = self.pools(side)?.free(component);
        count.checked_sub(free).filter(|&missing| missing > 0)
    }

    /// Under write-back: down to the host with it, or out.
    fn let_go(&mut self, node: NodeId, component: Component) -> Result<Actions, TreeError> {
        let copied = self.back_up_now(node)?;
        match component {
            Component::Full if copied => self.tree.demote(node),
            Component::Full => self.tree.drop_subtree(node),
            other => self.tree.tombstone(other, node),
        }
    }
}
