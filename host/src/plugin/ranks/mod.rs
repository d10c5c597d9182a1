//! A backend of a model that is spread over ranks: an instance of the plugin for each rank, which the cache uses as one.

mod crew;
mod fan;
mod layers;
mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use kvdock_plugin_api::HealthState;

use super::admin::RankStatus;
use super::backend::{
    BackendError, BackendLimits, BackendSettings, BackendStats, CallOptions, ChainInfo, ErrorKind, Held, LayerLoad,
    PageKey, PageStatus, PoolGroup, Restorable, StorageBackend,
};
use super::host_table::HostContext;
use super::instance::Instance;
use super::library::Library;
use super::state::{BackendState, StateCell};
use fan::Fan;
pub use state::RankStates;

/// Time for each rank's `close` after its drain, beside what the ranks before it took.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// The instances of all ranks, of which there is at least one. One alone is called as it is.
pub struct Ranks {
    first: Arc<Instance>,
    /// The state of all; that of the instance where there is one.
    state: Arc<StateCell>,
    states: Option<Arc<RankStates>>,
    fan: Fan<Instance>,
}

impl std::fmt::Debug for Ranks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ranks").field("ranks", &self.fan.ranks()).finish_non_exhaustive()
    }
}

impl Ranks {
    /// An instance without other ranks.
    pub fn alone(instance: Arc<Instance>) -> Ranks {
        let state = instance.state().clone();
        Ranks { state, states: None, fan: Fan::new(vec![instance.clone()], 1), first: instance }
    }

    /// The instances `first` and `further`, whose states are `states`, shown in `state`. The first `writers` of them store pages: a rank holds
    /// the same bytes as the one of these whose number is its own modulo `writers`.
    pub fn new(
        first: Arc<Instance>,
        further: Vec<Arc<Instance>>,
        (states, state): (Arc<RankStates>, Arc<StateCell>),
        writers: usize,
    ) -> Ranks {
        let ranks = std::iter::once(first.clone()).chain(further).collect();
        Ranks { first, state, states: Some(states), fan: Fan::new(ranks, writers) }
    }

    fn is_alone(&self) -> bool {
        self.states.is_none()
    }

    /// The instances, in order of the ranks.
    pub fn instances(&self) -> &[Arc<Instance>] {
        self.fan.ranks()
    }

    /// The library they run from.
    pub fn library(&self) -> &Arc<Library> {
        self.first.library()
    }

    /// The state of all.
    pub fn state(&self) -> &Arc<StateCell> {
        &self.state
    }

    /// What is known to the plugin of each instance.
    pub fn contexts(&self) -> impl Iterator<Item = &'static HostContext> {
        self.instances().iter().map(|instance| instance.context())
    }

    /// Data calls that run now.
    pub fn in_flight(&self) -> usize {
        self.instances().iter().map(|instance| instance.in_flight()).sum()
    }

    /// As [`Instance::health`]: that of the first rank that is not well.
    ///
    /// # Errors
    /// As [`Instance::health`].
    pub fn health(&self, deadline: Instant) -> Result<(HealthState, String), BackendError> {
        let mut well = Ok((HealthState::Ok, String::new()));
        for (rank, instance) in self.instances().iter().enumerate() {
            match instance.health(deadline) {
                Ok((HealthState::Ok, said)) if self.is_alone() => well = Ok((HealthState::Ok, said)),
                Ok((HealthState::Ok, _)) => {}
                Ok((health, reason)) if !self.is_alone() => return Ok((health, format!("rank {rank}: {reason}"))),
                other => return other,
            }
        }
        well
    }

    /// As [`Instance::told_trouble`], of the first rank that told one.
    pub fn told_trouble(&self) -> Option<String> {
        let told = |(rank, instance): (usize, &Arc<Instance>)| {
            let trouble = instance.told_trouble()?;
            Some(if self.is_alone() { trouble } else { format!("rank {rank}: {trouble}") })
        };
        self.instances().iter().enumerate().find_map(told)
    }

    /// Shows how all of them are, as long as they serve. When they are well, so is each.
    pub fn show(&self, state: BackendState, reason: &str) {
        if let Some(states) = self.states.as_ref().filter(|_| state == BackendState::Active) {
            states.heal();
        }
        self.state.go_if(BackendState::serves, state, reason);
    }

    /// How each of several ranks is; nothing of one alone.
    pub fn rank_status(&self) -> Vec<RankStatus> {
        if self.is_alone() {
            return Vec::new();
        }
        let of = |(rank, instance): (usize, &Arc<Instance>)| {
            let report = instance.state().report();
            let (failed_calls, lost_pages) = self.fan.faults(rank);
            RankStatus {
                state: report.state,
                reason: report.reason,
                in_flight: instance.in_flight() as u64,
                quarantined_pages: instance.quarantined() as u64,
                failed_calls,
                lost_pages,
            }
        };
        self.instances().iter().enumerate().map(of).collect()
    }

    /// As [`Instance::hurry`].
    pub fn hurry(&self) {
        self.instances().iter().for_each(|instance| instance.hurry());
    }

    /// As [`Instance::shut`], of all ranks, which end their service together. Says whether all could be closed.
    pub fn shut(&self, drain: Instant, deadline: Instant, reason: &str) -> bool {
        if let Some(states) = &self.states {
            states.drain(reason);
        }
        let mut closed = true;
        for (rank, instance) in self.instances().iter().enumerate() {
            closed &= instance.shut(drain, deadline + CLOSE_TIME * u32::try_from(rank).unwrap_or(u32::MAX), reason);
        }
        closed
    }

    /// Whether no call into the plugin runs.
    pub fn is_idle(&self) -> bool {
        self.instances().iter().all(|instance| instance.is_idle())
    }

    /// Refuses a call when the ranks do not serve together.
    fn serves(&self) -> Result<(), BackendError> {
        if self.state.serves() {
            return Ok(());
        }
        let report = self.state.report();
        Err(BackendError {
            backend: self.name().to_owned(),
            kind: ErrorKind::Unavailable,
            retryable: true,
            message: format!("it is {}: {}", report.state.as_str(), report.reason),
            pages_in_use: false,
        })
    }
}

impl StorageBackend for Ranks {
    fn name(&self) -> &str {
        self.first.name()
    }

    fn generation(&self) -> u64 {
        self.state.instance()
    }

    fn limits(&self) -> BackendLimits {
        self.fan.limits()
    }

    fn settings(&self) -> &BackendSettings {
        self.first.settings()
    }

    fn batch_exists(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError> {
        if self.is_alone() {
            return self.first.batch_exists(options, keys, held, chain);
        }
        self.serves()?;
        self.fan.exists(options, keys, held, chain)
    }

    fn batch_get(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        if self.is_alone() {
            return self.first.batch_get(options, group, keys, pages, chain, status);
        }
        status.fill(PageStatus::Failed);
        self.serves()?;
        self.fan.get(options, group, keys, pages, chain, status)
    }

    fn batch_set(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        if self.is_alone() {
            return self.first.batch_set(options, group, keys, pages, chain, status);
        }
        status.fill(PageStatus::Failed);
        self.serves()?;
        self.fan.set(options, group, keys, pages, chain, status)
    }

    fn batch_remove(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        if self.is_alone() {
            return self.first.batch_remove(options, group, keys, status);
        }
        status.fill(PageStatus::Failed);
        self.serves()?;
        self.fan.remove(options, group, keys, status)
    }

    fn has_linker(&self) -> bool {
        self.instances().iter().all(|instance| instance.has_linker())
    }

    fn is_direct(&self) -> bool {
        self.is_alone() && self.first.is_direct()
    }

    fn lookup(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
        request: u64,
    ) -> Result<Restorable, BackendError> {
        if self.is_alone() {
            return self.first.lookup(options, keys, held, chain, request);
        }
        self.serves()?;
        self.fan.lookup(options, keys, held, chain, request)
    }

    fn load_layers(
        &self,
        options: &CallOptions,
        loads: &[LayerLoad<'_>],
        words: &Arc<[AtomicU32]>,
        watch: &mut dyn FnMut(),
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        if self.is_alone() {
            return self.first.load_layers(options, loads, words, watch, status);
        }
        status.fill(PageStatus::Failed);
        self.serves()?;
        self.fan.load_layers(options, loads, words, watch, status)
    }

    fn offload(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        if self.is_alone() {
            return self.first.offload(options, group, keys, pages, chain, status);
        }
        status.fill(PageStatus::Failed);
        self.serves()?;
        self.fan.offload(options, group, keys, pages, chain, status)
    }

    fn flush(&self, options: &CallOptions) -> Result<(), BackendError> {
        match self.is_alone() {
            true => self.first.flush(options),
            false => self.fan.writers(|rank| rank.flush(options)),
        }
    }

    fn clear(&self, options: &CallOptions) -> Result<(), BackendError> {
        match self.is_alone() {
            true => self.first.clear(options),
            false => self.fan.writers(|rank| rank.clear(options)),
        }
    }

    fn stats(&self) -> Result<BackendStats, BackendError> {
        match self.is_alone() {
            true => self.first.stats(),
            false => self.fan.stats(),
        }
    }

    fn reclaim(&self, group: PoolGroup) -> Vec<u32> {
        match self.is_alone() {
            true => self.first.reclaim(group),
            false => self.fan.reclaim(group),
        }
    }

    fn quarantined(&self) -> usize {
        self.fan.quarantined()
    }
}

/// Ends instances that came up in vain because another rank's did not, until each is closed.
pub(super) fn roll_back(instances: &[Arc<Instance>], deadline: Instant, reason: &str) {
    let mut left: Vec<&Arc<Instance>> = instances.iter().collect();
    let mut deadline = deadline;
    loop {
        left.retain(|instance| !instance.shut(Instant::now(), deadline, reason));
        if left.is_empty() {
            return;
        }
        let state = BackendState::Zombie.as_str();
        tracing::warn!(
            ranks = left.len(),
            state,
            "a rank's instance can't be closed yet after another one's attach failed"
        );
        deadline = Instant::now() + CLOSE_TIME;
        while !left.iter().any(|instance| instance.is_idle()) {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}
