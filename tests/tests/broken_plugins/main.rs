//! The plugin of `tests/broken`, and what becomes of it when a fault is planted.

#![allow(clippy::unwrap_used)] // Also in the helpers, which the lint does not take for tests.

mod live;
mod table;
