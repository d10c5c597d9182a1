//! The linker face.

use std::ffi::c_void;
use std::sync::atomic::AtomicU32;

use super::{Use, data, guard, instance};
use crate::backend::Backend;
use crate::call::{Call, Chain};
use crate::linker::{LayerDone, Linker, Load, Offload, Ready, Start};
use crate::raw;
use crate::v0_1::{
    CallContext, ErrorOut, ExistsArgs, FinishArgs, LoadArgs, OffloadArgs, OffloadDone, ReadyHandle, StartArgs, Status,
};
use crate::{Error, ErrorKind, ReadyKind, Result};

fn no_arguments() -> Error {
    Error::new(ErrorKind::Internal, "a linker call without arguments")
}

/// # Safety
/// As for [`raw::slice`].
unsafe fn ready_handles(handles: *const ReadyHandle, count: u64) -> Result<Vec<Ready>> {
    // SAFETY: the caller's promise.
    let handles = unsafe { raw::slice(handles, count) };
    let known = |handle: &ReadyHandle| match ReadyKind::from_raw(handle.kind) {
        ReadyKind::Unknown => Err(Error::new(
            ErrorKind::Unsupported,
            format!("ready handle kind {} is not known to this version", handle.kind),
        )),
        ReadyKind::HostFlag if handle.handle == 0 || !handle.handle.is_multiple_of(align_of::<AtomicU32>() as u64) => {
            let message = format!("a host flag at {:#x}, which is no address of a 32-bit word", handle.handle);
            Err(Error::new(ErrorKind::InvalidConfig, message))
        }
        kind => Ok(Ready { kind, handle: handle.handle }),
    };
    handles.iter().map(known).collect()
}

pub(super) unsafe extern "C" fn lookup<B: Backend>(
    this: *mut c_void,
    args: *const ExistsArgs,
    error: *mut ErrorOut,
) -> Status {
    // SAFETY: rules of the boundary.
    unsafe { guard(error, || data::exists::<B>(this, args, B::Linker::lookup)) }
}

pub(super) unsafe extern "C" fn load<B: Backend>(
    this: *mut c_void,
    args: *const LoadArgs,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary: what the transfers name lives until the load is finished or cancelled.
        unsafe {
            let instance = instance::<B>(this)?;
            let args = args.as_ref().ok_or_else(no_arguments)?;
            let transfers = raw::slice(args.transfers, args.transfer_count)
                .iter()
                .map(|t| instance.transfer(t, args.chain_position, Use::Read))
                .collect::<Result<Vec<_>>>()?;
            let chain = Chain {
                position: args.chain_position,
                prefix_keys: raw::slice(args.prefix_keys, args.prefix_key_count),
                session_id: "",
            };
            if !instance.queued().insert(args.request) {
                let message = format!("request {} is queued already; start or cancel its load first", args.request);
                return Err(Error::new(ErrorKind::InvalidConfig, message));
            }
            let queued = B::Linker::load(&instance.backend, Load { request: args.request, transfers, chain });
            if queued.is_err() {
                instance.queued().remove(&args.request);
            }
            queued
        }
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn start<B: Backend>(
    this: *mut c_void,
    args: *const StartArgs,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary: the words and the cancel flag live until the batch is finished, and are accessed atomically only.
        unsafe {
            let instance = instance::<B>(this)?;
            let args = args.as_ref().ok_or_else(no_arguments)?;
            let words = raw::slice(args.layer_done.cast::<AtomicU32>().cast_const(), args.layer_count);
            let queued = std::mem::take(&mut *instance.queued());
            let ready = ready_handles(args.ready, args.ready_count).inspect_err(|_| {
                // What was queued is forgotten when a start fails. A load that the backend does not know of any more is just that.
                for request in queued {
                    let _ = B::Linker::cancel_queued_load(&instance.backend, request);
                }
            })?;
            let start = Start {
                call: Call::from_raw(&args.context),
                batch: args.batch,
                ready,
                done: LayerDone { words, host: instance.host, batch: args.batch },
            };
            B::Linker::start_layer_wise_loading(&instance.backend, start)
        }
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn finish<B: Backend>(
    this: *mut c_void,
    args: *const FinishArgs,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        unsafe {
            let instance = instance::<B>(this)?;
            let args = args.as_ref().ok_or_else(no_arguments)?;
            B::Linker::finish_layer_wise_loading(&instance.backend, &Call::from_raw(&args.context), args.batch)
        }
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn cancel<B: Backend>(this: *mut c_void, request: u64, error: *mut ErrorOut) -> Status {
    // SAFETY: rules of the boundary.
    let instance = unsafe { instance::<B>(this) };
    let body = || {
        let instance = instance?;
        B::Linker::cancel_queued_load(&instance.backend, request)?;
        instance.queued().remove(&request);
        Ok(())
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn offload<B: Backend>(
    this: *mut c_void,
    args: *const OffloadArgs,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary: what the transfers name lives until the operation is popped.
        unsafe {
            let instance = instance::<B>(this)?;
            let args = args.as_ref().ok_or_else(no_arguments)?;
            let transfers = raw::slice(args.transfers, args.transfer_count)
                .iter()
                .map(|t| instance.transfer(t, args.chain_position, Use::Write))
                .collect::<Result<Vec<_>>>()?;
            let ready = ready_handles(args.ready, args.ready_count)?;
            let chain = Chain {
                position: args.chain_position,
                prefix_keys: raw::slice(args.prefix_keys, args.prefix_key_count),
                session_id: "",
            };
            let session_id = raw::text(args.session_id)?.to_owned();
            B::Linker::offload(
                &instance.backend,
                Offload {
                    operation: args.operation,
                    deadline_ns: args.deadline_ns,
                    transfers,
                    ready,
                    chain,
                    session_id,
                },
            )
        }
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn num_completed<B: Backend>(this: *mut c_void) -> u64 {
    let mut count = 0;
    // SAFETY: rules of the boundary; a panic counts as none, and the next call that can report one will.
    let _ = unsafe {
        guard(std::ptr::null_mut(), || {
            count = B::Linker::num_completed_offloads(&instance::<B>(this)?.backend);
            Ok(())
        })
    };
    count
}

pub(super) unsafe extern "C" fn pop<B: Backend>(
    this: *mut c_void,
    out: *mut OffloadDone,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        let instance = unsafe { instance::<B>(this) }?;
        // SAFETY: the host owns `out` for the call.
        let out = unsafe { out.as_mut() }.ok_or_else(no_arguments)?;
        let done = B::Linker::pop_completed_offload(&instance.backend)
            .ok_or_else(|| Error::new(ErrorKind::NotFound, "no completed offload"))?;
        out.operation = done.operation;
        (out.status, out.retryable) = match &done.result {
            Ok(()) => (0, 0),
            Err(error) => {
                instance.host.log(
                    crate::LogLevel::Warn,
                    "linker",
                    &format!("offload {} failed: {error}", done.operation),
                );
                (error.kind.raw(), u32::from(error.retryable))
            }
        };
        Ok(())
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}

pub(super) unsafe extern "C" fn reset<B: Backend>(
    this: *mut c_void,
    context: *const CallContext,
    error: *mut ErrorOut,
) -> Status {
    let body = || {
        // SAFETY: rules of the boundary.
        unsafe {
            let call = context.as_ref().map_or(Call::unbounded(), |context| Call::from_raw(context));
            let instance = instance::<B>(this)?;
            instance.queued().clear();
            B::Linker::reset(&instance.backend, &call)
        }
    };
    // SAFETY: rules of the boundary.
    unsafe { guard(error, body) }
}
