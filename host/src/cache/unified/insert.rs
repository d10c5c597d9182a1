//! Taking computed slots into the tree.
//!
//! One call does it all. The caller hands over slots of every component by position, so nothing has to be translated or asked for
//! between two steps: no insert is ever half done, and what is to be done about it comes back as one ordered list of actions.

use std::ops::Range;

use super::action::{Action, Actions};
use super::component::{Component, NO_SLOT, PerComponent};
use super::config::TreeError;
use super::node::{Index, Node, NodeId};
use super::span::Span;
use super::tree::Tree;

/// Slots that a request has computed.
#[derive(Debug)]
pub struct Insert<'a> {
    /// The node that the request holds and where its part of the tree ends; a root at first. What is before it is the tree's already.
    pub from: NodeId,
    /// Tokens after `from`. What makes no whole page is left alone.
    pub tokens: &'a [u32],
    /// Pages of full attention, one a page of the tokens. Where the tree has a page of its own, that one is put in its place.
    pub full: &'a mut [u32],
    /// Window pages, likewise; [`NO_SLOT`] where the request holds none any more. Empty if the tree has no windows. Afterwards a page is
    /// the tree's; good to be read are those that a lock of the end holds.
    pub window: &'a mut [u32],
    /// A state that is right for exactly the end of the last whole page.
    pub state: Option<u32>,
    /// The nodes on the way get at least this priority.
    pub priority: i32,
}

/// What became of a state that was handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateOutcome {
    /// There was none.
    NotGiven,
    /// It is the tree's.
    Taken,
    /// The tree has one there already; the one given is freed by an action.
    Known,
    /// The end was not reached; it still is the caller's.
    NotReached,
}

/// What became of the slots. Slots up to `pages` are the tree's (`taken`) or are freed by an action; those after are the caller's.
#[derive(Debug, PartialEq, Eq)]
pub struct Inserted {
    /// The node that ends what is in the tree now.
    pub node: NodeId,
    /// Pages after `from` that are in the tree now. Less than given if the tree is about to load the rest by itself.
    pub pages: usize,
    /// Pages, counted from `from`, whose slots the tree took.
    pub taken: PerComponent<Vec<Range<u32>>>,
    /// The state.
    pub state: StateOutcome,
    /// What is to be done, in order.
    pub actions: Actions,
}

impl Tree {
    /// Inserts what a request has computed, counts the use, and says what is to be backed up.
    pub fn insert(&mut self, insert: Insert<'_>) -> Result<Inserted, TreeError> {
        let Insert { from, tokens, full, window, state, priority } = insert;
        let start = self.resolve(from)?;
        let size = self.config.page_size;
        let pages = (self.config.units.count(tokens.len()) / size).min(full.len());
        let windows = if self.has(Component::Window) { full.len() } else { 0 };
        if window.len() != windows {
            return Err(TreeError::Shape { component: Component::Window, found: window.len(), needed: windows });
        }
        if state.is_some() && !self.has(Component::State) {
            return Err(TreeError::Shape { component: Component::State, found: 1, needed: 0 });
        }
        let node = self.arena.node(start);
        if !node.is_root() && (!node.full.on_device() || node.full.loading) {
            return self.refused(start, "it is not on the device");
        }
        let tokens = &tokens[..if pages == 0 { 0 } else { pages * size + self.config.units.overlap() }];
        let mut result = Inserted {
            node: from,
            pages: 0,
            taken: PerComponent::default(),
            state: StateOutcome::NotGiven,
            actions: Actions::default(),
        };
        let mut at = start;
        while result.pages < pages {
            let done = result.pages;
            let Some(child) = self.arena.find_child(at, &tokens[done * size..]) else {
                at = self.add_leaves(
                    at,
                    &tokens[done * size..],
                    &full[done..],
                    window.get(done..),
                    priority,
                    &mut result,
                );
                break;
            };
            // Pages that are being filled can't be handed out; a state is not handed out here.
            let loading = |component| self.has(component) && self.cell(component, child).loading;
            if loading(Component::Full) || loading(Component::Window) {
                break;
            }
            let common = self.common_pages(self.arena.node(child).span.tokens(), &tokens[done * size..]) as usize;
            let used = self.same_window(child, window.get(done..done + common)).unwrap_or(common);
            at = self.cut(child, used as u32);
            let upto = done + used;
            self.take(Component::Full, at, &mut full[done..upto], done, &mut result);
            if !window.is_empty() {
                self.take(Component::Window, at, &mut window[done..upto], done, &mut result);
            }
            let node = self.arena.node_mut(at);
            node.priority = node.priority.max(priority);
            result.pages = upto;
        }
        result.node = self.arena.id(at);
        if let Some(slot) = state {
            result.state = self.attach_state(at, slot, result.pages == pages, &mut result.actions);
        }
        self.touch_at(at);
        let counted = self.arena.node(start).end();
        self.count_use_at(at, counted, &mut result.actions);
        if result.state == StateOutcome::Taken && self.config.states.is_some_and(|states| states.per_path.is_some()) {
            result.actions.0.push(Action::CapStates { tail: result.node });
        }
        Ok(result)
    }

    /// Where a node without a window would have to be cut, so that the slots given for it are all there or all missing.
    fn same_window(&self, at: Index, window: Option<&[u32]>) -> Option<usize> {
        let window = window?;
        let first = *window.first()?;
        if self.cell(Component::Window, at).on_device() {
            return None;
        }
        window.iter().position(|&slot| (slot == NO_SLOT) != (first == NO_SLOT))
    }

    /// Gives a node the slots for its pages, or puts the node's into the table and frees what was given.
    fn take(&mut self, component: Component, at: Index, given: &mut [u32], offset: usize, result: &mut Inserted) {
        let live = given.iter().all(|&slot| slot != NO_SLOT);
        if self.cell(component, at).on_device() {
            let own = &self.cell(component, at).device;
            let twice: Box<[u32]> =
                given.iter().zip(own).filter(|&(a, b)| a != b && *a != NO_SLOT).map(|(&slot, _)| slot).collect();
            given.copy_from_slice(own);
            result.actions.free_device(component, twice);
        } else if live {
            self.put_device(component, at, Box::from(&*given));
            push_range(&mut result.taken[component], offset, given.len());
        }
    }

    /// Adds what the tree does not have. Runs with and without window slots become nodes of their own, and the end one of a single window:
    /// whoever locks the end then pins that and not the whole prompt.
    fn add_leaves(
        &mut self,
        parent: Index,
        tokens: &[u32],
        full: &[u32],
        window: Option<&[u32]>,
        priority: i32,
        result: &mut Inserted,
    ) -> Index {
        let (size, overlap) = (self.config.page_size, self.config.units.overlap());
        let pages = self.config.units.count(tokens.len()) / size;
        let offset = result.pages;
        let window = window.filter(|window| !window.is_empty());
        let mut at = parent;
        let mut done = 0;
        while done < pages {
            let mut length = pages - done;
            let mut live = false;
            if let Some(window) = window {
                let run = &window[done..pages];
                live = run[0] != NO_SLOT;
                length = run.iter().position(|&slot| (slot != NO_SLOT) != live).unwrap_or(length);
                let most = self.window_pages as usize;
                if live && done + length == pages && length > most {
                    length -= most;
                }
            }
            let part = done..done + length;
            let span = Span::new(Box::from(&tokens[done * size..part.end * size + overlap]));
            at = self.add_leaf(at, span, length as u32, priority);
            self.put_device(Component::Full, at, Box::from(&full[part.clone()]));
            push_range(&mut result.taken[Component::Full], offset + done, length);
            if let Some(window) = window.filter(|_| live) {
                self.put_device(Component::Window, at, Box::from(&window[part.clone()]));
                push_range(&mut result.taken[Component::Window], offset + done, length);
            }
            done = part.end;
        }
        result.pages = offset + pages;
        at
    }

    pub(super) fn add_leaf(&mut self, parent: Index, span: std::sync::Arc<Span>, pages: u32, priority: i32) -> Index {
        self.clock += 1;
        let before = self.arena.node(parent);
        let mut node = Node::new(parent, before.end(), pages, span);
        // What was computed on top of pages that nothing proves is no better than they are.
        node.unproven = before.unproven;
        node.created = self.clock;
        node.used = self.clock;
        node.priority = priority;
        let at = self.enter(node);
        if self.arena.node(at).start == 0 {
            let first = self.arena.first_fingerprint(self.arena.first_page_of(at));
            self.memory.began(first, self.arena.tag(parent));
        }
        at
    }

    fn attach_state(&mut self, at: Index, slot: u32, reached: bool, actions: &mut Actions) -> StateOutcome {
        if !reached || self.arena.node(at).is_root() {
            return StateOutcome::NotReached;
        }
        let known = &self.cell(Component::State, at).device;
        match known.first() {
            None => {
                self.put_device(Component::State, at, Box::new([slot]));
                StateOutcome::Taken
            }
            Some(&own) if own == slot => StateOutcome::Known,
            Some(_) => {
                actions.free_device(Component::State, Box::new([slot]));
                StateOutcome::Known
            }
        }
    }
}

fn push_range(ranges: &mut Vec<Range<u32>>, start: usize, length: usize) {
    let (start, end) = (start as u32, (start + length) as u32);
    match ranges.last_mut() {
        Some(last) if last.end == start => last.end = end,
        _ => ranges.push(start..end),
    }
}
