//! Discovery, loading and life cycle of storage plugins.
//!
//! A plugin is found by name in the search path ([`discover`](mod@discover)), its note is read before any of its code runs
//! ([`inspect`](mod@inspect)), a private copy is mapped once for each content ([`library`]), its table is put behind the host's face ([`abi`]), an instance is
//! opened and registered ([`open`]) and used through [`instance`], which keeps the deadlines. [`manager`] attaches, replaces and detaches instances while requests
//! run, by the calls of [`admin`].

pub mod abi;
pub mod admin;
pub mod backend;
mod call;
pub mod controls;
mod difference;
pub mod discover;
mod host_table;
pub mod identity;
pub mod inspect;
pub mod instance;
#[cfg(test)]
mod instance_tests;
pub mod library;
mod linked;
pub mod manager;
pub mod open;
mod policies;
mod pool_desc;
pub mod ranks;
pub mod refusal;
pub mod schema;
pub mod state;
pub mod trial;
mod workers;

/// Most backends in use at a time: the cache tells them apart by the bits of a word.
pub const MOST_BACKENDS: usize = u64::BITS as usize;

pub use abi::AbiVersions;
pub use discover::{Found, FoundPlugin, discover, find, search_path};
pub use host_table::PluginMetric;
pub use identity::{Namespace, PAGE_FORMAT, WorkerIdentity};
pub use inspect::{Note, PluginInfo, inspect};
pub use manager::PluginManager;
pub use refusal::{Reason, Refusal};
pub use state::BackendState;
