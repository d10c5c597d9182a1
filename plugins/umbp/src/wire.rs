//! Messages of UMBP's gRPC services, written by hand so that no build needs a compiler for them.

pub mod master;
pub mod peer;
pub mod standalone;

#[cfg(test)]
mod captures;
