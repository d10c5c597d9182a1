//! Nodes of a cluster with the real master.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;
mod distributed {
    mod anew;
    mod clears;
    mod faults;
    mod master;
    mod other;
    mod rdma;
    mod segments;
    mod shares;
    mod theirs;
}
