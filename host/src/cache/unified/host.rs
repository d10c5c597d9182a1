//! Taking host slots that came from a store into the tree.

use super::action::Actions;
use super::component::{Component, NO_SLOT};
use super::config::TreeError;
use super::node::{Index, NodeId};
use super::span::Span;
use super::tree::Tree;
use crate::plugin::backend::PageKey;

/// Host slots that a store has filled.
#[derive(Debug)]
pub struct HostInsert<'a> {
    /// Root of the namespace.
    pub root: NodeId,
    /// The sequence from its start to the end of the pages.
    pub tokens: &'a [u32],
    /// Pages of the sequence before the first slot given.
    pub start: usize,
    /// Keys of the pages given; may be empty.
    pub keys: &'a [PageKey],
    /// Pages of full attention, [`NO_SLOT`] where the tree is believed to have them.
    pub full: &'a [u32],
    /// Window pages, [`NO_SLOT`] where there is none; empty if there are none at all.
    pub window: &'a [u32],
    /// The state at the end.
    pub state: Option<u32>,
    /// Stores, as bits, that have these pages or need not be given them.
    pub stored: u64,
    /// Stores, as bits, that are to be given them whatever their write policy says.
    pub owed: u64,
    /// Nothing tells whether the pages are right: the store's pages carry no seal.
    pub unproven: bool,
}

/// What became of them. Each slot given is the tree's or is freed by an action.
#[derive(Debug, PartialEq, Eq)]
pub struct HostInserted {
    /// The node at the end, or where the known prefix ends if that is before `start`.
    pub node: NodeId,
    /// What they stand on was gone, the prefix before them or full pages that were not given: they were not taken.
    pub orphaned: bool,
    /// Slots taken.
    pub taken: usize,
    /// What is to be freed.
    pub actions: Actions,
}

impl Tree {
    /// Inserts what a store has delivered, where the tree has it neither on device nor host.
    pub fn insert_host(&mut self, insert: HostInsert<'_>) -> Result<HostInserted, TreeError> {
        let HostInsert { root, tokens, start, full, window, state, stored, .. } = insert;
        let mut at = self.resolve(root)?;
        let size = self.config.page_size;
        let pages = self.config.units.count(tokens.len()) / size;
        let needed = pages.saturating_sub(start);
        let shape = |component, found| Err(TreeError::Shape { component, found, needed });
        if full.len() != needed {
            return shape(Component::Full, full.len());
        }
        if !window.is_empty() && (window.len() != needed || !self.has(Component::Window)) {
            return shape(Component::Window, window.len());
        }
        if state.is_some() && !self.has(Component::State) {
            return shape(Component::State, 1);
        }
        let mut result = HostInserted { node: root, orphaned: false, taken: 0, actions: Actions::default() };
        let mut spare = (Vec::new(), Vec::new());
        let mut done = 0;
        while done < pages {
            let rest = &tokens[done * size..pages * size + self.config.units.overlap()];
            let Some(child) = self.arena.find_child(at, rest) else { break };
            let mut used = self.common_pages(self.arena.node(child).span.tokens(), rest) as usize;
            if done < start {
                let whole = used == self.arena.node(child).pages as usize;
                used = used.min(start - done);
                done += used;
                if done < start && !whole {
                    break;
                }
                at = if done == start && needed > 0 { self.cut(child, used as u32) } else { child };
            } else {
                let given = window.get(done - start..done - start + used).unwrap_or_default();
                let cell = self.cell_or_empty(child);
                if cell && let Some(&first) = given.first() {
                    used = given.iter().position(|&slot| (slot == NO_SLOT) != (first == NO_SLOT)).unwrap_or(used);
                }
                at = self.cut(child, used as u32);
                let part = done - start..done - start + used;
                if self.may_adopt(at, &full[part.clone()]) {
                    self.cell_mut(Component::Full, at).stored |= stored;
                    self.put_host(Component::Full, at, Box::from(&full[part.clone()]));
                    result.taken += used;
                } else {
                    spare.0.extend(live(&full[part.clone()]));
                }
                self.fill_window(at, window.get(part).unwrap_or_default(), stored, &mut spare.1, &mut result);
                done += used;
            }
        }
        result.orphaned = done < start;
        let rest = done.saturating_sub(start);
        if result.orphaned {
            spare = (live(full), live(window));
        } else if full[rest..].contains(&NO_SLOT) {
            result.orphaned = true;
            spare.0.extend(live(&full[rest..]));
            spare.1.extend(live(window.get(rest..).unwrap_or_default()));
        } else if done < pages {
            at = self.add_host_leaves(at, &insert, done, &mut result);
            self.touch_at(at);
        }
        result.node = self.arena.id(at);
        if let Some(slot) = state {
            let (cell, full) = (self.cell(Component::State, at), &self.arena.node(at).full);
            if result.orphaned || !full.host_ready() || cell.on_device() || !cell.host.is_empty() {
                result.actions.free_host(Component::State, Box::new([slot]));
            } else {
                self.cell_mut(Component::State, at).stored |= stored;
                self.put_host(Component::State, at, Box::new([slot]));
                result.taken += 1;
            }
        }
        result.actions.free_host(Component::Full, spare.0.into());
        result.actions.free_host(Component::Window, spare.1.into());
        Ok(result)
    }

    /// Whether slots given for a node become its host copy: it has none, what is before it has one, and a window or a state may come with them.
    fn may_adopt(&self, at: Index, given: &[u32]) -> bool {
        let node = self.arena.node(at);
        let before = self.arena.node(node.parent);
        self.components.len() > 1
            && node.full.host.is_empty()
            && !node.full.loading
            && (before.is_root() || before.full.host_ready())
            && given.iter().all(|&slot| slot != NO_SLOT)
    }

    /// Whether a node could be given host windows.
    fn cell_or_empty(&self, at: Index) -> bool {
        self.has(Component::Window) && {
            let cell = self.cell(Component::Window, at);
            !cell.on_device() && cell.host.is_empty()
        }
    }

    fn fill_window(&mut self, at: Index, given: &[u32], stored: u64, spare: &mut Vec<u32>, result: &mut HostInserted) {
        let whole = !given.is_empty() && given.iter().all(|&slot| slot != NO_SLOT);
        // On the host a window stands beside full pages only.
        let full = &self.arena.node(at).full;
        if whole && self.cell_or_empty(at) && full.host_ready() {
            self.cell_mut(Component::Window, at).stored |= stored;
            self.put_host(Component::Window, at, Box::from(given));
            result.taken += given.len();
        } else {
            spare.extend(live(given));
        }
    }

    fn add_host_leaves(
        &mut self,
        parent: Index,
        insert: &HostInsert<'_>,
        done: usize,
        result: &mut HostInserted,
    ) -> Index {
        let (size, overlap) = (self.config.page_size, self.config.units.overlap());
        let pages = insert.start + insert.full.len();
        let mut at = parent;
        let mut done = done;
        while done < pages {
            let window = insert.window.get(done - insert.start..).unwrap_or_default();
            let live = window.first().is_some_and(|&slot| slot != NO_SLOT);
            let length = window.iter().position(|&slot| (slot != NO_SLOT) != live).unwrap_or(pages - done);
            let part = done - insert.start..done - insert.start + length;
            let tokens = Box::from(&insert.tokens[done * size..(done + length) * size + overlap]);
            let span = match insert.keys.get(part.clone()) {
                Some(keys) if !keys.is_empty() => Span::with_keys(tokens, keys),
                _ => Span::new(tokens),
            };
            at = self.add_leaf(at, span, length as u32, 0);
            let node = self.arena.node_mut(at);
            node.owed = insert.owed;
            node.unproven |= insert.unproven;
            self.cell_mut(Component::Full, at).stored = insert.stored;
            self.put_host(Component::Full, at, Box::from(&insert.full[part.clone()]));
            result.taken += length;
            if live {
                self.cell_mut(Component::Window, at).stored = insert.stored;
                self.put_host(Component::Window, at, Box::from(&insert.window[part]));
                result.taken += length;
            }
            done += length;
        }
        at
    }
}

fn live(window: &[u32]) -> Vec<u32> {
    window.iter().copied().filter(|&slot| slot != NO_SLOT).collect()
}
