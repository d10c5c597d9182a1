//! The face of a model: batches of chunks in, rows of logits out.

use kvdock_kernels::KvPool;

use crate::{ModelError, ModelSpec};

/// Which positions of a chunk want logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// None: the chunk only fills the cache.
    None,
    /// The last position of the chunk: one row.
    Last,
    /// Every position of the chunk: one row each.
    All,
}

/// The next tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct SeqChunk<'a> {
    /// Token ids, at least one, each below the vocabulary size.
    pub tokens: &'a [u32],
    /// Absolute position of `tokens[0]`. Positions `0..start` must already be in the pool.
    pub start: u32,
    /// Page table of the sequence: `pages[i]` holds the positions `i * page_tokens ..`. It must
    /// cover `start + tokens.len()` positions. Pages that this chunk writes belong to no other
    /// chunk of the batch; pages wholly below `start` may be shared.
    pub pages: &'a [u32],
    /// Which positions want logits.
    pub logits: Want,
}

/// One step of the engine: chunks of many sequences, of any lengths.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// The chunks, each of a different sequence.
    pub seqs: &'a [SeqChunk<'a>],
}

/// Rows of logits, in order of the chunks and of the positions inside them.
///
/// Keep one and hand it to every pass: its memory is used again.
#[derive(Debug, Default, Clone)]
pub struct Logits {
    values: Vec<f32>,
    vocab: usize,
}

impl Logits {
    /// No rows yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.values.len().checked_div(self.vocab).unwrap_or(0)
    }

    /// Values of a row: the model's vocabulary size. 0 before the first pass.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Row `index`, one f32 a token, or `None` past the last row.
    pub fn row(&self, index: usize) -> Option<&[f32]> {
        let begin = index.checked_mul(self.vocab)?;
        self.values.get(begin..begin.checked_add(self.vocab)?)
    }

    /// As [`Logits::row`], to be changed in place by penalties and biases.
    pub fn row_mut(&mut self, index: usize) -> Option<&mut [f32]> {
        let begin = index.checked_mul(self.vocab)?;
        self.values.get_mut(begin..begin.checked_add(self.vocab)?)
    }

    /// Makes room for `rows` rows of `vocab` values and hands out the memory. For models.
    pub fn reset(&mut self, rows: usize, vocab: usize) -> &mut [f32] {
        self.vocab = vocab;
        self.values.clear();
        self.values.resize(rows * vocab, 0.0);
        &mut self.values
    }
}

/// Called by a forward pass between layers, on the thread that runs it.
pub trait LayerHooks {
    /// Before `layer` reads or writes the KV pool. It may wait, for example until the pages of
    /// that layer have arrived; an error stops the pass, and the pages of its chunks are then
    /// undefined from `start` on.
    fn before_layer(&self, layer: usize) -> Result<(), ModelError> {
        let _ = layer;
        Ok(())
    }
}

/// Hooks that do nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoHooks;

impl LayerHooks for NoHooks {}

/// A model that is ready to run.
pub trait Model: Send + Sync {
    /// What the model is.
    fn spec(&self) -> &ModelSpec;

    /// Runs `batch`: writes K and V of every chunk into its pages of `pool`, attends over positions
    /// `0..start + len`, and puts the wanted rows into `logits`.
    ///
    /// The values of a row depend on the tokens of its sequence alone: on a CPU device they are
    /// the same bit for bit however the sequence was cut into chunks, whatever else was in the
    /// batch, and wherever its pages lie. New K and V are rounded to the pool's type before
    /// anything attends to them.
    ///
    /// Several passes may run at the same time when no page is written by one of them and used by another.
    ///
    /// # Errors
    /// A batch that breaks a rule of [`SeqChunk`], a pool of another geometry, a hook or a kernel
    /// that failed. The pages of the chunks are then undefined from `start` on.
    fn forward(
        &self,
        batch: &Batch<'_>,
        pool: &dyn KvPool,
        hooks: &dyn LayerHooks,
        logits: &mut Logits,
    ) -> Result<(), ModelError>;
}
