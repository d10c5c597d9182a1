//! Serving: memory that this process lends to the store, and the sockets by which peers read and write it.

mod copy;
mod memory;
mod server;
mod session;

pub use memory::Memory;
pub use server::{Bounds, Figures, Server};
