//! Device and host pages: who owns them, and the host pool's memory.

mod device;
mod host;
mod pages;

pub(crate) use device::DevicePages;
pub(crate) use host::HostPool;
