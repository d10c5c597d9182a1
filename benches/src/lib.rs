//! Benchmarks of kvdock against peers and physical limits.
