//! Commands of the kvdock tree.
fn main() {}
