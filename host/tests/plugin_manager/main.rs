//! Attach, replace and detach of the real file plugin, against a stand-in for the cache.

#![allow(clippy::unwrap_used)] // Also in the helpers, which the lint does not take for tests.

mod lifecycle;
mod ranks;
mod several;
mod states;
mod support;
