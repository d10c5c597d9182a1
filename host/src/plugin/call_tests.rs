//! Calls about several pools: what a backend is asked, and what its answers count for.

use std::ffi::c_void;
use std::sync::Mutex;

use kvdock_plugin_api::HitPolicy;
use kvdock_plugin_api::v0_1::{CapabilitiesOut, HealthOut, OpenArgs, PoolDesc, Stats, Status};

use super::super::backend::PoolHit;
use super::*;

/// A backend that writes down what it is asked, and answers that all is well.
#[derive(Debug, Default)]
struct Listener {
    /// For each transfer its pool, number of keys and first page.
    transfers: Mutex<Vec<(u32, u64, u32)>>,
    /// For each pool of an exists its number, policy, trailing pages and held pages.
    queries: Mutex<Vec<(u32, u32, u32, u32)>>,
}

impl Listener {
    unsafe fn hear(&self, args: *const BatchArgs) -> Status {
        // SAFETY: the arguments are those of a call that runs.
        let transfers = unsafe { std::slice::from_raw_parts((*args).transfers, (*args).transfer_count as usize) };
        for transfer in transfers {
            // SAFETY: as above; there is a status a key.
            unsafe {
                let page = if transfer.pages.is_null() { u32::MAX } else { *transfer.pages };
                self.transfers.lock().unwrap().push((transfer.pool, transfer.count, page));
                transfer.statuses.write_bytes(PageStatus::Ok.raw(), transfer.count as usize);
            }
        }
        0
    }
}

impl Face for Listener {
    unsafe fn open(&self, _: *const OpenArgs, _: *mut *mut c_void, _: *mut ErrorOut) -> Status {
        1
    }
    unsafe fn capabilities(&self, _: RawInstance, _: *mut CapabilitiesOut, _: *mut ErrorOut) -> Status {
        1
    }
    unsafe fn register_mem_pool_host(
        &self,
        _: RawInstance,
        _: *const CallContext,
        _: *const PoolDesc,
        _: *mut ErrorOut,
    ) -> Status {
        1
    }
    unsafe fn register_v2_side_pools(
        &self,
        _: RawInstance,
        _: *const CallContext,
        _: *const PoolDesc,
        _: u64,
        _: *mut ErrorOut,
    ) -> Status {
        1
    }
    unsafe fn pools_ready(&self, _: RawInstance, _: *const CallContext, _: *mut ErrorOut) -> Status {
        1
    }
    unsafe fn batch_exists(&self, _: RawInstance, args: *const ExistsArgs, _: *mut ErrorOut) -> Status {
        // SAFETY: the arguments are those of a call that runs.
        let queries = unsafe { std::slice::from_raw_parts((*args).pools, (*args).pool_count as usize) };
        let told = queries.iter().map(|query| (query.pool, query.hit_policy, query.trailing_pages, query.held_pages));
        self.queries.lock().unwrap().extend(told);
        0
    }
    unsafe fn batch_get(&self, _: RawInstance, args: *const BatchArgs, _: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { self.hear(args) }
    }
    unsafe fn batch_set(&self, _: RawInstance, args: *const BatchArgs, _: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { self.hear(args) }
    }
    unsafe fn batch_remove(&self, _: RawInstance, args: *const BatchArgs, _: *mut ErrorOut) -> Status {
        // SAFETY: the caller's promise.
        unsafe { self.hear(args) }
    }
    unsafe fn clear(&self, _: RawInstance, _: *const CallContext, _: u32, _: *mut ErrorOut) -> Status {
        1
    }
    unsafe fn stats(&self, _: RawInstance, _: *const CallContext, _: *mut Stats, _: *mut ErrorOut) -> Status {
        1
    }
    unsafe fn health(&self, _: RawInstance, _: *const CallContext, _: *mut HealthOut, _: *mut ErrorOut) -> Status {
        1
    }
    unsafe fn flush(&self, _: RawInstance, _: *const CallContext, _: *mut ErrorOut) -> Status {
        1
    }
    unsafe fn close(&self, _: RawInstance, _: *const CallContext, _: *mut ErrorOut) -> Status {
        1
    }
}

fn registered(pool: u32, group: PoolGroup, hit: PoolHit) -> Registered {
    Registered { pool, group, hit }
}

/// A logical anchor with rows beside it, a window with a ring.
fn pools() -> [Registered; 4] {
    use PoolGroup::{Full, Window};
    [
        registered(0, Full, PoolHit::AllPages),
        registered(1, Full, PoolHit::AllPages),
        registered(2, Window, PoolHit::TrailingPages(3)),
        registered(3, Window, PoolHit::TrailingPages(1)),
    ]
}

fn call(operation: Operation, group: Option<PoolGroup>) -> (Result<(), CallFailure>, Listener, CallBuffers) {
    let listener = Listener::default();
    let mut buffers =
        CallBuffers { group, keys: vec![[7; 32]; 2], pages: vec![5, 6], held: [9, 0, 0], ..CallBuffers::default() };
    let result = buffers.run(operation, &listener, RawInstance(std::ptr::null_mut()), &pools());
    (result, listener, buffers)
}

#[test]
fn p02_one_call_names_all_pools_of_a_group_the_anchor_last() {
    for operation in [Operation::Set, Operation::Get] {
        let (result, listener, buffers) = call(operation, Some(PoolGroup::Full));
        assert_eq!(result, Ok(()));
        assert_eq!(
            *listener.transfers.lock().unwrap(),
            [(1, 2, 5), (0, 2, 5)],
            "markers go with the pages, in one call"
        );
        assert_eq!((buffers.status(0), buffers.status(1)), (PageStatus::Ok, PageStatus::Ok));
    }
    let (_, listener, _) = call(Operation::Exists, None);
    let (all, trailing) = (HitPolicy::AllPages.raw(), HitPolicy::TrailingPages.raw());
    let expected = [(0, all, 0, 9), (1, all, 0, 9), (2, trailing, 3, 0), (3, trailing, 1, 0)];
    assert_eq!(*listener.queries.lock().unwrap(), expected, "what shares the anchor's numbers is needed in full");
}

#[test]
fn p03_windows_go_without_their_anchor_only_where_they_are_named() {
    let (result, listener, _) = call(Operation::Get, Some(PoolGroup::Window));
    assert_eq!(result, Ok(()));
    assert_eq!(*listener.transfers.lock().unwrap(), [(3, 2, 5), (2, 2, 5)]);
    let (result, listener, buffers) = call(Operation::Set, Some(PoolGroup::State));
    let failure = result.unwrap_err();
    assert_eq!((failure.kind, failure.retryable), (ErrorKind::Internal, false), "a pool that is not registered");
    assert!(failure.message.contains("state"), "{}", failure.message);
    assert!(listener.transfers.lock().unwrap().is_empty() && buffers.status(0) == PageStatus::Failed);
}

#[test]
fn a_page_counts_as_in_the_pool_in_which_it_is_worst() {
    use PageStatus::{Corrupt, Failed, Missing, Ok, Refused, Unset};
    let pools = [[Ok, Ok, Missing, Refused, Ok], [Ok, Missing, Corrupt, Ok, Unset]];
    let buffers = CallBuffers {
        keys: vec![[0; 32]; 5],
        statuses: pools.concat().into_iter().map(PageStatus::raw).collect(),
        ..CallBuffers::default()
    };
    let found: Vec<PageStatus> = (0..5).map(|key| buffers.status(key)).collect();
    assert_eq!(found, [Ok, Missing, Corrupt, Refused, Failed]);
    let full = |pool| registered(pool, PoolGroup::Full, PoolHit::AllPages);
    let there: Vec<bool> = (0..5).map(|key| buffers.present(&[full(0), full(1)], PoolGroup::Full, key)).collect();
    assert_eq!(there, [true, false, false, false, false]);
    assert!(!buffers.present(&[full(0), full(1)], PoolGroup::State, 0), "a group without pools has nothing");
}
