//! Pages that go straight between device pools and the store, layer by layer.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{LayerDone, Offload, PageStatus, PoolRole, Ready, Result, Start, Transfer};

use super::Store;
use super::items::Use;
use super::session::Session;
use crate::limit::Limit;
use crate::member::error_of;
use crate::rpc::RpcError;

/// How often it is looked whether pages may be touched.
const LOOK: Duration = Duration::from_millis(1);
/// Time of a load for which the host sets none.
const LOAD_TIME: Duration = Duration::from_secs(600);
/// Time of an operation that may take for ever.
const FOR_EVER: Duration = Duration::from_secs(365 * 86_400);

/// Waits until every sign says that pages may be touched.
fn wait(ready: &[Ready], limit: &Limit<'_>) -> Result<()> {
    for ready in ready {
        while !ready.is_set()? {
            let left = limit.left().map_err(|stop| error_of(&RpcError::stopped(stop)))?;
            std::thread::sleep(LOOK.min(left));
        }
    }
    limit.left().map(drop).map_err(|stop| error_of(&RpcError::stopped(stop)))
}

impl Store {
    /// Loads the pages of a batch, layer by layer, and says of each layer when it is settled.
    ///
    /// # Errors
    /// Why pages were not loaded, where that is no matter of single ones. Each page has its status in any case.
    pub fn load(&self, transfers: &[Transfer<'static>], start: &Start, stop: &AtomicBool) -> Result<()> {
        let began = Instant::now();
        let limit = Limit::of(&start.call, LOAD_TIME).stopped_by(stop);
        let result = wait(&start.ready, &limit).and_then(|()| self.load_layers(transfers, &start.done, &limit));
        if result.is_err() {
            fail_rest(transfers);
        }
        start.done.settle_all();
        self.figures.get_done(began, result.is_ok());
        result
    }

    fn load_layers(&self, transfers: &[Transfer<'static>], done: &LayerDone, limit: &Limit<'_>) -> Result<()> {
        let items = self.items(transfers, Use::Layers(done.layers()))?;
        let mut session = Session::start(self, &items, limit)?;
        for step in 0..items.steps {
            if !session.is_over() {
                session.read_step(step, limit);
            }
            done.settle(step);
        }
        session.end(limit);
        items.settle_rest(PageStatus::Failed);
        match limit.left() {
            Err(stop) if items.list.iter().any(|item| item.status() == PageStatus::Failed) => {
                Err(error_of(&RpcError::stopped(stop)))
            }
            _ => Ok(()),
        }
    }

    /// Stores the pages of an offload: all of them or none.
    ///
    /// # Errors
    /// Why none was stored. Each page has its status in any case.
    pub fn offload(&self, offload: &Offload, stop: &AtomicBool) -> Result<()> {
        let began = Instant::now();
        let time = match offload.deadline_ns {
            0 => FOR_EVER,
            deadline => Duration::from_nanos(deadline.saturating_sub(kvdock_plugin_api::monotonic_ns())),
        };
        let limit = Limit::within(time).stopped_by(stop);
        let mut transfers = offload.transfers().to_vec();
        // A prefix is looked for by its anchor, so that comes last.
        transfers.sort_by_key(|transfer| transfer.pool().role() == PoolRole::Anchor);
        let result = wait(&offload.ready, &limit).and_then(|()| {
            let items = self.items(&transfers, Use::Write)?;
            let stored = self.set_together(&items, &limit);
            items.settle_rest(PageStatus::Failed);
            stored
        });
        if result.is_err() {
            fail_rest(&transfers);
        }
        self.figures.set_done(began, result.is_ok());
        result
    }
}

/// Gives pages without a status one.
pub fn fail_rest(transfers: &[Transfer<'_>]) {
    for transfer in transfers {
        for index in (0..transfer.len()).filter(|index| transfer.status(*index) == PageStatus::Unset) {
            transfer.finish(index, PageStatus::Failed);
        }
    }
}
