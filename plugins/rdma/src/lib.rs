//! RDMA for storage plugins: one-sided reads and writes over queue pairs of libibverbs, which is loaded when it is asked for.
//!
//! A [`Transport`] opens the devices of this machine, registers memory once per allocation on all of them, makes connections to peers by a
//! handshake that its user carries, and moves ranges with many requests under way. A connection that fails is made anew, and what was under
//! way on it is moved over the new one or another pair of devices.
//!
//! Nothing of it has run on hardware: its tests drive it through a stand-in for libibverbs (`stand_in/`).

mod completion;
mod config;
mod connection;
mod device;
mod error;
mod handshake;
mod library;
mod memory;
mod queue;
mod topology;
mod transfer;
mod transport;
pub mod verbs;

pub use config::Config;
pub use device::DeviceInfo;
pub use error::RdmaError;
pub use handshake::{Description, format_gid, parse_gid};
pub use memory::{Piece, Registration};
pub use topology::Priorities;
pub use transfer::{Deadline, Job, Operation, Outcome, Peer, RemoteBuffer, Stop};
pub use transport::{Exchange, Transport};
