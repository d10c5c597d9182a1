//! What can go wrong in a kernel call.

use thiserror::Error;

/// Why a device refused a call. A refused call has changed none of its outputs' lengths and
/// leaves the device usable; the contents of its output buffers are unspecified.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A buffer, a count or a shape does not fit the operation.
    #[error("{op}: {what} is {found}, expected {expected}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// What was wrong, for example `"length of out"`.
        what: &'static str,
        /// What would have been right.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A handle belongs to another device (or another kind of device).
    #[error("{op}: {what} does not belong to device {device}")]
    ForeignHandle {
        /// The operation.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// The device that was called.
        device: String,
    },
    /// A weight's bytes do not match its declared shape or format.
    #[error("weight {name}: {reason}")]
    Weight {
        /// The tensor's name, as the loader gave it.
        name: String,
        /// What was wrong.
        reason: String,
    },
    /// A page number lies outside the pool, or a page table is too short.
    #[error("{op}: {reason}")]
    Page {
        /// The operation.
        op: &'static str,
        /// What was wrong.
        reason: String,
    },
    /// A token id or row index lies outside the table.
    #[error("{op}: index {index} at row {row}, but the table has {rows} rows")]
    Index {
        /// The operation.
        op: &'static str,
        /// The row of the request that bears the index.
        row: usize,
        /// The index found.
        index: u32,
        /// How many rows the table has.
        rows: usize,
    },
    /// A parameter has a value the device cannot work with.
    #[error("{what}: {reason}")]
    Parameter {
        /// The parameter.
        what: &'static str,
        /// Why it cannot be.
        reason: String,
    },
    /// Memory ran out.
    #[error("cannot allocate {bytes} bytes for {what}: {reason}")]
    Memory {
        /// What the memory was for.
        what: &'static str,
        /// How much was asked for.
        bytes: usize,
        /// What the system said.
        reason: String,
    },
    /// The device, its driver or its compiler failed.
    #[error("{op}: {reason}")]
    Device {
        /// The operation.
        op: &'static str,
        /// What it said.
        reason: String,
    },
    /// A worker of the device failed while running the operation.
    #[error("{op}: a worker of the device failed: {reason}")]
    Worker {
        /// The operation.
        op: &'static str,
        /// What it said.
        reason: String,
    },
}
