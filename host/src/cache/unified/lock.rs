//! Holding prefixes.
//!
//! A lock is a receipt: a value that its release consumes, so it can be released once and at its own node only. The window part names
//! the page at which its segment begins, not a node, so it stays exact however the nodes in it are cut.

use super::component::Component;
use super::config::TreeError;
use super::node::{Index, NodeId};
use super::tree::Tree;

/// A prefix held: on the device, and on the host what is not on the device, so that it can be loaded.
#[derive(Debug)]
#[must_use = "a lock that is dropped is never released"]
pub struct Lock {
    node: NodeId,
    /// First page of the window segment; none if it was released early or not taken.
    window_from: Option<u32>,
    state: bool,
}

impl Lock {
    /// The node at the end of the prefix.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// First page of the window segment that is held, if one is.
    pub fn window_from(&self) -> Option<u32> {
        self.window_from
    }

    /// Whether the state at the end is held.
    pub fn holds_state(&self) -> bool {
        self.state
    }
}

/// Which parts beside full attention a lock holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// The window before the end.
    pub window: bool,
    /// The state at the end.
    pub state: bool,
}

impl Parts {
    /// Everything.
    pub const ALL: Parts = Parts { window: true, state: true };
    /// Full attention alone: a pin.
    pub const FULL: Parts = Parts { window: false, state: false };
}

/// Host slots of a path's nodes from page `from` on, held for a transfer.
#[derive(Debug)]
pub(super) struct HostLock {
    pub node: NodeId,
    pub from: u32,
}

impl Tree {
    /// Holds everything that going on from the end of `node` needs: full attention up to the root, the window before the end, the state
    /// at the end.
    pub fn lock(&mut self, node: NodeId) -> Result<Lock, TreeError> {
        self.lock_parts(node, Parts::ALL)
    }

    /// As `lock`, but leaves parts out: a decoding request works on a copy of the state, say.
    pub fn lock_parts(&mut self, node: NodeId, parts: Parts) -> Result<Lock, TreeError> {
        let at = self.resolve(node)?;
        let mut above = at;
        while above != super::node::NONE {
            self.count_lock(Component::Full, above);
            above = self.arena.node(above).parent;
        }
        let window_from = (parts.window && self.has(Component::Window)).then(|| self.lock_window(at));
        let state = parts.state && self.has(Component::State) && !self.arena.node(at).is_root();
        if state {
            self.count_lock(Component::State, at);
        }
        Ok(Lock { node, window_from, state })
    }

    fn lock_window(&mut self, at: Index) -> u32 {
        let (end, mut from) = (self.arena.node(at).end(), self.arena.node(at).end());
        let mut above = at;
        while !self.arena.node(above).is_root() && end - from < self.window_pages {
            self.count_lock(Component::Window, above);
            from = self.arena.node(above).start;
            above = self.arena.node(above).parent;
        }
        from
    }

    /// Releases what a lock holds.
    pub fn unlock(&mut self, mut lock: Lock) -> Result<(), TreeError> {
        let mut above = self.resolve(lock.node)?;
        self.release_window(&mut lock)?;
        self.release_state(&mut lock)?;
        while above != super::node::NONE {
            let parent = self.arena.node(above).parent;
            self.uncount_lock(Component::Full, above);
            self.arena.retire_root(above);
            above = parent;
        }
        Ok(())
    }

    /// Releases the window alone, and the state with it: the request has decoded past them. What is left is released by `unlock`.
    pub fn release_window(&mut self, lock: &mut Lock) -> Result<(), TreeError> {
        let at = self.resolve(lock.node)?;
        if let Some(from) = lock.window_from.take() {
            // From the top down, so that in the list of victims what is below comes out newer.
            for part in self.arena.parts(at, from) {
                self.uncount_lock(Component::Window, part);
            }
            self.release_state(lock)?;
        }
        Ok(())
    }

    /// Releases the state alone.
    pub fn release_state(&mut self, lock: &mut Lock) -> Result<(), TreeError> {
        let at = self.resolve(lock.node)?;
        if std::mem::take(&mut lock.state) {
            self.uncount_lock(Component::State, at);
        }
        Ok(())
    }

    fn count_lock(&mut self, component: Component, at: Index) {
        let cell = self.cell_mut(component, at);
        cell.locks += 1;
        if cell.locks > 1 {
            return;
        }
        let slots = cell.device.len();
        self.sizes[component].unlocked -= slots;
        if component != Component::Full {
            self.relist(component, at);
        }
    }

    fn uncount_lock(&mut self, component: Component, at: Index) {
        let cell = self.cell_mut(component, at);
        let Some(locks) = cell.locks.checked_sub(1) else {
            tracing::error!(
                node = at,
                component = component.as_str(),
                "a cache node was unlocked more often than locked"
            );
            return;
        };
        cell.locks = locks;
        if locks > 0 {
            return;
        }
        let slots = cell.device.len();
        self.sizes[component].unlocked += slots;
        match component {
            Component::Full => self.refresh(at),
            other => {
                self.relist(other, at);
                // A leaf is a victim when nobody holds any part of it.
                self.refresh(at);
            }
        }
    }

    pub(super) fn lock_host(&mut self, at: Index, from: u32) -> HostLock {
        for part in self.arena.parts(at, from) {
            self.arena.node_mut(part).host_locks += 1;
            self.all_host_changed(part);
        }
        HostLock { node: self.arena.id(at), from }
    }

    pub(super) fn unlock_host(&mut self, lock: HostLock) -> Result<(), TreeError> {
        let at = self.resolve(lock.node)?;
        for part in self.arena.parts(at, lock.from) {
            let node = self.arena.node_mut(part);
            node.host_locks = node.host_locks.saturating_sub(1);
            self.all_host_changed(part);
        }
        Ok(())
    }

    fn all_host_changed(&mut self, at: Index) {
        for &component in self.components {
            self.host_changed(component, at);
        }
    }
}
