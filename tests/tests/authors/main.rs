//! What authors of plugins are given: the examples, `plugin new`, `plugin check`, `plugin bench`.

#![allow(clippy::unwrap_used)] // Also in the helpers, which the lint does not take for tests.

mod bench;
mod build;
mod examples;
mod new;
