//! Versions of the boundary: plugins from the frozen sources of released ones in today's host, and a trial of the next one.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

mod frozen;
mod host_0_2;
mod pool;
mod trial;
