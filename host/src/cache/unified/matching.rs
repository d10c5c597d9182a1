//! Finding the longest prefix that can be gone on from.

use super::component::{Component, PerComponent};
use super::node::{Index, NodeId};
use super::tree::Tree;

/// A place in the tree where a sequence may be cut: after the first `used` pages of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundary {
    /// The node; the root if nothing is before the place.
    pub node: NodeId,
    /// Pages of the node before the place.
    pub used: u32,
    /// Pages of the sequence before the place.
    pub pages: u32,
}

/// What the tree knows of a sequence. Finding it changes nothing: a node is cut only when somebody holds the boundary
/// ([`Tree::settle`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Pages of full attention that are known, whatever the other components say.
    pub full_pages: u32,
    /// The deepest place to go on from with what is on the device.
    pub device: Boundary,
    /// The end of the full pages that are on the device, at least as deep as `device`: what lies between lacks a window or a state alone.
    /// Pinned with [`Parts::FULL`](super::Parts::FULL) these pages need not be loaded a second time.
    pub resident: Boundary,
    /// The deepest place to go on from with what is on device and host. At least as deep as `device`.
    pub best: Boundary,
    /// Full pages after `best` that are on the host without a gap: what they lack is a window or a state alone.
    pub held: u32,
    /// Slots that are to be loaded from the host to get from `device` to `best`: only what is not on the device.
    pub load: PerComponent<u32>,
    /// Something up to `best` is on its way to the device and cannot be read yet.
    pub loading: bool,
    /// Pages after which a window, had it been kept, would have made a longer hit.
    pub window_branch: Option<u32>,
    /// Pages after which a state, had it been left, would have made a longer hit; on the grid of states.
    pub state_branch: Option<u32>,
}

/// Pages behind a boundary that have a window without a gap.
#[derive(Debug, Clone, Copy)]
struct Run(u32);

impl Run {
    /// From the start of the sequence on nothing is missing.
    const UNBROKEN: Run = Run(u32::MAX);

    fn pass(&mut self, present: bool, pages: u32) {
        self.0 = if present { self.0.saturating_add(pages) } else { 0 };
    }
}

impl Tree {
    /// Matches the whole pages of `tokens` after the root of a namespace. None if the root is unknown.
    pub fn find(&self, root: NodeId, tokens: &[u32]) -> Option<Match> {
        let root = self.arena.resolve(root)?;
        let start = Boundary { node: self.arena.id(root), used: 0, pages: 0 };
        let mut found = Match {
            full_pages: 0,
            device: start,
            resident: start,
            best: start,
            held: 0,
            load: PerComponent::default(),
            loading: false,
            window_branch: None,
            state_branch: None,
        };
        let (has_window, has_state) = (self.has(Component::Window), self.has(Component::State));
        let (mut device_run, mut any_run) = (Run::UNBROKEN, Run::UNBROKEN);
        let mut on_device = true;
        let mut readable = true;
        let mut loading = false;
        let mut held = true;
        let mut at = root;
        loop {
            let rest = tokens.get(found.full_pages as usize * self.config.page_size..).unwrap_or_default();
            let Some(child) = self.arena.find_child(at, rest) else { break };
            let node = self.arena.node(child);
            let used = self.common_pages(node.span.tokens(), rest);
            found.full_pages += used;
            let whole = used == node.pages;
            on_device &= node.full.on_device();
            readable &= node.full.on_device() || node.full.host_ready();
            loading |= node.full.loading;
            let (mut on_device_here, mut anywhere) = (on_device, readable);
            if has_window {
                let cell = self.cell(Component::Window, child);
                device_run.pass(cell.on_device(), used);
                any_run.pass(cell.on_device() || cell.host_ready(), used);
                loading |= cell.loading;
                on_device_here &= device_run.0 >= self.window_pages;
                anywhere &= any_run.0 >= self.window_pages;
            }
            if has_state {
                let cell = self.cell(Component::State, child);
                on_device_here &= whole && cell.on_device();
                anywhere &= whole && (cell.on_device() || cell.host_ready());
                loading |= cell.loading;
            }
            let here = Boundary { node: self.arena.id(child), used, pages: found.full_pages };
            if on_device {
                found.resident = here;
            }
            if on_device_here {
                found.device = here;
            }
            if anywhere {
                (found.best, found.held, held) = (here, 0, true);
                found.loading = loading;
            } else {
                held &= node.full.host_ready();
                found.held += if held { used } else { 0 };
            }
            at = child;
            if !whole {
                break;
            }
        }
        if found.best.pages > found.device.pages {
            self.count_load(&mut found);
        }
        if found.full_pages > found.best.pages {
            self.find_branches(&mut found);
        }
        Some(found)
    }

    fn count_load(&self, found: &mut Match) {
        let best = found.best;
        let reach = best.pages.saturating_sub(self.window_pages);
        for at in self.arena.upward(best.node.index) {
            let node = self.arena.node(at);
            let pages = node.pages.min(best.pages - node.start);
            if !node.full.on_device() {
                found.load[Component::Full] += pages;
            }
            let lacks = |component| !self.cell(component, at).on_device() && self.cell(component, at).host_ready();
            if self.has(Component::Window) && node.end() > reach && lacks(Component::Window) {
                found.load[Component::Window] += pages;
            }
            if self.has(Component::State) && at == best.node.index && lacks(Component::State) {
                found.load[Component::State] = 1;
            }
        }
    }

    fn find_branches(&self, found: &mut Match) {
        if self.has(Component::Window) {
            found.window_branch = Some(found.full_pages);
        }
        if let Some(states) = self.config.states {
            let grid = (states.grid / self.config.page_size) as u32;
            let pages = found.full_pages / grid * grid;
            found.state_branch = Some(pages).filter(|&pages| pages > found.best.pages);
        }
    }

    /// Leading whole pages that the tokens of a node, which are whole pages, share with a key.
    pub(super) fn common_pages(&self, node: &[u32], key: &[u32]) -> u32 {
        let (size, overlap) = (self.config.page_size, self.config.units.overlap());
        let length = node.len().min(key.len());
        let equal = match node[..length] == key[..length] {
            true => length,
            false => first_difference(&node[..length], &key[..length]),
        };
        (equal.saturating_sub(overlap) / size) as u32
    }

    /// The place after `used` pages of the node `at`, made the end of a node.
    pub(super) fn cut(&mut self, at: Index, used: u32) -> Index {
        if used == self.arena.node(at).pages { at } else { self.split_at(at, used) }
    }
}

/// Length of the common part of two slices of one length.
fn first_difference(a: &[u32], b: &[u32]) -> usize {
    const BLOCK: usize = 64;
    let whole = a.chunks(BLOCK).zip(b.chunks(BLOCK)).take_while(|(a, b)| a == b).count() * BLOCK;
    let from = whole.min(a.len());
    from + a[from..].iter().zip(&b[from..]).take_while(|(a, b)| a == b).count()
}
