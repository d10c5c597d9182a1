//! A backend behind the guards alone, without a cache: for measuring and testing what they cost.

use std::sync::Arc;

use super::attached::{Attached, CallFault, CallInfo};
use super::guard::cancel::CancelSet;
use super::paged::PagedCall;
use crate::cache::stats::{BackendCounters, CacheCounters, StorageOp};
use crate::plugin::backend::{
    BackendError, ChainInfo, ErrorKind, GuardReport, Held, PageKey, PageStatus, PoolGroup, Restorable, StorageBackend,
};

/// Calls a backend as the cache does: circuit breaker, turns, bandwidth limit, deadline, retries, figures. What the cache adds is the
/// check of seals, which is the caller's here.
pub struct Guarded {
    attached: Attached,
    operation: CancelSet,
    page_bytes: u64,
}

impl Guarded {
    /// Puts the guards around `backend`, whose pages have `page_bytes` bytes.
    pub fn new(backend: Arc<dyn StorageBackend>, page_bytes: u64) -> Self {
        let attached = Attached::new(backend, Arc::new(CacheCounters::default()));
        Guarded { attached, operation: CancelSet::default(), page_bytes }
    }

    /// Which prefixes of `keys` the backend can restore.
    ///
    /// # Errors
    /// When the call failed or was not made.
    pub fn batch_exists(&self, keys: &[PageKey], chain: &ChainInfo<'_>) -> Result<Restorable, BackendError> {
        let info =
            CallInfo { op: StorageOp::Exists, pages: keys.len(), bytes: 0, operation: &self.operation, within: None };
        let result =
            self.attached.call(&info, |backend, options| backend.batch_exists(options, keys, &Held::default(), chain));
        result.map_err(|fault| self.error(fault))
    }

    /// Reads pages. `chain` has the keys of the sequence from its start to the last page, `pages` the host pages of the last of them.
    ///
    /// # Errors
    /// When the call failed or was not made.
    pub fn batch_get(
        &self,
        chain: &[PageKey],
        pages: &[u32],
        session: &str,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.paged(StorageOp::Get, chain, pages, session, status)
    }

    /// Stores pages; arguments as in `batch_get`.
    ///
    /// # Errors
    /// When the call failed or was not made.
    pub fn batch_set(
        &self,
        chain: &[PageKey],
        pages: &[u32],
        session: &str,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.paged(StorageOp::Set, chain, pages, session, status)
    }

    /// What the guards have seen.
    pub fn report(&self) -> GuardReport {
        self.attached.report(None)
    }

    /// Figures of the calls so far.
    pub fn figures(&self) -> &BackendCounters {
        &self.attached.figures
    }

    fn paged(
        &self,
        op: StorageOp,
        chain: &[PageKey],
        pages: &[u32],
        session: &str,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        status.fill(PageStatus::Unset);
        let call = PagedCall {
            op,
            linked: false,
            group: PoolGroup::Full,
            chain,
            pages,
            page_bytes: self.page_bytes,
            session,
            operation: &self.operation,
            within: None,
        };
        self.attached.paged(&call, status, |_| true).result.map_err(|fault| self.error(fault))
    }

    fn error(&self, fault: CallFault) -> BackendError {
        match fault {
            CallFault::Failed(error) => error,
            CallFault::Skipped => self.attached.error(ErrorKind::Unavailable, "it rests and was not called"),
            CallFault::CrowdedOut => self.attached.error(ErrorKind::TimedOut, "other calls left no time for this one"),
            CallFault::CalledOff => self.attached.error(ErrorKind::Cancelled, "called off"),
        }
    }
}
