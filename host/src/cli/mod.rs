//! The `kvdock` command line.
