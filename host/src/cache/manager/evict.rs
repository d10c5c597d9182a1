//! Making room on device and host.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::CacheManager;
use crate::cache::controller::copy_out;
use crate::cache::pool::{DevicePages, HostPool, PageFault};
use crate::cache::types::{CacheError, Flushed, Tiers};
use crate::cache::unified::{Action, Actions, Component, NO_SLOT, PerComponent, Room, Side, Step, Tree};

impl CacheManager {
    /// Device pages for new tokens; cached pages that nobody locks make room. None if there are not
    /// enough; then none were taken. The caller owns them until it commits, frees or finishes.
    pub fn alloc_pages(&mut self, count: usize) -> Option<Vec<u32>> {
        self.alloc(Component::Full, count)
    }

    /// As `alloc_pages`, of windows. None as well for a model that has none.
    pub fn alloc_windows(&mut self, count: usize) -> Option<Vec<u32>> {
        self.alloc(Component::Window, count)
    }

    fn alloc(&mut self, component: Component, count: usize) -> Option<Vec<u32>> {
        if self.device_pool(component)?.free_count() < count {
            self.take_events();
            self.make_room(Side::Device, component, count);
        }
        self.take(Side::Device, component, count)
    }

    /// Gives back pages of `alloc_pages` that were not committed.
    pub fn free_pages(&mut self, pages: &[u32]) {
        self.free_own(Component::Full, pages);
    }

    /// Gives back pages of `alloc_windows` that were not committed; [`NO_SLOT`] stands for none.
    pub fn free_windows(&mut self, pages: &[u32]) {
        self.free_own(Component::Window, pages);
    }

    fn free_own(&mut self, component: Component, pages: &[u32]) {
        for &page in pages.iter().filter(|&&page| page != NO_SLOT) {
            if self.device_pool_mut(component).is_none_or(|pool| pool.free_callers(page).is_err()) {
                self.misuse(&CacheError::ForeignPage { request: 0, page });
            }
        }
    }

    /// Device pages that `alloc_pages` could deliver now: free ones and cached ones that nobody locks.
    pub fn available_pages(&self) -> usize {
        self.device.free_count() + self.tree.sizes(Component::Full).unlocked
    }

    /// As `available_pages`, of windows; none for a model that has none.
    pub fn available_windows(&self) -> Option<usize> {
        Some(self.windows.as_ref()?.free_count() + self.tree.sizes(Component::Window).unlocked)
    }

    /// Pages of windows that going on from a page's end needs.
    pub fn window_pages(&self) -> usize {
        self.windows.as_ref().map_or(0, |_| self.tree.config().window_pages() as usize)
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
                Action::FreeDevice { component, slots } => self.free_device(component, &slots),
                Action::FreeHost { component, slots } => self.release_slots(component, &slots),
                _ => {}
            }
        }
    }

    /// The device pool of a component.
    pub(super) fn device_pool(&self, component: Component) -> Option<&DevicePages> {
        match component {
            Component::Full => Some(&self.device),
            Component::Window => self.windows.as_ref(),
            Component::State => self.states.as_ref(),
        }
    }

    fn device_pool_mut(&mut self, component: Component) -> Option<&mut DevicePages> {
        match component {
            Component::Full => Some(&mut self.device),
            Component::Window => self.windows.as_mut(),
            Component::State => self.states.as_mut(),
        }
    }

    /// Frees slots that calls of backends have given back.
    pub(super) fn sweep(&mut self) {
        for component in Component::ALL {
            if let Some(pool) = self.device_pool_mut(component) {
                pool.sweep();
            }
        }
    }

    /// Changes the owner of device slots, one by one.
    fn change_owner(
        &mut self,
        component: Component,
        slots: &[u32],
        change: impl Fn(&mut DevicePages, u32) -> Result<(), PageFault>,
    ) {
        for &slot in slots {
            if let Some(Err(fault)) = self.device_pool_mut(component).map(|pool| change(pool, slot)) {
                self.count(|counters| &counters.misuses, 1);
                tracing::error!(%fault, component = component.as_str(), "a device slot changes hands in error");
            }
        }
    }

    /// Frees device slots that were the tree's.
    fn free_device(&mut self, component: Component, slots: &[u32]) {
        self.change_owner(component, slots, DevicePages::free_trees);
    }

    /// Hands slots of a caller to the tree.
    pub(super) fn give_to_tree(&mut self, component: Component, slots: &[u32]) {
        self.change_owner(component, slots, DevicePages::give_to_tree);
    }

    /// The host pool of a component.
    pub(super) fn host_pool(&self, component: Component) -> Option<&HostPool> {
        self.lower.as_ref().and_then(|lower| lower.shared.host_of(component))
    }

    /// Takes a holder from each of these host slots.
    pub(super) fn release_slots(&self, component: Component, slots: &[u32]) {
        if let Some(host) = self.host_pool(component).filter(|_| !slots.is_empty()) {
            host.release(slots);
        }
    }

    /// Does what the tree has decided. `session` is whose pages they are, `from` the page before which nothing is copied to the host.
    pub(super) fn carry_out_for(&mut self, actions: Actions, session: Option<&std::sync::Arc<str>>, from: u32) {
        for action in actions.0 {
            match action {
                Action::FreeDevice { component, slots } => self.free_device(component, &slots),
                Action::FreeHost { component, slots } => self.release_slots(component, &slots),
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
        match side {
            Side::Device => self.device_pool(component).map(DevicePages::free_count),
            Side::Host => self.host_pool(component).map(HostPool::free_count),
        }
    }

    fn take(&mut self, side: Side, component: Component, count: usize) -> Option<Vec<u32>> {
        match side {
            Side::Device => self.device_pool_mut(component)?.alloc(count),
            Side::Host => self.host_pool(component)?.alloc(count),
        }
    }

    fn give_back(&mut self, side: Side, component: Component, slots: &[u32]) {
        match side {
            Side::Device => self.change_owner(component, slots, DevicePages::free_callers),
            Side::Host => self.release_slots(component, slots),
        }
    }

    fn copy_down(&mut self, component: Component, device: &[u32], host: &[u32]) -> bool {
        let began = Instant::now();
        let Some((memory, pool)) = self.lower.as_ref().and_then(|lower| lower.shared.pools(component)) else {
            return false;
        };
        let pages: Vec<(u32, u32)> = device.iter().copied().zip(host.iter().copied()).collect();
        // SAFETY: the host pages were just taken and are nobody else's; the device pages are complete and
        // belong to the tree, which is not changed meanwhile.
        let ok = unsafe { copy_out(memory, &pages, pool) };
        if ok && component == Component::Full {
            self.count_host_backup(device.len(), began.elapsed());
        }
        ok
    }

    fn carry_out(&mut self, actions: Actions) {
        self.carry_out_for(actions, None, 0);
    }

    /// On the device a little more than asked for leaves, so that decoding does not evict page by page.
    fn least(&self, side: Side, component: Component) -> usize {
        match (side, component) {
            (Side::Device, Component::Full | Component::Window) => {
                self.device_pool(component).map_or(1, |pool| pool.capacity() / 64)
            }
            _ => 1,
        }
    }

    fn made_room(&mut self, side: Side, component: Component, slots: usize, took: Duration) {
        if (side, component) == (Side::Device, Component::Full) {
            let tokens = (slots * self.page_size) as u64;
            self.counters.evicted_device_tokens.fetch_add(tokens, Ordering::Relaxed);
            self.listener.evicted(tokens, took);
        }
    }

    fn no_host_room(&mut self, needs: &PerComponent<usize>) {
        self.count(|counters| &counters.dropped_host_pressure_tokens, needs[Component::Full] * self.page_size);
    }
}
