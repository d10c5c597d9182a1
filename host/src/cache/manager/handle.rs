//! The storage tier's switch.

use std::sync::Arc;
use std::time::Duration;

use crate::cache::config::PolicyUpdate;
use crate::cache::controller::{Event, Shared};
use crate::cache::pool::{DeviceMemory, DirectPool};
use crate::plugin::backend::{DevicePools, GuardReport, HostPoolDescription, Place, StorageBackend};

/// The storage tier's switch, for threads other than the scheduler's. Clones share one switch.
/// Everything here may be called at any time, also under load; no request fails because of it.
#[derive(Clone)]
pub struct StorageHandle {
    shared: Option<Arc<Shared>>,
}

impl StorageHandle {
    pub(super) fn new(shared: Option<Arc<Shared>>) -> Self {
        StorageHandle { shared }
    }

    /// What a backend needs to know of the host pools (of the first rank) before it is attached, the anchor first. None of them without a host tier; then
    /// there can be no storage tier.
    pub fn host_pools(&self) -> Vec<HostPoolDescription> {
        let Some(shared) = &self.shared else { return Vec::new() };
        self.pools_of(shared, 0)
    }

    /// The host pools of every rank, which a backend registers with an instance each.
    pub fn rank_pools(&self) -> Vec<Vec<HostPoolDescription>> {
        let Some(shared) = &self.shared else { return Vec::new() };
        (0..shared.host.ranks()).map(|rank| self.pools_of(shared, rank)).collect()
    }

    fn pools_of(&self, shared: &Shared, rank: usize) -> Vec<HostPoolDescription> {
        shared.hosts().iter().flat_map(|(_, host)| host.descriptions(rank).cloned()).collect()
    }

    /// The device's pools themselves, for backends that take its memory; none where pages go by way of the host.
    pub fn device_pools(&self) -> Option<DevicePools> {
        let shared = self.shared.as_ref()?;
        let pools = shared.direct.as_ref()?.0.iter().flatten();
        let descriptions = pools.flat_map(DirectPool::descriptions).cloned().collect();
        let beside = shared.beside.iter().flatten().map(|(device, _)| device.clone());
        let keep: Vec<DeviceMemory> = std::iter::once(shared.device.clone()).chain(beside).collect();
        Some(DevicePools { descriptions, keep: Arc::new(keep) })
    }

    /// Puts an opened and registered backend to use, in the same step in which the one whose place it takes leaves. Pages that the
    /// host pool holds are offered to it.
    pub fn attached(&self, backend: Arc<dyn StorageBackend>, place: Place) {
        match &self.shared {
            Some(shared) => {
                shared.registry.attach(backend, &place);
                shared.send(Event::StorageChanged);
            }
            None => tracing::error!(
                backend = backend.name(),
                "a storage backend needs a host pool (cache.host_tokens); it is not used"
            ),
        }
    }

    /// Stops using the backend of this name: no new call is made; running ones may return, and their pages come back
    /// when they do. False if there is none.
    pub fn detached(&self, name: &str) -> bool {
        let Some(shared) = &self.shared else { return false };
        let known = shared.registry.detach(name);
        if known {
            shared.send(Event::StorageChanged);
        }
        known
    }

    /// Waits until no call into a backend detached or replaced under this name is running. False if `timeout`
    /// passed first.
    pub fn quiesced(&self, name: &str, timeout: Duration) -> bool {
        self.shared.as_ref().is_none_or(|shared| shared.registry.quiesced(name, timeout))
    }

    /// Says that the store behind this name was emptied: nothing is believed to be stored there any more.
    pub fn emptied(&self, name: &str) {
        if let Some(shared) = &self.shared {
            shared.registry.emptied(name);
            shared.send(Event::StorageChanged);
        }
    }

    /// Changes policies for everything that begins from now on. Without a host pool there is nothing to change.
    pub fn update_policies(&self, update: PolicyUpdate) {
        if let Some(shared) = &self.shared {
            shared.send(Event::Policies(update));
        }
    }

    /// What the guards around a backend have seen. None if there is none of this name.
    pub fn guards(&self, name: &str) -> Option<GuardReport> {
        let shared = self.shared.as_ref()?;
        let current = shared.registry.current();
        let attached = current.iter().find(|attached| attached.name() == name)?;
        let token_bytes = shared.host.page_bytes() as f64 / shared.page_size as f64;
        Some(attached.report(attached.speed.report(shared.prefill.rate(), token_bytes)))
    }

    /// Names of the attached backends, in order.
    pub fn names(&self) -> Vec<String> {
        self.shared
            .as_ref()
            .map(|shared| shared.registry.current().iter().map(|attached| attached.name().to_owned()).collect())
            .unwrap_or_default()
    }
}
