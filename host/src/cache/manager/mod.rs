//! The face of the cache to the scheduler: tree and pools, and what goes to and comes from the workers.

mod admit;
mod check;
mod commit;
mod evict;
mod grant;
mod handle;
mod linked;
mod outgoing;
mod why;
mod write;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdock_kernels::KvPool;

pub use super::controller::Waker;
pub use handle::StorageHandle;
pub use linked::Settled;

use super::config::CacheConfig;
use super::controller::{Controller, Event, Pools};
use super::linker::LoadRun;
use super::pool::{CacheMemory, DeviceMemory, DevicePages, DirectPool, HostPool};
use super::stats::{CacheCounters, CacheEvents, CacheStats};
use super::types::{CacheError, RequestId};
use super::unified::{Below, Component, PerComponent, StateConfig, Tree, TreeConfig, TreeError};
use admit::{ActiveFetch, Request};
use grant::ActiveLoad;
use outgoing::Writes;

/// Device states that one sequence keeps, those where others branch off not counted.
const STATES_PER_PATH: usize = 8;

/// How often pages of late calls are asked after.
const COLLECT_INTERVAL: Duration = Duration::from_millis(100);

/// Radix tree, pools and storage controller of one worker. See the module's page for the life of a request.
pub struct CacheManager {
    config: CacheConfig,
    page_size: usize,
    memory: DeviceMemory,
    device: DevicePages,
    /// Pages of windows, where the model has such.
    windows: Option<DevicePages>,
    /// Slots of recurrent states, where the model has such.
    states: Option<DevicePages>,
    tree: Tree,
    /// Host and storage tiers; none without a host pool.
    lower: Option<Controller>,
    counters: Arc<CacheCounters>,
    listener: Arc<dyn CacheEvents>,
    requests: HashMap<RequestId, Request>,
    fetches: HashMap<u64, ActiveFetch>,
    /// Fetch by fingerprint of everything up to the first page it fetches.
    fetch_by_span: HashMap<u64, u64>,
    /// Pages in the spans of running fetches.
    fetch_pages: usize,
    loads: HashMap<u64, ActiveLoad>,
    /// Loads by the linker face, until nothing of them runs any more.
    arrivals: HashMap<u64, Arc<LoadRun>>,
    /// Those that were not handed down yet.
    queued_loads: Vec<u64>,
    writes: Writes,
    next_id: u64,
    hasher: RandomState,
}

impl CacheManager {
    /// Makes an empty cache over `device`, of which it owns all pages, and starts its threads.
    pub fn new(
        config: CacheConfig,
        device: Arc<dyn KvPool>,
        events: Arc<dyn CacheEvents>,
        waker: Waker,
    ) -> Result<Self, CacheError> {
        Self::over(config, device.into(), events, waker)
    }

    /// As `new`, over the pools of a model that has several.
    pub fn over(
        config: CacheConfig,
        memory: CacheMemory,
        events: Arc<dyn CacheEvents>,
        waker: Waker,
    ) -> Result<Self, CacheError> {
        let CacheMemory { full: memory, window, state } = memory;
        let (found, page_size) = (memory.pages(), memory.page_tokens());
        let counted = |found: usize| u32::try_from(found).ok().filter(|&pages| pages > 0);
        let pages = counted(found).ok_or_else(|| CacheError::Config {
            key: "cache.device_tokens",
            problem: format!("{found} pages; at least one page and at most 2^32 - 1 are needed"),
        })?;
        if !(0.0..=1.0).contains(&config.prefetch_occupancy) {
            return Err(CacheError::Config {
                key: "cache.prefetch_occupancy",
                problem: format!("{} is not between 0 and 1", config.prefetch_occupancy),
            });
        }
        let counters = Arc::new(CacheCounters::default());
        let too_many = |key, found: usize| CacheError::Config {
            key,
            problem: format!("{found} pages or slots; at most 2^32 - 1 can be counted"),
        };
        let windows = match &window {
            Some(window) => {
                let found = window.memory.pages();
                Some(DevicePages::new(counted(found).ok_or_else(|| too_many("cache.window_ratio", found))?))
            }
            None => None,
        };
        let states = match &state {
            Some(state) => {
                let found = state.memory.pages();
                let slots = counted(found).ok_or_else(|| too_many("cache.states", found))?;
                Some(DevicePages::after(u32::try_from(state.running).unwrap_or(slots), slots))
            }
            None => None,
        };
        let below = match config.host_pages {
            0 => Below::Nothing,
            _ if config.linked => Below::Stores,
            _ => Below::Host,
        };
        let tree = Tree::new(TreeConfig {
            page_size,
            policy: config.eviction,
            below,
            window: window.as_ref().map(|window| window.tokens),
            states: state.as_ref().map(|_| StateConfig { grid: page_size, per_path: Some(STATES_PER_PATH) }),
            ..TreeConfig::default()
        });
        let tree = tree.map_err(|error| CacheError::Config { key: "cache.page_size", problem: error.to_string() })?;
        let lower = match config.host_pages {
            0 => None,
            host_pages => {
                let layout = config.host_layout;
                let identities: Vec<[u8; 32]> =
                    std::iter::once(config.identity).chain(config.further_identities.iter().copied()).collect();
                let host = |memory: &DeviceMemory, component: Component, pages| -> Result<HostPool, CacheError> {
                    let shape = memory.host_shape(component == Component::State);
                    let mut host = HostPool::new(&shape, component.into(), pages, layout, &identities)?;
                    host.pin_for(memory);
                    Ok(host)
                };
                let beside = |memory: DeviceMemory, component, pages| -> Result<_, CacheError> {
                    let host = host(&memory, component, pages)?;
                    Ok((memory, host))
                };
                let windows = window.map(|window| beside(window.memory, Component::Window, window.host_pages));
                let states = state.map(|state| beside(state.memory, Component::State, state.host_slots));
                let full = host(&memory, Component::Full, host_pages)?;
                let window_pages = windows.is_some().then(|| tree.config().window_pages() as usize);
                let beside = [windows.transpose()?, states.transpose()?];
                let direct = match config.linked {
                    true => direct_pools((&memory, &full), &beside, config.identity)?,
                    false => None,
                };
                let pools = Pools { device: memory.clone(), host: full, window_pages, beside, direct };
                Some(Controller::new(&config, pools, Arc::clone(&counters), Arc::clone(&events), waker)?)
            }
        };
        let total = |pages: u32| u64::from(pages) * page_size as u64;
        counters.device_total_tokens.store(total(pages), Ordering::Relaxed);
        let (host, transit) = if config.linked { (0, config.host_pages) } else { (config.host_pages, 0) };
        counters.host_total_tokens.store(total(host), Ordering::Relaxed);
        counters.transit_total_tokens.store(total(transit), Ordering::Relaxed);
        let mut device = DevicePages::new(pages);
        let (mut windows, mut states) = (windows, states);
        if let Some(direct) = lower.as_ref().and_then(|lower| lower.shared.direct.as_ref()) {
            let slots = [Some(&mut device), windows.as_mut(), states.as_mut()];
            for (slots, direct) in slots.into_iter().zip(&direct.0) {
                if let (Some(slots), Some(direct)) = (slots, direct) {
                    slots.heed(Arc::clone(direct.held()));
                }
            }
        }
        let mut cache = CacheManager {
            page_size,
            tree,
            config,
            device,
            windows,
            states,
            memory,
            lower,
            counters,
            listener: events,
            requests: HashMap::new(),
            fetches: HashMap::new(),
            fetch_by_span: HashMap::new(),
            fetch_pages: 0,
            loads: HashMap::new(),
            arrivals: HashMap::new(),
            queued_loads: Vec::new(),
            writes: Writes::default(),
            next_id: 0,
            hasher: RandomState::new(),
        };
        cache.apply_write_policies();
        Ok(cache)
    }

    /// Tokens a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Pages in the device pool.
    pub fn device_pages(&self) -> usize {
        self.device.capacity()
    }

    /// The switch of the storage tier.
    pub fn storage(&self) -> StorageHandle {
        StorageHandle::new(self.lower.as_ref().map(|lower| Arc::clone(&lower.shared)))
    }

    /// Counters and gauges, for other threads. Gauges are brought up to date by `tick`.
    pub fn counters(&self) -> Arc<CacheCounters> {
        Arc::clone(&self.counters)
    }

    /// Takes in what the workers finished. Call when the waker fired; also when no request runs, so that
    /// backups make progress. Returns when to call again at the latest, if something waits for time to pass.
    pub fn tick(&mut self) -> Option<Instant> {
        self.take_events();
        let mut next = self.pump_writes();
        if let Some(lower) = &self.lower {
            let held = lower.shared.registry.collect(&lower.shared);
            self.counters.host_quarantined_pages.store(held as u64, Ordering::Relaxed);
            if held > 0 {
                let again = Instant::now() + COLLECT_INTERVAL;
                next = Some(next.map_or(again, |next| next.min(again)));
            }
        }
        self.sweep();
        self.update_gauges();
        next
    }

    /// The figures now, gauges brought up to date.
    pub fn stats(&mut self) -> CacheStats {
        self.tick();
        self.counters.snapshot()
    }

    /// Tells how long the engine took for a step that computed `prefill` tokens of prompts beside `others` of running answers: what
    /// loading from storage is compared with.
    pub fn prefilled(&self, prefill: usize, others: usize, took: Duration) {
        if let Some(lower) = &self.lower {
            lower.shared.prefill.add(prefill, others, took);
        }
    }

    fn take_events(&mut self) {
        while let Some(event) = self.lower.as_ref().and_then(|lower| lower.events.try_recv().ok()) {
            self.take_event(event);
        }
    }

    fn take_event(&mut self, event: Event) {
        match event {
            Event::BackedUp { job, ok, took } => self.backed_up(job, ok, took),
            Event::Loaded { id, ok, took } => self.loaded(id, ok, took),
            Event::FetchProgress(id) => self.harvest(id, false),
            Event::FetchNeedsRoom { id, needed } => self.make_fetch_room(id, &needed),
            Event::FetchDone(id) => self.fetch_done(id),
            Event::LookedUp(lookup, answer) => self.looked_up(&lookup, answer),
            Event::LoadOver(id) => self.load_over(id),
            Event::Stored(report) => self.stored(report),
            Event::Flushed => self.writes.flushes_running = self.writes.flushes_running.saturating_sub(1),
            Event::StorageChanged => self.storage_changed(),
            Event::Policies(update) => {
                self.config.apply(update);
                self.apply_write_policies();
            }
        }
    }

    fn update_gauges(&self) {
        let set = |gauge: &AtomicU64, value: usize| gauge.store(value as u64, Ordering::Relaxed);
        let unlocked = self.tree.sizes(Component::Full).unlocked;
        let counters = &self.counters;
        set(&counters.device_used_tokens, (self.device.capacity() - self.device.free_count()) * self.page_size);
        set(&counters.device_evictable_tokens, unlocked * self.page_size);
        if let Some(lower) = &self.lower {
            let host = &lower.shared.host;
            let used = if self.config.linked { &counters.transit_used_tokens } else { &counters.host_used_tokens };
            set(used, (host.capacity() - host.free_count()) * self.page_size);
        }
        set(&counters.tree_nodes, self.tree.node_count());
        set(&counters.backup_pending_pages, self.writes.pending_pages());
        set(&counters.prefetches_running, self.fetches.len());
        set(&counters.load_backs_running, self.loads.len());
        set(&counters.layer_loads_running, self.arrivals.len());
    }

    fn host(&self) -> Option<&HostPool> {
        self.lower.as_ref().map(|lower| &lower.shared.host)
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn hash(&self, value: impl std::hash::Hash) -> u64 {
        self.hasher.hash_one(value)
    }

    fn count(&self, counter: impl Fn(&CacheCounters) -> &AtomicU64, amount: usize) {
        counter(&self.counters).fetch_add(amount as u64, Ordering::Relaxed);
    }

    /// What the tree answered. It refuses only what is never asked, so a refusal is an error of the cache: it is said, counted, and
    /// what was to be done is left undone.
    fn sound<T>(&self, answer: Result<T, TreeError>) -> Option<T> {
        answer
            .inspect_err(|error| {
                self.count(|counters| &counters.misuses, 1);
                tracing::error!(%error, "the cache's tree refused a step");
            })
            .ok()
    }

    fn misuse(&self, error: &CacheError) {
        self.count(|counters| &counters.misuses, 1);
        tracing::error!(%error, "the cache was called wrongly");
    }
}

/// The pages of all components as backends see them that take the device's memory. None unless each component's can be.
fn direct_pools(
    full: (&DeviceMemory, &HostPool),
    beside: &[Option<(DeviceMemory, HostPool)>; 2],
    identity: [u8; 32],
) -> Result<Option<PerComponent<Option<DirectPool>>>, CacheError> {
    let [window, state] = beside.each_ref().map(|pools| pools.as_ref().map(|(device, host)| (device, host)));
    let mut direct = PerComponent::default();
    for (at, pools) in [Some(full), window, state].into_iter().enumerate() {
        let Some((device, host)) = pools else { continue };
        direct.0[at] = DirectPool::new(device, host, identity)?;
        if direct.0[at].is_none() {
            return Ok(None);
        }
    }
    Ok(Some(direct))
}
