//! Slots: what the pools have, and what the tree lets go for them.
//!
//! The piece of carrying the tree's decisions out that is the same whatever the pools are.

use std::time::{Duration, Instant};

use super::action::Actions;
use super::component::{Component, PerComponent, Slots};
use super::config::TreeError;
use super::evict::Step;
use super::node::NodeId;
use super::tree::Tree;

/// A tier with pools of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The device.
    Device,
    /// The host.
    Host,
}

/// A tree with the pools that its slots are of. Whoever has both says how slots are taken and given back, and gets room made.
pub(crate) trait Room {
    /// The tree.
    fn tree(&mut self) -> &mut Tree;
    /// Slots that could be taken now. None without such a tier.
    fn free_slots(&self, side: Side, component: Component) -> Option<usize>;
    /// Takes as many slots, or none if there are not enough.
    fn take(&mut self, side: Side, component: Component, count: usize) -> Option<Vec<u32>>;
    /// Gives back slots that were taken and not used.
    fn give_back(&mut self, side: Side, component: Component, slots: &[u32]);
    /// Copies device slots to host slots, at once. False if that failed.
    fn copy_down(&mut self, component: Component, device: &[u32], host: &[u32]) -> bool;
    /// Does what the tree has decided.
    fn carry_out(&mut self, actions: Actions);

    /// Slots that a step of making room lets go at least, where there are as many.
    fn least(&self, _side: Side, _component: Component) -> usize {
        1
    }

    /// Told what room was made.
    fn made_room(&mut self, _side: Side, _component: Component, _slots: usize, _took: Duration) {}

    /// Told of a node that is to be copied down before it leaves, and for which the host has no room.
    fn no_host_room(&mut self, _needs: &PerComponent<usize>) {}

    /// Slots of all components or of none. What nobody holds leaves for what the pools lack.
    fn take_slots(&mut self, side: Side, want: &PerComponent<usize>) -> Option<Slots> {
        let mut taken = Slots::default();
        for component in Component::ALL {
            let count = want[component];
            if count == 0 {
                continue;
            }
            self.make_room(side, component, count);
            match self.take(side, component, count) {
                Some(slots) => taken[component] = slots,
                None => {
                    self.give_back_all(side, taken);
                    return None;
                }
            }
        }
        Some(taken)
    }

    /// Gives back what `take_slots` took.
    fn give_back_all(&mut self, side: Side, slots: Slots) {
        for component in Component::ALL.into_iter().rev() {
            if !slots[component].is_empty() {
                self.give_back(side, component, &slots[component]);
            }
        }
    }

    /// Copies what a node has on the device alone to the host, at once. False if the host has no room or the copy failed; then nothing has
    /// changed but what left the host for it.
    fn back_up_now(&mut self, node: NodeId) -> Result<bool, TreeError> {
        let needs = self.tree().backup_needs(node)?;
        let Some(slots) = self.take_slots(Side::Host, &needs) else {
            self.no_host_room(&needs);
            return Ok(false);
        };
        let ticket = match self.tree().begin_backup(node, slots.clone()) {
            Ok(ticket) => ticket,
            Err(refusal) => {
                self.give_back_all(Side::Host, slots);
                return Err(refusal);
            }
        };
        let mut ok = true;
        for component in Component::ALL {
            if ok && !slots[component].is_empty() {
                let device = self.tree().device_slots(component, node)?.to_vec();
                ok = self.copy_down(component, &device, &slots[component]);
            }
        }
        let actions = self.tree().finish_backup(ticket, ok)?;
        self.carry_out(actions);
        Ok(ok)
    }

    /// Evicts until the pool has `count` free slots, or nothing more may leave. Nothing leaves where that can't be enough.
    fn make_room(&mut self, side: Side, component: Component, count: usize) {
        let Some(free) = self.free_slots(side, component) else { return };
        let sizes = self.tree().sizes(component);
        let most = if side == Side::Device { sizes.unlocked } else { sizes.host };
        if free + most < count || free >= count {
            return;
        }
        let began = Instant::now();
        self.evict(side, component, count);
        let slots = self.free_slots(side, component).unwrap_or(0).saturating_sub(free);
        self.made_room(side, component, slots, began.elapsed());
    }

    /// Evicts, as `make_room` does, without a look at whether that can be enough.
    fn evict(&mut self, side: Side, component: Component, count: usize) {
        while let Some(missing) = self.free_slots(side, component).and_then(|free| count.checked_sub(free))
            && missing > 0
        {
            let want = missing.max(self.least(side, component));
            let step = match side {
                Side::Device => self.tree().evict_device(component, want),
                Side::Host => self.tree().evict_host(component, want),
            };
            let actions = match step {
                Step::Freed(actions) => actions,
                Step::Exhausted => return,
                Step::BackUpFirst { node, component: of } => match self.let_go(node, of) {
                    Ok(actions) => actions,
                    // The host has no room for it, and a transfer reads what is below it: something else leaves, and is not kept.
                    Err(refusal) => {
                        tracing::debug!(%refusal, "the next victim cannot leave now");
                        match self.tree().evict_without_copy(component, want) {
                            Step::Freed(actions) => actions,
                            Step::Exhausted | Step::BackUpFirst { .. } => return,
                        }
                    }
                },
            };
            self.carry_out(actions);
        }
    }

    /// Under write-back: down to the host with it, or out.
    fn let_go(&mut self, node: NodeId, component: Component) -> Result<Actions, TreeError> {
        let copied = self.back_up_now(node)?;
        match component {
            Component::Full if copied => self.tree().demote(node),
            Component::Full => self.tree().drop_subtree(node),
            other => self.tree().tombstone(other, node),
        }
    }
}
