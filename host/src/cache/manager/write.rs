//! Down the tiers: device to host, host to storage.
//!
//! Nothing here blocks and nothing holds a request up. What waits to be stored is a list of nodes, not
//! of pages: when the host pool needs room, a node that waits may be evicted, and its backup is
//! dropped and counted.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::CacheManager;
use super::outgoing::{Held, SELECTIVE_HITS, Wanted};
use crate::cache::config::WritePolicy;
use crate::cache::controller::{BATCH_PAGES, BackupJob, StoreJob, StoreReport, WriteJob};
use crate::cache::tree::{NodeId, Removed};
use crate::cache::types::Drained;

/// Pause before a page that could not be stored is tried again; doubles with each try.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

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
            self.want(tail, job.start, job.session, false);
        }
    }

    pub(super) fn count_host_backup(&self, pages: usize, took: Duration) {
        let tokens = pages * self.page_size;
        let bytes = pages * self.pool.spec().page_bytes();
        self.count(|counters| &counters.host_backup_tokens, tokens);
        self.count(|counters| &counters.host_backup_bytes, bytes);
        self.listener.backed_up(tokens as u64, bytes as u64, took);
    }

    /// The write policies in use: the cache's own, by which the host tier is filled, and those of the backends.
    fn write_policies(&self) -> impl Iterator<Item = WritePolicy> {
        let own = self.config.write_policy;
        std::iter::once(own).chain(self.writes.views.iter().map(move |view| view.attached.write_policy(own)))
    }

    /// The policy by which pages are copied to the host: the most eager one.
    pub(super) fn host_policy(&self) -> WritePolicy {
        self.write_policies().min().unwrap_or(self.config.write_policy)
    }

    /// Whether somebody wants what leaves the device.
    pub(super) fn writes_back(&self) -> bool {
        self.write_policies().any(|policy| policy == WritePolicy::WriteBack)
    }

    /// Whether a backend still waits for pages that are about to leave the host.
    pub(super) fn is_awaited(&self, node: NodeId) -> bool {
        let node = self.tree.node(node);
        let due = |view: &super::outgoing::View| view.is_due(node, self.config.write_policy, self.writes.draining);
        self.writes.views.iter().any(|view| node.settled & view.bit == 0 && due(view))
    }

    /// Queues a node, if it is on the host, for the backends that are to be given it.
    pub(super) fn want_stored(&mut self, node: NodeId) {
        self.want(node, self.tree.node(node).start, None, false);
    }

    /// As `want_stored`, for what was split off the node since it began at page `start`. `mindful` leaves out backends to which a write
    /// failed lately.
    fn want(&mut self, node: NodeId, start: u32, session: Option<Arc<str>>, mindful: bool) {
        let state = self.tree.node(node);
        if !state.host_ready() {
            return;
        }
        let end = state.start as usize + self.tree.len(node);
        let pages = end.saturating_sub(start as usize);
        let reference = self.tree.reference(node);
        let mut queued = false;
        for view in &mut self.writes.views {
            let known = (state.settled | state.storing) & view.bit != 0;
            let due = view.is_due(state, self.config.write_policy, self.writes.draining);
            if known || !due || (mindful && view.is_quiet()) {
                continue;
            }
            view.queue.push(Wanted { node: reference, start, pages, attempt: 0, session: session.clone() });
            queued = true;
        }
        if queued {
            self.pump_writes();
        }
    }

    /// What uses of nodes lead to, by the write policies.
    pub(super) fn used(&mut self, path: &[NodeId], session: Option<Arc<str>>) {
        if self.lower.is_none() {
            return;
        }
        let policy = self.host_policy();
        let all = self.writes.views.iter().fold(0, |bits, view| bits | view.bit);
        for &id in path {
            let node = self.tree.node(id);
            if all != 0 && node.settled & all == all {
                continue;
            }
            let copy = match policy {
                WritePolicy::WriteThrough => true,
                WritePolicy::WriteThroughSelective => node.hits >= SELECTIVE_HITS,
                WritePolicy::WriteBack => false,
            };
            if !node.host.is_empty() {
                self.want(id, node.start, None, true);
            } else if copy {
                self.back_up(id, session.clone());
            }
        }
    }

    /// Hands waiting nodes to the storage writers, as far as these are free. Returns when a retry is due.
    pub(super) fn pump_writes(&mut self) -> Option<Instant> {
        let lower = self.lower.as_ref()?;
        let shared = Arc::clone(&lower.shared);
        // Few at a time, so that what waits can be gathered into larger calls. Several backends have a writer each, so that one that
        // hangs does not stop the others.
        let most = match self.writes.views.len() {
            0 | 1 => lower.writers() * 2,
            views => (lower.writers() / views).max(1),
        };
        let now = Instant::now();
        let mut next = None;
        for at in 0..self.writes.views.len() {
            let due = self.writes.views[at].queue.wake_retries(now);
            next = [next, due].into_iter().flatten().min();
            while self.writes.running(self.writes.views[at].bit) < most {
                let Some(job) = self.next_store_job(at) else { break };
                shared.host.retain(&job.pages);
                self.writes.held.insert(job.id, Held { bit: job.bit, pages: job.pages.clone() });
                if let Some(lower) = &self.lower {
                    lower.write(WriteJob::Store(job));
                }
            }
        }
        next
    }

    /// The next node that waits for backend `at` with those right after it that wait too, up to a batch.
    fn next_store_job(&mut self, at: usize) -> Option<StoreJob> {
        let bit = self.writes.views[at].bit;
        let (first, mut nodes) = loop {
            let wanted = self.writes.views[at].queue.pop()?;
            let nodes = self.storable(&wanted, bit);
            if !nodes.is_empty() {
                break (wanted, nodes);
            }
        };
        let mut pages: usize = nodes.iter().map(|&id| self.tree.len(id)).sum();
        while let Some(next) = self.writes.views[at].queue.front() {
            let more = self.storable(next, bit);
            let length: usize = more.iter().map(|&id| self.tree.len(id)).sum();
            let follows = more.first().map(|&id| self.tree.node(id).parent) == nodes.last().copied();
            if more.is_empty() || !follows || pages + length > BATCH_PAGES {
                break;
            }
            pages += length;
            nodes.extend(more);
            self.writes.views[at].queue.pop();
        }
        let &last = nodes.last()?;
        let &head = nodes.first()?;
        let mut host = Vec::with_capacity(pages);
        let mut parts = Vec::with_capacity(nodes.len());
        for &id in &nodes {
            let start = self.tree.node(id).start;
            host.extend_from_slice(&self.tree.node(id).host);
            parts.push((self.tree.reference(id), start));
            self.tree.update_since(id, start, |node| node.storing |= bit);
        }
        let view = &self.writes.views[at];
        let (target, emptied) = (Arc::clone(&view.attached), view.emptied);
        Some(StoreJob {
            id: self.new_id(),
            target,
            bit,
            emptied,
            nodes: parts,
            path: self.tree.key_path(last, self.tree.len(last)),
            position: self.tree.node(head).start as usize,
            pages: host,
            session: first.session.as_deref().unwrap_or_default().to_owned(),
            attempt: first.attempt,
        })
    }

    /// The nodes of an entry that can be stored now in the backend of this bit, in order and without a gap.
    fn storable(&self, wanted: &Wanted, bit: u64) -> Vec<NodeId> {
        let Some(tail) = self.tree.resolve(wanted.node) else {
            return Vec::new();
        };
        let mut nodes = Vec::new();
        let mut at = tail;
        loop {
            let node = self.tree.node(at);
            if node.is_root() || !node.host_ready() || (node.storing | node.settled) & bit != 0 {
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
        let view = self.writes.view_of(&job.target);
        let emptied = view.is_some_and(|at| self.writes.views[at].emptied != job.emptied)
            || job.target.times_emptied() != job.emptied;
        let whole = unstored == 0;
        let settled = if whole && view.is_some() && !emptied { job.bit } else { 0 };
        for &(reference, start) in &job.nodes {
            let Some(tail) = self.tree.resolve(reference) else { continue };
            self.tree.update_since(tail, start, |node| {
                node.storing &= !job.bit;
                node.settled |= settled;
                node.owed &= !settled;
            });
        }
        let tail = job.nodes.last().and_then(|&(node, _)| self.tree.resolve(node));
        match (view, tail) {
            // It left, or was replaced.
            (None, _) => {}
            // What was written may have been in the store when that was emptied, or may be in it now.
            (Some(_), Some(tail)) if emptied => self.want_stored(tail),
            (Some(_), Some(tail)) if whole => self.tree.merge_up(tail),
            (Some(_), _) if whole || emptied => {}
            (Some(at), _) => {
                self.writes.views[at].last_failure = Some(Instant::now());
                self.retry_or_drop(&job, at, unstored, retry);
            }
        }
        self.pump_writes();
    }

    fn retry_or_drop(&mut self, job: &StoreJob, view: usize, unstored: usize, retry: bool) {
        if !retry || job.attempt >= self.config.backup_retries {
            return self.count(|counters| &counters.backup_dropped_tokens, unstored * self.page_size);
        }
        let at = Instant::now() + RETRY_PAUSE * 2u32.saturating_pow(job.attempt);
        for &(node, start) in &job.nodes {
            let pages = self.tree.resolve(node).map_or(0, |id| self.tree.len(id));
            let session = Some(job.session.as_str()).filter(|session| !session.is_empty()).map(Arc::from);
            let wanted = Wanted { node, start, pages, attempt: job.attempt + 1, session };
            self.writes.views[view].queue.retry(at, wanted);
            self.counters.backup_retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A backend came, went or was emptied: what the host holds is offered to a new one, by its write policy.
    pub(super) fn storage_changed(&mut self) {
        let Some(lower) = &mut self.lower else { return };
        let stale = self.writes.refresh(&lower.shared.registry.current());
        if let Err(error) = lower.need_writers(self.writes.views.len()) {
            tracing::error!(%error, "writes to several backends share fewer threads");
        }
        self.tree.forget_backends(stale);
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
        if self.writes.views.is_empty() {
            return Drained::default();
        }
        self.writes.draining = true;
        if self.writes_back() {
            self.bring_down_what_was_kept();
        }
        loop {
            let next = self.tick();
            if self.writes.idle() || !self.wait_event(next.map_or(deadline, |next| next.min(deadline)), deadline) {
                break;
            }
        }
        self.writes.draining = false;
        if let Some(lower) = &self.lower {
            for view in &self.writes.views {
                lower.write(WriteJob::Flush(Arc::clone(&view.attached)));
                self.writes.flushes_running += 1;
            }
        }
        while self.writes.flushes_running > 0 && self.wait_event(deadline, deadline) {}
        Drained { stored: self.writes.pages_stored - before, left: self.writes.pending_pages(&self.tree) as u64 }
    }

    /// Starts to store what write-back kept on the device.
    fn bring_down_what_was_kept(&mut self) {
        let mut nodes: Vec<NodeId> = self.tree.ids().collect();
        nodes.sort_by_key(|&id| self.tree.node(id).start);
        for node in nodes {
            // Without evicting: what the host holds waits to be stored as well.
            let room = self.host().map_or(0, |host| host.free_count());
            if !self.tree.node(node).host.is_empty() {
                self.want_stored(node);
            } else if room >= self.tree.len(node) {
                self.back_up(node, None);
            }
        }
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
