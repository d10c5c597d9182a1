//! The tree by itself. `CASES.md` says which test stands for which case.

mod evict;
mod insert;
mod keys;
mod locks;
mod marks;
mod matching;
mod model;
mod model_ops;
mod model_transfers;
mod room;
mod transfers;

use super::*;
use crate::cache::CacheNamespace;

const PAGE: usize = 4;

/// A tree with what a test needs to speak of it shortly.
struct Rig {
    tree: Tree,
    root: NodeId,
    next: u32,
}

impl Rig {
    fn new(change: impl FnOnce(&mut TreeConfig)) -> Self {
        let mut config = TreeConfig { page_size: PAGE, ..TreeConfig::default() };
        change(&mut config);
        let mut tree = Tree::new(config).unwrap();
        tree.set_stores(0b11);
        let root = tree.root(&CacheNamespace::default());
        // Stays for the test, so that the root does too.
        let _ = tree.lock(root).unwrap();
        Rig { tree, root, next: 0 }
    }

    /// With windows of 2 pages.
    fn windowed() -> Self {
        Rig::new(|config| config.window = Some(2 * PAGE))
    }

    fn with_states() -> Self {
        Rig::new(|config| config.states = Some(StateConfig { grid: PAGE, per_path: None }))
    }

    fn fresh(&mut self, count: usize) -> Vec<u32> {
        self.next += count as u32;
        (self.next - count as u32..self.next).collect()
    }

    /// Inserts all pages of a sequence after `from`; of windows all but the first `gone` pages.
    fn insert_from(&mut self, from: NodeId, tokens: &[u32], gone: usize, state: Option<u32>) -> Inserted {
        let pages = self.tree.config().units.count(tokens.len()) / PAGE;
        let mut full = self.fresh(pages);
        let mut window = Vec::new();
        if self.tree.components().contains(&Component::Window) {
            window = self.fresh(pages);
            window.iter_mut().take(gone).for_each(|slot| *slot = NO_SLOT);
        }
        let insert = Insert { from, tokens, full: &mut full, window: &mut window, state, priority: 0 };
        self.tree.insert(insert).unwrap()
    }

    fn insert(&mut self, tokens: &[u32]) -> NodeId {
        self.insert_from(self.root, tokens, 0, None).node
    }

    fn find(&self, tokens: &[u32]) -> Match {
        self.tree.find(self.root, tokens).unwrap()
    }

    fn device_pages(&self, tokens: &[u32]) -> u32 {
        self.find(tokens).device.pages
    }

    /// Copies a node to the host.
    fn back_up(&mut self, node: NodeId) {
        let needs = self.tree.backup_needs(node).unwrap();
        let slots = PerComponent(needs.0.map(|count| self.fresh(count)));
        let ticket = self.tree.begin_backup(node, slots).unwrap();
        assert_eq!(self.tree.finish_backup(ticket, true).unwrap(), Actions::default());
    }

    fn node_at(&mut self, tokens: &[u32], pages: u32) -> NodeId {
        let found = self.find(&tokens[..pages as usize * PAGE + self.tree.config().units.overlap()]);
        assert_eq!(found.full_pages, pages);
        let path_end = found.best.node;
        let boundary = Boundary { used: pages - self.tree.start(path_end).unwrap(), pages, ..found.best };
        self.tree.settle(boundary).unwrap()
    }

    fn sizes(&self, component: Component) -> (usize, usize) {
        let sizes = self.tree.sizes(component);
        (sizes.device, sizes.unlocked)
    }

    fn checked(&self) {
        self.tree.check_integrity().unwrap();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.checked();
        }
    }
}

/// A sequence of `pages` whole pages; `branch` tells sequences apart.
fn tokens(pages: usize, branch: u32) -> Vec<u32> {
    (0..(pages * PAGE) as u32).map(|at| branch * 1000 + at).collect()
}

/// `tokens` after the first `shared` pages of another sequence.
fn fork(from: &[u32], shared: usize, pages: usize, branch: u32) -> Vec<u32> {
    [&from[..shared * PAGE], &tokens(pages, branch)].concat()
}

fn freed(step: Step) -> Actions {
    match step {
        Step::Freed(actions) => actions,
        other => panic!("{other:?}"),
    }
}
