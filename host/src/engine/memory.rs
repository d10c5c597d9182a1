//! The device memory that a model computes over, and the slots of those who run.

use std::sync::Arc;

use kvdock_kernels::KvPool;
use kvdock_models::{ModelError, PageSource, PoolKind, PoolSet};
use parking_lot::Mutex;

/// The device memory that a model computes over.
#[derive(Clone)]
pub enum ModelMemory {
    /// One pool of keys and values, for [`kvdock_models::Model::forward`].
    One(Arc<dyn KvPool>),
    /// The pools that the model declares, for [`kvdock_models::Model::forward_pools`].
    Pools(Arc<PoolSet>),
}

impl From<Arc<dyn KvPool>> for ModelMemory {
    fn from(pool: Arc<dyn KvPool>) -> Self {
        ModelMemory::One(pool)
    }
}

impl ModelMemory {
    /// Whether some of its pools are addressed like this.
    pub(super) fn has(&self, source: PageSource) -> bool {
        match self {
            ModelMemory::One(_) => source == PageSource::Anchor,
            ModelMemory::Pools(pools) => pools.decls().iter().any(|decl| decl.source == source),
        }
    }

    /// Whether a prefix needs a recurrent state to be gone on from.
    pub(super) fn is_recurrent(&self) -> bool {
        match self {
            ModelMemory::One(_) => false,
            ModelMemory::Pools(pools) => pools.decls().iter().any(|decl| decl.kind == PoolKind::Recurrent),
        }
    }

    /// Whether a pass that was given up leaves something behind that the same pass, run again, would not overwrite before it is read.
    pub(super) fn is_stateful(&self) -> bool {
        match self {
            ModelMemory::One(_) => false,
            ModelMemory::Pools(pools) => pools.is_stateful(),
        }
    }

    /// Copies what a slot holds of one layer to another one.
    pub(super) fn copy_slot_layer(&self, from: u32, to: u32, layer: usize) -> Result<(), ModelError> {
        match self {
            ModelMemory::One(_) => Ok(()),
            ModelMemory::Pools(pools) => pools.copy_slot_layer(from, to, layer),
        }
    }

    /// Copies what a slot holds to another one.
    pub(super) fn copy_slot(&self, from: u32, to: u32) -> Result<(), ModelError> {
        match self {
            ModelMemory::One(_) => Ok(()),
            ModelMemory::Pools(pools) => pools.copy_slot(from, to),
        }
    }

    /// Slots for `running` samples: the first ones.
    pub(super) fn slots(&self, running: usize) -> Slots {
        let count = match self {
            ModelMemory::Pools(pools) if self.has(PageSource::Slot) => pools.sizes().slots.min(running),
            _ => 0,
        };
        Slots(Arc::new(Mutex::new((0..u32::try_from(count).unwrap_or(u32::MAX)).rev().collect())))
    }
}

/// Slots that nobody has.
#[derive(Clone)]
pub(super) struct Slots(Arc<Mutex<Vec<u32>>>);

impl Slots {
    /// A slot for a sample that runs. None if all are taken.
    pub fn take(&self) -> Option<Slot> {
        let number = self.0.lock().pop()?;
        Some(Slot { number, slots: self.clone() })
    }
}

/// A slot of one sample. It is free again when this is dropped.
pub(super) struct Slot {
    number: u32,
    slots: Slots,
}

impl Slot {
    /// Its number.
    pub fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.0.lock().push(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_one_samples_until_it_is_dropped() {
        let slots = Slots(Arc::new(Mutex::new(vec![1, 0])));
        let (first, second) = (slots.take().unwrap(), slots.take().unwrap());
        assert_eq!((first.number(), second.number()), (0, 1));
        assert!(slots.take().is_none());
        drop(first);
        assert_eq!(slots.take().map(|slot| slot.number()), Some(0));
    }
}
