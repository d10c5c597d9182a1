//! Distributed mode: this process is a node of a cluster that a master keeps together. It has memory of its own, tells the master what is in it,
//! stores objects where the master says, and reads them where they are.
//!
//! Between nodes of kvdock bytes go by RDMA where both have a device, else over TCP.

mod clear;
mod cluster;
pub mod data;
mod fetch;
mod get;
pub mod limit;
mod master;
mod metrics;
mod neighbours;
mod node;
mod objects;
mod peers;
pub mod pool;
mod put;
mod rdma;
pub mod rpc;
mod serve;
mod store;

pub use cluster::Cluster;
pub use node::MEETING_PLACE;
