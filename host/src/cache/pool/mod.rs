//! Device and host pages: who owns them, and the host pool's memory.

mod device;
mod direct;
mod host;
mod mapping;
mod memory;
mod noted;
mod pages;

pub(crate) use device::DevicePages;
pub(crate) use direct::DirectPool;
pub(crate) use host::HostPool;
#[cfg(test)]
pub(crate) use memory::HostShape;
pub use memory::{CacheMemory, CacheRoom, DeviceMemory, StateMemory, WindowMemory};
pub(crate) use memory::{Moments, Transfers};
pub(crate) use pages::{Holders, PageFault};

#[cfg(test)]
mod cases;
