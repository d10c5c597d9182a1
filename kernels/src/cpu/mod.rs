//! The CPU device.
//!
//! Weights are packed into tiles of 16 output features (`packed::tile`); every kernel is
//! written once over 16 lanes and runs on AVX-512, AVX2 or plain Rust with the same bits
//! (`simd`), and weights of four bits also on AMX and AVX512-VNNI (`linear::integer`); loops
//! are shared among a small pool of threads by parts of the output, never by parts of a sum
//! (`threads`).

// Kernels index several arrays of registers with one counter.
#![allow(clippy::needless_range_loop)]

mod attention;
mod device;
mod elementwise;
mod key_groups;
mod kv_pool;
mod linear;
mod math;
mod memory;
mod norm;
mod ops;
mod packed;
pub(crate) mod plan;
mod prefault;
mod rope_table;
mod shared;
mod simd;
mod threads;

pub use device::CpuDevice;
pub use simd::Isa;
