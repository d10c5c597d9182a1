//! The real server with the real small model and the file plugin, over HTTP.

// A test that cannot go on panics: that is how it fails.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod admin;
mod admins;
mod broken;
mod clients;
mod constructors;
mod families;
mod faults;
mod kills;
mod page_multiples;
mod rank_faults;
mod rank_stores;
mod ranks;
mod restart;
mod several;
mod starts;
mod swap;
mod swap_load;
