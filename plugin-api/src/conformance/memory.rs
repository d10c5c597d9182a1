//! Rules of memory: what a call may touch, and until when.

use std::ffi::c_void;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

use super::bench::Bench;
use super::data::{expect, keys, plain_pool, put};
use super::store::{SOURCES, Store};
use super::{Check, Rule, fail};
use crate::mock::{MockPool, Options, Part, PoolSpec};
use crate::v0_1::{BatchArgs, CallContext, ExistsArgs, PageKey, PoolQuery, PoolTransfer};

pub(super) const RULES: &[Rule] = &[
    Rule::new("memory.neighbours", "3", "a get writes the pages that it names, and nothing beside them", &[neighbours]),
    Rule::new(SOURCES, "3", "a call leaves alone what it reads from: pages of a set, keys, page indices", &[sources]),
    Rule::new(
        "memory.after_return",
        "3",
        "when a call has returned, no page of it is written or read again",
        &[after_return],
    ),
    Rule::new(
        "memory.arguments_after_return",
        "3",
        "when a call has returned, its keys, statuses, texts and cancel flag are not touched again",
        &[arguments_after_return],
    )
    .alone(),
    Rule::new(
        "memory.after_close",
        "3",
        "when close has returned, no memory of the pools is touched again",
        &[after_close],
    )
    .alone(),
];

/// How long a thread that goes on after a call has time to show itself.
const WHILE: Duration = Duration::from_millis(250);

fn neighbours(bench: &Bench) -> Check {
    let pools = [
        MockPool::new(PoolSpec { gap: 40, ..PoolSpec::bytes(0, "kv", 16, &[384, 640]).with_seal(64) }),
        MockPool::new(PoolSpec::bytes(1, "odd", 16, &[1021, 77])),
    ];
    let store = bench.attach(&pools.iter().collect::<Vec<_>>())?;
    for pool in &pools {
        (0..16).for_each(|page| pool.fill(page, 500 + u64::from(page)));
        put(&store, pool, &[(1, 0, 1), (2, 1, 2), (3, 2, 3)])?;
    }
    let others: Vec<_> = pools.iter().map(MockPool::snapshot).collect();
    for (index, pool) in pools.iter().enumerate() {
        let places = [4, 9, 15];
        store.get(&Options::default(), &[Part::new(pool, &keys([1, 2, 3]), &places)])?;
        // One missing page between two that are there.
        store.get(&Options::default(), &[Part::new(pool, &keys([1, 77, 3]), &[5, 6, 7])])?;
        for (other, (pool, before)) in pools.iter().zip(&others).enumerate() {
            let except: &[u32] = if other <= index { &[4, 5, 7, 9, 15] } else { &[] };
            if let Some(seen) = pool.difference(before, except) {
                return fail("a get writes the pages that it names, and nothing else", seen);
            }
        }
    }
    store.close()
}

fn sources(bench: &Bench) -> Check {
    let pool = MockPool::new(PoolSpec { gap: 24, ..PoolSpec::bytes(0, "kv", 16, &[1021, 640]).with_seal(64) });
    let store = bench.attach(&[&pool])?;
    (0..16).for_each(|page| pool.fill(page, u64::from(page)));
    let before = pool.snapshot();
    for pages in [0..8u32, 0..16] {
        let numbers = pages.clone().map(u64::from);
        store.set(&Options::default(), &[Part::new(&pool, &keys(numbers), &pages.collect::<Vec<_>>())])?;
        if let Some(seen) = pool.difference(&before, &[]) {
            return fail("a set leaves its pages as they are", seen);
        }
    }
    let _ = store.exists(&Options::default(), &keys(0..16), &[crate::mock::Query::of(&pool)])?;
    store.remove(&Options::default(), &[Part::new(&pool, &keys(0..4), &[0, 1, 2, 3])])?;
    if let Some(seen) = pool.difference(&before, &[]) {
        return fail("batch_exists and batch_remove leave the pages as they are", seen);
    }
    store.close()
}

fn after_return(bench: &Bench) -> Check {
    let pool = plain_pool(64);
    let store = bench.attach(&[&pool])?;
    put(&store, &pool, &(0..8).map(|page| (u64::from(page), page, u64::from(page))).collect::<Vec<_>>())?;
    let flag = AtomicU32::new(1);
    let kinds = [
        Options::default(),
        Options { deadline: Some(Duration::ZERO), ..Options::default() },
        Options { cancel: Some(&flag), ..Options::default() },
    ];
    for (turn, options) in kinds.iter().enumerate() {
        let turn = turn as u64;
        store.get(options, &[Part::new(&pool, &keys(0..8), &(8..16).collect::<Vec<_>>())])?;
        let numbers = 100 * (turn + 1)..100 * (turn + 1) + 8;
        (16..24).for_each(|page| pool.fill(page, 1000 * (turn + 1) + u64::from(page)));
        let set = store.set(options, &[Part::new(&pool, &keys(numbers.clone()), &(16..24).collect::<Vec<_>>())])?;
        // The pages are the host's again: it gives them to others, who write them.
        (8..24).for_each(|page| pool.fill(page, 7777 + u64::from(page)));
        let before = pool.snapshot();
        std::thread::sleep(WHILE);
        if let Some(seen) = pool.difference(&before, &[]) {
            return fail("nothing writes pages of a call that has returned", seen);
        }
        read_back(&store, &pool, numbers, 1000 * (turn + 1) + 16, &set.statuses[0])?;
    }
    store.close()
}

/// What a set has stored, if it has, is what its pages held until it returned.
fn read_back(
    store: &Store,
    pool: &MockPool,
    numbers: std::ops::Range<u64>,
    seeds: u64,
    said: &[crate::PageStatus],
) -> Check {
    let got = store.get(&Options::default(), &[Part::new(pool, &keys(numbers), &(40..48).collect::<Vec<_>>())])?;
    for (page, (status, said)) in got.statuses[0].iter().zip(said).enumerate() {
        let (there, right) = (*status == crate::PageStatus::Ok, pool.holds(40 + page as u32, seeds + page as u64));
        if there && !right {
            let seen = format!("page {page}, of which the set said {said}, has other bytes than its source had then");
            return fail("a page of a set is read before the call returns, and not later", seen);
        }
    }
    Ok(())
}

/// Memory of the host for one call. When the call has returned nobody may touch it: it is closed then, and an access ends the process.
struct Arena {
    base: *mut c_void,
    len: usize,
    used: usize,
}

impl Arena {
    fn new() -> Check<Arena> {
        let len = 1 << 16;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        base.map(|base| Arena { base, len, used: 0 }).or_else(|error| fail("memory for a call", error.to_string()))
    }

    /// A place for values, filled with them.
    fn put<T: Copy>(&mut self, values: &[T]) -> *mut T {
        let offset = self.used.next_multiple_of(64);
        self.used = offset + std::mem::size_of_val(values);
        assert!(self.used <= self.len, "the arguments of a call fit");
        // SAFETY: the place lies in the mapping, is aligned, and is nobody else's.
        unsafe {
            let place = self.base.byte_add(offset).cast::<T>();
            std::ptr::copy_nonoverlapping(values.as_ptr(), place, values.len());
            place
        }
    }

    /// Nobody may touch it from here on. It is never given back, so that no other memory takes its place.
    fn close(self) -> Check {
        // SAFETY: the mapping is this arena's; by the rules of the boundary nobody looks at it any more.
        unsafe { mprotect(self.base, self.len, MprotectFlags::empty()) }
            .or_else(|error| fail("closing the memory of a call", error.to_string()))
    }
}

fn context(arena: &mut Arena, late: bool) -> CallContext {
    let cancel = arena.put(&[u32::from(late)]);
    let deadline_ns = if late { 1 } else { crate::monotonic_ns() + 30_000_000_000 };
    CallContext { deadline_ns, cancel, trace_id: 1 }
}

fn batch_in(arena: &mut Arena, pool: &MockPool, numbers: std::ops::Range<u64>, late: bool) -> *const BatchArgs {
    let chain: Vec<PageKey> = keys(numbers);
    let pages: Vec<u32> = (0..chain.len() as u32).collect();
    let prefix = arena.put(&keys(9000..9002));
    let session = arena.put(b"a session");
    let transfer = PoolTransfer {
        pool: pool.id(),
        layer_first: 0,
        layer_count: 0,
        chain_offset: 0,
        keys: arena.put(&chain),
        pages: arena.put(&pages),
        count: chain.len() as u64,
        statuses: arena.put(&vec![0u8; chain.len()]),
    };
    let args = BatchArgs {
        context: context(arena, late),
        transfers: arena.put(&[transfer]),
        transfer_count: 1,
        chain_position: 2,
        prefix_keys: prefix,
        prefix_key_count: 2,
        session_id: crate::v0_1::Bytes { ptr: session, len: 9 },
    };
    arena.put(&[args])
}

fn exists_in(arena: &mut Arena, pool: &MockPool, numbers: std::ops::Range<u64>, late: bool) -> *const ExistsArgs {
    let chain = keys(numbers);
    let query: PoolQuery = crate::mock::Query::of(pool).raw;
    let args = ExistsArgs {
        context: context(arena, late),
        keys: arena.put(&chain),
        key_count: chain.len() as u64,
        pools: arena.put(&[query]),
        pool_count: 1,
        chain_position: 0,
        prefix_keys: std::ptr::null(),
        prefix_key_count: 0,
        request: 0,
        restorable: arena.put(&vec![0u8; chain.len() + 1]),
        present: arena.put(&vec![0u8; chain.len()]),
    };
    arena.put(&[args])
}

fn arguments_after_return(bench: &Bench) -> Check {
    let pool = plain_pool(64);
    let store = bench.attach(&[&pool])?;
    (0..32).for_each(|page| pool.fill(page, u64::from(page)));
    let (table, this, time) = (store.table, store.this, store.watch.limits.call);
    for late in [false, true] {
        for turn in 0..3 {
            let mut arena = Arena::new()?;
            let args = batch_in(&mut arena, &pool, 0..16, late);
            let _ = match turn {
                0 => store.watch.call("batch_set", time, |error| {
                    // SAFETY: everything in the arguments lives in the arena, which is open until the call has returned.
                    unsafe { (table.batch_set)(this, args, error) }
                })?,
                1 => store.watch.call("batch_get", time, |error| {
                    // SAFETY: as above.
                    unsafe { (table.batch_get)(this, args, error) }
                })?,
                _ => {
                    let args = exists_in(&mut arena, &pool, 0..16, late);
                    store.watch.call("batch_exists", time, |error| {
                        // SAFETY: as above.
                        unsafe { (table.batch_exists)(this, args, error) }
                    })?
                }
            };
            arena.close()?;
        }
        std::thread::sleep(WHILE);
    }
    expect(&store, &pool, &[(3, 40, Some(3))])?;
    store.close()
}

fn after_close(bench: &Bench) -> Check {
    for round in 0..2u64 {
        // When this is dropped the memory of the pool is not mapped any more: an access ends the process.
        let pool = plain_pool(64);
        let store = bench.attach(&[&pool])?;
        let pages: Vec<_> = (0..64).map(|page| (64 * round + u64::from(page), page, u64::from(page))).collect();
        put(&store, &pool, &pages)?;
        store.get(&Options::default(), &[Part::new(&pool, &keys(0..32), &(0..32).collect::<Vec<_>>())])?;
        store.close()?;
    }
    std::thread::sleep(WHILE);
    Ok(())
}
