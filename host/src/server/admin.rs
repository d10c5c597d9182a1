//! The calls of the admin endpoints; see [`crate::plugin::admin`].

pub use crate::plugin::admin::*;
