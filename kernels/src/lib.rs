//! The compute that kvdock's models are made of, behind one [`Device`] face.
//!
//! A model holds weights, work buffers and a KV pool that a device gave it, and calls the
//! device's operations on them in the order of its layers. It never looks inside a buffer.
//! [`cpu::CpuDevice`] is the device that is always there; GPUs have crates of their own.
//!
//! # The law of bits
//!
//! Each output element of each operation has one order of accumulation. It does not depend on
//! how many rows are computed together, on the number of threads, on how a prompt is cut into
//! chunks, on the page size, or on the instruction set that the machine happens to have. So a
//! token computed cold, in chunks, in a batch, or after its prefix came back from storage has
//! the same logits, bit for bit. [`Device::numerics_id`] names the arithmetic; two devices with
//! the same id give the same bits.

mod collective;
pub mod cpu;
mod device;
mod error;
mod format;
mod handle;
mod kv;
pub mod ops;
mod packed_rows;
mod pages;
mod rope;
pub mod rowmath;

pub use collective::{Collective, InProcess, RankGroup};
pub use cpu::plan::{StepPlan, StepSpan};
pub use device::{
    AttentionSpec, Buf, Device, MatrixShape, NarrowData, NarrowFormat, NarrowScales, NewHeads, Plan, Projection, Rope,
    SampleRow, Sampled, SeqSpan, Weight, WeightData,
};
pub use error::KernelError;
pub use format::{WeightFormat, dequantize};
pub use kv::{Arrived, DeviceRanges, HostPage, KvDtype, KvPool, KvSpec, Moment, Transfer};
pub use packed_rows::{PACKED_GROUP, PACKED_SCALES, from_e4m3, pack_key, pack_row, to_e4m3, unpack_key, unpack_row};
pub use pages::{LayerMut, LayerRef, PageMemory, PagePool, PageSpec, decode_row, encode_row};
pub use rope::{Angles, RopeScaling, RopeSpec, RopeStyle, Rotation};
