//! The CPU device.

/// The CPU as a [`crate::Device`].
pub struct CpuDevice {
    _private: (),
}
