//! Operations of the families beyond plain dense decoders: experts, rows in pools of pages, compressors, recurrences and
//! hyper-connections. They are part of the face of every [`crate::Device`].
//!
//! Each trait stands by itself so that a device can keep them in files of their own. Sizes are checked by the call, as
//! for all operations.

mod elements;
mod experts;
mod rows;
mod states;

pub use elements::{Activation, Columns, ElementOps, GroupedWeight, Indices, Turn};
pub use experts::{ExpertOps, ExpertWeights, Experts, RouteSpec, Routing, Scoring};
pub use rows::{Picks, RowAttention, RowFormat, RowLayout, RowOps, RowPool, RowRun, RowSpan, RowSpans, SpanTable};
pub use states::{
    Compress, CompressPlan, DeltaInput, DeltaSeq, DeltaSizes, DeltaWeights, HyperMix, HyperOut, STREAMS, StateOps,
    StateSource,
};
