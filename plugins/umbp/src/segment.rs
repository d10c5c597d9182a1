//! Segment files: records one after another, no index beside them. FORMAT.md says the bytes.

pub mod buffer;
pub mod log;
pub mod record;
pub mod ring;
pub mod scan;

pub use buffer::Buffer;
pub use log::{Item, Location, Log, Options, Segment};
