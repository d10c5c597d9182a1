//! The CUDA kernels, run on the CPU under the address sanitizer and compared with the CPU's kernels.
//!
//! Each check is a function of a compiled program, so that `faults` can run it on programs with a fault in them.
#![allow(clippy::unwrap_used)]

mod attention;
mod compile;
mod contract;
mod data;
mod delta;
mod elementwise;
mod emulator;
mod experts;
mod faults;
mod gguf;
mod heads;
mod latent;
mod norm;
mod pages;
mod sampling;
