//! The kinds of per-prefix state that one tree holds.

use std::ops::{Index, IndexMut};

use crate::plugin::backend::PoolGroup;

/// Stands in a window table for a page of which the request holds no window slot any more.
pub const NO_SLOT: u32 = u32::MAX;

/// A kind of per-prefix state, with pools of its own on device and host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// Keys and values of full attention, and whatever is stored beside them page by page: a slot is a page. Every node has it.
    Full,
    /// Keys and values of sliding-window attention: a slot is a page. Only the window before a boundary is needed to go on from there.
    Window,
    /// Recurrent state: one slot, right for exactly the end of its node.
    State,
}

impl Component {
    /// All kinds, the one that the others stand on first.
    pub const ALL: [Component; 3] = [Component::Full, Component::Window, Component::State];

    /// Name for messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Component::Full => "full",
            Component::Window => "window",
            Component::State => "state",
        }
    }
}

impl From<Component> for PoolGroup {
    fn from(component: Component) -> Self {
        match component {
            Component::Full => PoolGroup::Full,
            Component::Window => PoolGroup::Window,
            Component::State => PoolGroup::State,
        }
    }
}

/// One value a component.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PerComponent<T>(pub [T; 3]);

impl<T> Index<Component> for PerComponent<T> {
    type Output = T;

    fn index(&self, component: Component) -> &T {
        &self.0[component as usize]
    }
}

impl<T> IndexMut<Component> for PerComponent<T> {
    fn index_mut(&mut self, component: Component) -> &mut T {
        &mut self.0[component as usize]
    }
}

/// Slots of each component: pages of full and window, at most one slot of state.
pub type Slots = PerComponent<Vec<u32>>;

/// Slots held in one tier, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Device slots in the tree.
    pub device: usize,
    /// Of these, slots in nodes that nobody locks for this component.
    pub unlocked: usize,
    /// Host slots in the tree.
    pub host: usize,
}

impl Sizes {
    /// Device slots that somebody locks.
    pub fn protected(&self) -> usize {
        self.device - self.unlocked
    }
}
