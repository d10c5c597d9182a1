//! Open to close.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError, RwLock};

use super::{Instance, guard, instance};
use crate::backend::{Backend, HeldPages, Identity, Open};
use crate::call::Call;
use crate::pool::Pool;
use crate::raw;
use crate::v0_1::{self, CallContext, CapabilitiesOut, ErrorOut, HealthOut, OpenArgs, PoolDesc, Stats, Status};
use crate::{
    CacheMode, Capabilities, ClearScope, Error, ErrorKind, HeldChange, HeldTier, Host, MemoryKind, PoolRole, Result,
};

/// # Safety
/// `context` is null or valid for the call.
unsafe fn call<'a>(context: *const CallContext) -> Call<'a> {
    // SAFETY: the caller's promise.
    match unsafe { context.as_ref() } {
        // SAFETY: the rules of the boundary for `CallContext`.
        Some(context) => unsafe { Call::from_raw(context) },
        None => Call::unbounded(),
    }
}

/// `open` of a backend type.
///
/// # Safety
/// The pointers are valid by the rules of [`OpenArgs`].
pub unsafe fn open<B: Backend>(
    capabilities: Capabilities,
    args: *const OpenArgs,
    out: *mut *mut c_void,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: the caller's promise.
        let (Some(args), false) = (unsafe { args.as_ref() }, out.is_null()) else {
            return Err(Error::new(ErrorKind::Internal, "open needs arguments and a place for the instance"));
        };
        // SAFETY: the host's table and context live as long as the process.
        let host = unsafe { Host::from_raw(args.host, args.host_context) }
            .ok_or_else(|| Error::new(ErrorKind::Internal, "open needs the host's table"))?;
        let cache_mode = CacheMode::try_from_raw(args.cache_mode).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, format!("cache mode {} is not known to this version", args.cache_mode))
        })?;
        // SAFETY: everything in `args` is valid for the call.
        let open = unsafe {
            let raw =
                args.identity.as_ref().ok_or_else(|| Error::new(ErrorKind::Internal, "open needs an identity"))?;
            let identity = Identity {
                namespace: raw.namespace_digest,
                namespace_json: raw::text(raw.namespace_json)?.to_owned(),
                model_name: raw::text(raw.model_name)?.to_owned(),
                weights_digest: raw.weights_digest,
                numerics_id: raw::text(raw.numerics_id)?.to_owned(),
                page_tokens: raw.page_tokens,
                tp: (raw.tp_rank, raw.tp_size),
                pp: (raw.pp_rank, raw.pp_size),
                cp: (raw.cp_rank, raw.cp_size),
                dp: (raw.dp_rank, raw.dp_size),
                dcp: (raw.dcp_rank, raw.dcp_size),
                tp_lcm_size: raw.tp_lcm_size,
                replicated: raw.replicated != 0,
                writer: raw.writer != 0,
            };
            Open {
                call: Call::from_raw(&args.context),
                config_json: raw::text(args.config_json)?,
                instance_name: raw::text(args.instance_name)?,
                identity,
                host,
                cache_mode,
            }
        };
        let backend = B::open(&open)?;
        let declared = capabilities;
        let capabilities = backend.capabilities(declared);
        if let Some(capability) = capabilities.beyond(&declared) {
            let message = format!("the instance claims the capability {capability}, which its note does not declare");
            return Err(Error::new(ErrorKind::Internal, message));
        }
        let instance =
            Box::new(Instance { backend, host, capabilities, pools: RwLock::default(), queued: Mutex::default() });
        // SAFETY: `out` was checked, and the host owns it.
        unsafe { *out = Box::into_raw(instance).cast() };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn capabilities<B: Backend>(
    this: *mut c_void,
    out: *mut CapabilitiesOut,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let instance = unsafe { instance::<B>(this) }?;
        // SAFETY: the host owns `out` for the call.
        if let Some(out) = unsafe { out.as_mut() } {
            *out = instance.capabilities.raw();
        }
        Ok(())
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

fn check_kinds<B>(instance: &Instance<B>, pool: &Pool) -> Result<()> {
    if pool.is_logical() && !instance.capabilities.logical_pools {
        return Err(Error::unsupported(&format!("logical pools (pool {} ({}))", pool.id(), pool.name())));
    }
    if pool.regions().iter().any(|region| region.memory_kind == MemoryKind::Cuda) && !instance.capabilities.cuda_memory
    {
        return Err(Error::unsupported(&format!("device memory (pool {} ({}))", pool.id(), pool.name())));
    }
    Ok(())
}

fn remember<B>(instance: &Instance<B>, pools: &[Pool]) {
    let mut registered = instance.pools.write().unwrap_or_else(PoisonError::into_inner);
    registered.extend(pools.iter().map(|pool| (pool.id(), pool.clone())));
}

fn check_new<B>(instance: &Instance<B>, pools: &[Pool], role: PoolRole) -> Result<()> {
    for (index, pool) in pools.iter().enumerate() {
        check_kinds(instance, pool)?;
        if pool.role() != role {
            return Err(Error::new(
                ErrorKind::InvalidConfig,
                format!("pool {} ({}): its role is {}, this call takes {role}", pool.id(), pool.name(), pool.role()),
            ));
        }
        if let Some(source) = pool.indices_from_pool()
            && instance.pool(source).is_err()
            && !pools.iter().any(|other| other.id() == source)
        {
            return Err(Error::new(
                ErrorKind::InvalidConfig,
                format!(
                    "pool {} ({}): it shares the indices of pool {source}, which is not registered",
                    pool.id(),
                    pool.name()
                ),
            ));
        }
        if instance.pool(pool.id()).is_ok() || pools[..index].iter().any(|other| other.id() == pool.id()) {
            return Err(Error::new(
                ErrorKind::InvalidConfig,
                format!("pool {} ({}) is registered already", pool.id(), pool.name()),
            ));
        }
    }
    Ok(())
}

pub(super) unsafe extern "C" fn register_mem_pool_host<B: Backend>(
    this: *mut c_void,
    _context: *const CallContext,
    desc: *const PoolDesc,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let instance = unsafe { instance::<B>(this) }?;
        // SAFETY: rules of the boundary.
        let desc =
            unsafe { desc.as_ref() }.ok_or_else(|| Error::new(ErrorKind::Internal, "registration without a pool"))?;
        // SAFETY: what `desc` points at is valid for the call.
        let pool = unsafe { Pool::from_raw(desc) }?;
        check_new(instance, std::slice::from_ref(&pool), PoolRole::Anchor)?;
        instance.backend.register_mem_pool_host(&pool)?;
        remember(instance, &[pool]);
        Ok(())
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn register_v2_side_pools<B: Backend>(
    this: *mut c_void,
    _context: *const CallContext,
    descs: *const PoolDesc,
    count: u64,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let instance = unsafe { instance::<B>(this) }?;
        // SAFETY: rules of the boundary.
        let descs = unsafe { raw::slice(descs, count) };
        // SAFETY: what the descriptions point at is valid for the call.
        let pools = descs.iter().map(|desc| unsafe { Pool::from_raw(desc) }).collect::<Result<Vec<_>>>()?;
        check_new(instance, &pools, PoolRole::Side)?;
        instance.backend.register_v2_side_pools(&pools)?;
        remember(instance, &pools);
        Ok(())
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn unregister<B: Backend>(
    this: *mut c_void,
    _context: *const CallContext,
    ids: *const u32,
    count: u64,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let instance = unsafe { instance::<B>(this) }?;
        // SAFETY: rules of the boundary.
        let ids = unsafe { raw::slice(ids, count) };
        let pools = ids.iter().map(|id| instance.pool(*id)).collect::<Result<Vec<_>>>()?;
        instance.backend.unregister(&pools)?;
        let mut registered = instance.pools.write().unwrap_or_else(PoisonError::into_inner);
        registered.retain(|id, _| !ids.contains(id));
        Ok(())
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn pools_ready<B: Backend>(
    this: *mut c_void,
    _context: *const CallContext,
    error: *mut ErrorOut,
) -> Status {
    // SAFETY: rules of the boundary.
    unsafe { guard(error, || instance::<B>(this)?.backend.pools_ready()) }
}

pub(super) unsafe extern "C" fn clear<B: Backend>(
    this: *mut c_void,
    context: *const CallContext,
    scope: u32,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        let scope = ClearScope::try_from_raw(scope).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, format!("clear scope {scope} is not known to this version"))
        })?;
        // SAFETY: rules of the boundary.
        unsafe { instance::<B>(this)?.backend.clear(&call(context), scope) }
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn stats<B: Backend>(
    this: *mut c_void,
    context: *const CallContext,
    out: *mut Stats,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let stats = unsafe { instance::<B>(this)?.backend.stats(&call(context)) }?;
        // SAFETY: the host owns `out` for the call.
        if let Some(out) = unsafe { out.as_mut() } {
            *out = stats;
        }
        Ok(())
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn health<B: Backend>(
    this: *mut c_void,
    context: *const CallContext,
    out: *mut HealthOut,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let health = unsafe { instance::<B>(this)?.backend.health(&call(context)) }?;
        // SAFETY: the host owns `out` and its buffer for the call.
        if let Some(out) = unsafe { out.as_mut() } {
            out.state = health.state.raw();
            // SAFETY: as above.
            out.reason_len = unsafe { raw::write_text(&health.reason, out.reason, out.reason_capacity) };
        }
        Ok(())
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn flush<B: Backend>(
    this: *mut c_void,
    context: *const CallContext,
    error: *mut ErrorOut,
) -> Status {
    // SAFETY: rules of the boundary.
    unsafe { guard(error, || instance::<B>(this)?.backend.flush(&call(context))) }
}

pub(super) unsafe extern "C" fn report_held_pages<B: Backend>(
    this: *mut c_void,
    args: *const v0_1::HeldPages,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let instance = unsafe { instance::<B>(this) }?;
        // SAFETY: rules of the boundary.
        let args =
            unsafe { args.as_ref() }.ok_or_else(|| Error::new(ErrorKind::Internal, "a report without arguments"))?;
        let held = HeldPages {
            // SAFETY: the context is valid for the call.
            call: unsafe { Call::from_raw(&args.context) },
            tier: HeldTier::from_raw(args.tier),
            change: HeldChange::from_raw(args.change),
            // SAFETY: the keys are valid for the call.
            keys: unsafe { raw::slice(args.keys, args.key_count) },
        };
        if held.tier == HeldTier::Unknown || held.change == HeldChange::Unknown {
            return Ok(());
        }
        instance.backend.report_held_pages(&held)
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn close<B: Backend>(
    this: *mut c_void,
    context: *const CallContext,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        if this.is_null() {
            return Err(Error::new(ErrorKind::Internal, "close names no instance"));
        }
        // SAFETY: `close` comes once, after every other call has returned, so this is the only owner.
        let instance = unsafe { Box::from_raw(this.cast::<Instance<B>>()) };
        // SAFETY: rules of the boundary.
        let result = instance.backend.close(&unsafe { call(context) });
        drop(instance);
        result
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}
