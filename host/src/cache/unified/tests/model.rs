//! The tree against a slow one that is obviously right: a map from each prefix to its slots.
//!
//! `KVDOCK_SOAK` multiplies the length.

use std::collections::{BTreeMap, HashMap};

use super::*;

pub(super) const PAGE: usize = 2;

/// A prefix: its namespace and all tokens up to its end.
pub(super) type Key = (usize, Vec<u32>);

/// What stands at the end of a prefix: its last page, and the state there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub device: [Option<u32>; 3],
    pub host: [Option<u32>; 3],
    pub loading: [bool; 3],
    pub backing: [bool; 3],
    pub stored: [u64; 3],
}

impl Entry {
    pub fn on_device(&self, component: Component) -> bool {
        self.device[component as usize].is_some()
    }

    pub fn readable(&self, component: Component) -> bool {
        let at = component as usize;
        self.on_device(component) || self.host[at].is_some() && !self.backing[at]
    }
}

/// A prefix that a lock or a transfer holds.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub key: Key,
    pub window_from: Option<u32>,
    pub state: bool,
}

pub(super) struct Model {
    pub tree: Tree,
    pub names: Vec<CacheNamespace>,
    pub entries: BTreeMap<Key, Entry>,
    /// Whose each slot is, by tier and component.
    pub owners: HashMap<(bool, Component, u32), Key>,
    pub locks: Vec<(Held, Lock)>,
    pub transfers: Vec<model_transfers::Transfer>,
    pub random: Random,
    next: u32,
}

pub(super) struct Random(u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % bound
    }

    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

impl Model {
    pub fn new(config: TreeConfig, seed: u64) -> Self {
        let mut tree = Tree::new(config).unwrap();
        tree.set_stores(0b11);
        Model {
            tree,
            names: vec![CacheNamespace::default(), CacheNamespace::new(None, Some("salt".to_owned()))],
            entries: BTreeMap::new(),
            owners: HashMap::new(),
            locks: Vec::new(),
            transfers: Vec::new(),
            random: Random(seed * 77 + 1),
            next: 0,
        }
    }

    pub fn overlap(&self) -> usize {
        self.tree.config().units.overlap()
    }

    pub fn has(&self, component: Component) -> bool {
        self.tree.components().contains(&component)
    }

    pub fn fresh(&mut self, count: usize) -> Vec<u32> {
        self.next += count as u32;
        (self.next - count as u32..self.next).collect()
    }

    /// A sequence that often shares a prefix with others.
    pub fn sequence(&mut self) -> (usize, Vec<u32>) {
        let tokens = (1 + self.random.below(9)) * PAGE + self.overlap();
        let tokens = (0..tokens)
            .map(|at| if at % PAGE == 0 && self.random.one_in(4) { self.random.below(3) as u32 } else { 7 })
            .collect();
        (self.random.below(2), tokens)
    }

    pub fn pages(&self, tokens: &[u32]) -> usize {
        self.tree.config().units.count(tokens.len()) / PAGE
    }

    pub fn key(&self, name: usize, tokens: &[u32], pages: usize) -> Key {
        (name, tokens[..if pages == 0 { 0 } else { pages * PAGE + self.overlap() }].to_vec())
    }

    /// Pages of a key, and its prefixes of 1 to all pages.
    pub fn prefixes(&self, key: &Key) -> Vec<Key> {
        (1..=self.pages(&key.1)).map(|pages| self.key(key.0, &key.1, pages)).collect()
    }

    /// The prefix that a node ends, found by the slots that it has.
    pub fn key_of(&self, node: NodeId) -> Key {
        for (device, slots) in [
            (true, self.tree.device_slots(Component::Full, node).unwrap()),
            (false, self.tree.host_slots(Component::Full, node).unwrap()),
        ] {
            if let Some(&slot) = slots.last() {
                return self.owners[&(device, Component::Full, slot)].clone();
            }
        }
        panic!("{node:?} is in no tier")
    }

    pub fn put(&mut self, device: bool, component: Component, key: &Key, slot: u32) {
        let entry = self.entries.entry(key.clone()).or_default();
        let place = if device { &mut entry.device } else { &mut entry.host };
        assert_eq!(place[component as usize].replace(slot), None, "{component:?} of {key:?} was there");
        assert!(self.owners.insert((device, component, slot), key.clone()).is_none());
    }

    /// Longest matches by looking at each length: with what is on the device, with host too, and of full pages alone.
    fn slow_match(&self, name: usize, tokens: &[u32]) -> (usize, usize, usize) {
        let known: Vec<&Entry> =
            (1..=self.pages(tokens)).map_while(|pages| self.entries.get(&self.key(name, tokens, pages))).collect();
        let window_pages = self.tree.config().window.map(|window| window.div_ceil(PAGE).max(1));
        let works = |pages: usize, present: &dyn Fn(&Entry, Component) -> bool| {
            let before = &known[..pages];
            let full = before.iter().all(|entry| present(entry, Component::Full));
            let gap = before.iter().rposition(|entry| !present(entry, Component::Window));
            let window = match (window_pages, gap) {
                (Some(needed), Some(gap)) => pages - 1 - gap >= needed,
                _ => true,
            };
            let state = !self.has(Component::State) || before.last().is_none_or(|last| present(last, Component::State));
            full && window && state
        };
        let longest = |present: &dyn Fn(&Entry, Component) -> bool| {
            (0..=known.len()).rev().find(|&pages| works(pages, present)).unwrap()
        };
        (longest(&Entry::on_device), longest(&Entry::readable), known.len())
    }

    pub fn compare(&mut self) {
        let (name, tokens) = self.sequence();
        let found = self.tree.find_root(&self.names[name]).and_then(|root| self.tree.find(root, &tokens));
        let (device, best, full) = self.slow_match(name, &tokens);
        let Some(found) = found else {
            return assert_eq!(full, 0);
        };
        let lengths = (found.device.pages as usize, found.best.pages as usize, found.full_pages as usize);
        assert_eq!(lengths, (device, best, full), "{tokens:?}");
        let resident = (1..=full)
            .take_while(|&pages| self.entries[&self.key(name, &tokens, pages)].on_device(Component::Full))
            .count();
        assert_eq!(found.resident.pages as usize, resident);
        let lacking = (1..=best).filter(|&pages| {
            let entry = &self.entries[&self.key(name, &tokens, pages)];
            !entry.on_device(Component::Full)
        });
        if best > device {
            assert_eq!(found.load[Component::Full] as usize, lacking.count());
        }
        self.compare_sizes();
    }

    fn compare_sizes(&self) {
        for &component in self.tree.components() {
            let at = component as usize;
            let sizes = self.tree.sizes(component);
            let device = self.entries.values().filter(|entry| entry.device[at].is_some()).count();
            let host = self.entries.values().filter(|entry| entry.host[at].is_some()).count();
            assert_eq!((sizes.device, sizes.host), (device, host), "{component:?}");
        }
        let free = |(key, entry): &(&Key, &Entry)| entry.on_device(Component::Full) && !self.is_held(key);
        assert_eq!(self.tree.sizes(Component::Full).unlocked, self.entries.iter().filter(free).count());
    }

    fn holds(&self) -> impl Iterator<Item = &Held> {
        self.locks
            .iter()
            .map(|(held, _)| held)
            .chain(self.transfers.iter().filter_map(|transfer| transfer.device.as_ref()))
    }

    /// Whether somebody holds the full pages of this prefix on the device.
    pub fn is_held(&self, key: &Key) -> bool {
        self.holds().any(|held| held.key.0 == key.0 && held.key.1.starts_with(&key.1))
    }

    fn holds_component(&self, component: Component, key: &Key) -> bool {
        let pages = self.pages(&key.1) as u32;
        self.holds().filter(|held| held.key.0 == key.0 && held.key.1.starts_with(&key.1)).any(|held| match component {
            Component::Full => true,
            Component::Window => held.window_from.is_some_and(|from| pages > from),
            Component::State => held.state && held.key == *key,
        })
    }

    /// Carries out frees; what left must have been allowed to.
    pub fn apply(&mut self, actions: Actions) {
        for action in actions.0 {
            match action {
                Action::FreeDevice { component, slots } => {
                    slots.into_iter().for_each(|slot| self.free(true, component, slot, false));
                }
                Action::FreeHost { component, slots } => {
                    slots.into_iter().for_each(|slot| self.free(false, component, slot, false));
                }
                Action::Backup { .. }
                | Action::CapStates { .. }
                | Action::LeftDevice { .. }
                | Action::Dropped { .. }
                | Action::LeftHost { .. } => {}
            }
        }
        self.forget_empty();
    }

    /// `failed`: the slot was being filled, and that failed; it may leave although it is held.
    pub fn free(&mut self, device: bool, component: Component, slot: u32, failed: bool) {
        let key = self.owners.remove(&(device, component, slot)).expect("a slot was freed that nobody has");
        if device && !failed {
            assert!(!self.holds_component(component, &key), "held {component:?} of {key:?} left");
        }
        if !device && !failed {
            let only_here = !self.entries[&key].on_device(component);
            assert!(
                !only_here || !self.holds_component(component, &key),
                "held {component:?} of {key:?} left the host"
            );
            let reading = self.transfers.iter().filter_map(|transfer| transfer.host.as_ref());
            for (end, from) in reading {
                let inside = end.0 == key.0 && end.1.starts_with(&key.1) && self.pages(&key.1) as u32 > *from;
                assert!(!inside, "a transfer reads {component:?} of {key:?} on the host");
            }
        }
        let entry = self.entries.get_mut(&key).unwrap();
        let (place, mark) = match device {
            true => (&mut entry.device, &mut entry.loading),
            false => (&mut entry.host, &mut entry.backing),
        };
        assert_eq!(place[component as usize].take(), Some(slot));
        mark[component as usize] = false;
    }

    pub fn forget_empty(&mut self) {
        self.entries.retain(|_, entry| entry.device[0].is_some() || entry.host[0].is_some());
        for (key, entry) in &self.entries {
            let pages = self.pages(&key.1);
            if pages > 1 {
                let parent = self.entries.get(&self.key(key.0, &key.1, pages - 1)).expect("a page lost its prefix");
                assert!(!entry.on_device(Component::Full) || parent.on_device(Component::Full));
            }
        }
    }

    /// Ends everything and empties the tree.
    fn wind_up(&mut self) {
        while !self.transfers.is_empty() {
            self.finish_transfer();
        }
        while !self.locks.is_empty() {
            self.unlock();
        }
        for component in Component::ALL {
            let sizes = self.tree.sizes(component);
            assert_eq!(sizes.unlocked, sizes.device, "something of {component:?} is still locked");
        }
        while self.evict_device(Component::Full) {}
        while self.evict_host(Component::Full) {}
        assert!(self.entries.is_empty() && self.owners.is_empty() && self.tree.node_count() == 0);
        self.tree.check_integrity().unwrap();
        for name in self.names.clone() {
            assert!(self.tree.find_root(&name).is_none(), "a namespace was left");
        }
    }

    fn step(&mut self) {
        match self.random.below(22) {
            0..=4 => self.insert(),
            5 => self.insert_host(),
            6 | 7 => self.lock(),
            8 => self.unlock(),
            9 => self.release_parts(),
            10..=12 => self.begin_transfer(),
            13..=15 => self.finish_transfer(),
            16 | 17 => {
                let component = Component::ALL[self.random.below(3)];
                self.evict_device(component);
            }
            18 => {
                let component = Component::ALL[self.random.below(3)];
                self.evict_host(component);
            }
            19 => self.merge(),
            20 => self.cap_or_forget(),
            _ => self.touch(),
        }
    }
}

fn configs(seed: u64) -> TreeConfig {
    let pick = |divisor: u64, count: usize| (seed / divisor) as usize % count;
    let window = [None, Some(3), Some(4), Some(5)][pick(1, 4)];
    let below = [Below::Host, Below::Host, Below::Stores, Below::Nothing][pick(5, 4)];
    let states = (pick(2, 2) == 1)
        .then(|| StateConfig { grid: PAGE * (1 + pick(3, 2)), per_path: [None, Some(1), Some(2)][pick(7, 3)] });
    TreeConfig {
        page_size: PAGE,
        units: if states.is_none() && pick(3, 3) == 0 { Units::Bigrams } else { Units::Tokens },
        policy: Policy::ALL[pick(1, 5)],
        window,
        states,
        below,
        backup: [BackupRule::OnEviction, BackupRule::AfterHits(1), BackupRule::AfterHits(2)][pick(3, 3)],
        write_back: below == Below::Host && pick(11, 2) == 0,
    }
}

#[test]
fn soak_t26_random_operations_agree_with_a_slow_tree() {
    let rounds = std::env::var("KVDOCK_SOAK").ok().and_then(|length| length.parse().ok()).unwrap_or(1u64);
    for seed in 0..360 * rounds {
        let config = configs(seed);
        let mut model = Model::new(config, seed);
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..400 {
                model.step();
                model.tree.check_integrity().unwrap_or_else(|problem| panic!("{problem}"));
                model.compare();
            }
            model.wind_up();
        }));
        if let Err(panic) = run {
            eprintln!("seed {seed}: {config:?}");
            std::panic::resume_unwind(panic);
        }
    }
}
