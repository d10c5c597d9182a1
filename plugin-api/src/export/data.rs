//! Data calls.

use std::ffi::c_void;
use std::marker::PhantomData;

use super::{Instance, Use, guard, instance};
use crate::backend::Backend;
use crate::batch::{Batch, Transfer};
use crate::call::{Call, Chain};
use crate::exists::{Exists, PoolQuery, PresentMap};
use crate::raw;
use crate::v0_1::{BatchArgs, ErrorOut, ExistsArgs, Status};
use crate::{Error, ErrorKind, HitPolicy, Result};

/// Builds the safe form of an exists call, runs it and settles the answer.
///
/// # Safety
/// `this` is an open instance of `B`, `args` is valid by the rules of [`ExistsArgs`].
pub(super) unsafe fn exists<B: Backend>(
    this: *mut c_void,
    args: *const ExistsArgs,
    run: impl FnOnce(&B, &mut Exists<'_>) -> Result<()>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let instance = unsafe { instance::<B>(this) }?;
    // SAFETY: the caller's promise.
    let args = unsafe { args.as_ref() }.ok_or_else(|| Error::new(ErrorKind::Internal, "exists without arguments"))?;
    // SAFETY: everything in `args` is valid for the call; the out arrays are ours alone.
    let (keys, queries, restorable, prefix_keys) = unsafe {
        (
            raw::slice(args.keys, args.key_count),
            raw::slice(args.pools, args.pool_count),
            raw::slice_mut(args.restorable, args.key_count + 1),
            raw::slice(args.prefix_keys, args.prefix_key_count),
        )
    };
    if restorable.is_empty() {
        return Err(Error::new(ErrorKind::Internal, "exists without room for the answer"));
    }
    let present_len = args.pool_count * args.key_count;
    let present = if args.present.is_null() {
        PresentMap::Own(vec![0; present_len as usize])
    } else {
        // SAFETY: as above.
        PresentMap::Host(unsafe { raw::slice_mut(args.present, present_len) })
    };
    let queries = queries
        .iter()
        .map(|query| {
            let hit_policy = HitPolicy::try_from_raw(query.hit_policy)
                .filter(|policy| *policy != HitPolicy::Unknown)
                .ok_or_else(|| {
                Error::new(
                    ErrorKind::Unsupported,
                    format!("pool {}: hit policy {} is not known to this version", query.pool, query.hit_policy),
                )
            })?;
            Ok(PoolQuery {
                pool: instance.pool(query.pool)?,
                hit_policy,
                trailing_pages: query.trailing_pages as usize,
                block_pages: query.block_pages as usize,
                group_pages: query.group_pages as usize,
                held_pages: query.held_pages as usize,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let mut exists = Exists {
        // SAFETY: the context is valid for the call.
        call: unsafe { Call::from_raw(&args.context) },
        chain: Chain { position: args.chain_position, prefix_keys, session_id: "" },
        request: args.request,
        keys,
        queries,
        present,
        restorable,
        answered: false,
    };
    run(&instance.backend, &mut exists)?;
    exists.settle();
    Ok(())
}

pub(super) unsafe extern "C" fn batch_exists<B: Backend>(
    this: *mut c_void,
    args: *const ExistsArgs,
    error: *mut ErrorOut,
) -> Status {
    // SAFETY: rules of the boundary.
    unsafe { guard(error, || exists::<B>(this, args, |backend, exists| backend.batch_exists(exists))) }
}

/// # Safety
/// `args` is valid by the rules of [`BatchArgs`] for `'a`.
unsafe fn batch<'a, B, M>(instance: &Instance<B>, args: *const BatchArgs, purpose: Use) -> Result<Batch<'a, M>> {
    // SAFETY: the caller's promise.
    let args = unsafe { args.as_ref() }.ok_or_else(|| Error::new(ErrorKind::Internal, "a batch without arguments"))?;
    // SAFETY: the caller's promise.
    let (transfers, prefix_keys, session_id) = unsafe {
        (
            raw::slice(args.transfers, args.transfer_count),
            raw::slice(args.prefix_keys, args.prefix_key_count),
            raw::text(args.session_id)?,
        )
    };
    let mut converted: Vec<Transfer<'a>> = Vec::with_capacity(transfers.len());
    for transfer in transfers {
        // SAFETY: the caller's promise.
        converted.push(unsafe { instance.transfer(transfer, args.chain_position, purpose) }?);
    }
    Ok(Batch {
        // SAFETY: the context is valid for the call.
        call: unsafe { Call::from_raw(&args.context) },
        chain: Chain { position: args.chain_position, prefix_keys, session_id },
        transfers: converted,
        mode: PhantomData,
    })
}

pub(super) unsafe extern "C" fn batch_get<B: Backend>(
    this: *mut c_void,
    args: *const BatchArgs,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let instance = unsafe { instance::<B>(this) }?;
        // SAFETY: rules of the boundary.
        instance.backend.batch_get(unsafe { batch(instance, args, Use::Read) }?)
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn batch_set<B: Backend>(
    this: *mut c_void,
    args: *const BatchArgs,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let instance = unsafe { instance::<B>(this) }?;
        // SAFETY: rules of the boundary.
        instance.backend.batch_set(unsafe { batch(instance, args, Use::Write) }?)
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn batch_remove<B: Backend>(
    this: *mut c_void,
    args: *const BatchArgs,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let instance = unsafe { instance::<B>(this) }?;
        // SAFETY: rules of the boundary.
        instance.backend.batch_remove(unsafe { batch(instance, args, Use::Remove) }?)
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}
