//! Down the tiers: device to host, host to storage.
//!
//! Nothing here blocks and nothing holds a request up. What waits to be stored is a list of nodes, not
//! of pages: when the host pool needs room, a node that waits may be evicted, and its backup is
//! dropped and counted.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::CacheManager;
use crate::cache::config::WritePolicy;
use crate::cache::controller::{BATCH_PAGES, BackupJob, StoreJob, StoreReport, WriteJob};
use crate::cache::tree::{NodeId, NodeRef, Removed, Tree};
use crate::cache::types::Drained;

/// Pause before a page that could not be stored is tried again; doubles with each try.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// How long after a failure a mere use of a page does not queue it for storage again.
const QUIET_AFTER_FAILURE: Duration = Duration::from_secs(5);
/// Uses after which `write_through_selective` backs a page up.
const SELECTIVE_HITS: u32 = 2;

/// A node that is to be stored, and those split off it since it was queued.
#[derive(Debug, Clone)]
struct Wanted {
    node: NodeRef,
    start: u32,
    pages: usize,
    attempt: u32,
    session: Option<Arc<str>>,
}

/// What is on its way down.
#[derive(Debug, Default)]
pub(super) struct Writes {
    /// Running copies to the host, with the first page of their node at the start.
    pub backups: HashMap<NodeRef, u32>,
    pending: VecDeque<Wanted>,
    /// Sum of the pages in `pending`.
    waiting: usize,
    queued: HashSet<NodeRef>,
    retries: Vec<(Instant, Wanted)>,
    /// Pages that running store jobs hold.
    pub held: HashMap<u64, Vec<u32>>,
    pub flushes_running: usize,
    last_failure: Option<Instant>,
    pages_stored: u64,
}

impl Writes {
    /// Pages that wait for storage or are on their way.
    pub fn pending_pages(&self, tree: &Tree) -> usize {
        let retries: usize = self.retries.iter().map(|(_, wanted)| wanted.pages).sum();
        let copying: usize =
            self.backups.keys().filter_map(|&node| tree.resolve(node)).map(|node| tree.len(node)).sum();
        self.waiting + retries + copying + self.held.values().map(Vec::len).sum::<usize>()
    }

    fn push(&mut self, wanted: Wanted) {
        if self.queued.insert(wanted.node) {
            self.waiting += wanted.pages;
            self.pending.push_back(wanted);
        }
    }

    fn pop(&mut self) -> Option<Wanted> {
        let wanted = self.pending.pop_front()?;
        self.queued.remove(&wanted.node);
        self.waiting -= wanted.pages;
        Some(wanted)
    }

    fn idle(&self) -> bool {
        self.backups.is_empty() && self.pending.is_empty() && self.retries.is_empty() && self.held.is_empty()
    }

    fn forget_pending(&mut self) {
        self.pending.clear();
        self.waiting = 0;
        self.queued.clear();
        self.retries.clear();
    }
}

impl CacheManager {
    /// Starts to copy a node that is on the device alone to the host.
    pub(super) fn back_up(&mut self, node: NodeId, session: Option<Arc<str>>) {
        let state = self.tree.node(node);
        if self.lower.is_none() || !state.on_device() || !state.host.is_empty() || state.loading {
            return;
        }
        let pages = self.tree.len(node);
        let Some(host) = self.alloc_host(pages) else {
            self.count(|counters| &counters.dropped_host_pressure_tokens, pages * self.page_size);
            return;
        };
        self.tree.set_host_backing(node, host.clone());
        self.tree.lock(node);
        let reference = self.tree.reference(node);
        let start = self.tree.node(node).start;
        self.writes.backups.insert(reference, start);
        let device = self.tree.node(node).device.clone();
        if let Some(lower) = &self.lower {
            lower.back_up(BackupJob { node: reference, start, device, host, session });
        }
    }

    /// A copy to the host has ended.
    pub(super) fn backed_up(&mut self, job: BackupJob, ok: bool, took: Duration) {
        self.writes.backups.remove(&job.node);
        let Some(tail) = self.tree.resolve(job.node) else {
            tracing::error!("a node went away under a copy that held it");
            return;
        };
        if ok {
            self.tree.update_since(tail, job.start, |node| node.backing = false);
            self.count_host_backup(job.host.len(), took);
        } else {
            for node in self.tree.update_since(tail, job.start, |_| {}) {
                let host = self.tree.cancel_backup(node);
                self.free(Removed { device: Vec::new(), host });
            }
        }
        self.tree.unlock(tail);
        if ok {
            self.want(tail, job.start, 0, job.session);
        }
    }

    pub(super) fn count_host_backup(&self, pages: usize, took: Duration) {
        let tokens = pages * self.page_size;
        let bytes = pages * self.pool.spec().page_bytes();
        self.count(|counters| &counters.host_backup_tokens, tokens);
        self.count(|counters| &counters.host_backup_bytes, bytes);
        self.listener.backed_up(tokens as u64, bytes as u64, took);
    }

    /// Queues a node for storage, if it is on the host and not known to be stored.
    pub(super) fn want_stored(&mut self, node: NodeId) {
        self.want(node, self.tree.node(node).start, 0, None);
    }

    fn want(&mut self, node: NodeId, start: u32, attempt: u32, session: Option<Arc<str>>) {
        let Some(lower) = &self.lower else { return };
        let state = self.tree.node(node);
        let registry = &lower.shared.registry;
        if !state.host_ready() || state.storing || state.stored == registry.epoch() || registry.current().is_empty() {
            return;
        }
        let end = state.start as usize + self.tree.len(node);
        let pages = end.saturating_sub(start as usize);
        self.writes.push(Wanted { node: self.tree.reference(node), start, pages, attempt, session });
        self.pump_writes();
    }

    /// What uses of nodes lead to, by the write policy.
    pub(super) fn used(&mut self, path: &[NodeId], session: Option<Arc<str>>) {
        let Some(lower) = &self.lower else { return };
        let epoch = lower.shared.registry.epoch();
        let quiet = self.writes.last_failure.is_some_and(|at| at.elapsed() < QUIET_AFTER_FAILURE);
        for &id in path {
            let node = self.tree.node(id);
            let copy = match self.config.write_policy {
                WritePolicy::WriteThrough => true,
                WritePolicy::WriteThroughSelective => node.hits >= SELECTIVE_HITS,
                WritePolicy::WriteBack => false,
            };
            if node.stored == epoch {
                continue;
            }
            if node.host.is_empty() {
                if copy {
                    self.back_up(id, session.clone());
                }
            } else if !quiet {
                self.want_stored(id);
            }
        }
    }

    /// Hands waiting nodes to the storage writers, as far as these are free. Returns when a retry is due.
    pub(super) fn pump_writes(&mut self) -> Option<Instant> {
        let lower = self.lower.as_ref()?;
        let shared = Arc::clone(&lower.shared);
        if shared.registry.current().is_empty() {
            self.writes.forget_pending();
            return None;
        }
        let now = Instant::now();
        let due = self.writes.retries.extract_if(.., |(at, _)| *at <= now).map(|(_, wanted)| wanted);
        let due: Vec<Wanted> = due.collect();
        for wanted in due {
            self.writes.push(wanted);
        }
        // Few at a time, so that what waits can be gathered into larger calls.
        while self.writes.held.len() < self.config.backup_workers.max(1) * 2 {
            let Some(job) = self.next_store_job(shared.registry.epoch()) else { break };
            shared.host.retain(&job.pages);
            self.writes.held.insert(job.id, job.pages.clone());
            if let Some(lower) = &self.lower {
                lower.write(WriteJob::Store(job));
            }
        }
        self.writes.retries.iter().map(|(at, _)| *at).min()
    }

    /// The next waiting node with those right after it that wait too, up to a batch.
    fn next_store_job(&mut self, epoch: u32) -> Option<StoreJob> {
        let (first, nodes) = loop {
            let wanted = self.writes.pop()?;
            let nodes = self.storable(&wanted, epoch);
            if !nodes.is_empty() {
                break (wanted, nodes);
            }
        };
        let mut nodes = nodes;
        let mut pages: usize = nodes.iter().map(|&id| self.tree.len(id)).sum();
        while let Some(next) = self.writes.pending.front() {
            let more = self.storable(next, epoch);
            let length: usize = more.iter().map(|&id| self.tree.len(id)).sum();
            let follows = more.first().map(|&id| self.tree.node(id).parent) == nodes.last().copied();
            if more.is_empty() || !follows || pages + length > BATCH_PAGES {
                break;
            }
            pages += length;
            nodes.extend(more);
            self.writes.pop();
        }
        let &last = nodes.last()?;
        let &head = nodes.first()?;
        let mut host = Vec::with_capacity(pages);
        let mut parts = Vec::with_capacity(nodes.len());
        for &id in &nodes {
            let start = self.tree.node(id).start;
            host.extend_from_slice(&self.tree.node(id).host);
            parts.push((self.tree.reference(id), start));
            self.tree.update_since(id, start, |node| node.storing = true);
        }
        Some(StoreJob {
            id: self.new_id(),
            nodes: parts,
            path: self.tree.key_path(last, self.tree.len(last)),
            position: self.tree.node(head).start as usize,
            pages: host,
            epoch,
            session: first.session.as_deref().unwrap_or_default().to_owned(),
            attempt: first.attempt,
        })
    }

    /// The nodes of an entry that can be stored now, in order and without a gap.
    fn storable(&self, wanted: &Wanted, epoch: u32) -> Vec<NodeId> {
        let Some(tail) = self.tree.resolve(wanted.node) else {
            return Vec::new();
        };
        let mut nodes = Vec::new();
        let mut at = tail;
        loop {
            let node = self.tree.node(at);
            if node.is_root() || !node.host_ready() || node.storing || node.stored == epoch {
                break;
            }
            nodes.push(at);
            if node.start <= wanted.start {
                break;
            }
            at = node.parent;
        }
        nodes.reverse();
        nodes
    }

    /// A write to storage has ended.
    pub(super) fn stored(&mut self, report: StoreReport) {
        let StoreReport { job, stored, unstored, retry } = report;
        self.writes.held.remove(&job.id);
        self.release_host(&job.pages);
        self.writes.pages_stored += stored as u64;
        let whole = unstored == 0;
        for &(reference, start) in &job.nodes {
            let Some(tail) = self.tree.resolve(reference) else { continue };
            self.tree.update_since(tail, start, |node| {
                node.storing = false;
                if whole {
                    node.stored = job.epoch;
                }
            });
        }
        if whole {
            if let Some(tail) = job.nodes.last().and_then(|&(node, _)| self.tree.resolve(node)) {
                self.tree.merge_up(tail);
            }
        } else {
            self.writes.last_failure = Some(Instant::now());
            self.retry_or_drop(&job, unstored, retry);
        }
        self.pump_writes();
    }

    fn retry_or_drop(&mut self, job: &StoreJob, unstored: usize, retry: bool) {
        let attached = self.lower.as_ref().is_some_and(|lower| !lower.shared.registry.current().is_empty());
        if !attached {
            return;
        }
        if !retry || job.attempt >= self.config.backup_retries {
            return self.count(|counters| &counters.backup_dropped_tokens, unstored * self.page_size);
        }
        let at = Instant::now() + RETRY_PAUSE * 2u32.saturating_pow(job.attempt);
        for &(node, start) in &job.nodes {
            let pages = self.tree.resolve(node).map_or(0, |id| self.tree.len(id));
            let session = Some(job.session.as_str()).filter(|session| !session.is_empty()).map(Arc::from);
            let wanted = Wanted { node, start, pages, attempt: job.attempt + 1, session };
            self.writes.retries.push((at, wanted));
            self.counters.backup_retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A backend came, went or was emptied: what the host holds is offered to the new one.
    pub(super) fn storage_changed(&mut self) {
        let Some(lower) = &self.lower else { return };
        if lower.shared.registry.current().is_empty() {
            return self.writes.forget_pending();
        }
        let mut nodes: Vec<NodeId> = self.tree.ids().filter(|&id| self.tree.node(id).host_ready()).collect();
        nodes.sort_by_key(|&id| self.tree.node(id).start);
        for node in nodes {
            self.want_stored(node);
        }
    }

    /// Writes outstanding backups to storage, at most until `deadline`. Blocks. Under `write_back` this also
    /// brings down what is on the device alone.
    pub fn drain_backups(&mut self, deadline: Instant) -> Drained {
        self.take_events();
        let before = self.writes.pages_stored;
        let attached = self.lower.as_ref().is_some_and(|lower| !lower.shared.registry.current().is_empty());
        if !attached {
            return Drained::default();
        }
        if self.config.write_policy == WritePolicy::WriteBack {
            let nodes: Vec<NodeId> = self.tree.ids().filter(|&id| self.tree.node(id).host.is_empty()).collect();
            for node in nodes {
                // Without evicting: what the host holds waits to be stored as well.
                let room = self.host().map_or(0, |host| host.free_count());
                if room >= self.tree.len(node) {
                    self.back_up(node, None);
                }
            }
        }
        loop {
            let next = self.tick();
            if self.writes.idle() || !self.wait_event(next.map_or(deadline, |next| next.min(deadline)), deadline) {
                break;
            }
        }
        if let Some(lower) = &self.lower {
            lower.write(WriteJob::Flush);
            self.writes.flushes_running += 1;
        }
        while self.writes.flushes_running > 0 && self.wait_event(deadline, deadline) {}
        Drained { stored: self.writes.pages_stored - before, left: self.writes.pending_pages(&self.tree) as u64 }
    }

    /// Takes in one event, waiting for it until `until`; false once `deadline` has passed.
    fn wait_event(&mut self, until: Instant, deadline: Instant) -> bool {
        let event = self.lower.as_ref().and_then(|lower| lower.events.recv_deadline(until).ok());
        match event {
            Some(event) => {
                self.take_event(event);
                true
            }
            None => Instant::now() < deadline,
        }
    }
}
