//! The data plane: payload between registered pools and the memory of peers, over TCP or RDMA.

mod frame;
mod join;
mod lane;
mod peer;
mod rdma;
mod transfer;

pub use frame::{HEADER, Header, Operation, STATUS, STATUS_OK, STATUS_REJECTED};
pub use peer::{Peer, Peers, Standing};
pub use rdma::Rdma;
pub use transfer::{Job, Outcome, transfer};
