//! The HTTP faces and the command line, against the real program serving a tiny real model.

// Helpers of tests fail by panicking, as the tests themselves do.
#![allow(clippy::unwrap_used)]

mod admin;
mod chat;
mod completions;
mod errors;
mod families;
mod generate;
mod info;
mod lifecycle;
mod support;
