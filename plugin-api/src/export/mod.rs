//! What turns a [`Backend`] into the C functions of the boundary. Used through [`crate::export_plugin!`].
//!
//! Every function here runs the backend's code inside `catch_unwind`: a panic becomes an error that carries its message and
//! the mark `panicked`, by which the host fails the instance.

mod data;
mod life;
mod linker;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use crate::backend::Backend;
use crate::batch::Transfer;
use crate::linker::Linker;
use crate::pool::Pool;
use crate::raw;
use crate::v0_1::{self, BackendTable, ErrorOut, LinkerTable, Status};
use crate::{Error, ErrorKind, Host, Result};

/// What `open` hands to the host as an opaque pointer.
pub(crate) struct Instance<B> {
    backend: B,
    host: Host,
    capabilities: crate::Capabilities,
    pools: RwLock<HashMap<u32, Pool>>,
    /// Requests whose load is queued.
    queued: Mutex<HashSet<u64>>,
}

/// What a transfer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Pages are filled.
    Read,
    /// Pages are stored.
    Write,
    /// Keys are removed.
    Remove,
}

impl<B> Instance<B> {
    fn queued(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.queued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pool(&self, id: u32) -> Result<Pool> {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        pools.get(&id).cloned().ok_or_else(|| Error::new(ErrorKind::NotFound, format!("pool {id} is not registered")))
    }

    /// # Safety
    /// `raw` and what it points at are valid for `'a`.
    unsafe fn transfer<'a>(&self, raw: &v0_1::PoolTransfer, chain_position: u64, purpose: Use) -> Result<Transfer<'a>> {
        let pool = self.pool(raw.pool)?;
        // SAFETY: the caller's promise. A status is one byte, written atomically by this side and not at all by the host.
        let (keys, pages, statuses) = unsafe {
            (
                raw::slice(raw.keys, raw.count),
                raw::slice(raw.pages, if raw.pages.is_null() { 0 } else { raw.count }),
                raw::slice(raw.statuses.cast::<std::sync::atomic::AtomicU8>().cast_const(), raw.count),
            )
        };
        if purpose != Use::Remove && pages.len() != keys.len() {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("pool {} ({}): {} keys and no pages", raw.pool, pool.name(), keys.len()),
            ));
        }
        if statuses.len() != keys.len() {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("pool {} ({}): no room for statuses", raw.pool, pool.name()),
            ));
        }
        if let Some(page) = pages.iter().find(|page| u64::from(**page) >= pool.page_count()) {
            return Err(Error::new(
                ErrorKind::Internal,
                format!(
                    "pool {} ({}): page {page} is outside of its {} pages",
                    raw.pool,
                    pool.name(),
                    pool.page_count()
                ),
            ));
        }
        let layers = (raw.layer_count != 0).then(|| raw.layer_first..raw.layer_first.saturating_add(raw.layer_count));
        if layers.is_some() && !self.capabilities.ranges {
            return Err(Error::unsupported("ranges of layers"));
        }
        if layers.is_some() && purpose != Use::Read {
            return Err(Error::new(
                ErrorKind::Internal,
                format!("pool {} ({}): a range of layers can be read only", raw.pool, pool.name()),
            ));
        }
        let position = chain_position + u64::from(raw.chain_offset);
        Ok(Transfer { pool, keys, pages, statuses, layers, position })
    }
}

/// Runs `body`; a panic or an error is written to `out`.
///
/// # Safety
/// As for [`raw::write_error`].
pub unsafe fn guard(out: *mut ErrorOut, body: impl FnOnce() -> Result<()>) -> Status {
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => error,
        Err(payload) => {
            let message = format!("the plugin panicked: {}", raw::panic_message(&*payload));
            // The payload's own destructor may panic; that must not cross the boundary either.
            if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                std::mem::forget(second);
            }
            Error { kind: ErrorKind::Internal, retryable: false, panicked: true, message }
        }
    };
    // SAFETY: the caller's promise.
    unsafe { raw::write_error(&error, out) }
}

/// # Safety
/// `instance` came from `open::<B>` and has not been closed.
unsafe fn instance<'a, B>(instance: *mut c_void) -> Result<&'a Instance<B>> {
    // SAFETY: the caller's promise; calls share the instance, `close` comes after all others.
    unsafe { instance.cast::<Instance<B>>().cast_const().as_ref() }
        .ok_or_else(|| Error::new(ErrorKind::Internal, "the call names no instance"))
}

/// The tables of a backend type.
#[derive(Debug)]
pub struct Tables<B>(std::marker::PhantomData<B>);

impl<B: Backend> Tables<B> {
    /// Its linker table.
    pub const LINKER: LinkerTable = LinkerTable {
        size: std::mem::size_of::<LinkerTable>() as u64,
        abi_version: v0_1::ABI_VERSION,
        reserved: 0,
        lookup: linker::lookup::<B>,
        load: linker::load::<B>,
        start_layer_wise_loading: linker::start::<B>,
        finish_layer_wise_loading: linker::finish::<B>,
        cancel_queued_load: linker::cancel::<B>,
        offload: linker::offload::<B>,
        num_completed_offloads: linker::num_completed::<B>,
        pop_completed_offload: linker::pop::<B>,
        reset: linker::reset::<B>,
    };

    const LINKER_REF: &'static LinkerTable = &Self::LINKER;

    /// Its table; `OPEN` comes from the macro, which knows the capabilities.
    pub const fn backend(
        open: unsafe extern "C" fn(*const v0_1::OpenArgs, *mut *mut c_void, *mut ErrorOut) -> Status,
    ) -> BackendTable {
        BackendTable {
            size: std::mem::size_of::<BackendTable>() as u64,
            abi_version: v0_1::ABI_VERSION,
            reserved: 0,
            open,
            capabilities: life::capabilities::<B>,
            register_mem_pool_host: life::register_mem_pool_host::<B>,
            register_v2_side_pools: life::register_v2_side_pools::<B>,
            unregister: life::unregister::<B>,
            pools_ready: life::pools_ready::<B>,
            batch_exists: data::batch_exists::<B>,
            batch_get: data::batch_get::<B>,
            batch_set: data::batch_set::<B>,
            batch_remove: data::batch_remove::<B>,
            clear: life::clear::<B>,
            stats: life::stats::<B>,
            health: life::health::<B>,
            flush: life::flush::<B>,
            report_held_pages: life::report_held_pages::<B>,
            close: life::close::<B>,
            linker: if <B::Linker as Linker>::PRESENT { Self::LINKER_REF } else { std::ptr::null() },
        }
    }
}

pub use life::open;

/// Exports a [`Backend`] as a plugin: the note, the entry symbol and the table.
///
/// ```
/// # use kvdock_plugin_api::{*, v0_1::Stats};
/// struct Nothing;
/// impl Backend for Nothing {
///     type Linker = NoLinker<Self>;
///     fn open(_: &Open<'_>) -> Result<Self> { Ok(Nothing) }
///     fn batch_exists(&self, _: &mut Exists<'_>) -> Result<()> { Ok(()) }
///     fn batch_get(&self, batch: Batch<'_, Get>) -> Result<()> {
///         batch.into_pages().for_each(|page| page.finish(PageStatus::Missing));
///         Ok(())
///     }
///     fn batch_set(&self, batch: Batch<'_, Set>) -> Result<()> {
///         batch.into_pages().for_each(|page| page.finish(PageStatus::Refused));
///         Ok(())
///     }
///     fn stats(&self, _: &Call<'_>) -> Result<Stats> {
///         Ok(Stats { pages: 0, bytes_used: 0, bytes_total: 0, failures: 0, get_mean_ns: 0, set_mean_ns: 0 })
///     }
/// }
/// export_plugin! {
///     backend: Nothing,
///     name: "nothing",
///     capabilities: Capabilities::NONE,
///     config_schema: r#"{"type":"object","additionalProperties":false}"#,
///     check_config: "{}",
/// }
/// # fn main() { assert!(!kvdock_plugin_entry(1).is_null()); assert!(kvdock_plugin_entry(99).is_null()); }
/// ```
///
/// A plugin may speak further versions of the boundary with tables of its own: `other_tables: [VERSION => TABLE]` takes, for each, a
/// constant [`NoteVersion`](crate::note::NoteVersion) and a `static` table. The note then describes all of them, and the entry answers
/// each. `KVDOCK_TABLE` is the table of 0.1, for what the versions have in common.
#[macro_export]
macro_rules! export_plugin {
    (
        backend: $backend:ty,
        name: $name:expr,
        capabilities: $capabilities:expr,
        config_schema: $schema:expr,
        check_config: $check:expr
        $(, other_tables: [$($version:expr => $table:path),+ $(,)?])? $(,)?
    ) => {
        const KVDOCK_VERSIONS: &[$crate::note::NoteVersion] = &[$crate::note::NoteVersion::V0_1 $($(, $version)+)?];

        /// What the note of this plugin says.
        pub const KVDOCK_NOTE_SOURCE: $crate::note::NoteSource = $crate::note::NoteSource {
            name: $name,
            version: env!("CARGO_PKG_VERSION"),
            license: env!("CARGO_PKG_LICENSE"),
            description: env!("CARGO_PKG_DESCRIPTION"),
            panic_abort: cfg!(panic = "abort"),
            capabilities: {
                let mut capabilities: $crate::Capabilities = $capabilities;
                capabilities.linker = <<$backend as $crate::Backend>::Linker as $crate::Linker>::PRESENT;
                capabilities
            },
            config_schema: $schema,
            check_config: $check,
        };

        #[used]
        #[unsafe(link_section = ".note.kvdock")]
        static KVDOCK_NOTE: $crate::note::NoteBytes<{ KVDOCK_NOTE_SOURCE.note_len_of(KVDOCK_VERSIONS) }> =
            $crate::note::NoteBytes(KVDOCK_NOTE_SOURCE.note_of(KVDOCK_VERSIONS));

        unsafe extern "C" fn kvdock_open(
            args: *const $crate::v0_1::OpenArgs,
            out: *mut *mut ::std::ffi::c_void,
            error: *mut $crate::v0_1::ErrorOut,
        ) -> $crate::v0_1::Status {
            // SAFETY: the host calls this by the rules of the boundary.
            unsafe { $crate::export::open::<$backend>(KVDOCK_NOTE_SOURCE.capabilities, args, out, error) }
        }

        static KVDOCK_TABLE: $crate::v0_1::BackendTable = $crate::export::Tables::<$backend>::backend(kvdock_open);

        /// Entry point of the plugin: the table of an ABI version, or null.
        #[unsafe(no_mangle)]
        pub extern "C" fn kvdock_plugin_entry(abi_version: u32) -> *const ::std::ffi::c_void {
            if abi_version == $crate::v0_1::ABI_VERSION {
                return (&raw const KVDOCK_TABLE).cast();
            }
            $($(
                if abi_version == $version.number {
                    return (&raw const $table).cast();
                }
            )+)?
            ::std::ptr::null()
        }
    };
}
