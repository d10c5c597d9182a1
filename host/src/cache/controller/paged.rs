//! Calls about pages: which of them came, which are tried again, which are in the hands of a late call.

use std::ops::Range;
use std::time::Duration;

use super::attached::{Attached, CallFault, CallInfo, Way};
use super::guard::cancel::CancelSet;
use crate::cache::stats::{StorageOp, StorageResult};
use crate::plugin::backend::{
    BackendError, CallOptions, ChainInfo, ErrorKind, PageKey, PageStatus, PoolGroup, StorageBackend,
};

/// Pages that a call reads or writes.
#[derive(Clone, Copy)]
pub(crate) struct PagedCall<'a> {
    /// `Get` or `Set`.
    pub op: StorageOp,
    /// By the linker face: all pages are stored, or none.
    pub linked: bool,
    /// Whose pages they are.
    pub group: PoolGroup,
    /// Keys of the sequence from its start to the last page of the call.
    pub chain: &'a [PageKey],
    /// Pages of the group's host pool, for the last keys of the chain.
    pub pages: &'a [u32],
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Session, or empty.
    pub session: &'a str,
    /// What the call belongs to.
    pub operation: &'a CancelSet,
    /// Less time than the backend's timeout, so that there is some left to ask another one.
    pub within: Option<Duration>,
}

/// What became of a paged call.
#[derive(Debug)]
pub(crate) struct PagedOutcome {
    /// Of the call.
    pub result: Result<(), CallFault>,
    /// Pages of the call that the backend still uses, because it has not returned.
    pub in_use: Range<usize>,
    /// Whether the backend said of each page what became of it.
    pub answered: bool,
}

impl PagedOutcome {
    /// How page `page` of the call counts, of which the backend said `status`.
    pub fn verdict(&self, page: usize, status: PageStatus) -> StorageResult {
        if self.in_use.contains(&page) {
            return StorageResult::Late;
        }
        match (&self.result, status) {
            (_, PageStatus::Ok) => StorageResult::Ok,
            (_, PageStatus::Missing) => StorageResult::Missing,
            (_, PageStatus::Corrupt) => StorageResult::Corrupt,
            (_, PageStatus::Refused) => StorageResult::Refused,
            // A page that the backend forgot to answer for has failed.
            (Ok(()), PageStatus::Failed | PageStatus::Unset) => StorageResult::Failed,
            (Err(fault), PageStatus::Failed | PageStatus::Unset) => fault_result(fault),
        }
    }

    /// Whether the backend was called at all.
    pub fn was_made(&self) -> bool {
        matches!(&self.result, Ok(()) | Err(CallFault::Failed(_)))
    }
}

/// How a failed call counts for each of its pages.
pub(crate) fn fault_result(fault: &CallFault) -> StorageResult {
    match fault {
        CallFault::Skipped | CallFault::CalledOff => StorageResult::Failed,
        CallFault::CrowdedOut => StorageResult::Late,
        CallFault::Failed(error) => match error.kind {
            ErrorKind::TimedOut => StorageResult::Late,
            ErrorKind::Corrupt => StorageResult::Corrupt,
            ErrorKind::NoSpace => StorageResult::Refused,
            ErrorKind::NotFound => StorageResult::Missing,
            _ => StorageResult::Failed,
        },
    }
}

impl Attached {
    /// Reads or writes pages. A retry asks for those pages alone that have failed. `check` is asked of each page that the backend says it
    /// has read, once nothing of the backend touches it any more; where it says no, the page is corrupt.
    ///
    /// A call that answers well and brings none of its pages has failed, as far as the circuit breaker is concerned.
    pub fn paged(
        &self,
        call: &PagedCall<'_>,
        status: &mut [PageStatus],
        mut check: impl FnMut(usize) -> bool,
    ) -> PagedOutcome {
        let mut in_use = 0..0;
        let mut answered = false;
        let count = call.pages.len();
        let info = CallInfo {
            op: call.op,
            pages: count,
            bytes: call.page_bytes * count as u64,
            operation: call.operation,
            within: call.within,
        };
        let result = if status.len() != count || call.chain.len() < count {
            Err(CallFault::Failed(self.error(ErrorKind::Internal, "pages, keys and statuses do not fit")))
        } else {
            self.call(&info, |backend, options| {
                answered = false;
                let mut from = 0;
                while let Some(run) = next_open(status, from) {
                    from = run.end;
                    let result = part(backend, options, call, run.clone(), &mut status[run.clone()]);
                    if let Err(error) = &result
                        && error.pages_in_use
                    {
                        in_use = run;
                        return result;
                    }
                    for page in run {
                        if call.op == StorageOp::Get && status[page] == PageStatus::Ok && !check(page) {
                            status[page] = PageStatus::Corrupt;
                        }
                    }
                    result?;
                }
                answered = true;
                self.any_good(status)
            })
        };
        let outcome = PagedOutcome { result, in_use, answered };
        if outcome.was_made() {
            let moved =
                (0..count).filter(|&page| outcome.verdict(page, status[page]) == StorageResult::Ok).count() as u64;
            let way = if call.op == StorageOp::Get { Way::Read } else { Way::Write };
            self.give_bandwidth_back(way, (count as u64 - moved) * call.page_bytes);
            self.figures.moved(call.op, moved * call.page_bytes);
            if moved > 0 {
                call.operation.serve();
            }
        }
        outcome
    }

    fn any_good(&self, status: &[PageStatus]) -> Result<(), BackendError> {
        let bad = |status: &PageStatus| !matches!(status, PageStatus::Ok | PageStatus::Missing | PageStatus::Refused);
        if status.is_empty() || !status.iter().all(bad) {
            return Ok(());
        }
        let corrupt = status.iter().filter(|&&status| status == PageStatus::Corrupt).count();
        let kind = if corrupt == status.len() { ErrorKind::Corrupt } else { ErrorKind::Internal };
        let message = format!("none of {} pages came right: {corrupt} were corrupt, the others failed", status.len());
        Err(self.error(kind, &message))
    }
}

/// The next pages in a row, from `from` on, that the backend has not settled.
fn next_open(status: &[PageStatus], from: usize) -> Option<Range<usize>> {
    let open = |status: &PageStatus| matches!(status, PageStatus::Unset | PageStatus::Failed);
    let start = from + status.get(from..)?.iter().position(open)?;
    let length = status[start..].iter().take_while(|status| open(status)).count();
    Some(start..start + length)
}

/// One call for pages in a row.
fn part(
    backend: &dyn StorageBackend,
    options: &CallOptions,
    call: &PagedCall<'_>,
    run: Range<usize>,
    status: &mut [PageStatus],
) -> Result<(), BackendError> {
    let own = call.chain.len() - call.pages.len();
    let (prefix, keys) = (&call.chain[..own + run.start], &call.chain[own + run.start..own + run.end]);
    let pages = &call.pages[run];
    let chain = ChainInfo { position: prefix.len() as u64, prefix_keys: prefix, session_id: call.session };
    if call.op == StorageOp::Get {
        backend.batch_get(options, call.group, keys, pages, &chain, status)
    } else if call.linked {
        backend.offload(options, call.group, keys, pages, &chain, status)
    } else {
        backend.batch_set(options, call.group, keys, pages, &chain, status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_that_are_not_settled_go_again() {
        use PageStatus::{Corrupt, Failed, Missing, Ok, Refused, Unset};
        let status = [Ok, Failed, Unset, Missing, Corrupt, Failed, Refused];
        assert_eq!(next_open(&status, 0), Some(1..3));
        assert_eq!(next_open(&status, 3), Some(5..6));
        assert_eq!(next_open(&status, 6), None);
        assert_eq!(next_open(&status, 9), None);
    }
}
