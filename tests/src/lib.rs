//! What the tests that cross the rooms share: the built programs, a running server, its HTTP faces,
//! prompts, and the storage directory seen from outside.
//!
//! The tests start the real `kvdock` binary with the real small model and the file plugin. All
//! three are made by `cargo xtask test`; a test that misses one of them fails and says so.

// A test helper that can't go on panics: that is how a test fails.
#![allow(clippy::unwrap_used, clippy::expect_used)]

pub mod broken;
pub mod client;
pub mod frozen;
#[cfg(test)]
mod known_failures;
pub mod load;
pub mod metrics;
pub mod mooncake;
pub mod other;
pub mod paths;
pub mod port;
pub mod process;
pub mod prompt;
pub mod server;
pub mod soak;
pub mod storage;
pub mod swaps;
pub mod umbp;
