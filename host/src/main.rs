//! The `kvdock` command.
fn main() {}
