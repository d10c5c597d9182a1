//! Checking tree, pools and locks against each other.

use std::collections::HashMap;

use super::CacheManager;
use super::grant::Phase;
use crate::cache::tree::{NONE, NodeId};

impl CacheManager {
    /// Checks tree, pools and locks against each other: among others, that each page has exactly the owners
    /// it should have. For tests; takes time in proportion to the cache.
    pub fn check_integrity(&mut self) -> Result<(), String> {
        self.take_events();
        self.tree.check()?;
        let device = self.tree.ids().flat_map(|id| self.tree.node(id).device.iter().copied());
        self.device.check(device)?;
        self.check_locks()?;
        self.check_host()?;
        let storing = self.writes.held.values().fold(0, |bits, held| bits | held.bit);
        if let Some(id) = self.tree.ids().find(|&id| self.tree.node(id).storing & !storing != 0) {
            return Err(format!("node {id} is marked as being stored by a job that does not run"));
        }
        let spans: usize = self.fetches.values().map(|active| active.fetch.span).sum();
        if spans != self.fetch_pages {
            return Err(format!("{spans} pages in running fetches, counted {}", self.fetch_pages));
        }
        Ok(())
    }

    fn check_locks(&self) -> Result<(), String> {
        let mut expected: HashMap<NodeId, u32> = HashMap::new();
        let holders = self
            .requests
            .values()
            .filter_map(|request| match request.phase {
                Phase::Queued { .. } => None,
                Phase::Loading(draft) => Some(draft.node),
                Phase::Granted { node, .. } => Some(node),
            })
            .chain(self.loads.values().map(|load| load.lock))
            .chain(self.writes.backups.keys().map(|node| node.id));
        for holder in holders {
            let mut at = holder;
            while at != NONE {
                *expected.entry(at).or_default() += 1;
                at = self.tree.node(at).parent;
            }
        }
        for id in self.tree.ids() {
            let (locks, held) = (self.tree.node(id).locks, expected.get(&id).copied().unwrap_or(0));
            if locks != held {
                return Err(format!("node {id} has {locks} locks and {held} holders"));
            }
        }
        for request in self.requests.values() {
            if let Phase::Granted { node, committed } = request.phase {
                let end = self.tree.node(node).start as usize + self.tree.len(node);
                if end != committed {
                    return Err(format!("a request committed {committed} pages and holds {end}"));
                }
            }
        }
        Ok(())
    }

    fn check_host(&self) -> Result<(), String> {
        let Some(lower) = &self.lower else {
            return match self.tree.totals() {
                (_, _, 0) => Ok(()),
                (_, _, pages) => Err(format!("{pages} host pages without a host pool")),
            };
        };
        // Workers take and give pages while this looks; what they hold is read under their lock first.
        let states: Vec<_> = self.fetches.values().map(|active| active.fetch.state.lock()).collect();
        let mut expected = vec![0u32; lower.shared.host.capacity()];
        let tree = self.tree.ids().flat_map(|id| self.tree.node(id).host.iter().copied());
        let fetched = states.iter().flat_map(|state| state.pages.iter().flatten().copied());
        let stores = self.writes.held.values().flat_map(|held| held.pages.iter().copied());
        for page in tree.chain(fetched).chain(stores).chain(lower.shared.registry.held()) {
            match expected.get_mut(page as usize) {
                Some(holders) => *holders += 1,
                None => return Err(format!("host page {page} is outside the pool")),
            }
        }
        lower.shared.host.with_pages(|pages| {
            pages.check()?;
            for (page, &expected) in expected.iter().enumerate() {
                let found = pages.holders(page as u32);
                if found != expected {
                    return Err(format!("host page {page} has {found} holders, expected {expected}"));
                }
            }
            Ok(())
        })?;
        drop(states);
        Ok(())
    }
}
