//! The CPU device.

mod linear;
mod math;
mod memory;
mod packed;
mod simd;
mod threads;

pub use simd::Isa;

/// The CPU as a [`crate::Device`].
pub struct CpuDevice {
    _private: (),
}
