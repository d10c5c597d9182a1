//! The tree against a slow model that is obviously right: a map from each prefix to its pages.
//!
//! `KVDOCK_SOAK` multiplies the length.

use std::collections::{BTreeMap, HashMap};

use super::*;

const PAGE: usize = 2;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Tiers {
    device: Option<u32>,
    host: Option<u32>,
}

/// One entry a page: its namespace and all tokens up to its end.
type Key = (usize, Vec<u32>);

struct Model {
    tree: Tree,
    names: Vec<CacheNamespace>,
    pages: BTreeMap<Key, Tiers>,
    /// Which prefix owns a device or host page.
    device_owner: HashMap<u32, Key>,
    host_owner: HashMap<u32, Key>,
    locks: Vec<(Key, NodeId)>,
    next: u32,
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % bound
    }

    fn sequence(&mut self) -> Vec<u32> {
        let pages = 1 + self.below(7);
        (0..pages)
            .flat_map(|_| {
                let branch = if self.below(3) == 0 { self.below(3) } else { 0 };
                [branch as u32, 7]
            })
            .collect()
    }
}

impl Model {
    fn new(policy: EvictionPolicy) -> Self {
        Model {
            tree: Tree::new(PAGE, policy),
            names: vec![CacheNamespace::default(), CacheNamespace::new(None, Some("salt".to_owned()))],
            pages: BTreeMap::new(),
            device_owner: HashMap::new(),
            host_owner: HashMap::new(),
            locks: Vec::new(),
            next: 0,
        }
    }

    fn fresh(&mut self, count: usize) -> Vec<u32> {
        self.next += count as u32;
        (self.next - count as u32..self.next).collect()
    }

    fn known(&self, name: usize, tokens: &[u32]) -> (usize, usize) {
        let ends = (1..=tokens.len() / PAGE).map(|n| (name, tokens[..n * PAGE].to_vec()));
        let found: Vec<Tiers> = ends.map_while(|key| self.pages.get(&key).copied()).collect();
        (found.len(), found.iter().take_while(|tiers| tiers.device.is_some()).count())
    }

    fn set_device(&mut self, key: Key, page: u32) {
        self.pages.entry(key.clone()).or_default().device = Some(page);
        assert!(self.device_owner.insert(page, key).is_none());
    }

    fn insert(&mut self, random: &mut Random) {
        let (name, tokens) = (random.below(2), random.sequence());
        let count = tokens.len() / PAGE;
        let root = self.tree.root(&self.names[name].clone());
        let given = self.fresh(count);
        let mut pages = given.clone();
        self.tree.lock(root);
        let result = self.tree.insert_device(root, &tokens, &mut pages);
        self.tree.unlock(root);
        assert_eq!(result.pages, count);
        for (i, (&page, &was)) in pages.iter().zip(&given).enumerate() {
            let key = (name, tokens[..(i + 1) * PAGE].to_vec());
            match self.pages.get(&key).and_then(|tiers| tiers.device) {
                Some(known) => {
                    assert_eq!(page, known);
                    assert!(result.duplicates.contains(&was));
                }
                None => {
                    assert_eq!(page, was);
                    assert!(result.adopted.contains(&was));
                    self.set_device(key, page);
                }
            }
        }
        assert_eq!(result.adopted.len() + result.duplicates.len(), count);
    }

    fn insert_host(&mut self, random: &mut Random) {
        let (name, tokens) = (random.below(2), random.sequence());
        let count = tokens.len() / PAGE;
        let start = random.below(count);
        let keys = crate::cache::hash::chain_keys(self.names[name].seed(), &tokens, PAGE);
        let root = self.tree.root(&self.names[name].clone());
        let pages = self.fresh(count - start);
        let (known, _) = self.known(name, &tokens);
        let result =
            self.tree.insert_host(root, &tokens, start, &keys[start..], pages.clone(), StorageMarks::default());
        self.tree.retire_root(root);
        assert_eq!(result.orphaned, known < start);
        let taken = if known < start { 0 } else { count - known };
        let adopted = result.node.map_or(0, |node| self.tree.len(node));
        assert_eq!((adopted, result.rejected.len()), (taken, count - start - taken));
        for i in count - taken..count {
            let key = (name, tokens[..(i + 1) * PAGE].to_vec());
            let page = pages[i - start];
            assert!(self.pages.insert(key.clone(), Tiers { device: None, host: Some(page) }).is_none());
            self.host_owner.insert(page, key);
        }
    }

    fn back_up(&mut self, random: &mut Random) {
        let ids: Vec<NodeId> = self.tree.ids().filter(|&id| self.tree.node(id).host.is_empty()).collect();
        let Some(&id) = ids.get(random.below(ids.len().max(1))) else { return };
        let host = self.fresh(self.tree.len(id));
        let device = self.tree.node(id).device.clone();
        let start = self.tree.node(id).start;
        self.tree.set_host_backing(id, host.clone());
        self.tree.update_since(id, start, |node| node.backing = false);
        for (device, host) in device.into_iter().zip(host) {
            let key = self.device_owner[&device].clone();
            self.pages.get_mut(&key).unwrap().host = Some(host);
            self.host_owner.insert(host, key);
        }
    }

    fn load_back(&mut self, random: &mut Random) {
        let ids: Vec<NodeId> = self
            .tree
            .ids()
            .filter(|&id| {
                let parent = self.tree.node(self.tree.node(id).parent);
                !self.tree.node(id).on_device() && (parent.is_root() || parent.on_device())
            })
            .collect();
        let Some(&id) = ids.get(random.below(ids.len().max(1))) else { return };
        let device = self.fresh(self.tree.len(id));
        let host = self.tree.node(id).host.clone();
        self.tree.set_device(id, device.clone(), false);
        for (device, host) in device.into_iter().zip(host) {
            let key = self.host_owner[&host].clone();
            self.set_device(key, device);
        }
    }

    fn lock(&mut self, random: &mut Random) {
        let (name, tokens) = (random.below(2), random.sequence());
        let Some(root) = self.tree.find_root(&self.names[name]) else { return };
        let found = self.tree.find(root, &tokens);
        let node = self.tree.settle(found);
        self.tree.lock(node);
        self.tree.hit(node);
        self.locks.push(((name, tokens[..found.pages * PAGE].to_vec()), node));
    }

    fn unlock(&mut self, random: &mut Random) {
        if !self.locks.is_empty() {
            let (_, node) = self.locks.swap_remove(random.below(self.locks.len()));
            let name = self.tree.reference(node);
            self.tree.unlock(node);
            if let Some(node) = self.tree.resolve(name) {
                self.tree.merge_up(node);
            }
        }
    }

    fn is_locked(&self, key: &Key) -> bool {
        self.locks.iter().any(|((name, tokens), _)| *name == key.0 && tokens.starts_with(&key.1))
    }

    /// What left must have been allowed to.
    fn take_out(&mut self, removed: Removed) {
        for page in removed.device {
            let key = self.device_owner.remove(&page).unwrap();
            assert!(!self.is_locked(&key), "a locked page left the device");
            self.pages.get_mut(&key).unwrap().device = None;
        }
        for page in removed.host {
            let key = self.host_owner.remove(&page).unwrap();
            self.pages.get_mut(&key).unwrap().host = None;
        }
        let gone: Vec<Key> =
            self.pages.iter().filter(|(_, t)| **t == Tiers::default()).map(|(k, _)| k.clone()).collect();
        for key in gone {
            assert!(!self.is_locked(&key), "a locked page was forgotten");
            self.pages.remove(&key);
        }
        for ((name, tokens), tiers) in &self.pages {
            let Some(above) = tokens.len().checked_sub(PAGE).filter(|&length| length > 0) else { continue };
            let parent = self.pages.get(&(*name, tokens[..above].to_vec()));
            let parent = parent.expect("a page was left without its prefix");
            assert!(tiers.device.is_none() || parent.device.is_some(), "a page was left on the device alone");
        }
    }

    fn evict(&mut self, random: &mut Random) {
        let device = random.below(2) == 0;
        let victim = if device { self.tree.device_victim() } else { self.tree.host_victim() };
        let Some(victim) = victim else { return };
        if self.tree.len(victim) > 1 && random.below(2) == 0 {
            let at = 1 + random.below(self.tree.len(victim) - 1);
            if device || !self.tree.node(victim).on_device() {
                self.tree.split(victim, at);
            }
        }
        if device {
            match self.tree.evict_device(victim) {
                Some(removed) => self.take_out(removed),
                None => self.tree.refresh(victim),
            }
        } else {
            let removed = self.tree.evict_host(victim);
            self.take_out(removed);
        }
    }

    fn compare(&self, random: &mut Random) {
        let (name, tokens) = (random.below(2), random.sequence());
        let found = match self.tree.find_root(&self.names[name]) {
            Some(root) => self.tree.find(root, &tokens),
            None => Match { node: NONE, used: 0, pages: 0, device_pages: 0 },
        };
        assert_eq!((found.pages, found.device_pages), self.known(name, &tokens));
        let device = self.pages.values().filter(|tiers| tiers.device.is_some()).count();
        let host = self.pages.values().filter(|tiers| tiers.host.is_some()).count();
        let unlocked = self.pages.iter().filter(|(key, tiers)| tiers.device.is_some() && !self.is_locked(key)).count();
        assert_eq!(self.tree.totals(), (device, unlocked, host));
    }
}

#[test]
fn random_operations_agree_with_the_model() {
    let rounds = std::env::var("KVDOCK_SOAK").ok().and_then(|length| length.parse().ok()).unwrap_or(1u64);
    for seed in 0..20 * rounds {
        let mut random = Random(seed * 77 + 1);
        let mut model = Model::new([EvictionPolicy::Lru, EvictionPolicy::Lfu][seed as usize % 2]);
        for _ in 0..400 {
            match random.below(10) {
                0..=2 => model.insert(&mut random),
                3 => model.insert_host(&mut random),
                4 => model.back_up(&mut random),
                5 => model.load_back(&mut random),
                6 => model.lock(&mut random),
                7 => model.unlock(&mut random),
                _ => model.evict(&mut random),
            }
            model.tree.check().unwrap_or_else(|problem| panic!("seed {seed}: {problem}"));
            model.compare(&mut random);
        }
        while !model.locks.is_empty() {
            model.unlock(&mut random);
        }
        // Everything can be emptied, whatever happened before.
        while let Some(victim) = model.tree.device_victim() {
            let removed = model.tree.evict_device(victim).unwrap();
            model.take_out(removed);
        }
        while let Some(victim) = model.tree.host_victim() {
            let removed = model.tree.evict_host(victim);
            model.take_out(removed);
        }
        assert!(model.pages.is_empty() && model.tree.node_count() == 0, "seed {seed}");
        model.tree.check().unwrap();
    }
}
