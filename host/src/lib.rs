//! kvdock: an LLM serving engine whose KV cache outlives the process.
//!
//! One folder a concern, in the order a request walks through them: [`server`] (HTTP in and
//! out), [`engine`] (queue, scheduler, sampler), [`cache`] (radix tree, pools, tiers),
//! [`plugin`] (discovery, loading, life cycle of storage backends), with [`config`] and
//! [`telemetry`] beside them and [`cli`] on top.

pub mod cache;
pub mod cli;
pub mod config;
pub mod engine;
pub mod plugin;
pub mod server;
pub mod telemetry;
