//! What the tree decided and its owner carries out.

use super::component::{Component, PerComponent};
use super::node::NodeId;
use super::query::NodeInfo;

/// One thing to do. Actions are carried out in order, each once, before the tree is asked for anything that depends on free slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Device slots that are the tree's no more.
    FreeDevice {
        /// Whose pool.
        component: Component,
        /// The slots.
        slots: Vec<u32>,
    },
    /// Host slots that are the tree's no more.
    FreeHost {
        /// Whose pool.
        component: Component,
        /// The slots.
        slots: Vec<u32>,
    },
    /// Nodes, from the root on, that are to be copied to the host, or offered to the stores, as the tree's mode has it.
    Backup {
        /// The nodes.
        nodes: Vec<NodeId>,
    },
    /// A node left the device and stays on the host: whoever is given pages when they leave is to be given these.
    LeftDevice {
        /// The node.
        node: NodeId,
    },
    /// Device pages of full attention left that had no copy on the host.
    Dropped {
        /// How many.
        pages: usize,
    },
    /// Host pages of full attention were evicted.
    LeftHost {
        /// The node as it was before.
        node: NodeInfo,
    },
    /// To be answered, after the backups before it have locked what they copy, with [`Tree::cap_states`](super::Tree::cap_states).
    CapStates {
        /// The node whose path may have too many states.
        tail: NodeId,
    },
}

/// A list of actions. Slots in it are nobody's until they are freed, so it must not be dropped unread.
#[must_use = "slots in these actions are lost unless they are freed"]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Actions(pub Vec<Action>);

impl Actions {
    pub(super) fn free_device(&mut self, component: Component, slots: Box<[u32]>) {
        if !slots.is_empty() {
            self.0.push(Action::FreeDevice { component, slots: slots.into() });
        }
    }

    pub(super) fn free_host(&mut self, component: Component, slots: Box<[u32]>) {
        if !slots.is_empty() {
            self.0.push(Action::FreeHost { component, slots: slots.into() });
        }
    }

    /// Device slots that it frees.
    pub fn freed_device(&self) -> PerComponent<usize> {
        let mut freed = PerComponent::default();
        for action in &self.0 {
            if let Action::FreeDevice { component, slots } = action {
                freed[*component] += slots.len();
            }
        }
        freed
    }

    /// Host slots that it frees.
    pub fn freed_host(&self) -> PerComponent<usize> {
        let mut freed = PerComponent::default();
        for action in &self.0 {
            if let Action::FreeHost { component, slots } = action {
                freed[*component] += slots.len();
            }
        }
        freed
    }
}
