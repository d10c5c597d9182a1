//! Operations of the model that begin and end in one step.

use super::model::{Held, Key, Model, PAGE};
use super::*;
use crate::cache::unified::aux::List;

impl Model {
    pub(super) fn insert(&mut self) {
        let (name, mut tokens) = self.sequence();
        // From the root, or from where a request is.
        let (from, lock) = match self.random.below(3) {
            0 if !self.locks.is_empty() => {
                let place = self.random.below(self.locks.len());
                let (held, lock) = &self.locks[place];
                let ready = self.tree.device_table(Component::Full, lock.node()).unwrap();
                let loading = self.prefixes(&held.key).iter().any(|key| {
                    self.entries.get(key).is_none_or(|entry| entry.loading[0] || !entry.on_device(Component::Full))
                });
                if loading || ready.contains(&NO_SLOT) {
                    return;
                }
                let (key, node) = (held.key.clone(), lock.node());
                tokens.splice(..self.overlap(), key.1.iter().copied());
                (key, Ok(node))
            }
            _ => {
                let root = self.tree.root(&self.names[name].clone());
                ((name, Vec::new()), Err(self.tree.lock(root).unwrap()))
            }
        };
        let name = from.0;
        let start = self.pages(&from.1);
        let node = lock.as_ref().map_or_else(Lock::node, |node| *node);
        let pages = self.pages(&tokens) - start;
        let given = self.fresh(pages);
        let mut full = given.clone();
        let mut window = Vec::new();
        if self.has(Component::Window) {
            window = self.fresh(pages);
            let live = self.random.below(pages + 2);
            window.iter_mut().take(live).for_each(|slot| *slot = NO_SLOT);
        }
        let given_window = window.clone();
        let state = (self.has(Component::State) && !self.random.one_in(3)).then(|| self.fresh(1)[0]);
        let priority = self.random.below(3) as i32;
        let insert = Insert {
            from: node,
            tokens: &tokens[start * PAGE..],
            full: &mut full,
            window: &mut window,
            state,
            priority,
        };
        let result = self.tree.insert(insert).unwrap();
        let entry = |model: &Model, at: usize| model.entries.get(&model.key(name, &tokens, start + at)).cloned();
        let reached = (1..=pages)
            .find(|&at| entry(self, at).is_some_and(|entry| entry.loading[..2].contains(&true)))
            .map_or(pages, |at| at - 1);
        let reached_end = entry(self, reached).is_some_and(|_| reached < pages);
        assert_eq!(result.pages, reached, "{reached_end}");
        let mut freed: Vec<(Component, u32)> = Vec::new();
        for action in &result.actions.0 {
            if let Action::FreeDevice { component, slots } = action {
                freed.extend(slots.iter().map(|&slot| (*component, slot)));
            }
        }
        for (component, given, now) in [(Component::Full, &given, &full), (Component::Window, &given_window, &window)] {
            for at in 0..reached.min(given.len()) {
                let key = self.key(name, &tokens, start + at + 1);
                let known = self.entries.get(&key).and_then(|entry| entry.device[component as usize]);
                let taken = result.taken[component].iter().any(|range| range.contains(&(at as u32)));
                assert_eq!(taken, known.is_none() && given[at] != NO_SLOT);
                if taken {
                    self.put(true, component, &key, given[at]);
                }
                let twice = known.is_some() && given[at] != NO_SLOT;
                assert_eq!(freed.iter().filter(|&&slot| slot == (component, given[at])).count(), usize::from(twice));
                freed.retain(|&slot| slot != (component, given[at]));
                assert_eq!(now[at], known.unwrap_or(given[at]));
            }
        }
        if let Some(slot) = state {
            let key = self.key(name, &tokens, start + pages);
            let known = self.entries.get(&key).is_some_and(|entry| entry.on_device(Component::State));
            let outcome = match (reached == pages && start + pages > 0, known) {
                (false, _) => StateOutcome::NotReached,
                (true, true) => StateOutcome::Known,
                (true, false) => StateOutcome::Taken,
            };
            assert_eq!(result.state, outcome);
            match outcome {
                StateOutcome::Taken => self.put(true, Component::State, &key, slot),
                StateOutcome::Known => freed.retain(|&freed| freed != (Component::State, slot)),
                _ => {}
            }
        }
        assert_eq!(freed, [], "freed what was not given twice");
        if let Err(lock) = lock {
            self.tree.unlock(lock).unwrap();
        }
    }

    pub(super) fn insert_host(&mut self) {
        if self.tree.config().below != Below::Host {
            return;
        }
        let (name, tokens) = self.sequence();
        let pages = self.pages(&tokens);
        let start = self.random.below(pages);
        let full = self.fresh(pages - start);
        let mut window = Vec::new();
        if self.has(Component::Window) && !self.random.one_in(3) {
            window = self.fresh(pages - start);
            let live = self.random.below(pages - start + 1);
            window.iter_mut().take(live).for_each(|slot| *slot = NO_SLOT);
        }
        let state = (self.has(Component::State) && self.random.one_in(2)).then(|| self.fresh(1)[0]);
        let root = self.tree.root(&self.names[name].clone());
        let keys = self.tree.config().units.keys(self.names[name].seed(), &tokens, PAGE);
        let insert = HostInsert {
            root,
            tokens: &tokens,
            start,
            keys: &keys[start..],
            full: &full,
            window: &window,
            state,
            stored: 1,
            owed: 0,
            unproven: false,
        };
        let result = self.tree.insert_host(insert).unwrap();
        self.tree.retire_root(root);
        let freed = result.actions.freed_host();
        let given = full.len() + window.iter().filter(|&&slot| slot != NO_SLOT).count() + usize::from(state.is_some());
        assert_eq!(result.taken + freed.0.iter().sum::<usize>(), given, "each slot is taken or freed");
        let known = (1..=pages).take_while(|&at| self.entries.contains_key(&self.key(name, &tokens, at))).count();
        assert_eq!(result.orphaned, known < start);
        let mut left: Vec<(Component, u32)> = full.iter().map(|&slot| (Component::Full, slot)).collect();
        left.extend(window.iter().filter(|&&slot| slot != NO_SLOT).map(|&slot| (Component::Window, slot)));
        left.extend(state.map(|slot| (Component::State, slot)));
        for action in &result.actions.0 {
            let Action::FreeHost { component, slots } = action else { panic!("{action:?}") };
            left.retain(|(kind, slot)| kind != component || !slots.contains(slot));
        }
        // Full pages only where nothing was; others only beside full pages on the host, where they were missing.
        for (component, slot) in left {
            let at = match component {
                Component::Full => full.iter().position(|&given| given == slot),
                Component::Window => window.iter().position(|&given| given == slot),
                Component::State => Some(pages - start - 1),
            };
            let key = self.key(name, &tokens, start + at.unwrap() + 1);
            let entry = self.entries.entry(key.clone()).or_default();
            // A copy of full pages that are on the device is taken where windows or states may come with it.
            assert!(!entry.on_device(component) || (component == Component::Full && self.tree.components().len() > 1));
            assert!(component != Component::Full || entry.host[0].is_none());
            assert!(component == Component::Full || entry.host[0].is_some());
            entry.stored[component as usize] |= 1;
            self.put(false, component, &key, slot);
        }
        for at in known + 1..=pages {
            assert!(result.orphaned || self.entries.contains_key(&self.key(name, &tokens, at)), "a page was not taken");
        }
    }

    pub(super) fn lock(&mut self) {
        let (name, tokens) = self.sequence();
        let Some(root) = self.tree.find_root(&self.names[name]) else { return };
        let found = self.tree.find(root, &tokens).unwrap();
        let boundary = if self.random.one_in(2) { found.device } else { found.best };
        let node = self.tree.settle(boundary).unwrap();
        let parts = Parts { window: !self.random.one_in(4), state: !self.random.one_in(4) };
        let lock = self.tree.lock_parts(node, parts).unwrap();
        let from = self.tree.start(node).unwrap();
        let reuse = self.tree.count_use(node, from).unwrap();
        assert_eq!(reuse.freed_device(), PerComponent::default());
        let window_from = lock.window_from();
        let held =
            Held { key: self.key(name, &tokens, boundary.pages as usize), window_from, state: lock.holds_state() };
        self.locks.push((held, lock));
    }

    pub(super) fn unlock(&mut self) {
        if !self.locks.is_empty() {
            let place = self.random.below(self.locks.len());
            let (_, lock) = self.locks.swap_remove(place);
            let node = lock.node();
            self.tree.unlock(lock).unwrap();
            if self.tree.contains(node) {
                self.tree.merge_up(node).unwrap();
            }
        }
    }

    pub(super) fn release_parts(&mut self) {
        if !self.locks.is_empty() {
            let place = self.random.below(self.locks.len());
            let (held, lock) = &mut self.locks[place];
            if self.random.one_in(2) {
                self.tree.release_state(lock).unwrap();
            } else {
                self.tree.release_window(lock).unwrap();
            }
            (held.window_from, held.state) = (lock.window_from(), lock.holds_state());
        }
    }

    fn any_node(&mut self) -> Option<NodeId> {
        let nodes: Vec<NodeId> = self.tree.nodes().collect();
        (!nodes.is_empty()).then(|| nodes[self.random.below(nodes.len())])
    }

    pub(super) fn pick(&mut self) -> Option<(NodeId, Key)> {
        let node = self.any_node()?;
        Some((node, self.key_of(node)))
    }

    pub(super) fn merge(&mut self) {
        if let Some(node) = self.any_node() {
            match self.random.one_in(2) {
                true => self.tree.merge_up(node).unwrap(),
                false => self.tree.merge_growing(node).unwrap(),
            };
        }
    }

    pub(super) fn touch(&mut self) {
        if let Some(node) = self.any_node() {
            self.tree.touch(node).unwrap();
        }
    }

    pub(super) fn cap_or_forget(&mut self) {
        let Some(node) = self.any_node() else { return };
        if self.random.one_in(2) {
            let actions = self.tree.cap_states(node).unwrap();
            self.apply(actions);
        } else {
            let bits = 1 << self.random.below(2);
            self.tree.forget_stores(bits);
            for entry in self.entries.values_mut() {
                entry.stored.iter_mut().for_each(|stored| *stored &= !bits);
            }
        }
    }

    /// One step of eviction. False if there is nothing more.
    pub(super) fn evict_device(&mut self, component: Component) -> bool {
        let expected = (component == Component::Full).then(|| self.tree.least_device_leaf()).flatten();
        let want = 1 + self.random.below(3);
        let oldest = (component != Component::Full && self.has(component))
            .then(|| self.tree.oldest(component, List::Device))
            .flatten();
        let pinned_below = expected.is_some_and(|at| self.tree.arena.node(at).children > 0);
        match self.tree.evict_device(component, want) {
            Step::Exhausted => {
                assert!(oldest.is_none() && (expected.is_none() || pinned_below), "there was a victim");
                return false;
            }
            Step::Freed(actions) => {
                if let Some(at) = expected.filter(|_| !pinned_below) {
                    let end = self.tree.arena.node(at);
                    let gone = !end.live || !end.full.on_device();
                    assert!(gone, "another leaf left than the one that is worth least");
                }
                assert!(actions.freed_device()[component] > 0);
                self.apply(actions);
            }
            Step::BackUpFirst { node, component } => self.write_back(node, component),
        }
        true
    }

    fn write_back(&mut self, node: NodeId, component: Component) {
        if self.random.one_in(3) {
            let dropped = match component {
                Component::Full => self.tree.drop_subtree(node),
                other => self.tree.tombstone(other, node),
            };
            match dropped {
                Ok(actions) => self.apply(actions),
                // What is below is in use, so that the leaf has to be copied.
                Err(_) => self.write_back(node, component),
            }
            return;
        }
        let key = self.key_of(node);
        let needs = self.tree.backup_needs(node).unwrap();
        let slots = PerComponent(needs.0.map(|count| self.fresh(count)));
        let ticket = self.tree.begin_backup(node, slots.clone()).unwrap();
        self.note_backup(&key, &slots, false);
        assert!(self.tree.demote(node).is_err(), "it left while it was copied");
        let none = self.tree.finish_backup(ticket, true).unwrap();
        assert_eq!(none, Actions::default());
        let actions = match component {
            Component::Full => self.tree.demote(node).unwrap(),
            other => self.tree.tombstone(other, node).unwrap(),
        };
        self.apply(actions);
    }

    pub(super) fn evict_host(&mut self, component: Component) -> bool {
        let want = 1 + self.random.below(3);
        match self.tree.evict_host(component, want) {
            Step::Freed(actions) => {
                assert!(actions.freed_host()[component] > 0);
                self.apply(actions);
                true
            }
            Step::Exhausted => false,
            Step::BackUpFirst { .. } => panic!("the host backs nothing up"),
        }
    }
}
