//! Discovery, loading and life cycle of storage plugins.

pub mod backend;
