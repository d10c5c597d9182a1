//! Making room on device and host.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::CacheManager;
use crate::cache::controller::copy_out;
use crate::cache::types::{CacheError, Flushed, Tiers};
use crate::cache::unified::{Action, Actions, Component, PerComponent, Room, Side, Step, Tree};

impl CacheManager {
    /// Device pages for new tokens; cached pages that nobody locks make room. None if there are not
    /// enough; then none were taken. The caller owns them until it commits, frees or finishes.
    pub fn alloc_pages(&mut self, count: usize) -> Option<Vec<u32>> {
        if self.device.free_count() < count {
            self.take_events();
            self.make_room(Side::Device, Component::Full, count);
        }
        self.device.alloc(count)
    }

    /// Gives back pages of `alloc_pages` that were not committed.
    pub fn free_pages(&mut self, pages: &[u32]) {
        for &page in pages {
            if self.device.free_callers(page).is_err() {
                self.misuse(&CacheError::ForeignPage { request: 0, page });
            }
        }
    }

    /// Device pages that `alloc_pages` could deliver now: free ones and cached ones that nobody locks.
    pub fn available_pages(&self) -> usize {
        self.device.free_count() + self.tree.sizes(Component::Full).unlocked
    }

    /// Empties tiers of what nobody locks.
    pub fn flush(&mut self, tiers: Tiers) -> Flushed {
        self.take_events();
        let device_free = self.device.free_count();
        let host_free = self.host().map_or(0, |host| host.free_count());
        if tiers.device {
            while let Step::Freed(actions) = self.tree.evict_without_copy(Component::Full, usize::MAX) {
                self.free_slots_of(actions);
            }
        }
        if tiers.host {
            while let Step::Freed(actions) = self.tree.evict_host(Component::Full, usize::MAX) {
                self.free_slots_of(actions);
            }
        }
        let flushed = Flushed {
            device_freed: self.device.free_count() - device_free,
            device_kept: self.tree.sizes(Component::Full).device,
            host_freed: self.host().map_or(0, |host| host.free_count().saturating_sub(host_free)),
            host_kept: self.host().map_or(0, |host| host.capacity() - host.free_count()),
        };
        self.update_gauges();
        flushed
    }

    /// Frees what these actions free, and does nothing else about them.
    fn free_slots_of(&mut self, actions: Actions) {
        for action in actions.0 {
            match action {
                Action::FreeDevice { slots, .. } => self.free_device(&slots),
                Action::FreeHost { slots, .. } => self.release_host(&slots),
                _ => {}
            }
        }
    }

    /// Frees device pages that were the tree's.
    pub(super) fn free_device(&mut self, pages: &[u32]) {
        for &page in pages {
            if let Err(fault) = self.device.free_trees(page) {
                self.count(|counters| &counters.misuses, 1);
                tracing::error!(%fault, "device page freed in error");
            }
        }
    }

    /// Hands pages of a caller to the tree.
    pub(super) fn give_to_tree(&mut self, pages: &[u32]) {
        for &page in pages {
            if let Err(fault) = self.device.give_to_tree(page) {
                self.count(|counters| &counters.misuses, 1);
                tracing::error!(%fault, "the tree was given a page that was not the caller's");
            }
        }
    }

    /// Does what the tree has decided. `session` is whose pages they are, `from` the page before which nothing is copied to the host.
    pub(super) fn carry_out_for(&mut self, actions: Actions, session: Option<&std::sync::Arc<str>>, from: u32) {
        for action in actions.0 {
            match action {
                Action::FreeDevice { slots, .. } => self.free_device(&slots),
                Action::FreeHost { slots, .. } => self.release_host(&slots),
                Action::Backup { nodes } => self.back_up_nodes(nodes, from, session),
                Action::LeftDevice { node } => self.want_stored(node),
                Action::Dropped { pages } => {
                    self.count(|counters| &counters.dropped_unbacked_tokens, pages * self.page_size);
                }
                Action::LeftHost { node } => self.left_host(&node),
                Action::CapStates { tail } => {
                    let capped = self.tree.cap_states(tail);
                    self.sound(capped).into_iter().for_each(|actions| self.free_slots_of(actions));
                }
            }
        }
    }
}

impl Room for CacheManager {
    fn tree(&mut self) -> &mut Tree {
        &mut self.tree
    }

    fn free_slots(&self, side: Side, component: Component) -> Option<usize> {
        match (side, component) {
            (Side::Device, Component::Full) => Some(self.device.free_count()),
            (Side::Host, Component::Full) => self.host().map(|host| host.free_count()),
            _ => None,
        }
    }

    fn take(&mut self, side: Side, component: Component, count: usize) -> Option<Vec<u32>> {
        match (side, component) {
            (Side::Device, Component::Full) => self.device.alloc(count),
            (Side::Host, Component::Full) => self.host()?.alloc(count),
            _ => None,
        }
    }

    fn give_back(&mut self, side: Side, _: Component, slots: &[u32]) {
        match side {
            Side::Device => self.free_pages(slots),
            Side::Host => self.release_host(slots),
        }
    }

    fn copy_down(&mut self, _: Component, device: &[u32], host: &[u32]) -> bool {
        let began = Instant::now();
        let Some(pool) = self.host() else { return false };
        let ok = device.iter().zip(host).all(|(&from, &to)| {
            // SAFETY: the host page was just taken and is nobody else's; the device page is complete and
            // belongs to the tree, which is not changed meanwhile.
            unsafe { copy_out(&*self.pool, from, pool, to) }
        });
        if ok {
            self.count_host_backup(device.len(), began.elapsed());
        }
        ok
    }

    fn carry_out(&mut self, actions: Actions) {
        self.carry_out_for(actions, None, 0);
    }

    /// On the device a little more than asked for leaves, so that decoding does not evict page by page.
    fn least(&self, side: Side, _: Component) -> usize {
        match side {
            Side::Device => self.device.capacity() / 64,
            Side::Host => 1,
        }
    }

    fn made_room(&mut self, side: Side, _: Component, slots: usize, took: Duration) {
        if side == Side::Device {
            let tokens = (slots * self.page_size) as u64;
            self.counters.evicted_device_tokens.fetch_add(tokens, Ordering::Relaxed);
            self.listener.evicted(tokens, took);
        }
    }

    fn no_host_room(&mut self, needs: &PerComponent<usize>) {
        self.count(|counters| &counters.dropped_host_pressure_tokens, needs[Component::Full] * self.page_size);
    }
}
