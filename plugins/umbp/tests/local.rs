//! Memory and disk of this process: what the rules of the boundary do not say.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;
mod local {
    mod captures;
    mod hazards;
    mod kills;
    mod log;
    mod lost;
    mod model;
    mod ranks;
    mod strange;
    mod tiers;
}
