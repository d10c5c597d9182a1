//! Checking tree, pools and locks against each other.

use std::collections::HashMap;

use super::CacheManager;
use super::grant::Phase;
use crate::cache::unified::{Component, NodeId, Side};

impl CacheManager {
    /// Checks tree, pools and locks against each other: among others, that each page has exactly the owners
    /// it should have. For tests; takes time in proportion to the cache.
    pub fn check_integrity(&mut self) -> Result<(), String> {
        self.take_events();
        self.tree.check_integrity()?;
        for component in Component::ALL {
            if let Some(pool) = self.device_pool(component) {
                let slots = self.all_slots(Side::Device, component);
                pool.check(slots.into_iter()).map_err(|error| format!("{}: {error}", component.as_str()))?;
            }
        }
        self.check_locks()?;
        self.check_host()?;
        let storing = self.writes.held.values().fold(0, |bits, held| bits | held.bit);
        if let Some(node) =
            self.tree.nodes().find(|&node| self.tree.info(node).is_ok_and(|i| i.writing & !storing != 0))
        {
            return Err(format!("{node:?} is marked as being stored by a job that does not run"));
        }
        let spans: usize = self.fetches.values().map(|active| active.fetch.span).sum();
        if spans != self.fetch_pages {
            return Err(format!("{spans} pages in running fetches, counted {}", self.fetch_pages));
        }
        Ok(())
    }

    fn slots(&self, side: Side, component: Component, node: NodeId) -> Vec<u32> {
        let slots = match side {
            Side::Device => self.tree.device_slots(component, node),
            Side::Host => self.tree.host_slots(component, node),
        };
        slots.unwrap_or_default().to_vec()
    }

    fn all_slots(&self, side: Side, component: Component) -> Vec<u32> {
        self.tree.nodes().flat_map(|node| self.slots(side, component, node)).collect()
    }

    fn check_locks(&self) -> Result<(), String> {
        let mut locks: HashMap<NodeId, u32> = HashMap::new();
        let mut readers: HashMap<NodeId, u32> = HashMap::new();
        let gone = |error| format!("a node that is held is gone: {error}");
        let holders = self
            .requests
            .values()
            .filter_map(|request| match &request.phase {
                Phase::Queued { .. } => None,
                Phase::Loading(draft) => Some(draft.lock.node()),
                Phase::Granted { lock, .. } => Some(lock.node()),
            })
            .chain(self.requests.values().filter_map(|request| request.linked.lent_node()))
            .chain(self.loads.values().map(|load| load.ticket.node()))
            .chain(self.writes.backups.values().map(|copying| copying.ticket.node()));
        for holder in holders {
            for node in self.tree.path(holder).map_err(gone)? {
                *locks.entry(node).or_default() += 1;
            }
        }
        let loads = self.loads.values().map(|load| (load.ticket.node(), load.ticket.start()));
        let stores = self.writes.held.values().flat_map(|held| &held.tickets).map(|t| (t.node(), t.start()));
        // In linker mode stores read the device, and lock the way to what they read.
        let (on_device, on_host): (Vec<_>, Vec<_>) = stores.partition(|_| self.config.linked);
        for (tail, _) in on_device {
            for node in self.tree.path(tail).map_err(gone)? {
                *locks.entry(node).or_default() += 1;
            }
        }
        for (tail, start) in loads.chain(on_host) {
            for node in self.tree.parts(tail, start).map_err(gone)? {
                *readers.entry(node).or_default() += 1;
            }
        }
        for node in self.tree.nodes() {
            let found = self.tree.holders(Component::Full, node).map_err(gone)?;
            let count = |of: &HashMap<NodeId, u32>| of.get(&node).copied().unwrap_or(0);
            let expected = (count(&locks), count(&readers));
            if found != expected {
                return Err(format!("{node:?} has {found:?} locks and readers, and {expected:?} who hold it"));
            }
        }
        for request in self.requests.values() {
            if let Phase::Granted { lock, committed } = &request.phase {
                let end = self.tree.end(lock.node()).map_err(gone)? as usize;
                if end != *committed {
                    return Err(format!("a request committed {committed} pages and holds {end}"));
                }
            }
        }
        Ok(())
    }

    fn check_host(&self) -> Result<(), String> {
        let Some(lower) = &self.lower else {
            return match self.tree.sizes(Component::Full).host {
                0 => Ok(()),
                pages => Err(format!("{pages} host pages without a host pool")),
            };
        };
        // Workers take and give pages while this looks; what they hold is read under their lock first.
        let states: Vec<_> = self.fetches.values().map(|active| active.fetch.state.lock()).collect();
        for (component, host) in lower.shared.hosts() {
            let mut expected = vec![0u32; host.capacity()];
            let tree = self.all_slots(Side::Host, component).into_iter();
            let fetched = states.iter().flat_map(|state| state.lanes[component].pages.iter().flatten().copied());
            let stores = self.writes.held.values().flat_map(|held| held.pages[component].iter().copied());
            let arriving = self.arrivals.values().flat_map(|run| run.span.transit[component].iter().copied());
            let held = lower.shared.registry.held(component);
            for page in tree.chain(fetched).chain(stores).chain(arriving).chain(held) {
                match expected.get_mut(page as usize) {
                    Some(holders) => *holders += 1,
                    None => return Err(format!("{} host page {page} is outside the pool", component.as_str())),
                }
            }
            host.with_pages(|pages| {
                pages.check()?;
                for (page, &expected) in expected.iter().enumerate() {
                    let found = pages.holders(page as u32);
                    if found != expected {
                        let name = component.as_str();
                        return Err(format!("{name} host page {page} has {found} holders, expected {expected}"));
                    }
                }
                Ok(())
            })?;
        }
        drop(states);
        Ok(())
    }
}
