//! What waits for storage holds up nobody else.

use std::sync::atomic::Ordering;

use parking_lot::Condvar;

use super::*;
use crate::cache::PrefetchPolicy;
use crate::plugin::backend::{
    BackendError, BackendLimits, BackendSettings, BackendStats, CallOptions, ChainInfo, Held, PageKey, PageStatus,
    Place, PoolGroup, Restorable, StorageBackend,
};

/// A store that answers no question until its gate is opened, and then that it has nothing.
#[derive(Default)]
struct Gated {
    open: Mutex<bool>,
    opened: Condvar,
    settings: BackendSettings,
}

impl Gated {
    fn open(&self) {
        *self.open.lock() = true;
        self.opened.notify_all();
    }
}

impl StorageBackend for Gated {
    fn name(&self) -> &str {
        "gated"
    }

    fn generation(&self) -> u64 {
        1
    }

    fn limits(&self) -> BackendLimits {
        BackendLimits { preferred_batch: 32, concurrency: 2, remove: false, durable: false }
    }

    fn settings(&self) -> &BackendSettings {
        &self.settings
    }

    fn batch_exists(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        _: &Held,
        _: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError> {
        let mut open = self.open.lock();
        while !*open && !options.is_cancelled() {
            self.opened.wait_for(&mut open, Duration::from_millis(5));
        }
        Ok(Restorable::none(keys.len()))
    }

    fn batch_get(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        _: &[u32],
        _: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        status.fill(PageStatus::Missing);
        Ok(())
    }

    fn batch_set(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        _: &[u32],
        _: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        status.fill(PageStatus::Ok);
        Ok(())
    }

    fn batch_remove(
        &self,
        _: &CallOptions,
        _: PoolGroup,
        _: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        status.fill(PageStatus::Ok);
        Ok(())
    }

    fn flush(&self, _: &CallOptions) -> Result<(), BackendError> {
        Ok(())
    }

    fn clear(&self, _: &CallOptions) -> Result<(), BackendError> {
        Ok(())
    }

    fn stats(&self) -> Result<BackendStats, BackendError> {
        Ok(BackendStats::default())
    }

    fn reclaim(&self, _: PoolGroup) -> Vec<u32> {
        Vec::new()
    }

    fn quarantined(&self) -> usize {
        0
    }
}

fn start() -> (Rig, Arc<Gated>) {
    let cache = CacheConfig {
        host_pages: 200,
        prefetch_policy: PrefetchPolicy::WaitComplete,
        prefetch_threshold: 100,
        ..CacheConfig::default()
    };
    let rig = Setup { cache, ..Setup::default() }.start();
    let gated = Arc::new(Gated::default());
    rig.handle.storage().attached(gated.clone(), Place::At(0));
    (rig, gated)
}

#[test]
fn others_pass_a_request_that_waits_for_storage() {
    let (rig, gated) = start();
    let long = rig.submit(request("long", prompt(1, 300), 4));
    let passing = rig.run(request("short", prompt(2, 20), 4));
    assert_eq!(passing.token_ids.len(), 4);
    rig.wait_for("the long one to wait alone", |s| (s.running, s.queued) == (0, 1));
    let passes = rig.log.passes.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(rig.log.passes.load(Ordering::Relaxed), passes);
    gated.open();
    assert_eq!(long.blocking_collect().remove(0).token_ids.len(), 4);
    rig.assert_idle();
}

#[test]
fn a_request_that_waits_for_storage_can_be_aborted() {
    let (rig, gated) = start();
    let aborted = rig.submit(request("aborted", prompt(1, 300), 4));
    let dropped = rig.submit(request("dropped", prompt(2, 300), 4));
    rig.wait_for("both to wait", |s| s.queued == 2);
    drop(dropped);
    assert!(block_on(rig.handle.abort("aborted")));
    let completion = aborted.blocking_collect().remove(0);
    assert!(matches!(completion.reason, FinishReason::Abort { kind: AbortKind::Requested, .. }));
    rig.wait_for("both to leave", |s| s.queued == 0);
    gated.open();
    rig.assert_idle();
}
