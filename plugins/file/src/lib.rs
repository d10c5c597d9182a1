//! kvdock's storage plugin that keeps KV pages in a directory.
