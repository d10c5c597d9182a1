//! HTTP in and out.
