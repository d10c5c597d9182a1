//! This process as a node: what it has told the master, and the thread that keeps telling it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use data_encoding::HEXLOWER;
use kvdock_plugin_api::{HealthState, HeldChange, HeldPages, HeldTier, Host, LogLevel};
use parking_lot::{Condvar, Mutex};
use tonic::Code;

use super::limit::Limit;
use super::master::Master;
use super::metrics::Figures;
use super::neighbours::Neighbours;
use super::peers::{ASK, FOREIGN, Peers};
use super::pool::Pool;
use super::rdma::Rdma;
use super::rpc::Failed;
use crate::config::Distributed;
use crate::local::below::Below;
use crate::store::show_degraded;
use crate::wire::master::{HeartbeatRequest, RegisterClientRequest, TierCapacity, TierKvCount};
use crate::wire::peer::{KvdockNode, tier};

/// What every node of kvdock reports as a block that it holds itself: by it they find one another. Nobody else looks for it.
pub const MEETING_PLACE: &str = "kvdock-umbp-nodes";
/// `ClientStatus`.
const ALIVE: i32 = 1;
/// How often what has waited too long is forgotten.
const REAP: Duration = Duration::from_secs(1);
/// Messages of one heartbeat at most: of a node with millions of objects that tells everything.
const ROUNDS: usize = 4096;
/// Heartbeats that come to nothing one after another, before it waits for the next.
const TRIES: usize = 3;
/// So many intervals without a heartbeat make a silence.
const SILENT: u32 = 3;
/// How often a wait for the master looks whether it can still be reached.
const LOOK: Duration = Duration::from_millis(50);

/// A worker's pages of its own, by tier.
type External = HashMap<i32, HashSet<[u8; 32]>>;

#[derive(Debug, Default)]
struct Bell {
    beat: bool,
    stop: bool,
}

/// The node.
#[derive(Debug)]
pub struct Node {
    /// Its settings.
    pub config: Distributed,
    /// Its name at the master.
    pub id: String,
    /// Where others call it.
    pub address: String,
    /// Where it serves bytes.
    pub data_address: String,
    /// Tells it from one that had its address before.
    pub instance: u64,
    /// RDMA, where there is a device. It goes before the memory.
    pub rdma: Option<Rdma>,
    /// Its memory.
    pub pool: Arc<Pool>,
    /// The master.
    pub master: Master,
    /// Other nodes.
    pub peers: Peers,
    /// Counts.
    pub figures: Arc<Figures>,
    /// For its log.
    pub host: Host,
    /// Other nodes of kvdock.
    pub(super) neighbours: Neighbours,
    /// Names of nodes that are none of kvdock, each until when it is not asked for.
    foreign: Mutex<HashMap<String, Instant>>,
    external: Mutex<External>,
    /// The master has to be told of all pages of the worker's own.
    external_lost: AtomicBool,
    interval: Mutex<Duration>,
    bell: Mutex<Bell>,
    rung: Condvar,
    closed: AtomicBool,
    trouble: Mutex<Option<String>>,
    /// Heartbeats that came to nothing.
    lost: AtomicU64,
    /// When the last one was sent that the master took.
    heard: Mutex<Instant>,
}

/// What a node is made of.
#[derive(Debug)]
pub struct Parts {
    /// Its settings.
    pub config: Distributed,
    /// Its name.
    pub id: String,
    /// Where others call it.
    pub address: String,
    /// Where it serves bytes.
    pub data_address: String,
    /// Its incarnation.
    pub instance: u64,
    /// RDMA.
    pub rdma: Option<Rdma>,
    /// Its memory.
    pub pool: Arc<Pool>,
    /// The master.
    pub master: Master,
    /// Other nodes.
    pub peers: Peers,
    /// Counts.
    pub figures: Arc<Figures>,
    /// For its log.
    pub host: Host,
}

impl Node {
    /// A node that the master does not know yet.
    pub fn new(parts: Parts) -> Node {
        let Parts { config, id, address, data_address, instance, rdma, pool, master, peers, figures, host } = parts;
        Node {
            config,
            id,
            address,
            data_address,
            instance,
            rdma,
            pool,
            master,
            peers,
            figures,
            host,
            neighbours: Neighbours::default(),
            foreign: Mutex::default(),
            external: Mutex::default(),
            external_lost: AtomicBool::new(false),
            interval: Mutex::new(Duration::from_secs(1)),
            bell: Mutex::default(),
            rung: Condvar::new(),
            closed: AtomicBool::new(false),
            trouble: Mutex::default(),
            lost: AtomicU64::new(0),
            heard: Mutex::new(Instant::now()),
        }
    }

    /// What other nodes of kvdock are told.
    pub fn describe(&self) -> KvdockNode {
        KvdockNode {
            version: 1,
            instance: self.instance,
            data_address: self.data_address.clone(),
            rdma: self.rdma.as_ref().map(Rdma::describe),
        }
    }

    /// Whether it has left, or is about to.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// So many events wait to be told.
    pub fn happened(&self, waiting: usize) {
        if self.config.flush_events > 0 && waiting >= self.config.flush_events {
            self.wake();
        }
    }

    /// The master is told soon.
    pub fn wake(&self) {
        self.bell.lock().beat = true;
        self.rung.notify_all();
    }

    /// Tells the master all that has happened until now, and waits until it has taken it. Says whether it has.
    pub fn tell(&self, until: Instant) -> bool {
        let events = self.pool.happened();
        let lost = self.lost.load(Ordering::Acquire);
        self.wake();
        loop {
            let now = Instant::now();
            if self.pool.wait_acknowledged(events, until.min(now + LOOK)) {
                return true;
            }
            let failed = self.lost.load(Ordering::Acquire) != lost;
            if Instant::now() >= until || failed || self.is_closed() {
                return false;
            }
        }
    }

    /// Nodes that are not to be asked: those that bytes can't come from or go to.
    pub fn foreign(&self) -> Vec<String> {
        let mut foreign = self.foreign.lock();
        let now = Instant::now();
        foreign.retain(|_, until| *until > now);
        foreign.keys().cloned().collect()
    }

    /// A node is none of kvdock.
    pub fn is_foreign(&self, node: &str, address: &str) {
        let new = self.foreign.lock().insert(node.to_owned(), Instant::now() + FOREIGN).is_none();
        if new {
            let text = format!(
                "node {node} at {address} is none of kvdock: it moves bytes by the RDMA engine of UMBP alone, which this version does not speak; its pages are not used"
            );
            self.host.log(LogLevel::Warn, "umbp", &text);
        }
    }

    /// Something that concerns the whole cluster went wrong.
    pub fn failed(&self, what: &str) {
        let mut trouble = self.trouble.lock();
        if trouble.is_none() {
            self.host.log(LogLevel::Error, "umbp", what);
            self.host.health_changed(HealthState::Degraded, what);
            show_degraded(&self.host, true);
        }
        *trouble = Some(what.to_owned());
    }

    fn well(&self) {
        if self.trouble.lock().take().is_some() {
            self.host.log(LogLevel::Info, "umbp", "the master is reached again");
            self.host.health_changed(HealthState::Ok, "");
            show_degraded(&self.host, false);
        }
    }

    /// What last went wrong with the cluster, if it still does.
    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    fn capacities(&self) -> Vec<TierCapacity> {
        let held = self.pool.held();
        let free = held.total.saturating_sub(held.used);
        let memory = TierCapacity {
            tier: tier::DRAM,
            total_capacity_bytes: held.total,
            available_capacity_bytes: free,
            // Objects may lie in pages anywhere.
            max_allocatable_bytes: free,
        };
        let segments = self.pool.below().map(Below::room).map(|room| TierCapacity {
            tier: tier::SSD,
            total_capacity_bytes: room.total,
            available_capacity_bytes: room.free,
            // What goes there has been in memory.
            max_allocatable_bytes: room.free.min(held.total),
        });
        std::iter::once(memory).chain(segments).collect()
    }

    fn counts(&self) -> Vec<TierKvCount> {
        let memory = TierKvCount { tier: tier::DRAM, count: self.pool.held().objects };
        let segments = self.pool.below().map(|below| TierKvCount { tier: tier::SSD, count: below.room().objects });
        std::iter::once(memory).chain(segments).collect()
    }

    /// Joins the master, which knows nothing of this node then.
    ///
    /// # Errors
    /// When it can't.
    pub fn register(&self, limit: &Limit<'_>) -> Result<(), Failed> {
        let request = RegisterClientRequest {
            node_id: self.id.clone(),
            node_address: self.config.node_address.clone(),
            tier_capacities: self.capacities(),
            peer_address: self.address.clone(),
            tags: self.config.tags.clone(),
            ..RegisterClientRequest::default()
        };
        let answer = self.master.register(request, limit)?;
        let interval = Duration::from_millis(answer.heartbeat_interval_ms);
        *self.interval.lock() = interval.clamp(Duration::from_millis(20), Duration::from_secs(60));
        self.pool.tell_all();
        // From now on others find it, for a clear.
        let told = self.report_all();
        self.external_lost.store(told.is_err(), Ordering::Release);
        Ok(())
    }

    /// One heartbeat, and as many more as it takes to tell everything.
    fn beat(&self) {
        if let Err(what) = self.try_beat() {
            self.failed(&what);
            self.lost.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn try_beat(&self) -> Result<(), String> {
        let time = self.config.heartbeat_timeout;
        // After such a silence the master may have dropped what it knew and taken this node for dead. It would not say so.
        let interval = *self.interval.lock();
        let mut silent = self.heard.lock().elapsed() > (interval * SILENT).max(REAP);
        if silent {
            self.pool.tell_all();
        }
        let mut tries = 0;
        for _ in 0..ROUNDS {
            let beat = self.pool.beat(self.config.bounds);
            let request = HeartbeatRequest {
                node_id: self.id.clone(),
                bundles: beat.bundles.clone(),
                is_full_sync: beat.whole,
                tier_capacities: self.capacities(),
                delta_seq_baseline: beat.baseline,
                tier_kv_counts: self.counts(),
                logical_tier_capacities: Vec::new(),
            };
            // An answer may be read long after it came, as by a process that stood still.
            let sent = Instant::now();
            let answer = match self.master.heartbeat(request, &Limit::within(time)) {
                Ok(answer) => answer,
                Err(failed) => return Err(failed.text),
            };
            if answer.status == ALIVE && !answer.request_full_sync {
                let more = self.pool.taken(&beat, answer.acked_seq);
                *self.heard.lock() = sent;
                self.well();
                if more {
                    continue;
                }
                if std::mem::take(&mut silent) {
                    // It takes a node in that it had given up, and refuses one that it knows to live.
                    match self.register(&Limit::within(time)) {
                        Ok(()) => continue,
                        Err(failed) if failed.code == Some(Code::AlreadyExists) => {}
                        Err(failed) => return Err(failed.text),
                    }
                }
                break;
            }
            tries += 1;
            if answer.status == ALIVE {
                self.pool.tell_all();
            } else {
                self.host.log(LogLevel::Info, "umbp", "the master does not know this node any more: it joins anew");
                if let Err(failed) = self.register(&Limit::within(time)) {
                    let hint = match failed.code {
                        Some(Code::AlreadyExists) => "; another node has taken this one's node_id",
                        _ => "",
                    };
                    return Err(format!("{}{hint}", failed.text));
                }
            }
            if tries >= TRIES {
                return Err("the master asks for everything again and again".to_owned());
            }
        }
        if self.external_lost.swap(false, Ordering::AcqRel)
            && let Err(failed) = self.report_all()
        {
            self.external_lost.store(true, Ordering::Release);
            self.host.log(LogLevel::Debug, "umbp", &format!("what is held was not passed on: {}", failed.text));
        }
        Ok(())
    }

    /// Everything that is held outside of the store, and the sign of a node of kvdock.
    fn report_all(&self) -> Result<(), Failed> {
        let limit = Limit::within(ASK);
        self.master.external(true, vec![MEETING_PLACE.to_owned()], tier::SSD, &limit)?;
        let all: Vec<(i32, Vec<String>)> = {
            let external = self.external.lock();
            external.iter().map(|(tier, keys)| (*tier, keys.iter().map(|key| HEXLOWER.encode(key)).collect())).collect()
        };
        all.into_iter().try_for_each(|(tier, hashes)| {
            // What was given up meanwhile may not have been passed on either.
            self.master.external_none(tier, &limit)?;
            self.master.external(true, hashes, tier, &limit)
        })
    }

    /// Passes on what the worker holds itself. What does not arrive now is told with the next heartbeat.
    pub fn report(&self, held: &HeldPages<'_>) {
        let tier = match held.tier {
            HeldTier::Device => tier::HBM,
            HeldTier::Host => tier::DRAM,
            HeldTier::Unknown => return,
        };
        let hashes: Vec<String> = held.keys.iter().map(|key| HEXLOWER.encode(key)).collect();
        let limit = Limit::of(&held.call, ASK);
        let mut external = self.external.lock();
        let known = external.entry(tier).or_default();
        let told = match held.change {
            HeldChange::Added => {
                known.extend(held.keys.iter().copied());
                drop(external);
                self.master.external(true, hashes, tier, &limit)
            }
            HeldChange::Removed => {
                held.keys.iter().for_each(|key| {
                    known.remove(key);
                });
                drop(external);
                self.master.external(false, hashes, tier, &limit)
            }
            HeldChange::Cleared => {
                known.clear();
                drop(external);
                self.master.external_none(tier, &limit)
            }
            HeldChange::Unknown => return,
        };
        if let Err(failed) = told {
            self.external_lost.store(true, Ordering::Release);
            self.host.log(LogLevel::Debug, "umbp", &format!("what is held was not passed on: {}", failed.text));
        }
    }

    /// Keeps the master informed until it is to stop, and leaves then.
    pub fn run(&self) {
        let now = Instant::now();
        let (mut beat, mut metrics, mut reap) = (now, now + self.config.metrics, now + REAP);
        let mut look = now;
        loop {
            {
                let mut bell = self.bell.lock();
                while !bell.stop && !bell.beat {
                    let next = beat.min(metrics).min(reap).min(look);
                    if self.rung.wait_until(&mut bell, next).timed_out() {
                        break;
                    }
                }
                if bell.stop {
                    break;
                }
                if std::mem::take(&mut bell.beat) {
                    beat = Instant::now();
                }
            }
            if Instant::now() >= beat {
                self.beat();
                beat = Instant::now() + *self.interval.lock();
            }
            if Instant::now() >= look {
                self.look_at_neighbours();
                look = Instant::now() + *self.interval.lock();
            }
            if Instant::now() >= reap {
                self.pool.reap();
                reap = Instant::now() + REAP;
            }
            if Instant::now() >= metrics {
                self.report_metrics();
                metrics = Instant::now() + self.config.metrics;
            }
        }
        if let Err(failed) = self.master.unregister(&Limit::within(self.config.shutdown)) {
            // It notices by itself.
            self.host.log(LogLevel::Info, "umbp", &format!("the master could not be told of the end: {}", failed.text));
        }
    }

    fn report_metrics(&self) {
        let Some(report) = self.figures.report() else { return };
        // One that is given up may have arrived, and would count twice.
        match self.master.metrics(&report, &Limit::within(ASK)) {
            Ok(()) => self.figures.arrived(&report),
            Err(_) => self.figures.lost(report),
        }
    }

    /// Has [`Node::run`] end.
    pub fn stop(&self) {
        self.closed.store(true, Ordering::Release);
        self.bell.lock().stop = true;
        self.rung.notify_all();
    }
}
