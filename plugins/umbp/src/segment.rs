//! Segment files: records one after another, no index beside them. FORMAT.md says the bytes.

mod append;
pub mod buffer;
mod file;
mod lock;
pub mod log;
mod plain;
pub mod record;
pub mod ring;
mod scan;

pub use append::Item;
pub use buffer::Buffer;
pub use file::{Location, MOST_SEGMENT, Segment};
pub use log::{Log, Options};
