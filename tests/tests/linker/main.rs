//! Linker mode in a running server, with the small model: pages go between device and storage layer by layer, no answer changes, and
//! nothing that storage does wrong costs a request. `CASES_LINKER.md` says which case of the reference is shown where.

// A test that cannot go on panics: that is how it fails.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod families;
mod faults;
mod model;
mod refused;
mod stores;
mod turns;
