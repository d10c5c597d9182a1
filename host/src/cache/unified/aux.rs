//! Windows and states: cells beside the nodes, and lists of those that may leave, by last use.
//!
//! They stand in arrays of their own, with the places of the nodes, so that a tree without them pays nothing for them.

use super::node::{Cell, Index, NONE};

const UNLINKED: Index = NONE - 1;

#[derive(Debug, Clone, Copy)]
struct Link {
    newer: Index,
    older: Index,
}

impl Default for Link {
    fn default() -> Self {
        Link { newer: UNLINKED, older: UNLINKED }
    }
}

/// A tier's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum List {
    /// Nodes with a device value that nobody locks.
    Device,
    /// Nodes with a host value that no transfer reads or fills; that nobody locks, if there is none on the device.
    Host,
}

#[derive(Debug, Clone, Copy)]
struct Ends {
    newest: Index,
    oldest: Index,
}

#[derive(Debug, Default)]
struct AuxCell {
    cell: Cell,
    links: [Link; 2],
}

/// One component beside full attention.
#[derive(Debug)]
pub(super) struct Aux {
    cells: Vec<AuxCell>,
    ends: [Ends; 2],
}

impl Default for Aux {
    fn default() -> Self {
        Aux { cells: Vec::new(), ends: [Ends { newest: NONE, oldest: NONE }; 2] }
    }
}

impl Aux {
    pub fn cell(&self, at: Index) -> &Cell {
        &self.cells[at as usize].cell
    }

    pub fn cell_mut(&mut self, at: Index) -> &mut Cell {
        &mut self.cells[at as usize].cell
    }

    /// Makes an empty cell for a node that takes this place.
    pub fn enter(&mut self, at: Index) {
        if self.cells.len() <= at as usize {
            self.cells.resize_with(at as usize + 1, AuxCell::default);
        }
        self.cells[at as usize] = AuxCell::default();
    }

    pub fn reserve(&mut self, nodes: usize) {
        self.cells.reserve(nodes.saturating_sub(self.cells.len()));
    }

    pub fn is_listed(&self, list: List, at: Index) -> bool {
        self.cells[at as usize].links[list as usize].newer != UNLINKED
    }

    /// The one not used for the longest time.
    pub fn oldest(&self, list: List) -> Option<Index> {
        Some(self.ends[list as usize].oldest).filter(|&at| at != NONE)
    }

    /// Nodes of a list, the newest first.
    pub fn listed(&self, list: List) -> impl Iterator<Item = Index> + '_ {
        let first = Some(self.ends[list as usize].newest).filter(|&at| at != NONE);
        std::iter::successors(first, move |&at| {
            Some(self.cells[at as usize].links[list as usize].older).filter(|&at| at != NONE)
        })
    }

    /// Enters a node as the newest, or moves it there.
    pub fn renew(&mut self, list: List, at: Index) {
        self.remove(list, at);
        let newest = self.ends[list as usize].newest;
        self.cells[at as usize].links[list as usize] = Link { newer: NONE, older: newest };
        self.ends[list as usize].newest = at;
        match newest {
            NONE => self.ends[list as usize].oldest = at,
            _ => self.cells[newest as usize].links[list as usize].newer = at,
        }
    }

    /// Enters a node right behind another one of the list.
    pub fn place_behind(&mut self, list: List, before: Index, at: Index) {
        self.remove(list, at);
        let older = self.cells[before as usize].links[list as usize].older;
        self.cells[at as usize].links[list as usize] = Link { newer: before, older };
        self.cells[before as usize].links[list as usize].older = at;
        match older {
            NONE => self.ends[list as usize].oldest = at,
            _ => self.cells[older as usize].links[list as usize].newer = at,
        }
    }

    pub fn remove(&mut self, list: List, at: Index) {
        if !self.is_listed(list, at) {
            return;
        }
        let Link { newer, older } = std::mem::take(&mut self.cells[at as usize].links[list as usize]);
        match newer {
            NONE => self.ends[list as usize].newest = older,
            _ => self.cells[newer as usize].links[list as usize].older = older,
        }
        match older {
            NONE => self.ends[list as usize].oldest = newer,
            _ => self.cells[older as usize].links[list as usize].newer = newer,
        }
    }

    /// Bytes of the array itself.
    pub fn bytes(&self) -> usize {
        self.cells.capacity() * size_of::<AuxCell>()
    }
}
