//! The CUDA device on a driver that runs everything in the memory of this process: what it computes is compared with the CPU's device,
//! and whatever is not ordered, not alive or not waited for is found by the driver's clocks.

#![allow(clippy::unwrap_used)]

mod clocks;
mod driver;
mod emulated;
mod fake;
mod host_pages;
mod operations;
mod page_order;
mod pages;
mod recorded;
mod refusals;
mod repeats;
mod replays;
mod rig;
mod rows;
mod sampling;
mod state;
mod transfers;
