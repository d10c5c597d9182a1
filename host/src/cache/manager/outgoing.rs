//! What waits for a backend.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::config::WritePolicy;
use crate::cache::controller::Attached;
use crate::cache::unified::{BackupTicket, NodeId, NodeInfo, Slots, StoreTicket};

/// How long after a failure a mere use of a page does not queue it for storage again.
const QUIET_AFTER_FAILURE: Duration = Duration::from_secs(5);
/// Uses after which `write_through_selective` backs a page up.
pub(super) const SELECTIVE_HITS: u32 = 2;

/// A node that is to be stored, and those split off it since it was queued.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub node: NodeId,
    pub start: u32,
    pub pages: usize,
    pub attempt: u32,
    pub session: Option<Arc<str>>,
}

/// Nodes that wait for one backend.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pending: VecDeque<Wanted>,
    /// Sum of the pages in `pending`.
    waiting: usize,
    queued: HashSet<NodeId>,
    retries: Vec<(Instant, Wanted)>,
}

impl Queue {
    pub fn push(&mut self, wanted: Wanted) {
        if self.queued.insert(wanted.node) {
            self.waiting += wanted.pages;
            self.pending.push_back(wanted);
        }
    }

    /// Puts back what could not begin.
    pub fn push_front(&mut self, wanted: Wanted) {
        if self.queued.insert(wanted.node) {
            self.waiting += wanted.pages;
            self.pending.push_front(wanted);
        }
    }

    pub fn pop(&mut self) -> Option<Wanted> {
        let wanted = self.pending.pop_front()?;
        self.queued.remove(&wanted.node);
        self.waiting -= wanted.pages;
        Some(wanted)
    }

    pub fn front(&self) -> Option<&Wanted> {
        self.pending.front()
    }

    /// Queues a node again at `at`.
    pub fn retry(&mut self, at: Instant, wanted: Wanted) {
        self.retries.push((at, wanted));
    }

    /// Moves the retries that are due behind what waits. Says when the next one is.
    pub fn wake_retries(&mut self, now: Instant) -> Option<Instant> {
        let due: Vec<Wanted> = self.retries.extract_if(.., |(at, _)| *at <= now).map(|(_, wanted)| wanted).collect();
        due.into_iter().for_each(|wanted| self.push(wanted));
        self.retries.iter().map(|(at, _)| *at).min()
    }

    pub fn pages(&self) -> usize {
        self.waiting + self.retries.iter().map(|(_, wanted)| wanted.pages).sum::<usize>()
    }

    pub fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.retries.is_empty()
    }
}

/// A backend as the scheduler sees it.
pub(super) struct View {
    pub attached: Arc<Attached>,
    /// Its bit in the nodes of the tree.
    pub bit: u64,
    /// How often its store was emptied, as far as the marks of the nodes go.
    pub emptied: u32,
    pub queue: Queue,
    pub last_failure: Option<Instant>,
}

impl View {
    /// Whether a write failed so lately that a mere use of a page is no reason for the next.
    pub fn is_quiet(&self) -> bool {
        self.last_failure.is_some_and(|at| at.elapsed() < QUIET_AFTER_FAILURE)
    }

    /// Whether the backend is to be given the pages of a node that are on the host, by its write policy or because it is owed them.
    /// `draining` stands for the end, before which everything goes down that ever would.
    pub fn is_due(&self, node: &NodeInfo, default: WritePolicy, draining: bool) -> bool {
        if node.unproven && self.attached.settings().sealed {
            return false;
        }
        node.owed & self.bit != 0
            || match self.attached.write_policy(default) {
                WritePolicy::WriteThrough => true,
                WritePolicy::WriteThroughSelective => node.hits >= SELECTIVE_HITS,
                WritePolicy::WriteBack => draining || !node.on_device,
            }
    }
}

/// A copy to the host that runs.
#[derive(Debug)]
pub(super) struct Copying {
    pub ticket: BackupTicket,
    pub pages: usize,
}

/// What a running store job holds.
#[derive(Debug)]
pub(super) struct Held {
    /// The bit of the backend that they go to.
    pub bit: u64,
    /// Host pages, or transit pages, by component.
    pub pages: Slots,
    /// Pages that are being stored.
    pub count: usize,
    /// Nodes, in order.
    pub tickets: Vec<StoreTicket>,
}

/// What is on its way down.
#[derive(Default)]
pub(super) struct Writes {
    /// The backends in use, in order.
    pub views: Vec<View>,
    /// Running copies to the host.
    pub backups: HashMap<u64, Copying>,
    /// Running store jobs.
    pub held: HashMap<u64, Held>,
    pub flushes_running: usize,
    /// Pages that storage acknowledged, once a backend.
    pub pages_stored: u64,
    /// The end is near: what write-back keeps on the device goes down, too.
    pub draining: bool,
}

impl Writes {
    /// Pages that wait for storage or are on their way, once a backend.
    pub fn pending_pages(&self) -> usize {
        let copying: usize = self.backups.values().map(|copying| copying.pages).sum();
        let queued: usize = self.views.iter().map(|view| view.queue.pages()).sum();
        queued + copying + self.held.values().map(|held| held.count).sum::<usize>()
    }

    pub fn idle(&self) -> bool {
        self.backups.is_empty() && self.held.is_empty() && self.views.iter().all(|view| view.queue.is_empty())
    }

    /// The bits of all backends in use.
    pub fn bits(&self) -> u64 {
        self.views.iter().fold(0, |bits, view| bits | view.bit)
    }

    /// Jobs that write to the backend of this bit.
    pub fn running(&self, bit: u64) -> usize {
        self.held.values().filter(|held| held.bit == bit).count()
    }

    /// A bit that no backend in use has and no running job writes for.
    fn free_bit(&self) -> Option<u64> {
        let views = self.views.iter().map(|view| view.bit);
        let taken = views.chain(self.held.values().map(|held| held.bit)).fold(0, |taken, bit| taken | bit);
        (0..u64::BITS).map(|place| 1 << place).find(|bit| taken & bit == 0)
    }

    /// Takes over the list of backends in use. Returns the bits whose marks in the nodes stand for nothing any more.
    pub fn refresh(&mut self, current: &[Arc<Attached>]) -> u64 {
        let mut stale = 0;
        self.views.retain(|view| current.iter().any(|attached| Arc::ptr_eq(attached, &view.attached)));
        for attached in current {
            let emptied = attached.times_emptied();
            match self.views.iter_mut().find(|view| Arc::ptr_eq(attached, &view.attached)) {
                Some(view) if view.emptied != emptied => {
                    view.emptied = emptied;
                    stale |= view.bit;
                }
                Some(_) => {}
                None => match self.free_bit() {
                    Some(bit) => {
                        stale |= bit;
                        let (attached, queue) = (Arc::clone(attached), Queue::default());
                        self.views.push(View { attached, bit, emptied, queue, last_failure: None });
                    }
                    None => tracing::error!(
                        backend = attached.name(),
                        "{} storage backends are in use; nothing is written to this one",
                        u64::BITS
                    ),
                },
            }
        }
        let place = |view: &View| current.iter().position(|attached| Arc::ptr_eq(attached, &view.attached));
        self.views.sort_by_key(place);
        stale
    }

    /// The backend that a job writes for, if it still is in use.
    pub fn view_of(&self, attached: &Arc<Attached>) -> Option<usize> {
        self.views.iter().position(|view| Arc::ptr_eq(attached, &view.attached))
    }
}
