//! Transfers of the model: begun in one step, ended in another.

use super::model::{Held, Key, Model};
use super::*;

/// A transfer that runs.
pub(super) struct Transfer {
    kind: Kind,
    /// What it holds on the device.
    pub device: Option<Held>,
    /// What it holds on the host: the end of a path, and the page from which on.
    pub host: Option<(Key, u32)>,
}

enum Kind {
    Backup(BackupTicket, Vec<(Component, u32)>),
    Load(LoadTicket, Vec<(Component, u32)>),
    Store(StoreTicket, Vec<(Component, Key)>),
}

impl Model {
    pub(super) fn begin_transfer(&mut self) {
        match (self.random.below(3), self.tree.config().below) {
            (0, Below::Host) => self.begin_backup(),
            (1, Below::Host) => self.begin_load(),
            _ => self.begin_store(),
        }
    }

    /// What a lock of this node holds: windows of whole nodes.
    fn held(&self, node: NodeId, key: &Key) -> Held {
        let reach = self.pages(&key.1).saturating_sub(self.tree.config().window_pages() as usize) as u32;
        let path = self.tree.path(node).unwrap();
        let from = path.iter().map(|&part| self.tree.start(part).unwrap()).rfind(|&start| start <= reach);
        let window_from = self.has(Component::Window).then_some(from.unwrap_or(0));
        Held { key: key.clone(), window_from, state: self.has(Component::State) }
    }

    /// The prefixes of the node's own pages.
    fn own(&self, node: NodeId, key: &Key) -> Vec<Key> {
        self.prefixes(key).split_off(self.tree.start(node).unwrap() as usize)
    }

    pub(super) fn note_backup(&mut self, key: &Key, slots: &Slots, running: bool) {
        for &component in self.tree.components() {
            let slots = &slots[component];
            let pages = self.prefixes(key);
            for (key, &slot) in pages.iter().rev().zip(slots.iter().rev()) {
                self.put(false, component, key, slot);
                self.entries.get_mut(key).unwrap().backing[component as usize] = running;
            }
        }
    }

    fn begin_backup(&mut self) {
        let Some((node, key)) = self.pick() else { return };
        let mut needs = self.tree.backup_needs(node).unwrap();
        if self.random.one_in(3) {
            needs[Component::Window] = 0;
        }
        let slots = PerComponent(needs.0.map(|count| self.fresh(count)));
        if slots.0.iter().all(Vec::is_empty) {
            return;
        }
        let held = self.held(node, &key);
        let Ok(ticket) = self.tree.begin_backup(node, slots.clone()) else { return };
        self.note_backup(&key, &slots, true);
        let list = Component::ALL.into_iter().flat_map(|kind| slots[kind].iter().map(move |&slot| (kind, slot)));
        self.transfers.push(Transfer { kind: Kind::Backup(ticket, list.collect()), device: Some(held), host: None });
    }

    fn begin_load(&mut self) {
        let (name, tokens) = self.sequence();
        let Some(root) = self.tree.find_root(&self.names[name]) else { return };
        let found = self.tree.find(root, &tokens).unwrap();
        let node = self.tree.settle(found.best).unwrap();
        let needs = self.tree.load_needs(node).unwrap();
        assert_eq!(needs.0.map(|count| count as u32), found.load.0, "what the match said, and no more");
        if needs == PerComponent::default() {
            return;
        }
        let key = self.key(name, &tokens, found.best.pages as usize);
        let slots = PerComponent(needs.0.map(|count| self.fresh(count)));
        let held = self.held(node, &key);
        let begun = self.tree.begin_load(node, slots.clone());
        let running = self.prefixes(&key).iter().any(|key| self.entries[key].loading.contains(&true));
        assert_eq!(begun.is_err(), running);
        let Ok(ticket) = begun else { return };
        let mut list = Vec::new();
        let mut from = self.pages(&key.1);
        for LoadCopy { component, host, device } in self.tree.load_copies(&ticket).unwrap() {
            assert_eq!(host.len(), device.len());
            for (host, device) in host.into_iter().zip(device) {
                let key = self.owners[&(false, component, host)].clone();
                self.put(true, component, &key, device);
                self.entries.get_mut(&key).unwrap().loading[component as usize] = true;
                from = from.min(self.pages(&key.1) - 1);
                list.push((component, device));
            }
        }
        let mut all: Vec<u32> = slots.0.concat();
        let mut used: Vec<u32> = list.iter().map(|(_, slot)| *slot).collect();
        all.sort_unstable();
        used.sort_unstable();
        assert_eq!(used, all, "each slot is filled once");
        let host = Some((key, from as u32));
        self.transfers.push(Transfer { kind: Kind::Load(ticket, list), device: Some(held), host });
    }

    fn begin_store(&mut self) {
        let Some((node, key)) = self.pick() else { return };
        let source = match self.tree.config().below {
            Below::Host => Source::Host,
            _ => Source::Device,
        };
        let bit = 1 << self.random.below(2);
        let (own, held) = (self.own(node, &key), self.held(node, &key));
        let start = self.tree.start(node).unwrap();
        let Some((ticket, slots)) = self.tree.begin_store(node, bit, source).unwrap() else { return };
        let mut written = Vec::new();
        for component in Component::ALL {
            for (key, slot) in own.iter().rev().zip(slots[component].iter().rev()) {
                assert_eq!(self.owners[&(source == Source::Device, component, *slot)], *key);
                assert_eq!(self.entries[key].stored[component as usize] & bit, 0, "the store has it");
                written.push((component, key.clone()));
            }
        }
        let (device, host) = match source {
            Source::Device => (Some(held), None),
            Source::Host => (None, Some((key, start))),
        };
        self.transfers.push(Transfer { kind: Kind::Store(ticket, written), device, host });
    }

    pub(super) fn finish_transfer(&mut self) {
        if self.transfers.is_empty() {
            return;
        }
        let place = self.random.below(self.transfers.len());
        let transfer = self.transfers.swap_remove(place);
        let ok = !self.random.one_in(3);
        match transfer.kind {
            Kind::Backup(ticket, slots) => {
                let actions = self.tree.finish_backup(ticket, ok).unwrap();
                self.end_filling(false, slots, actions, ok);
            }
            Kind::Load(ticket, slots) => {
                let actions = self.tree.finish_load(ticket, ok).unwrap();
                self.end_filling(true, slots, actions, ok);
                if let Some((key, _)) = transfer.host.filter(|_| ok) {
                    let root = self.tree.find_root(&self.names[key.0]).unwrap();
                    let found = self.tree.find(root, &key.1).unwrap();
                    assert_eq!(found.device.pages as usize, self.pages(&key.1), "all that it needs is there");
                }
            }
            Kind::Store(ticket, written) => {
                let bit = ticket.bit();
                self.tree.finish_store(ticket, ok).unwrap();
                for (component, key) in written {
                    self.entries.get_mut(&key).unwrap().stored[component as usize] |= if ok { bit } else { 0 };
                }
            }
        }
    }

    fn end_filling(&mut self, device: bool, slots: Vec<(Component, u32)>, actions: Actions, ok: bool) {
        let mut freed: Vec<(Component, u32)> = Vec::new();
        for action in actions.0 {
            match action {
                Action::FreeDevice { component, slots } if device => {
                    freed.extend(slots.iter().map(|&slot| (component, slot)))
                }
                Action::FreeHost { component, slots } if !device => {
                    freed.extend(slots.iter().map(|&slot| (component, slot)))
                }
                other => panic!("{other:?}"),
            }
        }
        let mut expected = if ok { Vec::new() } else { slots.clone() };
        expected.sort_unstable();
        freed.sort_unstable();
        assert_eq!(freed, expected);
        for (component, slot) in slots {
            match ok {
                true => {
                    let key = self.owners[&(device, component, slot)].clone();
                    let entry = self.entries.get_mut(&key).unwrap();
                    let mark = if device { &mut entry.loading } else { &mut entry.backing };
                    mark[component as usize] = false;
                }
                false => self.free(device, component, slot, true),
            }
        }
        self.forget_empty();
    }
}
