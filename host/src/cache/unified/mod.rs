//! One radix tree for every kind of model: which slots of which prefix are in which tier.
//!
//! A pure core. It decides, and says what is to be done as [`Action`]s; it never touches an allocator, a pool or a store, and knows no
//! clock but its own counter. [`CacheManager`](super::CacheManager) carries out what it decides.
//!
//! # What it holds
//!
//! Nodes hold runs of whole pages, in namespaces that share nothing. Each node has up to three [`Component`]s, with slots on device and
//! host apart: pages of full attention, which every node has in one of the tiers; pages of sliding windows; and a recurrent state that is
//! right for the end of the node. A window or a state may leave before its node does: the node then is a *tombstone* for it.
//!
//! A sequence can be gone on from at a *boundary* where each component has what it needs: full pages from the start on, a window without a
//! gap right before it (or none missing since the start), a state exactly there. [`Tree::find`] says the deepest one with what is on the
//! device, and the deepest one with what is on the host too. It changes nothing; a node is cut only when somebody is to hold a boundary.
//!
//! # How it is held, and how it leaves
//!
//! A [`Lock`] holds full pages up to the root, the window before the end, and the state at the end. It is a receipt that its release
//! consumes. Segments are named by the page at which they begin, so they stay exact when nodes are cut, and so do the tickets of
//! transfers ([`BackupTicket`], [`LoadTicket`], [`StoreTicket`]): no list of parts has to follow a cut.
//!
//! Full pages leave from the leaves inward by [`Policy`], windows and states by last use. [`Tree::evict_device`] and
//! [`Tree::evict_host`] make one decision a step.
//!
//! # What it costs
//!
//! A child is found by one probe in a table over (parent, tokens of the first page), and the tokens of a node lie in one piece, so a match
//! costs what comparing the key costs and does not grow with the tree. For a key of 2,048 tokens in pages of 16:
//!
//! | | by the two numbers | measured beside 1,000,000 pages |
//! | --- | --- | --- |
//! | match with its page table | 16 KiB to compare, half of it from memory (10 GB/s), and five dependent misses: 1.3 us | 1.9 us |
//! | insert, and eviction of as much | 8 KiB of tokens and 0.5 KiB of page numbers to copy into memory that was given free: 2 us | 2.4 us |
//! | memory a page | 64 bytes of tokens and 4 of its number | 70 bytes in nodes of 128 pages, 81 of 16, about 310 of one |
//!
//! The bench rows `tree, ...` show them beside a flat map of whole keys. Keys of pages (SHA-256, 11 us for such a key) are computed by who
//! needs them, off the thread of the tree, and kept ([`KeyPath`]).
//!
//! # How the manager's calls map to it
//!
//! | `CacheManager` | tree |
//! | --- | --- |
//! | `begin` | `find`; `full_pages` and `best` say what storage is asked for, `state_branch` and `window_branch` where to leave a checkpoint |
//! | prefetch delivered | `insert_host` with the keys of its plan |
//! | `acquire` | `find`, `settle(best)`, `cut_window`, `lock`, so that what is to be loaded does not leave for the slots that it takes; `readiness`, `load_needs`, slots, `begin_load`, copies on a thread of `controller/copy`, `finish_load`; then `device_table`, `touch`, `count_use` |
//! | `commit` | `insert` from the node of the request's lock, `lock` of the new end, `unlock` of the old one, `merge_growing` |
//! | computing past a window | each commit locks the window before the new end, and lets go of the one before: what lies between may leave |
//! | `finish`, `abort`, `preempt` | `insert` or not, also of a state alone at the end that is held; `unlock`, `merge_up` |
//! | `alloc_pages`, slots of a load or a copy | `Room`: the pools, and `evict_device` or `evict_host` step by step for what they lack |
//! | reasons for misses | `was_evicted`, `is_elsewhere` |
//! | [`Action::Backup`], host tier | `backup_needs`, host slots, `begin_backup`, copy, `finish_backup`, then the queues of the backends |
//! | a backend's queue | `info.stored`: what a node has on the host and the store lacks; `begin_store` with its bit and [`Source::Host`], `key_path`, write, `finish_store` |
//! | [`Action::Backup`], linker | `begin_store` with [`Source::Device`], once the step that wrote the pages is over; `finish_store` in the order of completion |
//! | linker load | `resident` is pinned with [`Parts::FULL`], so that only what is not on the device is loaded; the slots are the request's own until the verdict, and `insert` takes them after it |
//! | write policy of a backend | `info`: uses, tiers, what is owed to it |
//! | a backend comes, leaves or was emptied; a policy changes | `set_stores`, `forget_stores`; `set_rules` |
//! | `flush` | `evict_without_copy` and `evict_host` until `Exhausted` |
//!
//! What the tree does not do: it publishes no events.

mod action;
mod arena;
mod aux;
mod check;
mod component;
mod config;
mod evict;
mod host;
mod insert;
mod lock;
mod matching;
mod memory;
mod node;
mod policy;
mod query;
mod room;
mod span;
mod split;
mod transfer;
mod tree;
mod victims;

#[cfg(test)]
mod tests;

pub use action::{Action, Actions};
pub use component::{Component, NO_SLOT, PerComponent, Sizes, Slots};
pub use config::{BackupRule, Below, StateConfig, TreeConfig, TreeError};
pub use evict::Step;
pub use host::{HostInsert, HostInserted};
pub use insert::{Insert, Inserted, StateOutcome};
pub use lock::{Lock, Parts};
pub use matching::{Boundary, Match};
pub use node::NodeId;
pub use policy::{Policy, SLRU_PROTECTED_HITS};
pub use query::{NodeInfo, Readiness};
pub(crate) use room::{Room, Side};
pub use span::{KeyPath, Units};
pub use transfer::{BackupTicket, LoadCopy, LoadTicket, Source, StoreTicket};
pub use tree::Tree;
