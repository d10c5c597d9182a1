//! Making room on device and host.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::CacheManager;
use crate::cache::controller::copy_out;
use crate::cache::tree::{NodeId, Removed};
use crate::cache::types::{CacheError, Flushed, Tiers};

impl CacheManager {
    /// Device pages for new tokens; cached pages that nobody locks make room. None if there are not
    /// enough; then none were taken. The caller owns them until it commits, frees or finishes.
    pub fn alloc_pages(&mut self, count: usize) -> Option<Vec<u32>> {
        if self.device.free_count() < count {
            self.take_events();
            self.make_device_room(count);
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
        let (_, unlocked, _) = self.tree.totals();
        self.device.free_count() + unlocked
    }

    /// Empties tiers of what nobody locks.
    pub fn flush(&mut self, tiers: Tiers) -> Flushed {
        self.take_events();
        let device_free = self.device.free_count();
        let host_free = self.host().map_or(0, |host| host.free_count());
        if tiers.device {
            let mut kept = Vec::new();
            while let Some(node) = self.tree.device_victim() {
                match self.tree.evict_device(node) {
                    Some(removed) => self.free(removed),
                    None => kept.push(node),
                }
            }
            kept.into_iter().for_each(|node| self.tree.refresh(node));
        }
        if tiers.host {
            while let Some(node) = self.tree.host_victim() {
                let removed = self.tree.evict_host(node);
                self.free(removed);
            }
        }
        let (device_kept, _, _) = self.tree.totals();
        let flushed = Flushed {
            device_freed: self.device.free_count() - device_free,
            device_kept,
            host_freed: self.host().map_or(0, |host| host.free_count().saturating_sub(host_free)),
            host_kept: self.host().map_or(0, |host| host.capacity() - host.free_count()),
        };
        self.update_gauges();
        flushed
    }

    /// Evicts from the device until `count` pages are free, or nothing more may leave.
    pub(super) fn make_device_room(&mut self, count: usize) {
        if self.available_pages() < count {
            return;
        }
        let began = Instant::now();
        let before = self.device.free_count();
        // A little more than asked for, so that decoding does not evict page by page.
        let step = self.device.capacity() / 64;
        let mut kept = Vec::new();
        while self.device.free_count() < count {
            let Some(node) = self.tree.device_victim() else { break };
            let wanted = (count - self.device.free_count()).max(step);
            let length = self.tree.len(node);
            if length > wanted {
                // The tail alone leaves; the node keeps its id.
                self.tree.split(node, length - wanted);
            }
            if !self.evict_from_device(node) {
                kept.push(node);
            }
        }
        kept.into_iter().for_each(|node| self.tree.refresh(node));
        let tokens = ((self.device.free_count() - before) * self.page_size) as u64;
        self.counters.evicted_device_tokens.fetch_add(tokens, Ordering::Relaxed);
        self.listener.evicted(tokens, began.elapsed());
    }

    fn evict_from_device(&mut self, node: NodeId) -> bool {
        if self.writes_back() && !self.tree.node(node).host_ready() {
            self.write_back(node);
        }
        let backed = self.tree.node(node).host_ready();
        let Some(removed) = self.tree.evict_device(node) else { return false };
        if backed {
            self.want_stored(node);
        } else {
            self.count(|counters| &counters.dropped_unbacked_tokens, removed.device.len() * self.page_size);
        }
        self.free(removed);
        true
    }

    /// Copies a node that has to leave the device to the host, at once.
    fn write_back(&mut self, node: NodeId) {
        let began = Instant::now();
        let Some(pages) = self.alloc_host(self.tree.len(node)) else {
            self.count(|counters| &counters.dropped_host_pressure_tokens, self.tree.len(node) * self.page_size);
            return;
        };
        let Some(lower) = &self.lower else { return };
        let mut ok = true;
        for (&from, &to) in self.tree.node(node).device.iter().zip(&pages) {
            // SAFETY: the host page was just taken and is nobody else's; the device page is complete and
            // belongs to the tree, which is not changed meanwhile.
            ok &= unsafe { copy_out(&*self.pool, from, &lower.shared.host, to) };
        }
        if !ok {
            lower.shared.host.release(&pages);
            return;
        }
        let count = pages.len();
        self.tree.set_host_backing(node, pages);
        let start = self.tree.node(node).start;
        self.tree.update_since(node, start, |node| node.backing = false);
        self.count_host_backup(count, began.elapsed());
    }

    /// Evicts from the host until `count` pages are free, or nothing more may leave.
    pub(super) fn make_host_room(&mut self, count: usize) {
        let Some(lower) = &self.lower else { return };
        let shared = std::sync::Arc::clone(&lower.shared);
        if count > shared.host.capacity() {
            return;
        }
        while shared.host.free_count() < count {
            let Some(node) = self.tree.host_victim() else { break };
            let wanted = count - shared.host.free_count();
            let length = self.tree.len(node);
            if length > wanted && !self.tree.node(node).on_device() {
                self.tree.split(node, length - wanted);
            }
            let awaited = self.is_awaited(node);
            let removed = self.tree.evict_host(node);
            let tokens = removed.host.len() * self.page_size;
            self.count(|counters| &counters.evicted_host_tokens, tokens);
            if awaited {
                self.count(|counters| &counters.backup_dropped_tokens, tokens);
            }
            self.free(removed);
        }
    }

    /// Host pages, with eviction if need be.
    pub(super) fn alloc_host(&mut self, count: usize) -> Option<Vec<u32>> {
        if let Some(pages) = self.host()?.alloc(count) {
            return Some(pages);
        }
        self.make_host_room(count);
        self.host()?.alloc(count)
    }

    /// Frees what left the tree.
    pub(super) fn free(&mut self, removed: Removed) {
        for page in removed.device {
            if let Err(fault) = self.device.free_trees(page) {
                self.count(|counters| &counters.misuses, 1);
                tracing::error!(%fault, "device page freed in error");
            }
        }
        self.release_host(&removed.host);
    }
}
