//! Cutting nodes and joining them.

use super::aux::List;
use super::component::Component;
use super::config::TreeError;
use super::matching::Boundary;
use super::node::{Cell, Index, Node, NodeId};
use super::span::Span;
use super::tree::Tree;

/// Longest node that joining makes, in pages.
const JOINED_PAGES: u32 = 512;

impl Tree {
    /// Makes a boundary the end of a node, and says which.
    pub fn settle(&mut self, boundary: Boundary) -> Result<NodeId, TreeError> {
        let at = self.resolve(boundary.node)?;
        let node = self.arena.node(at);
        if node.is_root() {
            return Ok(boundary.node);
        }
        if boundary.used == 0 || boundary.used > node.pages || node.start + boundary.used != boundary.pages {
            return self.refused(at, "it was cut or joined since the boundary was found");
        }
        let at = self.cut(at, boundary.used);
        Ok(self.arena.id(at))
    }

    /// Makes the window before the end of `node` begin with a node of its own, so that who holds or loads it does so with that window and
    /// not with all of a long node.
    pub fn cut_window(&mut self, node: NodeId) -> Result<(), TreeError> {
        let at = self.resolve(node)?;
        if !self.has(Component::Window) {
            return Ok(());
        }
        let reach = self.arena.node(at).end().saturating_sub(self.window_pages);
        let first = self.arena.upward(at).find(|&part| self.arena.node(part).start <= reach);
        if let Some(part) = first {
            let before = reach - self.arena.node(part).start;
            if before > 0 && before < self.arena.node(part).pages {
                self.split_at(part, before);
            }
        }
        Ok(())
    }

    /// Cuts a node after its first `pages` pages, of which there must be more. The node keeps its name, its state and the pages after the
    /// cut; the new node before it gets the rest, and copies of locks and marks, so that whoever holds the one holds both.
    pub(super) fn split_at(&mut self, at: Index, pages: u32) -> Index {
        let (page_size, units) = (self.config.page_size, self.config.units);
        self.arena.unlink(at);
        let node = self.arena.node_mut(at);
        let (head, tail) = node.span.split(pages as usize, page_size, units);
        let mut first = Node::new(node.parent, node.start, pages, head);
        first.full = node.full.split(pages as usize);
        first.host_locks = node.host_locks;
        first.hits = node.hits;
        first.priority = node.priority;
        first.used = node.used;
        first.created = node.created;
        first.owed = node.owed;
        first.unproven = node.unproven;
        node.span = tail;
        node.start += pages;
        node.pages -= pages;
        let first = self.enter(first);
        self.arena.node_mut(at).parent = first;
        self.arena.link(at);
        if self.has(Component::Window) {
            *self.cell_mut(Component::Window, first) = self.cell_mut(Component::Window, at).split(pages as usize);
            let aux = &mut self.aux[Component::Window as usize - 1];
            for list in [List::Device, List::Host] {
                if aux.is_listed(list, at) {
                    aux.place_behind(list, at, first);
                }
            }
        }
        self.refresh(first);
        self.refresh(at);
        first
    }

    /// Joins a node with those before it as long as nothing tells them apart, so that a sequence that grew page by page does not stay
    /// a chain of small nodes. The node keeps its name; the others go. Says whether there was any.
    pub fn merge_up(&mut self, node: NodeId) -> Result<bool, TreeError> {
        self.merge(node, |_, _| true)
    }

    /// As `merge_up`, for a sequence that goes on growing: joins with what is before only as long as that is no longer than what it is
    /// joined to. Called after each page this leaves a chain as short as the logarithm of its pages, and copies each page as many times.
    pub fn merge_growing(&mut self, node: NodeId) -> Result<bool, TreeError> {
        self.merge(node, |before, joined| before <= joined)
    }

    fn merge(&mut self, node: NodeId, goes_on: impl Fn(u32, u32) -> bool) -> Result<bool, TreeError> {
        let at = self.resolve(node)?;
        if self.arena.node(at).is_root() {
            return Ok(false);
        }
        let most = if self.has(Component::Window) { self.window_pages.min(JOINED_PAGES) } else { JOINED_PAGES };
        let mut run = vec![at];
        let mut pages = self.arena.node(at).pages;
        let mut above = self.arena.node(at).parent;
        while self.is_alike(above, at)
            && pages + self.arena.node(above).pages <= most
            && goes_on(self.arena.node(above).pages, pages)
        {
            pages += self.arena.node(above).pages;
            run.push(above);
            above = self.arena.node(above).parent;
        }
        if run.len() == 1 {
            return Ok(false);
        }
        run.reverse();
        run.iter().rev().for_each(|&part| self.arena.unlink(part));
        let spans: Vec<_> = run.iter().map(|&part| self.arena.node(part).span.clone()).collect();
        for component in [Component::Full, Component::Window] {
            if self.has(component) {
                let joined = |slots: fn(&Cell) -> &[u32]| -> Box<[u32]> {
                    run.iter().flat_map(|&part| slots(self.cell(component, part)).iter().copied()).collect()
                };
                let (device, host) = (joined(|cell| &cell.device), joined(|cell| &cell.host));
                let cell = self.cell_mut(component, at);
                (cell.device, cell.host) = (device, host);
            }
        }
        let mut hits = 0;
        for &part in &run[..run.len() - 1] {
            hits = hits.max(self.arena.node(part).hits);
            for &component in &self.components[1..] {
                let aux = &mut self.aux[component as usize - 1];
                [List::Device, List::Host].into_iter().for_each(|list| aux.remove(list, part));
                *aux.cell_mut(part) = Cell::default();
            }
            self.arena.node_mut(part).full = Cell::default();
            self.arena.vacate(part);
        }
        let start = self.arena.node(at).end() - pages;
        let node = self.arena.node_mut(at);
        node.span = Span::join(&spans, self.config.units);
        node.parent = above;
        node.start = start;
        node.pages = pages;
        node.hits = node.hits.max(hits);
        self.arena.link(at);
        self.refresh(at);
        Ok(true)
    }

    /// Whether a node differs from the only one below it in nothing but its pages, so that nobody holds the one without the other.
    fn is_alike(&self, above: Index, below: Index) -> bool {
        let (first, last) = (self.arena.node(above), self.arena.node(below));
        let alike = |component| {
            let (first, last) = (self.cell(component, above), self.cell(component, below));
            first.quiet()
                && last.quiet()
                && first.locks == last.locks
                && first.on_device() == last.on_device()
                && first.host.is_empty() == last.host.is_empty()
                && first.stored == last.stored
        };
        let stateless = || {
            let state = self.cell(Component::State, above);
            !state.on_device()
                && state.host.is_empty()
                && state.locks == 0
                && self.cell(Component::State, below).quiet()
        };
        !first.is_root()
            && first.children == 1
            && first.host_locks == last.host_locks
            && first.owed == last.owed
            && first.unproven == last.unproven
            && first.priority == last.priority
            && alike(Component::Full)
            && (!self.has(Component::Window) || alike(Component::Window))
            && (!self.has(Component::State) || stateless())
    }
}
