//! The data plane over TCP: nodes of kvdock read one another's objects by name, and fill places that they were given.

pub mod frame;
pub mod lane;
pub mod serve;
