//! What can go wrong while a transport is set up.

/// Why there is no transport, or no memory for it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RdmaError {
    /// The library can't be loaded.
    #[error(
        "libibverbs.so.1 can't be loaded ({0}); rdma needs it and the driver of the network card (on Debian the packages libibverbs1 and ibverbs-providers)"
    )]
    NoLibrary(String),
    /// The library has not all functions.
    #[error("libibverbs.so.1 has no function {0}; rdma needs rdma-core 32 or later")]
    OldLibrary(&'static str),
    /// There is no device.
    #[error("this machine has no RDMA device with an active port{0}")]
    NoDevice(String),
    /// A device that was asked for is not there or can't be used.
    #[error("RDMA device {name:?}: {why}")]
    Device {
        /// Its name.
        name: String,
        /// What is the matter.
        why: String,
    },
    /// Memory can't be registered.
    #[error("{len} bytes can't be registered with RDMA device {device}: {why}{hint}")]
    Registration {
        /// Bytes.
        len: usize,
        /// The device.
        device: String,
        /// What the system says.
        why: String,
        /// What helps.
        hint: &'static str,
    },
    /// An object could not be made.
    #[error("RDMA device {device}: {what}: {why}")]
    Object {
        /// The device.
        device: String,
        /// Which.
        what: &'static str,
        /// What the system says.
        why: String,
    },
}
