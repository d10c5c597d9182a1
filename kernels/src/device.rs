//! The face that every compute device shows: handles, and operations on them.
//!
//! Handles are opaque. A handle works only with the device that made it; another device answers
//! [`KernelError::ForeignHandle`]. Activations are f32 on every device.
//!
//! Operations take effect in the order in which they are called. A device may run them later
//! than the call (on a stream of its own); [`Device::read`] and [`Device::synchronize`] wait for
//! what was called before them. A shape error is reported by the call itself; a failure of the
//! device itself may be reported by a later call.

use std::sync::Arc;

use crate::error::KernelError;
use crate::format::WeightFormat;
use crate::handle::handle;
use crate::kv::{KvPool, KvSpec};
use crate::ops::{ElementOps, ExpertOps, RowOps, StateOps};
use crate::rope::RopeSpec;

/// Rows and columns of a weight matrix: `rows` output features, `cols` input features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixShape {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

handle! {
    /// An array of f32 in the memory of a device. Rows lie one after another without a gap; the
    /// operation says how wide a row is. A buffer may be longer than an operation needs, so a
    /// model allocates its work buffers once for the largest chunk.
    Buf {
        /// Elements (f32) that the buffer holds.
        len: usize,
    }
}

handle! {
    /// A weight matrix in the memory of a device, packed for that device.
    Weight {
        /// Output features (rows) and input features (columns).
        shape: MatrixShape,
        /// The format the weight was uploaded in.
        format: WeightFormat,
    }
}

handle! {
    /// Cosines and sines of one rotary embedding; layers may share it.
    Rope {
        /// Rotated dimensions of a head.
        dim: usize,
        /// Positions it was made for: 0 up to this, exclusive.
        max_positions: usize,
    }
}

handle! {
    /// Which rows of a step belong to which sequence, at which positions, on which pages. Made
    /// once for a step and used by all its layers.
    Plan {
        /// Rows of the step: the sum of the lengths of its sequences.
        rows: usize,
    }
}

impl Buf {
    /// Whether the buffer holds no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// A weight matrix as a file holds it.
#[derive(Debug, Clone, Copy)]
pub struct WeightData<'a> {
    /// The tensor's name, for errors.
    pub name: &'a str,
    /// Output features (rows) and input features (columns). Of a GGUF tensor with dims
    /// `[i, o]` these are `o` and `i`.
    pub shape: MatrixShape,
    /// The element or block format of `bytes`.
    pub format: WeightFormat,
    /// Row-major, little-endian, rows without gaps: `rows * format.row_bytes(cols)` bytes.
    pub bytes: &'a [u8],
    /// If given, row `r` of the uploaded matrix is row `row_order[r]` of `bytes`. Must be a
    /// permutation of `0..rows`. Undoes the row permutation of GGUF's llama q and k weights.
    pub row_order: Option<&'a [u32]>,
}

impl WeightData<'_> {
    /// Bytes of a row, once shape, format, bytes and order have been found to fit together. For implementers of [`Device`].
    ///
    /// # Errors
    /// What does not fit.
    pub fn checked_row_bytes(&self) -> Result<usize, KernelError> {
        let MatrixShape { rows, cols } = self.shape;
        let format = self.format;
        let refuse = |reason: String| KernelError::Weight { name: self.name.to_owned(), reason };
        if rows == 0 || cols == 0 {
            return Err(refuse(format!("shape {rows} x {cols} is empty")));
        }
        let row_bytes = format.row_bytes(cols).ok_or_else(|| {
            refuse(format!(
                "{cols} columns are no whole number of {} blocks of {}",
                format.name(),
                format.block_elements()
            ))
        })?;
        if row_bytes.checked_mul(rows) != Some(self.bytes.len()) {
            return Err(refuse(format!(
                "{} bytes found, but {rows} rows of {row_bytes} bytes ({} x {cols}) expected",
                self.bytes.len(),
                format.name()
            )));
        }
        if let Some(order) = self.row_order {
            check_permutation(order, rows).map_err(refuse)?;
        }
        Ok(row_bytes)
    }

    /// Checks that the rows are `groups` matrices of one shape, in the file's order. For implementers of [`Device`].
    ///
    /// # Errors
    /// What does not fit.
    pub fn check_groups(&self, groups: usize) -> Result<(), KernelError> {
        if groups > 0 && self.shape.rows.is_multiple_of(groups) && self.row_order.is_none() {
            return Ok(());
        }
        let reason =
            format!("{} rows, in the order of the file, are expected to be {groups} matrices", self.shape.rows);
        Err(KernelError::Weight { name: self.name.to_owned(), reason })
    }
}

/// How weights of eight and four bits are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NarrowFormat {
    /// e4m3, with a scale for each block of 128 rows and 128 columns.
    Fp8,
    /// e2m1, two values a byte, the low half first, with a power of two for each 32 values of a row.
    Mxfp4,
}

/// Scales of weights of eight and four bits, block by block in order of rows.
#[derive(Debug, Clone, Copy)]
pub enum NarrowScales<'a> {
    /// Any numbers.
    Floats(&'a [f32]),
    /// Powers of two as ue8m0.
    Powers(&'a [u8]),
}

/// A weight matrix of eight or four bits as a checkpoint holds it.
#[derive(Debug, Clone, Copy)]
pub struct NarrowData<'a> {
    /// The tensor's name, for errors.
    pub name: &'a str,
    /// Output features (rows) and input features (columns).
    pub shape: MatrixShape,
    /// How its values are kept.
    pub format: NarrowFormat,
    /// Row-major, rows without gaps.
    pub bytes: &'a [u8],
    /// Of each block.
    pub scales: NarrowScales<'a>,
}

impl NarrowData<'_> {
    /// Checks that shape, bytes and scales fit together. For implementers of [`Device`].
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(&self) -> Result<(), KernelError> {
        let MatrixShape { rows, cols } = self.shape;
        let refuse = |reason: String| Err(KernelError::Weight { name: self.name.to_owned(), reason });
        let (bytes, scales) = match self.format {
            NarrowFormat::Fp8 => (rows.checked_mul(cols), rows.div_ceil(128).checked_mul(cols.div_ceil(128))),
            NarrowFormat::Mxfp4 if cols.is_multiple_of(32) => (rows.checked_mul(cols / 2), rows.checked_mul(cols / 32)),
            NarrowFormat::Mxfp4 => return refuse(format!("{cols} columns are no whole number of blocks of 32")),
        };
        let found = match self.scales {
            NarrowScales::Floats(scales) => scales.len(),
            NarrowScales::Powers(scales) => scales.len(),
        };
        if rows == 0 || cols == 0 || bytes != Some(self.bytes.len()) || scales != Some(found) {
            let len = self.bytes.len();
            return refuse(format!("{len} bytes and {found} scales are no {rows} x {cols} of {:?}", self.format));
        }
        if self.format == NarrowFormat::Mxfp4 && matches!(self.scales, NarrowScales::Floats(_)) {
            return refuse("mxfp4 has powers of two as scales".to_owned());
        }
        Ok(())
    }
}

/// What the choice of a token depends on beside its logits.
#[derive(Debug, Clone, Copy)]
pub struct SampleRow<'a> {
    /// Divides logits; 0 takes the largest, of equal ones the lowest token.
    pub temperature: f32,
    /// Tokens that are kept at most; 0 for all.
    pub top_k: u32,
    /// Share of the probability that is kept; 1 for all.
    pub top_p: f32,
    /// Least probability of a kept token as a share of the likeliest one's; 0 for all.
    pub min_p: f32,
    /// In [0, 1): where the draw falls.
    pub uniform: f64,
    /// Frequency, presence and repetition penalty: the first times the count, and the second, are subtracted; what is above 0 is
    /// then divided by the third, the rest multiplied with it.
    pub penalties: [f32; 3],
    /// Tokens that have penalties, each once, with their counts.
    pub counts: &'a [(u32, u32)],
    /// Added to logits of tokens, each token once; minus infinity masks.
    pub biases: &'a [(u32, f32)],
}

/// What came of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sampled {
    /// This token.
    Token(u32),
    /// A logit is no number.
    NotANumber,
    /// All logits are minus infinity.
    NothingLeft,
}

fn check_permutation(order: &[u32], rows: usize) -> Result<(), String> {
    if order.len() != rows {
        return Err(format!("row order has {} entries for {rows} rows", order.len()));
    }
    let mut seen = vec![false; rows];
    for (to, from) in order.iter().enumerate() {
        match seen.get_mut(*from as usize) {
            Some(s) if !*s => *s = true,
            Some(_) => return Err(format!("row order names row {from} twice")),
            None => return Err(format!("row order at {to} names row {from} of {rows}")),
        }
    }
    Ok(())
}

/// The rows that one sequence has in a step.
#[derive(Debug, Clone, Copy)]
pub struct SeqSpan<'a> {
    /// Absolute position of the sequence's first row in this step.
    pub start: u32,
    /// Rows (new tokens) in this step; at least one.
    pub len: u32,
    /// Page table from position 0: `pages[p / page_tokens]` holds position `p`. Must cover
    /// `start + len` tokens; more is fine. Pages that hold new rows must not be shared with
    /// another sequence of the step.
    pub pages: &'a [u32],
}

/// One matrix product of [`Device::linear`].
pub struct Projection<'a> {
    /// `[rows, cols]`, cols being the width of the input.
    pub weight: &'a Weight,
    /// Added to each row of the result; `weight.rows` long.
    pub bias: Option<&'a Buf>,
    /// `[step rows, weight.rows]`.
    pub out: &'a mut Buf,
}

/// How attention is computed.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSpec<'a> {
    /// Query heads; a multiple of the pool's KV heads. Query head `h` reads KV head
    /// `h / (heads / kv_heads)`.
    pub heads: usize,
    /// Factor on the scores, usually `head_dim_k^-0.5`.
    pub scale: f32,
    /// If given, a query at position `p` sees positions above `p - window` only (itself counted,
    /// so `window` keys at most). At least 1. Pages whose last position lies before the first
    /// one seen, rounded down to a multiple of 64, are not read.
    pub window: Option<u32>,
    /// If given, one logit a query head (`heads` long) that takes part in the softmax without a
    /// value.
    pub sinks: Option<&'a Buf>,
}

/// The heads of new rows, before they are attended to ([`Device::heads_enter`]).
#[derive(Debug)]
pub struct NewHeads<'a> {
    /// Queries, `[rows, heads * head_dim_k]`; they are left normed and rotated.
    pub q: &'a mut Buf,
    /// Keys, `[rows, kv_heads * head_dim_k]`; what they are afterwards is not said.
    pub k: &'a mut Buf,
    /// Values, `[rows, kv_heads * head_dim_v]`.
    pub v: &'a Buf,
    /// Query heads.
    pub heads: usize,
    /// Weights of the norm of each query head, `[head_dim_k]`.
    pub q_norm: Option<&'a Buf>,
    /// The same of key heads.
    pub k_norm: Option<&'a Buf>,
    /// What is added to the mean square.
    pub eps: f32,
    /// The rotary embedding.
    pub rope: &'a Rope,
}

/// A compute device: memory, and the operations that a transformer is made of.
///
/// `rows` is always the number of rows (tokens) to work on. Widths follow from the weights or
/// are given. An input may be longer than needed. Nothing is written beyond the rows asked for.
pub trait Device: ElementOps + ExpertOps + RowOps + StateOps + Send + Sync {
    /// What the device is, for people: `"cpu (avx512, 2 threads)"`.
    fn name(&self) -> &str;

    /// Names the arithmetic. Cached pages and golden files made under one id are bit for bit
    /// valid under the same id only.
    fn numerics_id(&self) -> &str;

    /// What kind of device it is, as `engine.device` names it.
    fn kind(&self) -> &'static str {
        "cpu"
    }

    /// Bytes of the device's own memory that are free now, and all of them; `None` for a device that computes in host memory.
    fn own_memory(&self) -> Option<(u64, u64)> {
        None
    }

    /// Waits until everything that was called before is done.
    fn synchronize(&self) -> Result<(), KernelError>;

    /// A buffer of `len` f32, zeroed.
    fn alloc(&self, len: usize) -> Result<Buf, KernelError>;

    /// Copies `src` into `dst` from element `offset` on.
    fn write(&self, dst: &mut Buf, offset: usize, src: &[f32]) -> Result<(), KernelError>;

    /// Copies elements of `src` from `offset` on into all of `dst`, after waiting for what was
    /// called before.
    fn read(&self, src: &Buf, offset: usize, dst: &mut [f32]) -> Result<(), KernelError>;

    /// A buffer that holds `values`; for norm weights and biases.
    fn upload(&self, values: &[f32]) -> Result<Buf, KernelError> {
        let mut buf = self.alloc(values.len())?;
        self.write(&mut buf, 0, values)?;
        Ok(buf)
    }

    /// Checks and packs a weight matrix. The device keeps no reference to `weight.bytes`.
    fn upload_weight(&self, weight: &WeightData<'_>) -> Result<Weight, KernelError>;

    /// Takes a weight matrix of eight or four bits as it is, for [`Device::linear`] and experts; `None` where a device computes with wider
    /// weights only, which the caller makes of it.
    fn upload_narrow(&self, weight: &NarrowData<'_>) -> Result<Option<Weight>, KernelError> {
        let _ = weight;
        Ok(None)
    }

    /// Whether [`Device::sample`] chooses tokens; else the host does.
    fn samples(&self) -> bool {
        false
    }

    /// Chooses a token for each row of `logits` `[rows.len(), vocab]`, which are left changed. A row's order is: penalties,
    /// biases, temperature, softmax, then `top_k`, `top_p` and `min_p` judged on one sorted distribution, then the draw.
    ///
    /// # Errors
    /// A device that chooses no tokens, rows or tokens that are not there.
    fn sample(&self, logits: &mut Buf, vocab: usize, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, KernelError> {
        let _ = (logits, vocab, rows);
        Err(KernelError::Device { op: "sample", reason: "this device chooses no tokens".to_owned() })
    }

    /// Makes the tables of a rotary embedding.
    fn upload_rope(&self, spec: &RopeSpec) -> Result<Rope, KernelError>;

    /// A KV pool. Its memory reads as zero and costs nothing until it is written.
    fn alloc_kv_pool(&self, spec: KvSpec) -> Result<Arc<dyn KvPool>, KernelError>;

    /// Checks and fixes the rows, positions and pages of a step over `pool`. Rows of the step
    /// are the sequences' rows one after another.
    fn plan(&self, pool: &dyn KvPool, seqs: &[SeqSpan<'_>]) -> Result<Plan, KernelError>;

    /// Whether [`Device::repeat`] keeps work and queues it again.
    fn repeats(&self) -> bool {
        false
    }

    /// Calls `work`, which calls operations of this device with the plan that it is given; that is `plan` or an equal one. A device may keep
    /// what `work` queues, and queue it again without calling `work` when it is asked with an equal `key` later, for another plan of as many rows
    /// over the same pool. So a caller gives the same key only for the same operations on the same handles, in which
    /// nothing but the plan and the contents of buffers has changed. `work` may be called, or not; it calls no operation that takes
    /// numbers from the host (`write`, `read`, `embed`, `gather_rows`), allocates nothing, and uploads nothing.
    fn repeat(
        &self,
        key: u64,
        plan: &Plan,
        work: &mut dyn FnMut(&Plan) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let _ = key;
        work(plan)
    }

    /// Whether [`Device::replay`] keeps work and queues it again.
    fn replays(&self) -> bool {
        false
    }

    /// Does `work`, which calls operations of this device. A device may call it several times, with an effect once: it sees what `work` would queue,
    /// and what it has kept of earlier calls under the same `key` it queues again, where that is the same but for numbers from the host (row numbers,
    /// positions, page tables) and the contents of buffers. So `work` makes all handles that hold such numbers anew each time (plans, indices, spans), lets
    /// go of them and of all its work space before it returns, allocates nothing but work space, reads nothing, and uploads nothing else.
    ///
    /// # Errors
    /// What `work` gives, failures of the device.
    fn replay(&self, key: u64, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<(), KernelError> {
        let _ = key;
        work()
    }

    /// `out[r, :] = table[ids[r], :]`, dequantised. `out` is `[ids.len(), table.cols]`.
    fn embed(&self, table: &Weight, ids: &[u32], out: &mut Buf) -> Result<(), KernelError>;

    /// `out[r, :] = x[indices[r], :]` for rows of `width` elements.
    fn gather_rows(&self, x: &Buf, width: usize, indices: &[u32], out: &mut Buf) -> Result<(), KernelError>;

    /// `out = x / sqrt(mean(x^2) + eps) * weight`, each row of `weight.len()` elements by itself.
    fn rms_norm(&self, x: &Buf, weight: &Buf, eps: f32, rows: usize, out: &mut Buf) -> Result<(), KernelError>;

    /// `x += delta`, then `out = rms_norm(x)`. The same bits as [`Device::add`] followed by
    /// [`Device::rms_norm`].
    fn add_rms_norm(
        &self,
        x: &mut Buf,
        delta: &Buf,
        weight: &Buf,
        eps: f32,
        rows: usize,
        out: &mut Buf,
    ) -> Result<(), KernelError>;

    /// RMS norm in place of each of the `heads` heads of each row; a head is `weight.len()`
    /// wide. Qwen3's q and k norm.
    fn head_rms_norm(&self, x: &mut Buf, weight: &Buf, eps: f32, rows: usize, heads: usize) -> Result<(), KernelError>;

    /// For each projection: `out = x · weightᵀ (+ bias)`. All projections read the same `x`
    /// (`[rows, cols]`); giving q, k and v, or gate and up, in one call saves time and changes
    /// no bit.
    fn linear(&self, x: &Buf, rows: usize, projections: &mut [Projection<'_>]) -> Result<(), KernelError>;

    /// Rotates `heads` heads of `head_dim` elements of each row of the plan, in place, by the
    /// rows' positions.
    fn rope(&self, rope: &Rope, plan: &Plan, x: &mut Buf, heads: usize, head_dim: usize) -> Result<(), KernelError>;

    /// `gate = silu(gate) * up`, for `len` elements.
    fn silu_mul(&self, gate: &mut Buf, up: &Buf, len: usize) -> Result<(), KernelError>;

    /// `x += delta`, for `len` elements.
    fn add(&self, x: &mut Buf, delta: &Buf, len: usize) -> Result<(), KernelError>;

    /// Rounds the plan's new keys `[rows, kv_heads * head_dim_k]` and values
    /// `[rows, kv_heads * head_dim_v]` to the pool's dtype and writes them to their pages.
    fn kv_write(&self, pool: &dyn KvPool, layer: usize, plan: &Plan, k: &Buf, v: &Buf) -> Result<(), KernelError>;

    /// Norms (where there are weights) and rotates queries and keys of the plan's rows, and writes keys and values to their pages. The same bits as
    /// [`Device::head_rms_norm`] and [`Device::rope`] of both and [`Device::kv_write`], which it does unless a device has something better. `k` is used up.
    fn heads_enter(&self, pool: &dyn KvPool, layer: usize, plan: &Plan, new: NewHeads<'_>) -> Result<(), KernelError> {
        let KvSpec { kv_heads, head_dim_k, .. } = *pool.spec();
        let NewHeads { q, k, v, heads, q_norm, k_norm, eps, rope } = new;
        let rows = plan.rows();
        if let Some(norm) = q_norm {
            self.head_rms_norm(q, norm, eps, rows, heads)?;
        }
        if let Some(norm) = k_norm {
            self.head_rms_norm(k, norm, eps, rows, kv_heads)?;
        }
        self.rope(rope, plan, q, heads, head_dim_k)?;
        self.rope(rope, plan, k, kv_heads, head_dim_k)?;
        self.kv_write(pool, layer, plan, k, v)
    }

    /// Causal attention of the plan's rows `q` `[rows, heads * head_dim_k]` over their
    /// sequences' pages of one layer; each row sees the positions up to its own. `out` is
    /// `[rows, heads * head_dim_v]`. The rows' own keys and values must have been written.
    fn attention(
        &self,
        pool: &dyn KvPool,
        layer: usize,
        plan: &Plan,
        q: &Buf,
        spec: &AttentionSpec<'_>,
        out: &mut Buf,
    ) -> Result<(), KernelError>;
}
