//! What sums up earlier tokens: the gated delta net, compressors; and hyper-connections.

use super::elements::Indices;
use super::rows::{RowFormat, RowPool};
use crate::device::Buf;
use crate::error::KernelError;
use crate::kv::KvDtype;
use crate::pages::PagePool;

/// Streams of a residual state with hyper-connections.
pub const STREAMS: usize = 4;

/// Extents of a gated delta net.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaSizes {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of the key heads.
    pub value_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub kernel: usize,
}

impl DeltaSizes {
    /// Elements of q, k and v together.
    pub const fn channels(self) -> usize {
        2 * self.keys() + self.values()
    }

    /// A net of so many of these key heads, with their value heads.
    pub const fn of_key_heads(self, key_heads: usize) -> Self {
        Self { value_heads: self.value_heads / self.key_heads * key_heads, key_heads, ..self }
    }

    /// Elements of all keys of a row.
    pub const fn keys(self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Elements of all values of a row.
    pub const fn values(self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of a state: the last inputs of the convolution, oldest first, then `[value_heads, key_dim, value_dim]`.
    pub const fn state(self) -> usize {
        (self.kernel - 1) * self.channels() + self.value_heads * self.key_dim * self.value_dim
    }
}

fn refuse<T>(op: &'static str, what: &'static str, expected: String, found: String) -> Result<T, KernelError> {
    Err(KernelError::Shape { op, what, expected, found })
}

impl DeltaSizes {
    /// Checks sizes and sequences against the pool; gives the rows of the step. For implementers of [`StateOps`].
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(self, pool: &PagePool, layer: usize, seqs: &[DeltaSeq]) -> Result<usize, KernelError> {
        let op = "delta_net";
        let Self { key_heads, value_heads, key_dim, value_dim, kernel } = self;
        let whole = [key_heads, value_heads, key_dim, value_dim, kernel].iter().all(|size| *size > 0);
        if !whole || !value_heads.is_multiple_of(key_heads) {
            let expected = "sizes above 0, value heads a multiple of the key heads".to_owned();
            return refuse(op, "sizes", expected, format!("{self:?}"));
        }
        let spec = pool.spec();
        let bytes = self.state() * size_of::<f32>();
        if layer >= spec.layers || spec.page_bytes != bytes {
            let expected = format!("slots of {bytes} bytes in layer {layer}");
            return refuse(op, "the pool", expected, format!("{spec:?}"));
        }
        let mut rows = 0;
        for seq in seqs {
            if seq.first != rows || seq.rows == 0 {
                return refuse(op, "a sequence", format!("rows from {rows} on"), format!("{seq:?}"));
            }
            rows += seq.rows;
            let slots = seq.saves.iter().map(|(_, slot)| *slot).chain([seq.slot]);
            if let Some(slot) = slots.into_iter().find(|slot| *slot as usize >= spec.pages) {
                return refuse(op, "a slot", format!("below {}", spec.pages), slot.to_string());
            }
            if seq.saves.iter().any(|(after, _)| !(1..=seq.rows).contains(after)) {
                return refuse(op, "a saved state", format!("after 1 to {} rows", seq.rows), format!("{seq:?}"));
            }
        }
        Ok(rows)
    }
}

/// What a gated delta net computes from, one row a token.
pub struct DeltaInput<'a> {
    /// q, k and v, `[rows, channels]`.
    pub mixed: &'a Buf,
    /// Gates, `[rows, values]`.
    pub z: &'a Buf,
    /// `[rows, value_heads]`.
    pub b: &'a Buf,
    /// `[rows, value_heads]`.
    pub a: &'a Buf,
}

/// Weights of a gated delta net.
pub struct DeltaWeights<'a> {
    /// `[channels, kernel]`.
    pub conv: &'a Buf,
    /// `[value_heads]`.
    pub dt_bias: &'a Buf,
    /// `-exp(A_log)`, `[value_heads]`.
    pub decay: &'a Buf,
    /// `[value_dim]`.
    pub norm: &'a Buf,
    /// Of the norm.
    pub eps: f32,
}

/// A sequence's rows in a step, and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaSeq {
    /// First row.
    pub first: usize,
    /// Rows.
    pub rows: usize,
    /// The slot of its state.
    pub slot: u32,
    /// Whether the slot has a state; else it begins with zeros.
    pub resumes: bool,
    /// Slots that get a copy of the state, each after so many rows of this step.
    pub saves: Vec<(usize, u32)>,
}

/// Where the state of a token is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateSource {
    /// There is no such token.
    None,
    /// A row of this step.
    New(u32),
    /// A slot of the pool.
    Kept(u32),
}

/// What a compressor makes in a step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CompressPlan {
    /// The tokens of each row that is made, one row's after another's.
    pub sources: Vec<StateSource>,
    /// Tokens of a row.
    pub tokens: usize,
    /// Rows of the step whose states are kept, and the slots they go to: no slot twice.
    pub kept: Vec<(u32, u32)>,
}

impl CompressPlan {
    /// Rows that are made.
    pub fn rows(&self) -> usize {
        self.sources.len().checked_div(self.tokens).unwrap_or(0)
    }
}

/// A compressor.
pub struct Compress<'a> {
    /// Tokens from one row to the next.
    pub ratio: usize,
    /// Elements of a row.
    pub dim: usize,
    /// Whether a row takes the first half of its tokens through the first `dim` channels, the others through the second.
    pub overlapping: bool,
    /// Added to scores, `[ratio, width]`.
    pub ape: &'a Buf,
    /// Positions of the step's rows.
    pub positions: &'a Indices,
    /// Where states are kept: rows of `2 * width` elements, values and then scores with `ape` added, in f32.
    pub states: RowPool<'a>,
}

impl Compress<'_> {
    /// Channels of a token.
    pub const fn width(&self) -> usize {
        if self.overlapping { 2 * self.dim } else { self.dim }
    }

    /// Checks a plan for a step of `rows` rows. For implementers of [`StateOps`].
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(&self, plan: &CompressPlan, rows: usize) -> Result<(), KernelError> {
        let op = "compress";
        let layout = self.states.layout();
        if layout.format != RowFormat::Plain(KvDtype::F32) || layout.elements != 2 * self.width() || self.ratio == 0 {
            let expected = format!("rows of {} f32", 2 * self.width());
            return refuse(op, "the states", expected, format!("{layout:?}"));
        }
        if !plan.sources.len().is_multiple_of(plan.tokens.max(1)) || (plan.tokens == 0 && !plan.sources.is_empty()) {
            return refuse(op, "the plan", format!("rows of {} tokens", plan.tokens), plan.sources.len().to_string());
        }
        let slots = self.states.pool().spec().pages * layout.page_rows;
        let bad_slot = |slot: u32| slot as usize >= slots;
        let bad_row = |row: u32| row as usize >= rows;
        let bad_source = plan.sources.iter().any(|source| match source {
            StateSource::None => false,
            StateSource::New(row) => bad_row(*row),
            StateSource::Kept(slot) => bad_slot(*slot),
        });
        if bad_source || plan.kept.iter().any(|(row, slot)| bad_row(*row) || bad_slot(*slot)) {
            return refuse(op, "the plan", format!("{rows} rows and {slots} slots"), "one beyond them".into());
        }
        Ok(())
    }
}

/// How streams are mixed around a sublayer.
pub struct HyperMix<'a> {
    /// `[24]`.
    pub base: &'a Buf,
    /// `[3]`.
    pub scale: &'a Buf,
    /// Normalisations of the mix among the streams.
    pub rounds: usize,
    /// Added to weights and sums.
    pub eps: f32,
    /// Added to mean squares.
    pub norm_eps: f32,
}

/// How streams are mixed for the output matrix.
pub struct HyperOut<'a> {
    /// `[STREAMS]`.
    pub base: &'a Buf,
    /// Factor on the mixes.
    pub scale: f32,
    /// Added to weights.
    pub eps: f32,
    /// Added to mean squares.
    pub norm_eps: f32,
}

/// Operations with states.
pub trait StateOps {
    /// Takes the step's rows through a gated delta net, token by token; `out` is `[rows, values]`. States are slots
    /// (pages) of layer `layer` of `pool`.
    fn delta_net(
        &self,
        sizes: DeltaSizes,
        weights: &DeltaWeights<'_>,
        input: &DeltaInput<'_>,
        states: (&PagePool, usize),
        seqs: &[DeltaSeq],
        out: &mut Buf,
    ) -> Result<(), KernelError>;

    /// Makes the rows of `plan` from values and scores `[rows, width]` and kept states, into `out` `[plan.rows(), dim]`,
    /// neither normed nor rotated; then keeps new states.
    fn compress(
        &self,
        spec: &Compress<'_>,
        plan: &CompressPlan,
        values: &Buf,
        scores: &Buf,
        out: &mut Buf,
    ) -> Result<(), KernelError>;

    /// The input of a sublayer, `[rows, hidden]`, of `streams` `[rows, STREAMS, hidden]`. `mixes` are the streams times the
    /// mixing matrix, `[rows, 24]`; `sizes` are rows and hidden. Into `backs` `[rows, 20]` goes how its output goes back.
    fn hyper_enter(
        &self,
        streams: &Buf,
        mixes: &Buf,
        mix: &HyperMix<'_>,
        sizes: (usize, usize),
        input: &mut Buf,
        backs: &mut Buf,
    ) -> Result<(), KernelError>;

    /// Adds the sublayer's output `y` `[rows, hidden]` back to the streams.
    fn hyper_leave(&self, streams: &mut Buf, backs: &Buf, y: &Buf, sizes: (usize, usize)) -> Result<(), KernelError>;

    /// The mix of the streams that the output matrix sees, `[rows, hidden]`; `mixes` is `[rows, STREAMS]`.
    fn hyper_head(
        &self,
        streams: &Buf,
        mixes: &Buf,
        mix: &HyperOut<'_>,
        sizes: (usize, usize),
        out: &mut Buf,
    ) -> Result<(), KernelError>;
}
