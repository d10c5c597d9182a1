//! Down the tiers: device to host, host to storage.
//!
//! Nothing here blocks and nothing holds a request up. What waits to be stored is a list of nodes, not
//! of pages: when the host pool needs room, a node that waits may be evicted, and its backup is
//! dropped and counted.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::CacheManager;
use super::outgoing::{Copying, Held, SELECTIVE_HITS, View, Wanted};
use crate::cache::config::WritePolicy;
use crate::cache::controller::{BATCH_PAGES, BackupJob, PageCopy, StoreJob, StorePart, StoreReport, WriteJob};
use crate::cache::types::Drained;
use crate::cache::unified::{
    BackupRule, Component, NodeId, NodeInfo, PerComponent, Room, Side, Slots, Source, StoreTicket,
};

/// Pause before a page that could not be stored is tried again; doubles with each try.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

impl CacheManager {
    /// Starts to copy a node that is on the device alone to the host.
    pub(super) fn back_up(&mut self, node: NodeId, session: Option<Arc<str>>) {
        let (Ok(info), Ok(needs)) = (self.tree.info(node), self.tree.backup_needs(node)) else { return };
        let pages = needs[Component::Full];
        if self.lower.is_none() || info.copied || needs == PerComponent::default() {
            return;
        }
        let alone = PerComponent([pages, 0, 0]);
        let host = self.take_slots(Side::Host, &needs).or_else(|| {
            // Pages are worth their place without window and state, too: others may stand behind them.
            (pages > 0 && alone != needs).then(|| self.take_slots(Side::Host, &alone)).flatten()
        });
        let Some(host) = host else {
            return self.no_host_room(&needs);
        };
        let mut copies = Vec::with_capacity(pages + 1);
        for &component in self.tree.components() {
            let device = self.tree.device_slots(component, node).unwrap_or_default();
            let pairs = device.iter().zip(&host[component]);
            copies.extend(pairs.map(|(&device, &host)| PageCopy { component, device, host }));
        }
        let begun = self.tree.begin_backup(node, host.clone());
        let Some(ticket) = self.sound(begun) else {
            return self.give_back_all(Side::Host, host);
        };
        let id = self.new_id();
        self.writes.backups.insert(id, Copying { ticket, pages });
        if let Some(lower) = &self.lower {
            lower.back_up(BackupJob { id, copies, session });
        }
    }

    /// A copy to the host has ended.
    pub(super) fn backed_up(&mut self, job: BackupJob, ok: bool, took: Duration) {
        let Some(Copying { ticket, pages }) = self.writes.backups.remove(&job.id) else { return };
        let (node, start) = (ticket.node(), ticket.start());
        let ended = self.tree.finish_backup(ticket, ok);
        if let Some(actions) = self.sound(ended) {
            self.carry_out(actions);
        }
        if ok {
            if pages > 0 {
                self.count_host_backup(pages, took);
            }
            self.want(node, start, job.session.clone(), false);
            if self.tree.components().len() > 1 {
                // A window or a state may have come to it while it was copied.
                self.back_up_nodes(vec![node], 0, job.session.as_ref());
            }
        }
    }

    pub(super) fn count_host_backup(&self, pages: usize, took: Duration) {
        let tokens = pages * self.page_size;
        let bytes = pages * self.memory.page_bytes();
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
    fn host_policy(&self) -> WritePolicy {
        self.write_policies().min().unwrap_or(self.config.write_policy)
    }

    /// Tells the tree when the host is given what is on the device.
    pub(super) fn apply_write_policies(&mut self) {
        if self.lower.is_none() {
            return;
        }
        let backup = match self.host_policy() {
            WritePolicy::WriteThrough => BackupRule::AfterHits(1),
            WritePolicy::WriteThroughSelective => BackupRule::AfterHits(SELECTIVE_HITS),
            WritePolicy::WriteBack => BackupRule::OnEviction,
        };
        let applied = self.tree.set_rules(backup, self.writes_back());
        self.sound(applied);
    }

    /// Whether somebody wants what leaves the device.
    fn writes_back(&self) -> bool {
        self.write_policies().any(|policy| policy == WritePolicy::WriteBack)
    }

    /// Whether a backend waits for pages of a node that is about to leave the host.
    fn is_awaited(&self, node: &NodeInfo) -> bool {
        let due = |view: &View| view.is_due(node, self.config.write_policy, self.writes.draining);
        self.writes.views.iter().any(|view| node.stored & view.bit == 0 && due(view))
    }

    /// Host pages of a node were evicted.
    pub(super) fn left_host(&self, node: &NodeInfo) {
        let tokens = node.pages as usize * self.page_size;
        self.count(|counters| &counters.evicted_host_tokens, tokens);
        if self.is_awaited(node) {
            self.count(|counters| &counters.backup_dropped_tokens, tokens);
        }
    }

    /// Whether a node is where the stores are given it from: on the host, in linker mode on the device.
    fn can_be_stored(&self, node: &NodeInfo) -> bool {
        match self.config.linked {
            true => node.on_device && !node.loading,
            false => node.on_host,
        }
    }

    /// Stores, as bits, that have all of a node that they can be given: what is on the host, in linker mode what is on the device.
    fn stored_of(&self, node: &NodeInfo) -> u64 {
        if self.config.linked { node.stored_all } else { node.stored }
    }

    /// Queues a node, if it can be stored, for the backends that are to be given it.
    pub(super) fn want_stored(&mut self, node: NodeId) {
        self.want(node, u32::MAX, None, false);
    }

    /// As `want_stored`, for what was split off the node since it began at page `start`. `mindful` leaves out backends to which a write
    /// failed lately.
    fn want(&mut self, node: NodeId, start: u32, session: Option<Arc<str>>, mindful: bool) {
        let Ok(info) = self.tree.info(node) else { return };
        if !self.can_be_stored(&info) {
            return;
        }
        let start = start.min(info.start);
        let pages = (info.start + info.pages - start) as usize;
        let mut queued = false;
        let stored = self.stored_of(&info);
        for view in &mut self.writes.views {
            let known = (stored | info.writing) & view.bit != 0;
            let due = view.is_due(&info, self.config.write_policy, self.writes.draining);
            if known || !due || (mindful && view.is_quiet()) {
                continue;
            }
            view.queue.push(Wanted { node, start, pages, attempt: 0, session: session.clone() });
            queued = true;
        }
        if queued {
            self.pump_writes();
        }
    }

    /// Joins a node with those before it where nothing tells them apart. What waited for storage under names that are gone waits under
    /// its name.
    fn join(&mut self, node: NodeId) {
        let joined = self.tree.merge_up(node);
        if self.sound(joined) == Some(true) {
            self.want_stored(node);
        }
    }

    /// What the use of a prefix leads to, by the write policies, for what is on the host already.
    pub(super) fn used(&mut self, end: NodeId) {
        let all = self.writes.bits();
        if all == 0 {
            return;
        }
        let path = self.tree.path(end);
        for node in self.sound(path).unwrap_or_default() {
            if self.tree.info(node).is_ok_and(|info| self.stored_of(&info) & all != all) {
                self.want(node, u32::MAX, None, true);
            }
        }
    }

    /// What the tree wants copied down, from page `from` on. What every backend has is not copied.
    pub(super) fn back_up_nodes(&mut self, nodes: Vec<NodeId>, from: u32, session: Option<&Arc<str>>) {
        let all = self.writes.bits();
        for node in nodes {
            let Ok(info) = self.tree.info(node) else { continue };
            if self.config.linked {
                self.want(node, u32::MAX, session.cloned(), false);
            } else if info.start >= from && (all == 0 || info.stored_all & all != all) {
                self.back_up(node, session.cloned());
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
                let Some((job, tickets)) = self.next_store_job(at) else { break };
                let mut pages = Slots::default();
                if self.config.linked {
                    // The job has them from the start, and all parts of a component go by way of the same.
                    for part in &job.parts {
                        pages[part.component].clone_from(&part.pages);
                    }
                } else {
                    for part in &job.parts {
                        pages[part.component].extend_from_slice(&part.pages);
                    }
                    for (component, host) in shared.hosts() {
                        host.retain(&pages[component]);
                    }
                }
                let held = Held { bit: job.bit, pages, count: job.count(), tickets };
                self.writes.held.insert(job.id, held);
                if let Some(lower) = &self.lower {
                    lower.write(WriteJob::Store(job));
                }
            }
        }
        next
    }

    /// The next node that waits for backend `at` with those right after it that wait too, up to a batch.
    fn next_store_job(&mut self, at: usize) -> Option<(StoreJob, Vec<StoreTicket>)> {
        let bit = self.writes.views[at].bit;
        let (first, mut nodes) = loop {
            let wanted = self.writes.views[at].queue.pop()?;
            let nodes = self.storable(&wanted, bit);
            if !nodes.is_empty() {
                break (wanted, nodes);
            }
        };
        let mut pages = self.pages_of(&nodes);
        while let Some(next) = self.writes.views[at].queue.front() {
            let more = self.storable(next, bit);
            let length = self.pages_of(&more);
            let before = more.first().and_then(|&node| self.tree.parent(node).ok().flatten());
            if before.is_none() || before != nodes.last().copied() || pages + length > BATCH_PAGES {
                break;
            }
            pages += length;
            nodes.extend(more);
            self.writes.views[at].queue.pop();
        }
        let path = self.tree.key_path(*nodes.last()?);
        let path = self.sound(path)?;
        let transit = match self.config.linked {
            true if self.writes.views[at].attached.is_direct() => Slots::default(),
            true => match self.transit_for_store(&nodes) {
                Some(transit) => transit,
                None => {
                    // They wait until what is under way has given some back.
                    let start = self.tree.start(*nodes.first()?).unwrap_or(0);
                    let node = *nodes.last()?;
                    self.writes.views[at].queue.push_front(Wanted { node, start, pages, ..first });
                    return None;
                }
            },
            false => Slots::default(),
        };
        let source = if self.config.linked { Source::Device } else { Source::Host };
        let mut tickets = Vec::with_capacity(nodes.len());
        let mut parts = Vec::new();
        for node in nodes {
            let (start, end) = (self.tree.start(node).unwrap_or(0) as usize, self.tree.end(node).unwrap_or(0) as usize);
            let begun = self.tree.begin_store(node, bit, source);
            // What came to a node after all else is stored by itself; a node of which the store has all by now has nothing.
            let Some((ticket, slots)) = self.sound(begun).flatten() else { continue };
            tickets.push(ticket);
            for (component, pages) in Component::ALL.into_iter().zip(slots.0) {
                let position = if component == Component::State { end.saturating_sub(1) } else { start };
                add_part(&mut parts, component, position, pages);
            }
        }
        if tickets.is_empty() {
            self.give_back_all(Side::Host, transit);
            return None;
        }
        if self.config.linked {
            for part in &mut parts {
                part.device = std::mem::replace(&mut part.pages, transit[part.component].clone());
            }
            for component in Component::ALL {
                if !parts.iter().any(|part| part.component == component) {
                    self.give_back(Side::Host, component, &transit[component]);
                }
            }
        }
        // Pages of all tokens come last: who finds them finds what stands beside them.
        parts.sort_by_key(|part: &StorePart| std::cmp::Reverse(part.component));
        let view = &self.writes.views[at];
        let (target, emptied) = (Arc::clone(&view.attached), view.emptied);
        let job = StoreJob {
            id: self.new_id(),
            target,
            bit,
            emptied,
            path,
            parts,
            session: first.session.as_deref().unwrap_or_default().to_owned(),
            attempt: first.attempt,
        };
        Some((job, tickets))
    }

    /// Transit pages by way of which nodes are offloaded, a batch at a time. Offloads leave half of them to loads, which requests wait for.
    fn transit_for_store(&self, nodes: &[NodeId]) -> Option<Slots> {
        let mut counts = PerComponent::default();
        for component in Component::ALL {
            let Some(host) = self.host_pool(component) else { continue };
            let slots = |&node: &NodeId| self.tree.device_slots(component, node).map_or(0, <[u32]>::len);
            let most = (host.capacity() / 2).max(1);
            let count = nodes.iter().map(slots).sum::<usize>().min(BATCH_PAGES).min(most);
            let under_way: usize = self.writes.held.values().map(|held| held.pages[component].len()).sum();
            if under_way + count > most {
                return None;
            }
            counts[component] = count;
        }
        self.lower.as_ref()?.shared.alloc_host(&counts)
    }

    fn pages_of(&self, nodes: &[NodeId]) -> usize {
        nodes.iter().filter_map(|&node| self.tree.info(node).ok()).map(|info| info.pages as usize).sum()
    }

    /// The nodes of an entry that can be stored now in the backend of this bit, in order and without a gap.
    fn storable(&self, wanted: &Wanted, bit: u64) -> Vec<NodeId> {
        let mut nodes = self.tree.parts(wanted.node, wanted.start).unwrap_or_default();
        let can_be = |node: &NodeId| {
            let open = |info: NodeInfo| (info.writing | self.stored_of(&info)) & bit == 0 && self.can_be_stored(&info);
            self.tree.info(*node).is_ok_and(open)
        };
        let first = nodes.iter().rposition(|node| !can_be(node)).map_or(0, |gap| gap + 1);
        nodes.split_off(first)
    }

    fn end_stores(&mut self, tickets: Vec<StoreTicket>, stored: bool) {
        for ticket in tickets {
            let ended = self.tree.finish_store(ticket, stored);
            self.sound(ended);
        }
    }

    /// A write to storage has ended.
    pub(super) fn stored(&mut self, report: StoreReport) {
        let StoreReport { job, stored, unstored, lacking, retry } = report;
        let Some(held) = self.writes.held.remove(&job.id) else { return };
        if let Some(lower) = &self.lower {
            lower.shared.release_host(held.pages);
        }
        self.writes.pages_stored += stored as u64;
        let view = self.writes.view_of(&job.target);
        let emptied = view.is_some_and(|at| self.writes.views[at].emptied != job.emptied)
            || job.target.times_emptied() != job.emptied;
        let whole = !lacking;
        let nodes: Vec<(NodeId, u32)> = held.tickets.iter().map(|ticket| (ticket.node(), ticket.start())).collect();
        self.end_stores(held.tickets, whole && view.is_some() && !emptied);
        match (view, nodes.last().copied()) {
            // It left, or was replaced.
            (None, _) => {}
            // What was written may have been in the store when that was emptied, or may be in it now.
            (Some(_), Some((tail, _))) if emptied => self.want(tail, nodes[0].1, None, false),
            (Some(_), Some((tail, _))) if whole => {
                self.join(tail);
                if self.tree.components().len() > 1 {
                    // A window or a state may have come to them while they were written.
                    nodes.into_iter().for_each(|(node, start)| self.want(node, start, None, false));
                }
            }
            (Some(_), _) if whole || emptied => {}
            (Some(at), _) => {
                self.writes.views[at].last_failure = Some(Instant::now());
                self.retry_or_drop(&job, nodes, at, unstored, retry);
            }
        }
        self.pump_writes();
    }

    fn retry_or_drop(&mut self, job: &StoreJob, nodes: Vec<(NodeId, u32)>, view: usize, unstored: usize, retry: bool) {
        if !retry || job.attempt >= self.config.backup_retries {
            return self.count(|counters| &counters.backup_dropped_tokens, unstored * self.page_size);
        }
        let at = Instant::now() + RETRY_PAUSE * 2u32.saturating_pow(job.attempt);
        for (node, start) in nodes {
            let pages = self.pages_of(&[node]);
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
        self.tree.forget_stores(stale);
        self.tree.set_stores(self.writes.bits());
        self.apply_write_policies();
        for node in self.nodes_from_the_top() {
            self.want_stored(node);
        }
    }

    /// All nodes, those first that come first in their sequence.
    fn nodes_from_the_top(&self) -> Vec<NodeId> {
        let mut nodes: Vec<NodeId> = self.tree.nodes().collect();
        nodes.sort_by_key(|&node| self.tree.start(node).unwrap_or(0));
        nodes
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
        Drained { stored: self.writes.pages_stored - before, left: self.writes.pending_pages() as u64 }
    }

    /// Starts to store what write-back kept on the device.
    fn bring_down_what_was_kept(&mut self) {
        for node in self.nodes_from_the_top() {
            let Ok(info) = self.tree.info(node) else { continue };
            // Without evicting: what the host holds waits to be stored as well.
            let room = self.host().map_or(0, |host| host.free_count());
            if info.on_host || info.backing {
                self.want_stored(node);
            } else if room >= info.pages as usize {
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

/// Adds pages of a component to those that are stored together: to the part before where they follow it.
fn add_part(parts: &mut Vec<StorePart>, component: Component, position: usize, pages: Vec<u32>) {
    if pages.is_empty() {
        return;
    }
    let before = parts.iter_mut().rev().find(|part| part.component == component);
    match before.filter(|part| part.position + part.pages.len() == position) {
        Some(part) => part.pages.extend(pages),
        None => parts.push(StorePart { component, position, pages, device: Vec::new() }),
    }
}
